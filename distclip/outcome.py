"""From a survey and a decision to what the caller is told: the one place where a `StepReport` is made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distclip.policy import Decision
from distclip.report import GroupReport, SkipReason, StepReport, Verdict
from distclip.survey import Survey


def judge(found: Survey, decision: Decision, *, stops: bool) -> Callable[[], Verdict]:
    """What gives the verdict on a step whose survey the host has read.

    `stops`: whether a nonfinite gradient keeps the optimizer from running.
    """
    assert found.facts is not None
    any_gradient = found.facts.any_gradient

    def verdict() -> Verdict:
        nonfinite = bool(decision.nonfinite)
        bad: SkipReason | None = "nonfinite" if nonfinite and stops else None
        return Verdict(nonfinite, bad if any_gradient else "no_gradients")

    return verdict


def report_on(
    step: int, found: Survey, decision: Decision, scale: float | Tensor | None, verdict: Callable[[], Verdict]
) -> StepReport:
    """The report; nothing is read from the device. `scale`: the one that backward used, if there is a scaler."""
    groups = zip(found.plan.param_groups, decision.norms, decision.coefficients, found.nan, found.inf, strict=True)
    return StepReport(
        step=step,
        total_norm=decision.total_norm,
        clip_coefficient=decision.coefficients[-1],
        clipped=decision.clipped,
        loss_scale=None if scale is None else torch.as_tensor(scale, dtype=torch.float64),
        param_groups={name: GroupReport(norm, coefficient, nan, inf) for name, norm, coefficient, nan, inf in groups},
        _judge=verdict,
    )
