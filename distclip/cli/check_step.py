"""The step that `distclip check` looks at: found by hooks, measured twice, told once.

torch's global hooks say which modules ran forward with grad, and when an optimizer is about to step. In the step that
was asked for, every rank makes distclip's plan for the outermost of those modules and measures; the gradients are then
gathered and measured without that plan. Nothing is written, and `SystemExit` ends the job before the optimizer runs.
"""

from __future__ import annotations

import math
import os
import sys
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distclip.cli.check import AGREE, DISAGREE, NOT_COMPARED
from distclip.cli.check_reference import Source, reference, same, torch_says
from distclip.clipper import GradientClipper
from distclip.errors import AgreementError, DistclipError
from distclip.plan import ddp
from distclip.plan.collectives import gather_objects, resolve
from distclip.plan.plan import Plan
from distclip.plan.sources import tensors_of

_SETTLING_SECONDS = 0.5
"""How long gloo's threads get to let go of the last collective's tensors, for which they need the GIL. Otherwise a job
that frees its process group at once (DDP's reducer does) waits for them with the GIL in hand, for ever: torch 2.13."""


class StepCheck:
    """A context manager around a job: within, the optimizer step number `step` is checked and ends the job.

    Args:
        step: which call of any optimizer's `step` on this rank, from 1.
        owned: patterns of parameters that one rank alone has.
        norm_type: p of the p-norm, > 0 or inf.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with StepCheck() as check:
        ...     model(torch.tensor([[3.0, 4.0]])).sum().backward()
        ...     try:
        ...         optimizer.step()
        ...     except SystemExit as end:
        ...         print("ends with", end.code)
        optimizer step 1 on 1 rank: 1 parameter of Linear
        ...
        distclip's norm   5
        reference         5 (1 gradient gathered, in float64)
        torch's norm      5, the same
        verdict: distclip and the reference agree
        ends with 0
    """

    def __init__(self, *, step: int = 1, owned: Sequence[str] = (), norm_type: float = 2.0) -> None:
        self.step = step
        self.steps = 0
        """Optimizer steps seen so far."""
        self.reached = False
        """Whether the step came."""
        self.verdict: int | None = None
        """What all ranks came to; None where one of them failed."""
        self._owned = list(owned)
        self._norm_type = norm_type
        self._ran: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._hooks: list[Any] = []

    @property
    def rank(self) -> int:
        """This process among all ranks of the job, also before it joins them and after it left."""
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    def __enter__(self) -> StepCheck:
        self._hooks = [
            # a compiled job must run the hook, not trace it
            register_module_forward_pre_hook(torch.compiler.disable(self._on_forward)),  # type: ignore[no-untyped-call]
            register_optimizer_step_pre_hook(self._on_step),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _on_forward(self, module: nn.Module, _args: Any) -> None:
        if torch.is_grad_enabled():
            self._ran[module] = None
            if isinstance(module, DistributedDataParallel):
                ddp.watch(module)  # whether this forward's backward will synchronise is not to be seen later

    def _on_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self.reached:
            self.steps += 1
            if self.steps < self.step:
                return
            self.reached = True
            with torch.no_grad():
                self.verdict = self._examine(optimizer)
            if dist.is_initialized():
                time.sleep(_SETTLING_SECONDS)
        # again, should the job have caught the first
        raise SystemExit(NOT_COMPARED if self.verdict is None else self.verdict)

    def _examine(self, optimizer: torch.optim.Optimizer) -> int | None:
        source, left = _source(list(self._ran), optimizer)
        try:
            clipper = GradientClipper(
                source, max_norm=None, norm_type=self._norm_type, owned=self._owned, telemetry=None
            )
            report = clipper.measure()
        except DistclipError as error:
            # The others have the same text, unless they never came.
            absent = isinstance(error, AgreementError)
            if self.rank == 0 or absent:
                print(f"distclip check: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return None if absent else NOT_COMPARED
        if report.skip_reason == "no_gradients":
            self._say(
                f"distclip check: no rank has a gradient in optimizer step {self.step}: nothing to compare. If the job "
                "calls optimizer.step(closure), its backward runs after this point; --step 2 sees the gradients left "
                "from the step before"
            )
            return NOT_COMPARED
        mine = report.total_norm.item()
        norms = gather_objects(mine, resolve(None))
        truth = reference(source, self._owned, self._norm_type)
        parameters = list(clipper.plan.parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        told_by_torch = torch_says(gradients, self._norm_type, truth.norm)
        others = _other_ranks(gather_objects(_rows(clipper.plan), resolve(None)))
        good = all(same(norm, truth.norm) for norm in norms) and not truth.differing
        outcome = "agree" if good else f"DISAGREE ({_shown(norms)} against {truth.norm:.9g})"
        self._say(
            f"optimizer step {self.step} on {_number(len(norms), 'rank')}: "
            f"{_number(len(parameters), 'parameter')} of {_kinds(source)}",
            "",
            clipper.explain(),
            *others,
            "",
            f"distclip's norm   {_shown(norms)}",
            f"reference         {truth.norm:.9g} ({_number(truth.gradients, 'gradient')} gathered, in float64)",
            f"torch's norm      {told_by_torch}",
            *_remarks(optimizer, mine, left, truth.differing),
            f"verdict: distclip and the reference {outcome}",
        )
        return AGREE if good else DISAGREE

    def _say(self, *lines: str) -> None:
        if self.rank == 0:
            print("\n".join(lines), flush=True)


def _source(ran: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> tuple[Source, int]:
    """The outermost modules that hold parameters of this optimizer, and how many of its tensors are in none of them.

    Without such modules all that ran (an optimizer over copies), without any the optimizer's own parameters.
    """
    inner = {id(child) for module in ran for child in module.modules() if child is not module}
    outermost = [module for module in ran if id(module) not in inner and next(module.parameters(), None) is not None]
    stepped = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    holding = [module for module in outermost if any(id(parameter) in stepped for parameter in module.parameters())]
    modules = holding or outermost
    if not modules:
        return [(f"parameter[{index}]", parameter) for index, parameter in enumerate(stepped.values())], 0
    held = set(map(id, tensors_of(list(modules))))
    return modules, sum(key not in held for key in stepped)


def _kinds(source: Source) -> str:
    kinds = Counter(type(item).__name__ for item in source if isinstance(item, nn.Module))
    return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in kinds.items()) or "the optimizer"


def _remarks(optimizer: torch.optim.Optimizer, norm: float, left: int, differing: Sequence[str]) -> list[str]:
    """What a reader must know beside the figures."""
    remarks = []
    divisor = getattr(optimizer, "grad_scale", None)
    if divisor is not None:
        # A fused optimizer under GradScaler; any other has unscaled gradients by now.
        remarks.append(
            f"note: the optimizer's kernel will divide these gradients by {float(divisor):g} (the loss scale), "
            f"to a norm of {norm / float(divisor):.9g}"
        )
    if norm == 0.0 or not math.isfinite(norm):
        remarks.append(f"note: a norm of {norm:g} proves little; look at another step with --step")
    if left:
        remarks.append(f"note: {_number(left, 'tensor')} of the optimizer lie in no module that ran: not measured")
    if differing:
        shown = ", ".join(differing[:10]) + (", ..." if len(differing) > 10 else "")
        remarks.append(f"note: ranks have different gradients of {shown}; if they are no copies, say so with --owned")
    return remarks


_Row = tuple[str, tuple[int, ...], int]


def _rows(plan: Plan) -> dict[tuple[str, int], _Row]:
    """This rank's plan, by name (numbered, where several modules have the same)."""
    seen: Counter[str] = Counter()
    rows = {}
    for entry in plan.entries:
        seen[entry.name] += 1
        layout = f"{entry.layout.kind} {entry.layout.where}"
        rows[entry.name, seen[entry.name]] = (layout, entry.holders, entry.local_numel)
    return rows


def _other_ranks(plans: Sequence[dict[tuple[str, int], _Row]]) -> list[str]:
    """How the plans of the other ranks differ from that of rank 0, a line for all that differ in the same way."""
    first = plans[0]
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, plan in enumerate(plans[1:], 1):
        both = [(first[key], plan[key]) for key in plan if key in first]
        differences = [
            (len(plan.keys() - first.keys()), "more"),
            (len(first.keys() - plan.keys()), "fewer"),
            (sum(one[0] != other[0] for one, other in both), "laid out otherwise"),
            (sum(one[1] != other[1] for one, other in both), "held by other ranks"),
            (sum(one[2] != other[2] for one, other in both), "of other local size"),
        ]
        told = [f"{_number(count, 'parameter')} {how}" for count, how in differences if count]
        alike[", ".join(told) or "as rank 0"].append(rank)
    return [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:8]))}"
        f"{', ...' if len(ranks) > 8 else ''}: {how}"
        for how, ranks in alike.items()
    ]


def _shown(norms: Sequence[float]) -> str:
    """One number if all ranks have the same."""
    if all(norm == norms[0] or norm != norm for norm in norms):
        return f"{norms[0]:.9g}" + (f" on all {len(norms)} ranks" if len(norms) > 1 else "")
    return ", ".join(f"{norm:.9g} on rank {rank}" for rank, norm in enumerate(norms[:8]))


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
