"""Measure gradients on the CPU: rows in fp32, everything across rows in fp64, and a second look where the sum is odd.

For p = 2 a long range is read once, as a matrix with short rows. Small ranges are copied together first. Other norms
take the powers block by block in scratch that fits the cache; the inf-norm needs no scratch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from distclip.measure.exact import FP64_FLOOR, exact, flagged
from distclip.measure.ranges import LONGEST, ROW, Layout, Span, row_length
from distclip.measure.values import REAL, blocks, readable

_HALF_ROW = 1024
"""As `ROW`, for half precision, which is spread over 32 accumulators."""

_BLOCK = 1 << 19
"""Elements of scratch: 2 MiB of fp32."""

# A power below 2^-126, the smallest normal fp32 number, may be lost. N elements lose at most N * 2^-126, which is at
# most 2^-30 of the sum unless the sum is below N * 2^-96.
_FP32_FLOOR = 2.0**-96

_FP32_POWERS = 3.0
"""Up to this p the powers of fp32 numbers are taken in fp32; beyond, ordinary gradients would be lost in underflow."""

_HALF = frozenset((torch.bfloat16, torch.float16))
_WIDE = frozenset((torch.float64, torch.complex128))
_norm = torch.linalg.vector_norm


def measure_on_cpu(layout: Layout, gradients: Sequence[Tensor], others: Sequence[Tensor], norm_type: float) -> Tensor:
    """[amount, nan count, inf count, flag] of a layout's ranges and of other gradients, as `measure` returns them."""
    parts = _Parts(norm_type)
    if norm_type == 2.0:
        # Thousands of ranges may come this way, so the host does nothing but call the kernel.
        parts.partials += map(_norm, layout.pick_rows(gradients), itertools.repeat(2), itertools.repeat(1))
        parts.sources += layout.rows
        parts.partials += [_norm(gradients[m.span.first].as_strided(m.size, m.stride), 2, 1) for m in layout.matrices]
        parts.sources += [matrix.span for matrix in layout.matrices]
    for span in layout.long if norm_type == 2.0 else layout.spans():
        parts.span(span.target(gradients), span.numel)
    for pack in layout.packs:
        joined = parts.scratch(gradients[pack.spans[0].first].dtype, pack.numel, pack=True)
        sources = pack.join(gradients, joined)
        parts.span(joined, pack.numel, sources)
    for gradient in others:
        values, repeat = readable(gradient)
        if norm_type == 2.0 and values.is_complex() and values.is_contiguous():
            values = torch.view_as_real(values).flatten()  # |g|^2 is the sum of two squares
        numel = values.numel()
        if numel and values.dtype in REAL and values.is_contiguous() and repeat == 1:
            parts.span(values, numel, (gradient,))
        elif numel:
            parts.any(values, (gradient,), repeat)
    if not parts.partials:
        return torch.zeros(4, dtype=torch.float64, device="cpu")
    total = parts.total(parts.partials)
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
    doubtful = {id(sources): sources for partial, sources in pairs if not partial.isfinite().all()}
    tensors = [
        tensor
        for sources in doubtful.values()
        for tensor in ([sources.target(gradients)] if isinstance(sources, Span) else sources)
    ]
    found = exact(tensors, parts.norm_type, torch.device("cpu"))
    good = [partial for partial, sources in pairs if id(sources) not in doubtful]
    kept = parts.total(good) if good else 0.0
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
        self._scratch: dict[tuple[torch.dtype, bool], Tensor] = {}

    def scratch(self, dtype: torch.dtype, numel: int, *, pack: bool = False) -> Tensor:
        """Uninitialised memory, valid until the next call with the same dtype and use."""
        buffer = self._scratch.get((dtype, pack))
        if buffer is None or buffer.numel() < numel:
            buffer = self._scratch[dtype, pack] = torch.empty(numel, dtype=dtype, device="cpu")
        return buffer[:numel]

    def span(self, values: Tensor, numel: int, sources: Sequence[Tensor] | None = None) -> None:
        """Measure contiguous real numbers. `sources`: where to find them later, if not in `values`."""
        if numel > LONGEST:
            for piece in torch.split(values.view(-1), LONGEST):
                self.span(piece, piece.numel(), sources)
        elif self.norm_type != 2.0:
            self.any(values.view(-1), sources or (values,))
        elif values.dtype in _HALF:
            self._halves(values.view(-1), numel, sources or (values,))
        else:
            self._squares(values, numel, sources)

    def _squares(self, values: Tensor, numel: int, sources: Sequence[Tensor] | None = None) -> None:
        """Rows of a contiguous range in its own precision."""
        row = row_length(numel)
        rows = numel // row
        matrix = values.as_strided((rows, row), (row, 1))
        self.partials.append(_norm(matrix, 2, dim=1))
        self.sources.append(sources or (matrix,))
        if rows * row < numel:
            rest = values.view(-1)[rows * row :]
            self.partials.append(_norm(rest.view(1, -1), 2, dim=1))
            self.sources.append(sources or (rest,))

    def _halves(self, values: Tensor, numel: int, sources: Sequence[Tensor]) -> None:
        """Rows of one-dimensional half precision numbers."""
        row = row_length(numel, _HALF_ROW)
        rows = numel // row if row >= ROW and half_kernel_works() else 0
        if rows:
            self.partials.append(half_squares(values, rows, row).sqrt_())
            self.sources.append(sources)
        for rest in blocks(values[rows * row :], _BLOCK):
            copy = self.scratch(torch.float32, rest.numel()).copy_(rest)
            for matrix in _rows(copy):
                self.partials.append(_norm(matrix, 2, 1))
                self.sources.append(sources)

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

    def total(self, partials: Sequence[Tensor]) -> float:
        """The sum of powers, or the maximum, over some partial results."""
        together = partials[0] if len(partials) == 1 else torch.cat(list(partials))
        if self.norm_type == 2.0:
            norm = float(_norm(together, 2.0, dtype=torch.float64))
            return norm * norm  # inf where ** would raise OverflowError
        if math.isinf(self.norm_type):
            return abs(float(together.amax()))  # never -0.0
        return float(together.sum(dtype=torch.float64))


