"""Gradients that are placed unlike their parameters, as DTensor's own operators leave them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import distclip
from distclip.testing import oracle
from distclip.testing.collectives import count

PLACEMENTS: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def _linear(weight: str, batch: str) -> dict[str, Any]:
    """A plain `linear` on DTensors; operators choose where its gradient ends up."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    alone = nn.Parameter(torch.randn(5, 3))
    inputs = torch.randn(3, 3)
    parameter = nn.Parameter(distribute_tensor(alone.detach(), mesh, [PLACEMENTS[weight]]))
    for weights, given in ((alone, inputs), (parameter, distribute_tensor(inputs, mesh, [PLACEMENTS[batch]]))):
        nn.functional.linear(given, weights).square().sum().backward()  # type: ignore[no-untyped-call]
    full: list[Any] = [oracle.gather_full_gradient(alone)]
    clipper = distclip.GradientClipper([parameter], max_norm=0.5)
    norm = clipper.measure().total_norm.item()
    with count() as issued:
        clipper.clip_()
    assert isinstance(parameter.grad, DTensor)
    after: Any = oracle.gather_full_gradient(parameter)
    return {
        "placement": type(parameter.grad.placements[0]).__name__,
        "differs": parameter.grad.placements[0] != PLACEMENTS[weight],
        "norm": norm / oracle.norm(full, 2.0),
        "worst": float(abs(after - oracle.clipped(full, 0.5, 2.0)[0]).max()),
        "issued": dict(issued),
    }


@pytest.mark.parametrize(
    ("weight", "batch", "placement", "differs"),
    [
        ("columns", "rows", "Partial", True),
        ("columns", "whole", "Replicate", True),
        ("whole", "rows", "Partial", True),
        ("whole", "columns", "Shard", True),
        ("rows", "rows", "Shard", False),
    ],
)
def test_a_linear_of_distributed_tensors(ranks: Any, weight: str, batch: str, placement: str, differs: bool) -> None:
    for said in ranks(_linear, 2, weight, batch):
        # what torch 2.13 makes of it; with another release other pairs may be the ones that differ
        assert (said["placement"], said["differs"]) == (placement, differs)
        assert said["norm"] == pytest.approx(1.0, rel=1e-6)
        assert said["worst"] < 1e-6
        assert said["issued"] == {"allreduce": 2 if placement == "Partial" else 1}


def _sharded_addends(way: str) -> tuple[list[float], list[float]]:
    """Addends on axis 0 and shards on axis 1, which cut 3 elements into 2 and 1; the gradient is [2, 3, 6]."""
    mesh = init_device_mesh("cpu", (2, 2))
    own = [Shard(0) if way == "over shards" else Replicate(), Replicate()]
    parameter = nn.Parameter(distribute_tensor(torch.arange(3.0), mesh, own))
    whole = torch.tensor([[2.0, 1.0, 4.0], [0.0, 2.0, 2.0]])[dist.get_rank() // 2]
    if way == "average":
        whole = whole * 2
    part = whole.tensor_split([2])[dist.get_rank() % 2].clone()
    kind = Partial("avg" if way == "average" else "sum")
    parameter.grad = DTensor.from_local(part, mesh, [kind, Shard(0)], run_check=False, shape=whole.shape, stride=(1,))
    norms = [distclip.get_total_norm([parameter], p).item() for p in (1.0, 2.0, float("inf"))]
    distclip.clip_grad_norm_([parameter], 0.7)
    return norms, oracle.gather_full_gradient(parameter).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["sum", "average", "over shards"])
def test_addends_that_are_sharded_on_another_axis(ranks: Any, way: str) -> None:
    for norms, after in ranks(_sharded_addends, 4, way):
        assert norms == pytest.approx([11.0, 7.0, 6.0], rel=1e-6)
        assert after == pytest.approx([0.2, 0.3, 0.6], rel=1e-6)


def _infinite_average() -> float:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(1).to(torch.complex64), mesh, [Replicate()]))
    addend = torch.tensor([float("inf")], dtype=torch.complex64)
    parameter.grad = DTensor.from_local(addend, mesh, [Partial("avg")])
    return distclip.get_total_norm([parameter]).item()


def test_an_infinite_complex_average_is_no_nan(ranks: Any) -> None:
    assert ranks(_infinite_average, 2) == [float("inf")] * 2
