"""A clipper's plan: made when the clipper is, and again by all ranks together when one of them sees that it must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distclip.errors import for_all_ranks
from distclip.optimizers import check_coverage
from distclip.plan.build import build_plan
from distclip.plan.collectives import GroupReference
from distclip.plan.declaration import Declaration
from distclip.plan.plan import Plan
from distclip.plan.sources import tensors_of
from distclip.plan.structure import Structure


class Planner:
    """Plans a source for one clipper.

    Args:
        items: what `items_of(source)` gave; whoever changes it must have all ranks plan again.
        group, declaration, arguments: as for `build_plan`.
        optimizers: those that step the source's parameters.
        scaled: whether a GradScaler is in use, so that what is stepped must be unscaled.
    """

    def __init__(
        self,
        items: list[Any],
        group: GroupReference,
        declaration: Declaration,
        arguments: dict[str, str],
        optimizers: Sequence[torch.optim.Optimizer],
        scaled: bool,
    ) -> None:
        self.items = items
        self._group, self._declaration, self._arguments = group, declaration, arguments
        self._optimizers, self._scaled = optimizers, scaled
        self._optimized = 0
        self._structure: Structure | None = None

    def make(self, problem: Exception | None) -> Plan:
        """Plan; collective. `problem` is an error of this rank, which every rank then raises."""
        optimized, structure = self._count_optimized(), None
        if problem is None:
            try:
                structure = Structure(self.items)
                self.check()
            except Exception as error:  # other ranks are waiting, whatever it is
                problem = for_all_ranks(error)
        plan = build_plan(
            self.items, self._group.get(), declaration=self._declaration, problem=problem, arguments=self._arguments
        )
        # Only now: what could not be planned is outdated in the next step as well.
        self._optimized, self._structure = optimized, structure
        return plan

    def check(self) -> None:
        """Whether what is stepped is what is measured.

        Raises:
            ConfigError: it is not.
        """
        # After the first plan only what has a gradient counts: a layer that was removed can stay in the optimizer.
        known, stepping = tensors_of(self.items), self._structure is not None
        check_coverage(known, self._optimizers, self._scaled, stepping=stepping)

    def is_outdated(self) -> bool:
        """Whether parameters were added, removed or wrapped since the plan, in the model or in an optimizer."""
        assert self._structure is not None
        return self._count_optimized() != self._optimized or self._structure.changed(self.items)

    def _count_optimized(self) -> int:
        return sum(len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups)
