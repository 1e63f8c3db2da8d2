"""What goes wrong around a run: telemetry warns once and does without, training goes on."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

FULL_DISK = ("unshare", "--user", "--map-root-user", "--mount")
"""A mount namespace of its own, in which this user may mount a tiny file system."""


def warnings(job):
    return [line for line in job.output.splitlines() if line.startswith("distclip: ") and "metrics of run" not in line]


def test_one_run_through_bad_settings_damaged_files_and_a_folder_that_is_gone(torchrun):
    job = torchrun(
        "--nproc-per-node=2",
        script=["--steps=4", "--hold", "0:2", "0:3", "0:4"],
        environment={
            "DISTCLIP_LEVEL": "foo",
            "DISTCLIP_PORT": "abc",
            "DISTCLIP_BIND": "192.0.2.1",
            "DISTCLIP_SPOOL": "/proc/nowhere",
            "DISTCLIP_RUN_ID": "faulty",
        },
    )
    job.until_value(2, "distclip_steps_total")  # the spool is in the default place
    assert int(job.endpoint().rpartition(":")[2]) >= 9519
    before = len(warnings(job))
    found = [line for line in warnings(job) if "port 9519" not in line]  # which may be taken on this machine
    assert len(found) == 4, found
    assert "DISTCLIP_PORT='abc' is not a port" in found[0]
    assert "DISTCLIP_LEVEL='foo'" in found[1]
    assert "192.0.2.1" in found[2]
    assert "DISTCLIP_SPOOL=/proc/nowhere" in found[3]

    attempt = Path(re.search(r"writes to (/.+)", job.output)[1])
    job.until(lambda: len(list(attempt.glob("rank-*"))) == 2, "both files")
    (live,) = attempt.glob("rank-1-*.spool")
    with live.open("r+b") as file:
        file.write(b"not a header")
    (attempt / "rank-5-1.spool").write_bytes(b"")
    (attempt / "rank-6-1.spool").write_bytes(b"short")
    page = job.scrape()
    for reason in ("corrupt", "empty", "truncated"):
        assert page["distclip_collect_errors_total", (("reason", reason),)] == 1
    job.go(0, 2)
    job.until_value(3, "distclip_steps_total")  # from the rank whose file is good
    assert len(warnings(job)) == before + 3

    shutil.rmtree(attempt.parent)
    job.until(lambda: (job.value("distclip_collect_errors_total", reason="missing") or 0) > 0, "a counted error")
    assert job.value("distclip_steps_total") == 3
    job.go(0, 3)
    job.go(0, 4)
    assert job.wait() == 0, job.output
    assert "Traceback" not in job.output
    assert not attempt.parent.exists()


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
