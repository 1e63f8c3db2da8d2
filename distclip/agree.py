"""The packet: the one small vector of fixed length that is summed over all ranks in a step.

It has a header and one row per param group. Its length follows from the number of param groups alone, never from
which gradients a rank happens to have, so that a rank with nothing, or with a problem, can send it all the same.

Sums over ranks are over the run's whole group, whatever the mixture of layouts: the owner of an element contributes
it, so every element counts once. `owned` and `shared` of a row are two ways to add up the same total, by owners only
and by all holders with equal shares; where they differ, replicas do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from distclip.hostcopy import to_device
from distclip.measure import max_abs, measure, measure_on_device, scaled_power_sum
from distclip.plan.gradients import Gradients
from distclip.plan.plan import Plan
from distclip.reduce import all_reduce

HEADER = 13
(
    REPLAN,
    PROBLEM,
    SCALE,
    SCALE_SQUARED,
    CONFIG,
    CONFIG_SQUARED,
    PRESENT,
    PRESENT_SHARE,
    ELEMENTS,
    GRADIENTS,
    LATE,
    COARSE,
    UNVERIFIED,
) = range(HEADER)

ROW = 7
OWNED, NAN, INF, UNREPRESENTABLE, SHARED, REPLICA_NAN, REPLICA_INF = range(ROW)
_MEASURED = slice(OWNED, UNREPRESENTABLE + 1)
"""What `measure` returns, as it is for gradients that this rank owns."""

Marks = Sequence[tuple[tuple[int, ...], Tensor]]
"""Entries of the plan, and for each a number that is nan or inf where its gradient on this rank holds one: fp64."""


@dataclass(frozen=True)
class Packet:
    """The packet after the sum over all ranks. Tensors are float64 on the packet's device."""

    header: Tensor
    """[HEADER]"""
    rows: Tensor
    """[param groups, ROW]"""
    local_rows: Tensor
    """This rank's rows before the sum."""
    amounts: Sequence[Tensor]
    """Of the finite elements that this rank holds, in parts, each []."""
    wait_seconds: float
    marks: Marks
    """Of a late packet, also one that this rank read, to name culprits by when the gradients are gone; else empty."""

    def local_norm(self, norm_type: float) -> Tensor:
        """Norm of the finite elements that this rank holds, []."""
        if not self.amounts:
            return torch.zeros_like(self.header[0])
        stacked = torch.stack(list(self.amounts))
        return stacked.amax() if math.isinf(norm_type) else power_root(stacked.sum(), norm_type)


def exchange(
    plan: Plan | None,
    gradients: Gradients | None,
    *,
    groups: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    norm_type: float,
    scale: float | Tensor,
    config: int,
    problem: bool,
    late: bool = False,
    elementwise: bool = False,
) -> Packet:
    """Measure the local gradients and sum the packet over all ranks: the one collective of an ordinary step.

    Without a plan (not made yet, or not for this source) the rank asks for a new one and contributes nothing. `late`
    says that this rank is not going to read the sum before it steps; `elementwise` is for a second look at gradients
    that hold nan or inf, which a device counts as wholes in its first.
    """
    header = [0.0] * HEADER
    header[REPLAN] = float(gradients is None or gradients.stale)
    header[PROBLEM] = float(problem)
    header[LATE] = float(late)
    header[COARSE] = float(plan is not None and plan.coarse and not elementwise)
    header[UNVERIFIED] = float(plan is not None and not plan.verified)
    header[CONFIG] = float(config)
    header[CONFIG_SQUARED] = float(config) ** 2
    if not isinstance(scale, Tensor):
        header[SCALE], header[SCALE_SQUARED] = scale, scale * scale
    usable = gradients if gradients is not None and not gradients.stale and not problem else None
    if usable is not None:
        header[PRESENT] = usable.present
        header[PRESENT_SHARE] = usable.present_share
        header[ELEMENTS] = float(usable.elements)
        header[GRADIENTS] = float(len(usable.local) - usable.missing)
    local = to_device([*header, *[0.0] * (groups * ROW)], device)
    if isinstance(scale, Tensor):
        local[SCALE] = scale
        local[SCALE_SQUARED] = local[SCALE] ** 2
    rows = local[HEADER:].view(groups, ROW)
    marks: list[tuple[tuple[int, ...], Tensor]] | None = [] if late else None
    amounts = [] if plan is None or usable is None else _fill(rows, plan, usable, norm_type, marks, elementwise)
    local_rows = rows if group is None else rows.clone()
    started = time.perf_counter()
    if group is not None:
        # over all ranks of the run, whatever the layouts: owners contribute, so every element counts once
        all_reduce(local, group)
    waited = time.perf_counter() - started
    return Packet(local[:HEADER], rows, local_rows, amounts, waited, marks or ())


