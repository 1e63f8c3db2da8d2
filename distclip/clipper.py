"""`GradientClipper`: one decision per step for all ranks and optimizers. The only module that knows the order

    plan -> measure -> agree -> decide -> apply -> report

Every room is a function of tensors, groups and flags elsewhere; this class holds what lasts from step to step (the
plan, the count of steps, the count of skips in a row) and calls them.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from distclip import amp
from distclip.apply import scale_all_, zero_all_nonfinite_
from distclip.arguments import (
    NonfiniteMode,
    check_count,
    check_max_norm,
    check_multiplier,
    check_nonfinite,
    check_norm_type,
    check_param_groups,
    check_telemetry,
)
from distclip.culprits import describe, find_culprits
from distclip.errors import ConfigError, DistclipError, NonfiniteGradientError, for_all_ranks
from distclip.fold import folded
from distclip.integrations import is_deepspeed_engine
from distclip.late import Gate, LateFolds, LateStep, Pending, late_folds, take_step
from distclip.optimizers import FoldPlan, Optimizers, as_follower, as_optimizers, check_fold
from distclip.outcome import judge, report_on
from distclip.plan.collectives import GroupReference, resolve
from distclip.plan.declaration import Declaration
from distclip.plan.groups import ParamGroups
from distclip.plan.plan import Plan
from distclip.plan.sources import Source, items_of
from distclip.planner import Planner
from distclip.policy import Decision, decide_fixed
from distclip.report import StepReport, Verdict
from distclip.reporter import Reporter
from distclip.survey import Survey, survey
from distclip.telemetry.record import Culprit, Sink
from distclip.telemetry.sinks import auto_sink


class GradientClipper:
    """Measures, agrees, clips and steps, the same way on every rank.

    Build it on every rank of the group, after the model is wrapped: building is collective and checks that the ranks
    hold the same replicas, so that a model that is out of sync is found before the first step.

    Args:
        source: the module, a list of modules (pipeline parts), parameters, or (name, parameter) pairs. A DeepSpeed
            engine makes an `EngineClipper` instead, which takes no optimizer: see distclip/integrations/deepspeed.
        optimizer: one or several that share this norm; they step together or not at all. None for `clip_` only.
        max_norm: the limit, > 0; None or inf only measures.
        norm_type: p of the p-norm, > 0 or inf.
        param_groups: name -> `ParamGroup`, or a function from a parameter's name to a group's name (or None). Groups
            with a limit are clipped by their own norm, all others together by theirs.
        nonfinite: what to do when any gradient anywhere is nan or inf:
            "skip": no optimizer runs, nothing is multiplied;
            "raise": `NonfiniteGradientError` on every rank, naming ranks and parameters;
            "zero": bad elements become 0, then the rest is clipped by its own norm;
            "propagate": as torch: the norm is nan or inf and so become the gradients; the optimizer runs.
        max_consecutive_skips: so many nonfinite skips in a row are tolerated; the next bad step raises on every rank.
        scaler: a `torch.amp.GradScaler` or FSDP1's `ShardedGradScaler`.
        pipeline_group, owned, tied, group: see `clip_grad_norm_`.
        telemetry: "auto" (from the environment, see docs), None, or a `distclip.telemetry.record.Sink`.
        fold: whether `step()` lets a fused optimizer do the multiplication in its own pass: "auto" where it can,
            "never", or "always" (an error where it cannot). `.grad` then is clipped after the step, not before.

    Raises:
        ConfigError, TypeError, LayoutError: as `clip_grad_norm_`, with the same text on every rank.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> clipper = GradientClipper(model, torch.optim.SGD(model.parameters(), lr=0.1), max_norm=1.0)
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> report = clipper.step()
        >>> report.total_norm.item(), report.stepped
        (5.0, True)
    """

    def __new__(cls, source: object = None, *args: Any, **kwargs: Any) -> GradientClipper:
        """A DeepSpeed engine is source and optimizer at once, and has a clipper of its own."""
        if cls is GradientClipper and is_deepspeed_engine(source):
            from distclip.integrations.deepspeed import EngineClipper

            return super().__new__(EngineClipper)
        return super().__new__(cls)

    def __init__(
        self,
        source: Source,
        optimizer: Optimizers | None = None,
        *,
        max_norm: float | None = 1.0,
        norm_type: float = 2.0,
        param_groups: ParamGroups = None,
        nonfinite: NonfiniteMode = "skip",
        max_consecutive_skips: int = 10,
        scaler: Any = None,
        pipeline_group: dist.ProcessGroup | None = None,
        owned: Sequence[str] | dict[str, dist.ProcessGroup] = (),
        tied: Sequence[str | tuple[str, ...]] = (),
        group: dist.ProcessGroup | None = None,
        telemetry: Literal["auto"] | Sink | None = "auto",
        fold: Literal["auto", "never", "always"] = "auto",
    ) -> None:
        self._group = GroupReference(resolve(group))
        self._limits: dict[str, float] = {}
        items: list[Any] = []
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        scaled = False
        problem: Exception | None = None
        try:
            self._max_norm = None if max_norm is None else check_max_norm(max_norm)
            self._norm_type = check_norm_type(norm_type)
            self._nonfinite = check_nonfinite(nonfinite)
            self._max_consecutive_skips = check_count("max_consecutive_skips", max_consecutive_skips)
            self._limits = check_param_groups(param_groups)
            self._optimizers = as_optimizers(optimizer)
            self._scaler = amp.check_scaler(scaler)
            scaled = self._scaler is not None
            self._fold = check_fold(fold, self._optimizers)
            check_telemetry(telemetry)
            items = items_of(source)
        except Exception as error:  # other ranks are waiting, whatever it is
            problem = for_all_ranks(error)
        self._arguments = {
            "max_norm": repr(max_norm),
            "norm_type": repr(norm_type),
            "nonfinite": repr(nonfinite),
            "param_groups": repr(param_groups) if isinstance(param_groups, Mapping) else str(param_groups is not None),
            "max_consecutive_skips": repr(max_consecutive_skips),
            "scaler": "given" if scaler is not None else "None",
        }
        declaration = Declaration(owned, tied, pipeline_group, param_groups)
        self._planner = self._planner_for(items, self._group, declaration, self._arguments, self._optimizers, scaled)
        self.plan: Plan = self._planner.make(problem)
        """Who holds what; made anew, by all ranks together, when parameters change."""
        sink = auto_sink() if isinstance(telemetry, str) else telemetry
        self._reporter = Reporter(sink, "fixed", self._nonfinite, self._norm_type, bool(self._optimizers))
        self._link = None if self._scaler is None else amp.ScalerLink(self._scaler, self._optimizers)
        self._reporter.open(self.plan)
        self._folding: tuple[Plan, FoldPlan] | None = None
        self._pending = Pending(self._reporter)
        weakref.finalize(self, self._pending.flush)
        self._followers: list[Callable[[], object]] = []
        self._steps = 0
        self._skips = 0
        self._bad_gradients: bool | None = False
        """Whether gradients that are not finite were left for an optimizer; None where only the device knows yet."""
        self._stepped_since = False
        """Whether an optimizer ran by hand after a step of which only the device knows."""
        for each in self._optimizers:
            # The optimizer can outlive many clippers: each takes its hook along when it goes.
            weakref.finalize(self, each.register_step_post_hook(_Watch(self)).remove).atexit = False

    def clip_(self, grad_multiplier: float = 1.0) -> StepReport:
        """Unscale (once) and clip in place; the caller steps, if `report.should_step`.

        With a scaler, go on with `scaler.step(optimizer); scaler.update()`: it sees the agreed found_inf.
        `grad_multiplier` multiplies all gradients first (1 / tokens, say), in the same pass; the norm is that after it.
        """
        return self._run(grad_multiplier, step=False, loss=None)

    def step(self, grad_multiplier: float = 1.0, *, loss: float | Tensor | None = None) -> StepReport:
        """Unscale, measure, agree, clip, then `optimizer.step()` or not, and `scaler.update()`.

        `loss` of this rank is only reported.

        Raises:
            ConfigError: the clipper was built without an optimizer.
            NonfiniteGradientError: with nonfinite="raise", or after too many skips in a row.
        """
        return self._run(grad_multiplier, step=True, loss=loss)

    def measure(self) -> StepReport:
        """Measure and agree only: nothing is written, and it is not counted or reported as a step."""
        self._catch_up()
        found, multiplier, scale = self._survey(1.0, step=False, late=False, call="measure()")
        decision = self._decide(found, multiplier)
        gate, report = self._conclude(found, decision, multiplier, scale)
        if gate is not None:  # a rank that is in step() goes on without waiting: all hear of it before the next packet
            self._pending.step = LateStep(found.plan, found.statement, found.packet, gate, report, None)
        return report

    def after_step(self, *followers: Any) -> None:
        """Call these after every step that really ran, in this order: what must not advance on a skip.

        Takes callables and objects with `step()`, such as `torch.optim.lr_scheduler` objects, an EMA's update, or a
        counter. Only for loops that use `step()`; after `clip_()` ask `report.should_step`.

        Example:
            >>> weight = torch.nn.Parameter(torch.zeros(1))
            >>> optimizer = torch.optim.SGD([weight], lr=1.0)
            >>> clipper = GradientClipper([weight], optimizer)
            >>> clipper.after_step(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
            >>> for value in (1.0, float("nan")):
            ...     weight.grad = torch.tensor([value])
            ...     _ = clipper.step()
            >>> optimizer.param_groups[0]["lr"]
            0.5
        """
        self._followers += [as_follower(follower) for follower in followers]

    def explain(self) -> str:
        """The plan as a table a person can read: parameter, layout, ranks, param group, holders."""
        return self.plan.explain()

    def state_dict(self) -> dict[str, int]:
        """What must survive a restart: the count of steps and of nonfinite skips in a row."""
        skips, last = self._skips, self._pending.step
        if last is not None:  # no rank need be asked for its verdict, so one rank alone may save
            skips = skips + 1 if last.report.skip_reason == "nonfinite" else 0
        return {"steps": self._steps, "consecutive_skips": skips}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take up a state that was saved on any number of ranks. Call it on every rank.

        Raises:
            ConfigError: something that `state_dict()` returns is missing.
        """
        missing = [repr(key) for key in self.state_dict() if key not in state]
        if missing:
            raise ConfigError(
                f"the state lacks {' and '.join(missing)}: give load_state_dict() what state_dict() of a "
                "GradientClipper returned"
            )
        self._catch_up()
        self._steps, self._skips = int(state["steps"]), int(state["consecutive_skips"])

    def __reduce__(self) -> NoReturn:
        """A copy would step the copied optimizer by the gradients of the model that was not copied."""
        raise TypeError(
            "a GradientClipper cannot be copied or pickled: build one for each model; what to save is its state_dict()"
        )

    def _planner_for(self, *arguments: Any) -> Planner:
        return Planner(*arguments)

    @torch.no_grad()
    def _run(self, grad_multiplier: float, *, step: bool, loss: float | Tensor | None) -> StepReport:
        self._catch_up()
        started = time.perf_counter()
        late = self._late_folds() if step else None
        found, multiplier, scale = self._survey(grad_multiplier, step, late is not None)
        decision = self._decide(found, multiplier)
        gate, report = self._conclude(found, decision, multiplier, scale)
        culprits = find_culprits(found.plan, found.gradients) if gate is None and report.nonfinite else ()
        self._steps = report.step
        folds: dict[torch.optim.Optimizer, float] = {}
        if not found.unread:
            folds = self._apply(found, decision, multiplier, report, step and report.should_step)
        clip_seconds = time.perf_counter() - started
        draft = partial(
            self._reporter.draft,
            found,
            report,
            limit=self._max_norm,
            factor=multiplier,
            learning_rate=self._learning_rate(),
            loss=loss,
            clip_seconds=clip_seconds,
        )
        if gate is not None:
            # Before an optimizer runs: if that breaks off, the other ranks still wait here for what the packet asks.
            self._pending.step = LateStep(found.plan, found.statement, found.packet, gate, report, draft())
        if found.unread:
            assert late is not None
            assert gate is not None
            self._bad_gradients = False  # the gate lets none through
            report.was_stepped()
            take_step(self._optimizers, late, gate, self._link, found.plan.device)
            self._bad_gradients = None
        else:
            self._bad_gradients = report.nonfinite and self._nonfinite != "zero"
            if step:
                self._commit(report, folds)
            if self._link is not None and report.should_step:
                self._link.mark_unscaled()
        if gate is None:
            assert found.facts is not None
            self._reporter.record(draft(), report, found.facts, culprits)
            self._count_skip(report, culprits)
        return report

    def _catch_up(self) -> None:
        """Do what the last step left for later, if it did; collective then."""
        late = self._pending.take()
        if late is not None:
            if self._stepped_since and late.report.nonfinite:
                self._reporter.nonfinite_applied()
            self._stepped_since, self._bad_gradients = False, bool(self._bad_gradients)
            self.plan, culprits = late.follow(self._planner.make, self._reporter)
            self._count_skip(late.report, culprits)

    def _late_folds(self) -> LateFolds | None:
        """How the device can take this step by itself; None where the host must know of it in time."""
        if self._nonfinite != "skip" or self._fold == "never" or self._followers or not self._optimizers:
            return None
        limited = [index for index, name in enumerate(self.plan.param_groups) if name in self._limits]
        return late_folds(self.plan, self._fold_plan(self.plan), limited, self._norm_type, self._link)

    def _survey(
        self, grad_multiplier: float, step: bool, late: bool, call: str = "step() or clip_()"
    ) -> tuple[Survey, float | Tensor, float | Tensor | None]:
        """Measure and agree; also return what unscales a norm, grad_multiplier / scale, and the scale itself: the one
        that backward used, None without a scaler."""
        problem: Exception | None = None
        scale: float | Tensor = 1.0
        multiplier = 1.0
        try:
            multiplier = check_multiplier(grad_multiplier)
            if step and not self._optimizers:
                raise ConfigError("step() needs the optimizer: GradientClipper(model, optimizer, ...); or use clip_()")
            if self._link is not None:
                scale = self._link.scale_to_undo()
        except (DistclipError, TypeError) as error:
            problem = error
        if isinstance(scale, Tensor):
            # On the packet's device it stays there, as a copy that update() leaves alone; on the CPU a read is free.
            scale = scale.double() if scale.device == self.plan.device and not scale.is_cpu else float(scale)
        found = survey(
            self.plan,
            self._planner.make,
            group=self._group.get(),
            device=self.plan.device,
            norm_type=self._norm_type,
            arguments={
                **self._arguments,
                "the call": call,
                "grad_multiplier": repr(multiplier),
                "consecutive_skips (of load_state_dict)": str(self._skips),
            },
            scale=scale,
            problem=problem,
            outdated=self._planner.is_outdated,
            late=late,
        )
        self.plan = found.plan
        return found, multiplier / scale, None if self._link is None else scale

    def _conclude(
        self, found: Survey, decision: Decision, multiplier: float | Tensor, scale: float | Tensor | None
    ) -> tuple[Gate | None, StepReport]:
        """The report of a survey; with the gate that gives its verdict, where some rank did not wait."""
        gate = Gate(found, decision, multiplier) if found.facts is None else None
        verdict = gate.verdict if gate else self._judge(found, decision)
        return gate, report_on(self._steps + 1, found, decision, scale, verdict)

    def _judge(self, found: Survey, decision: Decision) -> Callable[[], Verdict]:
        return judge(found, decision, stops=self._nonfinite in ("skip", "raise"))

    def _decide(self, found: Survey, multiplier: float | Tensor) -> Decision:
        return decide_fixed(
            found.norms * multiplier,
            found.nan,
            found.inf,
            [self._limits.get(name) for name in found.plan.param_groups],
            self._max_norm,
            self._norm_type,
            by_rest=self._nonfinite == "zero",
            as_torch=self._nonfinite == "propagate",
        )

    def _apply(
        self, found: Survey, decision: Decision, multiplier: float | Tensor, report: StepReport, stepping: bool
    ) -> dict[torch.optim.Optimizer, float]:
        """Multiply by coefficient * multiplier, in one pass, unless the step is to be skipped; tell the scaler.

        Returns the factors that are left to fused optimizers: their gradients are not touched here.
        """
        if report.nonfinite and self._nonfinite == "zero":
            zero_all_nonfinite_(found.gradients)
        folds: dict[torch.optim.Optimizer, float] = {}
        if report.skip_reason not in ("nonfinite", "undecided"):
            factors = decision.coefficients * multiplier
            done: frozenset[int] = frozenset()
            if stepping and self._fold != "never":
                # An optimizer is about to be called or not, which the host must know, so it may as well read these.
                folds, done = self._fold_plan(found.plan).choose(factors.tolist())
            scale_all_(found.plan, found.gradients, factors, done)
        if self._link is not None:
            self._link.record(torch.tensor(report.nonfinite and self._nonfinite != "zero"), found.plan.device)
        return folds

    def _commit(self, report: StepReport, folds: dict[torch.optim.Optimizer, float]) -> None:
        """Run all optimizers or none, then update the scale once."""
        report.was_stepped(report.should_step)
        if report.should_step:
            for optimizer in self._optimizers:
                with folded(optimizer, folds[optimizer]) if optimizer in folds else contextlib.nullcontext():
                    if self._scaler is None:
                        optimizer.step()
                    else:
                        self._scaler.step(optimizer)
            for follower in self._followers:
                follower()
        if self._link is not None:
            # Without any gradient, or without a measurement, nothing was learned about the scale: it stays.
            self._link.finish(learned=report.skip_reason not in ("no_gradients", "undecided"))

    def _count_skip(self, report: StepReport, culprits: tuple[Culprit, ...]) -> None:
        """Count nonfinite skips in a row.

        Raises:
            NonfiniteGradientError: they are too many, or one is with nonfinite="raise".
        """
        if report.skip_reason != "nonfinite":
            self._skips = 0
            return
        self._skips += 1
        where = describe(culprits)
        if self._nonfinite == "raise":
            raise NonfiniteGradientError(f"step {report.step}: gradients are not finite: {where}")
        if self._skips > self._max_consecutive_skips:
            raise NonfiniteGradientError(
                f"step {report.step}: gradients were not finite in {self._skips} steps in a row, more than "
                f"max_consecutive_skips={self._max_consecutive_skips}; last: {where}"
            )

    def _fold_plan(self, plan: Plan) -> FoldPlan:
        if self._folding is None or self._folding[0] is not plan:
            self._folding = plan, FoldPlan(plan, self._optimizers)
        return self._folding[1]

    def _learning_rate(self) -> float | Tensor | None:
        return self._optimizers[0].param_groups[0]["lr"] if self._optimizers else None

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer ran: were its gradients known to be bad?"""
        # A fused optimizer under GradScaler is called all the same, and its kernel does nothing where found_inf is 1.
        found_inf = getattr(optimizer, "found_inf", None)
        if self._bad_gradients is None:
            self._stepped_since = self._stepped_since or found_inf is None
        elif self._bad_gradients and not (found_inf is not None and bool(found_inf)):
            self._bad_gradients = False
            self._reporter.nonfinite_applied()


class _Watch:
    """An optimizer's step post-hook that does not keep the clipper alive."""

    def __init__(self, clipper: GradientClipper) -> None:
        self._clipper = weakref.ref(clipper)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        clipper = self._clipper()
        if clipper is not None:
            clipper._on_optimizer_step(optimizer)
