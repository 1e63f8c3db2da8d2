"""Find out how gradients lie in memory, and remember it while they lie so.

Views of one storage that touch exactly are merged into one range; a gap is never bridged, because nobody promises what
padding holds.

Working this out takes two microseconds per gradient, so the answer is kept in a `RangeCache`. It is good for every step
whose gradients are cut alike, wherever they are: backward gives most gradients new memory in every step. It never
holds a tensor, so it keeps no gradient alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter, sub
from typing import NamedTuple, cast

import torch
from torch import Tensor

from distclip.measure.ranges import Layout, Picker, Span, picker
from distclip.measure.values import REAL

_shape, _dtype, _device = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")


class _Key(NamedTuple):
    """What a layout depends on, of every gradient."""

    offsets: tuple[int, ...]
    """Where each begins in its storage: views that touch differ from gradients with a storage each."""
    numels: tuple[int, ...]
    contiguous: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[int, ...]
    negated: tuple[bool, ...]
    """Whether each is lazily negated."""


class RangeCache:
    """Remembers how the gradients of one bucket lie in memory. Keep one for each bucket and pass it to every call."""

    __slots__ = ("_key", "_layouts", "_seams")

    def __init__(self) -> None:
        self._key: _Key | None = None
        self._layouts: list[Layout] = []
        self._seams: _Seams | None = None

    def layouts(self, gradients: Sequence[Tensor]) -> list[Layout]:
        """The layouts for these strided gradients, one for each device, worked out again only if they are cut anew."""
        key = _key(gradients)
        if not (
            key == self._key
            and (self._seams is None or self._seams.hold(gradients))
            and all(layout.shaped_alike(gradients) for layout in self._layouts)
        ):
            self._layouts, self._seams = _find(gradients, key)
            self._key = key
        return self._layouts


def layouts(gradients: Sequence[Tensor]) -> list[Layout]:
    """As `RangeCache.layouts`, without remembering."""
    return _find(gradients, _key(gradients))[0]


def _key(gradients: Sequence[Tensor]) -> _Key:
    # map() over the C methods: these walks are most of the host's work when there are thousands of tiny gradients.
    # Shapes would take as long as three of them, and few ranges depend on more than their number of elements.
    return _Key(
        tuple(map(cast(Callable[[Tensor], int], Tensor.storage_offset), gradients)),
        tuple(map(Tensor.numel, gradients)),
        tuple(map(Tensor.is_contiguous, gradients)),
        tuple(map(_dtype, gradients)),
        tuple(map(Tensor.get_device, gradients)),
        tuple(map(Tensor.is_neg, gradients)),
    )


class _Seams(NamedTuple):
    """Where gradients touch that are merged."""

    pick: Picker
    """Takes all merged gradients, range by range, in the order of their addresses."""
    touching: tuple[bool, ...]
    """For every one but the last, whether the next one belongs to the same range."""
    sizes: tuple[int, ...]
    """Bytes of those whose next one does."""
    firsts: tuple[tuple[int, int], ...]
    """(first gradient, bytes) of every range."""

    def hold(self, gradients: Sequence[Tensor]) -> bool:
        """Whether every range still is one piece of one storage.

        Touching addresses are not enough: an allocator may have placed separate tensors so.
        """
        pointers = tuple(map(Tensor.data_ptr, self.pick(gradients)))
        distances = compress(map(sub, pointers[1:], pointers), self.touching)
        return tuple(distances) == self.sizes and all(_room(gradients[first]) >= size for first, size in self.firsts)


def _room(gradient: Tensor) -> int:
    """Bytes from the gradient's first element to the end of its storage."""
    return gradient.untyped_storage().nbytes() - int(gradient.storage_offset()) * gradient.element_size()


def _find(gradients: Sequence[Tensor], key: _Key) -> tuple[list[Layout], _Seams | None]:
    numels, dtypes = key.numels, key.dtypes
    devices = list(map(_device, gradients))
    negated = key.negated
    found = {device: Layout(device) for device in dict.fromkeys(devices)}
    flat: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    if (
        len(found) == len(set(dtypes)) == 1
        and dtypes[0] in REAL
        and all(numels)
        and all(key.contiguous)
        and not any(negated)
    ):
        flat[devices[0], dtypes[0]] = list(range(len(gradients)))
    else:
        for index, (device, dtype, plain) in enumerate(zip(devices, dtypes, key.contiguous, strict=True)):
            if not numels[index]:
                continue
            if plain and dtype in REAL and not negated[index]:
                flat.setdefault((device, dtype), []).append(index)
            else:
                found[device].others.append(index)
    shapes = list(map(_shape, gradients))
    merged: list[list[int]] = []
    for (device, dtype), indices in flat.items():
        ranges = _merge(indices, gradients, key, dtype.itemsize)
        merged += [members for members in ranges if len(members) > 1]
        spans = [Span(members[0], sum(numels[index] for index in members), len(members)) for members in ranges]
        found[device].add(spans, dtype, shapes)
    layouts = [layout for layout in found.values() if layout.numel or layout.others]
    return layouts, _seams(merged, key) if merged else None


def _merge(indices: list[int], gradients: Sequence[Tensor], key: _Key, itemsize: int) -> list[list[int]]:
    """Gradients of one dtype and device as ranges: views of one storage that touch exactly are together."""
    if not any(key.offsets[index] for index in indices):
        return [[index] for index in indices]  # each starts its own storage: nothing can touch
    pointers = list(map(Tensor.data_ptr, gradients))
    ranges: list[list[int]] = []
    storage = end = -1
    for index in sorted(indices, key=pointers.__getitem__):
        this_storage = gradients[index].untyped_storage().data_ptr()
        if this_storage == storage and pointers[index] == end:
            ranges[-1].append(index)
        else:
            ranges.append([index])
        storage, end = this_storage, pointers[index] + key.numels[index] * itemsize
    return ranges


def _seams(merged: list[list[int]], key: _Key) -> _Seams:
    sizes = {index: key.numels[index] * key.dtypes[index].itemsize for members in merged for index in members}
    touching = [position < len(members) - 1 for members in merged for position in range(len(members))]
    return _Seams(
        picker([*sizes]),
        tuple(touching[:-1]),
        tuple(compress(sizes.values(), touching)),
        tuple((members[0], sum(sizes[index] for index in members)) for members in merged),
    )
