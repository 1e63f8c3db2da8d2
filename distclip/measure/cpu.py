"""Measure gradients on the CPU: rows in fp32, everything across rows in fp64, and a second look where the sum is odd.

For p = 2 a long range is read once, as a matrix with short rows. Small ranges are copied together first. With one
thread NumKong reads ranges where they lie, if it is installed (`distclip.simd`). Other norms take the powers
block by block in scratch that fits the cache; the inf-norm needs no scratch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distclip import simd
from distclip.measure.exact import FP64_FLOOR, exact, flagged
from distclip.measure.halves import half_kernel_works, half_squares
from distclip.measure.ranges import LONGEST, Layout, Pack, Span, rows_of
from distclip.measure.values import HALF, REAL, blocks, readable

_BLOCK = 1 << 19
"""Elements of scratch: 2 MiB of fp32."""

# A power below 2^-126, the smallest normal fp32 number, may be lost. N elements lose at most N * 2^-126, which is at
# most 2^-30 of the sum unless the sum is below N * 2^-96.
_FP32_FLOOR = 2.0**-96

_FP32_POWERS = 3.0
"""Up to this p the powers of fp32 numbers are taken in fp32; beyond, ordinary gradients would be lost in underflow."""

_WIDE = frozenset((torch.float64, torch.complex128))
_norm = torch.linalg.vector_norm


def measure_on_cpu(layout: Layout, gradients: Sequence[Tensor], others: Sequence[Tensor], norm_type: float) -> Tensor:
    """[amount, nan count, inf count, flag] of a layout's ranges and of other gradients, as `measure` returns them."""
    parts = _Parts(norm_type)
    if norm_type == 2.0:
        parts.squares(layout.medium, gradients)
    if norm_type == 2.0 and torch.get_num_threads() == 1 and simd.works():
        parts.squares(layout.long_spans(), gradients)
    elif norm_type == 2.0:
        # Thousands of ranges may come this way, so the host does nothing but call the kernel.
        parts.partials += map(_norm, layout.pick_rows(gradients), itertools.repeat(2), itertools.repeat(1))
        parts.sources += layout.rows
        parts.partials += [_norm(gradients[m.span.first].as_strided(m.size, m.stride), 2, 1) for m in layout.matrices]
        parts.sources += [matrix.span for matrix in layout.matrices]
        for matrix in layout.halves:
            parts.matrix(gradients[matrix.span.first].as_strided(matrix.size, matrix.stride), matrix.span)
        for span in layout.long:
            parts.span(span.target(gradients), span.numel)
    else:
        for span in layout.spans():
            parts.span(span.target(gradients), span.numel)
    for pack in layout.packs:
        parts.pack(pack, gradients)
    for gradient in others:
        values, repeat = readable(gradient)
        if norm_type == 2.0 and values.is_complex() and values.is_contiguous():
            values = torch.view_as_real(values).flatten()  # |g|^2 is the sum of two squares
        numel = values.numel()
        if numel and values.dtype in REAL and values.is_contiguous() and repeat == 1:
            parts.span(values, numel, (gradient,))
        elif numel:
            parts.any(values, (gradient,), repeat)
    if not parts.partials and not parts.sums:
        return torch.zeros(4, dtype=torch.float64, device="cpu")
    parts.take_roots()
    total = parts.total(parts.partials, parts.sums)
    numel = layout.numel + sum(gradient.numel() for gradient in others)
    narrow = norm_type <= _FP32_POWERS and (layout.narrow or bool(others))
    floor = 0.0 if math.isinf(norm_type) else numel * (_FP32_FLOOR if narrow else FP64_FLOOR)
    if math.isfinite(total) and total >= floor:
        return torch.tensor((total, 0.0, 0.0, 0.0), dtype=torch.float64, device="cpu")
    if math.isfinite(total) and measure_on_cpu(layout, gradients, others, math.inf)[0] == 0:
        return torch.zeros(4, dtype=torch.float64, device="cpu")
    found = _again(parts, gradients) if not math.isfinite(total) else None
    if found is not None and found[0] >= floor:
        return found
    return flagged(exact([*layout.targets(gradients), *others], norm_type, layout.device), numel, norm_type)


