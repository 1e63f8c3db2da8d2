"""Late steps: the device decides, the host hears of it one step later. Compared with steps that wait, on CPU ranks.

Nothing in a late step depends on the kind of device except that it is worth it there, so these tests let CPU ranks be
late too (`late.pays`); tests/test_late_reads.py shows that the host then waits for nothing.
"""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import distclip
from distclip.telemetry.record import StepRecord
from distclip.testing.collectives import count
from tests.distributed.recorder import Recorder

Bad = dict[int, tuple[int, float]]
"""Step -> (rank, what its loss is multiplied by)."""


@contextlib.contextmanager
def lateness(pays: bool) -> Iterator[None]:
    with mock.patch("distclip.late.pays", return_value=pays):
        yield


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wrapped(wrap: str) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    if wrap == "ddp":
        return DistributedDataParallel(model)
    return fully_shard(model) if wrap == "fsdp2" else model


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler | None) -> list[Tensor]:
    """All that a step may change."""
    tensors = [*model.parameters()]
    for parameter in model.parameters():
        tensors += [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    if scaler is not None:
        tensors += [torch.tensor(scaler.get_scale()), torch.tensor(scaler.state_dict()["_growth_tracker"])]
    return [local(tensor.detach()).clone() for tensor in tensors]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, fused=True),
}


def _train(wrap: str, name: str, scaled: bool, bad: Bad, pays: bool, steps: int = 12) -> dict[str, Any]:
    model = wrapped(wrap)
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3) if scaled else None
    sink = Recorder()
    with lateness(pays):
        clipper = distclip.GradientClipper(model, optimizer, max_norm=0.3, scaler=scaler, telemetry=sink)
        after, late, reports = [], [], []
        for step in range(steps):
            torch.manual_seed(100 * step + dist.get_rank())
            loss = torch.zeros(())
            if step not in bad or bad[step][0] >= 0:  # else there is no gradient anywhere
                loss = model(torch.randn(2, 3)).square().sum() * 10.0 ** (step % 3 - 1)
                if step in bad and dist.get_rank() == bad[step][0]:
                    loss = loss * bad[step][1]
                (loss if scaler is None else scaler.scale(loss)).backward()
            report = clipper.step(loss=loss)
            late.append(clipper._pending.step is not None)
            reports.append(report)
            assert not hasattr(optimizer, "grad_scale")
            assert not hasattr(optimizer, "found_inf")
            optimizer.zero_grad()
            after.append(everything(model, optimizer, scaler))
        state = clipper.state_dict()
        del clipper
        gc.collect()  # the last step is reported when the clipper goes
    return {
        "after": after,
        "late": late,
        "reports": [(r.stepped, r.skip_reason, r.nonfinite, float(r.total_norm), r.host().loss_scale) for r in reports],
        "records": sink.records,
        "applied": sink.applied,
        "state": state,
    }