def _fill(
    rows: Tensor,
    plan: Plan,
    gradients: Gradients,
    norm_type: float,
    marks: list[tuple[tuple[int, ...], Tensor]] | None,
    elementwise: bool,
) -> list[Tensor]:
    """Add this rank's part to `rows`, and each gradient's to `marks` if wanted; return the amounts of all buckets."""
    amounts = []
    for bucket in plan.buckets:
        bundle = gradients.bundle(bucket)
        if not bundle.gradients:
            continue
        if marks is None:
            # Waits where a device's number goes to the CPU (gloo): copied without waiting it would be read too early.
            stats = measure(bundle, norm_type, elementwise=elementwise).to(rows.device)
        else:
            stats, each = measure_on_device(bundle.gradients, norm_type)
            marks.append((tuple(index for index in bucket.entries if gradients.local[index] is not None), each))
        # Few operations, in place: on numbers as few as these each costs as much as a small gradient.
        row, amount = rows[bucket.param_group], stats[0]
        amounts.append(amount)
        if math.isinf(norm_type):
            if bucket.owner:
                row[OWNED] = torch.maximum(row[OWNED], amount)
            stats = torch.cat((torch.zeros_like(stats[:1]), stats[1:]))
        else:
            row[SHARED].add_(amount, alpha=1.0 / bucket.holders)
        if bucket.owner:
            row[_MEASURED].add_(stats)
        else:
            row[REPLICA_NAN : REPLICA_INF + 1].add_(stats[1:3])
            row[UNREPRESENTABLE].add_(stats[3])
    return amounts


def norms_of(packet: Packet, plan: Plan, gradients: Gradients, norm_type: float, *, unrepresentable: bool) -> Tensor:
    """Norm of the finite elements of every param group: float64 [param groups], the same bits on every rank.

    One more collective (MAX) for the inf-norm; two (MAX, then SUM of scaled powers) where some rank's power sum does
    not fit into float64, which all ranks see in the packet: `unrepresentable`.
    """
    if math.isinf(norm_type):
        maxima = packet.local_rows[:, OWNED].clone()
        if plan.group is not None:
            # over all ranks; nan cannot get lost here, because it is counted in the packet and not part of the maxima
            all_reduce(maxima, plan.group, dist.ReduceOp.MAX)
        return maxima
    if not unrepresentable:
        return power_root(packet.rows[:, OWNED], norm_type)
    maxima = torch.zeros(len(plan.param_groups), dtype=torch.float64, device=plan.device)
    for bucket in plan.buckets:
        here = max_abs(gradients.measurable(bucket.entries)).to(plan.device)
        maxima[bucket.param_group] = torch.maximum(maxima[bucket.param_group], here)
    if plan.group is not None:
        all_reduce(maxima, plan.group, dist.ReduceOp.MAX)
    sums = torch.zeros_like(maxima)
    for bucket in plan.buckets:
        scale = float(maxima[bucket.param_group])
        if bucket.owner and scale > 0.0:
            tensors = gradients.measurable(bucket.entries)
            sums[bucket.param_group] += scaled_power_sum(tensors, norm_type, scale).to(plan.device)
    if plan.group is not None:
        # over all ranks, owners only, like the packet
        all_reduce(sums, plan.group)
    return maxima * power_root(sums, norm_type)


def power_root(sums: Tensor, norm_type: float) -> Tensor:
    """The norm that belongs to a sum of powers."""
    return sums.sqrt() if norm_type == 2.0 else sums.pow(1.0 / norm_type)
