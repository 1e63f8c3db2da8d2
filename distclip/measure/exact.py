"""The slow and certain way to measure: fp64 throughout, element by element, nonfinite elements counted.

Used where the fast way's sum says that something is up (a nan, an infinity, an overflow or underflow of fp32), and
for the rare gradients that have no fast way. Works in small blocks, never with a full-size copy, and never waits for
a device: results stay 0-d tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from distclip.measure.values import blocks, readable

_BLOCK_CPU = 1 << 16  # fp64 temporaries of 512 KiB stay in the second level cache
_BLOCK_DEVICE = 1 << 22  # few launches

# A power below 2^-1022, the smallest normal fp64 number, may be lost. N elements lose at most N * 2^-1022, which is
# at most 2^-30 of the sum unless the sum is below N * 2^-992.
FP64_FLOOR = 2.0**-992


class Exact(NamedTuple):
    """What `exact` found, as fp64 0-d tensors on the gradients' device."""

    amount: Tensor
    """Sum over finite elements of (|g| / scale)^p, or the largest finite |g| for p = inf."""
    nan: Tensor
    inf: Tensor
    largest: Tensor
    """Largest finite |g|."""


def exact(gradients: Iterable[Tensor], norm_type: float, device: torch.device, scale: float = 1.0) -> Exact:
    """Measure gradients of one device in fp64."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    amount, nan, inf, largest = zero, zero, zero, zero
    size = _BLOCK_CPU if device.type == "cpu" else _BLOCK_DEVICE
    for gradient in gradients:
        values, repeat = readable(gradient)
        for block in blocks(values, size):
            magnitude = _magnitude(block)
            # Counted by arithmetic, because comparing takes the CPU three times as long: finite * 0 is 0, all else nan.
            nans = magnitude.clamp(max=1.0).mul_(0.0).nan_to_num_(1.0).sum()
            nonfinite = (magnitude * 0.0).nan_to_num_(1.0).sum()
            nan = nan + nans * repeat
            inf = inf + (nonfinite - nans) * repeat
            magnitude.nan_to_num_(0.0, 0.0, 0.0)
            largest = torch.maximum(largest, magnitude.amax())
            if not math.isinf(norm_type):
                if scale != 1.0:
                    magnitude.div_(scale)
                amount = amount + magnitude.pow_(norm_type).sum() * repeat
    return Exact(largest if math.isinf(norm_type) else amount, nan, inf, largest)


def flagged(found: Exact, numel: int, norm_type: float) -> Tensor:
    """What `measure` returns, from an exact measurement of `numel` elements."""
    amount = found.amount
    flag = torch.zeros_like(amount)
    if not math.isinf(norm_type):
        lost = (amount < numel * FP64_FLOOR) & (found.largest > 0)
        flag = (amount.isinf() | lost).to(torch.float64)
    return torch.stack((amount, found.nan, found.inf, flag))


def count_nonfinite(gradient: Tensor) -> tuple[int, int]:
    """How many elements of one gradient are nan, and how many are infinite.

    A complex element is nan if either part is, also where the other part is infinite. Duplicates of a sparse gradient
    are summed first. Waits for the device: this is for naming culprits after the fact, not for every step.

    Example:
        >>> count_nonfinite(torch.tensor([1.0, float("nan"), -float("inf")]))
        (1, 1)
    """
    with torch.no_grad():
        found = exact([gradient], math.inf, gradient.device)
        return int(found.nan), int(found.inf)


def _magnitude(block: Tensor) -> Tensor:
    """|block| as a fresh fp64 tensor."""
    if not block.is_complex():
        return block.to(torch.float64, copy=True).abs_()
    real, imaginary = torch.view_as_real(block).to(torch.float64).unbind(-1)
    # hypot(inf, nan) is inf: bring the nan back
    return torch.hypot(real, imaginary) + real.clamp(-1.0, 1.0) * 0.0 + imaginary.clamp(-1.0, 1.0) * 0.0
