"""Carry out the decision: multiply gradients in place, or clean them of nan and inf.

The factor is never rounded to the gradients' dtype: half precision multiplies in fp32 with an fp32 factor and rounds
once (torch's own clipping rounds a coefficient of 0.123 to bf16 first, which is off by up to 0.4 %). A factor below
2^-100 is applied as two, because as one fp32 number it can be subnormal, and then a CPU that flushes those multiplies
by 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from distclip import simd
from distclip.fold import SMALLEST
from distclip.measure import Bundle, as_bundle
from distclip.measure.ranges import Length
from distclip.measure.values import HALF, blocks, has_memory, writable
from distclip.plan.gradients import Gradients
from distclip.plan.plan import Plan

_STEP = 2.0**-64  # a power of two: multiplying by it is exact
_BLOCK = 1 << 18


@torch.no_grad()
def scale_(gradients: Sequence[Tensor] | Bundle, factor: float | Tensor) -> None:
    """Multiply local gradients by one number, in place.

    Args:
        gradients: see `Bundle`: adjacent views are scaled as one range. The memory of an expanded gradient is
            multiplied once, and so are the entries of a sparse one, coalesced or not.
        factor: a float, or a 0-d fp64 tensor. 1.0 writes nothing. A tensor on an accelerator is not waited for: the
            gradients there are then always written, and a factor below 2^-126 loses precision.

    Raises:
        TypeError: a gradient's layout is neither strided nor sparse.
        ValueError: the factor is a tensor that is not 0-d.

    Example:
        >>> gradient = torch.tensor([3.0, 4.0])
        >>> scale_([gradient], 0.5)
        >>> gradient
        tensor([1.5000, 2.0000])
    """
    if isinstance(factor, Tensor):
        if factor.dim() != 0:
            raise ValueError(f"factor must be a number or a 0-d tensor, got shape {tuple(factor.shape)}")
        if factor.device.type != "cpu":
            everything = gradients.gradients if isinstance(gradients, Bundle) else gradients
            on_device = [gradient for gradient in everything if gradient.device == factor.device]
            _scale_on_device(on_device, factor)
            if len(on_device) == len(everything):
                return
            gradients = [gradient for gradient in everything if gradient.device != factor.device]
        factor = float(factor)
    if factor == 1.0:
        return
    groups = _groups(as_bundle(gradients))
    for part in _split(factor):
        for dtype, length, targets in groups:
            try:
                _scale_alike(targets, dtype, length, part)
            except RuntimeError:
                # Torch refuses zeros without memory, before it writes anything. To ask each gradient beforehand would
                # cost a sixth of what it takes to scale small ones.
                others = [target for target in targets if has_memory(target)]
                if len(others) == len(targets):
                    raise
                _scale_alike(others, dtype, length, part)


@torch.no_grad()
def zero_nonfinite_(gradients: Sequence[Tensor]) -> None:
    """Set elements that are nan or infinite to 0, in place; the others keep their bits.

    A complex element goes as a whole. Of a sparse gradient with duplicates, an element is their sum: if that is not
    finite, all its entries become 0.

    Example:
        >>> gradient = torch.tensor([1.0, float("nan"), float("inf")])
        >>> zero_nonfinite_([gradient])
        >>> gradient
        tensor([1., 0., 0.])
    """
    for gradient in gradients:
        if gradient.layout is torch.sparse_coo and not gradient.is_coalesced():
            _zero_nonfinite_sums(gradient)
            continue
        for block in blocks(writable(gradient), _BLOCK):
            block.masked_fill_(block.isfinite().logical_not_(), 0.0)


@torch.no_grad()
def clamp_(gradients: Sequence[Tensor], bound: float) -> None:
    """Clamp every element to [-bound, bound], in place; nan stays nan. Sparse gradients must be coalesced.

    Example:
        >>> gradient = torch.tensor([3.0, -0.5])
        >>> clamp_([gradient], 1.0)
        >>> gradient
        tensor([ 1.0000, -0.5000])
    """
    for gradient in gradients:
        writable(gradient).clamp_(-bound, bound)


@torch.no_grad()
def scale_all_(plan: Plan, gradients: Gradients, factors: Tensor, without: frozenset[int] = frozenset()) -> None:
    """Multiply the gradients of a plan by the factors of their param groups, fp64 [param groups], in place.

    Entries in `without` are left alone. Factors on an accelerator are not waited for.
    """
    if len(without) == len(plan.entries):
        return
    for bucket in plan.buckets:
        factor = factors[bucket.param_group]
        scale_(gradients.writable(bucket, without), factor if factor.device.type != "cpu" else float(factor))


@torch.no_grad()
def zero_all_nonfinite_(gradients: Gradients) -> None:
    """Set the elements of a plan's gradients that are nan or infinite to 0, in place."""
    zero_nonfinite_([gradient for gradient in gradients.local if gradient is not None])
    for index, total in gradients.summed.items():
        # an addend here can be finite where that of another rank is not
        addend = gradients.local[index]
        if addend is not None:
            addend.masked_fill_(~total.view(addend.shape).isfinite(), 0.0)


