from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

import distclip
from distclip.telemetry.collector import NodeCollector
from distclip.telemetry.events import JsonLog
from distclip.telemetry.layout import BUCKETS, COUNTERS, INDEX
from distclip.telemetry.node import Attempt, Node
from distclip.telemetry.record import Culprit
from distclip.telemetry.sinks import RankSpool, SafeSinks, SpoolSink, auto_sink
from distclip.telemetry.spool import PATTERN, read_spool

BARE = """
from distclip.telemetry.record import RunInfo
from distclip.telemetry.sinks import auto_sink
sink = auto_sink()
sink.open(RunInfo(0, 0, 1, "cpu", "ddp", "fixed", "skip", 2.0, "2", True))
sink.phase("other")
print("trained")
"""


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("DISTCLIP_", "TORCHELASTIC_", "TORCHX_", "SLURM_")):
            monkeypatch.delenv(name)


def only_file(folder):
    (path,) = folder.glob(PATTERN)
    return read_spool(path)


@pytest.fixture
def spool(tmp_path, monkeypatch):
    """A folder that auto_sink writes into, named as an agent names it."""
    folder = tmp_path / "attempt-0"
    folder.mkdir()
    monkeypatch.setenv("DISTCLIP_SPOOL", str(folder))
    return folder


def test_nothing_asked_for_is_no_sink():
    assert auto_sink() is None


def test_where_an_agent_would_make_its_folder_nothing_is_written_without_one(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTCLIP_SPOOL", str(tmp_path))  # as somebody may set it once for all jobs
    assert auto_sink() is None


def test_all_three_at_once(spool, tmp_path, monkeypatch, make_record, make_info):
    monkeypatch.setenv("DISTCLIP_EVENTS", str(tmp_path / "events.jsonl"))
    monkeypatch.setenv("DISTCLIP_STEP_LOG", str(tmp_path / "steps.jsonl"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r7")
    sink = auto_sink()
    sink.open(make_info())
    assert only_file(spool).value("steps") == 0  # before the first step
    sink.record(make_record(1))
    sink.record(make_record(2, 0.0))
    sink.nonfinite_applied()
    sink.phase("evaluation")
    snapshot = only_file(spool)
    assert snapshot.value("steps") == 2
    assert snapshot.value("nonfinite_applied") == 1
    assert snapshot.value("phase") == 1
    assert snapshot.value("report_timestamp") > 1e9
    sink.close()
    assert only_file(spool).value("steps") == 2  # the agent still needs it
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2]
    assert [line["step"] for line in events] == [2]
    assert {line["run"] for line in steps} == {"r7"}


def test_clippers_of_a_process_share_its_file_but_not_streaks(spool, make_record, make_info):
    bad, good = auto_sink(), auto_sink()
    for sink in (bad, good):
        sink.open(make_info())
    for step in range(1, 6):
        bad.record(make_record(step, float("nan"), nan=1))
        good.record(make_record(step))
    snapshot = only_file(spool)
    assert snapshot.value("steps") == 10
    assert snapshot.value("streak_nonfinite") == 1


def test_clippers_of_a_process_keep_their_norm_types(spool, make_record, make_info):
    two, maximum = auto_sink(), auto_sink()
    two.open(make_info(norm_type=2.0))
    maximum.open(make_info(norm_type=float("inf")))
    two.record(make_record(1, 2.0))
    maximum.record(make_record(1, 8.0))
    assert only_file(spool).value("rms") == 0.5  # 2 / sqrt(16); there is none for a maximum


def test_a_clipper_that_goes_away_leaves_the_logs_to_the_others(tmp_path, monkeypatch, make_record, make_info):
    monkeypatch.setenv("DISTCLIP_STEP_LOG", str(tmp_path / "steps.jsonl"))
    one, other = auto_sink(), auto_sink()
    for sink in (one, other):
        sink.open(make_info())
    one.record(make_record(1))
    one.close()
    other.record(make_record(2))
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 2


def test_clippers_of_a_process_warn_once_of_what_fails(monkeypatch, caplog, make_record, make_info):
    monkeypatch.setenv("DISTCLIP_STEP_LOG", "/dev/full")
    for sink in (auto_sink(), auto_sink()):
        sink.open(make_info())
        sink.record(make_record(1))
    assert len(caplog.records) == 1


def test_counters_are_there_when_a_clipper_was_made_and_no_step_ran(spool):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    clipper = distclip.GradientClipper([weight], optimizer, telemetry=auto_sink())
    node = Node("r1")
    node.start_attempt(spool, "initial", Attempt())
    registry = CollectorRegistry()
    registry.register(NodeCollector(node))
    assert registry.get_sample_value("distclip_steps_total", {"run": "r1"}) == 0
    assert registry.get_sample_value("distclip_nonfinite_steps_applied_total", {"run": "r1"}) == 0
    assert registry.get_sample_value("distclip_last_step", {"run": "r1"}) is None
    weight.grad = torch.ones(2)
    clipper.step()
    assert registry.get_sample_value("distclip_steps_total", {"run": "r1"}) == 1
    assert registry.get_sample_value("distclip_last_step", {"run": "r1"}) == 1


COUNTS = st.integers() | st.sampled_from([10**400, -(10**400)])
NUMBERS = st.floats() | COUNTS
FLAGS = st.booleans()
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("step", "nan", "inf", "local_nan", "local_inf", "elements", "missing_tensors"), COUNTS),
        **dict.fromkeys(("timestamp", "total_norm", "clip_coefficient", "local_norm"), NUMBERS),
        **dict.fromkeys(("clip_seconds", "wait_seconds"), NUMBERS),
        **dict.fromkeys(("limit", "loss_scale", "learning_rate", "loss", "step_seconds"), NUMBERS | st.none()),
        **dict.fromkeys(("clipped", "diverged"), FLAGS),
        "stepped": FLAGS | st.none(),
        "skip_reason": st.none() | st.text(),
        "culprits": st.just((Culprit(10**400, 2500 * 'é\n"\ud800', -1, 10**400),)),
    },
)


