"""What must come out alike in every layout: the norm of one model, limits of param groups, layers frozen later on."""

from __future__ import annotations

import math
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
from tests.distributed.block import Block

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


def _backward(model: Any, how: str, batch: Tensor) -> None:
    out = model(batch.chunk(2, dim=1)[dist.get_rank()] if how == "sequence parallel" else batch)
    (out.to_local() if isinstance(out, DTensor) else out).square().sum().backward()


def _batch() -> Tensor:
    return torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))


# --- one model -----------------------------------------------------------------------------------------------------


def _one_model(how: str) -> list[list[float]]:
    """Norms before and after clipping to LIMIT by the 2-norm."""
    block = Block()
    arguments: dict[str, Any] = {}
    if how == "pipeline":  # the first stage is `norm` and `up`, the second `down`
        _backward(block, how, _batch())
        first = dist.get_rank() == 0
        model: Any = [(name, p) for name, p in block.named_parameters() if name.startswith("down") is not first]
        arguments["pipeline_group"] = dist.group.WORLD
    else:
        model, arguments = _wrap(how, block)
        _backward(model, how, _batch())
    said = []
    for _ in range(2):
        said.append([distclip.get_total_norm(model, p, **arguments).item() for p in (1.0, 2.0, 3.0, math.inf)])
        distclip.clip_grad_norm_(model, LIMIT, **arguments)
    return said


@pytest.mark.parametrize("how", [how for how in RANKS if "experts" not in how])
def test_one_model_has_one_norm_in_every_layout(ranks: Any, how: str) -> None:
    alone = Block()
    _backward(alone, how="plain", batch=_batch())
    gradients = oracle.gather_full_gradients(alone)
    clipped = oracle.clipped(gradients, LIMIT, 2.0)
    for before, after in ranks(_one_model, RANKS[how], how):
        assert before == pytest.approx(
            [oracle.norm(gradients.values(), p) for p in (1.0, 2.0, 3.0, math.inf)], rel=1e-6
        )
        assert after == pytest.approx([oracle.norm(clipped.values(), p) for p in (1.0, 2.0, 3.0, math.inf)], rel=1e-6)


# --- param groups --------------------------------------------------------------------------------------------------


def _limits(how: str, given_as: str) -> dict[str, Any]:
    """`up` and biases have limits of their own, `norm` has statistics only; patterns are tried in order."""
    apart = how in ("pipeline", "owned experts", "marked experts")
    alone = [Block(seed) for seed in (range(dist.get_world_size()) if apart else [0])]
    mine = dist.get_rank() if apart else 0
    model, arguments = _wrap(how, Block(mine))
    by_pattern = {
        "up": distclip.ParamGroup("up.*", max_norm=LIMIT / 2),
        "norm": distclip.ParamGroup("norm.*"),
        "bias": distclip.ParamGroup("*.bias", max_norm=LIMIT / 4),
    }

    def by_function(name: str) -> str | None:
        return "up" if name.startswith("up.") else "bias" if name == "down.bias" else None

    groups: Any = by_pattern if given_as == "patterns" else by_function
    clipper = distclip.GradientClipper(model, max_norm=LIMIT, param_groups=groups, **arguments)
    for each in (model, *alone):
        _backward(each, how if each is model else "plain", _batch())
    everything = [oracle.gather_full_gradients(each) for each in alone]
    members = {"up": ("up.weight", "up.bias"), "norm": ("norm.weight", "norm.bias"), "bias": ("down.bias",)}
    norms = {
        key: oracle.norm([each[name] for each in everything for name in names], 2.0) for key, names in members.items()
    }
    limits = {"up": LIMIT / 2, "bias": LIMIT / 4} if given_as == "patterns" else {}
    limited = {name for key in limits for name in members[key]}
    rest = oracle.norm([value for each in everything for name, value in each.items() if name not in limited], 2.0)
    factors = {name: oracle.coefficient(norms[key], limits[key]) for key in limits for name in members[key]}
    report = clipper.measure()
    with count() as issued:
        clipper.clip_()
    after = oracle.gather_full_gradients(model)
    return {
        "groups": sorted(report.param_groups),
        "norms": [float(report.param_groups[key].norm) / norms[key] for key in members if key in report.param_groups],
        "worst": max(
            float(abs(after[name] - value * factors.get(name, oracle.coefficient(rest, LIMIT))).max())
            for name, value in everything[mine].items()
        ),
        "issued": dict(issued),
    }


@pytest.mark.parametrize("given_as", ["patterns", "function"])
@pytest.mark.parametrize("how", RANKS)
def test_limits_of_param_groups(ranks: Any, how: str, given_as: str) -> None:
    names = ["bias", "default", "norm", "up"] if given_as == "patterns" else ["bias", "default", "up"]
    for said in ranks(_limits, RANKS[how], how, given_as):
        assert said["groups"] == names
        assert said["norms"] == pytest.approx([1.0] * (len(names) - 1), rel=1e-6)
        assert said["worst"] < 1e-7
        assert said["issued"] == {"allreduce": 2 if how == "sequence parallel" else 1}


# --- frozen and trained again --------------------------------------------------------------------------------------


def _freeze(model: nn.Module, names: tuple[str, ...], frozen: bool) -> None:
    for name, parameter in model.named_parameters():
        if any(word in name for word in names):
            parameter.requires_grad_(not frozen)


def _phases(how: str) -> list[dict[str, Any]]:
    """Everything is trained, then one layer and a bias are frozen, then another layer, then nothing again."""
    apart = how in ("pipeline", "owned experts", "marked experts")
    seeds = range(dist.get_world_size()) if apart else [0]
    alone = [Block(seed) for seed in seeds]
    mine = dist.get_rank() if apart else 0
    model, arguments = _wrap(how, Block(seeds[mine]))
    clipper = distclip.GradientClipper(model, max_norm=LIMIT, **arguments)
    said = []
    for names in ((), ("up", "norm.bias"), ("down",), ()):
        for each in (model, *alone):
            _freeze(each, ("",), False)
            _freeze(each, names or ("no such parameter",), True)
            each.zero_grad()
        for each in (model, *alone):
            _backward(each, how if each is model else "plain", _batch())
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
