"""Late steps: with a fused optimizer on an accelerator the host need not know whether a step ran.

Waiting for the decision costs more than the decision: while the host waits, it queues nothing, and then the device has
nothing to do. Fused optimizers read `found_inf` and `grad_scale` on the device. So the device does all of it: norm,
coefficient, whether the gate is open, the step or not, and the loss scale. The host reads the packet when it takes the
next step, when it has long arrived (`distclip.hostcopy`), and then does what is left: counters, telemetry, the names of
nonfinite parameters, an error of another rank, a new plan.

    step N     packet -> gate -> optimizer.step() with found_inf = gate -> scale        nothing is read
    step N+1   read the packet of N, follow it up; packet -> ...

What differs from a step that waits:

- The gate is closed by nonfinite gradients, and by whatever else forbids a step: no gradients, an error on some rank,
  other loss scales or arguments, a plan that no longer fits, a factor that takes two multiplications. The first is a
  skip like any other. Of the others all ranks hear one step later; the step itself is lost
  (`skip_reason="undecided"`), because its gradients are gone.
- `max_consecutive_skips` and errors raise one step late.
- `report.stepped` and the like wait for the packet when they are read: not for what was queued after it.
- Culprits have names, without the number of elements.

A step waits where the host has to act on the decision: any other mode than "skip", callbacks of `after_step`, clips by
several limits within one optimizer, optimizers that are not fused, the inf-norm and p other than 1 and 2, a scaler that
is shared by several clippers, the first finite step of a plan (in which replicas are compared), the first step of SGD
with momentum, and everything on the CPU, where reading is free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distclip.agree import GRADIENTS, HEADER, PROBLEM, REPLAN, ROW, Packet
from distclip.amp import ScalerLink
from distclip.culprits import find_marked
from distclip.errors import DistclipError
from distclip.fold import SMALLEST, folded, has_momentum
from distclip.hostcopy import HostCopy
from distclip.optimizers import FoldPlan
from distclip.plan.plan import Plan
from distclip.policy import Decision
from distclip.report import StepReport, Verdict
from distclip.reporter import Draft, Reporter
from distclip.survey import Facts, Statement, Survey, closed, follow, read_facts
from distclip.telemetry.record import Culprit

LAST_SECONDS = 5.0
"""How long the last step of a clipper that goes away is waited for."""

LateFolds = Mapping[torch.optim.Optimizer, int]
"""Optimizer -> a param group whose factor is that of all its parameters."""


def pays(device: torch.device) -> bool:
    """Whether not waiting gains anything on this device."""
    return device.type != "cpu"


def late_folds(
    plan: Plan, folds: FoldPlan, limited: Collection[int], norm_type: float, link: ScalerLink | None
) -> LateFolds | None:
    """How the optimizers can take the next step without the host; None where the host must know.

    `limited`: param groups with a limit of their own.
    """
    # Sums of these norms always fit into float64 (fp64 gradients apart), and no MAX follows the packet.
    if not (pays(plan.device) and plan.verified and norm_type in (1.0, 2.0)):
        return None
    if link is not None and not link.alone:
        return None
    found = folds.for_all(limited)
    return found if found is not None and all(map(has_momentum, found)) else None


class Gate:
    """What decides on the device: whether the step may run, and how much the host may learn later."""

    def __init__(self, found: Survey, decision: Decision, multiplier: float | Tensor) -> None:
        self.factors = decision.coefficients * multiplier
        """What the gradients of each param group are multiplied by, on the device."""
        # More than one number of the kernels can undo: a matter of all ranks alike, so of all groups.
        tiny = (self.factors < SMALLEST).any()
        self.other = closed(found.packet, found.plan.world_size) | tiny
        """Whether something else than nonfinite gradients forbids the step, bool []."""
        self.closed = decision.nonfinite | self.other
        """Whether the step must not run, bool []."""
        self._groups = len(found.plan.param_groups)
        flags = torch.stack((decision.nonfinite, self.other, tiny)).to(torch.float64)
        self._copy = HostCopy(torch.cat((found.packet.header, found.packet.rows.flatten(), flags)))

    def arrives(self, seconds: float) -> bool:
        """Whether the host can know of it within this time."""
        return self._copy.arrives(seconds)

    def header(self) -> list[float]:
        """The packet's header, on the host."""
        return self._copy.read()[:HEADER]

    def rows(self) -> list[list[float]]:
        """The packet's rows, on the host."""
        values = self._copy.read()[HEADER:]
        return [values[ROW * group : ROW * (group + 1)] for group in range(self._groups)]

    def must_wait(self) -> bool:
        """Whether a factor was so small that a step must multiply by it twice, which is for the host to see."""
        return self._copy.read()[-1] > 0

    def verdict(self) -> Verdict:
        """What the device decided; collective of nothing, so any rank may ask at any time."""
        header = self.header()
        nonfinite, other, _ = (flag > 0 for flag in self._copy.read()[-3:])
        if header[GRADIENTS] == 0 and not header[REPLAN] and not header[PROBLEM]:
            return Verdict(False, "no_gradients")
        if other:
            return Verdict(False, "undecided")
        return Verdict(nonfinite, "nonfinite" if nonfinite else None)


