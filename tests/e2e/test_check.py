"""`distclip check` with real torchruns: on the example job, on a job that is wrong, on a rank that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAIN_LM = str(Path(__file__).parents[2] / "launch" / "train_lm.py")
SIZES = ["--layers=1", "--width=32", "--heads=2", "--context=32", "--batch=2", "--bytes=50000", "--steps=3"]

OUT_OF_STEP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)))
with torch.no_grad():
    model.module[1].weight += 0.001 * dist.get_rank()  # as after a restart from another checkpoint
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
finally:
    dist.destroy_process_group()
    print("left in order")
"""

ONE_RANK_FAILS = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(2))
weight.grad = torch.ones(2)
if dist.get_rank() == 1:
    raise RuntimeError("no batch on this rank")
torch.optim.SGD([weight]).step()
"""

WAITS = "import pathlib, time; pathlib.Path('started').touch(); time.sleep(1000)"


def _start(folder: Path, *job: str) -> subprocess.Popen[str]:
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "distclip.cli", "check", "--nproc-per-node", "2", "--", *job],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CHECK_FOLDER": str(folder), "TMPDIR": str(folder / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _processes(folder: Path) -> list[int]:
    """Pids of all that was started for this folder."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"CHECK_FOLDER={folder}\0".encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
        except OSError:  # it has just ended, or is another user's
            continue
    return found


def _left(folder: Path) -> list[str]:
    """What is in the temporary folder afterwards, but for the cache that torch itself makes in it when imported."""
    return [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor_")]


@pytest.fixture
def check(tmp_path):
    """Run the command on a script's text, or a path and arguments; exit code, output, errors."""
    started: list[subprocess.Popen[str]] = []

    def run(*job: str) -> tuple[int, str, str]:
        if "\n" in job[0]:
            (tmp_path / "train.py").write_text(job[0])
            job = ("train.py",)
        process = _start(tmp_path, *job)
        started.append(process)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    yield run
    for pid in _processes(tmp_path):
        os.kill(pid, signal.SIGKILL)
    for process in started:
        process.wait()


def test_the_example_job(check, tmp_path):
    code, out, err = check(TRAIN_LM, "--wrap=fsdp2", *SIZES)
    assert code == 0, err
    assert "optimizer step 1 on 2 ranks: 14 parameters of FSDPLanguageModel" in out
    assert out.count("verdict: distclip and the reference agree") == 1
    assert "step     1" not in out  # the step that was measured was not made
    assert _left(tmp_path) == []


def test_replicas_that_differ_are_named_once(check, tmp_path):
    code, out, err = check(OUT_OF_STEP)
    assert code == 2
    assert err.count("'1.weight' (ddp) holds different values on ranks 0, 1") == 1, err
    assert "0.weight" not in err
    assert "Traceback" not in err
    assert out.count("left in order") == 2  # two ranks write at once, so that newlines may come together
    assert not _processes(tmp_path)


def test_a_rank_that_fails_ends_those_that_wait_for_it(check, tmp_path):
    code, out, err = check(ONE_RANK_FAILS)
    assert code == 2
    assert "no batch on this rank" in err
    assert "the job failed on rank 1 before optimizer step 1" in err
    assert "verdict" not in out
    assert not _processes(tmp_path)


def test_a_signal_ends_the_job_too(tmp_path):
    (tmp_path / "train.py").write_text(WAITS)
    process = _start(tmp_path, "train.py")
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert _left(tmp_path) == []
        assert not _processes(tmp_path)
    finally:
        for pid in _processes(tmp_path):
            os.kill(pid, signal.SIGKILL)
        process.wait()
