"""DistributedDataParallel: whether the last backward synchronised, and what it never synchronises.

`require_backward_grad_sync` is False inside `no_sync()` and True again outside, so the flag must be read when the
forward runs, with grad enabled: DDP prepares its reducer there. (`require_forward_param_sync` is another flag and
turns False after a forward without grad.) Before the first recorded forward the state of now is taken.

Private names, all in this file: `_join_config` (torch/distributed/algorithms/join.py, torch 1.10 to 2.13),
`_ddp_ignored`, which `_set_params_and_buffers_to_ignore_for_model` puts on parameters, and `_delay_all_reduce_params`
(torch 2.1 to 2.13); where one is gone, what it tells is not checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distclip.errors import LayoutError
from distclip.plan.sources import Found

_last_forward_synchronises: weakref.WeakKeyDictionary[DistributedDataParallel, bool] = weakref.WeakKeyDictionary()


def watch(module: DistributedDataParallel) -> None:
    """Record at every forward from now on whether its backward will synchronise. Idempotent."""
    if module not in _last_forward_synchronises:
        _last_forward_synchronises[module] = module.require_backward_grad_sync
        module.register_forward_pre_hook(_record)


def check_join(module: DistributedDataParallel) -> None:
    """Raise inside `module.join()` with uneven inputs.

    Ranks that have run out of inputs answer the all-reduces of forward and backward there, and would take the packet
    for one of those. Raised at once and not through the packet, for the same reason: by every rank that still has
    inputs, in the first step, so that those which wait for it there end with the process group.
    """
    config = getattr(module, "_join_config", None)
    if config is not None and config.enable and not config.throw_on_early_termination:
        raise LayoutError(
            "clipping inside DistributedDataParallel.join() with uneven inputs is not possible: ranks that have run "
            "out of batches cannot take part in the decision, and their optimizers would not step. Use "
            "join(throw_on_early_termination=True), or give all ranks as many batches"
        )


def check_ignored(found: Sequence[Found], declared: Sequence[bool], ranks: int) -> None:
    """Raise LayoutError for parameters that DDP was told to ignore and that are not `declared`.

    No one reduces their gradients, so that each rank has one of its own, however alike the values still are. One that
    is frozen has none. `ranks`: how many there are where the wrapper is not known.
    """
    ignored: dict[DistributedDataParallel, set[int]] = {}
    names = []
    for item, known in zip(found, declared, strict=True):
        if not item.parameter.requires_grad or isinstance(item.parameter, DTensor):
            continue
        if item.ddp is None:
            lonely = ranks > 1 and item.fsdp1 is None and bool(getattr(item.parameter, "_ddp_ignored", False))
        else:
            if item.ddp not in ignored:
                ignored[item.ddp] = _ignored_by(item.ddp)
            lonely = id(item.parameter) in ignored[item.ddp]
        if lonely and not known:
            names.append(item.name)
    if names:
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        raise LayoutError(
            f"DistributedDataParallel was told to ignore {', '.join(map(repr, names[:10]))}{more}, so nobody reduces "
            "these gradients and every rank has its own: declare the parameters with owned=[...], or, if you reduce "
            "them yourself, with owned={pattern: the group that you reduce over}"
        )


def _ignored_by(module: DistributedDataParallel) -> set[int]:
    """Ids of the parameters whose gradients `module` leaves alone, by the names that its reducer goes by."""
    if not module.parameters_to_ignore or dist.get_world_size(module.process_group) == 1:
        return set()
    left: set[int] = set()
    reduced = set(map(id, getattr(module, "_delay_all_reduce_params", ())))
    for prefix, part in module.module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            (left if f"{prefix}.{name}" in module.parameters_to_ignore else reduced).add(id(parameter))
    return left - reduced


def synchronised(module: DistributedDataParallel) -> bool:
    """Whether the last backward through `module` reduced gradients over the ranks."""
    return _last_forward_synchronises.get(module, module.require_backward_grad_sync)


def _record(module: torch.nn.Module, _args: Any) -> None:
    assert isinstance(module, DistributedDataParallel)
    if torch.is_grad_enabled():
        _last_forward_synchronises[module] = module.require_backward_grad_sync
