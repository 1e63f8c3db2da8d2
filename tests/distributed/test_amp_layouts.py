"""GradScaler under tensor, sequence and pipeline parallel and their products: one rank's inf skips the step of all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import distclip
from distclip.testing import oracle
from distclip.testing.collectives import count
from tests.distributed.block import Block

SCALE = 64.0
LIMIT = 0.1
KINDS = {"GradScaler": GradScaler, "ShardedGradScaler": ShardedGradScaler}
MICRO_BATCHES = 4


def _poison(model: nn.Module, name: str, rank: int) -> None:
    """One element of the gradient that rank `rank` has becomes inf; nobody else's changes."""
    if dist.get_rank() == rank:
        gradient = dict(model.named_parameters())[name].grad
        assert gradient is not None
        with torch.no_grad():
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.view(-1)[0] = math.inf


def _weights(model: nn.Module) -> dict[str, Any]:
    with torch.no_grad():
        whole = {name: p.full_tensor() if isinstance(p, DTensor) else p.clone() for name, p in model.named_parameters()}
    return {name: value.double().numpy() for name, value in whole.items()}


def _train(model: Any, clipper: Any, scaler: Any, backward: Any, wanted: Any, everything: Any, bad: str) -> list[Any]:
    """A good step, a bad one of rank 1, a good one: (norm over its reference, worst weight, moved, scale) of each."""
    said: list[Any] = []
    for poisoned in (False, True, False):
        model.zero_grad()
        backward()
        if poisoned:
            _poison(model, bad, 1)
        before = _weights(model)
        report = clipper.step()
        after = _weights(model)
        factor = oracle.coefficient(oracle.norm(everything, 2.0), LIMIT)
        moved = max(float(abs(after[name] - before[name]).max()) for name in before)
        worst = max(float(abs(before[name] - wanted[name] * factor - after[name]).max()) for name in before)
        said.append(
            {
                "norm": report.total_norm.item() / oracle.norm(everything, 2.0),
                "stepped": report.stepped,
                "moved": moved,
                "worst": worst,
                "scale": scaler.get_scale(),
                "undone": report.loss_scale.item(),
            }
        )
        with torch.no_grad():  # back to where the reference was
            for name, parameter in model.named_parameters():
                parameter.copy_(parameter + _like(parameter, before[name] - after[name]))
    return said


def _like(parameter: Tensor, values: Any) -> Tensor:
    whole = torch.from_numpy(values).float()
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def _right(said: list[dict[str, Any]]) -> None:
    good, bad, again = said
    for each in (good, again):
        assert each["stepped"] is True
        assert each["norm"] == pytest.approx(1.0, rel=1e-6)
        assert each["worst"] < 1e-6
    assert bad["stepped"] is False
    assert bad["moved"] == 0.0
    assert math.isinf(bad["norm"])
    # a good step doubles the scale, a bad one halves it, on every rank alike
    assert good["undone"] == SCALE
    assert bad["undone"] == good["scale"] == SCALE * 2
    assert again["undone"] == bad["scale"] == SCALE
    assert again["scale"] == SCALE * 2


def _tensor_parallel(kind: str, shape: tuple[int, ...], sequence: bool, bad: str) -> list[Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
    tp = mesh["tp"]
    alone, model = Block(), Block()
    up, down = ColwiseParallel(), RowwiseParallel()
    plan: dict[str, Any] = {"up": up, "down": down}
    if sequence:
        plan["norm"] = SequenceParallel()
        plan["up"] = ColwiseParallel(input_layouts=Shard(1))
        plan["down"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, tp, plan)
    if len(shape) == 2:
        fully_shard(model, mesh=mesh["dp"])
    batch = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
    alone(batch).square().sum().backward()
    wanted = oracle.gather_full_gradients(alone)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = KINDS[kind]("cpu", init_scale=SCALE, growth_interval=1)
    clipper = distclip.GradientClipper(model, optimizer, max_norm=LIMIT, scaler=scaler)

    def backward() -> None:
        out = model(batch.chunk(2, dim=1)[tp.get_local_rank()] if sequence else batch)
        loss = (out.to_local() if isinstance(out, DTensor) else out).square().sum()
        scaler.scale(loss).backward()

    return _train(model, clipper, scaler, backward, wanted, list(wanted.values()), bad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "sequence", "bad"),
    [
        ((2,), False, "up.weight"),
        ((2,), False, "norm.bias"),  # a copy that only one rank has spoilt
        ((2,), True, "norm.weight"),  # an addend
        ((2, 2), False, "down.weight"),
        ((2, 2), True, "up.bias"),
    ],
)
def test_tensor_parallel(ranks: Any, kind: str, shape: tuple[int, ...], sequence: bool, bad: str) -> None:
    for said in ranks(_tensor_parallel, math.prod(shape), kind, shape, sequence, bad):
        _right(said)


def _pipeline(kind: str, schedule: str) -> list[Any]:
    """Only the last stage has a loss to scale, so that its rank alone calls the scaler."""
    rank, group = dist.get_rank(), dist.group.WORLD
    parts = [Block(seed) for seed in (0, 1)]
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    nn.Sequential(*parts)(batch).square().sum().div(MICRO_BATCHES).backward()  # schedules divide likewise
    gradients = [oracle.gather_full_gradients(part) for part in parts]
    everything = [value for each in gradients for value in each.values()]
    model = Block(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = KINDS[kind]("cpu", init_scale=SCALE, growth_interval=1)
    clipper = distclip.GradientClipper(model, optimizer, max_norm=LIMIT, scaler=scaler, pipeline_group=group)
    schedules: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        scaled: Tensor = scaler.scale((output - target).square().sum())
        return scaled

    def backward() -> None:
        stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=group)
        runner = schedules[schedule](stage, MICRO_BATCHES, loss_fn=loss)
        runner.step(*((batch,) if rank == 0 else ()), **({"target": torch.zeros_like(batch)} if rank else {}))

    return _train(model, clipper, scaler, backward, gradients[rank], everything, "up.weight")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipeline(ranks: Any, kind: str, schedule: str) -> None:
    for said in ranks(_pipeline, 2, kind, schedule):
        _right(said)


def _experts(kind: str) -> list[Any]:
    """Each rank has an expert of its own; the inf is in that of rank 1."""
    rank = dist.get_rank()
    parts = [Block(seed) for seed in (0, 1)]
    batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    for part in parts:
        part(batch).square().sum().backward()
    gradients = [oracle.gather_full_gradients(part) for part in parts]
    everything = [value for each in gradients for value in each.values()]
    model = Block(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = KINDS[kind]("cpu", init_scale=SCALE, growth_interval=1)
    clipper = distclip.GradientClipper(model, optimizer, max_norm=LIMIT, scaler=scaler, owned=["*"])

    def backward() -> None:
        scaler.scale(model(batch).square().sum()).backward()

    said = _train(model, clipper, scaler, backward, gradients[rank], everything, "norm.weight")
    backward()
    with count() as issued:
        clipper.step()
    assert issued == {"allreduce": 1}
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_experts(ranks: Any, kind: str) -> None:
    for said in ranks(_experts, 2, kind):
        _right(said)
