"""Names of PyTorch that are not public and that distclip relies on.

If a test here fails after an update of torch, look at the file that it names; its docstring says what the name is for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from distclip.plan.ddp import synchronised
from distclip.plan.dtensor import synchronises
from distclip.plan.fsdp1 import is_flattened


def test_grad_scaler_keeps_its_scale_and_one_state_per_optimizer() -> None:
    """distclip/amp.py"""
    for kind in (GradScaler, ShardedGradScaler):
        scaler = kind("cpu", init_scale=4.0)
        assert scaler._scale is None
        scaler.scale(torch.ones(()))
        assert scaler._scale is not None
        assert scaler._scale.item() == 4.0
        parameter = nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        optimizer = torch.optim.SGD([parameter])
        assert scaler._per_optimizer_states[id(optimizer)] == {"stage": OptState.READY, "found_inf_per_device": {}}
        if kind is GradScaler:
            scaler.unscale_(optimizer)
            assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            assert [tensor.item() for tensor in found.values()] == [0.0]


def _names_on_ranks() -> dict[str, bool]:
    fsdp1 = FullyShardedDataParallel(nn.Linear(2, 2), use_orig_params=True, device_id=torch.device("cpu"))
    flat = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    fsdp2: Any = fully_shard(nn.Linear(2, 2))
    before = synchronises(fsdp2)
    fsdp2.set_requires_gradient_sync(False)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    with ddp.no_sync():
        inside = synchronised(ddp)
    return {
        "_fsdp_flattened": all(is_flattened(p) for m in (fsdp1, flat) for p in m.parameters()),
        "not on others": not any(is_flattened(p) for p in nn.Linear(1, 1).parameters()),
        "_fsdp_param_groups": before and not synchronises(fsdp2),
        "require_backward_grad_sync": synchronised(ddp) and not inside,
        "_get_default_store": bool(dist.distributed_c10d._get_default_store().add("distclip/test", 1)),
    }


def test_names_that_need_ranks(ranks: Any) -> None:
    """distclip/plan/fsdp1.py, dtensor.py, ddp.py, collectives.py"""
    for said in ranks(_names_on_ranks, 2):
        assert all(said.values()), said
