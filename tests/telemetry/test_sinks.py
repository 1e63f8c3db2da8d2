from __future__ import annotations

import json
import logging
import os
import threading

import pytest

from distclip.telemetry.sinks import SafeSinks, auto_sink
from distclip.telemetry.spool import PATTERN, read_spool


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("DISTCLIP_", "TORCHELASTIC_", "TORCHX_", "SLURM_")):
            monkeypatch.delenv(name)


def only_file(folder):
    (path,) = folder.glob(PATTERN)
    return read_spool(path)


def test_nothing_asked_for_is_no_sink():
    assert auto_sink() is None


def test_all_three_at_once(tmp_path, monkeypatch, make_record, make_info):
    monkeypatch.setenv("DISTCLIP_SPOOL", str(tmp_path))
    monkeypatch.setenv("DISTCLIP_EVENTS", str(tmp_path / "events.jsonl"))
    monkeypatch.setenv("DISTCLIP_STEP_LOG", str(tmp_path / "steps.jsonl"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r7")
    sink = auto_sink()
    sink.open(make_info())
    assert only_file(tmp_path).value("steps") == 0  # before the first step
    sink.record(make_record(1))
    sink.record(make_record(2, 0.0))
    sink.nonfinite_applied()
    sink.phase("evaluation")
    snapshot = only_file(tmp_path)
    assert snapshot.value("steps") == 2
    assert snapshot.value("nonfinite_applied") == 1
    assert snapshot.value("phase") == 1
    assert snapshot.value("report_timestamp") > 1e9
    sink.close()
    assert only_file(tmp_path).value("steps") == 2  # the agent still needs it
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2]
    assert [line["step"] for line in events] == [2]
    assert {line["run"] for line in steps} == {"r7"}


def test_clippers_of_a_process_share_its_file_but_not_streaks(tmp_path, monkeypatch, make_record, make_info):
    monkeypatch.setenv("DISTCLIP_SPOOL", str(tmp_path))
    bad, good = auto_sink(), auto_sink()
    for sink in (bad, good):
        sink.open(make_info())
    for step in range(1, 6):
        bad.record(make_record(step, float("nan"), nan=1))
        good.record(make_record(step))
    snapshot = only_file(tmp_path)
    assert snapshot.value("steps") == 10
    assert snapshot.value("streak_nonfinite") == 1


def test_threads_lose_no_step(tmp_path, monkeypatch, make_record, make_info):
    monkeypatch.setenv("DISTCLIP_SPOOL", str(tmp_path))
    sink = auto_sink()
    sink.open(make_info())
    threads = [threading.Thread(target=lambda: [sink.record(make_record()) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert only_file(tmp_path).value("steps") == 2000


def test_a_forked_child_writes_nothing(tmp_path, monkeypatch, make_record, make_info):
    monkeypatch.setenv("DISTCLIP_SPOOL", str(tmp_path))
    monkeypatch.setenv("DISTCLIP_STEP_LOG", str(tmp_path / "steps.jsonl"))
    sink = auto_sink()
    sink.open(make_info())
    sink.record(make_record(1))
    child = os.fork()
    if child == 0:
        sink.record(make_record(2))
        sink.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    sink.record(make_record(3))
    snapshot = only_file(tmp_path)
    assert snapshot.value("steps") == 2
    assert snapshot.value("last_step") == 3
    assert [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [1, 3]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DISTCLIP_SPOOL", "/proc/nowhere"), ("DISTCLIP_EVENTS", "/proc/nowhere/e"), ("DISTCLIP_STEP_LOG", "/dev/full")],
)
def test_a_sink_that_fails_warns_once_and_the_others_go_on(
    tmp_path, monkeypatch, caplog, make_record, make_info, variable, value
):
    monkeypatch.setenv("DISTCLIP_SPOOL", str(tmp_path))
    monkeypatch.setenv("DISTCLIP_EVENTS", str(tmp_path / "events.jsonl"))
    monkeypatch.setenv("DISTCLIP_STEP_LOG", str(tmp_path / "steps.jsonl"))
    monkeypatch.setenv(variable, value)
    sink = auto_sink()
    with caplog.at_level(logging.WARNING):
        sink.open(make_info())
        for step in range(1, 4):
            sink.record(make_record(step, 0.0))
        sink.close()
    assert len(caplog.records) == 1
    assert f"{variable}={value}" in caplog.text
    if variable != "DISTCLIP_SPOOL":
        assert only_file(tmp_path).value("steps") == 3
    if variable != "DISTCLIP_EVENTS":
        assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 3
    if variable != "DISTCLIP_STEP_LOG":
        assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 3


def test_warnings_as_errors_do_not_stop_training(tmp_path, monkeypatch, make_record, make_info, recwarn):
    monkeypatch.setenv("DISTCLIP_SPOOL", str(tmp_path / "gone"))
    sink = auto_sink()
    sink.open(make_info())
    sink.record(make_record())
    assert not recwarn.list  # Python warnings can be turned into exceptions, log records cannot


def test_every_call_is_handed_on():
    calls = []

    class Recorder:
        def __getattr__(self, name):
            return lambda *arguments: calls.append((name, *arguments))

    sink = SafeSinks({"a": Recorder()})
    sink.open("info")
    sink.record("record")
    sink.nonfinite_applied()
    sink.phase("other")
    sink.close()
    assert calls == [("open", "info"), ("record", "record"), ("nonfinite_applied",), ("phase", "other"), ("close",)]
