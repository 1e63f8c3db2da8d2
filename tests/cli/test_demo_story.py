"""The demo's judgement: it must be able to say no."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from distclip.cli.demo_story import FAULTS, STEPS, Fault, Step, false_alarms, judge, loss_fell, read_step

NAN, ZERO, TINY, SPIKE = FAULTS


def step(number: int, **changes: object) -> Step:
    good = Step(number, 1000.0 + number, 5.5 - number / 50, 0.8, 1.0, 1.0, None, True, 0)
    return replace(good, **changes)  # type: ignore[arg-type]


def caught(number: int) -> Step:
    """The step as distclip logs it when all goes well."""
    for fault in FAULTS:
        if fault.first <= number <= fault.last:
            return {
                "nan": step(number, loss=math.nan, norm=math.nan, event="nonfinite", stepped=False, bad_elements=7),
                "zero": step(number, loss=0.0, norm=0.0, event="zero"),
                "tiny": step(number, loss=2e-9, norm=1e-9, event="tiny"),
                "spike": step(number, loss=3e4, norm=8000.0, coefficient=1 / 8000),
            }[fault.kind]
    return step(number)


RUN = [caught(number) for number in range(1, STEPS + 1)]


def changed(number: int, **changes: object) -> list[Step]:
    return [replace(each, **changes) if each.number == number else each for each in RUN]  # type: ignore[arg-type]


def test_the_demo_has_one_fault_of_each_kind_and_room_between_them() -> None:
    assert [fault.kind for fault in FAULTS] == ["nan", "zero", "tiny", "spike"]
    assert [fault.flag for fault in FAULTS] == ["nan@40:rank=1", "zero@75-82", "tiny@115-122", "spike@155"]
    assert all(first.last + 20 < second.first for first, second in itertools.pairwise(FAULTS))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_a_fault_that_was_dealt_with_is_caught(fault: Fault) -> None:
    assert judge(fault, RUN).caught


def test_a_run_without_mistakes_has_no_false_alarms() -> None:
    assert false_alarms(RUN) == []


@pytest.mark.parametrize(
    ("fault", "changes"),
    [
        (NAN, {"stepped": True}),
        (NAN, {"event": None}),
        (NAN, {"norm": 3.0}),
        (NAN, {"bad_elements": 0}),
        (ZERO, {"event": None}),
        (ZERO, {"norm": 1e-12}),
        (TINY, {"event": "zero", "norm": 0.0}),
        (TINY, {"norm": 1e-3}),
        (TINY, {"event": None}),
        (SPIKE, {"coefficient": 1.0}),
        (SPIKE, {"coefficient": 1 / 4000}),
        (SPIKE, {"norm": math.inf}),
        (SPIKE, {"norm": 0.9, "coefficient": 1.0}),
        (SPIKE, {"event": "nonfinite", "stepped": False}),
    ],
)
def test_a_fault_that_was_mistaken_is_not_caught(fault: Fault, changes: dict[str, object]) -> None:
    finding = judge(fault, changed(fault.last, **changes))
    assert not finding.caught
    assert finding.decision.startswith(f"step {fault.last} was taken for ")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_a_fault_whose_steps_are_missing_is_not_caught(fault: Fault) -> None:
    finding = judge(fault, RUN[: fault.last - 1])
    assert not finding.caught
    assert finding.decision == "1 of its steps are not in the step log"


@pytest.mark.parametrize("changes", [{"event": "tiny", "norm": 1e-8}, {"stepped": False}])
def test_a_good_step_that_was_flagged_is_a_false_alarm(changes: dict[str, object]) -> None:
    assert [each.number for each in false_alarms(changed(100, **changes))] == [100]


def test_the_loss_must_fall_by_more_than_batches_differ() -> None:
    assert loss_fell(RUN) == (True, pytest.approx(5.39), pytest.approx(1.59))
    flat = [replace(each, loss=5.5 - each.number / 1000) for each in RUN]
    assert not loss_fell(flat)[0]
    assert not loss_fell(RUN[:10])[0]


def test_a_line_of_the_step_log_is_read_with_its_texts_for_numbers() -> None:
    line = {
        "time": 1.5, "run": "demo", "rank": 0, "step": 40, "event": "nonfinite", "total_norm": "nan", "limit": 1.0,
        "clip_coefficient": 1.0, "skip_reason": "nonfinite", "stepped": False, "nan": 5, "inf": 2, "loss_scale": None,
        "loss": "-inf", "culprits": [],
    }  # fmt: skip
    read = read_step(json.dumps(line))
    assert math.isnan(read.norm)
    assert read.loss == -math.inf
    assert (read.number, read.time, read.stepped, read.bad_elements) == (40, 1.5, False, 7)