def _again(parts: _Parts, gradients: Sequence[Tensor]) -> Tensor:
    """Measure in fp64 the parts whose sum is not finite."""
    pairs = list(zip(parts.partials, parts.sources, strict=True))
    sums = list(zip(parts.sums, parts.summed, strict=True))
    doubtful: dict[int, Span | Sequence[Tensor]] = {}
    doubtful.update((id(sources), sources) for partial, sources in pairs if not partial.isfinite().all())
    doubtful.update((id(span), span) for total, span in sums if not math.isfinite(total))
    tensors = [
        tensor
        for sources in doubtful.values()
        for tensor in ([sources.target(gradients)] if isinstance(sources, Span) else sources)
    ]
    found = exact(tensors, parts.norm_type, torch.device("cpu"))
    kept = parts.total(
        [partial for partial, sources in pairs if id(sources) not in doubtful],
        [total for total, span in sums if id(span) not in doubtful],
    )
    amount = max(kept, float(found.amount)) if math.isinf(parts.norm_type) else kept + float(found.amount)
    return torch.tensor(
        (amount, float(found.nan), float(found.inf), math.isinf(amount)), dtype=torch.float64, device="cpu"
    )


class _Parts:
    """Partial results, each with what is needed to measure it again."""

    def __init__(self, norm_type: float) -> None:
        self.norm_type = norm_type
        self.partials: list[Tensor] = []  # norms of rows for p = 2, maxima for inf, sums of rows otherwise
        self.sources: list[Span | Sequence[Tensor]] = []  # of each; the same object where several share it
        self.sums: list[float] = []  # for p = 2, sums of the squares of
        self.summed: list[Span] = []  # these ranges
        self._squares: list[Tensor] = []  # the partials that are not norms yet, but their squares
        self._scratch: dict[tuple[torch.dtype, bool], Tensor] = {}
        self._trays: dict[tuple[torch.dtype, int, tuple[int, ...] | None], _Tray] = {}

    def scratch(self, dtype: torch.dtype, numel: int, *, pack: bool = False) -> Tensor:
        """Uninitialised memory, valid until the next call with the same dtype and use."""
        buffer = self._scratch.get((dtype, pack))
        if buffer is None or buffer.numel() < numel:
            buffer = self._scratch[dtype, pack] = torch.empty(numel, dtype=dtype, device="cpu")
        return buffer[:numel]

    def squares(self, spans: Sequence[Span], gradients: Sequence[Tensor]) -> None:
        """Measure ranges where they lie, by address."""
        for span in spans:
            gradient = gradients[span.first]
            if simd.reaches(gradient):
                self.sums.append(simd.squares(gradient.data_ptr(), gradient.dtype, span.numel))
                self.summed.append(span)
            else:
                self.span(span.target(gradients), span.numel)

    def pack(self, pack: Pack, gradients: Sequence[Tensor]) -> None:
        """Measure small ranges, copied together."""
        key = (pack.dtype, pack.numel, pack.inner)
        tray = self._trays.get(key)
        if tray is None:
            tray = self._trays[key] = self._tray(*key)
        sources = pack.tensors(gradients)
        _join(sources, pack.inner, tray)
        if self.norm_type != 2.0:
            self.any(tray.values, sources)
            return
        if tray.matrix is not None:
            self.matrix(tray.matrix, sources)
        if tray.rest is not None:
            self.rest(tray.rest, sources)

    def _tray(self, dtype: torch.dtype, numel: int, inner: tuple[int, ...] | None) -> _Tray:
        values = self.scratch(dtype, numel, pack=True)
        return _Tray(values if inner is None else values.view(-1, *inner), values, *_cut(values))

    def span(self, values: Tensor, numel: int, sources: Sequence[Tensor] | None = None) -> None:
        """Measure contiguous real numbers. `sources`: where to find them later, if not in `values`."""
        if numel > LONGEST:
            for piece in torch.split(values.view(-1), LONGEST):
                self.span(piece, piece.numel(), sources)
        elif self.norm_type != 2.0:
            self.any(values.view(-1), sources or (values,))
        else:
            matrix, rest = _cut(values)
            if matrix is not None:
                self.matrix(matrix, sources or (matrix,))
            if rest is not None:
                self.rest(rest, sources or (rest,))

    def matrix(self, matrix: Tensor, sources: Span | Sequence[Tensor]) -> None:
        """Measure the rows of a contiguous matrix."""
        if matrix.dtype not in HALF:
            self.partials.append(_norm(matrix, 2, 1))
        elif half_kernel_works():
            squares = half_squares(matrix)
            self.partials.append(squares)
            self._squares.append(squares)
        else:
            self.rest(matrix.view(-1), sources)
            return
        self.sources.append(sources)

    def rest(self, values: Tensor, sources: Span | Sequence[Tensor]) -> None:
        """Measure one-dimensional numbers that have no kernel of their own."""
        for block in blocks(values, _BLOCK):
            copy = block
            if values.dtype in HALF:
                copy = self.scratch(torch.float32, block.numel()).copy_(block)
            for matrix in _rows(copy):
                self.partials.append(_norm(matrix, 2, 1))
                self.sources.append(sources)

    def take_roots(self) -> None:
        """Make norms of what are squares: at once, because a call for each would show."""
        if self._squares:
            torch._foreach_sqrt_(self._squares)
        self._squares.clear()

    def any(self, values: Tensor, sources: Sequence[Tensor], repeat: int = 1) -> None:
        """Measure numbers of any shape, strides, dtype and norm; each element counts `repeat` times."""
        wide = values.dtype in _WIDE or _FP32_POWERS < self.norm_type < math.inf
        dtype = torch.float64 if wide else torch.float32
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

    def total(self, partials: Sequence[Tensor], sums: Sequence[float]) -> float:
        """The sum of powers, or the maximum, over some partial results."""
        if not partials:
            return math.fsum(sums)
        together = partials[0] if len(partials) == 1 else torch.cat(list(partials))
        if self.norm_type == 2.0:
            norm = float(_norm(together, 2.0, dtype=torch.float64))
            return norm * norm + math.fsum(sums)  # inf where ** would raise OverflowError
        if math.isinf(self.norm_type):
            return abs(float(together.amax()))  # never -0.0
        return float(together.sum(dtype=torch.float64))


