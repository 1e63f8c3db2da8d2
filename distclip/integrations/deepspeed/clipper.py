"""`EngineClipper`: a `GradientClipper` whose source and optimizer is a DeepSpeed engine.

ZeRO keeps averaged gradients in buffers of its own, not in `.grad`. For each run of elements that this rank steps
there is a *stand-in*: a tensor without storage of its own whose `.grad` is, during a step, the view of DeepSpeed's
buffer. Plan, measurement, agreement, decision, culprits and telemetry then are those of every other source; what
differs is here: when to look, who multiplies, and how a step is taken or skipped.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from distclip.apply import scale_all_, zero_all_nonfinite_, zero_nonfinite_
from distclip.arguments import NonfiniteMode
from distclip.clipper import GradientClipper
from distclip.errors import ConfigError, DistclipError, NonfiniteGradientError
from distclip.integrations.deepspeed import configuration, internals
from distclip.integrations.deepspeed.internals import Slot, Whole
from distclip.integrations.deepspeed.planner import EnginePlanner
from distclip.outcome import report_on
from distclip.plan.groups import ParamGroups
from distclip.planner import Planner
from distclip.policy import Decision
from distclip.policy.fixed import EPSILON
from distclip.report import StepReport, Verdict
from distclip.survey import Survey
from distclip.telemetry.record import Sink

_DIFFERENT = 0.01
"""DeepSpeed's own norm is called wrong where it is further than this from the true one; bf16 rounds to 0.004."""


