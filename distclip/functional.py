"""`clip_grad_norm_`, `get_total_norm` and `clip_grad_value_`: the shape of `torch.nn.utils`, right for every layout.

Call them on every rank of the group, after a backward that synchronised, with the module (so that wrappers can be
seen) or with its parameters. The first call with a set of parameters makes a plan with all other ranks; later calls
find it by the identity of the parameters. Where one rank finds none and another does, all of them plan again: a call
never hangs because caches differ.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distclip.apply import clamp_, scale_all_
from distclip.arguments import check_clip_value, check_max_norm, check_norm_type
from distclip.culprits import describe, find_culprits
from distclip.errors import LayoutError, NonfiniteGradientError, for_all_ranks
from distclip.measure.ranges import Picker, picker
from distclip.outcome import judge, report_on
from distclip.plan import ddp
from distclip.plan.build import build_plan
from distclip.plan.collectives import all_equal, packet_device, resolve, wait_for_all
from distclip.plan.declaration import Declaration
from distclip.plan.dtensor import local_of
from distclip.plan.plan import Plan
from distclip.plan.sources import Source, items_of, modules_of, tensors_of, walk
from distclip.policy import decide_fixed
from distclip.reporter import Reporter
from distclip.survey import Survey, survey
from distclip.telemetry.sinks import auto_sink

_KEPT_PLANS = 16
"""Plans kept per process group; an older one is made again when it is needed."""


class _Kept(NamedTuple):
    """A plan that is kept for later calls with the same source."""

    number: int
    """Plans are made by all ranks together, so it means the same on all of them."""
    plan: Plan
    pick: Picker
    """Takes the plan's parameters out of the source's tensors."""
    numels: tuple[int, ...]
    """Elements of the source's tensors."""


class _Calls:
    """What is remembered between function calls over one process group.

    Plans are found by the identities of the parameters, and hold the parameters only while a call runs: neither does a
    plan keep a model alive, nor is there a weak reference that would keep `Module.to()` from swapping DTensors.
    """

    def __init__(self) -> None:
        self.plans: OrderedDict[object, _Kept] = OrderedDict()
        self.made = 0
        self.reduces = False
        """Whether any plan so far had gradients that are reduced over mesh axes before they are measured."""
        self.reporter: Reporter | None = None
        self.steps = 0

    def keep(self, key: object, plan: Plan, tensors: Sequence[Tensor]) -> None:
        """Remember a plan that was just made."""
        place = {id(tensor): index for index, tensor in enumerate(tensors)}
        self.made += 1
        places = [place[id(parameter)] for parameter in plan.parameters]
        self.plans[key] = _Kept(self.made, plan, picker(places), tuple(map(Tensor.numel, tensors)))
        self.reduces = self.reduces or plan.other_placements
        while len(self.plans) > _KEPT_PLANS:
            self.plans.popitem(last=False)

    def find(self, key: object, tensors: Sequence[Tensor]) -> tuple[int, Plan | None]:
        """The number of a plan and the plan, with its parameters; (0, None) if there is none."""
        found = self.plans.pop(key, None)
        if found is None:
            return 0, None
        # identities are used again: these may be of parameters that are no more
        if not found.plan.is_alive or found.numels != tuple(map(Tensor.numel, tensors)):
            return 0, None
        self.plans[key] = found  # as the newest
        found.plan.parameters = found.pick(tensors)
        return found.number, found.plan

    def release(self, key: object) -> None:
        """Let go of a plan's parameters after a call. Other threads may be using other plans."""
        found = self.plans.get(key)
        if found is not None:
            found.plan.parameters = ()


_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, _Calls] = weakref.WeakKeyDictionary()
_single = _Calls()


