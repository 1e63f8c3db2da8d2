"""Measure gradients on an accelerator: the host queues kernels and never waits.

`_foreach_norm` reads all gradients in a few launches and accumulates in fp64, where nothing narrower overflows or
vanishes for p = 1, 2 and inf. nan and inf are told apart for each gradient by its own norm, which is also how a step
that nobody waited for can name its culprits afterwards (`distclip.late`). Other norms and fp64 gradients are measured
one by one. (Coalescing a sparse gradient waits by itself.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from distclip.measure.exact import Exact, exact, flagged
from distclip.measure.ranges import LONGEST
from distclip.measure.values import REAL

DIRECT = frozenset((1.0, 2.0, math.inf))
"""Norm types for which fp64 sums of anything narrower can be neither too large nor too small."""


def measure_on_device(gradients: Sequence[Tensor], norm_type: float) -> tuple[Tensor, Tensor]:
    """Measure gradients of one device, any kind; also each by itself.

    Returns:
        What `distclip.measure.measure` returns, with counts of gradients instead of elements for those that are
        measured by their norm; and fp64 [number of gradients]: finite, or nan where one holds a nan, else inf where one
        holds an inf. Both on the gradients' device.

    Example:
        >>> measure_on_device([torch.tensor([3.0, 4.0]), torch.tensor([float("inf")])], 2.0)
        (tensor([25.,  0.,  1.,  0.], dtype=torch.float64), tensor([5., inf], dtype=torch.float64))
    """
    device = gradients[0].device
    each = [torch.zeros((), dtype=torch.float64, device=device)] * len(gradients)
    direct = [index for index, gradient in enumerate(gradients) if _is_direct(gradient, norm_type)]
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index in direct:
        by_dtype.setdefault(gradients[index].dtype, []).append(index)
    for indices in by_dtype.values():
        for index, norm in zip(indices, _norms([gradients[index] for index in indices], norm_type), strict=True):
            each[index] = norm
    stats = []
    if direct:
        norms = torch.stack([each[index] for index in direct])
        is_nan, is_inf = norms.isnan(), norms.isinf()
        norms = norms.masked_fill(is_nan | is_inf, 0.0)
        amount = norms.amax() if math.isinf(norm_type) else norms.square().sum() if norm_type == 2.0 else norms.sum()
        stats.append(torch.stack((amount, is_nan.sum(), is_inf.sum(), torch.zeros_like(amount))))
    others = [index for index in sorted({*range(len(gradients))}.difference(direct)) if gradients[index].numel()]
    if others:
        found = [exact([gradients[index]], norm_type, device) for index in others]
        for index, one in zip(others, found, strict=True):
            each[index] = torch.where(one.nan > 0, math.nan, torch.where(one.inf > 0, math.inf, one.amount))
        columns = [torch.stack(column) for column in zip(*found, strict=True)]
        amount = columns[0].amax() if math.isinf(norm_type) else columns[0].sum()
        together = Exact(amount, columns[1].sum(), columns[2].sum(), columns[3].amax())
        stats.append(flagged(together, sum(gradients[index].numel() for index in others), norm_type))
    if not stats:
        return torch.zeros(4, dtype=torch.float64, device=device), torch.stack(each)
    return stats[0] if len(stats) == 1 else combine(stats, norm_type), torch.stack(each)


def combine(found: Sequence[Tensor], norm_type: float) -> Tensor:
    """Several results of measuring on one device as one."""
    table = torch.stack(tuple(found))
    amount = table[:, 0].amax() if math.isinf(norm_type) else table[:, 0].sum()
    flag = torch.maximum(table[:, 3].amax(), amount.isinf().to(torch.float64))
    return torch.stack((amount, table[:, 1].sum(), table[:, 2].sum(), flag))


def _is_direct(gradient: Tensor, norm_type: float) -> bool:
    return (
        norm_type in DIRECT
        and gradient.layout is torch.strided
        and gradient.dtype in REAL
        and gradient.dtype is not torch.float64
        and gradient.numel() > 0
        and (gradient.numel() <= LONGEST or gradient.is_contiguous())
    )


def _norms(gradients: list[Tensor], norm_type: float) -> list[Tensor]:
    """The norm of each of some gradients of one dtype, fp64 []."""
    pieces: list[Tensor] = []
    counts: list[int] = []
    for gradient in gradients:
        # The kernel's scratch grows with the longest tensor times their number.
        parts = (gradient,) if gradient.numel() <= LONGEST else torch.split(gradient.view(-1), LONGEST)
        pieces.extend(parts)
        counts.append(len(parts))
    norms = torch._foreach_norm(pieces, norm_type, dtype=torch.float64)
    if len(pieces) == len(gradients):
        return list(norms)
    found, start = [], 0
    for count in counts:
        own = norms[start : start + count]
        found.append(own[0] if count == 1 else torch.linalg.vector_norm(torch.stack(own), norm_type))
        start += count
    return found
