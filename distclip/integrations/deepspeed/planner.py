"""Plans of a DeepSpeed engine: the layouts carry the names of ZeRO's stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distclip.plan.plan import Plan
from distclip.planner import Planner


class EnginePlanner(Planner):
    """A planner for the parameters, or the stand-ins for partitions, of one engine.

    Args:
        stage: ZeRO's, 0 to 3.
        partitions: whether the items are stand-ins for this rank's partitions.
        arguments: those of `Planner`.
    """

    def __init__(self, stage: int, partitions: bool, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stage, self._partitions = stage, partitions

    def make(self, problem: Exception | None) -> Plan:
        """Plan; collective."""
        plan = super().make(problem)
        entries = []
        for entry in plan.entries:
            layout = replace(entry.layout, scheme=f"zero{self._stage}")
            if self._partitions:
                layout = replace(layout, kind="sharded", where="ZeRO partition")
            entries.append(replace(entry, layout=layout))
        return replace(plan, entries=tuple(entries))

    def check(self) -> None:
        """Nothing to check: DeepSpeed's optimizers hold partitions and copies, never the parameters of the model."""