def take_step(
    optimizers: Sequence[torch.optim.Optimizer],
    folds: LateFolds,
    gate: Gate,
    link: ScalerLink | None,
    device: torch.device,
) -> None:
    """Run all optimizers behind the gate, then update the loss scale."""
    if link is not None:
        link.record(gate.closed, device)
    for optimizer in optimizers:
        if optimizer not in folds:
            continue  # it has no parameters on this rank
        factor = gate.factors[folds[optimizer]]
        if link is None:
            with folded(optimizer, factor, closed=gate.closed):
                optimizer.step()
        else:
            with folded(optimizer, factor):
                link.scaler.step(optimizer)  # which hands it the found_inf that was recorded
    if link is not None:
        link.mark_unscaled()
        link.finish(learned=~gate.other)


@dataclass(frozen=True)
class LateStep:
    """A step that the device took or not, and what the host still has to do about it."""

    plan: Plan
    statement: Statement
    packet: Packet
    gate: Gate
    report: StepReport
    draft: Draft | None

    def follow(
        self, make_plan: Callable[[Exception | None], Plan], reporter: Reporter
    ) -> tuple[Plan, tuple[Culprit, ...]]:
        """Collective, before the next packet: what the packet asks for, then telemetry. Returns the plan to go on with.

        Raises:
            DistclipError: what the step would have raised, had it waited.
        """
        header, rows = self.gate.header(), self.gate.rows()
        try:
            plan, facts = follow(self.plan, header, rows, self.statement, make_plan)
        except DistclipError:
            reporter.record(self.draft, self.report, read_facts(header, rows, lost=True), ())
            raise
        plan.waits = plan.waits or self.gate.must_wait()
        culprits = find_marked(self.plan, self.packet.marks) if self.report.nonfinite and not facts.lost else ()
        reporter.record(self.draft, self.report, facts, culprits)
        return plan, culprits


class Pending:
    """The one late step of a clipper that has not been followed up yet."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.step: LateStep | None = None

    def take(self) -> LateStep | None:
        """The step, which then is no longer pending."""
        step, self.step = self.step, None
        return step

    def flush(self) -> None:
        """Report the last step of a clipper that goes away; its other ranks may be gone, so nobody is asked."""
        step = self.take()
        with contextlib.suppress(Exception):  # at the end of a process the device may be gone as well
            # A rank that died before it sent its packet must not hold up the end of this one.
            if step is not None and step.gate.arrives(LAST_SECONDS):
                facts: Facts = read_facts(step.gate.header(), step.gate.rows(), lost=False)
                self._reporter.record(step.draft, step.report, facts, ())
