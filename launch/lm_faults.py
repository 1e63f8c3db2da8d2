"""Faults on demand for `train_lm.py`: what `--inject` understands.

Every fault has a cause that real runs have. Each batch carries a weight that its loss is multiplied by, as jobs do that
balance their data; a bad weight is a bad batch:

    nan@20:rank=1     rank 1's batch of step 20 has the weight 0/0      -> gradients are nan, on every rank
    inf@20            a weight of infinity                              -> inf, and nan where one inf meets another
    zero@35-40        the loss is multiplied by 0 in steps 35 to 40     -> gradients are exactly 0
    tiny@45-48        the loss is divided by 1e9                        -> a norm that prints as 0.0000
    spike@50          a huge loss, 10000 times as large                 -> finite, far above any limit
    kill@30:rank=1    rank 1 dies as if out of memory, first attempt only: the run restarts and gets past it

Without `rank=` a fault happens on every rank. Ranks that are not named have good batches then; but gradients
are averaged over ranks, so one rank's nan is everybody's.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

WEIGHTS = {"nan": math.nan, "inf": math.inf, "zero": 0.0, "tiny": 1e-9, "spike": 1e4}
KINDS = (*WEIGHTS, "kill")
FORMS = (
    f"KIND@STEP, KIND@FIRST-LAST, either with :rank=RANK behind it; KIND is one of {', '.join(KINDS)}; "
    "for example nan@20:rank=1 or zero@35-40"
)


@dataclass(frozen=True)
class Fault:
    """One kind of fault in the steps first to last (both included), on one rank or (None) on all."""

    kind: str
    first: int
    last: int
    rank: int | None = None

    def hits(self, step: int, rank: int) -> bool:
        return self.first <= step <= self.last and self.rank in (None, rank)

    def __str__(self) -> str:
        steps = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.kind}@{steps}" + ("" if self.rank is None else f":rank={self.rank}")


def parse_fault(text: str) -> Fault:
    """The value of one `--inject`; argparse puts the flag's name before the message of the error.

    Raises:
        argparse.ArgumentTypeError: says what was wrong and which forms there are.
    """
    match = re.fullmatch(r"(?P<kind>[^@:]+)@(?P<first>\d+)(?:-(?P<last>\d+))?(?::rank=(?P<rank>\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"cannot read {text!r}. Forms: {FORMS}")
    if match["kind"] not in KINDS:
        raise argparse.ArgumentTypeError(f"unknown kind {match['kind']!r} in {text!r}. Forms: {FORMS}")
    first = int(match["first"])
    last = int(match["last"] or first)
    if not 1 <= first <= last:
        raise argparse.ArgumentTypeError(f"steps in {text!r} must count upwards from 1. Forms: {FORMS}")
    return Fault(match["kind"], first, last, int(match["rank"]) if match["rank"] else None)


def fault_problem(faults: Sequence[Fault], steps: int, world_size: int) -> str | None:
    """Why one of the faults could never happen in a run of that many steps and ranks; None where all can."""
    for fault in faults:
        if fault.last > steps:
            return f"--inject: {fault}: the run has only {steps} steps"
        if fault.rank is not None and fault.rank >= world_size:
            return f"--inject: {fault}: the run has only the ranks 0 to {world_size - 1}"
    return None


def batch_weight(faults: Sequence[Fault], step: int, rank: int) -> float:
    """What the loss of this rank's batch is multiplied by in this step: 1.0 unless a fault hits."""
    return math.prod(WEIGHTS[fault.kind] for fault in faults if fault.kind in WEIGHTS and fault.hits(step, rank))


def die_if_due(faults: Sequence[Fault], step: int, rank: int) -> None:
    """End this process as the kernel's out-of-memory killer would, but not again after torchrun's restart."""
    first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first_attempt and any(fault.kind == "kill" and fault.hits(step, rank) for fault in faults):
        os.kill(os.getpid(), signal.SIGKILL)
