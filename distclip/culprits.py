"""Who is to blame: after an agreed nonfinite decision, all ranks exchange ranks, parameters, nan or inf, and counts.

Collective, once per nonfinite step: one row of two integers per rank, then at most ten short broadcasts. Off the hot
path: an ordinary step never comes here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from distclip.agree import Marks
from distclip.measure import count_nonfinite
from distclip.plan.collectives import broadcast_object, gather_integers
from distclip.plan.gradients import Gradients
from distclip.plan.plan import Plan
from distclip.telemetry.record import Culprit

SHOWN = 10
"""How many parameters an error or event names."""


def find_culprits(plan: Plan, gradients: Gradients) -> tuple[Culprit, ...]:
    """At most `SHOWN` culprits over all ranks, lowest ranks first; the same tuple on every rank.

    A replicated gradient is named on its owner; on another holder only if no owner of anything found a bad element.
    """
    return _exchange(plan, _count(plan, gradients))


def mark(plan: Plan, gradients: Gradients) -> Marks:
    """What a late packet would have kept of these gradients: for a rank that read a packet others were late for."""
    found = _count(plan, gradients)
    each = [math.nan if nan else math.inf if inf else 0.0 for nan, inf in found.values()]
    return ((tuple(found), torch.tensor(each, dtype=torch.float64, device="cpu")),)


def find_marked(plan: Plan, marks: Marks) -> tuple[Culprit, ...]:
    """As `find_culprits`, from what a late packet keeps of each gradient when the gradients are gone.

    Which it was is known then, but not how many elements: counts are None where there are some.
    """
    found: dict[int, tuple[int | None, int | None]] = {}
    for indices, each in marks:
        for index, value in zip(indices, each.tolist(), strict=True):
            if not math.isfinite(value):
                found[index] = (None, 0) if math.isnan(value) else (0, None)
    return _exchange(plan, found)


def _count(plan: Plan, gradients: Gradients) -> dict[int, tuple[int, int]]:
    """Entry -> elements of its gradient on this rank that are nan, and that are inf."""
    return {
        index: count_nonfinite(gradient)
        for index in range(len(plan.entries))
        for gradient in gradients.measurable((index,))
    }


def _exchange(plan: Plan, found: Mapping[int, tuple[int | None, int | None]]) -> tuple[Culprit, ...]:
    """Collective. `found`: entry -> its elements on this rank that are nan, and that are inf."""
    owned: list[Culprit] = []
    copies: list[Culprit] = []
    for index, (nan, inf) in sorted(found.items()):
        if nan == inf == 0:
            continue
        entry = plan.entries[index]
        (owned if entry.owned_by(plan.rank) else copies).append(Culprit(plan.rank, entry.name, nan, inf))
    table = gather_integers([len(owned), len(copies)], plan.group)
    column = 0 if bool(table[:, 0].any()) else 1
    mine = (owned, copies)[column]
    result: list[Culprit] = []
    for rank in table[:, column].nonzero().flatten().tolist():
        result += broadcast_object(mine[:SHOWN], rank, plan.group)
        if len(result) >= SHOWN:
            break
    return tuple(result[:SHOWN])


def describe(culprits: Sequence[Culprit]) -> str:
    """One clause per culprit, for errors and logs."""
    clauses = []
    for culprit in culprits:
        kinds = ((culprit.nan, "nan"), (culprit.inf, "inf"))
        counts = [word if count is None else f"{count} {word}" for count, word in kinds if count != 0]
        clauses.append(f"rank {culprit.rank}: {culprit.parameter!r} has {' and '.join(counts)}")
    return "; ".join(clauses) or "no parameter could be named"