class _Tray(NamedTuple):
    """Scratch into which small ranges are copied: the same memory seen in several ways."""

    out: Tensor
    """As ranges are joined."""
    values: Tensor
    """One-dimensional."""
    matrix: Tensor | None
    """As rows, and what they leave over."""
    rest: Tensor | None


def _join(sources: tuple[Tensor, ...], inner: tuple[int, ...] | None, tray: _Tray) -> None:
    if inner is None:
        torch.cat(sources, out=tray.out)
        return
    if sources[0].shape[1:] == inner:
        try:
            torch.cat(sources, out=tray.out)
            return
        except RuntimeError:  # they are not alike any more: a layout is kept while numbers of elements stay the same
            pass
    torch.cat([source.view(-1) for source in sources], out=tray.values)


def _cut(values: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Contiguous numbers as a matrix of rows and the one-dimensional rest, where there are such."""
    numel = values.numel()
    rows, row = rows_of(numel, values.dtype)
    matrix = values.as_strided((rows, row), (row, 1)) if rows else None
    return matrix, values.view(-1)[rows * row :] if rows * row < numel else None


def _rows(values: Tensor) -> list[Tensor]:
    """One-dimensional contiguous numbers as a matrix of short rows, and the rest, if any, as one more row."""
    matrix, rest = _cut(values)
    return [rows for rows in (matrix, None if rest is None else rest.view(1, -1)) if rows is not None]
