"""A worker for the torchrun tests: real gloo ranks that report steps to distclip's sinks, and die or wait when told to.

Steps are told apart by their norm, `step + 100 * attempt`, so that a test knows which attempt a gauge is of. With
`--folder`, the worker waits in step N of attempt A until the file `go-A-N` is there, for each `--hold A:N`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from distclip.telemetry.record import RunInfo, StepRecord
from distclip.telemetry.sinks import auto_sink


def step_record(step: int, norm: float, nan: int) -> StepRecord:
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
    )


def die(how: str) -> None:
    if how == "exit":
        os._exit(3)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("the test wants this worker to fail")


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--nonfinite", type=int, nargs="*", default=[])
    parser.add_argument("--die", default="", help="rank:step:how, in the first attempt; or rank:step:how:always")
    parser.add_argument("--hold", nargs="*", default=[])
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    sink = auto_sink()
    if sink is not None:
        sink.open(
            RunInfo(
                rank=rank,
                local_rank=int(os.environ["LOCAL_RANK"]),
                world_size=dist.get_world_size(),
                device="cpu",
                strategy="ddp",
                policy="fixed",
                nonfinite="skip",
                norm_type=2.0,
                torch_version=torch.__version__,
                has_optimizer=True,
            )
        )
    print(f"worker {rank} of attempt {attempt} is there", flush=True)
    print(f"worker {rank} says this on stderr", file=sys.stderr, flush=True)
    for step in range(1, arguments.steps + 1):
        total = torch.tensor([float(step + 100 * attempt)], dtype=torch.float64)
        dist.all_reduce(total)
        norm = total.item() / dist.get_world_size()
        if sink is not None:
            sink.record(step_record(step, norm, int(step in arguments.nonfinite)))
        if f"{attempt}:{step}" in arguments.hold:
            while not (arguments.folder / f"go-{attempt}-{step}").exists():
                time.sleep(0.02)
        if arguments.die:
            who, when, how, *always = arguments.die.split(":")
            if rank == int(who) and step == int(when) and (attempt == 0 or always):
                die(how)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
