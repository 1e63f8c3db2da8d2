"""What one rank does differently from the others, or by hand, around steps that are late."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distclip
from tests.distributed.recorder import Recorder
from tests.distributed.test_late import lateness


def _training(sink: Any = None) -> tuple[nn.Parameter, torch.optim.Optimizer, distclip.GradientClipper]:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    return parameter, optimizer, distclip.GradientClipper([parameter], optimizer, telemetry=sink)


def _wrong_type() -> tuple[list[Any], str]:
    parameter, _, clipper = _training()
    reasons: list[Any] = []
    for step in range(4):
        parameter.grad = torch.ones(2)
        wrong: Any = "half" if step == 2 and dist.get_rank() == 1 else 1.0
        try:
            reasons.append(clipper.step(wrong).skip_reason)
        except TypeError as error:
            return reasons, str(error)
    return reasons, ""


def test_an_argument_of_the_wrong_type_is_heard_by_all(ranks: Any) -> None:
    text = "grad_multiplier must be a number, not str (on rank 1 of 2)"
    assert ranks(_late, 2, "_wrong_type") == [([None, None, "undecided"], text)] * 2


def _measured_alone(pays: bool) -> tuple[list[Any], str, list[float]]:
    """In its third step rank 0 looks at the norm first, as for a log that only rank 0 writes."""
    with lateness(pays):
        parameter, _, clipper = _training()
        reasons: list[Any] = []
        try:
            for step in range(4):
                parameter.grad = torch.ones(2)
                if step == 2 and dist.get_rank() == 0:
                    reasons.append(clipper.measure().skip_reason)
                reasons.append(clipper.step().skip_reason)
        except distclip.AgreementError as error:
            return reasons, str(error), parameter.tolist()
    return reasons, "", parameter.tolist()


def _late(name: str) -> Any:
    with lateness(True):
        return globals()[name]()


def _interrupted() -> list[Any]:
    """Rank 0 is interrupted within a late step that is a skip."""
    sink = Recorder()
    parameter, optimizer, clipper = _training(sink)
    told: list[Any] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for step in range(4):
        parameter.grad = torch.full((2,), math.nan if step == 2 else 1.0)
        hook = optimizer.register_step_pre_hook(interrupt) if step == 2 and dist.get_rank() == 0 else None
        try:
            clipper.step()
        except KeyboardInterrupt:
            told.append("interrupted")
        if hook is not None:
            hook.remove()
    clipper._catch_up()
    return told + [(record.step, record.skip_reason, len(record.culprits)) for record in sink.records]


def test_a_rank_that_is_interrupted_within_a_late_step_follows_it_up_all_the_same(ranks: Any) -> None:
    records = [(1, None, 0), (2, None, 0), (3, "nonfinite", 1), (4, None, 0)]
    assert ranks(_late, 2, "_interrupted") == [["interrupted", *records], records]


@pytest.mark.parametrize("pays", [False, True])
def test_measuring_on_one_rank_only_is_an_error_and_no_step(ranks: Any, pays: bool) -> None:
    one, two = ranks(_measured_alone, 2, pays)
    assert one == two
    reasons, error, _ = one
    assert reasons == [None, None, *(["undecided"] if pays else [])]
    assert error.startswith("the call must be the same on every rank, but is measure() on rank 0, step() or clip_() on")


@pytest.mark.parametrize("pays", [False, True])
def test_a_step_by_hand_after_a_skip_is_counted(pays: bool) -> None:
    sink = Recorder()
    with lateness(pays):
        parameter, optimizer, clipper = _training(sink)
        for value in (1.0, 1.0, math.nan, 1.0, 1.0):
            parameter.grad = torch.full((2,), value)
            clipper.step()
            if math.isnan(value):
                optimizer.step()
        del clipper
    assert sink.applied == 1