@given(st.lists(CHANGES, min_size=1, max_size=4))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_makes_a_sink_fail_or_a_counter_fall(tmp_path_factory, caplog, make_record, make_info, steps):
    folder = tmp_path_factory.mktemp("spool")
    log = JsonLog(folder / "steps.jsonl", "r1", events_only=False)
    sink = SafeSinks({"metrics": SpoolSink(RankSpool(folder)), "log": log})
    sink.open(make_info())
    before = only_file(folder).values
    for changes in steps:
        sink.record(replace(make_record(), **changes))
        after = only_file(folder).values
        for field in (*COUNTERS, *BUCKETS):
            assert math.isfinite(after[INDEX[field]])
            assert after[INDEX[field]] >= before[INDEX[field]], field
        assert not any(math.isinf(value) for value in after)
        before = after
    assert before[INDEX["steps"]] == len(steps)
    lines = (folder / "steps.jsonl").read_text().splitlines()
    assert len([json.loads(line, parse_constant=pytest.fail) for line in lines]) == len(steps)
    assert not caplog.records


def test_what_is_no_record_at_all_costs_a_warning(spool, caplog, make_record, make_info):
    sink = auto_sink()
    sink.open(make_info())
    for _ in range(2):
        sink.record(make_record(nan=None, elements="many"))
    assert len(caplog.records) == 1


def test_threads_lose_no_step(spool, make_record, make_info):
    sink = auto_sink()
    sink.open(make_info())
    threads = [threading.Thread(target=lambda: [sink.record(make_record()) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert only_file(spool).value("steps") == 2000


def test_a_forked_child_writes_nothing(spool, tmp_path, monkeypatch, make_record, make_info):
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
    snapshot = only_file(spool)
    assert snapshot.value("steps") == 2
    assert snapshot.value("last_step") == 3
    assert [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [1, 3]


class Recording(torch.utils.data.Dataset):
    """A data set that misuses its parent's sink, and makes one of its own."""

    def __init__(self, sink, record):
        self.sink, self.record = sink, record

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.sink.record(self.record)
        with distclip.phase("other"):
            auto_sink().record(self.record)
        return index


def test_workers_of_a_data_loader_write_nothing(spool, make_record, make_info):
    sink = auto_sink()
    sink.open(make_info())
    data = Recording(sink, make_record(7))
    loader = torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context="fork")
    assert sorted(batch.item() for batch in loader) == [0, 1, 2, 3]
    snapshot = only_file(spool)
    assert snapshot.value("steps") == 0
    assert snapshot.value("phase") == 0


def test_a_program_without_logging_shows_the_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BARE],
        env={**os.environ, "DISTCLIP_SPOOL": "/proc/attempt-0", "DISTCLIP_EVENTS": "/proc/nowhere/events"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "trained\n"
    assert sorted(line[:40] for line in done.stderr.splitlines()) == [
        "distclip: no more event log (DISTCLIP_EV",
        "distclip: no more metrics (DISTCLIP_SPOO",
    ]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DISTCLIP_SPOOL", "/proc/attempt-0"), ("DISTCLIP_EVENTS", "/proc/nowhere/e"), ("DISTCLIP_STEP_LOG", "/dev/full")],
)
def test_a_sink_that_fails_warns_once_and_the_others_go_on(
    spool, tmp_path, monkeypatch, caplog, make_record, make_info, variable, value
):
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
        assert only_file(spool).value("steps") == 3
    if variable != "DISTCLIP_EVENTS":
        assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 3
    if variable != "DISTCLIP_STEP_LOG":
        assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 3


def test_warnings_as_errors_do_not_stop_training(tmp_path, monkeypatch, make_record, make_info, recwarn):
    monkeypatch.setenv("DISTCLIP_SPOOL", str(tmp_path / "attempt-0"))
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
