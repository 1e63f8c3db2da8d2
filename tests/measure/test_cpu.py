"""Half precision on the CPU: torch's group norm kernel sums squares as expected; without it the result is the same."""

from __future__ import annotations

import math

import pytest
import torch

from distclip.measure import cpu, measure
from distclip.measure.halves import half_kernel_works, half_squares

HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_squares_are_summed_in_fp32(dtype: torch.dtype) -> None:
    # The kernel is worth its obscurity while it is this exact. If torch changes it, `half_kernel_works` must say no.
    assert half_kernel_works()
    values = torch.randn(3, 512, generator=torch.Generator().manual_seed(3)).to(dtype)
    squares = half_squares(values)
    wanted = values.to(torch.float64).square().sum(dim=1)
    assert squares.dtype is torch.float32
    torch.testing.assert_close(squares.to(torch.float64), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("numel", [1, 511, 512, 513, 70_001, 1_100_000])
@pytest.mark.parametrize("special", [None, math.nan, math.inf, 3e38, 0.0])
def test_without_that_kernel_the_numbers_are_the_same(
    dtype: torch.dtype, numel: int, special: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (numel, 5, 40_000)]
    if special is not None:
        gradients[0][-1] = min(special, torch.finfo(dtype).max) if math.isfinite(special) else special
    with_kernel = measure(gradients, 2.0)
    monkeypatch.setattr(cpu, "half_kernel_works", lambda: False)
    without = measure(gradients, 2.0)
    assert without[0].item() == pytest.approx(with_kernel[0].item(), rel=1e-6)
    assert torch.equal(without[1:], with_kernel[1:])
