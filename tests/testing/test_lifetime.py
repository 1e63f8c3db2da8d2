"""No process and no file outlives the pool's process, however that ends. The pool is used from a plain script here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import dataclasses, os, sys, time
import torch, torch.distributed as dist
from distclip.testing import RankPool

@dataclasses.dataclass
class Pids:
    rank: int
    nursery: int

def pids():
    dist.barrier()
    return Pids(os.getpid(), os.getppid())

def hang():
    if dist.get_rank() == 1:
        while True:
            time.sleep(0.01)
    dist.barrier()

if __name__ == "__main__":
    assert "pytest" not in sys.modules
    pool = RankPool()
    for found in pool.run(pids, 2):
        print(found.rank, found.nursery, flush=True)
    if sys.argv[1] == "hang":
        print("busy", flush=True)
        pool.run(hang, 2)
"""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("ending", ["normal", "hang"])
def test_no_process_is_left(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with subprocess.Popen(
        [sys.executable, str(script), ending],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().split() for _ in range(2)]
        pids = [int(word) for line in lines for word in line]
        assert len(set(pids)) == 4, "two ranks, each from a nursery of its own"
        if ending == "hang":
            assert process.stdout.readline() == "busy\n"
            time.sleep(0.2)
            assert any(temporary.glob("distclip-*")), "else the last line of this test proves nothing"
            process.send_signal(signal.SIGKILL)
    assert process.returncode == {"normal": 0, "hang": -signal.SIGKILL}[ending]
    # The killed process could not wait for them; the others end at once, by signals.
    end = time.monotonic() + 30.0
    while not all(map(gone, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert [pid for pid in pids if not gone(pid)] == []
    assert [path for path in temporary.iterdir() if path.name.startswith(("distclip-", "tmp"))] == []
