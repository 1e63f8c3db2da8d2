"""One agreed measurement: plan if need be, measure, agree. What the functions and the clipper share.

A survey ends on every rank alike: with the same numbers, or with the same error. The order of collectives is the same
on every rank whatever its data: the packet comes first, always, and only what the summed packet says decides what
follows (a new plan, an exchange of errors, the maxima of an inf-norm, names of nonfinite parameters).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from distclip.agree import (
    CONFIG,
    CONFIG_SQUARED,
    ELEMENTS,
    GRADIENTS,
    INF,
    NAN,
    OWNED,
    PRESENT,
    PRESENT_SHARE,
    PROBLEM,
    REPLAN,
    REPLICA_INF,
    REPLICA_NAN,
    SCALE,
    SCALE_SQUARED,
    SHARED,
    Packet,
    exchange,
    norms_of,
)
from distclip.errors import AgreementError, LayoutError
from distclip.plan.collectives import gather_floats, gather_objects, raise_together
from distclip.plan.fingerprint import structure_of
from distclip.plan.gradients import Gradients, take
from distclip.plan.handshake import arguments_differ
from distclip.plan.plan import Plan
from distclip.plan.verify import has_replicas, replicas_differ, verify_replicas


@dataclass(frozen=True)
class Survey:
    """What all ranks know after the packet. Tensors are float64 on the packet's device."""

    plan: Plan
    gradients: Gradients
    norms: Tensor
    """Norm of the finite elements per param group, [param groups], as the gradients are (still scaled)."""
    nan: Tensor
    """Elements that are nan per param group; those on replicas only where the owners have none."""
    inf: Tensor
    local_norm: Tensor
    local_nan: Tensor
    local_inf: Tensor
    elements: float
    """Elements of all gradients, each once."""
    any_gradient: bool
    divergent: bool
    """Whether replicas had different gradients in this step."""
    wait_seconds: float


def survey(
    plan: Plan | None,
    make_plan: Callable[[Exception | None], Plan],
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    norm_type: float,
    arguments: dict[str, str],
    scale: float | Tensor = 1.0,
    problem: Exception | None = None,
    outdated: Callable[[], bool] = lambda: False,
) -> Survey:
    """Measure and agree; collective over `group`.

    `make_plan(problem)` is called by all ranks together when one of them needs a new plan; `outdated` says whether this
    rank does. `problem` is an error of this rank's arguments, which then becomes every rank's. `device` is where a rank
    without a plan has its packet.
    """
    for attempt in range(2):
        # Also where this rank has a problem: others may be waiting for its addends of Partial gradients.
        gradients = None if plan is None else take(plan)
        if gradients is not None and attempt == 0 and outdated():
            gradients = replace(gradients, stale=True)
        trouble = problem or (gradients.problem if gradients is not None else None)
        packet = exchange(
            plan,
            gradients,
            groups=1 if plan is None else len(plan.param_groups),
            group=group,
            device=device if plan is None else plan.device,
            norm_type=norm_type,
            scale=scale,
            config=structure_of(sorted(arguments.items())) & 0xFFF,
            problem=trouble is not None,
        )
        if packet.header[PROBLEM]:
            raise_together(trouble, group)
        if not packet.header[REPLAN]:
            assert plan is not None
            assert gradients is not None
            return _conclude(plan, gradients, packet, norm_type, scale, arguments)
        plan = make_plan(None)
    raise AgreementError(
        "the parameters changed again while the ranks were planning: do not wrap, add or freeze parameters, or replace "
        "gradients, from another thread during a step"
    )


def _conclude(
    plan: Plan, gradients: Gradients, packet: Packet, norm_type: float, scale: float | Tensor, arguments: dict[str, str]
) -> Survey:
    header, size = packet.header, plan.world_size
    if _varies(header[SCALE], header[SCALE_SQUARED], size):
        scales = gather_floats([float(scale)], plan.group)[:, 0].tolist()
        raise AgreementError(
            f"the loss scale differs between ranks: {_by_rank(scales)}. Give every rank's GradScaler the same "
            "init_scale and let distclip update all of them"
        )
    if _varies(header[CONFIG], header[CONFIG_SQUARED], size):
        raise AgreementError(arguments_differ(gather_objects(arguments, plan.group)))
    if abs(header[PRESENT] - header[PRESENT_SHARE]) > 1e-9 * max(1.0, header[PRESENT]):
        _raise_missing(plan, gradients)
    rows = packet.rows
    nan = torch.where(rows[:, NAN] > 0, rows[:, NAN], rows[:, REPLICA_NAN])
    inf = torch.where(rows[:, INF] > 0, rows[:, INF], rows[:, REPLICA_INF])
    divergent = not math.isinf(norm_type) and any(
        replicas_differ(owned, shared)
        for owned, shared in zip(rows[:, OWNED].tolist(), rows[:, SHARED].tolist(), strict=True)
    )
    norms = norms_of(packet, plan, gradients, norm_type)
    if not plan.verified and not bool((nan + inf).any()) and bool(norms.any()):
        # once per plan, and on all ranks in the same step: everything this depends on came out of the packet
        if has_replicas(plan):
            verify_replicas(plan, gradients)
        plan.verified = True
    local = packet.local_rows
    return Survey(
        plan=plan,
        gradients=gradients,
        norms=norms,
        nan=nan,
        inf=inf,
        local_norm=packet.local_norm,
        local_nan=(local[:, NAN] + local[:, REPLICA_NAN]).sum(),
        local_inf=(local[:, INF] + local[:, REPLICA_INF]).sum(),
        elements=header[ELEMENTS],
        any_gradient=header[GRADIENTS] > 0,
        divergent=divergent,
        wait_seconds=packet.wait_seconds,
    )


def _varies(total: float, squares: float, size: int) -> bool:
    """Whether `size` numbers with this sum and this sum of squares are not all equal."""
    return squares * size - total * total > 1e-12 * max(1.0, total * total)


def _by_rank(values: list[float]) -> str:
    shown = ", ".join(f"{value:g} on rank {rank}" for rank, value in enumerate(values[:8]))
    return shown + (", ..." if len(values) > 8 else "")


def _raise_missing(plan: Plan, gradients: Gradients) -> None:
    """Name the replicated parameters that have a gradient on some of their holders only."""
    without = [
        (entry.name, entry.holders)
        for entry, local in zip(plan.entries, gradients.local, strict=True)
        if local is None and len(entry.holders) > 1
    ]
    absent: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, names in enumerate(gather_objects(without, plan.group)):
        for name in names:
            absent.setdefault(name, []).append(rank)
    told = [
        f"{name!r} has none on {_some(ranks)} of its holders {_some(list(holders))}"
        for (name, holders), ranks in absent.items()
        if len(ranks) < len(holders)
    ]
    raise LayoutError(
        f"a replicated parameter has a gradient on some ranks only: {'; '.join(told[:10])}"
        f"{f'; and {len(told) - 10} more' if len(told) > 10 else ''}. Its gradient must be reduced over all of them "
        "(DistributedDataParallel with find_unused_parameters=True), or the parameter declared with owned="
    )


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