def _groups(bundle: Bundle) -> list[tuple[torch.dtype, Length, list[Tensor]]]:
    """What to multiply, every number of every gradient once: (dtype, length, tensors of one device)."""
    targets = [writable(gradient) for gradient in bundle.sparse]
    groups: list[tuple[torch.dtype, Length, list[Tensor]]] = []
    for layout in bundle.layouts:
        groups += [(group.dtype, group.length, group.tensors(bundle.strided)) for group in layout.groups]
        targets += [writable(bundle.strided[index]) for index in layout.others]
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for target in targets:
        if target.numel():
            kinds.setdefault((target.device, target.dtype), []).append(target)
    return groups + [(dtype, Length.LONG, same) for (_, dtype), same in kinds.items()]


def _split(factor: float) -> list[float]:
    """Factors whose product is the given one and none of which is tiny. Only the last is not a power of two."""
    factors = []
    while 0 < abs(factor) < SMALLEST:
        factors.append(_STEP)
        factor /= _STEP
    return [*factors, factor]


def _scale_alike(targets: list[Tensor], dtype: torch.dtype, length: Length, factor: float) -> None:
    """Multiply tensors of one device, dtype and length.

    On the CPU the factor goes in as a 0-d tensor: with a Python number it takes four times as long for thousands of
    small gradients, and a 0-d tensor does not change a gradient's dtype. For ranges that are not long the kernel that
    undoes a loss scale is faster still (five times for half precision, whose product converts the factor anew each
    time). NumKong's takes up to a fifth less time in half precision, but for short ranges, where its calls show, and
    long ones that torch cuts up for several threads.
    """
    if targets and targets[0].device.type != "cpu":
        torch._foreach_mul_(targets, factor)
        return
    by_one_thread = length is Length.MEDIUM or (length is Length.LONG and torch.get_num_threads() == 1)
    if by_one_thread and dtype in HALF and simd.works():
        targets = _scale_by_address(targets, factor)
    if not targets:
        return
    wide = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    value = torch.tensor(factor, dtype=wide, device="cpu")
    if length is not Length.LONG and wide is torch.float32:
        ignored = torch.zeros((), dtype=torch.float32, device="cpu")
        torch._amp_foreach_non_finite_check_and_unscale_(targets, ignored, value)
        increment_version(targets)  # which that kernel leaves out: a double backward must notice the change
    else:
        torch._foreach_mul_(targets, value)


def _scale_by_address(targets: list[Tensor], factor: float) -> list[Tensor]:
    """Multiply tensors where they lie; return those that must be multiplied otherwise."""
    reached, others = list[Tensor](), list[Tensor]()
    for target in targets:
        if simd.reaches(target):
            reached.append(target)
        elif has_memory(target):
            others.append(target)
    increment_version(reached)  # first, because an exception of a signal's handler can break off the loop
    for target in reached:
        simd.multiply_(target.data_ptr(), target.dtype, target.numel(), factor)
    return others


def _scale_on_device(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply by a number that only the device knows.

    The foreach product would round it to the gradients' dtype; the kernel that undoes a loss scale takes it in fp32.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        target = writable(gradient)
        if target.is_complex():
            target = torch.view_as_real(target.conj() if target.is_conj() else target)
        if target.numel():
            by_dtype.setdefault(target.dtype, []).append(target)
    ignored = torch.zeros((), dtype=torch.float32, device=factor.device)
    for dtype, same in by_dtype.items():
        if dtype is torch.float64:
            torch._foreach_mul_(same, factor.to(torch.float64))
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(same, ignored, factor.to(torch.float32))
            increment_version(same)


def _zero_nonfinite_sums(gradient: Tensor) -> None:
    """Zero the entries of an uncoalesced sparse gradient whose sum is not finite."""
    sums = gradient.coalesce()
    bad = sums.values().isfinite().logical_not_()
    sizes = torch.tensor(gradient.shape[: gradient.sparse_dim()], device=gradient.device)
    strides = sizes.flip(0).cumprod(0).flip(0).roll(-1)
    strides[-1:] = 1
    # Coalescing sorts by position, and so does unique: entry i went into row `row[i]` of the sums.
    _, row = torch.unique((gradient._indices() * strides[:, None]).sum(0), return_inverse=True)
    gradient._values().masked_fill_(bad[row], 0.0)
