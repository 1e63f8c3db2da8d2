"""What goes wrong around a run: telemetry warns once and does without, training goes on."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

FULL_DISK = ("unshare", "--user", "--map-root-user", "--mount")
"""A mount namespace of its own, in which this user may mount a tiny file system."""


def warnings(job):
    return [line for line in job.output.splitlines() if line.startswith("distclip: ") and "metrics of run" not in line]


def test_bad_settings_and_an_unusable_spool_cost_one_warning_each(torchrun):
    job = torchrun(
        "--nproc-per-node=2",
        script=["--steps=3", "--hold", "0:3"],
        environment={
            "DISTCLIP_LEVEL": "foo",
            "DISTCLIP_BIND": "192.0.2.1",
            "DISTCLIP_SPOOL": "/proc/nowhere",
            "DISTCLIP_RUN_ID": "faulty",
        },
    )
    job.until_value(3, "distclip_last_step")  # the spool is in the default place
    job.go(0, 3)
    assert job.wait() == 0, job.output
    found = warnings(job)
    assert len(found) == 3, found
    assert "DISTCLIP_LEVEL='foo'" in found[0]
    assert "192.0.2.1" in found[1]
    assert "DISTCLIP_SPOOL=/proc/nowhere" in found[2]
    assert not list(Path("/dev/shm").glob("distclip-faulty-*"))


def test_a_bad_port_is_one_warning_and_the_default_port_or_the_next(torchrun):
    job = torchrun("--nproc-per-node=1", "--no-python", script=["sleep", "1000"], environment={"DISTCLIP_PORT": "abc"})
    assert int(job.endpoint().rpartition(":")[2]) >= 9519
    assert "DISTCLIP_PORT='abc' is not a port" in job.output
    assert 1 <= len(warnings(job)) <= 2  # the default port may be taken on this machine


def test_a_full_file_system_is_one_warning_and_training_goes_on(torchrun, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = f"mount -t tmpfs -o size=8k full {small} && dd if=/dev/zero of={small}/fill bs=4k count=9 2>/dev/null; "
    allowed = shutil.which("unshare") and subprocess.run([*FULL_DISK, "sh", "-c", f"{mount} test -s {small}/fill"])
    if not allowed or allowed.returncode != 0:
        pytest.skip("this user may not mount a file system in a namespace of its own, so none can be made full")
    job = torchrun(
        "--nproc-per-node=2",
        script=["--steps=3"],
        prefix=[*FULL_DISK, "sh", "-c", f'{mount} exec "$@"', "sh"],
        environment={"DISTCLIP_SPOOL": str(small)},
    )
    assert job.wait() == 0, job.output
    assert len(warnings(job)) == 1
    assert "No space left on device" in warnings(job)[0]


def test_a_spool_that_fails_only_in_the_workers_costs_a_warning_there(torchrun):
    job = torchrun(
        "--nproc-per-node=1",
        script=["--steps=2"],
        plugin=False,
        environment={"DISTCLIP_SPOOL": "/proc/nowhere", "DISTCLIP_EVENTS": "/dev/full", "DISTCLIP_STEP_LOG": ""},
    )
    assert job.wait() == 0, job.output
    assert job.output.count("no more metrics") == 1
    assert "Traceback" not in job.output


def test_damaged_files_are_skipped_and_counted_while_training_goes_on(torchrun):
    job = torchrun("--nproc-per-node=2", script=["--steps=4", "--hold", "0:2", "0:4"])
    job.until_value(2, "distclip_steps_total")
    (attempt,) = job.spool.glob("*/attempt-0")
    (live,) = attempt.glob("rank-1-*.spool")
    with live.open("r+b") as file:
        file.write(b"not a header")
    (attempt / "rank-5-1.spool").write_bytes(b"")
    (attempt / "rank-6-1.spool").write_bytes(b"short")
    page = job.scrape()
    for reason in ("corrupt", "empty", "truncated"):
        assert page["distclip_collect_errors_total", (("reason", reason),)] == 1
    job.go(0, 2)
    job.until_value(4, "distclip_steps_total")  # from the rank whose file is good
    job.go(0, 4)
    assert job.wait() == 0, job.output
    assert len(warnings(job)) == 3


def test_a_spool_folder_that_somebody_removes(torchrun):
    job = torchrun("--nproc-per-node=2", script=["--steps=4", "--hold", "0:2", "0:4"])
    job.until_value(2, "distclip_steps_total")
    shutil.rmtree(job.spool)
    job.until(lambda: (job.value("distclip_collect_errors_total", reason="missing") or 0) > 0, "a counted error")
    job.go(0, 2)
    job.go(0, 4)
    assert job.wait() == 0, job.output
    assert "Traceback" not in job.output


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
