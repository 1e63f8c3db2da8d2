"""Who is to blame: after an agreed nonfinite decision, all ranks exchange ranks, parameters, nan or inf, and counts.

Collective, once per nonfinite step: one row of two integers per rank, then at most ten short broadcasts. Off the hot
path: an ordinary step never comes here.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    owned: list[Culprit] = []
    copies: list[Culprit] = []
    for index, entry in enumerate(plan.entries):
        for gradient in gradients.measurable((index,)):
            nan, inf = count_nonfinite(gradient)
            if not nan + inf:
                continue
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
        counts = [f"{count} {word}" for count, word in ((culprit.nan, "nan"), (culprit.inf, "inf")) if count]
        clauses.append(f"rank {culprit.rank}: {culprit.parameter!r} has {' and '.join(counts)}")
    return "; ".join(clauses) or "no parameter could be named"
