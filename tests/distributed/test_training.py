"""Loops as people write them: compiled, half precision, accumulated, with other optimizers, resumed on other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

import distclip


class OwnOptimizer(torch.optim.Optimizer):
    """An optimizer of another package: plain gradient descent."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: OwnOptimizer(p, lr=0.1),
    ],
    ids=["adam-foreach", "adamw-tensor-lr", "rmsprop", "sgd-fused", "own"],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_any_optimizer_steps_or_is_left_alone(make: Any, scaled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = make(model.parameters())
    scaler = GradScaler("cpu", init_scale=16.0) if scaled else None
    clipper = distclip.GradientClipper(model, optimizer, max_norm=0.1, scaler=scaler)
    for bad in (False, True, False):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().sum() * (math.nan if bad else 1.0)
        (loss if scaler is None else scaler.scale(loss)).backward()
        assert clipper.step().stepped is not bad
        assert torch.equal(before, model.weight.detach()) is bad
    assert scaler is None or scaler.get_scale() == 8.0


def test_sparse_adam_with_a_sparse_embedding() -> None:
    embedding = nn.Embedding(10, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    clipper = distclip.GradientClipper(embedding, optimizer, max_norm=1.0)
    embedding(torch.tensor([1, 1, 3])).sum().mul(10.0).backward()
    report = clipper.step()
    assert report.total_norm.item() == pytest.approx((2 * 20.0**2 + 2 * 10.0**2) ** 0.5)
    assert report.stepped
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.coalesce().values().norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pure_half_precision_parameters(dtype: torch.dtype) -> None:
    # torch's own unscale_ refuses float16 gradients
    parameter = nn.Parameter(torch.zeros(2, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    clipper = distclip.GradientClipper([parameter], optimizer, max_norm=1.0, scaler=scaler)
    scaler.scale((parameter * torch.tensor([3.0, 4.0], dtype=dtype)).sum()).backward()
    assert clipper.step().total_norm.item() == 5.0
    assert parameter.tolist() == pytest.approx([-0.6, -0.8], rel=1e-2)


def _compiled(wrap: str) -> list[float]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    elif wrap == "fsdp2":
        model = fully_shard(model)
    compiled = torch.compile(model, backend="aot_eager") if wrap != "eager" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clipper = distclip.GradientClipper(compiled, optimizer, max_norm=0.2)
    norms = []
    for step in range(3):
        batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        compiled(batch).square().sum().backward()
        norms.append(clipper.step().total_norm.item())
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize(
    "wrap", ["ddp", pytest.param("fsdp2", marks=pytest.mark.soak), pytest.param("plain", marks=pytest.mark.soak)]
)
def test_compiled_models(ranks: Any, wrap: str) -> None:
    wanted = ranks(_compiled, 2, "eager")[0]
    for norms in ranks(_compiled, 2, wrap, deadline=120.0):
        assert norms == pytest.approx(wanted, rel=1e-5)


def _accumulated(wrap: str, bad: int) -> tuple[Any, ...]:
    """Four micro-batches, synchronised at the last; the same four in one batch as reference."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 2)
    reference = nn.Linear(4, 2)
    reference.load_state_dict(model.state_dict())
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    elif wrap == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        model = fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = (ShardedGradScaler if wrap == "fsdp1" else GradScaler)("cpu", init_scale=8.0)
    clipper = distclip.GradientClipper(model, optimizer, max_norm=0.5, scaler=scaler)
    batches = torch.randn(4, 3, 4)
    reference(batches.flatten(0, 1)).square().sum().mul(0.25).backward()
    wanted = distclip.get_total_norm([("reference", p) for p in reference.parameters()]).item()
    for index, batch in enumerate(batches):
        last = index == 3
        loss = model(batch).square().sum() * (math.nan if index == bad and dist.get_rank() == 1 else 1.0)
        if wrap == "fsdp2":
            model.set_requires_gradient_sync(last)
            scaler.scale(loss).backward()
        elif last:
            scaler.scale(loss).backward()
        else:
            with model.no_sync():
                scaler.scale(model(batch).square().sum() * (loss.detach() / loss.detach())).backward()
    report = clipper.step(grad_multiplier=0.25)
    return report.stepped, report.total_norm.item() / wanted, scaler.get_scale()


@pytest.mark.parametrize("wrap", ["ddp", "fsdp1", "fsdp2"])
def test_accumulation_decides_once_for_the_window(ranks: Any, wrap: str) -> None:
    for stepped, ratio, scale in ranks(_accumulated, 2, wrap, -1):
        assert (stepped, scale) == (True, 8.0)
        assert ratio == pytest.approx(1.0, rel=1e-5)
    for stepped, ratio, scale in ranks(_accumulated, 2, wrap, 1):
        assert (stepped, scale) == (False, 4.0)
        assert math.isnan(ratio)


def _save(folder: str) -> dict[str, int]:
    parameter = nn.Parameter(torch.zeros(1))
    clipper = distclip.GradientClipper([parameter], torch.optim.SGD([parameter], lr=1.0))
    for value in (1.0, math.nan, math.nan):
        parameter.grad = torch.tensor([value])
        clipper.step()
    dcp.save({"clipper": clipper.state_dict()}, checkpoint_id=folder)
    return clipper.state_dict()


def _load(folder: str) -> tuple[dict[str, int], int]:
    parameter = nn.Parameter(torch.zeros(1))
    clipper = distclip.GradientClipper([parameter], torch.optim.SGD([parameter], lr=1.0))
    state: dict[str, Any] = {"clipper": clipper.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    clipper.load_state_dict(state["clipper"])
    parameter.grad = torch.tensor([math.nan])
    report = clipper.step()
    return clipper.state_dict(), report.step


@pytest.mark.parametrize("size", [1, 4])
def test_state_resumes_on_another_number_of_ranks(ranks: Any, tmp_path: Path, size: int) -> None:
    assert ranks(_save, 2, str(tmp_path)) == [{"steps": 3, "consecutive_skips": 2}] * 2
    assert ranks(_load, size, str(tmp_path)) == [({"steps": 4, "consecutive_skips": 3}, 4)] * size


def _owned_under_a_scaler(bad_rank: int) -> tuple[Any, ...]:
    """An expert per rank beside replicated parameters, fp16-style scaling, a nan in one expert."""
    dense, expert = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    parameters = {"dense": dense, "experts.0": expert}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1, fused=True)
    scaler = GradScaler("cpu", init_scale=4.0)
    clipper = distclip.GradientClipper(
        list(parameters.items()), optimizer, max_norm=0.5, scaler=scaler, owned=["experts.*"]
    )
    scaler.scale(dense.sum() + expert.sum() * (1.0 + dist.get_rank())).backward()
    if dist.get_rank() == bad_rank:
        assert expert.grad is not None
        expert.grad[0] = math.inf
    report = clipper.step()
    weights: list[Tensor] = [dense.detach(), expert.detach()]
    return report.stepped, report.total_norm.item(), scaler.get_scale(), all(bool((w == 1.0).all()) for w in weights)


def test_owned_parameters_under_a_scaler(ranks: Any) -> None:
    for stepped, norm, scale, same in ranks(_owned_under_a_scaler, 2, -1):
        assert (stepped, scale, same) == (True, 4.0, False)
        assert norm == pytest.approx((2 * 1.0 + 2 * 1.0 + 2 * 4.0) ** 0.5)
    for stepped, norm, scale, same in ranks(_owned_under_a_scaler, 2, 1):
        assert (stepped, norm, scale, same) == (False, math.inf, 2.0, True)
