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

import torch
from torch import Tensor

from distclip.measure.bundle import Bundle, as_bundle
from distclip.measure.cpu import measure_on_cpu
from distclip.measure.device import combine, measure_on_device
from distclip.measure.exact import exact, flagged


@torch.no_grad()
def measure(gradients: Sequence[Tensor] | Bundle, norm_type: float, *, elementwise: bool = False) -> Tensor:
    """Measure the local gradients of one bucket.

    Args:
        gradients: see `Bundle`. Nothing is written.
        norm_type: p > 0, or inf.
        elementwise: look at every element also on an accelerator, which takes several passes over the gradients.

    Returns:
        fp64 tensor [amount, nan count, inf count, flag], on CPU if all gradients are there, else on the first other
        device among them.

        - amount: sum over finite elements of |g|^p for p < inf, largest finite |g| for p = inf.
        - counts: of elements. On CUDA, unless `elementwise`, of gradients whose norm is nan or inf; the amount then
          leaves those out as a whole.
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
    bundle = as_bundle(gradients)
    work = bundle.work()
    found = [
        measure_on_cpu(layout, bundle.strided, others, norm_type)
        for layout, others in work
        if layout.device.type == "cpu"
    ]
    for device in dict.fromkeys(layout.device for layout, _ in work if layout.device.type != "cpu"):
        there = [gradient for gradient in bundle.gradients if gradient.device == device]
        if elementwise:
            numel = sum(gradient.numel() for gradient in there)
            found.append(flagged(exact(there, norm_type, device), numel, norm_type))
        else:
            found.append(measure_on_device(there, norm_type)[0])
    if not found:
        return torch.zeros(4, dtype=torch.float64, device="cpu")
    return found[0] if len(found) == 1 else combine(_gather(found), norm_type)


@torch.no_grad()
def max_abs(gradients: Sequence[Tensor]) -> Tensor:
    """Largest finite |g| over all elements, as a 0-d fp64 tensor; 0 if there is none."""
    bundle = Bundle(gradients)
    found = [
        measure_on_cpu(layout, bundle.strided, others, math.inf)[0]
        if layout.device.type == "cpu"
        else exact([*layout.targets(bundle.strided), *others], math.inf, layout.device).largest
        for layout, others in bundle.work()
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
    bundle = Bundle(gradients)
    found = [
        exact([*layout.targets(bundle.strided), *others], norm_type, layout.device, scale).amount
        for layout, others in bundle.work()
    ]
    return torch.stack(_gather(found)).sum() if found else torch.zeros((), dtype=torch.float64, device="cpu")


def _gather(found: list[Tensor]) -> list[Tensor]:
    """Bring results together on the first device that is not the CPU: its stream then orders what follows.

    So nothing goes from a device to the CPU here, where it could be read before it has arrived.
    """
    device = next((tensor.device for tensor in found if tensor.device.type != "cpu"), found[0].device)
    return [tensor.to(device, non_blocking=True) for tensor in found]
