"""count_nonfinite and the fp64 path itself, on numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from distclip.measure import count_nonfinite
from distclip.measure.exact import exact

CPU = torch.device("cpu")


def test_counting() -> None:
    nan, inf = math.nan, math.inf
    assert count_nonfinite(torch.tensor([1.0, nan, inf, -inf, nan, 3e38])) == (2, 2)
    assert count_nonfinite(torch.tensor([complex(inf, nan), complex(nan, 0), complex(1, -inf)])) == (2, 1)
    assert count_nonfinite(torch.tensor([nan]).expand(7)) == (7, 0)
    assert count_nonfinite(torch.full((300, 500), inf, dtype=torch.float16)[:, ::2].t()) == (0, 75_000)
    assert count_nonfinite(torch.empty(0)) == (0, 0)
    assert count_nonfinite(torch.tensor(nan, requires_grad=True)) == (1, 0)


def test_counting_sums_sparse_duplicates_first() -> None:
    gradient = torch.sparse_coo_tensor(
        [[0, 0, 1, 2]], [math.inf, -math.inf, math.inf, 1.0], (4,), check_invariants=True
    )
    assert count_nonfinite(gradient) == (1, 1)


@pytest.mark.parametrize(
    ("norm_type", "scale", "amount"), [(2.0, 1.0, 29.0), (2.0, 2.0, 7.25), (1.0, 1.0, 9.0), (3.0, 1.0, 99.0)]
)
def test_powers_of_finite_elements(norm_type: float, scale: float, amount: float) -> None:
    gradients = [torch.tensor([2.0, -3.0, math.nan]), torch.tensor([-math.inf, 4.0], dtype=torch.float64)]
    found = exact(gradients, norm_type, CPU, scale)
    assert [value.item() for value in found] == [amount, 1.0, 1.0, 4.0]
    assert all(value.dtype is torch.float64 for value in found)


def test_the_largest_for_the_inf_norm() -> None:
    gradients = [torch.tensor([2.0, -3.0, math.nan]), torch.tensor([-math.inf])]
    assert [value.item() for value in exact(gradients, math.inf, CPU)] == [3.0, 1.0, 1.0, 3.0]
