"""The example job under torchrun with distclip's plug-in: a rank dies, the run restarts and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distclip.data import data_path

SMALL = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch", "4", "--bytes", "100000"]


@pytest.mark.soak
def test_a_rank_dies_and_the_restart_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(tmp_path),
        "DISTCLIP_PORT": "0",
        "DISTCLIP_STEP_LOG": str(tmp_path / "steps.jsonl"),
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--logs-specs", "distclip", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--local-addr", "127.0.0.1", "--max-restarts", "1"]
    job = [str(data_path("launch") / "train_lm.py"), *SMALL, "--wrap", "fsdp2", "--steps", "8"]
    job += ["--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "3", "--inject", "kill@6:rank=1"]
    ended = subprocess.run([*torchrun, *job], env=env, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if " at step " in line] == [
        "starts at step 1 of 8",
        "resumes at step 4 of 8",
    ]
    assert lines[-1].startswith("done: 5 steps")
    # Steps 4 and 5 were made twice; the clipper's count goes on where the checkpoint was, not from 1.
    steps = [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
