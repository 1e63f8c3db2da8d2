"""Squares and products by NumKong, where it is installed: on one CPU thread, without a copy, faster than by torch.

torch has no reduction that reads half precision and adds in higher precision, and a call of one costs so much that
small gradients are copied together first; to multiply half precision by a factor in fp32 takes it a quarter longer.
NumKong (https://github.com/ashvardanian/NumKong, `pip install distclip[cpu]`) has kernels for all of these, picked for
the CPU at hand, and a call takes a third of a microsecond. It uses the calling thread only. So it is for what torch,
too, would do with one thread: ranges that are not long, and all ranges where torch has one thread, as `torchrun` gives
to each worker if OMP_NUM_THREADS does not say otherwise.

It reads and writes memory by address: callers hold the tensors until a function returns, and ask first whether it
`reaches` them.
"""

from __future__ import annotations

import importlib
import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

try:
    _numkong: Any = importlib.import_module("numkong")
except Exception:  # not installed, or not for this machine: torch's kernels will do
    _numkong = None

_PIECE = 1 << 22
"""Elements per call, which keeps Python's lock: about a millisecond."""

_ROW = 256
"""Elements of half precision that are added in fp32; their sums are added in fp64."""

_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

DTYPES = frozenset(_NAMES)
"""What can be read and written here."""


def reaches(tensor: Tensor) -> bool:
    """Whether the numbers that a CPU tensor shows are those at its address, one after the other.

    Not those of a subclass, which may have a collective under way; and a tensor may have numbers but no memory (what
    the derivative of `abs` has for one, all zeros).
    """
    plain = type(tensor) is Tensor and tensor.dtype in DTYPES and not tensor.is_neg() and tensor.is_contiguous()
    return plain and tensor.data_ptr() != 0


def squares(address: int, dtype: torch.dtype, numel: int) -> float:
    """Sum of the squares of the `numel` numbers that begin at an address.

    nan if one of them is nan, else inf if one is infinite, or if squares of half precision are beyond fp32.

    Example:
        >>> values = torch.tensor([3.0, 4.0])
        >>> squares(values.data_ptr(), values.dtype, 2) if works() else 25.0
        25.0
    """
    if numel > _PIECE:
        starts = range(0, numel, _PIECE)
        return math.fsum(
            squares(address + start * dtype.itemsize, dtype, min(_PIECE, numel - start)) for start in starts
        )
    name = _NAMES[dtype]
    rows = numel // _ROW if dtype is not torch.float32 else 0
    rest = numel - rows * _ROW
    total = 0.0
    if rest:
        view = _numkong.from_pointer(address + rows * _ROW * dtype.itemsize, rest, name)
        total = _numkong.moments(view)[1]
    if rows:
        matrix = _numkong.from_pointer(address, (rows, _ROW), name)
        total += _numkong.dot(matrix, matrix).sum()
    return total


def multiply_(address: int, dtype: torch.dtype, numel: int, factor: float) -> None:
    """Multiply the `numel` numbers that begin at an address by a number, in place.

    The factor is rounded to fp32 and the product once, to the numbers' dtype, as torch multiplies them by an fp32 0-d
    tensor: bit for bit, but for the payload of a nan.

    Example:
        >>> values = torch.tensor([3.0, 4.0]).bfloat16()
        >>> if works():
        ...     multiply_(values.data_ptr(), values.dtype, 2, 0.5)
        ... else:
        ...     values.mul_(0.5)
        >>> values
        tensor([1.5000, 2.0000], dtype=torch.bfloat16)
    """
    name = _NAMES[dtype]
    for start in range(0, numel, _PIECE):
        view = _numkong.from_pointer(address + start * dtype.itemsize, min(_PIECE, numel - start), name)
        _numkong.scale(view, alpha=factor, beta=-0.0, out=view)  # -0.0 is what can be added to -0.0 without a change


@lru_cache(maxsize=1)
def works() -> bool:
    """Whether NumKong is installed and its kernels for this CPU do what is taken for granted here."""
    if _numkong is None:
        return False
    try:
        return all(_is_exact(dtype) and _shows_nonfinite(dtype) and _rounds_once(dtype) for dtype in _NAMES)
    except Exception:  # another NumKong than this was written for
        return False


def _is_exact(dtype: torch.dtype) -> bool:
    """Whether few ones are lost beside a number just large enough, in fp32, to swallow each that is added to it."""
    values = torch.ones((64, _ROW), dtype=dtype, device="cpu")
    values[:, 0] = 2.0**12
    exact = 64 * (2.0**24 + (_ROW - 1))
    return abs(math.sqrt(_squares_of(values) / exact) - 1.0) < 1e-6


def _shows_nonfinite(dtype: torch.dtype) -> bool:
    found = []
    for position in (0, _ROW - 1, 2 * _ROW + 5):
        values = torch.ones(2 * _ROW + 6, dtype=dtype, device="cpu")
        values[position] = math.nan
        found.append(math.isnan(_squares_of(values)))
        values[position] = -math.inf
        found.append(_squares_of(values) == math.inf)
    return all(found)


def _rounds_once(dtype: torch.dtype) -> bool:
    """Whether products are those of torch: of half precision, for every number there is."""
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    patterns = torch.arange(1, 1 << 16, dtype=torch.int32, device="cpu")
    values = (patterns * 65537).to(bits).view(dtype)
    wanted = (values.float() * torch.tensor(0.7391234, dtype=torch.float32, device="cpu")).to(dtype)
    multiply_(values.data_ptr(), dtype, values.numel(), 0.7391234)
    return bool((wanted.view(bits).eq(values.view(bits)) | (wanted.isnan() & values.isnan())).all())


def _squares_of(values: Tensor) -> float:
    return squares(values.data_ptr(), values.dtype, values.numel())
