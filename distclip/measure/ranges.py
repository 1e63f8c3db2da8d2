"""Turn thousands of gradients into a few long ranges of memory.

Most frameworks keep gradients as adjacent views of one buffer: FSDP1's flat gradient, the reduce-scatter output of an
FSDP2 group, DDP's buckets, ZeRO's partitions. Reading the buffer once is much cheaper than visiting each view. So views
of one storage that touch exactly are merged; a gap is never bridged, because nobody promises what padding holds.

What remains small is listed for packing: copied together into a block of scratch that fits the cache and read there,
because a call per tensor would cost more than the data.

Working this out takes about a microsecond per gradient, so the answer is kept in a `RangeCache` and reused while the
gradients lie at the same addresses with the same shapes. It never holds a tensor, so it keeps no gradient alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from distclip.measure.values import REAL

SMALL = 1 << 17
"""Ranges below this number of bytes are packed. Above it, a call per tensor costs less than copying it (measured on
CPU: equal at 64 to 128 KiB), and torch starts to use several threads."""

PACK = 1 << 21
"""Bytes packed together: they stay in the second or third level cache."""

ROW = 256
"""Elements accumulated in fp32. On CPU a row is spread over 16 accumulators, so each adds 16 squares."""

SHORT = 1 << 16
"""Elements up to which another kernel scales a range faster: see `distclip.apply`."""

LONGEST = 1 << 24
"""Elements per call for long ranges: short enough that measuring one part again is bearable."""

_ALIKE = 8
"""A pack of its own costs as much as viewing this many gradients one-dimensionally for a common pack."""

_shape, _dtype, _device = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")

_Key = tuple[tuple[int, ...], tuple[torch.Size, ...], tuple[bool, ...], tuple[torch.dtype, ...]]


class Span(NamedTuple):
    """One contiguous range: it starts at gradient `first`, has `numel` elements and covers `tensors` gradients."""

    first: int
    numel: int
    tensors: int

    def view(self, gradients: Sequence[Tensor]) -> Tensor:
        """The range as a one-dimensional tensor."""
        gradient = gradients[self.first]
        if self.tensors == 1 and gradient.dim() == 1:
            return gradient  # a view costs a microsecond, as much as reading a small gradient
        return gradient.as_strided((self.numel,), (1,))

    def target(self, gradients: Sequence[Tensor]) -> Tensor:
        """The range as a contiguous tensor of any shape."""
        gradient = gradients[self.first]
        return gradient if self.tensors == 1 else gradient.as_strided((self.numel,), (1,))


Picker = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


def picker(indices: Sequence[int]) -> Picker:
    """A function that takes these gradients out of a list, at the speed of C."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda gradients: tuple(gradients[index] for index in indices)


