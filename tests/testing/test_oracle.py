"""The oracle's arithmetic against figures worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from distclip.testing import oracle


def arrays(*lists: list[float]) -> list[oracle.Array]:
    return [np.array(values, dtype=np.float64) for values in lists]


@pytest.mark.parametrize(
    ("gradients", "p", "wanted"),
    [
        (arrays([3.0, 0.0], [0.0, -4.0]), 2.0, 5.0),
        (arrays([3.0, -4.0]), 1.0, 7.0),
        (arrays([3.0, -4.0, 5.0]), 3.0, 6.0),  # 27 + 64 + 125 = 216
        (arrays([1.0, 4.0]), 0.5, 9.0),  # (1 + 2) squared
        (arrays([3.0], [-4.0]), math.inf, 4.0),
        (arrays([], [5.0]), math.inf, 5.0),
        (arrays([]), 2.0, 0.0),
        ([], 2.0, 0.0),
        (arrays([0.0, 0.0]), 1.0, 0.0),
        (arrays([3e200, 4e200]), 2.0, 5e200),  # the squares would overflow
        (arrays([3e-200, 4e-200]), 2.0, 5e-200),  # the squares would be 0
        (arrays([1.0] * 4), 400.0, 4 ** (1 / 400)),
        (arrays([1.0, math.inf]), 2.0, math.inf),
        (arrays([1.0, -math.inf]), math.inf, math.inf),
        ([np.array([3 + 4j, 12.0])], 2.0, 13.0),
        ([np.array([3 + 4j, 1.0])], math.inf, 5.0),
    ],
)
def test_norm(gradients: list[oracle.Array], p: float, wanted: float) -> None:
    assert oracle.norm(gradients, p) == pytest.approx(wanted, rel=1e-15)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, complex(math.inf, math.nan)])
def test_nan_wins_over_inf(bad: complex, p: float) -> None:
    assert math.isnan(oracle.norm([*arrays([math.inf, 1.0]), np.array([bad])], p))


@pytest.mark.parametrize("p", [0.0, -1.0, math.nan])
def test_norm_refuses(p: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        oracle.norm(arrays([1.0]), p)


@pytest.mark.parametrize(
    ("total", "max_norm", "wanted"),
    [(5.0, 1.0, 1 / 5.000001), (0.5, 1.0, 1.0), (1.0, 1.0, 1 / 1.000001), (0.0, 1.0, 1.0), (5.0, math.inf, 1.0)],
)
def test_coefficient(total: float, max_norm: float, wanted: float) -> None:
    assert oracle.coefficient(total, max_norm) == wanted


def test_clipped_keeps_its_arguments_and_their_shape() -> None:
    gradients = {"a": np.array([[3.0, 0.0]]), "b": np.array([-4.0])}
    found = oracle.clipped(gradients, 1.0, 2.0)
    assert list(found) == ["a", "b"]
    np.testing.assert_allclose(found["a"], [[3 / 5.000001, 0.0]], rtol=1e-15)
    np.testing.assert_allclose(found["b"], [-4 / 5.000001], rtol=1e-15)
    assert gradients["b"].tolist() == [-4.0]
    as_list = oracle.clipped(list(gradients.values()), 1.0, 2.0)
    assert [array.tolist() for array in as_list] == [array.tolist() for array in found.values()]


def test_clipping_a_nonfinite_norm_tells() -> None:
    assert math.isnan(oracle.coefficient(math.nan, 1.0))
    assert oracle.coefficient(math.inf, 1.0) == 0.0
