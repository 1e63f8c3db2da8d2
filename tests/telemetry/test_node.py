from __future__ import annotations

import os
import subprocess

import pytest

from distclip.telemetry.node import Attempt, Node
from distclip.telemetry.settings import Level
from distclip.telemetry.spool import SpoolWriter


@pytest.fixture
def node():
    return Node("r1", Level.NODE)


def test_states(node):
    assert node.state == "initializing"
    node.wait_for_others()
    assert node.state == "rendezvous"
    node.start_attempt(None, "initial", Attempt(restarts_remaining=1))
    assert node.state == "running"
    node.worker_failed("exit")
    node.workers_stopped()
    assert node.state == "restarting"
    node.start_attempt(None, "failure", Attempt(restarts_remaining=0))
    assert node.state == "running"
    assert node.view().ended is None
    node.finish("succeeded")
    node.finish("stopped")
    assert node.state == "succeeded"
    assert node.view().ended >= node.view().started


def test_an_end_is_not_before_its_start_though_the_clock_was_set_back(node, monkeypatch):
    """An end that is older than the start is taken for that of an earlier run, and the run for vanished."""
    started = node.view().started
    monkeypatch.setattr("time.time", lambda: started - 3600)
    node.finish("succeeded")
    assert node.view().ended == started


def test_the_last_failure_is_no_restart(node):
    node.start_attempt(None, "initial", Attempt(restarts_remaining=0))
    node.worker_failed("exit")
    node.workers_stopped()
    assert node.state == "running"


def test_a_membership_change_restarts_without_a_failure(node):
    node.start_attempt(None, "initial", Attempt(restarts_remaining=0))
    node.workers_stopped()
    assert node.state == "restarting"
    node.start_attempt(None, "membership", Attempt(restarts_remaining=0))
    assert node.view().starts == {"initial": 1, "failure": 0, "membership": 1}
    assert sum(node.view().failures.values()) == 0


def test_one_failure_per_attempt_however_many_workers_fall(node):
    node.start_attempt(None, "initial", Attempt())
    node.worker_failed("signal")
    node.worker_failed("exit")
    node.start_attempt(None, "failure", Attempt())
    assert node.view().failures == {"exit": 0, "signal": 1, "exception": 0}


def test_a_failure_that_nobody_told_of_still_counts(node):
    node.start_attempt(None, "initial", Attempt())
    node.start_attempt(None, "failure", Attempt())
    assert node.view().failures == {"exit": 1, "signal": 0, "exception": 0}


def test_workers_up(node):
    node.start_attempt(None, "initial", Attempt())
    sleeper = subprocess.Popen(["sleep", "1000"])
    try:
        node.worker_started(3, sleeper.pid)
        node.worker_started(4, os.getpid())
        assert node.view().workers == {3: True, 4: True}
    finally:
        sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert node.view().workers == {3: False, 4: True}  # a zombie is not up
    sleeper.wait()
    assert node.view().workers == {3: False, 4: True}
    node.start_attempt(None, "failure", Attempt())
    assert node.view().workers == {}


def test_a_worker_that_is_gone_before_it_is_seen_is_not_up(node):
    done = subprocess.Popen(["true"])
    done.wait()
    node.start_attempt(None, "initial", Attempt())
    node.worker_started(0, done.pid)
    assert node.view().workers == {0: False}


def test_world_size_comes_from_the_ranks_where_the_launcher_does_not_say(node, tmp_path, make_info):
    node.start_attempt(tmp_path, "initial", Attempt())
    assert node.view().attempt.world_size is None
    assert not node.view().sees_optimizer
    writer = SpoolWriter(tmp_path, make_info(world_size=2, has_optimizer=True))
    assert node.view().attempt.world_size == 2
    assert node.view().sees_optimizer
    writer.path.unlink()
    assert node.view().sees_optimizer  # a counter that was shown must not disappear
