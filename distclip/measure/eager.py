"""Measure the local gradients of one bucket in about one read of memory.

    amount     sum over finite elements of |g|^p, or their largest |g| for the inf-norm
    nan, inf   how many elements are not finite
    flag       whether the amount is beyond what fp64 can hold, although the elements are finite

**Exact at the speed of memory.** Squares are accumulated in fp32 only along short rows, and in fp64 from there on. A
row costs nothing, and the relative error of the norm stays below 1e-6 even on data chosen to hurt (a large element
followed by ones just too small to be added; rows of 64K elements give 1e-4 there, `torch.linalg.vector_norm` over a
long tensor up to 20 %). Half precision is read as it is, into fp32 sums. How, is in `distclip.measure.cpu`.

**Finite for free.** A finite sum proves that every element is finite. Only if it is not are the parts concerned
measured again by `distclip.measure.exact`, which counts; so is everything whose fp32 squares overflowed (|g| >
1.8e19), and a bucket so small that squares lost in underflow could matter.

**Any device.** On CPU the host looks at the sum and branches. On CUDA it must not wait: see `distclip.measure.device`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from distclip.measure.cpu import measure_on_cpu
from distclip.measure.device import combine, measure_on_device
from distclip.measure.exact import exact
from distclip.measure.ranges import Layout, RangeCache, layouts

_layout_of = attrgetter("layout")


@torch.no_grad()
def measure(gradients: Sequence[Tensor], norm_type: float, *, cache: RangeCache | None = None) -> Tensor:
    """Measure the local gradients of one bucket.

    Args:
        gradients: local tensors: any mix of sizes, floating point dtypes, devices and strides; empty, expanded,
            complex and sparse ones too. Nothing is written.
        norm_type: p > 0, or inf.
        cache: kept by the caller for this bucket, so that the walk over thousands of gradients is not repeated.

    Returns:
        fp64 tensor [amount, nan count, inf count, flag], on CPU if all gradients are there, else on the first other
        device among them.

        - amount: sum over finite elements of |g|^p for p < inf, largest finite |g| for p = inf.
        - counts: of elements. On CUDA, where finding out must not wait for the device, of gradients whose norm is nan
          or inf; the amount then leaves those out as a whole. Measure again after `zero_nonfinite_`
          if the norm of the rest is wanted.
        - flag: 1.0 if finite elements give a sum that fp64 cannot hold (p > 4, or fp64 gradients). Agree on the largest
          `max_abs` over ranks, then use `scaled_power_sum`.

    Raises:
        TypeError: a gradient is not floating point, or has a layout other than strided or sparse.
        ValueError: norm_type is not positive.

    Example:
        >>> measure([torch.tensor([3.0, 4.0])], 2.0)
        tensor([25.,  0.,  0.,  0.], dtype=torch.float64)
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}")
    work = _work(gradients, cache)
    found = [
        measure_on_cpu(layout, strided, others, norm_type)
        for layout, strided, others in work
        if layout.device.type == "cpu"
    ]
    for device in dict.fromkeys(layout.device for layout, _, _ in work if layout.device.type != "cpu"):
        there = [gradient for gradient in gradients if gradient.device == device]
        found.append(measure_on_device(there, norm_type)[0])
    if not found:
        return torch.zeros(4, dtype=torch.float64, device="cpu")
    return found[0] if len(found) == 1 else combine(_gather(found), norm_type)


@torch.no_grad()
def max_abs(gradients: Sequence[Tensor]) -> Tensor:
    """Largest finite |g| over all elements, as a 0-d fp64 tensor; 0 if there is none."""
    found = [
        measure_on_cpu(layout, strided, others, math.inf)[0]
        if layout.device.type == "cpu"
        else exact([*layout.targets(strided), *others], math.inf, layout.device).largest
        for layout, strided, others in _work(gradients, None)
    ]
    return torch.stack(_gather(found)).amax() if found else torch.zeros((), dtype=torch.float64, device="cpu")


@torch.no_grad()
def scaled_power_sum(gradients: Sequence[Tensor], norm_type: float, scale: float) -> Tensor:
    """Sum over finite elements of (|g| / scale)^p, as a 0-d fp64 tensor: for sums whose plain powers fp64 cannot hold.

    The norm is `scale * sum ** (1 / p)`. With `scale` the largest |g| over all ranks each term is at most 1.

    Raises:
        ValueError: scale or norm_type is not positive and finite.
    """
    if not (0 < scale < math.inf and 0 < norm_type < math.inf):
        raise ValueError(f"scale and norm_type must be positive and finite, got {scale} and {norm_type}")
    found = [
        exact([*layout.targets(strided), *others], norm_type, layout.device, scale).amount
        for layout, strided, others in _work(gradients, None)
    ]
    return torch.stack(_gather(found)).sum() if found else torch.zeros((), dtype=torch.float64, device="cpu")


def _work(gradients: Sequence[Tensor], cache: RangeCache | None) -> list[tuple[Layout, Sequence[Tensor], list[Tensor]]]:
    """For each device: (its layout, the gradients its spans refer to, the gradients to be looked at one by one)."""
    strided, sparse = gradients, []
    if not set(map(_layout_of, gradients)) <= {torch.strided}:
        strided = [gradient for gradient in gradients if gradient.layout is torch.strided]
        sparse = [gradient for gradient in gradients if gradient.layout is not torch.strided]
    work = [
        (layout, strided, [strided[index] for index in layout.others])
        for layout in (cache.layouts(strided) if cache is not None else layouts(strided))
    ]
    for device in dict.fromkeys(gradient.device for gradient in sparse):
        work.append((Layout(device), strided, [g for g in sparse if g.device == device]))
    return work


def _gather(found: list[Tensor]) -> list[Tensor]:
    """Bring results together on the first device that is not the CPU: its stream then orders what follows."""
    device = next((tensor.device for tensor in found if tensor.device.type != "cpu"), found[0].device)
    return [tensor.to(device, non_blocking=True) for tensor in found]
