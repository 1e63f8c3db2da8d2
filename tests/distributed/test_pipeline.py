"""Pipelines of torch.distributed.pipelining against the same model in one process, with DDP or FSDP2 in each stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

import distclip
from distclip.testing import oracle
from distclip.testing.collectives import count
from tests.distributed.failures import fails_alike

MICRO_BATCHES = 4
NORM_TYPES = (1.0, 2.0, 3.0, float("inf"))


def block() -> nn.Sequential:
    """Every stage has the same names and shapes, as hand-made stages often do."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def reference(stages: int, batch: Tensor) -> list[nn.Sequential]:
    """The stages in one process, after backward; schedules divide gradients by the number of micro-batches."""
    torch.manual_seed(0)
    blocks = [block() for _ in range(stages)]
    mean: Tensor = loss(nn.Sequential(*blocks)(batch), torch.ones_like(batch)) / MICRO_BATCHES
    mean.backward()  # type: ignore[no-untyped-call]
    return blocks


def gradients(modules: list[nn.Module]) -> list[Any]:
    return [gradient for module in modules for gradient in oracle.gather_full_gradients(module).values()]


def run(schedule: str, parts: list[Any], first: int, group: dist.ProcessGroup, batch: Tensor) -> None:
    """Forward and backward of one batch through this rank's stages: every second one beginning at `first`."""
    size = dist.get_world_size(group)
    stages = [
        PipelineStage(part, first + index * size, size * len(parts), torch.device("cpu"), group=group)
        for index, part in enumerate(parts)
    ]
    kinds: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
    runner = kinds[schedule](stages if schedule == "interleaved" else stages[0], MICRO_BATCHES, loss_fn=loss)
    inputs = (batch,) if first == 0 else ()
    target = {"target": torch.ones_like(batch)} if first == size - 1 else {}
    runner.step(*inputs, **target)


def _pipeline(schedule: str, stages_per_rank: int) -> dict[str, Any]:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    torch.manual_seed(1)
    batch = torch.randn(8, 4)
    alone = reference(2 * stages_per_rank, batch)
    wanted = gradients([*alone])
    parts: list[Any] = []
    for part in alone[rank::2]:
        parts.append(block())
        parts[-1].load_state_dict(part.state_dict())
    source = parts if len(parts) > 1 else parts[0]
    clipper = distclip.GradientClipper(source, max_norm=0.1, pipeline_group=group)
    run(schedule, parts, rank, group, batch)
    norms = [
        distclip.get_total_norm(source, p, pipeline_group=group).item() / oracle.norm(wanted, p) for p in NORM_TYPES
    ]
    clipper.measure()  # the first measurement of a plan compares replicas as well
    with count() as issued:
        clipper.clip_()
    factor = oracle.coefficient(oracle.norm(wanted, 2.0), 0.1)
    own = gradients([*alone[rank::2]])
    worst = max(float(abs(a - b * factor).max()) for a, b in zip(gradients(parts), own, strict=True))
    return {"norms": norms, "issued": dict(issued), "table": clipper.explain(), "worst": worst}


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
)
def test_the_norm_is_that_of_all_stages(ranks: Any, schedule: str, stages_per_rank: int) -> None:
    for rank, said in enumerate(ranks(_pipeline, 2, schedule, stages_per_rank)):
        assert said["norms"] == pytest.approx([1.0] * len(NORM_TYPES), rel=1e-6)
        assert said["worst"] < 1e-7
        assert said["issued"] == {"allreduce": 1}
        assert said["table"].count(f"stage {rank}") == 4 * stages_per_rank


def _undeclared() -> None:
    torch.manual_seed(0)
    parts = [block(), block()]
    for parameter in parts[dist.get_rank()].parameters():
        parameter.grad = torch.ones_like(parameter)
    distclip.clip_grad_norm_(parts[dist.get_rank()], 1.0)


def test_stages_without_a_pipeline_group_are_refused(ranks: Any) -> None:
    text = fails_alike(ranks, distclip.LayoutError, _undeclared, 2)
    assert "'0.weight' (plain) holds different values on ranks 0, 1" in text
    assert "parameters of a pipeline stage need pipeline_group=" in text


def _frozen_stage() -> dict[str, Any]:
    """Stage 1 has nothing to train: its rank takes part all the same."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    part = [block(), block()][rank]
    part.requires_grad_(rank == 0)
    for parameter in part.parameters():
        if rank == 0:
            parameter.grad = torch.ones_like(parameter)
    norms = [distclip.get_total_norm(part, p, pipeline_group=dist.group.WORLD).item() for p in NORM_TYPES]
    return {"norms": norms, "again": distclip.clip_grad_norm_(part, 1.0, pipeline_group=dist.group.WORLD).item()}


def test_a_frozen_stage_takes_part(ranks: Any) -> None:
    elements = 4 * 6 + 6 + 6 * 4 + 4
    for said in ranks(_frozen_stage, 2):
        assert said["norms"] == pytest.approx([elements, elements**0.5, elements ** (1 / 3), 1.0], rel=1e-6)
        assert said["again"] == pytest.approx(elements**0.5, rel=1e-6)


def _stage_of(mesh: DeviceMesh, module: nn.Module, how: str) -> Any:
    if how == "ddp":
        return DistributedDataParallel(module, process_group=mesh["dp"].get_group())
    for layer in (module[0], module[2], module):  # type: ignore[index]
        fully_shard(layer, mesh=mesh["dp"])
    return module


def _times_data_parallel(how: str) -> dict[str, Any]:
    """PP 2 x DP 2, every data parallel rank with a batch of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(1)
    batches = [torch.randn(8, 4) for _ in range(2)]
    by_batch = [reference(2, batch) for batch in batches]
    wanted = [(a + b) / 2 for a, b in zip(*(gradients([*alone]) for alone in by_batch), strict=True)]
    own = wanted[4 * stage : 4 * stage + 4]
    part = block()
    part.load_state_dict(by_batch[0][stage].state_dict())
    model = _stage_of(mesh, part, how)
    group = mesh["pp"].get_group()
    clipper = distclip.GradientClipper(model, max_norm=0.1, pipeline_group=group)
    run("1f1b", [model], stage, group, batches[replica])
    norm = clipper.measure().total_norm.item() / oracle.norm(wanted, 2.0)
    with count() as issued:
        clipper.clip_()
    factor = oracle.coefficient(oracle.norm(wanted, 2.0), 0.1)
    worst = max(float(abs(a - b * factor).max()) for a, b in zip(gradients([model]), own, strict=True))
    return {"norm": norm, "issued": dict(issued), "worst": worst}


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_stages_with_data_parallel_replicas(ranks: Any, how: str) -> None:
    for said in ranks(_times_data_parallel, 4, how):
        assert said["norm"] == pytest.approx(1.0, rel=1e-6)
        assert said["issued"] == {"allreduce": 1}
        assert said["worst"] < 1e-7
