from __future__ import annotations

import json
import os

import pytest

from distclip.telemetry.events import JsonLog, event_of
from distclip.telemetry.record import Culprit


def lines(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not strict JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("changes", "event"),
    [
        ({}, None),
        ({"total_norm": float("nan"), "nan": 1, "skip_reason": "nonfinite"}, "nonfinite"),
        ({"total_norm": float("inf"), "inf": 1}, "nonfinite"),
        ({"skip_reason": "spike"}, "skipped"),
        ({"diverged": True, "total_norm": 0.0}, "diverged"),
        ({"diverged": True, "nan": 1}, "nonfinite"),
        ({"total_norm": 0.0}, "zero"),
        ({"total_norm": 0.0, "skip_reason": "no_gradients"}, "skipped"),
        ({"total_norm": 1e-9}, "tiny"),
    ],
)
def test_events(make_record, changes, event):
    assert event_of(make_record(**changes)) == event


def test_the_event_log_has_special_steps_only_and_is_strict_json(tmp_path, make_record, make_info):
    path = tmp_path / "new" / "events.jsonl"
    log = JsonLog(path, "r1", events_only=True)
    log.open(make_info(0))
    log.record(make_record(1))
    log.record(
        make_record(
            2,
            float("nan"),
            nan=3,
            inf=1,
            stepped=False,
            skip_reason="nonfinite",
            loss=float("-inf"),
            loss_scale=1024.0,
            culprits=(Culprit(1, "head.weight", 3, 1),),
        )
    )
    log.close()
    assert lines(path) == [
        {
            "time": 1002.0,
            "run": "r1",
            "rank": 0,
            "step": 2,
            "event": "nonfinite",
            "total_norm": "nan",
            "limit": 1.0,
            "clip_coefficient": 0.5,
            "skip_reason": "nonfinite",
            "stepped": False,
            "nan": 3,
            "inf": 1,
            "diverged": False,
            "loss_scale": 1024.0,
            "loss": "-inf",
            "culprits": [{"rank": 1, "parameter": "head.weight", "nan": 3, "inf": 1}],
        }
    ]


def test_the_step_log_has_every_step_with_the_same_fields(tmp_path, make_record, make_info):
    path = tmp_path / "steps.jsonl"
    log = JsonLog(path, None, events_only=False)
    log.open(make_info(0))
    log.record(make_record(1))
    log.record(make_record(2, 0.0))
    assert [(line["step"], line["event"], line["run"]) for line in lines(path)] == [(1, None, None), (2, "zero", None)]
    assert len({tuple(line) for line in lines(path)}) == 1


def test_only_rank_0_writes(tmp_path, make_record, make_info):
    log = JsonLog(tmp_path / "steps.jsonl", "r1", events_only=False)
    log.open(make_info(1))
    log.record(make_record(1))
    assert not list(tmp_path.iterdir())


def test_a_restarted_run_goes_on_in_the_same_file(tmp_path, make_record, make_info):
    for step in (1, 2):
        log = JsonLog(tmp_path / "steps.jsonl", "r1", events_only=False)
        log.open(make_info(0))
        log.record(make_record(step))
        log.close()
    assert [line["step"] for line in lines(tmp_path / "steps.jsonl")] == [1, 2]


def test_a_full_disk_is_an_error_for_the_caller_to_handle(make_record, make_info):
    from pathlib import Path

    log = JsonLog(Path("/dev/full"), "r1", events_only=False)
    log.open(make_info(0))
    with pytest.raises(OSError, match="No space left"):
        log.record(make_record(1))


def test_a_named_pipe_without_a_reader_is_an_error_and_no_wait(tmp_path, make_record, make_info):
    pipe = tmp_path / "events.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device or address"):
        JsonLog(pipe, "r1", events_only=False).open(make_info(0))


def test_a_reader_that_does_not_read_is_an_error_and_no_wait(tmp_path, make_record, make_info):
    pipe = tmp_path / "events.jsonl"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        log = JsonLog(pipe, "r1", events_only=False)
        log.open(make_info(0))
        log.record(make_record(1))
        assert json.loads(os.read(reader, 65536))["step"] == 1
        records = [make_record(step) for step in range(2, 10_000)]  # more than a pipe holds
        with pytest.raises(OSError, match=r"temporarily unavailable|only a part of a line"):
            list(map(log.record, records))
    finally:
        os.close(reader)
