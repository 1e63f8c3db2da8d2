"""Sums of squares by NumKong, where it is installed: on one CPU thread, without a copy, faster than torch's kernels.

torch has no reduction that reads half precision and adds in higher precision, and a call of one costs so much that
small gradients are copied together first. NumKong (https://github.com/ashvardanian/NumKong, `pip install
distclip[cpu]`) has kernels for both, picked for the CPU at hand, and a call takes a third of a microsecond. It uses the
calling thread only. So it is for what torch, too, would read with one thread: ranges that are not long, and all ranges
where torch has one thread, as `torchrun` gives to each worker if OMP_NUM_THREADS does not say otherwise.

It reads memory by address: callers hold the gradients, on the CPU and contiguous, until `squares` returns. A tensor may
have numbers but no memory (what the derivative of `abs` has for one, all zeros): those are not for it.
"""

from __future__ import annotations

import importlib
import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from distclip.measure.values import ROW

try:
    _numkong: Any = importlib.import_module("numkong")
except Exception:  # not installed, or not for this machine: torch's kernels will do
    _numkong = None

_PIECE = 1 << 22
"""Elements of fp32 per call, which keeps Python's lock: about a millisecond."""

_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

DTYPES = frozenset(_NAMES)
"""What `squares` takes."""


def squares(address: int, dtype: torch.dtype, numel: int) -> float:
    """Sum of the squares of the `numel` contiguous numbers that begin at an address on the CPU, which is not 0.

    nan if one of them is nan, else inf if one is infinite, or if squares of half precision are beyond fp32.

    Example:
        >>> values = torch.tensor([3.0, 4.0])
        >>> squares(values.data_ptr(), values.dtype, 2) if works() else 25.0
        25.0
    """
    name = _NAMES[dtype]
    if name == "f32":
        if numel <= _PIECE:
            return _flat(address, numel, name)
        starts = range(0, numel, _PIECE)
        return math.fsum(_flat(address + 4 * start, min(_PIECE, numel - start), name) for start in starts)
    rows = numel // ROW
    rest = numel - rows * ROW
    total = _flat(address + 2 * rows * ROW, rest, name) if rest else 0.0
    if rows:
        matrix = _numkong.from_pointer(address, (rows, ROW), name)
        total += _numkong.dot(matrix, matrix).sum()
    return total


def _flat(address: int, numel: int, name: str) -> float:
    found: tuple[float, float] = _numkong.moments(_numkong.from_pointer(address, numel, name))
    return found[1]


@lru_cache(maxsize=1)
def works() -> bool:
    """Whether NumKong is installed and its kernels for this CPU do what `squares` takes for granted."""
    if _numkong is None:
        return False
    try:
        return all(_is_exact(dtype) and _shows_nonfinite(dtype) for dtype in _NAMES)
    except Exception:  # another NumKong than this was written for
        return False


def _is_exact(dtype: torch.dtype) -> bool:
    """Whether few ones are lost beside a number just large enough, in fp32, to swallow each that is added to it."""
    values = torch.ones((64, ROW), dtype=dtype, device="cpu")
    values[:, 0] = 2.0**12
    exact = 64 * (2.0**24 + (ROW - 1))
    return abs(math.sqrt(_squares_of(values) / exact) - 1.0) < 1e-6


def _shows_nonfinite(dtype: torch.dtype) -> bool:
    found = []
    for position in (0, ROW - 1, 2 * ROW + 5):
        values = torch.ones(2 * ROW + 6, dtype=dtype, device="cpu")
        values[position] = math.nan
        found.append(math.isnan(_squares_of(values)))
        values[position] = -math.inf
        found.append(_squares_of(values) == math.inf)
    return all(found)


def _squares_of(values: Tensor) -> float:
    return squares(values.data_ptr(), values.dtype, values.numel())
