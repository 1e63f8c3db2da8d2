"""What a gradient's numbers are, and where they lie.

A gradient need not be a plain contiguous tensor. It can be sparse, complex, transposed, or an expanded view that
shows one number many times. The rest of `distclip.measure` and `distclip.apply` wants flat memory. The two functions
here translate: `readable` for measuring (every element counts as often as the gradient shows it) and `writable` for
scaling in place (every number in memory is touched once). Neither copies, except that a sparse gradient is coalesced
before it is measured.

`blocks` cuts a tensor of any shape into small views, so that work which needs a temporary never needs a large one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_COMPRESSED = frozenset((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))

HALF = frozenset((torch.bfloat16, torch.float16))
REAL = HALF | {torch.float32, torch.float64}

ROW = 256
"""Elements accumulated in fp32. On CPU they are spread over 8 accumulators or more, so each adds at most 32 squares."""


def readable(gradient: Tensor) -> tuple[Tensor, int]:
    """The numbers of one gradient, for reading.

    Args:
        gradient: a local tensor, dense or sparse, real floating point or complex, of any shape.

    Returns:
        A tensor and how often each of its elements counts. The tensor is a view of the gradient, one-dimensional and
        contiguous where the memory allows it. Duplicates of a sparse gradient are summed first, as the optimizer will
        do.

    Raises:
        TypeError: not floating point, or a layout without readable values (mkldnn, nested).
    """
    if not (gradient.is_floating_point() or gradient.is_complex()):
        raise TypeError(f"a gradient must be floating point or complex, got {gradient.dtype}")
    if gradient.layout is torch.sparse_coo:
        values = gradient.coalesce().values()
    elif gradient.layout in _COMPRESSED:
        values = gradient.values()
    else:
        values = _strided(gradient)
    values, repeat = _memory(values)
    return _flatten(values), repeat


def writable(gradient: Tensor) -> Tensor:
    """The numbers of one gradient, for writing: a view in which each number in memory appears once.

    Entries of an uncoalesced sparse gradient are all there: multiplying them multiplies their sum. Zeros without memory
    are not: no kernel would write them.

    Raises:
        TypeError: as for `readable`.
    """
    if gradient.layout is torch.sparse_coo:
        values = gradient._values()  # the public values() refuses an uncoalesced tensor
    elif gradient.layout in _COMPRESSED:
        values = gradient.values()
    else:
        values = _strided(gradient)
    if not has_memory(values):
        return torch.empty(0, dtype=values.dtype, device=values.device)
    return _flatten(_memory(values)[0])


def has_memory(values: Tensor) -> bool:
    """Whether numbers can be written: the zeros that the derivative of `abs` has for one are kept as a mere flag."""
    return not values._is_zerotensor()


def blocks(values: Tensor, size: int) -> Iterator[Tensor]:
    """Cut a tensor into views of at most `size` elements, which together hold every element once."""
    count = values.numel()
    if count == 0:
        return
    if count <= size:
        yield values
        return
    dim = next(d for d, length in enumerate(values.shape) if length > 1)
    step = max(1, size * values.shape[dim] // count)
    for part in torch.split(values, step, dim):
        yield from blocks(part, size)


def _strided(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"cannot clip a gradient of layout {gradient.layout}: only strided and sparse gradients are known"
        )
    return gradient


def _memory(values: Tensor) -> tuple[Tensor, int]:
    """The memory behind a view: (without expanded dimensions, how often each of its elements was shown).

    A conjugation or sign that torch keeps as a flag of the view is dropped too: it changes no magnitude, commutes with
    scaling, and few kernels accept it.
    """
    if values.is_conj():
        values = values.conj()
    if values.is_neg():
        values = torch._neg_view(values)
    repeat = 1
    if 0 in values.stride() and values.numel():
        for dim, (length, stride) in enumerate(zip(values.shape, values.stride(), strict=True)):
            if stride == 0 and length > 1:
                repeat *= length
                values = values.narrow(dim, 0, 1)
    return values, repeat


def _flatten(values: Tensor) -> Tensor:
    """A one-dimensional view where the elements fill memory without gaps (also transposed), else the tensor itself."""
    if values.is_contiguous():
        return values.view(-1)
    expected = 1
    for stride, length in sorted(zip(values.stride(), values.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return values
            expected *= length
    return values.as_strided((values.numel(),), (1,))
