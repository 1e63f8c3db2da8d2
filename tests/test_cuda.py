"""On a CUDA device: the same results as on CPU, in one process and over NCCL with one rank."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import distclip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _model(device: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device=device, dtype=dtype)


def _backward(model: nn.Module, device: str, scale: float = 1.0) -> None:
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device)
    (model(batch).square().sum() * scale).backward()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_norms_and_clipped_gradients_equal_those_on_cpu(norm_type: float) -> None:
    here, there = _model("cpu"), _model("cuda")
    _backward(here, "cpu")
    for ours, theirs in zip(here.parameters(), there.parameters(), strict=True):
        assert ours.grad is not None
        theirs.grad = ours.grad.cuda()
    norm = distclip.clip_grad_norm_(there, 0.5, norm_type)
    assert norm.device.type == "cuda"
    assert norm.item() == pytest.approx(distclip.clip_grad_norm_(here, 0.5, norm_type).item(), rel=1e-6)
    for ours, theirs in zip(here.parameters(), there.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(theirs.grad.cpu(), ours.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_coefficient_is_not_rounded_to_half_precision(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(4, device="cuda", dtype=dtype))
    parameter.grad = torch.full((4,), 40000.0 if dtype is torch.float16 else 3.0, device="cuda", dtype=dtype)
    exact = parameter.grad.double() / (parameter.grad.double().norm() + 1e-6)
    distclip.clip_grad_norm_([parameter], 1.0)
    assert torch.equal(parameter.grad, exact.to(dtype))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_gradients_are_skipped_and_untouched(value: float) -> None:
    parameter = nn.Parameter(torch.zeros(3, device="cuda"))
    parameter.grad = torch.tensor([1.0, value, 30.0], device="cuda")
    optimizer = torch.optim.AdamW([parameter], fused=True)
    report = distclip.GradientClipper([parameter], optimizer).step()
    assert (report.stepped, report.skip_reason) == (False, "nonfinite")
    assert parameter.grad[2] == 30.0


@pytest.mark.parametrize("fold", ["never", "auto"])
def test_scaler_with_a_fused_optimizer(fold: Any) -> None:
    model = _model("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    clipper = distclip.GradientClipper(model, optimizer, max_norm=0.5, scaler=scaler, fold=fold)
    plain = _model("cuda")
    _backward(plain, "cuda")
    for _ in range(2):
        optimizer.zero_grad()
        _backward(model, "cuda", scaler.scale(torch.ones((), device="cuda")).item())
        report = clipper.step()
        assert report.stepped
    assert report.step == 2


@pytest.fixture
def nccl() -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fsdp2_over_nccl(nccl: None) -> None:
    model: Any = fully_shard(_model("cuda"))
    reference = _model("cuda")
    _backward(model, "cuda")
    _backward(reference, "cuda")
    wanted = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None]).item()
    assert distclip.clip_grad_norm_(model, 0.5).item() == pytest.approx(wanted, rel=1e-5)
    assert distclip.get_total_norm(model).item() == pytest.approx(0.5, rel=1e-5)
