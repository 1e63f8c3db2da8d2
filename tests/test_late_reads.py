"""On a device the host reads nothing in a late step: shown without one, by meta tensors, which hold nothing to read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

import distclip
from distclip.hostcopy import HostCopy
from distclip.late import LAST_SECONDS


class Unread:
    """In place of a `HostCopy`: nobody may ask for the numbers before the next step."""

    made = 0
    asked_for = 0.0

    def __init__(self, values: Tensor) -> None:
        assert values.is_meta
        Unread.made += 1

    def read(self) -> list[float]:
        raise AssertionError("read within the step")

    def arrives(self, seconds: float) -> bool:
        Unread.asked_for = seconds
        return False


class NoWait(TorchDispatchMode):
    """Refuses copies from the host to the device for which the host would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            *_, source = (each for each in args if isinstance(each, Tensor))
            blocking = not (kwargs or {}).get("non_blocking", args[2] if len(args) > 2 else False)
            if source.device.type == "cpu" and result.is_meta and blocking:
                raise AssertionError(f"{func} waits for the device")
        return result


def model_on_device() -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(4, 3, device="meta"))
    model.second = nn.Parameter(torch.empty(4, device="meta", dtype=torch.bfloat16))
    model.frozen = nn.Parameter(torch.empty(4, device="meta"), requires_grad=False)
    for parameter in (model.weight, model.second):
        parameter.grad = torch.empty_like(parameter)
    return model


@pytest.fixture(autouse=True)
def fused_on_meta() -> Iterator[None]:
    """Optimizers ask whether there are fused kernels for the device; for meta tensors there are (of no effect)."""
    with mock.patch("torch.optim.optimizer._get_fused_kernels_supported_devices", return_value=["meta", "cuda"]):
        yield


def fused(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    return kind([model.weight, model.second], lr=0.1, fused=True)


def clipper_for(*args: Any, **kwargs: Any) -> distclip.GradientClipper:
    """Planning may read weights, once; these have none."""
    with mock.patch("distclip.plan.handshake.content_of", return_value=1):
        clipper = distclip.GradientClipper(*args, max_norm=1.0, **kwargs)
    clipper.plan.device = torch.device("meta")
    clipper.plan.verified = True  # the first finite step of a plan waits
    return clipper


def scaler_on_device() -> GradScaler:
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler._scale = torch.empty((), device="meta")
    scaler._growth_tracker = torch.empty((), dtype=torch.int32, device="meta")
    return scaler


@pytest.mark.parametrize("read", [float, bool, Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy])
def test_meta_tensors_cannot_be_read(read: Any) -> None:
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        read(torch.empty((), device="meta"))


@pytest.mark.parametrize("telemetry", [False, True])
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_late_step_reads_nothing(kind: Any, scaled: bool, groups: bool, telemetry: bool) -> None:
    model = model_on_device()
    clipper = clipper_for(
        model,
        fused(kind, model),
        scaler=scaler_on_device() if scaled else None,
        telemetry=mock.Mock() if telemetry else None,
        param_groups={"all": distclip.ParamGroup("*")} if groups else None,
    )
    Unread.made = 0
    with mock.patch("distclip.late.HostCopy", Unread), mock.patch("distclip.reporter.HostCopy", Unread), NoWait():
        report = clipper.step(loss=torch.empty((), device="meta"))
    assert Unread.made == 1 + telemetry
    assert report.total_norm.is_meta
    assert clipper._pending.take() is not None


def test_a_copy_that_waits_is_noticed() -> None:
    there = torch.empty(2, device="meta")
    with NoWait():
        there[:1] = torch.ones(1, device="meta")
        torch.ones(2).to("meta", non_blocking=True)
        with pytest.raises(AssertionError, match="waits"):
            there[:] = torch.ones(2)
        with pytest.raises(AssertionError, match="waits"):
            torch.ones(2).to("meta")


@pytest.mark.parametrize("fold", ["never", "auto"])
def test_a_step_that_waits_does_read(fold: Any) -> None:
    """The test above would show nothing if a read went unnoticed."""
    model = model_on_device()
    clipper = clipper_for(model, fused(torch.optim.AdamW, model), fold=fold, nonfinite="raise")
    with pytest.raises((RuntimeError, NotImplementedError)):
        clipper.step()


def test_on_the_cpu_numbers_are_read_at_once() -> None:
    values = torch.tensor([1.0, 2.0])
    copy = HostCopy(values)
    values.zero_()
    assert copy.read() == [1.0, 2.0]


def test_a_clipper_that_goes_away_does_not_wait_for_ever_for_its_last_step() -> None:
    copy = HostCopy(torch.ones(1))
    copy._read, copy._copied = None, mock.Mock(**{"query.side_effect": [False, True]})
    assert copy.arrives(5.0)
    copy._copied = mock.Mock(**{"query.return_value": False})
    assert not copy.arrives(0.02)

    model = model_on_device()
    sink = mock.Mock()
    clipper = clipper_for(model, fused(torch.optim.AdamW, model), telemetry=sink)
    with mock.patch("distclip.late.HostCopy", Unread), mock.patch("distclip.reporter.HostCopy", Unread):
        clipper.step()
    del clipper
    gc.collect()
    assert Unread.asked_for == LAST_SECONDS
    assert not sink.record.called


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_reading_waits_for_the_copy_and_nothing_after_it() -> None:
    values = torch.tensor([1.0, 2.0], device="cuda")
    copy = HostCopy(values)
    big = torch.ones(8192, 8192, device="cuda")
    for _ in range(20):
        big = big @ big * 1e-4
    values.zero_()
    later = torch.cuda.Event()
    later.record()
    assert copy.read() == [1.0, 2.0]
    assert not later.query()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scaled", [False, True])
def test_on_cuda_a_late_step_makes_no_synchronisation(scaled: bool) -> None:
    model = nn.Linear(3, 2, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = GradScaler("cuda") if scaled else None
    clipper = distclip.GradientClipper(model, optimizer, max_norm=1.0, scaler=scaler)
    for step in range(4):
        loss = model(torch.ones(2, 3, device="cuda")).square().sum() * (float("nan") if step == 2 else 1.0)
        (loss if scaler is None else scaler.scale(loss)).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first finite step of a plan waits
        try:
            report = clipper.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert report.stepped is (step != 2)
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)) is (step != 2)
        optimizer.zero_grad()
