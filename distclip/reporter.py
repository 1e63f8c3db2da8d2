"""From a step on the device to telemetry: the one place where the clipper's numbers become a `StepRecord`.

A `Draft` is made when the step is; its numbers travel to the host together, and it is finished when somebody has read
what the step came to: at once, or one step later (`distclip.late`).

The sink comes from the environment (`DISTCLIP_SPOOL`, `DISTCLIP_EVENTS`, `DISTCLIP_STEP_LOG`); with none of these set
there is no telemetry and no cost. Every clipper has one of its own; they share the process's file and logs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distclip.errors import ConfigError
from distclip.hostcopy import HostCopy
from distclip.plan.dtensor import local_of
from distclip.plan.plan import Plan
from distclip.report import StepReport
from distclip.survey import Facts, Survey
from distclip.telemetry.record import Culprit, RunInfo, Sink, StepRecord
from distclip.telemetry.sinks import auto_sink

Phase = Literal["training", "evaluation", "checkpoint", "other"]
_phases: list[Phase] = ["training"]


_shared_sink = functools.cache(auto_sink)
"""The sink of what concerns the whole process and no clipper in particular."""


@contextlib.contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Tell telemetry that no steps are due for a while: the stalled alert then waits longer.

    Example:
        >>> with phase("evaluation"):
        ...     pass
    """
    if name not in get_args(Phase):
        raise ConfigError(f"phase must be one of {', '.join(map(repr, get_args(Phase)))}, not {name!r}")
    sink = _shared_sink()
    outer = _phases[-1]
    _phases.append(name)
    try:
        if sink is not None:
            sink.phase(name)
        yield
    finally:
        _phases.pop()
        if sink is not None:
            sink.phase(outer)


class Draft:
    """A `StepRecord` whose numbers may still be on their way to the host."""

    def __init__(self, known: dict[str, Any], numbers: dict[str, Tensor]) -> None:
        self._known = known
        self._names = tuple(numbers)
        self._copy = HostCopy(torch.stack([number.to(torch.float64) for number in numbers.values()]))

    def finish(self, report: StepReport, facts: Facts, culprits: tuple[Culprit, ...]) -> StepRecord:
        """The record; waits for the numbers."""
        fields = {**self._known, **dict(zip(self._names, self._copy.read(), strict=True))}
        for name in ("nan", "inf", "local_nan", "local_inf"):
            fields[name] = int(fields[name])
        return StepRecord(
            **{**fields, "clipped": bool(fields["clipped"])},
            step=report.step,
            stepped=report.stepped,
            skip_reason=report.skip_reason,
            elements=int(facts.elements),
            diverged=facts.divergent,
            culprits=culprits,
        )


class Reporter:
    """Hands one `StepRecord` per step to a sink, or does nothing without one."""

    def __init__(self, sink: Sink | None, policy: str, nonfinite: str, norm_type: float, has_optimizer: bool) -> None:
        self._sink = sink
        self._policy, self._nonfinite, self._norm_type = policy, nonfinite, norm_type
        self._has_optimizer = has_optimizer
        self._opened_for: Plan | None = None
        self._last: float | None = None

    @property
    def active(self) -> bool:
        """Whether anybody listens."""
        return self._sink is not None

    def open(self, plan: Plan) -> None:
        """Tell the sink about the run, so that counters exist at 0 before the first step."""
        if self._sink is not None and self._opened_for is not plan:
            self._sink.open(self._info(plan))
            self._opened_for = plan

    def draft(
        self,
        survey: Survey,
        report: StepReport,
        *,
        limit: float | None,
        factor: float | Tensor,
        learning_rate: float | Tensor | None,
        loss: float | Tensor | None,
        clip_seconds: float,
    ) -> Draft | None:
        """Write down a step; None where nobody listens.

        `factor` turns the norm of this rank's raw gradients into that of unscaled ones.
        """
        now = time.perf_counter()
        previous, self._last = self._last, now
        if self._sink is None:
            return None
        self.open(survey.plan)
        local_nan, local_inf = survey.local_bad
        known: dict[str, Any] = {
            "timestamp": time.time(),
            "limit": limit,
            "missing_tensors": survey.gradients.missing,
            "step_seconds": None if previous is None else now - previous,
            "clip_seconds": clip_seconds,
            "wait_seconds": survey.packet.wait_seconds,
        }
        numbers = {
            "total_norm": report.total_norm,
            "clip_coefficient": report.clip_coefficient,
            "clipped": report.clipped,
            "nan": survey.nan.sum(),
            "inf": survey.inf.sum(),
            "local_nan": local_nan,
            "local_inf": local_inf,
            "local_norm": survey.packet.local_norm(self._norm_type) * factor,
        }
        loss = _one_number(loss)
        for name, value in (("loss_scale", report.loss_scale), ("learning_rate", learning_rate), ("loss", loss)):
            # what the host has already need not travel
            if isinstance(value, Tensor) and value.device == report.total_norm.device:
                numbers[name] = value.detach().reshape(())
            else:
                known[name] = None if value is None else float(value)
        return Draft(known, numbers)

    def record(self, draft: Draft | None, report: StepReport, facts: Facts, culprits: tuple[Culprit, ...]) -> None:
        """Report a finished step."""
        if self._sink is not None and draft is not None:
            self._sink.record(draft.finish(report, facts, culprits))

    def nonfinite_applied(self) -> None:
        """An optimizer stepped on nonfinite gradients."""
        if self._sink is not None:
            self._sink.nonfinite_applied()

    def _info(self, plan: Plan) -> RunInfo:
        return RunInfo(
            rank=dist.get_rank() if dist.is_available() and dist.is_initialized() else plan.rank,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=plan.world_size,
            device=str(plan.device),
            strategy=plan.strategy,
            policy=self._policy,
            nonfinite=self._nonfinite,
            norm_type=self._norm_type,
            torch_version=torch.__version__,
            has_optimizer=self._has_optimizer,
        )


def _one_number(loss: Any) -> float | Tensor | None:
    """The loss as it can be reported; None and a warning where it cannot: the step has been taken, also elsewhere."""
    number = loss
    if isinstance(loss, DTensor):
        # one that is sharded or Partial is one number only after a collective
        whole = all(placement.is_replicate() for placement in loss.placements)
        number = local_of(loss.detach()) if whole else loss
    if number is None or (isinstance(number, Tensor) and not isinstance(number, DTensor) and number.numel() == 1):
        return number
    if not isinstance(number, Tensor):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(number)
    shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    if isinstance(number, DTensor):
        shown = f"a DTensor with {loss.placements}"
    warnings.warn(f"loss= is not reported: it must be one number, not {shown}", stacklevel=5)
    return None
