"""DistributedDataParallel: whether the last backward synchronised.

`require_backward_grad_sync` is False inside `no_sync()` and True again outside, so the flag must be read when the
forward runs, with grad enabled: DDP prepares its reducer there. (`require_forward_param_sync` is another flag and
turns False after a forward without grad.) Before the first recorded forward the state of now is taken.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from distclip.errors import LayoutError

_last_forward_synchronises: weakref.WeakKeyDictionary[DistributedDataParallel, bool] = weakref.WeakKeyDictionary()


def watch(module: DistributedDataParallel) -> None:
    """Record at every forward from now on whether its backward will synchronise. Idempotent."""
    if module not in _last_forward_synchronises:
        _last_forward_synchronises[module] = module.require_backward_grad_sync
        module.register_forward_pre_hook(_record)


def check_join(module: DistributedDataParallel) -> None:
    """Raise inside `module.join()` with uneven inputs.

    Ranks that have run out of inputs answer the all-reduces of forward and backward there, and would take the packet
    for one of those. Raised at once and not through the packet, for the same reason. Private name: `_join_config`
    (torch/distributed/algorithms/join.py, torch 1.10 to 2.13); where it is gone nothing is checked.
    """
    config = getattr(module, "_join_config", None)
    if config is not None and config.enable and not config.throw_on_early_termination:
        raise LayoutError(
            "clipping inside DistributedDataParallel.join() with uneven inputs is not possible: ranks that have joined "
            "cannot take part in the decision. Use join(throw_on_early_termination=True), or give all ranks as many "
            "batches"
        )


def synchronised(module: DistributedDataParallel) -> bool:
    """Whether the last backward through `module` reduced gradients over the ranks."""
    return _last_forward_synchronises.get(module, module.require_backward_grad_sync)


def _record(module: torch.nn.Module, _args: Any) -> None:
    assert isinstance(module, DistributedDataParallel)
    if torch.is_grad_enabled():
        _last_forward_synchronises[module] = module.require_backward_grad_sync
