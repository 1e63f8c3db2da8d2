"""Measure gradients on the CPU: rows in fp32, everything across rows in fp64, and a second look where the sum is odd.

For p = 2 a long fp32 or fp64 range is read once, as a matrix with short rows. Half precision has no kernel that would
return more than half precision, so it is converted block by block into scratch that fits the cache, many ranges at a
time. Small ranges are copied together first. Other norms take the powers in scratch, the inf-norm needs no scratch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from distclip.measure.exact import FP64_FLOOR, exact, flagged
from distclip.measure.ranges import PACK, Layout
from distclip.measure.values import REAL, blocks, readable

ROW = 256
"""Elements accumulated in fp32. On CPU a row is spread over 16 accumulators, so each adds 16 squares."""

LONGEST = 1 << 24
"""Elements per call for long ranges: short enough that measuring one part again is bearable."""

_BLOCK = PACK
"""Elements of scratch: 2 MiB of fp32."""

# A power below 2^-126, the smallest normal fp32 number, may be lost. N elements lose at most N * 2^-126, which is at
# most 2^-30 of the sum unless the sum is below N * 2^-96.
_FP32_FLOOR = 2.0**-96

_HALF = frozenset((torch.bfloat16, torch.float16))
_WIDE = frozenset((torch.float64, torch.complex128))
_norm = torch.linalg.vector_norm


def measure_on_cpu(layout: Layout, gradients: Sequence[Tensor], others: Sequence[Tensor], norm_type: float) -> Tensor:
    """[amount, nan count, inf count, flag] of a layout's ranges and of other gradients, as `measure` returns them."""
    parts = _Parts(norm_type)
    for span in layout.long:
        parts.span(span.target(gradients), span.numel)
    for pack in layout.packs:
        joined = parts.scratch(gradients[pack.spans[0].first].dtype, pack.numel, pack=True)
        sources = pack.join(gradients, joined)
        parts.span(joined, pack.numel, sources)
    for gradient in others:
        values, repeat = readable(gradient)
        if norm_type == 2.0 and values.is_complex() and values.is_contiguous():
            values = torch.view_as_real(values).flatten()  # |g|^2 is the sum of two squares
        if values.dtype in REAL and values.is_contiguous() and repeat == 1:
            parts.span(values, values.numel(), (gradient,))
        else:
            parts.any(values, (gradient,), repeat)
    parts.flush()
    if not parts.partials:
        return torch.zeros(4, dtype=torch.float64)
    total = parts.total(parts.partials)
    floor = max(parts.narrow * _FP32_FLOOR, parts.numel * FP64_FLOOR)
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
    elif measure_on_cpu(layout, gradients, others, math.inf)[0] == 0:
        return torch.zeros(4, dtype=torch.float64)
    return flagged(exact([*layout.targets(gradients), *others], norm_type, layout.device), parts.numel, norm_type)