def clip_grad_norm_(
    source: Source,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pipeline_group: dist.ProcessGroup | None = None,
    owned: Sequence[str] | dict[str, dist.ProcessGroup] = (),
    tied: Sequence[str | tuple[str, ...]] = (),
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Clip the gradients of the whole model, over all ranks, to a norm of at most `max_norm`; in place.

    Takes the place of `torch.nn.utils.clip_grad_norm_` (torch/nn/utils/clip_grad.py). Gradients are multiplied by
    min(1, max_norm / (norm + 1e-6)), and not touched at all when that is 1 or when one of them is nonfinite.

    Args:
        source: a module (best), a list of modules, parameters, or (name, parameter) pairs.
        max_norm: the limit, > 0; inf only measures.
        norm_type: p of the p-norm, > 0 or inf.
        error_if_nonfinite: raise on every rank, with names, where a gradient is nan or inf.
        foreach: accepted so that calls written for torch fit; distclip chooses by itself.
        pipeline_group: the group of the pipeline's stages; each rank's parameters are then its stage's.
        owned: patterns of parameters that this rank alone has, or pattern -> group over which copies are the same.
        tied: parameters held by several stages together, counted once.
        group: the ranks that train this model; all of them by default.

    Returns:
        The norm before clipping: a plain tensor of shape [] and float64, the same on every rank; nan if any element
        is nan, else inf if any is inf.

    Raises:
        ConfigError, TypeError: a bad argument, or other arguments on other ranks.
        LayoutError: it is not clear who holds what, or the last backward did not synchronise.
        NonfiniteGradientError: see `error_if_nonfinite`.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> clip_grad_norm_(model, max_norm=1.0).item()
        5.0
        >>> round(get_total_norm(model).item(), 5)
        1.0
    """
    declaration = Declaration(owned=owned, tied=tied, pipeline_group=pipeline_group)
    return _call(source, lambda: check_max_norm(max_norm), norm_type, error_if_nonfinite, declaration, group)


def get_total_norm(
    source: Source,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pipeline_group: dist.ProcessGroup | None = None,
    owned: Sequence[str] | dict[str, dist.ProcessGroup] = (),
    tied: Sequence[str | tuple[str, ...]] = (),
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The norm of the gradients of the whole model over all ranks. Reads only, never writes.

    Arguments, result and errors are those of `clip_grad_norm_`. Unlike `torch.nn.utils.get_total_norm` it takes
    parameters, not gradients: a gradient alone does not say who else holds it.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> layer(torch.ones(1, 1)).sum().backward()
        >>> round(get_total_norm(layer).item(), 6)
        1.414214
    """
    declaration = Declaration(owned=owned, tied=tied, pipeline_group=pipeline_group)
    return _call(source, lambda: None, norm_type, error_if_nonfinite, declaration, group)


@torch.no_grad()
def clip_grad_value_(source: Source, clip_value: float, foreach: bool | None = None) -> None:
    """Clamp every element of every gradient to [-clip_value, clip_value], in place.

    Takes the place of `torch.nn.utils.clip_grad_value_` (torch/nn/utils/clip_grad.py). Exact on shards, because it
    looks at one element at a time: no rank needs another, and nan stays nan. Addends of a Partial gradient are refused.

    Args:
        source: as for `clip_grad_norm_`.
        clip_value: the bound, >= 0.
        foreach: accepted so that calls written for torch fit.

    Raises:
        ConfigError: a bad bound.
        LayoutError: a gradient is Partial, so that no rank knows its elements; or it is complex.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, -0.5])
        >>> clip_grad_value_([weight], 1.0)
        >>> weight.grad
        tensor([ 1.0000, -0.5000])
    """
    bound = check_clip_value(clip_value)
    gradients = []
    for found in walk(items_of(source)):
        gradient = found.parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
            raise LayoutError(
                f"the gradient of {found.name!r} is Partial: this rank has only addends of its elements. Redistribute "
                "it to the parameter's placements before clipping by value"
            )
        if gradient.is_complex():
            raise LayoutError(
                f"the gradient of {found.name!r} is complex, and complex numbers have no order to clamp by"
            )
        if gradient.is_sparse:
            # an element of an uncoalesced gradient is a sum of entries, which cannot be clamped one by one
            gradient = found.parameter.grad = gradient.coalesce()
        gradients.append(local_of(gradient))
    clamp_(gradients, bound)


@torch.no_grad()
def _call(
    source: Source,
    limit_of: Callable[[], float | None],
    norm_type: float,
    error_if_nonfinite: bool,
    declaration: Declaration,
    group: dist.ProcessGroup | None,
) -> Tensor:
    started = time.perf_counter()
    group = resolve(group)
    calls = _single if group is None else _calls.setdefault(group, _Calls())
    problem: Exception | None = None
    limit, p, key = None, 2.0, None
    items: list[Any] = []
    tensors: list[Any] = []
    try:
        limit, p = limit_of(), check_norm_type(norm_type)
        items = items_of(source)
        tensors = tensors_of(items)
        # bytes, because they remember their hash
        key = (array("Q", map(id, tensors)).tobytes(), repr(declaration))
    except Exception as error:  # other ranks are waiting, whatever it is
        problem = for_all_ranks(error)
    for module in modules_of(items):
        if isinstance(module, DistributedDataParallel):
            ddp.check_join(module)

    def make_plan(trouble: Exception | None) -> Plan:
        plan = build_plan(items, group, declaration=declaration, problem=trouble)
        calls.keep(key, plan, tensors)
        return plan

    number, plan = calls.find(key, tensors)
    if calls.reduces:
        # Reductions over mesh axes come before the packet, so all ranks must first know that they use the same plan.
        plan = plan if all_equal(number, group) else None
    elif not calls.made:
        # The first plan of this group on any rank, since plans are made by all together: name who is missing. What is
        # kept of them is no guide: identities are used again on one rank and not on another.
        wait_for_all(group, "distclip's first call")
    try:
        found = survey(
            plan,
            make_plan,
            group=group,
            device=packet_device(group),
            norm_type=p,
            arguments={
                "max_norm": repr(limit),
                "norm_type": repr(p),
                "error_if_nonfinite": repr(bool(error_if_nonfinite)),
            },
            problem=problem,
        )
        return _finish(calls, found, limit, p, error_if_nonfinite, started)
    finally:
        calls.release(key)


def _finish(
    calls: _Calls, found: Survey, limit: float | None, p: float, error_if_nonfinite: bool, started: float
) -> Tensor:
    """Decide, apply and report."""
    decision = decide_fixed(found.norms, found.nan, found.inf, [None], limit, p)
    nonfinite = bool(decision.nonfinite)
    culprits = find_culprits(found.plan, found.gradients) if nonfinite else ()
    if limit is not None and not nonfinite:
        scale_all_(found.plan, found.gradients, decision.coefficients)
    calls.steps += 1
    if calls.reporter is None:
        calls.reporter = Reporter(auto_sink(), "fixed", "propagate", p, has_optimizer=False)
    if calls.reporter.active:
        assert found.facts is not None  # a call is never late
        report = report_on(calls.steps, found, decision, None, judge(found, decision, stops=False))
        draft = calls.reporter.draft(
            found,
            report,
            limit=limit,
            factor=1.0,
            learning_rate=None,
            loss=None,
            clip_seconds=time.perf_counter() - started,
        )
        calls.reporter.record(draft, report, found.facts, culprits)
    if error_if_nonfinite and nonfinite:
        raise NonfiniteGradientError(
            f"the total norm of the gradients is {float(decision.total_norm)}: {describe(culprits)}"
        )
    return decision.total_norm
