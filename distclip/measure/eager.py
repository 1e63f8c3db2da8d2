"""Measure the local gradients of one bucket in about one read of memory.

    amount     sum over finite elements of |g|^p, or their largest |g| for the inf-norm
    nan, inf   how many elements are not finite
    flag       whether the amount is beyond what fp64 can hold, although the elements are finite

**Exact at the speed of memory.** Squares are accumulated in fp32 only along rows of 256 elements, and in fp64 from
there on. A row costs nothing, and the relative error of the norm stays below 1e-6 even on data chosen to hurt (a
large element followed by ones just too small to be added; rows of 64K elements give 1e-4 there,
`torch.linalg.vector_norm` over a long tensor up to 20 %). Half precision is converted block by block into fp32
scratch that fits the cache.

**Finite for free.** A finite sum proves that every element is finite. Only if it is not are the parts concerned
measured again by `distclip.measure.exact`, which counts; so is everything whose fp32 squares overflowed (|g| >
1.8e19), and a bucket so small that squares lost in underflow could matter.

**Any device.** On CPU the host looks at the sum and branches. On CUDA it must not wait: there `_foreach_norm`
accumulates in fp64, where no fp32 number overflows or vanishes, and nan and inf are told apart for each tensor by its
own norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter

import torch
from torch import Tensor

from distclip.measure.exact import Exact, exact
from distclip.measure.ranges import Layout, RangeCache, layouts
from distclip.measure.values import blocks, readable

ROW = 256
"""Elements accumulated in fp32."""

_LONGEST = 1 << 24
"""Elements per call for long ranges: short enough that measuring one part again is bearable."""

_BLOCK = 1 << 19
"""Elements converted at a time: 2 MiB of fp32 scratch stays in the second or third level cache."""

# A power below 2^-126, the smallest normal fp32 number, may be lost. N elements lose at most N * 2^-126, which is at
# most 2^-30 of the sum unless the sum is below N * 2^-96. Likewise for fp64, whose smallest normal number is 2^-1022.
_FP32_FLOOR = 2.0**-96
_FP64_FLOOR = 2.0**-992

_layout_of = attrgetter("layout")
_norm = torch.linalg.vector_norm


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
        - counts: of elements. On CUDA, where finding out must not wait for the device, of tensors or merged ranges
          whose norm is nan or inf; the amount then leaves those out as a whole. Measure again after `zero_nonfinite_`
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
    found = [
        _on_cpu(layout, strided, others, norm_type)
        if layout.device.type == "cpu"
        else _on_device(layout, strided, others, norm_type)
        for layout, strided, others in _work(gradients, cache)
    ]
    if not found:
        return torch.zeros(4, dtype=torch.float64)
    return found[0] if len(found) == 1 else _combine(found, norm_type)


@torch.no_grad()
def max_abs(gradients: Sequence[Tensor]) -> Tensor:
    """Largest finite |g| over all elements, as a 0-d fp64 tensor; 0 if there is none."""
    found = [
        _on_cpu(layout, strided, others, math.inf)[0]
        if layout.device.type == "cpu"
        else exact([*_spans(layout, strided), *others], math.inf, layout.device).largest
        for layout, strided, others in _work(gradients, None)
    ]
    return torch.stack(_gather(found)).amax() if found else torch.zeros((), dtype=torch.float64)


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
        exact([*_spans(layout, strided), *others], norm_type, layout.device, scale).amount
        for layout, strided, others in _work(gradients, None)
    ]
    return torch.stack(_gather(found)).sum() if found else torch.zeros((), dtype=torch.float64)


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
        work.append((Layout(device, [], [], []), strided, [g for g in sparse if g.device == device]))
    return work


def _spans(layout: Layout, gradients: Sequence[Tensor]) -> list[Tensor]:
    """All contiguous ranges as one-dimensional views."""
    spans = [*layout.long, *(span for pack in layout.packs for span in pack)]
    return [span.view(gradients) for span in spans]


def _gather(found: list[Tensor]) -> list[Tensor]:
    """Bring results together on the first device that is not the CPU: its stream then orders what follows."""
    device = next((tensor.device for tensor in found if tensor.device.type != "cpu"), found[0].device)
    return [tensor.to(device, non_blocking=True) for tensor in found]


def _combine(found: list[Tensor], norm_type: float) -> Tensor:
    table = torch.stack(_gather(found))
    amount = table[:, 0].amax() if math.isinf(norm_type) else table[:, 0].sum()
    flag = torch.maximum(table[:, 3].amax(), amount.isinf().to(torch.float64))
    return torch.stack((amount, table[:, 1].sum(), table[:, 2].sum(), flag))


def _flagged(found: Exact, numel: int, norm_type: float) -> Tensor:
    """The four numbers from an exact measurement."""
    amount = found.amount
    flag = torch.zeros_like(amount)
    if not math.isinf(norm_type):
        lost = (amount < numel * _FP64_FLOOR) & (found.largest > 0)
        flag = (amount.isinf() | lost).to(torch.float64)
    return torch.stack((amount, found.nan, found.inf, flag))


class _Parts:
    """Partial results of one device's gradients, with what is needed to measure any of them again."""

    def __init__(self, norm_type: float) -> None:
        self.norm_type = norm_type
        self.partials: list[Tensor] = []  # norms of rows for p = 2, maxima for inf, sums of rows otherwise
        self.sources: list[Sequence[Tensor]] = []
        self.numel = 0
        self.narrow = 0  # elements whose powers went through fp32
        self._scratch: dict[tuple[torch.dtype, bool], Tensor] = {}

    def scratch(self, dtype: torch.dtype, numel: int, *, pack: bool = False) -> Tensor:
        """Uninitialised memory, valid until the next call with the same arguments."""
        buffer = self._scratch.get((dtype, pack))
        if buffer is None or buffer.numel() < numel:
            buffer = self._scratch[dtype, pack] = torch.empty(numel, dtype=dtype)
        return buffer[:numel]

    def add(self, values: Tensor, sources: Sequence[Tensor], repeat: int = 1) -> None:
        """Measure values; each element counts `repeat` times."""
        numel = values.numel()
        wide = values.dtype in (torch.float64, torch.complex128)
        dtype = torch.float64 if wide or 3.0 < self.norm_type < math.inf else torch.float32
        self.numel += numel * repeat
        if dtype is torch.float32:
            self.narrow += numel * repeat
        if self.norm_type == 2.0 and values.is_complex():
            values = torch.view_as_real(values).flatten() if values.is_contiguous() else torch.view_as_real(values)
        if self.norm_type == 2.0 and values.dtype is dtype and values.dim() == 1 and values.is_contiguous():
            partials = [_norm(rows, 2, dim=1) for rows in _rows(values)]
        elif math.isinf(self.norm_type) and not values.is_complex():
            low, high = values.aminmax()
            partials = [torch.stack((-low, high))]
        else:
            partials = [partial for block in blocks(values, _BLOCK) for partial in self._block(block, dtype)]
        for partial in partials:
            self.partials.append(partial if repeat == 1 else self._repeated(partial, repeat))
            self.sources.append(sources)

    def _block(self, block: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Measure a small piece of any shape and dtype through scratch."""
        copy = self.scratch(dtype, block.numel())
        if block.is_complex():
            torch.abs(block.to(dtype.to_complex()), out=copy.view(block.shape))
        else:
            copy.view(block.shape).copy_(block)
        if self.norm_type == 2.0:
            return [_norm(rows, 2, dim=1) for rows in _rows(copy)]
        copy.abs_()
        if math.isinf(self.norm_type):
            return [copy.amax().view(1)]
        if self.norm_type != 1.0:
            copy.pow_(self.norm_type)
        return [rows.sum(dim=1) for rows in _rows(copy)]

    def _repeated(self, partial: Tensor, repeat: int) -> Tensor:
        if math.isinf(self.norm_type):
            return partial
        return partial.to(torch.float64) * (repeat**0.5 if self.norm_type == 2.0 else repeat)

    def total(self, partials: Sequence[Tensor]) -> float:
        """The sum of powers, or the maximum, over some partial results."""
        together = partials[0] if len(partials) == 1 else torch.cat([partial.view(-1) for partial in partials])
        if self.norm_type == 2.0:
            norm = float(_norm(together, 2.0, dtype=torch.float64))
            return norm * norm  # inf where ** would raise OverflowError
        if math.isinf(self.norm_type):
            return abs(float(together.amax()))  # never -0.0
        return float(together.sum(dtype=torch.float64))


def _rows(values: Tensor) -> list[Tensor]:
    """A one-dimensional contiguous tensor as a matrix of short rows, and the rest, if any, as one more row."""
    numel = values.numel()
    row = _row_length(numel)
    whole = numel // row
    matrix = values.as_strided((whole, row), (row, 1))
    return [matrix] if whole * row == numel else [matrix, values[whole * row :].view(1, -1)]


@lru_cache(maxsize=4096)
def _row_length(numel: int) -> int:
    """At most `ROW`, and if possible a divisor, so that no rest needs a call of its own."""
    if numel <= ROW:
        return numel
    if numel >= _BLOCK:
        return ROW  # one more call does not show
    candidates = [*range(ROW, 63, -16), *range(ROW - 1, 63, -1)]
    return next((row for row in candidates if numel % row == 0), ROW)


def _on_cpu(layout: Layout, gradients: Sequence[Tensor], others: Sequence[Tensor], norm_type: float) -> Tensor:
    parts = _Parts(norm_type)
    for span in layout.long:
        for values in torch.split(span.view(gradients), _LONGEST):
            parts.add(values, (values,))
    for pack in layout.packs:
        small = [span.view(gradients) for span in pack]
        if len(small) == 1:
            parts.add(small[0], small)
        else:
            packed = parts.scratch(small[0].dtype, sum(span.numel for span in pack), pack=True)
            parts.add(torch.cat(small, out=packed), small)
    for gradient in others:
        values, repeat = readable(gradient)
        if values.numel():
            parts.add(values, (gradient,), repeat)
    if not parts.partials:
        return torch.zeros(4, dtype=torch.float64)
    total = parts.total(parts.partials)
    floor = max(parts.narrow * _FP32_FLOOR, parts.numel * _FP64_FLOOR)
    if math.isfinite(total) and (total >= floor or math.isinf(norm_type)):
        return torch.tensor((total, 0.0, 0.0, 0.0), dtype=torch.float64)
    return _again(parts, layout, gradients, others, total, floor)


def _again(
    parts: _Parts, layout: Layout, gradients: Sequence[Tensor], others: Sequence[Tensor], total: float, floor: float
) -> Tensor:
    """Measure in fp64 what the fast way could not: all of it if it is tiny, else the parts whose sum is not finite."""
    norm_type = parts.norm_type
    if not math.isfinite(total):
        pairs = list(zip(parts.partials, parts.sources, strict=True))
        doubtful = {id(sources): sources for partial, sources in pairs if not partial.isfinite().all()}
        good = [partial for partial, sources in pairs if id(sources) not in doubtful]
        found = exact([source for sources in doubtful.values() for source in sources], norm_type, layout.device)
        kept = parts.total(good) if good else 0.0
        amount = max(kept, float(found.amount)) if math.isinf(norm_type) else kept + float(found.amount)
        if math.isinf(norm_type) or amount >= floor:
            flag = float(math.isinf(amount))
            return torch.tensor((amount, float(found.nan), float(found.inf), flag), dtype=torch.float64)
    elif _on_cpu(layout, gradients, others, math.inf)[0] == 0:
        return torch.zeros(4, dtype=torch.float64)
    return _flagged(exact([*_spans(layout, gradients), *others], norm_type, layout.device), parts.numel, norm_type)


def _on_device(layout: Layout, gradients: Sequence[Tensor], others: Sequence[Tensor], norm_type: float) -> Tensor:
    """Measure on an accelerator; the host never waits.

    fp64 accumulation of anything narrower neither overflows nor underflows for p <= 2 and p = inf.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    slow = list(others)
    for values in _spans(layout, gradients):
        if norm_type in (1.0, 2.0, math.inf) and values.dtype is not torch.float64:
            by_dtype.setdefault(values.dtype, []).extend(torch.split(values, _LONGEST))
        else:
            slow.append(values)
    found = []
    if by_dtype:
        norms = torch.stack(
            [norm for same in by_dtype.values() for norm in torch._foreach_norm(same, norm_type, dtype=torch.float64)]
        )
        is_nan, is_inf = norms.isnan(), norms.isinf()
        norms = norms.masked_fill(is_nan | is_inf, 0.0)
        amount = norms.amax() if math.isinf(norm_type) else norms.square().sum() if norm_type == 2.0 else norms.sum()
        found.append(torch.stack((amount, is_nan.sum(), is_inf.sum(), torch.zeros_like(amount))))
    if slow:
        numel = sum(gradient.numel() for gradient in slow)
        found.append(_flagged(exact(slow, norm_type, layout.device), numel, norm_type))
    if not found:
        return torch.zeros(4, dtype=torch.float64, device=layout.device)
    return found[0] if len(found) == 1 else _combine(found, norm_type)
