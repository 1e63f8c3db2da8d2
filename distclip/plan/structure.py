"""What a source consists of, so that a later step sees cheaply that this has changed.

A plan is made of parameters, and a model can get others afterwards: a layer is added, a head replaced or deleted, a
wrapper put around. Walking the model in every step would cost more than clipping it, so this looks where changes show:

- the parameters that modules hold, one by one, but by identity and in built-in functions: less than reading `.grad` of
  each. Sees also what is written past `Module.__setattr__`, as `fully_shard` and `Module.to_empty` do;
- how many submodules the modules have: sees what is deleted, which calls no hook;
- how often anything was registered in any module of this process, by torch's public registration hooks: sees modules
  that are added or replaced.

Only a module that somebody else writes into `_modules` directly, in the place of another, is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from distclip.plan.sources import modules_of, tensors_of

_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel)
_END = object()


class _Registrations:
    """Counts what is registered in modules of this process, from the first clipper on."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = False

    def start(self) -> None:
        """Register the hooks, once. They stay: one integer is all that they cost."""
        if not self._counting:
            self._counting = True
            register_module_parameter_registration_hook(self._add)
            register_module_module_registration_hook(self._add)

    def _add(self, _module: nn.Module, _name: str, _part: Any) -> None:
        self.count += 1


_registrations = _Registrations()


class Structure:
    """The parts of a source, given as `sources.items_of(source)`, at the time of a plan.

    Example:
        >>> items = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))]
        >>> structure = Structure(items)
        >>> structure.changed(items)
        False
        >>> del items[0][1]
        >>> structure.changed(items)
        True
    """

    def __init__(self, items: list[Any]) -> None:
        _registrations.start()
        self._items = items
        self._count = _registrations.count
        modules = list(dict.fromkeys(module for root in modules_of(items) for module in root.modules()))
        parameters = [module._parameters for module in modules]
        children = [module._modules for module in modules]
        # What is empty can only be added to, which the hooks see.
        self._held = _Parts(filter(None, parameters))
        self._children = list(filter(None, children))
        self._size = sum(map(len, self._children))
        self._all = _Parts([*parameters, *children])
        # DDP and FSDP1 can leave the parameters the same objects, and still change who reduces their gradients.
        wrappers = [module for module in modules if isinstance(module, _WRAPPERS)]
        self._meant = set(map(id, [*tensors_of(items), *wrappers]))

    def changed(self, items: list[Any]) -> bool:
        """Whether the source has other parameters or wrappers now."""
        if items is not self._items:
            return True
        same = self._size == sum(map(len, self._children)) and self._held.same()
        count = _registrations.count
        if same and count == self._count:
            return False
        if same and self._all.same():
            # Somebody else's module, or a view that FSDP1 registers anew in every step.
            self._count = count
            return False
        now = Structure(items)
        if now._meant != self._meant:
            return True
        # A module without parameters came or went, or their order is another.
        self.__dict__.update(now.__dict__)
        return False


class _Parts:
    """What some modules' dictionaries hold, to be compared by identity."""

    def __init__(self, holders: Iterable[Mapping[str, Any]]) -> None:
        # The end belongs to both lists, so that one that is shorter differs there.
        self._views = [*(holder.values() for holder in holders), (_END,)]
        self._parts = list(chain.from_iterable(self._views))

    def same(self) -> bool:
        """Whether the dictionaries hold the same objects as before, in the same order."""
        return all(map(is_, chain.from_iterable(self._views), self._parts))