class _Parts:
    """Partial results, each with what is needed to measure it again."""

    def __init__(self, norm_type: float) -> None:
        self.norm_type = norm_type
        self.partials: list[Tensor] = []  # norms of rows for p = 2, maxima for inf, sums of rows otherwise
        self.sources: list[Sequence[Tensor]] = []  # of each partial result; the same object where several share it
        self.numel = 0
        self.narrow = 0  # elements whose powers went through fp32
        self._scratch: dict[tuple[torch.dtype, bool], Tensor] = {}
        self._halves: list[Tensor] = []  # waiting for conversion
        self._halves_sources: list[Tensor] = []
        self._halves_numel = 0

    def scratch(self, dtype: torch.dtype, numel: int, *, pack: bool = False) -> Tensor:
        """Uninitialised memory, valid until the next call with the same dtype and use."""
        buffer = self._scratch.get((dtype, pack))
        if buffer is None or buffer.numel() < numel:
            buffer = self._scratch[dtype, pack] = torch.empty(numel, dtype=dtype)
        return buffer[:numel]

    def span(self, values: Tensor, numel: int, sources: Sequence[Tensor] | None = None) -> None:
        """Measure contiguous real numbers. `sources`: where to find them later, if not in `values`."""
        if numel > LONGEST:
            for piece in torch.split(values.view(-1), LONGEST):
                self.span(piece, piece.numel(), sources)
        elif self.norm_type != 2.0:
            self.any(values.view(-1), sources or (values,))
        elif values.dtype in _HALF:
            self._halve(values.view(-1), numel, sources or (values,))
        else:
            self._squares(values, numel, sources)

    def _squares(self, values: Tensor, numel: int, sources: Sequence[Tensor] | None = None) -> None:
        """Rows of a contiguous range in its own precision."""
        self.numel += numel
        if values.dtype is torch.float32:
            self.narrow += numel
        row = _row_length(numel)
        rows = numel // row
        matrix = values.as_strided((rows, row), (row, 1))
        self.partials.append(_norm(matrix, 2, dim=1))
        self.sources.append(sources or (matrix,))
        if rows * row < numel:
            rest = values.view(-1)[rows * row :]
            self.partials.append(_norm(rest.view(1, -1), 2, dim=1))
            self.sources.append(sources or (rest,))

    def _halve(self, values: Tensor, numel: int, sources: Sequence[Tensor]) -> None:
        """Put one-dimensional half precision numbers in line for conversion, `_BLOCK` elements at a time."""
        for piece in torch.split(values, _BLOCK) if numel > _BLOCK else (values,):
            length = piece.numel()
            if self._halves_numel + length > _BLOCK:
                self.flush()
            self._halves.append(piece)
            self._halves_sources.extend(sources if numel <= _BLOCK else (piece,))
            self._halves_numel += length

    def flush(self) -> None:
        """Convert and measure what is in line."""
        numel = self._halves_numel
        if not numel:
            return
        padded = -(-numel // ROW) * ROW
        copy = self.scratch(torch.float32, padded)
        if len(self._halves) == 1:
            copy[:numel].copy_(self._halves[0])
        else:
            sizes = [piece.numel() for piece in self._halves]
            torch._foreach_copy_(list(torch.split(copy[:numel], sizes)), self._halves)
        copy[numel:].zero_()
        self.partials.append(_norm(copy.view(-1, ROW), 2, dim=1))
        self.sources.append(self._halves_sources)
        self.numel += numel
        self.narrow += numel
        self._halves, self._halves_sources, self._halves_numel = [], [], 0

    def any(self, values: Tensor, sources: Sequence[Tensor], repeat: int = 1) -> None:
        """Measure numbers of any shape, strides, dtype and norm; each element counts `repeat` times."""
        numel = values.numel()
        if not numel:
            return
        dtype = torch.float64 if values.dtype in _WIDE or 3.0 < self.norm_type < math.inf else torch.float32
        self.numel += numel * repeat
        if dtype is torch.float32:
            self.narrow += numel * repeat
        if math.isinf(self.norm_type) and not values.is_complex():
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
        together = partials[0] if len(partials) == 1 else torch.cat(list(partials))
        if self.norm_type == 2.0:
            norm = float(_norm(together, 2.0, dtype=torch.float64))
            return norm * norm  # inf where ** would raise OverflowError
        if math.isinf(self.norm_type):
            return abs(float(together.amax()))  # never -0.0
        return float(together.sum(dtype=torch.float64))


def _rows(values: Tensor) -> list[Tensor]:
    """One-dimensional contiguous numbers as a matrix of short rows, and the rest, if any, as one more row."""
    numel = values.numel()
    row = _row_length(numel)
    rows = numel // row
    matrix = values.as_strided((rows, row), (row, 1))
    return [matrix] if rows * row == numel else [matrix, values[rows * row :].view(1, -1)]


@lru_cache(maxsize=4096)
def _row_length(numel: int) -> int:
    """At most `ROW`, and if possible a divisor, so that no rest needs a call of its own."""
    if numel <= ROW:
        return numel
    if numel >= _BLOCK:
        return ROW  # one more call does not show
    candidates = [*range(ROW, 63, -16), *range(ROW - 1, 63, -1)]
    return next((row for row in candidates if numel % row == 0), ROW)
