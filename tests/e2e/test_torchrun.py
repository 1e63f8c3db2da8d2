"""`torchrun --logs-specs distclip` with real processes: an endpoint through restarts, to the end and beyond."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from distclip.telemetry.folder import SpoolFolder

RESTARTED = ("--nproc-per-node=2", "--max-restarts=1")
COUNTERS_END = ("_total", "_bucket", "_count", "_sum")


@dataclass
class Story:
    """A run of two ranks whose rank 1 dies in step 3; pages of its endpoint, and what was left."""

    fresh: dict
    """Both ranks are there, no step was made."""
    first: dict
    """Step 3 of the first attempt."""
    between: dict
    """Step 1 of the second attempt."""
    second: dict
    """Its step 4, the last."""
    last: dict
    """The last page that a scraper got, after the end."""
    pages: list
    """All pages in order."""
    output: str
    left: list
    """What is in the folders for the spool and for discovery afterwards."""
    logs: dict
    """Text by (local rank, name of the file), of the first attempt."""


@pytest.fixture(scope="module")
def story(shared_torchrun, tmp_path_factory):
    log_folder = tmp_path_factory.mktemp("logs")
    job = shared_torchrun(
        *RESTARTED,
        *(f"--log-dir={log_folder}", "--redirects=3", "--tee=0:1,1:3", "--local-ranks-filter=1"),
        script=[
            *("--steps=4", "--die=1:3:exception", "--nonfinite", "2", "--diverged", "3"),
            *("--hold", "0:0", "0:3", "1:1", "1:4"),
        ],
        environment={"DISTCLIP_LEVEL": "rank"},
    )
    pages = []

    def look():
        pages.append(job.scrape())
        return pages[-1]

    job.until(lambda: ("distclip_local_nonfinite_steps_total", (("kind", "nan"), ("rank", "1"))) in look(), "rank 1")
    job.until(lambda: ("distclip_local_nonfinite_steps_total", (("kind", "nan"), ("rank", "0"))) in look(), "rank 0")
    fresh = look()
    job.go(0, 0)
    job.until_steps(3, ranks=2)
    first = look()
    job.go(0, 3, rank=1)
    # The endpoint answers all the way.
    job.until(lambda: look().get(("distclip_gradient_norm", ())) == 101, "the second attempt")
    job.until_steps(1, ranks=2)
    between = look()
    job.go(1, 1)
    job.until_steps(4, ranks=2)
    second = look()
    scraper = job.scrape_to_the_end()
    job.go(1, 4)
    assert job.wait() == 0, job.output
    pages += scraper.scrapes()
    logs = {path.parts[-2:]: path.read_text() for path in log_folder.rglob("attempt_0/*/std*.log")}
    return Story(
        fresh, first, between, second, pages[-1], pages, job.output, [*job.spool.iterdir(), *job.targets()], logs
    )


def test_counters_are_at_zero_before_the_first_step(story):
    for name in ("steps", "clipped_steps", "nonfinite_steps", "zero_gradient_steps", "replica_divergences"):
        assert story.fresh[f"distclip_{name}_total", ()] == 0
    assert story.fresh["distclip_skipped_steps_total", (("reason", "nonfinite"),)] == 0
    assert story.fresh["distclip_streaks_total", (("kind", "nonfinite"),)] == 0
    assert story.fresh["distclip_nonfinite_steps_applied_total", ()] == 0
    assert story.fresh["distclip_worker_group_starts_total", (("reason", "initial"),)] == 1
    assert ("distclip_gradient_norm", ()) not in story.fresh


def test_a_running_attempt(story):
    page = story.first
    assert page["distclip_steps_total", ()] == 3
    assert page["distclip_gradient_norm", ()] == 3
    assert page["distclip_nonfinite_steps_total", ()] == 1
    assert page["distclip_skipped_steps_total", (("reason", "nonfinite"),)] == 1
    assert page["distclip_replica_divergences_total", ()] == 1
    assert page["distclip_run_state", (("state", "running"),)] == 1
    assert page["distclip_workers_up", ()] == 2
    assert page["distclip_worker_restarts_remaining", ()] == 1
    assert page["distclip_world_size", ()] == page["distclip_world_size_max", ()] == 2


def test_a_restart_shows_the_new_attempt(story):
    page = story.between
    assert page["distclip_gradient_norm", ()] == 101
    assert page["distclip_last_step", (("rank", "0"),)] == page["distclip_last_step", (("rank", "1"),)] == 1
    assert page["distclip_worker_group_starts_total", (("reason", "failure"),)] == 1
    assert page["distclip_worker_failures_total", (("kind", "exception"),)] == 1
    assert sum(value for (name, _), value in page.items() if name == "distclip_worker_failures_total") == 1
    assert page["distclip_worker_restarts_remaining", ()] == 0


def test_counters_go_on_over_the_restart_and_never_fall(story):
    assert story.between["distclip_steps_total", ()] == 3 + 1
    assert story.second["distclip_steps_total", ()] == 3 + 4
    assert story.second["distclip_nonfinite_steps_total", ()] == 2
    assert story.second["distclip_replica_divergences_total", ()] == 2
    assert story.second["distclip_local_nonfinite_steps_total", (("kind", "nan"), ("rank", "1"))] == 2
    for older, newer in itertools.pairwise(story.pages):
        for series, value in older.items():
            if series[0].endswith(COUNTERS_END):
                assert newer[series] >= value, f"{series} fell from {value} to {newer[series]}"


def test_the_end_is_seen_by_a_scraper(story):
    page = story.last
    assert page["distclip_run_state", (("state", "succeeded"),)] == 1
    assert page["distclip_steps_total", ()] == 7
    assert page["distclip_gradient_norm", ()] == 104
    assert page["distclip_workers_up", ()] == 0
    assert (
        page["distclip_run_end_timestamp_seconds", ()] >= page["distclip_last_step_timestamp_seconds", (("rank", "0"),)]
    )


def test_a_run_that_ended_leaves_nothing_behind(story):
    assert not story.left


def test_torchs_log_options_work_as_ever(story):
    assert set(story.logs) == set(itertools.product(("0", "1"), ("stdout.log", "stderr.log")))
    assert "worker 0 of attempt 0" in story.logs["0", "stdout.log"]
    assert "worker 1 says this" in story.logs["1", "stderr.log"]
    assert "worker 1 of attempt 0" in story.output
    assert "worker 1 says this" in story.output
    assert "worker 0" not in story.output  # filtered


def test_a_run_that_fails_says_failed_though_the_agent_succeeded(torchrun):
    # torchrun substitutes $$ in the arguments of workers with $
    script = "sleep 1; [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 3; kill -9 $$$$"
    job = torchrun(
        *(*RESTARTED, "--no-python"),
        script=["sh", "-c", script],
        environment={"LOGLEVEL": "ERROR"},  # torch's events are of level INFO
    )
    scraper = job.scrape_to_the_end()
    assert job.wait() == 1
    last = scraper.scrapes()[-1]
    assert last["distclip_run_state", (("state", "failed"),)] == 1
    assert last["distclip_worker_failures_total", (("kind", "exit"),)] == 1
    assert last["distclip_worker_failures_total", (("kind", "signal"),)] == 1
    assert last["distclip_worker_group_starts_total", (("reason", "failure"),)] == 1
    assert "exitcode" in job.output  # torch's own story of the failure is not hidden


@pytest.fixture(scope="module")
def sleepers(shared_torchrun):
    """Three runs that do nothing, started at the same time while another program has the port that they want."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        environment = {"DISTCLIP_PORT": str(other.getsockname()[1])}
        jobs = {
            name: shared_torchrun(
                *("--nproc-per-node=2", "--no-python"),
                script=["sleep", "1000"],
                environment={**environment, "DISTCLIP_RUN_ID": name},
            )
            for name in ("SIGTERM", "SIGINT", "SIGKILL")
        }
        for job in jobs.values():
            job.until_value(2, "distclip_workers_up")
    return jobs


