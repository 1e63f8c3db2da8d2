"""From norms to coefficients, without ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distclip.policy import decide_fixed


def _vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_groups_with_a_limit_are_clipped_by_their_own_norm() -> None:
    decision = decide_fixed(_vector(10.0, 3.0, 4.0), _vector(0, 0, 0), _vector(0, 0, 0), [2.0, None, None], 1.0, 2.0)
    assert decision.coefficients.tolist() == pytest.approx([0.2, 0.2, 0.2], rel=1e-6)
    assert decision.total_norm.item() == pytest.approx(125**0.5)
    assert bool(decision.clipped)


@pytest.mark.parametrize(("nan", "inf", "shown"), [(1, 0, math.nan), (0, 1, math.inf), (1, 1, math.nan)])
def test_one_bad_group_stops_all(nan: int, inf: int, shown: float) -> None:
    decision = decide_fixed(_vector(10.0, 3.0), _vector(nan, 0), _vector(inf, 0), [None, None], 1.0, 2.0)
    assert decision.total_norm.item() == pytest.approx(shown, nan_ok=True)
    assert decision.coefficients.tolist() == [1.0, 1.0]
    assert bool(decision.nonfinite)
    assert not bool(decision.clipped)


def test_by_rest_and_as_torch() -> None:
    rest = decide_fixed(_vector(5.0), _vector(1), _vector(0), [None], 1.0, 2.0, by_rest=True)
    assert (rest.total_norm.item(), rest.coefficients.item()) == (5.0, pytest.approx(0.2, rel=1e-6))
    torch_like = decide_fixed(_vector(5.0), _vector(0), _vector(1), [None], 1.0, 2.0, as_torch=True)
    assert torch_like.coefficients.item() == 0.0
    assert math.isnan(decide_fixed(_vector(5.0), _vector(1), _vector(0), [None], 1.0, 2.0, as_torch=True).coefficients)


@given(
    norm=st.floats(0, 1e300, allow_subnormal=False),
    limit=st.floats(1e-30, 1e300) | st.just(math.inf),
    norm_type=st.sampled_from([0.5, 1.0, 2.0, 3.0, math.inf]),
)
def test_a_coefficient_is_what_torch_would_use(norm: float, limit: float, norm_type: float) -> None:
    decision = decide_fixed(_vector(norm), _vector(0), _vector(0), [None], limit, norm_type)
    wanted = 1.0 if math.isinf(limit) else min(1.0, limit / (norm + 1e-6))
    assert decision.coefficients.item() == pytest.approx(wanted, rel=1e-12)
    assert decision.total_norm.item() == norm


@given(norms=st.lists(st.floats(0, 1e200), min_size=2, max_size=5), norm_type=st.sampled_from([1.0, 2.0, 3.0]))
def test_norms_of_groups_combine_without_overflow(norms: list[float], norm_type: float) -> None:
    count = len(norms)
    decision = decide_fixed(_vector(*norms), torch.zeros(count), torch.zeros(count), [None] * count, None, norm_type)
    largest = max(norms) or 1.0
    wanted = largest * math.fsum((norm / largest) ** norm_type for norm in norms) ** (1 / norm_type)
    assert decision.total_norm.item() == pytest.approx(wanted, rel=1e-9)
