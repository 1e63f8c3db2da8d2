"""Turn thousands of gradients into a few long ranges of memory.

Most frameworks keep gradients as adjacent views of one buffer: FSDP1's flat gradient, the reduce-scatter output of an
FSDP2 group, DDP's buckets, ZeRO's partitions. Reading the buffer once is much cheaper than visiting each view. So views
of one storage that touch exactly are merged; a gap is never bridged, because nobody promises what padding holds.

What remains small is listed for packing: copied together into a block of scratch that fits the cache and read there,
because a call per tensor would cost more than the data.

Working this out takes about a microsecond per gradient, so the answer is kept in a `RangeCache` and reused while the
gradients lie at the same addresses with the same sizes. It never holds a tensor, so it keeps no gradient alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from distclip.measure.values import is_plain

SMALL = 1 << 15
"""Gradients below this number of elements are packed. Above it, a call per tensor costs less than copying it
(measured on CPU: equal at 16K to 33K elements), and torch starts to use several threads."""

PACK = 1 << 19
"""Elements packed together: 2 MiB of fp32, which stays in the second or third level cache."""

_dtype = attrgetter("dtype")

_Key = tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...], tuple[torch.dtype, ...]]


@dataclass(frozen=True, slots=True)
class Span:
    """One contiguous range: it starts at gradient `first`, has `numel` elements and covers `count` gradients."""

    first: int
    numel: int
    count: int

    def view(self, gradients: Sequence[Tensor]) -> Tensor:
        """The range as a one-dimensional tensor."""
        gradient = gradients[self.first]
        if self.count == 1 and gradient.dim() == 1:
            return gradient  # a view costs a microsecond, as much as reading a small gradient
        return gradient.as_strided((self.numel,), (1,))

    def target(self, gradients: Sequence[Tensor]) -> Tensor:
        """The range as a tensor of any shape."""
        gradient = gradients[self.first]
        return gradient if self.count == 1 else gradient.as_strided((self.numel,), (1,))


@dataclass(frozen=True, slots=True)
class Layout:
    """How to walk the gradients of one device."""

    device: torch.device
    long: list[Span]
    """Ranges worth a call of their own."""
    packs: list[list[Span]]
    """Small ranges of one dtype, at most `PACK` elements together."""
    others: list[int]
    """Gradients that are not contiguous, not real or lazily negated: looked at one by one."""
    merged: list[tuple[int, int]] = field(default_factory=list)
    """(first gradient, bytes) of each merged range: what its storage must still hold."""


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
        tuple(map(Tensor.numel, gradients)),
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
    by_device: dict[torch.device, list[int]] = {}
    for index, (gradient, numel) in enumerate(zip(gradients, key[1], strict=True)):
        if numel:
            by_device.setdefault(gradient.device, []).append(index)
    return [_layout(device, indices, gradients, key) for device, indices in by_device.items()]


def _layout(device: torch.device, indices: list[int], gradients: Sequence[Tensor], key: _Key) -> Layout:
    pointers, numels, _, dtypes = key
    layout = Layout(device, [], [], [])
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index in indices:
        if is_plain(gradients[index]):
            by_dtype.setdefault(dtypes[index], []).append(index)
        else:
            layout.others.append(index)
    for dtype, flat in by_dtype.items():
        pack: list[Span] = []
        packed = 0
        for first, numel, count in _merge(flat, gradients, pointers, numels, dtype.itemsize):
            if count > 1:
                layout.merged.append((first, numel * dtype.itemsize))
            span = Span(first, numel, count)
            if numel >= SMALL:
                layout.long.append(span)
                continue
            if packed + numel > PACK:
                layout.packs.append(pack)
                pack, packed = [], 0
            pack.append(span)
            packed += numel
        if pack:
            layout.packs.append(pack)
    return layout


def _merge(
    indices: list[int], gradients: Sequence[Tensor], pointers: tuple[int, ...], numels: tuple[int, ...], itemsize: int
) -> list[tuple[int, int, int]]:
    """(first gradient, elements, number of gradients) of each range of exactly adjacent views of one storage."""
    if not any(gradients[index].storage_offset() for index in indices):
        return [(index, numels[index], 1) for index in indices]  # each starts its own storage: nothing can touch
    ordered = sorted(indices, key=pointers.__getitem__)
    merged: list[tuple[int, int, int]] = []
    first, numel, count, storage = ordered[0], 0, 0, -1
    for index in ordered:
        this_storage = gradients[index].untyped_storage().data_ptr()
        if this_storage == storage and pointers[index] == pointers[first] + numel * itemsize:
            numel, count = numel + numels[index], count + 1
            continue
        if count:
            merged.append((first, numel, count))
        first, numel, count, storage = index, numels[index], 1, this_storage
    merged.append((first, numel, count))
    return merged
