"""One agreed measurement: plan if need be, measure, agree. What the functions and the clipper share.

A survey ends on every rank alike: with the same numbers, or with the same error. The order of collectives is the same
on every rank whatever its data: the packet comes first, always, and only what the summed packet says decides what
follows (a new plan, an exchange of errors, a second look at nonfinite gradients on devices, the maxima of an inf-norm,
names of nonfinite parameters).

Reading the sum makes the host wait for the device, once per step. A rank that would rather not wait (`distclip.late`)
says so in the packet and goes on with what the device computes from it. Then every rank, also one that did wait, leaves
what follows until just before its next packet (`follow`): in between come the collectives of the next backward, and all
ranks must have them in the same order. There is no measuring again then, so a step whose packet asks for that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distclip.agree import (
    COARSE,
    CONFIG,
    CONFIG_SQUARED,
    ELEMENTS,
    GRADIENTS,
    INF,
    LATE,
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
    UNREPRESENTABLE,
    UNVERIFIED,
    Packet,
    exchange,
    norms_of,
    power_root,
)
from distclip.culprits import mark
from distclip.errors import AgreementError, LayoutError
from distclip.plan.collectives import gather_floats, gather_objects, raise_together
from distclip.plan.fingerprint import structure_of
from distclip.plan.gradients import Gradients, take
from distclip.plan.handshake import arguments_differ
from distclip.plan.plan import Plan
from distclip.plan.verify import has_replicas, replicas_differ, verify_replicas


@dataclass(frozen=True)
class Facts:
    """What the host knows of a survey; the same on every rank."""

    elements: float
    """Elements of all gradients, each once."""
    any_gradient: bool
    divergent: bool
    """Whether replicas had different gradients in this step."""
    lost: bool
    """Whether the step was not taken because some rank would have had to measure again."""


@dataclass(frozen=True)
class Statement:
    """What this rank has to say about itself, should the summed packet ask for it."""

    trouble: Exception | None
    arguments: dict[str, str]
    scale: float | Tensor
    missing: tuple[int, ...]
    """Entries of the plan without a gradient on this rank."""


@dataclass(frozen=True)
class Survey:
    """What all ranks know after the packet. Tensors are float64 on the packet's device."""

    plan: Plan
    gradients: Gradients
    packet: Packet
    statement: Statement
    norms: Tensor
    """Norm of the finite elements per param group, [param groups], as the gradients are (still scaled)."""
    nan: Tensor
    """Elements that are nan per param group; those on replicas only where the owners have none."""
    inf: Tensor
    facts: Facts | None
    """None where some rank did not wait: `follow` must be called before the next packet."""
    unread: bool
    """Whether this rank is one that did not wait."""

    @property
    def local_bad(self) -> tuple[Tensor, Tensor]:
        """Elements on this rank that are nan, and that are inf."""
        local = self.packet.local_rows
        return (local[:, NAN] + local[:, REPLICA_NAN]).sum(), (local[:, INF] + local[:, REPLICA_INF]).sum()


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
    late: bool = False,
) -> Survey:
    """Measure and agree; collective over `group`.

    `make_plan(problem)` is called by all ranks together when one of them needs a new plan; `outdated` says whether this
    rank does. `problem` is an error of this rank's arguments, which then becomes every rank's. `device` is where a rank
    without a plan has its packet. With `late` this rank does not wait for the sum if it can do without.
    """
    for attempt in range(2):
        # Also where this rank has a problem: others may be waiting for its addends of Partial gradients.
        gradients = None if plan is None else take(plan)
        if gradients is not None and attempt == 0 and outdated():
            gradients = replace(gradients, stale=True)
        trouble = problem or (gradients.problem if gradients is not None else None)
        missing = () if gradients is None or not gradients.missing else _missing(gradients)
        # Bare: the frames of its traceback hold the clipper, which may go before somebody reads the statement.
        bare = None if trouble is None else type(trouble)(str(trouble))
        statement = Statement(bare, arguments, scale, missing)
        fits = plan is not None and gradients is not None and not gradients.stale and trouble is None
        unread = late and fits and plan is not None and plan.verified and not plan.waits
        send = partial(
            exchange,
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
        packet = send(late=unread)
        if unread:
            assert plan is not None
            assert gradients is not None
            return _conclude(plan, gradients, packet, statement, norm_type, None, unread=True)
        # The one host read of a step (free on CPU): whether a rank asked to plan again or has something to tell must be
        # known before anything is written.
        header = packet.header.tolist()
        if header[LATE]:
            assert plan is not None  # only clippers are late, and they always have one
            assert gradients is not None
            if _any_bad(packet.rows.tolist()):
                # names are exchanged when the gradients are gone
                packet = replace(packet, marks=mark(plan, gradients))
            return _conclude(plan, gradients, packet, statement, norm_type, None)
        if header[PROBLEM]:
            raise_together(trouble, group)
        if not header[REPLAN]:
            assert plan is not None
            assert gradients is not None
            rows = packet.rows.tolist()
            facts = _facts(plan, header, rows, statement)
            if header[COARSE] and _any_bad(rows):
                # agreed by all: the norm of what is finite, and counts of elements, need a second look on devices
                packet = send(elementwise=True)
                rows = packet.rows.tolist()
            return _conclude(
                plan,
                gradients,
                packet,
                statement,
                norm_type,
                facts,
                unrepresentable=_any_unrepresentable(rows),
                verify=header[UNVERIFIED] > 0,
            )
        plan = make_plan(None)
    raise AgreementError(
        "the parameters changed again while the ranks were planning: do not wrap, add or freeze parameters, or replace "
        "gradients, from another thread during a step"
    )


def follow(
    plan: Plan,
    header: list[float],
    rows: list[list[float]],
    statement: Statement,
    make_plan: Callable[[Exception | None], Plan],
) -> tuple[Plan, Facts]:
    """What was left of a survey in which some rank did not wait: collective where the packet says so.

    Raises:
        DistclipError: as `survey` would have, on every rank.
    """
    if header[PROBLEM]:
        raise_together(statement.trouble, plan.group)
    if header[REPLAN]:
        return make_plan(None), Facts(0.0, False, False, lost=True)
    return plan, _facts(plan, header, rows, statement)


def closed(packet: Packet, size: int) -> Tensor:
    """Whether something else than nonfinite gradients forbids the step, as far as the device can tell: bool []."""
    header = packet.header
    found: Tensor = (
        (header[REPLAN] + header[PROBLEM] > 0)
        | (header[GRADIENTS] == 0)
        | _varies(header[SCALE], header[SCALE_SQUARED], size)
        | _varies(header[CONFIG], header[CONFIG_SQUARED], size)
        | _differs(header[PRESENT], header[PRESENT_SHARE])
        | (packet.rows[:, UNREPRESENTABLE] > 0).any()
    )
    return found


def _facts(plan: Plan, header: list[float], rows: list[list[float]], statement: Statement) -> Facts:
    size = plan.world_size
    if _varies(header[SCALE], header[SCALE_SQUARED], size):
        scales = gather_floats([float(statement.scale)], plan.group)[:, 0].tolist()
        raise AgreementError(
            f"the loss scale differs between ranks: {_by_rank(scales)}. Give every rank's GradScaler the same "
            "init_scale and let distclip update all of them"
        )
    if _varies(header[CONFIG], header[CONFIG_SQUARED], size):
        raise AgreementError(arguments_differ(gather_objects(statement.arguments, plan.group)))
    if _differs(header[PRESENT], header[PRESENT_SHARE]):
        _raise_missing(plan, statement.missing)
    lost = bool(header[LATE]) and _any_unrepresentable(rows)
    if lost:
        plan.waits = True  # the next step finds the norm by further collectives, which nobody may be late for
    return read_facts(header, rows, lost)


def read_facts(header: list[float], rows: list[list[float]], lost: bool) -> Facts:
    """What a summed packet says to the host."""
    # for the inf-norm `shared` stays 0 and nothing can be compared
    divergent = any(row[SHARED] > 0 and replicas_differ(row[OWNED], row[SHARED]) for row in rows)
    return Facts(header[ELEMENTS], header[GRADIENTS] > 0, divergent, lost)


def _conclude(
    plan: Plan,
    gradients: Gradients,
    packet: Packet,
    statement: Statement,
    norm_type: float,
    facts: Facts | None,
    *,
    unread: bool = False,
    unrepresentable: bool = False,
    verify: bool = False,
) -> Survey:
    columns = packet.rows.unbind(1)
    nan = torch.where(columns[NAN] > 0, columns[NAN], columns[REPLICA_NAN])
    inf = torch.where(columns[INF] > 0, columns[INF], columns[REPLICA_INF])
    if facts is None:
        norms = power_root(columns[OWNED], norm_type)
    else:
        norms = norms_of(packet, plan, gradients, norm_type, unrepresentable=unrepresentable)
        if verify and not bool((nan + inf).any()) and bool(norms.any()):
            # once per plan, and on all ranks in the same step: everything this depends on came out of the packet
            if has_replicas(plan):
                verify_replicas(plan, gradients)
            plan.verified = True
    return Survey(plan, gradients, packet, statement, norms, nan, inf, facts, unread)


def _any_bad(rows: Sequence[Sequence[float]]) -> bool:
    return any(row[kind] for row in rows for kind in (NAN, INF, REPLICA_NAN, REPLICA_INF))


def _any_unrepresentable(rows: Sequence[Sequence[float]]) -> bool:
    return any(row[UNREPRESENTABLE] for row in rows)


def _missing(gradients: Gradients) -> tuple[int, ...]:
    return tuple(index for index, gradient in enumerate(gradients.local) if gradient is None)


def _varies(total: Any, squares: Any, size: int) -> Any:
    """Whether `size` numbers with this sum and this sum of squares are not all equal; on the host or on the device."""
    return squares * size - total * total > 1e-12 * (1.0 + total * total)


def _differs(present: Any, share: Any) -> Any:
    """Whether a replicated gradient is missing on some of its holders; on the host or on the device."""
    return abs(present - share) > 1e-9 * (1.0 + abs(present))


def _by_rank(values: list[float]) -> str:
    shown = ", ".join(f"{value:g} on rank {rank}" for rank, value in enumerate(values[:8]))
    return shown + (", ..." if len(values) > 8 else "")


def _raise_missing(plan: Plan, missing: Sequence[int]) -> None:
    """Name the replicated parameters that have a gradient on some of their holders only."""
    entries = [plan.entries[index] for index in missing]
    without = [(entry.name, entry.holders) for entry in entries if len(entry.holders) > 1]
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