def _compared(wrap: str, name: str, scaled: bool, bad: Bad) -> list[bool]:
    waited, late = (_train(wrap, name, scaled, bad, pays) for pays in (False, True))
    assert not any(waited["late"])
    for ours, theirs in zip(late["after"], waited["after"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # CPU and device round their norms differently
    for step in set(bad) - {0}:
        if bad[step][1] != 0.0 or bad[step][0] < 0:
            states = [late["after"][number][: -2 if scaled else None] for number in (step - 1, step)]
            assert all(map(torch.equal, *states)), "a skip leaves every bit but the scale's"
    assert len(late["records"]) == len(waited["records"]) == 12
    for ours, theirs in zip(late["records"], waited["records"], strict=True):
        assert told(ours) == told(theirs)
    for ours, theirs in zip(late["reports"], waited["reports"], strict=True):
        assert ours[:3] == theirs[:3]
        assert ours[3] == pytest.approx(theirs[3], rel=1e-5, nan_ok=True)
        assert ours[4] == theirs[4]
    assert late["state"] == waited["state"]
    assert late["applied"] == 0
    return late["late"]


def told(record: StepRecord) -> list[Any]:
    """What a record says, apart from times and rounding."""
    numbers = (record.total_norm, record.clip_coefficient, record.loss, record.local_norm)
    return [
        *(f"{number:.4g}" for number in numbers if number is not None),
        *(record.step, record.stepped, record.skip_reason, record.clipped, record.missing_tensors, record.elements),
        *(record.diverged, record.nonfinite, record.loss_scale, record.learning_rate, record.limit),
        # of a gradient that holds both, a late step knows the nan only
        *(bool(record.nan), record.nan + record.inf > 0, record.local_nan + record.local_inf > 0),
        {(culprit.rank, culprit.parameter, culprit.nan != 0) for culprit in record.culprits},
    ]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("wrap", "name"), [("ddp", "adamw"), ("fsdp2", "adamw"), ("ddp", "momentum"), ("ddp", "adagrad")]
)
def test_late_steps_equal_steps_that_wait(ranks: Any, wrap: str, name: str, scaled: bool) -> None:
    # the last step is good: of a bad one that nobody follows up the culprits stay unknown
    bad: Bad = {0: (1, math.nan), 3: (0, math.inf), 4: (1, math.nan), 7: (-1, 0.0), 9: (1, 0.0)}
    for late in ranks(_compared, 2, wrap, name, scaled, bad):
        # the first good step waits, because replicas are compared there
        assert late == [False, False, *[True] * 10]


def _one_collective() -> dict[str, int]:
    model = wrapped("fsdp2")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with lateness(True):
        clipper = distclip.GradientClipper(model, optimizer, max_norm=0.3)
        for _ in range(2):
            model(torch.randn(2, 3)).sum().backward()
            clipper.step()
        with count() as counted:
            clipper.step()
        assert clipper._pending.step is not None
    return dict(counted)


def test_a_late_step_takes_one_collective(ranks: Any) -> None:
    assert ranks(_one_collective, 2) == [{"allreduce": 1}] * 2


def _mixed(bad_rank: int) -> dict[str, Any]:
    """Rank 0 is late, rank 1 waits, because its optimizer is not fused; DDP's own collectives come in between."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=dist.get_rank() == 0)
    sink, stepped, weights = Recorder(), [], []
    with lateness(True):
        clipper = distclip.GradientClipper(model, optimizer, max_norm=0.3, telemetry=sink)
        for step in range(6):
            torch.manual_seed(step)
            bad = step == 3 and dist.get_rank() == bad_rank
            (model(torch.randn(2, 3)).square().sum() * (math.nan if bad else 1.0)).backward()
            stepped.append(clipper.step().stepped)
            optimizer.zero_grad()
            weights.append([parameter.detach().clone() for parameter in model.parameters()])
        clipper._catch_up()
    return {
        "stepped": stepped,
        "weights": weights,
        "culprits": [[(c.rank, c.parameter) for c in record.culprits] for record in sink.records],
    }


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_rank_that_waits_and_one_that_does_not(ranks: Any, bad_rank: int) -> None:
    one, two = ranks(_mixed, 2, bad_rank)
    assert one["stepped"] == two["stepped"] == [True, True, True, False, True, True]
    for ours, theirs in zip(one["weights"], two["weights"], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert one["culprits"] == two["culprits"]
    assert [rank for rank, _ in one["culprits"][3]] == [0, 0]  # after DDP's reduction both hold it; the owner is named


def _bad_shard(bad_rank: int) -> list[tuple[int, str]]:
    """Rank 0 is late, rank 1 waits; each holds half of the gradient."""
    model = fully_shard(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=dist.get_rank() == 0)
    sink = Recorder()
    with lateness(True):
        clipper = distclip.GradientClipper(model, optimizer, telemetry=sink)
        for step in range(3):
            model(torch.randn(2, 4)).sum().backward()
            if step == 2 and dist.get_rank() == bad_rank:
                local(model.weight.grad).fill_(math.nan)  # type: ignore[arg-type]
            clipper.step()
            optimizer.zero_grad()
        clipper._catch_up()
    return [(culprit.rank, culprit.parameter) for culprit in sink.records[-1].culprits]


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_rank_that_waits_among_late_ones_is_named_too(ranks: Any, bad_rank: int) -> None:
    assert ranks(_bad_shard, 2, bad_rank) == [[(bad_rank, "weight")]] * 2


def _let_go() -> bool:
    group = dist.new_group([0, 1])
    parameter = nn.Parameter(torch.zeros(2))
    with lateness(True):
        clipper = distclip.GradientClipper([parameter], torch.optim.AdamW([parameter], fused=True), group=group)
        for _ in range(2):
            parameter.grad = torch.ones(2)
            clipper.step()
    assert clipper._pending.step is not None
    dist.barrier()
    reference = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return reference() is None


def test_a_step_not_followed_up_does_not_keep_its_process_group_alive(ranks: Any) -> None:
    assert ranks(_let_go, 2) == [True, True]


def _gone_with_an_error() -> tuple[bool, list[Any]]:
    parameter = nn.Parameter(torch.zeros(2))
    sink = Recorder()
    with lateness(True):
        clipper = distclip.GradientClipper([parameter], torch.optim.AdamW([parameter], fused=True), telemetry=sink)
        for step in range(3):
            parameter.grad = torch.ones(2)
            clipper.step(-1.0 if step == 2 and dist.get_rank() == 1 else 1.0)
    assert clipper._pending.step is not None
    reference = weakref.ref(clipper)
    del clipper
    gc.collect()
    return reference() is None, [record.skip_reason for record in sink.records]


def test_a_clipper_with_an_error_to_tell_can_go(ranks: Any) -> None:
    assert ranks(_gone_with_an_error, 2) == [(True, [None, None, "undecided"])] * 2


def _new_parameter_on(rank: int) -> dict[str, Any]:
    """A layer is unfrozen on every rank, but one rank hears of it a step earlier than the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    reasons, late, frozen = [], [], []
    with lateness(True):
        clipper = distclip.GradientClipper(model, optimizer, max_norm=0.3)
        for step in range(7):
            if step == 4 or (step == 3 and dist.get_rank() == rank):
                model[0].requires_grad_(True)
            torch.manual_seed(step)
            (model(torch.randn(2, 3)).square().sum()).backward()
            if step == 3:
                model[0].zero_grad()  # only that rank has it
            before = [parameter.detach().clone() for parameter in model.parameters()]
            report = clipper.step()
            reasons.append(report.skip_reason)
            moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert moved is report.stepped
            late.append(clipper._pending.step is not None)
            frozen.append(len(clipper.plan.frozen))
            optimizer.zero_grad()
    return {"reasons": reasons, "late": late, "frozen": frozen[-1], "norm": float(report.total_norm)}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_asks_for_a_new_plan_costs_the_step(ranks: Any, rank: int) -> None:
    one, two = ranks(_new_parameter_on, 2, rank)
    assert one["reasons"] == two["reasons"] == [None, None, None, "undecided", None, None, None]
    assert one["norm"] == two["norm"]
    assert one["frozen"] == two["frozen"] == 0
    assert one["late"][-1]
    assert two["late"][-1]


def _told(kind: str) -> tuple[list[Any], str, list[Any]]:
    """What is wrong on rank 1 in its third step; when, and what, every rank hears, and what telemetry does."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    reasons: list[Any] = []
    sink = Recorder()
    with lateness(True):
        clipper = distclip.GradientClipper(model, optimizer, max_norm=0.3, scaler=scaler, telemetry=sink)
        for step in range(5):
            scaler.scale(model(torch.randn(2, 3)).square().sum()).backward()
            wrong = step == 2 and dist.get_rank() == 1
            if wrong and kind == "scale":
                scaler._scale.fill_(16.0)  # type: ignore[union-attr]
            if wrong and kind == "missing":
                model.module.bias.grad = None
            before = [parameter.detach().clone() for parameter in model.parameters()]
            try:
                report = clipper.step(
                    -1.0 if wrong and kind == "argument" else 0.5 if wrong and kind == "other" else 1.0
                )
            except distclip.DistclipError as error:
                told = [record.skip_reason for record in sink.records]
                return reasons, f"{type(error).__name__} at {step}: {error}", told
            reasons.append(report.skip_reason)
            if step == 2:
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            optimizer.zero_grad()
    return reasons, "", []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("argument", "ConfigError at 3: grad_multiplier must be finite and > 0, not -1 (on rank 1 of 2)"),
        ("other", "AgreementError at 3: "),
        ("scale", "AgreementError at 3: the loss scale differs between ranks: 8 on rank 0, 16 on rank 1"),
        ("missing", "LayoutError at 3: a replicated parameter has a gradient on some ranks only: 'bias'"),
    ],
)
def test_what_is_wrong_on_one_rank_is_heard_by_all_one_step_later(ranks: Any, kind: str, text: str) -> None:
    for reasons, error, recorded in ranks(_told, 2, kind):
        assert reasons == recorded == [None, None, "undecided"]
        assert error.startswith(text)


def _give_up() -> tuple[int, str, dict[str, int]]:
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with lateness(True):
        clipper = distclip.GradientClipper(model, optimizer, max_consecutive_skips=2)
        for step in range(9):
            (model(torch.randn(2, 3)).sum() * (math.nan if step > 2 else 1.0)).backward()
            saved = clipper.state_dict()  # before the step is taken: also what the last one left for later
            try:
                clipper.step()
            except distclip.NonfiniteGradientError as error:
                return step, str(error), saved
            optimizer.zero_grad()
    raise AssertionError("never raised")


def test_too_many_skips_raise_one_step_late_on_every_rank(ranks: Any) -> None:
    one, two = ranks(_give_up, 2)
    assert one == two
    step, text, saved = one
    assert step == 6
    assert "in 3 steps in a row" in text
    assert "'weight' has nan" in text
    assert saved == {"steps": 6, "consecutive_skips": 3}


def _kept(reason: str) -> bool:
    """Whether any of some steps was late although it may not be."""
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 2)
    options: dict[str, Any] = {}
    fused = reason != "not fused"
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    if reason in ("raise", "zero", "propagate"):
        options["nonfinite"] = reason
    if reason == "inf":
        options["norm_type"] = math.inf
    if reason == "several limits":
        options["param_groups"] = {"bias": distclip.ParamGroup("bias", max_norm=0.1)}
    if reason == "double":
        model = model.double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = GradScaler("cpu") if reason == "shared scaler" else None
    with lateness(True):
        clipper = distclip.GradientClipper(model, optimizer, scaler=scaler, fold="auto", **options)
        other = nn.Linear(1, 1)
        second = distclip.GradientClipper(other, torch.optim.SGD(other.parameters(), lr=0.1), scaler=scaler)
        if reason == "callback":
            clipper.after_step(lambda: None)
        late = False
        for _ in range(4):
            for each in (model, other):
                each.zero_grad()
                loss = each(torch.randn(2, each.in_features, dtype=each.weight.dtype)).sum()
                (loss if scaler is None else scaler.scale(loss)).backward()
            clipper.step()
            second.step()
            late = late or clipper._pending.step is not None
    return late


@pytest.mark.parametrize(
    "reason",
    ["not fused", "raise", "zero", "propagate", "inf", "several limits", "shared scaler", "callback"],
)
def test_where_the_host_must_act_on_the_decision_it_waits(reason: str) -> None:
    assert not _kept(reason)


def test_where_nothing_speaks_against_it_the_step_is_late() -> None:
    assert _kept("nothing")


def test_sums_beyond_float64_close_the_gate_once_and_then_are_waited_for() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    seen = []
    with lateness(True):
        clipper = distclip.GradientClipper([parameter], optimizer, max_norm=1.0)
        for value in (3.0, 3.0, 1e200, 1e200, 1e200):
            parameter.grad = torch.tensor([value, value], dtype=torch.float64)
            report = clipper.step()
            seen.append((report.skip_reason, clipper._pending.step is not None))
    assert seen == [(None, False), (None, True), ("undecided", True), (None, False), (None, False)]
    assert float(report.total_norm) == pytest.approx(math.sqrt(2) * 1e200)


def test_a_momentum_that_does_not_exist_yet_is_waited_for() -> None:
    # fused SGD leaves its buffer uninitialised when found_inf is set in the step that makes it
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, fused=True)
    seen = []
    with lateness(True):
        clipper = distclip.GradientClipper([parameter], optimizer, max_norm=10.0)
        parameter.grad = torch.ones(2)
        clipper.measure()  # compares replicas, so that nothing else speaks against a late step
        for value in (math.nan, 1.0, math.nan, 1.0):
            parameter.grad = torch.full((2,), value)
            clipper.step()
            seen.append(clipper._pending.step is not None)
    assert seen == [False, False, True, True]
    assert parameter.tolist() == pytest.approx([-1.0 - 1.9] * 2)


def test_a_factor_that_the_kernels_cannot_take_closes_the_gate_once_and_then_is_waited_for() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    seen = []
    with lateness(True):
        clipper = distclip.GradientClipper([parameter], optimizer, max_norm=1e-3)
        for value in (1.0, 3e38, 3e38):
            parameter.grad = torch.full((2,), value)
            before = parameter.detach().clone()
            seen.append((clipper.step().skip_reason, float((parameter.detach() - before).norm())))
    assert seen == [(None, pytest.approx(1e-3)), ("undecided", 0.0), (None, pytest.approx(1e-3))]


@pytest.mark.parametrize("pays", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_that_is_fused_no_longer_gets_its_gradients_multiplied(kind: Any, pays: bool) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = kind([parameter], lr=1.0, fused=True)
    with lateness(pays):
        clipper = distclip.GradientClipper([parameter], optimizer)
        for step in range(4):
            if step == 2:  # a checkpoint of a run that was not fused
                state = optimizer.state_dict()
                state["param_groups"][0]["fused"] = None
                optimizer.load_state_dict(state)
            parameter.grad = torch.tensor([3.0, 4.0])
            assert clipper.step().stepped
            assert (clipper._pending.step is not None) is (pays and step == 1)
            assert parameter.grad.tolist() == pytest.approx([0.6, 0.8])
