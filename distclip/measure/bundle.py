"""Gradients that are measured and scaled as one, and how they lie in memory, worked out once for a step."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from distclip.measure.layouts import RangeCache, layouts
from distclip.measure.ranges import Layout

_layout_of = attrgetter("layout")


class Bundle:
    """Local tensors: any mix of sizes, floating point dtypes, devices and strides; empty, expanded, complex and sparse.

    It is for one step: nobody may give the gradients other memory while it is in use. `cache` is kept from step to
    step, so that the walk over thousands of gradients is not repeated while they lie where they did.

    Example:
        >>> bundle = Bundle([torch.ones(2), torch.ones(3)])
        >>> [layout.numel for layout in bundle.layouts]
        [5]
    """

    __slots__ = ("gradients", "layouts", "sparse", "strided")

    def __init__(self, gradients: Sequence[Tensor], cache: RangeCache | None = None) -> None:
        self.gradients = gradients
        self.strided, self.sparse = gradients, list[Tensor]()
        """Those that layouts refer to, and the others."""
        if not set(map(_layout_of, gradients)) <= {torch.strided}:
            self.strided = [gradient for gradient in gradients if gradient.layout is torch.strided]
            self.sparse = [gradient for gradient in gradients if gradient.layout is not torch.strided]
        self.layouts = layouts(self.strided) if cache is None else cache.layouts(self.strided)

    def work(self) -> list[tuple[Layout, list[Tensor]]]:
        """For each device: how to walk its strided gradients, and the gradients to be looked at one by one."""
        work = [(layout, [self.strided[index] for index in layout.others]) for layout in self.layouts]
        for device in dict.fromkeys(gradient.device for gradient in self.sparse):
            work.append((Layout(device), [gradient for gradient in self.sparse if gradient.device == device]))
        return work


def as_bundle(gradients: Sequence[Tensor] | Bundle) -> Bundle:
    """What measures and scales gradients takes a bundle of them, or makes one."""
    return gradients if isinstance(gradients, Bundle) else Bundle(gradients)
