"""What the demo breaks on purpose, and how it judges whether distclip noticed: pure functions over the step log.

The demo's claim is that every fault is caught and nothing else is flagged. `judge` decides that from the step log alone
(one JSON line per step, see `distclip.telemetry.events`), fault by fault, so that the claim can be false.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

STEPS = 200
MAX_NORM = 1.0
_TINY = 1e-6
"""distclip's bound below which a norm that is not 0 is called tiny."""
_SPIKE = 100.0
"""How many times the limit a spike's norm must at least be: the fault makes it 10000 times what it was."""


@dataclass(frozen=True)
class Fault:
    """One fault that the demo asks `train_lm.py` for: steps first to last, both included."""

    kind: str
    first: int
    last: int
    cause: str
    """For a person."""
    alert: str | None
    """The alert that must fire; None where a fault is handled without anybody having to know."""
    rank: int | None = None

    @property
    def flag(self) -> str:
        """The value of `--inject`."""
        return f"{self.kind}@{self.steps}" + (f":rank={self.rank}" if self.rank is not None else "")

    @property
    def steps(self) -> str:
        """Such as "40" or "75-82"."""
        return f"{self.first}-{self.last}" if self.last > self.first else f"{self.first}"


FAULTS = (
    Fault("nan", 40, 40, "0/0 in rank 1's batch", "DistclipNonfiniteGradient", rank=1),
    Fault("zero", 75, 82, "loss times 0", "DistclipZeroGradients"),
    Fault("tiny", 115, 122, "loss divided by 1e9", "DistclipTinyGradients"),
    Fault("spike", 155, 155, "loss times 10000", None),
)


@dataclass(frozen=True)
class Step:
    """One line of the step log. Norm, loss and coefficient may be nan or inf."""

    number: int
    time: float
    """Unix time in seconds."""
    loss: float
    norm: float
    limit: float
    coefficient: float
    event: str | None
    """"nonfinite", "skipped", "zero", "tiny" or None."""
    stepped: bool
    bad_elements: int
    """Gradient elements that were nan or inf, over all ranks."""


def read_step(line: str) -> Step:
    """Read one line of the step log, in which numbers that are not finite are texts."""
    fields = json.loads(line)
    return Step(
        number=fields["step"],
        time=fields["time"],
        loss=float(fields["loss"]),
        norm=float(fields["total_norm"]),
        limit=float(fields["limit"]),
        coefficient=float(fields["clip_coefficient"]),
        event=fields["event"],
        stepped=fields["stepped"],
        bad_elements=fields["nan"] + fields["inf"],
    )


@dataclass(frozen=True)
class Finding:
    """Whether a fault was caught, and what distclip did, in words."""

    fault: Fault
    caught: bool
    decision: str


def judge(fault: Fault, steps: Sequence[Step]) -> Finding:
    """Look at the fault's own steps: each must have been taken for what it was."""
    hit = [step for step in steps if fault.first <= step.number <= fault.last]
    missing = fault.last - fault.first + 1 - len(hit)
    if missing:
        return Finding(fault, False, f"{missing} of its steps are not in the step log")
    right, decision = _JUDGES[fault.kind]
    wrong = [step for step in hit if not right(step)]
    if wrong:
        return Finding(fault, False, f"step {wrong[0].number} was taken for {_seen_as(wrong[0])}")
    return Finding(fault, True, decision(hit))


def false_alarms(steps: Sequence[Step], faults: Sequence[Fault] = FAULTS) -> list[Step]:
    """Steps that distclip flagged or skipped although nothing was wrong with them."""
    broken = {number for fault in faults for number in range(fault.first, fault.last + 1)}
    return [step for step in steps if step.number not in broken and (step.event is not None or not step.stepped)]


def loss_fell(steps: Sequence[Step], faults: Sequence[Fault] = FAULTS, few: int = 10) -> tuple[bool, float, float]:
    """Whether the job really learned: the mean loss of its first and of its last few good steps.

    Fell means by at least a nat per byte, which is far more than batches differ from one another.
    """
    broken = {number for fault in faults for number in range(fault.first, fault.last + 1)}
    losses = [step.loss for step in steps if step.number not in broken]
    if len(losses) < 2 * few:
        return False, math.nan, math.nan
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    return last < first - 1.0, first, last


def _seen_as(step: Step) -> str:
    outcome = "stepped" if step.stepped else "skipped"
    return f"{step.event or 'a good one'} (norm {step.norm:.3g}, coefficient {step.coefficient:.3g}, {outcome})"


def _is_nan(step: Step) -> bool:
    return step.event == "nonfinite" and not math.isfinite(step.norm) and step.bad_elements > 0 and not step.stepped


def _is_zero(step: Step) -> bool:
    return step.event == "zero" and step.norm == 0.0


def _is_tiny(step: Step) -> bool:
    return step.event == "tiny" and 0.0 < step.norm < _TINY


def _is_clipped_spike(step: Step) -> bool:
    clipped_to_limit = math.isclose(step.norm * step.coefficient, step.limit, rel_tol=1e-3)
    return step.event is None and math.isfinite(step.norm) and step.norm > _SPIKE * step.limit and clipped_to_limit


_JUDGES: dict[str, tuple[Callable[[Step], bool], Callable[[Sequence[Step]], str]]] = {
    "nan": (_is_nan, lambda hit: f"skipped: {hit[0].bad_elements:,} nan or inf"),
    "zero": (_is_zero, lambda hit: f"{len(hit)} norms of exactly 0"),
    "tiny": (_is_tiny, lambda hit: f"{len(hit)} norms of at most {max(step.norm for step in hit):.0e}"),
    "spike": (_is_clipped_spike, lambda hit: f"norm {hit[0].norm:,.0f} clipped to {hit[0].limit:g}"),
}
