"""Take the local gradients of a plan, in a step: no copy and no wait; a collective only for Partial gradients.

Whatever is wrong here is not raised but returned: the rank still takes part in the packet, and all ranks learn of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distclip.errors import DistclipError, LayoutError
from distclip.measure import Bundle
from distclip.plan import ddp
from distclip.plan.dtensor import local_of, synchronises
from distclip.plan.fsdp1 import is_unsynchronised
from distclip.plan.partial import reduce_partials
from distclip.plan.plan import Bucket, Plan


@dataclass(frozen=True)
class Gradients:
    """The local gradients of one step on one rank."""

    local: list[Tensor | None]
    """For every entry of the plan its local gradient, or None: what is multiplied."""
    summed: dict[int, Tensor]
    """For entries with Partial gradients the sum over the ranks' addends: what is measured in their place."""
    present: float
    """Sum of the weights of entries that this rank owns and that have a gradient."""
    present_share: float
    """Sum of (weight / holders) over all entries of this rank that have a gradient; equals `present` over all ranks
    unless a replicated gradient is missing on some of its holders only."""
    elements: int
    """Elements of gradients that this rank owns."""
    missing: int
    """Entries without a gradient on this rank."""
    stale: bool
    """Whether the plan no longer fits and all ranks must plan again."""
    problem: DistclipError | None
    """What this rank must tell the others before anyone goes on."""

    _bundles: dict[int, Bundle] = field(default_factory=dict, repr=False)

    def bundle(self, bucket: Bucket) -> Bundle:
        """The gradients of a bucket as they are measured."""
        found = self._bundles.get(id(bucket))
        if found is None:
            all_local = not self.summed and not self.missing
            measurable = bucket.pick(cast(list[Tensor], self.local)) if all_local else self.measurable(bucket.entries)
            # sums are made anew in every step, so there is nothing to remember of them
            found = Bundle(measurable, None if self.summed else bucket.cache)
            self._bundles[id(bucket)] = found
        return found

    def writable(self, bucket: Bucket, without: frozenset[int]) -> list[Tensor] | Bundle:
        """The gradients of a bucket as they are multiplied, except those of some entries."""
        if not self.summed and not without:
            return self.bundle(bucket)
        found = [self.local[index] for index in bucket.entries if index not in without]
        return [gradient for gradient in found if gradient is not None]

    def measurable(self, indices: Sequence[int]) -> list[Tensor]:
        """The gradients of these entries as they are measured: sums in place of addends."""
        if not self.summed:
            local = self.local
            return [gradient for index in indices if (gradient := local[index]) is not None]
        found = [self.summed.get(index, self.local[index]) for index in indices]
        return [gradient for gradient in found if gradient is not None]


@torch.no_grad()
def take(plan: Plan) -> Gradients:
    """Read `.grad` of every parameter of the plan.

    Runs in every step over thousands of parameters, so what is the same for all is done by built-in functions and only
    what needs a look (DTensor, FSDP1, missing) goes one by one.
    """
    parameters = plan.parameters
    local = [parameter.grad for parameter in parameters]
    problem = _backward_problem(plan)
    stale = False
    kinds = set(map(type, local))
    if DTensor in kinds or plan.distributed:
        for index, gradient in enumerate(local):
            if gradient is None:
                continue
            entry = plan.entries[index]
            if not isinstance(gradient, DTensor):
                if entry.placements is not None and isinstance(parameters[index], DTensor):
                    problem = problem or _plain_gradient(entry.name)
                stale = stale or (entry.placements is not None and not isinstance(parameters[index], DTensor))
                continue
            stale = stale or gradient.placements != entry.placements
            local[index] = local_of(gradient)
    for index in plan.flattened:
        gradient = local[index]
        if gradient is not None and is_unsynchronised(parameters[index], gradient):
            problem = problem or _unsynchronised("FSDP1's no_sync()")
    present, present_share, elements = plan.present, plan.present_share, plan.elements
    missing = [index for index, gradient in enumerate(local) if gradient is None] if type(None) in kinds else []
    for index in missing:
        entry = plan.entries[index]
        present_share -= entry.weight / len(entry.holders)
        if entry.owned_by(plan.rank):
            present -= entry.weight
            elements -= entry.local_numel
    if any(parameters[index].requires_grad for index in plan.frozen):
        stale = True  # a parameter that was frozen when the plan was made wants a gradient now
    # A stale or troubled rank takes part all the same: the others of its mesh axes are waiting there.
    summed = reduce_partials(plan.reductions, local)
    return Gradients(local, summed, present, present_share, elements, len(missing), stale, problem)


def _backward_problem(plan: Plan) -> DistclipError | None:
    """An error if the wrappers say that the last backward did not reduce gradients."""
    for reference in plan.ddp:
        module = reference()
        if module is not None:
            ddp.check_join(module)
        if module is not None and not ddp.synchronised(module):
            return _unsynchronised("DistributedDataParallel.no_sync()")
    for unit_reference in plan.fsdp2:
        unit = unit_reference()
        if unit is not None and not synchronises(unit):
            return _unsynchronised("FSDP2's set_requires_gradient_sync(False)")
    return None


def _plain_gradient(name: str) -> LayoutError:
    return LayoutError(
        f"gradient of {name!r} is a plain tensor although the parameter is a DTensor: assign a DTensor with the "
        "parameter's mesh, or leave it to backward"
    )


def _unsynchronised(how: str) -> LayoutError:
    return LayoutError(
        f"gradients are not synchronised: the last backward ran under {how}. Clip only after the backward of the last "
        "micro-batch, which synchronises"
    )
