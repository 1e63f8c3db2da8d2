"""The example job with the real DeepSpeed, under torchrun and under the deepspeed launcher with the sidecar."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from distclip.data import data_path

SMALL = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch", "4", "--bytes", "100000"]
JOB = [str(data_path("launch") / "train_lm.py"), *SMALL, "--accumulate", "2", "--log-every", "1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
STEP = re.compile(r"^step +(\d+)  loss +(\S+)  norm +(\S+)  coefficient +(\S+)  (.*)$", re.MULTILINE)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install 'distclip[deepspeed]'",
)


def run(tmp_path: Path, *command: str) -> str:
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
        "CC": "none",
        "CXX": "none",
        "DISTCLIP_PORT": "0",
        "DISTCLIP_SPOOL": str(tmp_path),
        "DISTCLIP_EVENTS": str(tmp_path / "events.jsonl"),
    }
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=140)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # launchers' children too
            raise
    assert process.returncode == 0, output + errors
    return output


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def steps(output: str) -> list[tuple[str, ...]]:
    return STEP.findall(output)


def test_zero_trains_like_ddp_and_tells_of_a_bad_step(tmp_path: Path) -> None:
    job = [*TORCHRUN, *JOB, "--steps", "4", "--inject", "nan@2:rank=1"]
    expected = steps(run(tmp_path, *job, "--wrap", "ddp"))
    assert [step[-1] for step in expected] == ["stepped", "skipped (nonfinite)", "stepped", "stepped"]
    (tmp_path / "events.jsonl").unlink()
    assert steps(run(tmp_path, *job, "--wrap", "zero3")) == expected
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (event["event"], event["step"], event["stepped"]) == ("nonfinite", 2, False)
    assert "embedding.weight" in {culprit["parameter"] for culprit in event["culprits"]}


@pytest.mark.soak
def test_the_launcher_with_the_sidecar_and_a_checkpoint(tmp_path: Path) -> None:
    # Named with its interpreter: DeepSpeed's script has a first line that no kernel can follow if a folder has a space.
    deepspeed = [sys.executable, str(Path(sys.executable).parent / "deepspeed")]
    launcher = [sys.executable, "-m", "distclip.cli", "sidecar", "--", "env", "DS_ACCELERATOR=cpu", *deepspeed]
    launcher += ["--num_gpus", "2", "--no_local_rank", "--master_port", free_port()]
    job = [*JOB, "--wrap", "zero2", "--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "2"]
    assert [step[0] for step in steps(run(tmp_path, *launcher, *job, "--steps", "3"))] == ["1", "2", "3"]
    output = run(tmp_path, *TORCHRUN, *job, "--steps", "4")
    assert "resumes at step 3 of 4: zero2" in output
    assert [step[0] for step in steps(output)] == ["3", "4"]


def test_one_process_is_told_what_to_do(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, *JOB, "--wrap", "zero1", "--steps", "1"], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 2
    assert "argument --wrap: zero1 needs ranks: start with torchrun" in ended.stderr
