"""Sums of squares of half precision numbers on the CPU, in fp32 and at the speed of memory, by one of torch's kernels.

torch's reductions round their result to the precision of the input, and converting the input first costs twice as much
as reading it. The backward pass of group norm has to sum the products of two half precision tensors over rows into fp32
weights: with the gradient as both tensors, mean 0 and deviation 1, those are the sums wanted, in one pass
(aten/src/ATen/native/cpu/group_norm_kernel.cpp). `half_kernel_works` makes sure of that once in a process.
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

_kernel = torch.ops.aten.native_group_norm_backward.default
_WANTED = (False, True, False)  # of the gradients of input, weight and bias


def half_squares(matrix: Tensor) -> Tensor:
    """Sums of squares of the rows of a contiguous half precision matrix [rows, row], as fp32 [rows].

    Example:
        >>> half_squares(torch.full((2, 4), 0.5, dtype=torch.bfloat16))
        tensor([1., 1.])
    """
    rows, row = matrix.shape
    mean, deviation, weight = _constants(rows)
    found = _kernel(matrix, matrix, mean, deviation, weight, 1, rows, row, 1, _WANTED)
    return cast(Tensor, found[1])


@lru_cache(maxsize=64)
def _constants(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return _full((1, 1), 0.0), _full((1, 1), 1.0), _full((rows,), 1.0)


def _full(size: tuple[int, ...], value: float) -> Tensor:
    return torch.full(size, value, dtype=torch.float32, device="cpu")


@lru_cache(maxsize=1)
def half_kernel_works() -> bool:
    """Whether this torch's group norm does what `half_squares` takes for granted."""
    values = torch.full((2, 1024), 0.5, dtype=torch.bfloat16, device="cpu")
    try:
        squares = half_squares(values)
    except RuntimeError:
        return False
    return squares.dtype is torch.float32 and squares.tolist() == [256.0, 256.0]
