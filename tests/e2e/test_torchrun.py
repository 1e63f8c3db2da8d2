"""`torchrun --logs-specs distclip` with real processes: an endpoint through restarts, to the end and beyond."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest

RESTARTED = ("--nproc-per-node=2", "--max-restarts=1")
COUNTERS_END = ("_total", "_bucket", "_count", "_sum")


def test_restart_keeps_counters_growing_and_shows_the_new_attempt(torchrun):
    job = torchrun(
        *RESTARTED,
        script=["--steps=4", "--die=1:3:exception", "--nonfinite=2", "--hold", "0:3", "1:1", "1:4"],
        environment={"DISTCLIP_LEVEL": "rank"},
    )
    first = job.scrape()
    assert first["distclip_steps_total", ()] == 0
    assert first["distclip_nonfinite_steps_total", ()] == 0
    assert first["distclip_worker_group_starts_total", (("reason", "initial"),)] in (0, 1)

    job.until_value(3, "distclip_last_step", rank="1")
    before = job.scrape()
    assert before["distclip_steps_total", ()] == 3
    assert before["distclip_gradient_norm", ()] == 3
    assert before["distclip_nonfinite_steps_total", ()] == 1
    assert before["distclip_skipped_steps_total", (("reason", "nonfinite"),)] == 1
    assert before["distclip_run_state", (("state", "running"),)] == 1
    assert before["distclip_workers_up", ()] == 2
    assert before["distclip_worker_restarts_remaining", ()] == 1
    assert before["distclip_world_size", ()] == before["distclip_world_size_max", ()] == 2

    job.go(0, 3)
    scrapes = [before]

    def second_attempt_is_there():
        scrapes.append(job.scrape())  # the endpoint answers all the way
        return scrapes[-1].get(("distclip_last_step", (("rank", "1"),))) == 1

    job.until(second_attempt_is_there, "a step of the second attempt")
    between = job.scrape()
    assert between["distclip_gradient_norm", ()] == 101
    assert between["distclip_steps_total", ()] == 4
    assert between["distclip_worker_group_starts_total", (("reason", "failure"),)] == 1
    assert between["distclip_worker_failures_total", (("kind", "exception"),)] == 1
    assert between["distclip_worker_restarts_remaining", ()] == 0

    job.go(1, 1)
    job.until_value(4, "distclip_last_step", rank="1")
    scrapes.append(job.scrape())
    job.go(1, 4)
    assert job.wait() == 0, job.output
    assert scrapes[-1]["distclip_steps_total", ()] == 7
    assert scrapes[-1]["distclip_nonfinite_steps_total", ()] == 2
    assert scrapes[-1]["distclip_local_nonfinite_steps_total", (("kind", "nan"), ("rank", "1"))] == 2
    assert sum(value for (name, _), value in scrapes[-1].items() if name == "distclip_worker_failures_total") == 1
    for older, newer in itertools.pairwise(scrapes):
        for series, value in older.items():
            if series[0].endswith(COUNTERS_END):
                assert newer[series] >= value, f"{series} fell from {value} to {newer[series]}"
    assert not list(job.spool.iterdir())
    assert not job.targets()


def test_the_end_is_seen_by_a_scraper(torchrun):
    job = torchrun("--nproc-per-node=2", script=["--steps=3", "--hold", "0:3"])
    scraper = job.scrape_to_the_end()
    job.until_value(3, "distclip_last_step")
    job.go(0, 3)
    assert job.wait() == 0, job.output
    last = scraper.scrapes()[-1]
    assert last["distclip_run_state", (("state", "succeeded"),)] == 1
    assert last["distclip_steps_total", ()] == 3
    assert last["distclip_gradient_norm", ()] == 3
    assert last["distclip_workers_up", ()] == 0
    assert last["distclip_run_end_timestamp_seconds", ()] >= last["distclip_last_step_timestamp_seconds", ()]


@pytest.mark.parametrize(("command", "kind"), [("exit 3", "exit"), ("kill -9 $$$$", "signal")])
def test_a_run_that_fails_says_failed_though_the_agent_succeeded(torchrun, command, kind):
    # torchrun substitutes $$ in the arguments of workers with $
    job = torchrun(
        *(*RESTARTED, "--no-python"),
        script=["sh", "-c", f"sleep 1; {command}"],
        environment={"LOGLEVEL": "ERROR"},  # torch's events are of level INFO
    )
    scraper = job.scrape_to_the_end()
    assert job.wait() == 1
    last = scraper.scrapes()[-1]
    assert last["distclip_run_state", (("state", "failed"),)] == 1
    assert last["distclip_worker_failures_total", (("kind", kind),)] == 2
    assert last["distclip_worker_group_starts_total", (("reason", "failure"),)] == 1
    assert "exitcode" in job.output  # torch's own story of the failure is not hidden


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(torchrun, number):
    job = torchrun("--nproc-per-node=2", "--no-python", script=["sleep", "1000"])
    scraper = job.scrape_to_the_end()
    job.until_value(2, "distclip_workers_up")
    assert list(job.spool.iterdir())
    assert len(job.processes()) == 3
    os.kill(job.process.pid, number)
    assert job.wait() != 0
    assert scraper.scrapes()[-1]["distclip_run_state", (("state", "stopped"),)] == 1
    assert not job.processes()
    assert not job.targets()
    assert not list(job.spool.iterdir())


def test_a_killed_agents_folder_is_removed_by_the_next_agent(torchrun, tmp_path):
    shared = {"DISTCLIP_SPOOL": str(tmp_path / "spool")}
    job = torchrun("--nproc-per-node=1", "--no-python", script=["sleep", "1000"], environment=shared)
    job.until_value(1, "distclip_workers_up")
    left = list(job.spool.iterdir())
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    assert len(job.processes()) == 1  # its worker lives on
    assert list(job.spool.iterdir()) == left
    following = torchrun("--nproc-per-node=1", "--no-python", script=["true"], environment=shared)
    assert following.wait() == 0, following.output
    assert not list(following.spool.iterdir())


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
    assert last["distclip_skipped_steps_total", (("reason", "nonfinite"),)] == 1
    assert last["distclip_worker_failures_total", (("kind", "signal"),)] == 1
    assert 0 < last["distclip_gradient_norm", ()] < 1000
    assert last["distclip_gradient_norm_observed_count", ()] == last["distclip_steps_total", ()] - 1
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["run"], event["step"], event["event"]) for event in events] == [("r1", 3, "nonfinite")]
    assert events[0]["culprits"]


def test_without_the_plug_in_the_same_script_runs_quietly(torchrun):
    job = torchrun("--nproc-per-node=2", plugin=False, script=["--steps=2"], environment={"DISTCLIP_SPOOL": ""})
    assert job.wait() == 0, job.output
    assert not job.targets()
    assert "distclip" not in job.output
    assert "warn" not in job.output.lower()


def test_torchs_log_options_work_as_ever(torchrun, tmp_path):
    job = torchrun(
        "--nproc-per-node=2",
        f"--log-dir={tmp_path / 'logs'}",
        "--redirects=3",
        "--tee=0:1,1:3",
        "--local-ranks-filter=1",
        script=["--steps=1"],
    )
    assert job.wait() == 0, job.output
    logs = {path.relative_to(tmp_path / "logs").parts[-2:]: path for path in (tmp_path / "logs").rglob("std*.log")}
    assert set(logs) == {("0", "stdout.log"), ("0", "stderr.log"), ("1", "stdout.log"), ("1", "stderr.log")}
    assert "worker 0 of attempt 0" in logs["0", "stdout.log"].read_text()
    assert "worker 1 says this" in logs["1", "stderr.log"].read_text()
    assert "worker 1 of attempt 0" in job.output
    assert "worker 1 says this" in job.output
    assert "worker 0" not in job.output  # filtered


def test_two_runs_on_one_node_get_two_ports(torchrun):
    first = torchrun("--nproc-per-node=1", "--no-python", script=["sleep", "1000"])
    port = first.endpoint().rpartition(":")[2]
    second = torchrun(
        *("--nproc-per-node=1", "--no-python"),
        script=["sleep", "1000"],
        environment={"DISTCLIP_PORT": port, "DISTCLIP_RUN_ID": "r2"},
    )
    assert 'run="r2"' in second.read()
    assert second.output.count(f"port {port} on 127.0.0.1 is taken") == 1
    assert 'run="r1"' in first.read()


def test_several_nodes_need_a_run_id(torchrun):
    job = torchrun(
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:1", "--no-python"),
        script=["true"],
        environment={"DISTCLIP_RUN_ID": ""},
    )
    assert job.wait() == 1
    assert "set DISTCLIP_RUN_ID to the same text on every node" in job.output


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_twenty_restarts_all_succeed(torchrun):
    for _ in range(20):
        job = torchrun(*RESTARTED, script=["--steps=3", "--die=1:2:exit"])
        assert job.wait(60) == 0, job.output
        assert not job.processes()
        assert not list(job.spool.iterdir())
