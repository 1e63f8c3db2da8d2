"""One decision on all ranks: skip, raise, zero, propagate; GradScaler; what is left untouched."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import distclip
from distclip.testing.collectives import count
from tests.distributed.failures import fails_alike
from tests.distributed.recorder import Recorder


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _model(wrap: str) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    if wrap == "ddp":
        return DistributedDataParallel(model)
    if wrap == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    return fully_shard(model)


def _poison(model: Any, rank: int, value: float = math.nan) -> None:
    """Put a bad value into the last gradient that `rank` holds, in the local shard only."""
    if dist.get_rank() == rank:
        local = [_local(p.grad) for p in model.parameters() if p.grad is not None and _local(p.grad).numel()]
        local[-1].view(-1)[-1] = value


def _state(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [_local(p.detach()) for p in model.parameters()]
    for state in optimizer.state.values():
        tensors += [_local(value) for value in state.values() if isinstance(value, Tensor)]
    return [tensor.clone() for tensor in tensors]


def _nan_on_one_rank(wrap: str) -> dict[str, Any]:
    model = _model(wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sink = Recorder()
    clipper = distclip.GradientClipper(model, optimizer, max_norm=0.5, telemetry=sink)
    batch = torch.randn(3, 4)
    model(batch).sum().backward()
    assert clipper.step().stepped is True
    optimizer.zero_grad()
    before = _state(model, optimizer)
    model(batch).sum().backward()
    _poison(model, 1)
    report = clipper.step()
    after = _state(model, optimizer)
    optimizer.zero_grad()
    model(batch).sum().backward()
    again = clipper.step()
    return {
        "same": len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "stepped": [report.stepped, again.stepped],
        "reason": report.skip_reason,
        "norm": report.total_norm.item(),
        "coefficient": report.clip_coefficient.item(),
        "bad": [record.nan for record in sink.records],
        "local": [record.local_nan for record in sink.records],
        "culprits": [[(c.rank, c.parameter, c.nan, c.inf) for c in record.culprits] for record in sink.records],
        "applied": sink.applied,
        "moved": not all(torch.equal(a, b) for a, b in zip(after, _state(model, optimizer), strict=True)),
    }


@pytest.mark.parametrize("wrap", ["ddp", "fsdp1", "fsdp2"])
def test_a_nan_on_one_rank_is_skipped_by_all(ranks: Any, wrap: str) -> None:
    results = ranks(_nan_on_one_rank, 2, wrap)
    for rank, result in enumerate(results):
        assert result["same"]
        assert result["stepped"] == [False, True]
        assert result["reason"] == "nonfinite"
        assert math.isnan(result["norm"])
        assert result["coefficient"] == 1.0
        assert result["bad"] == [0, 1, 0]
        assert result["local"] == [0, rank, 0]
        assert result["culprits"] == [[], [(1, "1.bias", 1, 0)], []]
        assert result["applied"] == 0
        assert result["moved"]


def _raise(wrap: str, value: float) -> tuple[str, bool]:
    model = _model(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clipper = distclip.GradientClipper(model, optimizer, nonfinite="raise")
    before = _state(model, optimizer)
    model(torch.randn(3, 4)).sum().backward()
    _poison(model, 1, value)
    try:
        clipper.step()
    except distclip.NonfiniteGradientError as error:
        return str(error), all(torch.equal(a, b) for a, b in zip(before, _state(model, optimizer), strict=True))
    return "", False


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_raise_names_rank_and_parameter_on_every_rank(ranks: Any, value: float) -> None:
    word = "nan" if math.isnan(value) else "inf"
    text = f"step 1: gradients are not finite: rank 1: '1.bias' has 1 {word}"
    assert ranks(_raise, 2, "fsdp2", value) == [(text, True), (text, True)]


def _zero(value: float) -> tuple[float, float, bool | None]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.tensor([3.0, 4.0, 0.0, value]), mesh, [Shard(0)])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    clipper = distclip.GradientClipper([parameter], optimizer, max_norm=1.0, nonfinite="zero")
    report = clipper.step()
    assert report.nonfinite
    return report.total_norm.item(), parameter.detach().full_tensor().norm().item(), report.stepped


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_zero_clips_the_rest_by_its_own_norm(ranks: Any, value: float) -> None:
    for norm, moved, stepped in ranks(_zero, 2, value):
        assert norm == 5.0
        assert moved == pytest.approx(1.0, abs=1e-6)
        assert stepped is True


def _propagate() -> tuple[float, list[float], int]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.tensor([3.0, math.nan]), mesh, [Shard(0)])
    sink = Recorder()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    clipper = distclip.GradientClipper([parameter], optimizer, nonfinite="propagate", telemetry=sink)
    report = clipper.step()
    assert report.stepped is True
    return report.total_norm.item(), parameter.detach().full_tensor().tolist(), sink.applied


def test_propagate_does_as_torch_and_is_counted_as_applied(ranks: Any) -> None:
    for norm, weights, applied in ranks(_propagate, 2):
        assert math.isnan(norm)
        assert all(math.isnan(weight) for weight in weights)
        assert applied == 1


def _too_many() -> list[str]:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    clipper = distclip.GradientClipper([parameter], optimizer, max_consecutive_skips=3)
    said = []
    for value in [math.nan, math.nan, 1.0] + [math.nan] * 4:
        parameter.grad = torch.tensor([1.0, value])
        try:
            said.append(str(clipper.step().stepped))
        except distclip.NonfiniteGradientError as error:
            said.append(str(error))
    return said


def test_the_bad_step_after_the_tolerated_ones_raises(ranks: Any) -> None:
    for said in ranks(_too_many, 2):
        assert said[:6] == ["False", "False", "True", "False", "False", "False"]
        assert "4 steps in a row" in said[6]
        assert "max_consecutive_skips=3" in said[6]


def _ignored_decision() -> int:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    sink = Recorder()
    clipper = distclip.GradientClipper([parameter], optimizer, telemetry=sink)
    parameter.grad = torch.tensor([math.nan])
    assert not clipper.clip_().should_step
    optimizer.step()  # a loop that does not ask should_step
    parameter.grad = torch.tensor([1.0])
    clipper.clip_()
    optimizer.step()
    return sink.applied


def test_a_bad_step_that_the_loop_applies_is_counted(ranks: Any) -> None:
    assert ranks(_ignored_decision, 2) == [1, 1]


# --- GradScaler ----------------------------------------------------------------------------------------------------


def _scaled(wrap: str, by_hand: bool) -> list[Any]:
    model = _model(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kind = ShardedGradScaler if wrap == "fsdp1" else GradScaler
    scaler = kind("cpu", init_scale=1024.0, growth_interval=1)
    clipper = distclip.GradientClipper(model, optimizer, max_norm=0.5, scaler=scaler)
    plain = distclip.GradientClipper(model, max_norm=None)
    batch = torch.randn(3, 4)
    model(batch).sum().backward()
    wanted = plain.measure().total_norm.item()
    said: list[Any] = []
    for bad in (False, False, True, False):
        optimizer.zero_grad()
        scale = scaler.get_scale() if scaler._scale is not None else 1024.0
        scaler.scale(model(batch).sum()).backward()
        if bad:
            _poison(model, 1, math.inf)
        if by_hand:
            report = clipper.clip_()
            scaler.step(optimizer)
            scaler.update()
        else:
            report = clipper.step()
        after = plain.measure().total_norm.item()
        said.append(
            (bad, scale, report.total_norm.item() / wanted, after, scaler.get_scale(), report.loss_scale.item())
        )
    return said


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp1", "fsdp2"])
def test_unscale_and_clip_undo_the_scale_of_this_backward(ranks: Any, wrap: str, by_hand: bool) -> None:
    for said in ranks(_scaled, 2, wrap, by_hand):
        scale = 1024.0
        for bad, before, ratio, after, now, reported in said:
            assert before == reported == scale
            scale = scale / 2 if bad else scale * 2
            assert now == scale
            if bad:
                assert math.isinf(ratio)
            else:
                assert ratio == pytest.approx(1.0, rel=1e-6)
                assert after == pytest.approx(0.5, rel=1e-5)


def _inf_on_one_rank(sharded: bool) -> tuple[float, list[float]]:
    mesh = init_device_mesh("cpu", (2,))
    full = torch.tensor([2.0, 2.0, math.inf, 2.0])
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(full, mesh, [Shard(0)])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    source: Any = [parameter]
    if not sharded:
        local = nn.Parameter(torch.ones(2))
        local.grad = full.chunk(2)[dist.get_rank()].clone()
        optimizer = torch.optim.SGD([local], lr=1.0)
        source, parameter = [("expert", local)], local
    owned = () if sharded else ("expert",)
    report = distclip.GradientClipper(source, optimizer, scaler=scaler, owned=owned).step()
    assert report.stepped is False
    return scaler.get_scale(), _local(parameter.detach()).tolist()


@pytest.mark.parametrize("sharded", [True, False])
def test_an_inf_on_one_rank_halves_every_scale_and_moves_no_weight(ranks: Any, sharded: bool) -> None:
    assert ranks(_inf_on_one_rank, 2, sharded) == [(1.0, [1.0, 1.0])] * 2


def _already_unscaled(unscale: bool) -> tuple[float, list[float], float, list[float]]:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.tensor([3072.0, 4096.0])
    clipper = distclip.GradientClipper([parameter], optimizer, max_norm=1.0, scaler=scaler)
    if unscale:
        scaler.unscale_(optimizer)
    first = clipper.clip_().total_norm.item()
    after = parameter.grad.tolist()
    second = clipper.clip_().total_norm.item()
    return first, after, second, parameter.grad.tolist()


@pytest.mark.parametrize("unscale", [True, False])
def test_never_a_double_unscale(ranks: Any, unscale: bool) -> None:
    for first, after, second, again in ranks(_already_unscaled, 2, unscale):
        assert first == 5.0
        assert after == pytest.approx([0.6, 0.8], rel=1e-6)
        assert second == pytest.approx(1.0, rel=1e-6)
        assert again == pytest.approx(after, rel=2e-6)


def _no_gradients() -> tuple[Any, ...]:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    clipper = distclip.GradientClipper([parameter], optimizer, scaler=scaler)
    report = clipper.step()
    return report.stepped, report.skip_reason, report.total_norm.item(), scaler.get_scale()


def test_no_gradients_is_a_skip_and_no_error(ranks: Any) -> None:
    assert ranks(_no_gradients, 2) == [(False, "no_gradients", 0.0, 8.0)] * 2


def _other_scale() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0 if dist.get_rank() == 0 else 8.0)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.ones(2)
    distclip.GradientClipper([parameter], optimizer, scaler=scaler).step()


def test_ranks_with_other_scales_are_told(ranks: Any) -> None:
    assert "2 on rank 0, 8 on rank 1" in fails_alike(ranks, distclip.AgreementError, _other_scale, 2)


def _fused(bad: bool) -> tuple[int, bool, bool]:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=1.0, fused=True)
    scaler = GradScaler("cpu", init_scale=4.0)
    sink = Recorder()
    clipper = distclip.GradientClipper([parameter], optimizer, scaler=scaler, telemetry=sink)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.tensor([4.0, math.nan if bad else 4.0])
    report = clipper.clip_()
    scaler.step(optimizer)
    scaler.update()
    return sink.applied, report.should_step, torch.equal(parameter.detach(), torch.ones(2))


def test_a_fused_optimizer_sees_the_agreed_found_inf(ranks: Any) -> None:
    assert ranks(_fused, 2, True) == [(0, False, True)] * 2
    assert ranks(_fused, 2, False) == [(0, True, False)] * 2


def _seen_as_on_a_device(nonfinite: str, norm_type: float) -> list[Any]:
    """Rank 1 has a bad element beside finite ones; its first look tells whole gradients only, as on a device."""
    from distclip import agree
    from distclip.measure import measure, measure_on_device

    def coarse(bundle: Any, p: float, *, elementwise: bool = False) -> Tensor:
        return measure(bundle, p) if elementwise else measure_on_device(bundle.gradients, p)[0]

    rank = dist.get_rank()
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, math.nan, math.inf] if rank == 1 else [0.0, 4.0, 0.0])
    clipper = distclip.GradientClipper(
        [("w", parameter)], max_norm=1.0, norm_type=norm_type, owned=["w"], nonfinite=nonfinite
    )
    clipper.plan.coarse = rank == 1
    sink = Recorder()
    clipper._reporter._sink = sink
    with mock.patch.object(agree, "measure", coarse), count() as counted:
        report = clipper.clip_()
    (record,) = sink.records
    return [report.host().total_norm, parameter.grad.tolist(), record.nan, record.inf, record.local_nan, dict(counted)]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_bad_elements_on_devices_are_looked_at_one_by_one_when_there_are_any(ranks: Any, norm_type: float) -> None:
    norm = 4.0 if math.isinf(norm_type) else 5.0
    for rank, found in enumerate(ranks(_seen_as_on_a_device, 2, "zero", norm_type)):
        total, gradient, nan, inf, local_nan, counted = found
        assert total == pytest.approx(norm)
        assert gradient == pytest.approx([3.0 / norm, 0.0, 0.0] if rank == 1 else [0.0, 4.0 / norm, 0.0], rel=1e-6)
        assert (nan, inf, local_nan) == (1, 1, rank)
        assert counted["allreduce"] == 2 + math.isinf(norm_type)  # the packet twice, and the maxima
    for rank, found in enumerate(ranks(_seen_as_on_a_device, 2, "skip", norm_type)):
        assert math.isnan(found[0])
        assert found[2:5] == [1, 1, rank]


def _losses() -> list[float | None]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(torch.zeros(2))
    sink = Recorder()
    clipper = distclip.GradientClipper([parameter], torch.optim.SGD([parameter], lr=1.0), telemetry=sink)
    whole = torch.tensor(2.0)
    for loss in (whole, whole[None], DTensor.from_local(whole, mesh, [Replicate()]), 2, None):
        parameter.grad = torch.ones(2)
        clipper.step(loss=loss)
    for loss in (DTensor.from_local(whole, mesh, [Partial()]), torch.ones(3), "none"):
        parameter.grad = torch.ones(2)
        with pytest.warns(UserWarning, match="loss= is not reported: it must be one number, not"):
            clipper.step(loss=loss)  # type: ignore[arg-type]
    return [record.loss for record in sink.records]


def test_a_loss_that_is_not_one_number_is_left_out_and_costs_a_warning(ranks: Any) -> None:
    # tensor parallel losses are DTensors; the step was taken when the loss is looked at, on other ranks too
    assert ranks(_losses, 2) == [[2.0] * 4 + [None] * 4] * 2