def test_runs_on_one_node_get_a_port_each(sleepers):
    assert len({job.endpoint() for job in sleepers.values()}) == 3
    for name, job in sleepers.items():
        assert f'run="{name}"' in job.read()
        assert job.output.count("is taken; the metrics are on port") == 1


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_leaves_nothing_behind(sleepers, name):
    job = sleepers[name]
    scraper = job.scrape_to_the_end()
    assert list(job.spool.iterdir())
    assert len(job.processes()) == 3
    os.kill(job.process.pid, getattr(signal, name))
    assert job.wait() != 0
    assert scraper.scrapes()[-1]["distclip_run_state", (("state", "stopped"),)] == 1
    assert not job.processes()
    assert not job.targets()
    assert not list(job.spool.iterdir())


def test_a_killed_agents_folder_is_removed_by_the_next_agent(sleepers):
    job = sleepers["SIGKILL"]
    left = list(job.spool.iterdir())
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    assert len(job.processes()) == 2  # its workers live on
    with pytest.raises(OSError, match="refused"):
        job.read()  # from the address that is still announced
    assert list(job.spool.iterdir()) == left
    SpoolFolder.create("next", job.spool).remove()
    assert not list(job.spool.iterdir())


def test_the_example_job_with_the_real_clipper(torchrun, tmp_path):
    sizes = ["--layers=1", "--width=32", "--heads=2", "--context=32", "--batch=2", "--bytes=50000", "--log-every=1"]
    job = torchrun(
        *RESTARTED,
        program=True,
        script=[
            *(str(Path(__file__).parents[2] / "launch" / "train_lm.py"), *sizes),
            *("--wrap=fsdp2", "--steps=8", f"--checkpoint={tmp_path / 'saved'}", "--checkpoint-every=4"),
            *("--inject=nan@3:rank=1", "--inject=kill@6:rank=1"),
        ],
        environment={"DISTCLIP_EVENTS": str(tmp_path / "events.jsonl"), "DISTCLIP_LEVEL": "rank"},
    )
    scraper = job.scrape_to_the_end()
    assert job.wait() == 0, job.output
    last = scraper.scrapes()[-1]
    assert last["distclip_run_state", (("state", "succeeded"),)] == 1
    assert last["distclip_last_step", (("rank", "0"),)] == last["distclip_last_step", (("rank", "1"),)] == 8
    assert 8 < last["distclip_steps_total", ()] <= 10  # step 5, and 6 where it came so far, were made twice
    assert last["distclip_nonfinite_steps_total", ()] == 1
    assert last["distclip_nonfinite_steps_applied_total", ()] == 0
    assert last["distclip_replica_divergences_total", ()] == 0
    assert last["distclip_skipped_steps_total", (("reason", "nonfinite"),)] == 1
    assert last["distclip_worker_failures_total", (("kind", "signal"),)] == 1
    assert 0 < last["distclip_gradient_norm", ()] < 1000
    assert last["distclip_gradient_norm_observed_count", ()] == last["distclip_steps_total", ()] - 1
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["run"], event["step"], event["event"]) for event in events] == [("r1", 3, "nonfinite")]
    assert events[0]["culprits"]


