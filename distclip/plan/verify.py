"""The first measurement: do replicas hold the same gradients, not only the same parameters?

Equal initial values (norm layers of ones, zero biases) pass every checksum of parameters, so an undeclared expert or
stage can look like a replica until its first gradient. Once per plan, all ranks compare one number per layout class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from distclip.errors import LayoutError
from distclip.measure import measure
from distclip.plan.collectives import gather_floats, gather_objects
from distclip.plan.gradients import Gradients
from distclip.plan.plan import Plan

TOLERANCE = 1e-5
"""Relative difference of power sums that replicas may have: tensor parallel ranks can differ by rounding."""


def has_replicas(plan: Plan) -> bool:
    """Whether any layout class lies on more than one rank; the same answer on every rank."""
    identities = [number for row in plan.class_table.tolist() for number in set(row) if number]
    return len(identities) != len(set(identities))


def verify_replicas(plan: Plan, gradients: Gradients) -> None:
    """Raise LayoutError, on every rank and with names, where replicas have different gradients.

    Collective over the plan's group. Compares L2 power sums whatever the norm type in use.
    """
    width = plan.class_table.shape[1]
    sums = [_sum(gradients, indices) for indices in plan.classes]
    table = gather_floats(sums + [0.0] * (width - len(sums)), plan.group).tolist()
    by_identity: dict[int, list[float]] = defaultdict(list)
    for identities, row in zip(plan.class_table.tolist(), table, strict=True):
        for identity, value in zip(identities, row, strict=True):
            if identity:
                by_identity[identity].append(value)
    bad = {identity for identity, values in by_identity.items() if _differ(values)}
    if bad:
        _raise(plan, gradients, bad)


def _raise(plan: Plan, gradients: Gradients, bad: set[int]) -> None:
    own = plan.class_table[plan.rank].tolist()
    entries = [index for position, indices in enumerate(plan.classes) if own[position] in bad for index in indices]
    told = [(plan.entries[index].name, plan.entries[index].holders, _sum(gradients, (index,))) for index in entries]
    values: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    for rows in gather_objects(told, plan.group):
        for name, holders, value in rows:
            values[name, holders].append(value)
    names = [(name, holders, found) for (name, holders), found in values.items() if _differ(found)]
    shown = "; ".join(
        f"{name!r}: norms {', '.join(f'{value**0.5:.6g}' for value in found[:4])}{', ...' if len(found) > 4 else ''} "
        f"on ranks {', '.join(map(str, holders[:4]))}{', ...' if len(holders) > 4 else ''}"
        for name, holders, found in names[:10]
    )
    raise LayoutError(
        f"replicas have different gradients in the first step: {shown}. Either gradients are not synchronised "
        "(no_sync, a model that is not wrapped), or the parameter is not a replica: declare it with owned= or "
        "pipeline_group="
    )


def _sum(gradients: Gradients, indices: Sequence[int]) -> float:
    tensors = gradients.measurable(indices)
    return float(measure(tensors, 2.0)[0]) if tensors else 0.0


def _differ(values: Sequence[float]) -> bool:
    return max(values) - min(values) > TOLERANCE * max(values)


def replicas_differ(owned: float, shared: float) -> bool:
    """Whether the two totals of a packet's row differ by more than rounding."""
    return abs(owned - shared) > TOLERANCE * max(owned, shared)
