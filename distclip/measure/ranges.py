"""What is read and written in one go: thousands of gradients as a few long ranges of memory.

Most frameworks keep gradients as adjacent views of one buffer: FSDP1's flat gradient, the reduce-scatter output of an
FSDP2 group, DDP's buckets, ZeRO's partitions. Reading the buffer once is much cheaper than visiting each view.

What remains small is listed for packing: copied together into a block of scratch that fits the cache and read there,
because a call per tensor would cost more than the data. Which ranges there are, is found in `distclip.measure.layouts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from distclip import simd
from distclip.measure.values import HALF, ROW

SMALL = 1 << 17
"""Ranges below this number of bytes are packed. Above it, a call per tensor costs less than copying it (measured on
CPU: equal at 64 to 128 KiB), and torch starts to use several threads."""

MEDIUM = range(1 << 14, 1 << 18)
"""Ranges of so many bytes are read by `distclip.simd` where that works. Below, packing costs less; above, torch
may use so many threads that it is faster (on two, equal at 1 MiB)."""

PACK = 1 << 22
"""Bytes packed together: they stay in the second or third level cache."""

SHORT, LONG = 1 << 13, 1 << 16
"""Elements up to which and beyond which other kernels are faster to scale a range: see `distclip.apply`."""

LONGEST = 1 << 24
"""Elements per call for long ranges: short enough that measuring one part again is bearable."""

_ALIKE = 8
"""A pack of its own costs as much as viewing this many gradients one-dimensionally for a common pack."""

_shape = attrgetter("shape")


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
    dtype: torch.dtype
    numel: int
    inner: tuple[int, ...] | None
    """What follows the first dimension, where all are whole gradients alike in it, which can be joined as they are."""
    pick: Picker

    def tensors(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The ranges: as they are if they can be joined so, else as one-dimensional views."""
        return tuple(span.view(gradients) for span in self.spans) if self.inner is None else self.pick(gradients)


class Length(Enum):
    """How many elements a range has."""

    SHORT = auto()
    """At most `SHORT`."""
    MEDIUM = auto()
    LONG = auto()
    """More than `LONG`."""

    @classmethod
    def of(cls, numel: int) -> Length:
        """The length of a range of so many elements."""
        return cls.SHORT if numel <= SHORT else cls.MEDIUM if numel <= LONG else cls.LONG


class Group(NamedTuple):
    """Ranges of one dtype that are written in the same way."""

    dtype: torch.dtype
    length: Length
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
    shapes: tuple[torch.Size, ...] = ()
    """Of these."""
    matrices: list[Matrix] = field(default_factory=list)
    """Other long ranges in fp32 or fp64 that short rows divide evenly."""
    halves: list[Matrix] = field(default_factory=list)
    """Long ranges in half precision that short rows divide evenly."""
    long: list[Span] = field(default_factory=list)
    """Long ranges that need more thought."""
    medium: list[Span] = field(default_factory=list)
    """Ranges neither small nor long, where `distclip.simd` works."""
    packs: list[Pack] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    """All these ranges once more, as they are written."""
    others: list[int] = field(default_factory=list)
    """Gradients that are not contiguous, not real or lazily negated: looked at one by one."""
    numel: int = 0
    """Elements in all ranges."""
    narrow: bool = False
    """Whether any range is narrower than fp64."""

    def spans(self) -> list[Span]:
        """All ranges that are not packed."""
        return [*self.long_spans(), *self.medium]

    def long_spans(self) -> list[Span]:
        """The long ranges."""
        return [*self.rows, *(matrix.span for matrix in (*self.matrices, *self.halves)), *self.long]

    def targets(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """All ranges, long and small, as contiguous tensors of any shape."""
        return [tensor for group in self.groups for tensor in group.tensors(gradients)]

    def shaped_alike(self, gradients: Sequence[Tensor]) -> bool:
        """Whether what is read by its shape has the shape that it had when the layout was made."""
        return tuple(map(_shape, self.pick_rows(gradients))) == self.shapes

    def add(self, spans: list[Span], dtype: torch.dtype, shapes: Sequence[torch.Size]) -> None:
        """Take up ranges of one dtype."""
        by_length: dict[Length, list[Span]] = {}
        for span in spans:
            by_length.setdefault(Length.of(span.numel), []).append(span)
        for length, alike in by_length.items():
            whole = [span.first for span in alike if span.tensors == 1]
            self.groups.append(Group(dtype, length, picker(whole), [span for span in alike if span.tensors > 1]))
        self.narrow |= dtype is not torch.float64
        medium = MEDIUM if self.device.type == "cpu" and dtype in simd.DTYPES and simd.works() else ()
        small: list[Span] = []
        for span in spans:
            self.numel += span.numel
            if span.numel * dtype.itemsize in medium:
                self.medium.append(span)
                continue
            if span.numel * dtype.itemsize < SMALL:
                small.append(span)
                continue
            size = rows_of(span.numel, dtype)
            shape = shapes[span.first]
            if span.numel > LONGEST:
                self.long.append(span)
            elif dtype not in HALF and span.tensors == 1 and len(shape) == 2 and ROW // 4 <= shape[1] <= ROW:
                self.rows.append(span)
            elif span.numel != math.prod(size):
                self.long.append(span)
            else:
                matrices = self.halves if dtype in HALF else self.matrices
                matrices.append(Matrix(span, size, (size[1], 1)))
        self.pick_rows = picker([span.first for span in self.rows])
        self.shapes = tuple(shapes[span.first] for span in self.rows)
        self.packs.extend(_pack(small, dtype, shapes))


def rows_of(numel: int, dtype: torch.dtype) -> tuple[int, int]:
    """The size of the matrix as which a contiguous range is read, (rows, row); what it leaves over is less than a row.

    No rows at all for half precision numbers too few for its kernel.
    """
    if dtype in HALF and numel < ROW:
        return 0, ROW
    row = row_length(numel)
    return numel // row, row


@lru_cache(maxsize=4096)
def row_length(numel: int) -> int:
    """At most `ROW`, and if possible a divisor, so that no rest needs a call of its own."""
    if numel <= ROW:
        return numel
    if numel > PACK:
        return ROW  # one more call does not show
    candidates = [*range(ROW, ROW // 4, -16), *range(ROW - 1, ROW // 4, -1)]
    return next((row for row in candidates if numel % row == 0), ROW)


def _pack(spans: list[Span], dtype: torch.dtype, shapes: Sequence[torch.Size]) -> list[Pack]:
    """Distribute small ranges over packs: what can be joined as it is by shape, all others together."""
    alike: dict[tuple[int, ...] | None, list[Span]] = {}
    for span in spans:
        shape = shapes[span.first]
        alike.setdefault(shape[1:] if shape and span.tensors == 1 else None, []).append(span)
    for few in [inner for inner, members in alike.items() if inner is not None and len(members) < _ALIKE]:
        alike.setdefault(None, []).extend(alike.pop(few))
    packs: list[Pack] = []
    for inner, members in alike.items():
        start = total = 0
        for end, span in enumerate(members):
            if total + span.numel > PACK // dtype.itemsize:
                packs.append(_one_pack(members[start:end], dtype, total, inner))
                start, total = end, 0
            total += span.numel
        packs.append(_one_pack(members[start:], dtype, total, inner))
    return packs


def _one_pack(spans: list[Span], dtype: torch.dtype, numel: int, inner: tuple[int, ...] | None) -> Pack:
    return Pack(spans, dtype, numel, inner, picker([span.first for span in spans]))
