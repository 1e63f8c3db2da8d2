"""Models whose parameters lie on several devices: the same norms and clipped gradients as on one CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distclip
from distclip.testing import oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LIMIT = 0.5
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PLACES = [
    pytest.param(("cpu", "cuda:0"), id="cpu first"),
    pytest.param(("cuda:0", "cpu"), id="cuda first"),
    pytest.param(("cuda:0", "cuda:1"), id="two GPUs", marks=TWO),
    pytest.param(("cuda:1", "cpu", "cuda:0"), id="three devices", marks=TWO),
]


class Parts(nn.Module):
    """Layers on the devices given, one after the other, over and over."""

    def __init__(self, places: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)]
        for index, layer in enumerate(layers):
            layer.to(places[index % len(places)])
        self.layers = nn.ModuleList(layers)

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch.to(layer.weight.device)))  # type: ignore[arg-type]
        return batch


def _backward(model: nn.Module, scale: float = 1.0) -> dict[str, Any]:
    """Leaves gradients; returns those of the same model on the CPU."""
    model.zero_grad()
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    alone = Parts(("cpu",))
    for each in (model, alone):
        (each(batch).square().sum() * scale).backward()
    return oracle.gather_full_gradients(alone)


def _close(model: nn.Module, wanted: dict[str, Any]) -> bool:
    found = oracle.gather_full_gradients(model)
    return all(float(abs(found[name] - wanted[name]).max()) < 1e-5 for name in wanted)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("places", PLACES)
def test_norm_and_clipped_gradients(places: tuple[str, ...], norm_type: float) -> None:
    model = Parts(places)
    clipper = distclip.GradientClipper(model, max_norm=LIMIT, norm_type=norm_type)
    for step in range(20):  # a copy that is read too early is not always wrong
        wanted = _backward(model, 1.0 + step)
        norm = oracle.norm(wanted.values(), norm_type)
        assert distclip.get_total_norm(model, norm_type).item() == pytest.approx(norm, rel=1e-5)
        assert clipper.clip_().total_norm.item() == pytest.approx(norm, rel=1e-5)
        assert _close(model, oracle.clipped(wanted, LIMIT, norm_type))


@pytest.mark.parametrize("places", PLACES)
def test_a_function_clips_where_gradients_lie(places: tuple[str, ...]) -> None:
    model = Parts(places)
    wanted = _backward(model)
    norm = distclip.clip_grad_norm_(model, LIMIT)
    assert norm.device.type == "cuda"
    assert norm.item() == pytest.approx(oracle.norm(wanted.values(), 2.0), rel=1e-5)
    assert _close(model, oracle.clipped(wanted, LIMIT, 2.0))


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("places", PLACES)
def test_a_nan_on_either_device_skips_and_is_named(places: tuple[str, ...], bad: int) -> None:
    model = Parts(places)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clipper = distclip.GradientClipper(model, optimizer, max_norm=LIMIT, nonfinite="raise")
    _backward(model)
    model.layers[bad].bias.grad[0] = math.nan  # type: ignore[index,union-attr]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(distclip.NonfiniteGradientError, match=rf"'layers\.{bad}\.bias' has 1 nan"):
        clipper.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("places", PLACES)
def test_zeroed_elements_leave_the_norm_of_the_rest(places: tuple[str, ...]) -> None:
    model = Parts(places)
    wanted = _backward(model)
    for index in (0, 1):
        model.layers[index].bias.grad[0] = math.inf  # type: ignore[index,union-attr]
        wanted[f"layers.{index}.bias"][0] = 0.0
    clipper = distclip.GradientClipper(model, max_norm=LIMIT, nonfinite="zero")
    assert bool(clipper.clip_().nonfinite)
    assert _close(model, oracle.clipped(wanted, LIMIT, 2.0))


@pytest.mark.parametrize("places", PLACES)
def test_limits_of_groups_on_other_devices(places: tuple[str, ...]) -> None:
    model = Parts(places)
    wanted = _backward(model)
    groups = {"first": distclip.ParamGroup("layers.0.*", max_norm=LIMIT / 10)}
    report = distclip.GradientClipper(model, max_norm=LIMIT, param_groups=groups).clip_()
    assert report.total_norm.item() == pytest.approx(oracle.norm(wanted.values(), 2.0), rel=1e-5)
    first = {name: value for name, value in wanted.items() if name.startswith("layers.0.")}
    rest = {name: value for name, value in wanted.items() if name not in first}
    assert _close(model, oracle.clipped(first, LIMIT / 10, 2.0) | oracle.clipped(rest, LIMIT, 2.0))


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_and_an_optimizer_over_cpu_and_cuda(fused: bool) -> None:
    model = Parts(("cpu", "cuda:0"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    clipper = distclip.GradientClipper(model, optimizer, max_norm=LIMIT, scaler=scaler)
    wanted = _backward(model)
    before = {name: value.detach().cpu().double().numpy() for name, value in model.named_parameters()}
    model.zero_grad()
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    loss = model(batch).square().sum().to("cuda")
    scaler.scale(loss).backward()
    report = clipper.step()
    assert report.total_norm.item() == pytest.approx(oracle.norm(wanted.values(), 2.0), rel=1e-5)
    steps = oracle.clipped(wanted, LIMIT, 2.0)
    for name, parameter in model.named_parameters():
        moved = parameter.detach().cpu().double().numpy()
        assert float(abs(moved - (before[name] - steps[name])).max()) < 1e-5
