"""Ten thousand steps with random faults: no rank drifts, nothing is missed, nothing is skipped without a reason."""

from __future__ import annotations

import math
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import distclip

FAULTS = ("nan gradient", "inf gradient", "nan loss", "inf loss", "huge", "none")


def faults(steps: int, seed: int) -> dict[int, tuple[str, int]]:
    """Step -> (fault, rank), one in every fifty steps."""
    source = random.Random(seed)
    return {start + source.randrange(50): (source.choice(FAULTS), source.randrange(2)) for start in range(0, steps, 50)}


def _model(shards: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return fully_shard(model) if shards else model


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + rank))


def _full(model: Any) -> Tensor:
    parts = [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    return torch.cat([part.flatten() for part in parts])


def _run(steps: int, seed: int, late: bool) -> tuple[Tensor, list[int], list[int], float]:
    """Two ranks: weights at the end, steps that were skipped, steps that should have been, the scale.

    With `late` the steps are left to the device, as on CUDA, and asked about only at the end.
    """
    with mock.patch("distclip.late.pays", return_value=late):
        return _steps(steps, seed, late)


def _steps(steps: int, seed: int, late: bool) -> tuple[Tensor, list[int], list[int], float]:
    rank = dist.get_rank()
    plan = faults(steps, seed)
    model = _model(shards=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=late)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    clipper = distclip.GradientClipper(model, optimizer, max_norm=0.5, scaler=scaler)
    reports, due, left = [], [], 0
    for step in range(steps):
        fault, on_rank = plan.get(step, ("", 0))
        here = rank == on_rank
        loss = model(_batch(step, rank)).square().mean()
        if fault in ("nan loss", "inf loss") and here:
            loss = loss * (math.nan if fault == "nan loss" else math.inf)
        if fault == "huge" and here:
            loss = loss * 1e6
        scaler.scale(loss).backward()
        if fault in ("nan gradient", "inf gradient") and here:
            local = [p.grad.to_local() for p in model.parameters() if p.grad is not None and p.grad.to_local().numel()]
            local[-1].view(-1)[-1] = math.nan if fault == "nan gradient" else math.inf
        if fault == "none":
            optimizer.zero_grad()
        reports.append(clipper.step())
        left += clipper._pending.step is not None
        if fault and fault != "huge":
            due.append(step)
        optimizer.zero_grad()
    assert left == (steps - 1 if late else 0)  # the first finite step waits
    skipped = [step for step, report in enumerate(reports) if not report.stepped]
    return _full(model), skipped, due, scaler.get_scale()


def _reference(steps: int, seed: int) -> Tensor:
    """One process that does the same steps, without ranks, shards, scaler or distclip."""
    plan = faults(steps, seed)
    model = _model(shards=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        fault, on_rank = plan.get(step, ("", 0))
        if fault and fault != "huge":
            continue
        losses = [
            model(_batch(step, rank)).square().mean() * (1e6 if fault == "huge" and rank == on_rank else 1.0)
            for rank in range(2)
        ]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return _full(model)


def _check(ranks: Any, steps: int, seed: int, tolerance: float, late: bool) -> None:
    results = ranks(_run, 2, steps, seed, late, deadline=900.0)
    (weights, skipped, due, scale), (others, *rest) = results
    assert skipped == due
    assert rest == [skipped, due, scale]
    assert torch.equal(weights, others)
    [wanted] = ranks(_reference, 1, steps, seed, deadline=900.0)
    assert float((weights - wanted).abs().max() / wanted.abs().max()) < tolerance


@pytest.mark.parametrize("late", [False, True])
def test_five_hundred_steps(ranks: Any, late: bool) -> None:
    _check(ranks, 500, seed=1, tolerance=1e-4, late=late)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("late", [False, True])
def test_ten_thousand_steps(ranks: Any, late: bool) -> None:
    _check(ranks, 10_000, seed=2, tolerance=1e-2, late=late)
