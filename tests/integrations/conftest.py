"""DeepSpeed on two ranks: started once, all cases in it, their results for all tests.

DeepSpeed keeps state in its modules and in the process group, so it gets processes of its own instead of the rank pool.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("deepspeed_worker.py")
# A compiler that is not there: DeepSpeed must not want one.
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "CXX": "none", "CC": "none"}


def environment(**more: str) -> dict[str, str]:
    """That of a process that uses DeepSpeed without an accelerator and without a compiler."""
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.origin is None:  # launch/deepspeed, where a test put launch/ on the path, has no origin
        pytest.skip("DeepSpeed is not installed: pip install 'distclip[deepspeed]'")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, **ENVIRONMENT, **more}


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """For each rank, case -> what it returned, or a dict with "error" and "trace"."""
    out = tmp_path_factory.mktemp("deepspeed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    run = subprocess.run(
        [*command, str(out)], env=environment(), capture_output=True, text=True, timeout=170, errors="replace"
    )
    files = sorted(out.glob("rank*.json"))
    assert len(files) == 2, run.stdout[-4000:] + run.stderr[-8000:]
    return [json.loads(file.read_text()) for file in files]