class Pack(NamedTuple):
    """Small ranges of one dtype, at most `PACK` bytes together."""

    spans: list[Span]
    numel: int
    rows: tuple[int, ...] | None
    """What follows the first dimension, where all are whole gradients that agree in it and can be joined as is."""
    pick: Picker

    def join(self, gradients: Sequence[Tensor], out: Tensor) -> tuple[Tensor, ...]:
        """Copy all into the one-dimensional `out`, which has `numel` elements. Returns the tensors that were copied."""
        tensors = self.tensors(gradients)
        torch.cat(tensors, out=out if self.rows is None else out.view(-1, *self.rows))
        return tensors

    def tensors(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The ranges: as they are if they can be joined so, else as one-dimensional views."""
        return tuple(span.view(gradients) for span in self.spans) if self.rows is None else self.pick(gradients)


class Group(NamedTuple):
    """Ranges of one dtype that are written by one call."""

    dtype: torch.dtype
    short: bool
    """Whether none has more than `SHORT` elements; else all have."""
    pick: Picker
    merged: list[Span]

    def tensors(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The ranges as contiguous tensors of any shape."""
        return [*self.pick(gradients), *(span.view(gradients) for span in self.merged)]


class Matrix(NamedTuple):
    """A long range and how to see it as short rows: `as_strided(size, stride)`."""

    span: Span
    size: tuple[int, int]
    stride: tuple[int, int]


@dataclass(slots=True)
class Layout:
    """How to walk the gradients of one device."""

    device: torch.device
    rows: list[Span] = field(default_factory=list)
    """Matrices in fp32 or fp64 that consist of short rows already: no view is needed to read them exactly."""
    pick_rows: Picker = field(default=picker(()))
    """Takes these out of the gradients."""
    matrices: list[Matrix] = field(default_factory=list)
    """Other long ranges in fp32 or fp64 that short rows divide evenly."""
    long: list[Span] = field(default_factory=list)
    """Long ranges that need more thought."""
    packs: list[Pack] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    """All these ranges once more, as they are written."""
    others: list[int] = field(default_factory=list)
    """Gradients that are not contiguous, not real or lazily negated: looked at one by one."""
    merged: list[tuple[int, int]] = field(default_factory=list)
    """(first gradient, bytes) of each merged range: what its storage must still hold."""
    numel: int = 0
    """Elements in all ranges."""
    narrow: bool = False
    """Whether any range is narrower than fp64."""

    def spans(self) -> list[Span]:
        """The long ranges."""
        return [*self.rows, *(matrix.span for matrix in self.matrices), *self.long]

    def targets(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """All ranges, long and small, as contiguous tensors of any shape."""
        return [tensor for group in self.groups for tensor in group.tensors(gradients)]

    def add(self, spans: list[Span], dtype: torch.dtype, shapes: Sequence[torch.Size]) -> None:
        """Take up ranges of one dtype."""
        for short in (True, False):
            alike = [span for span in spans if (span.numel <= SHORT) is short]
            if alike:
                whole = [span.first for span in alike if span.tensors == 1]
                self.groups.append(Group(dtype, short, picker(whole), [span for span in alike if span.tensors > 1]))
        self.narrow |= dtype is not torch.float64
        self.merged.extend((span.first, span.numel * dtype.itemsize) for span in spans if span.tensors > 1)
        small: list[Span] = []
        for span in spans:
            self.numel += span.numel
            if span.numel * dtype.itemsize < SMALL:
                small.append(span)
                continue
            row = row_length(span.numel)
            shape = shapes[span.first]
            if dtype.itemsize < 4 or span.numel > LONGEST:
                self.long.append(span)
            elif span.tensors == 1 and len(shape) == 2 and ROW // 4 <= shape[1] <= ROW:
                self.rows.append(span)
            elif span.numel % row:
                self.long.append(span)
            else:
                self.matrices.append(Matrix(span, (span.numel // row, row), (row, 1)))
        self.pick_rows = picker([span.first for span in self.rows])
        self.packs.extend(_pack(small, shapes, PACK // dtype.itemsize))


@lru_cache(maxsize=4096)
def row_length(numel: int, longest: int = ROW) -> int:
    """At most `longest`, and if possible a divisor, so that no rest needs a call of its own."""
    if numel <= longest:
        return numel
    if numel > PACK:
        return longest  # one more call does not show
    candidates = [*range(longest, longest // 4, -16), *range(longest - 1, longest // 4, -1)]
    return next((row for row in candidates if numel % row == 0), longest)


class RangeCache:
    """Remembers how the gradients of one bucket lie in memory. Keep one for each bucket and pass it to every call."""

    __slots__ = ("_key", "_layouts")

    def __init__(self) -> None:
        self._key: _Key | None = None
        self._layouts: list[Layout] = []

    def layouts(self, gradients: Sequence[Tensor]) -> list[Layout]:
        """The layouts for these strided gradients, one for each device, worked out again only if something moved."""
        key = _key(gradients)
        if key != self._key or not all(_still_there(layout, gradients) for layout in self._layouts):
            self._layouts = _layouts(gradients, key)
            self._key = key
        return self._layouts


def layouts(gradients: Sequence[Tensor]) -> list[Layout]:
    """As `RangeCache.layouts`, without remembering."""
    return _layouts(gradients, _key(gradients))


def _key(gradients: Sequence[Tensor]) -> _Key:
    # map() over the C methods: these four walks are most of the host's work when there are thousands of tiny gradients.
    return (
        tuple(map(Tensor.data_ptr, gradients)),
        tuple(map(_shape, gradients)),
        tuple(map(Tensor.is_contiguous, gradients)),
        tuple(map(_dtype, gradients)),
    )


def _still_there(layout: Layout, gradients: Sequence[Tensor]) -> bool:
    """Whether each merged range still lies within one storage.

    Equal addresses are not enough: an allocator may have placed separate tensors where one buffer was.
    """
    return all(_room(gradients[first]) >= size for first, size in layout.merged)


def _room(gradient: Tensor) -> int:
    """Bytes from the gradient's first element to the end of its storage."""
    return gradient.untyped_storage().nbytes() - int(gradient.storage_offset()) * gradient.element_size()


def _layouts(gradients: Sequence[Tensor], key: _Key) -> list[Layout]:
    pointers, shapes, contiguous, dtypes = key
    numels = list(map(Tensor.numel, gradients))
    devices = list(map(_device, gradients))
    negated = any(map(Tensor.is_neg, gradients))
    found = {device: Layout(device) for device in dict.fromkeys(devices)}
    flat: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    if len(found) == len(set(dtypes)) == 1 and dtypes[0] in REAL and all(numels) and all(contiguous) and not negated:
        flat[devices[0], dtypes[0]] = list(range(len(gradients)))
    else:
        for index, (device, dtype, plain) in enumerate(zip(devices, dtypes, contiguous, strict=True)):
            if not numels[index]:
                continue
            if plain and dtype in REAL and not (negated and gradients[index].is_neg()):
                flat.setdefault((device, dtype), []).append(index)
            else:
                found[device].others.append(index)
    for (device, dtype), indices in flat.items():
        found[device].add(_merge(indices, gradients, pointers, numels, dtype.itemsize), dtype, shapes)
    return [layout for layout in found.values() if layout.numel or layout.others]


def _merge(
    indices: list[int], gradients: Sequence[Tensor], pointers: tuple[int, ...], numels: list[int], itemsize: int
) -> list[Span]:
    """Join exactly adjacent views of one storage."""
    if not any(gradients[index].storage_offset() for index in indices):
        return [Span(index, numels[index], 1) for index in indices]  # each starts its own storage: nothing can touch
    merged: list[Span] = []
    first = numel = count = 0
    storage = -1
    for index in sorted(indices, key=pointers.__getitem__):
        this_storage = gradients[index].untyped_storage().data_ptr()
        if count and this_storage == storage and pointers[index] == pointers[first] + numel * itemsize:
            numel, count = numel + numels[index], count + 1
            continue
        if count:
            merged.append(Span(first, numel, count))
        first, numel, count, storage = index, numels[index], 1, this_storage
    merged.append(Span(first, numel, count))
    return merged


def _pack(spans: list[Span], shapes: Sequence[torch.Size], most: int) -> list[Pack]:
    """Distribute small ranges over packs of at most `most` elements: what can be joined as it is by shape, all others
    together."""
    alike: dict[tuple[int, ...] | None, list[Span]] = {}
    for span in spans:
        shape = shapes[span.first]
        alike.setdefault(shape[1:] if shape and span.tensors == 1 else None, []).append(span)
    for few in [rows for rows, members in alike.items() if rows is not None and len(members) < _ALIKE]:
        alike.setdefault(None, []).extend(alike.pop(few))
    packs: list[Pack] = []
    for rows, members in alike.items():
        start = total = 0
        for end, span in enumerate(members):
            if total + span.numel > most:
                packs.append(_one_pack(members[start:end], total, rows))
                start, total = end, 0
            total += span.numel
        packs.append(_one_pack(members[start:], total, rows))
    return packs


def _one_pack(spans: list[Span], numel: int, rows: tuple[int, ...] | None) -> Pack:
    return Pack(spans, numel, rows, picker([span.first for span in spans]))
