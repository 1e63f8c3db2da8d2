"""From a step on the device to telemetry: the one place where the clipper's numbers become a `StepRecord`.

The sink comes from the environment (`DISTCLIP_SPOOL`, `DISTCLIP_EVENTS`, `DISTCLIP_STEP_LOG`); with none of these set
there is no telemetry and no cost. Every clipper has one of its own; they share the process's file and logs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from distclip.errors import ConfigError
from distclip.plan.plan import Plan
from distclip.report import StepReport
from distclip.survey import Survey
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


@dataclass(frozen=True)
class Outcome:
    """What a step came to besides the survey, for the record."""

    report: StepReport
    limit: float | None
    factor: float | Tensor
    """What turns the norm of this rank's raw gradients into that of unscaled ones."""
    culprits: tuple[Culprit, ...]
    learning_rate: float | None
    loss: float | Tensor | None
    clip_seconds: float


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

    def record(self, survey: Survey, outcome: Outcome) -> None:
        """Report a finished step. Reads the numbers on the host, so on CUDA it waits for the step's clip."""
        now = time.perf_counter()
        previous, self._last = self._last, now
        if self._sink is None:
            return
        self.open(survey.plan)
        report = outcome.report
        self._sink.record(
            StepRecord(
                step=report.step,
                timestamp=time.time(),
                total_norm=float(report.total_norm),
                limit=outcome.limit,
                clip_coefficient=float(report.clip_coefficient),
                clipped=bool(report.clipped),
                nan=int(survey.nan.sum()),
                inf=int(survey.inf.sum()),
                local_nan=int(survey.local_nan),
                local_inf=int(survey.local_inf),
                local_norm=float(survey.local_norm) * float(outcome.factor),
                stepped=report.stepped,
                skip_reason=report.skip_reason,
                elements=int(survey.elements),
                missing_tensors=survey.gradients.missing,
                loss_scale=None if report.loss_scale is None else float(report.loss_scale),
                learning_rate=outcome.learning_rate,
                loss=None if outcome.loss is None else float(outcome.loss),
                step_seconds=None if previous is None else now - previous,
                clip_seconds=outcome.clip_seconds,
                wait_seconds=survey.wait_seconds,
                diverged=survey.divergent,
                culprits=outcome.culprits,
            )
        )

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
