"""A command with an endpoint beside it: real processes, scraped for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

SIDECAR = [sys.executable, "-m", "distclip.cli", "sidecar", "--"]
TRAIN = """
import sys, torch, distclip
model = torch.nn.Linear(2, 1, bias=False)
clipper = distclip.GradientClipper(model, torch.optim.SGD(model.parameters(), lr=0.1))
for value in (3.0, float("nan"), 3.0):
    model.zero_grad()
    model(torch.tensor([[value, 4.0]])).sum().backward()
    clipper.step()
print("trained", flush=True)
sys.stdin.read()
"""


@contextmanager
def started(tmp_path: Path, *command: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the address that it told."""
    env = {**os.environ, "DISTCLIP_PORT": "0", "DISTCLIP_SPOOL": str(tmp_path), "DISTCLIP_RUN_ID": "beside"}
    pipe = subprocess.PIPE
    with subprocess.Popen([*SIDECAR, *command], env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("distclip: metrics of run beside on "), line + process.stderr.read()
            yield process, line.split()[-1]
        finally:
            process.terminate()


def series(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        page = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            assert sample.labels["run"] == "beside"
            rest = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "run")
            found[f"{sample.name}{{{rest}}}" if rest else sample.name] = sample.value
    return found


def test_steps_of_the_command_are_seen_and_nothing_is_left(tmp_path: Path) -> None:
    with started(tmp_path, sys.executable, "-c", TRAIN) as (process, url):
        assert process.stdout is not None
        assert process.stdout.readline() == "trained\n"
        found = series(url)
        assert found["distclip_steps_total"] == 3
        assert found["distclip_nonfinite_steps_total"] == 1
        assert found["distclip_skipped_steps_total{reason=nonfinite}"] == 1
        assert found["distclip_run_state{state=running}"] == 1
        assert found["distclip_worker_group_starts_total{reason=initial}"] == 1
        assert found["distclip_world_size"] == 1
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
    assert list(tmp_path.iterdir()) == []


def test_steps_of_workers_that_the_command_restarts_add_up(tmp_path: Path) -> None:
    """As deepspeed's and accelerate's launchers restart them: the sidecar does not hear of it."""
    (tmp_path / "train.py").write_text(TRAIN.replace("sys.stdin.read()", ""))
    twice = f'"{sys.executable}" train.py && "{sys.executable}" train.py && read -r _'
    with started(tmp_path, "sh", "-c", f'cd "{tmp_path}" && {twice}') as (process, url):
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["trained\n"] * 2
        found = series(url)
        assert found["distclip_steps_total"] == 6
        assert found["distclip_nonfinite_steps_total"] == 2
        assert found["distclip_last_step"] == 3
        assert found["distclip_collect_errors_total{reason=empty}"] == 0


@pytest.mark.parametrize(
    ("program", "code"), [("import sys; sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_is_the_commands(tmp_path: Path, program: str, code: int) -> None:
    with started(tmp_path, sys.executable, "-c", program) as (process, _):
        assert process.wait(60) == code


def test_a_signal_is_passed_on(tmp_path: Path) -> None:
    program = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(60)
"""
    with started(tmp_path, sys.executable, "-c", program) as (process, _):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 7
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_run_is_one_line(tmp_path: Path) -> None:
    env = {**os.environ, "DISTCLIP_PORT": "0", "DISTCLIP_SPOOL": str(tmp_path)}
    for command, text in (
        (["no-such-command"], "distclip: error: cannot start 'no-such-command': No such file or directory\n"),
        ([], "distclip: error: nothing to run: distclip sidecar -- COMMAND\n"),
    ):
        ended = subprocess.run([*SIDECAR, *command], env=env, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2
        assert ended.stderr.endswith(text)
    several = {**env, "SLURM_NNODES": "2"}
    several.pop("DISTCLIP_RUN_ID", None)
    ended = subprocess.run([*SIDECAR, "true"], env=several, capture_output=True, text=True, timeout=60)
    assert "a run on several nodes needs one run id" in ended.stderr
