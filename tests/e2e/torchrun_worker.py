"""A worker for the torchrun tests: reports steps to distclip's sinks, and dies or waits when told to.

Steps are told apart by their norm, `step + 100 * attempt`, so that a test knows which attempt a gauge is of. For each
`--hold A:N` the worker of rank R waits in step N of attempt A (step 0: before the first) until the folder `--folder`
has a file `go-A-N` or `go-A-N-R`. It starts without torch, which would take seconds; `--gloo` makes real ranks of the
workers, that meet in every step.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from distclip.telemetry.record import RunInfo, StepRecord
from distclip.telemetry.sinks import auto_sink

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def step_record(step: int, norm: float, nan: int, diverged: bool) -> StepRecord:
    return StepRecord(
        step=step,
        timestamp=time.time(),
        total_norm=float("nan") if nan else norm,
        limit=1.0,
        clip_coefficient=1.0 if nan else min(1.0, 1.0 / norm),
        clipped=not nan and norm > 1.0,
        nan=nan,
        inf=0,
        local_nan=nan,
        local_inf=0,
        local_norm=norm,
        stepped=not nan,
        skip_reason="nonfinite" if nan else None,
        elements=4,
        missing_tensors=0,
        loss_scale=None,
        learning_rate=0.1,
        loss=norm,
        step_seconds=0.5,
        clip_seconds=0.125,
        wait_seconds=0.0625,
        diverged=diverged,
    )


def run_info() -> RunInfo:
    local_rank = int(os.environ["LOCAL_RANK"])
    return RunInfo(RANK, local_rank, WORLD_SIZE, "cpu", "ddp", "fixed", "skip", 2.0, "2", has_optimizer=True)


def gloo_mean() -> Callable[[float], float]:
    """A function that all ranks call together and that returns the mean of what they give."""
    import atexit
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    atexit.register(dist.destroy_process_group)

    def mean(value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total)
        return total.item() / WORLD_SIZE

    return mean


def die(how: str) -> None:
    if how == "exit":
        os._exit(3)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def fail() -> None:
        raise RuntimeError("the test wants this worker to fail")

    fail()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--nonfinite", type=int, nargs="*", default=[])
    parser.add_argument("--diverged", type=int, nargs="*", default=[])
    parser.add_argument("--die", default="", help="rank:step:how, in the first attempt")
    parser.add_argument("--hold", nargs="*", default=[])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gloo", action="store_true")
    arguments = parser.parse_args()

    def hold(step: int) -> None:
        go = [arguments.folder / f"go-{ATTEMPT}-{step}{rank}" for rank in ("", f"-{RANK}")]
        while f"{ATTEMPT}:{step}" in arguments.hold and not any(path.exists() for path in go):
            time.sleep(0.02)

    mean = gloo_mean() if arguments.gloo else lambda value: value
    sink = auto_sink()
    if sink is not None:
        sink.open(run_info())
    print(f"worker {RANK} of attempt {ATTEMPT} writes to {os.environ.get('DISTCLIP_SPOOL')}", flush=True)
    print(f"worker {RANK} says this on stderr", file=sys.stderr, flush=True)
    hold(0)
    for step in range(1, arguments.steps + 1):
        norm = mean(float(step + 100 * ATTEMPT))
        if sink is not None:
            sink.record(step_record(step, norm, int(step in arguments.nonfinite), step in arguments.diverged))
        hold(step)
        if arguments.die:
            who, when, how = arguments.die.split(":")
            if int(who) == RANK and step == int(when) and ATTEMPT == 0:
                die(how)


if __name__ == "__main__":
    main()