@pytest.mark.soak
def test_a_node_that_joins_restarts_the_others_for_membership(torchrun):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = (
        *("--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
        *("--rdzv-id=elastic", "--rdzv-conf=last_call_timeout=1", "--monitor-interval=0.1", "--no-python"),
    )
    anonymous = {"DISTCLIP_RUN_ID": ""}
    first = torchrun(*options, script=["sleep", "1000"], environment=anonymous)
    first.until_value(1, "distclip_world_size")
    assert 'run="elastic"' in first.read()
    assert first.value("distclip_world_size_max") == 2
    second = torchrun(*options, script=["sleep", "1000"], environment=anonymous)
    first.until_value(2, "distclip_world_size")
    assert first.value("distclip_worker_group_starts_total", reason="membership") == 1
    assert first.value("distclip_worker_group_starts_total", reason="failure") == 0
    assert sum(value for (name, _), value in first.scrape().items() if name == "distclip_worker_failures_total") == 0
    second.until_value(2, "distclip_world_size")
    assert second.value("distclip_worker_group_starts_total", reason="initial") == 1
    assert second.value("distclip_run_state", state="running") == 1


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_twenty_restarts_all_succeed(torchrun):
    for _ in range(20):
        job = torchrun(*RESTARTED, script=["--gloo", "--steps=3", "--die=1:2:exit"])
        assert job.wait() == 0, job.output
        assert not job.processes()
        assert not list(job.spool.iterdir())