class EngineClipper(GradientClipper):
    """Measures what a DeepSpeed engine is about to step, decides with all ranks, and lets it step or makes it skip.

    Two modes. With `decides="deepspeed"` DeepSpeed clips by its own configuration (`gradient_clipping`); distclip
    measures, reports what DeepSpeed did, skips a step that is not finite where DeepSpeed would take it, and has the
    loss scale updated after the step instead of before it. With `decides="distclip"` DeepSpeed's clipping is off and
    distclip multiplies: for `param_groups`, `nonfinite="zero"` and other norms than the 2-norm.

    Args:
        engine: from `deepspeed.initialize`, with an optimizer; every rank must come here.
        max_norm: as for `GradientClipper`. Where DeepSpeed decides its `gradient_clipping` holds, and another max_norm
            is worth a warning.
        norm_type, param_groups, nonfinite, max_consecutive_skips, telemetry: as for `GradientClipper`, except that
            "propagate" leaves nonfinite steps to DeepSpeed.
        decides: who clips; "auto" is DeepSpeed unless something is asked for that it lacks.

    Raises:
        ConfigError: DeepSpeed is used in a way that distclip cannot look into; the text names the key.
    """

    def __init__(
        self,
        engine: Any,
        *,
        max_norm: float | None = 1.0,
        norm_type: float = 2.0,
        param_groups: ParamGroups = None,
        nonfinite: NonfiniteMode = "skip",
        max_consecutive_skips: int = 10,
        telemetry: Literal["auto"] | Sink | None = "auto",
        decides: Literal["auto", "deepspeed", "distclip"] = "auto",
    ) -> None:
        if decides not in ("auto", "deepspeed", "distclip"):
            raise ConfigError(f"decides must be 'auto', 'deepspeed' or 'distclip', not {decides!r}")
        self._engine = engine
        self._inside = internals.inspect(engine)
        needed = nonfinite == "zero" or norm_type != 2.0 or param_groups is not None
        self.decides: configuration.Decides = ("distclip" if needed else "deepspeed") if decides == "auto" else decides
        """Who clips: "deepspeed" or "distclip"."""
        notes = configuration.check(
            self._inside, max_norm, self.decides, nonfinite, norm_type, param_groups is not None
        )
        if dist.get_rank() == 0:
            for note in notes:
                warnings.warn(f"DeepSpeed: {note}", stacklevel=2)
        if self.decides == "deepspeed":
            max_norm = float(engine.gradient_clipping()) or None
        self._stage = int(engine.zero_optimization_stage())
        self._slots: list[Slot] = []
        self._stand_ins: list[Tensor] = []
        self._take_step: Callable[[], None] = _nothing
        self._scale = 1.0
        self._result: StepReport | None = None
        self._error: NonfiniteGradientError | None = None
        self._told = False
        super().__init__(
            self._source(),
            engine.basic_optimizer,
            max_norm=max_norm,
            norm_type=norm_type,
            param_groups=param_groups,
            nonfinite=nonfinite,
            max_consecutive_skips=max_consecutive_skips,
            # Slots are this rank's alone; whole parameters are replicated unless DeepSpeed says otherwise.
            owned=self._inside.groups() if isinstance(self._inside, Whole) else ["*"],
            telemetry=telemetry,
            fold="never",  # DeepSpeed's optimizers step what DeepSpeed gives them
        )

    def step(
        self,
        grad_multiplier: float = 1.0,
        *,
        loss: float | Tensor | None = None,
        lr_kwargs: dict[str, Any] | None = None,
    ) -> StepReport:
        """Call this instead of `engine.step()`, after every `engine.backward()`.

        Off the accumulation boundary nothing is measured: the report's skip_reason is "accumulating", its numbers None.

        Raises:
            NonfiniteGradientError: with nonfinite="raise", or after too many skips in a row; the engine is in order.
        """
        if grad_multiplier != 1.0:
            raise ConfigError("grad_multiplier= is not for DeepSpeed: divide the loss instead")
        engine = self._engine
        # Where the caller owns the boundary (managed_gradient_accumulation off), every step is one.
        due = not engine.managed_gradient_accumulation() or engine.is_gradient_accumulation_boundary()
        return self._driven(lambda: engine.step(lr_kwargs), due, loss)

    def train_batch(self, *args: Any, **kwargs: Any) -> StepReport:
        """For a pipeline engine: call this instead of `engine.train_batch()`; the loss is `engine.agg_train_loss`."""
        if not hasattr(self._engine, "train_batch"):
            raise ConfigError("train_batch() is for DeepSpeed's pipeline engine; use engine.backward() and step()")
        return self._driven(lambda: self._engine.train_batch(*args, **kwargs), True, None)

    def clip_(self, grad_multiplier: float = 1.0) -> StepReport:
        """Not for DeepSpeed, which clips and steps in one call."""
        raise ConfigError("with DeepSpeed use step(), which calls engine.step()")

    @torch.no_grad()
    def measure(self) -> StepReport:
        """Measure and agree only, between the backward of the last micro-batch and `step()`."""
        if not self._engine.is_gradient_accumulation_boundary():
            return StepReport.accumulating(self._steps)
        with self._gradients_in_place():
            found, multiplier, _ = self._survey(1.0 / self._scale, step=False, late=False)
            decision = self._decide(found, multiplier)
            scale, verdict = self._reported_scale(), self._judge(found, decision)
            report = report_on(self._steps + 1, found, decision, scale, verdict)
        return report

    def _driven(self, drive: Callable[[], object], due: bool, loss: float | Tensor | None) -> StepReport:
        self._result = self._error = None

        def at_boundary(take_step: Callable[[], None]) -> None:
            self._take_step = take_step
            with self._gradients_in_place():
                try:
                    # The gradients carry the loss scale; as an argument it is also compared over ranks.
                    self._run(1.0 / self._scale, step=True, loss=loss)
                except NonfiniteGradientError as error:
                    self._error = error  # raised when the engine has finished its step

        try:
            with internals.before_optimizer(self._engine, at_boundary):
                drive()
        finally:
            self._take_step = _nothing
        if self._error is not None:
            raise self._error
        if self._result is None and due:
            raise DistclipError(
                f"DeepSpeed {internals.version()} stepped without passing the place where distclip measures "
                f"(tested: {internals.TESTED})"
            )
        return self._result or StepReport.accumulating(self._steps)

    @contextlib.contextmanager
    def _gradients_in_place(self) -> Iterator[None]:
        """Within the block each stand-in's `.grad` is the gradient, and `self._scale` what backward multiplied by."""
        self._scale = self._inside.loss_scale
        gradients = self._inside.gradients()
        if [self._slot(each) for each in gradients] != [(slot.numel, slot.dtype, slot.device) for slot in self._slots]:
            # Made before DeepSpeed had gradients; what they are is known now. Missing stand-ins make all ranks replan.
            self._slots = [
                Slot(slot.name, gradient.numel(), gradient.dtype, gradient.device)
                for slot, gradient in zip(self._slots, gradients, strict=True)
            ]
            self._planner.items = self._stand_in()
        for stand_in, gradient in zip(self._stand_ins, gradients, strict=True):
            stand_in.grad = gradient
        try:
            yield
        finally:
            for stand_in in self._stand_ins:
                stand_in.grad = None

    @staticmethod
    def _slot(gradient: Tensor) -> tuple[int, torch.dtype, torch.device]:
        return gradient.numel(), gradient.dtype, gradient.device

    def _source(self) -> list[Any]:
        if isinstance(self._inside, Whole):
            return self._inside.parameters()
        self._slots = self._inside.slots()
        return self._stand_in()

    def _stand_in(self) -> list[Any]:
        self._stand_ins = [
            torch.zeros(1, dtype=slot.dtype, device=slot.device).expand(slot.numel).requires_grad_()
            for slot in self._slots
        ]
        return [(slot.name, stand_in) for slot, stand_in in zip(self._slots, self._stand_ins, strict=True)]

    def _planner_for(self, *arguments: Any) -> Planner:
        return EnginePlanner(self._stage, bool(self._slots), *arguments)

    def _apply(
        self, found: Survey, decision: Decision, multiplier: float | Tensor, report: StepReport, stepping: bool
    ) -> dict[Any, float]:
        """Multiply by the coefficients only: the loss scale is DeepSpeed's to undo."""
        if self.decides == "deepspeed":
            return {}
        if report.nonfinite and self._nonfinite == "zero":
            zero_all_nonfinite_(found.gradients)
            zero_nonfinite_(self._inside.everything())
        if report.skip_reason != "nonfinite":
            scale_all_(found.plan, found.gradients, decision.coefficients)
        return {}

    def _commit(self, report: StepReport, folds: dict[Any, float]) -> None:
        report.loss_scale = self._reported_scale()
        leave = self._nonfinite == "propagate" and report.skip_reason == "nonfinite"
        skip = not report.should_step and not leave
        with self._inside.skipping() if skip else contextlib.nullcontext(), self._inside.scale_updated_afterwards():
            self._take_step()
        report.was_stepped(bool(self._engine.was_step_applied()))
        if not report.stepped and report.should_step:
            # DeepSpeed's own check refused: finite gradients whose norm is not, or nonfinite ones under "propagate".
            report.verdict = Verdict(report.nonfinite, "nonfinite" if report.nonfinite else "policy")
        if self.decides == "deepspeed":
            self._tell_what_deepspeed_did(report)
        if report.stepped:
            for follower in self._followers:
                follower()
        self._result = report

    def _tell_what_deepspeed_did(self, report: StepReport) -> None:
        """Put the coefficient into the report that DeepSpeed used: from its own norm where it has one."""
        norm = self._engine.get_global_grad_norm()
        true = float(report.total_norm)
        used = true if norm is None else float(norm)  # stage 0 in fp32 keeps none
        coefficient = 1.0
        if report.stepped and self._max_norm is not None:
            coefficient = min(1.0, self._max_norm / (used + EPSILON))
        report.clip_coefficient = torch.tensor(coefficient, dtype=torch.float64)
        report.clipped = torch.tensor(coefficient < 1.0)
        report.param_groups = {
            name: replace(group, coefficient=report.clip_coefficient) for name, group in report.param_groups.items()
        }
        if coefficient < 1.0 and not self._told and abs(used - true) > _DIFFERENT * true:
            self._told = True
            if dist.get_rank() == 0:
                warnings.warn(
                    f"DeepSpeed clipped by a norm of {used:.6g}, but the norm of all gradients is {true:.6g}: "
                    'set "gradient_clipping" to 0 and pass decides="distclip" to clip by the true one',
                    stacklevel=2,
                )

    def _reported_scale(self) -> Tensor | None:
        return torch.tensor(self._scale, dtype=torch.float64) if self._engine.fp16_enabled() else None


def _nothing() -> None:
    raise DistclipError("no step of DeepSpeed is in progress")
