"""The listener fed through torch's own loggers and metrics, as its agent feeds it."""

from __future__ import annotations

import json
import logging
import os
import signal

import pytest
from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.api import SignalException

from distclip.launcher.agent_events import AgentListener
from distclip.telemetry.exporter import Exporter
from distclip.telemetry.node import Attempt
from distclip.telemetry.settings import Settings


@pytest.fixture
def listening(tmp_path):
    exporter = Exporter("r1", Settings(spool=tmp_path))
    listener = AgentListener(exporter, ("null", "console", "null"))
    listener.attach()
    exporter.start_attempt("initial", 1, Attempt(restarts_remaining=1))
    yield exporter.node, listener
    listener.detach()
    exporter.close()


def say(source, state, destination="null", **metadata):
    details = json.dumps({"local_rank": [0], "exit_code": [metadata.pop("exit_code", None)]})
    events.record(Event("e", source, metadata={"state": state, "metadata": details, **metadata}), destination)


def worker(state, **metadata):
    say(EventSource.WORKER, state, **metadata)


def agent(state):
    say(EventSource.AGENT, state)


def test_workers_are_up_from_their_start_events(listening):
    node, _ = listening
    worker("START", global_rank=5, worker_id=str(os.getpid()))
    assert node.view().workers == {5: True}


@pytest.mark.parametrize(
    ("verdicts", "state"),
    [
        (["SUCCEEDED", "SUCCEEDED"], "succeeded"),
        (["FAILED", "TERMINATED"], "failed"),
        (["SUCCEEDED", "FAILED"], "failed"),
        (["TERMINATED"], "failed"),
        ([], "stopped"),  # the node left the run
    ],
)
def test_the_verdict_is_the_workers_not_the_agents(listening, verdicts, state):
    node, _ = listening
    for verdict in verdicts:
        worker(verdict)
    assert node.state == "running"
    agent("RENDEZVOUS")
    assert node.state == "running"
    agent("SUCCEEDED")
    assert node.state == state


@pytest.mark.parametrize(
    ("error", "state"),
    [(SignalException("x", signal.SIGTERM), "stopped"), (KeyboardInterrupt(), "stopped"), (OSError("x"), "failed")],
)
def test_the_agents_own_trouble(listening, error, state):
    node, _ = listening
    try:
        raise error
    except BaseException:
        agent("FAILED")
    assert node.state == state


@pytest.mark.parametrize(("code", "kind"), [(3, "exit"), (-9, "signal"), (1, "exception")])
def test_failures_come_from_the_process_log(listening, tmp_path, code, kind):
    node, listener = listening
    error_file = tmp_path / "error.json"
    if kind == "exception":
        error_file.write_text("{}")
    listener.expect_errors_in({0: str(error_file)})
    log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    log.error("failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s", code, 0, 123, "python")
    worker("FAILED", exit_code=code)  # the same failure once more
    assert {name: count for name, count in node.view().failures.items() if count} == {kind: 1}


def test_a_last_failure_is_known_from_its_event_alone(listening):
    node, _ = listening
    worker("FAILED", exit_code=-11)
    assert node.view().failures["signal"] == 1


def test_stopped_workers_mean_a_restart(listening):
    node, _ = listening
    metrics.put_metric("LocalElasticAgent._stop_workers.duration.ms", 5)
    assert node.state == "running"
    metrics.put_metric("LocalElasticAgent._stop_workers.success", 1)
    assert node.state == "restarting"


def test_a_level_that_hides_events_does_not_hide_them_here(monkeypatch, tmp_path):
    monkeypatch.setattr(events, "_events_loggers", {})  # as in a new process
    monkeypatch.setenv("LOGLEVEL", "ERROR")
    exporter = Exporter("r1", Settings(spool=tmp_path))
    listener = AgentListener(exporter, ("null",))
    listener.attach()
    worker("SUCCEEDED")
    agent("SUCCEEDED")
    assert exporter.node.state == "succeeded"


def test_events_to_another_destination_are_heard(listening):
    node, _ = listening
    say(EventSource.WORKER, "SUCCEEDED", destination="console")
    say(EventSource.AGENT, "SUCCEEDED", destination="console")
    assert node.state == "succeeded"


def test_what_cannot_be_read_is_left_alone(listening):
    node, _ = listening
    for text in ("not json", "[]", '{"source": "WORKER"}', '{"source": "WORKER", "metadata": {"state": "START"}}'):
        logging.getLogger("torchelastic-events-null").info(text)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").error(
        "failed (exitcode: %s) local_rank: %s", 1, 0
    )
    assert node.state == "running"


def test_after_the_end_nothing_is_heard(listening):
    node, _ = listening
    worker("SUCCEEDED")
    agent("SUCCEEDED")
    worker("START", global_rank=0, worker_id=str(os.getpid()))
    assert node.view().workers == {}