def half_squares(values: Tensor, rows: int, row: int) -> Tensor:
    """Sums of squares, in fp32, of `rows` rows of half precision numbers.

    torch's reductions round their result to the precision of the input, and converting the input first costs twice as
    much as reading it. The backward pass of group norm has to sum the products of two half precision tensors over
    rows into fp32 weights: with the gradient as both tensors, mean 0 and deviation 1, those are the sums wanted, in
    one pass.
    """
    matrix = values.as_strided((1, rows, row), (rows * row, row, 1))
    mean, deviation, weight = _constants(rows)
    wanted = (False, True, False)  # of the gradients of input, weight and bias
    found = torch.ops.aten.native_group_norm_backward(matrix, matrix, mean, deviation, weight, 1, rows, row, 1, wanted)
    return cast(Tensor, found[1])


@lru_cache(maxsize=16)
def _constants(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return _cpu_full((1, 1), 0.0), _cpu_full((1, 1), 1.0), _cpu_full((rows,), 1.0)


def _cpu_full(size: tuple[int, ...], value: float) -> Tensor:
    return torch.full(size, value, dtype=torch.float32, device="cpu")


@lru_cache(maxsize=1)
def half_kernel_works() -> bool:
    """Whether this torch's group norm does what `half_squares` takes for granted."""
    values = torch.full((2 * _HALF_ROW,), 0.5, dtype=torch.bfloat16, device="cpu")
    try:
        squares = half_squares(values, 2, _HALF_ROW)
    except RuntimeError:
        return False
    return squares.dtype is torch.float32 and squares.tolist() == [_HALF_ROW / 4, _HALF_ROW / 4]


def _rows(values: Tensor) -> list[Tensor]:
    """One-dimensional contiguous numbers as a matrix of short rows, and the rest, if any, as one more row."""
    numel = values.numel()
    row = row_length(numel)
    rows = numel // row
    matrix = values.as_strided((rows, row), (row, 1))
    return [matrix] if rows * row == numel else [matrix, values[rows * row :].view(1, -1)]
