"""Parameters that are frozen and trained again after the plan was made, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import distclip
from distclip.testing import oracle
from distclip.testing.collectives import count

LIMIT = 0.1
RANKS = {
    "plain": 1,
    "ddp": 2,
    "fsdp1": 2,
    "fsdp2": 2,
    "hsdp": 4,
    "tensor parallel": 2,
    "sequence parallel": 2,
    "tensor parallel x fsdp2": 4,
    "pipeline": 2,
    "owned experts": 2,
    "marked experts": 2,
}


class Block(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(self.norm(batch))))
        return out


def _freeze(model: nn.Module, names: tuple[str, ...], frozen: bool) -> None:
    for name, parameter in model.named_parameters():
        if any(word in name for word in names):
            parameter.requires_grad_(not frozen)


def _wrap(how: str, block: Any) -> tuple[Any, dict[str, Any]]:
    """The model as a user has it, and the arguments for distclip."""
    size = dist.get_world_size()
    if how == "ddp":
        return DistributedDataParallel(block, find_unused_parameters=True), {}
    if how == "fsdp1":
        return FullyShardedDataParallel(block, use_orig_params=True, device_id=torch.device("cpu")), {}
    if how in ("tensor parallel", "sequence parallel", "tensor parallel x fsdp2"):
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if how == "sequence parallel":
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
        parallelize_module(block, mesh["tp"], plan)
        return fully_shard(block, mesh=mesh["dp"]) if size == 4 else block, {}
    if how in ("fsdp2", "hsdp"):
        shape = (2, 2) if how == "hsdp" else (2,)
        for layer in (block.up, block):
            fully_shard(
                layer, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            )
        return block, {}
    if how == "marked experts":
        for parameter in block.parameters():
            parameter.allreduce = False
    arguments = {"pipeline": {"pipeline_group": dist.group.WORLD}, "owned experts": {"owned": ["*"]}}
    return block, arguments.get(how, {})


def _phases(how: str) -> list[dict[str, Any]]:
    """Everything is trained, then one layer and a bias are frozen, then another layer, then nothing again."""
    apart = how in ("pipeline", "owned experts", "marked experts")
    seeds = range(dist.get_world_size()) if apart else [0]
    alone = [Block(seed) for seed in seeds]
    mine = dist.get_rank() if apart else 0
    model, arguments = _wrap(how, Block(seeds[mine]))
    clipper = distclip.GradientClipper(model, max_norm=LIMIT, **arguments)
    batch = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
    said = []
    for names in ((), ("up", "norm.bias"), ("down",), ()):
        for each in (model, *alone):
            _freeze(each, ("",), False)
            _freeze(each, names or ("no such parameter",), True)
            each.zero_grad()
        for each in alone:
            each(batch).square().sum().backward()
        sequence = how == "sequence parallel"
        out = model(batch.chunk(2, dim=1)[dist.get_rank()] if sequence else batch)
        (out.to_local() if isinstance(out, DTensor) else out).square().sum().backward()
        everything = [oracle.gather_full_gradients(each) for each in alone]
        total = oracle.norm([value for each in everything for value in each.values()], 2.0)
        for attempt in range(2):
            with count() as issued:
                report = clipper.measure() if attempt == 0 else clipper.clip_()
        after = oracle.gather_full_gradients(model)
        wanted = {name: value * oracle.coefficient(total, LIMIT) for name, value in everything[mine].items()}
        said.append(
            {
                "norm": report.total_norm.item() / total,
                "names": [sorted(after), sorted(wanted)],
                "worst": max(float(abs(after[name] - wanted[name]).max()) for name in wanted),
                "issued": dict(issued),
                "function": distclip.get_total_norm(model, **arguments).item(),
            }
        )
    return said


@pytest.mark.parametrize("how", RANKS)
def test_layers_frozen_and_trained_again(ranks: Any, how: str) -> None:
    for phases in ranks(_phases, RANKS[how], how):
        for said in phases:
            assert said["norm"] == pytest.approx(1.0, rel=1e-6)
            got, wanted = said["names"]
            assert got == wanted
            assert said["worst"] < 1e-6
            # addends of norm layers are one more, and stay so while some of them are frozen
            assert said["issued"] == {"allreduce": 2 if how == "sequence parallel" else 1}
            assert said["function"] == pytest.approx(LIMIT, rel=1e-5)
