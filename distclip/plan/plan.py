"""The plan itself: entries, buckets, and the table a person can read."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Placement
from torch.nn.parallel import DistributedDataParallel

from distclip.measure import RangeCache
from distclip.measure.ranges import Picker, picker
from distclip.plan.collectives import GroupReference
from distclip.plan.layout import Layout
from distclip.plan.partial import Reduction


@dataclass(frozen=True)
class Entry:
    """One parameter as this rank sees it, and who else holds the same elements."""

    name: str
    layout: Layout
    param_group: int
    """Index into `Plan.param_groups`."""
    holders: tuple[int, ...]
    """Ranks (of the run's group) that hold the same elements, ascending; the first is the owner."""
    local_numel: int
    placements: tuple[Placement, ...] | None
    """Placements its gradient is expected to have, for a DTensor."""
    weight: float
    """A number in [1, 2) made of the name (one for all copies of a tied parameter): marks this entry in sums that show
    on which ranks it has a gradient."""

    def owned_by(self, rank: int) -> bool:
        """Whether `rank` contributes these elements to sums over ranks."""
        return self.holders[0] == rank


@dataclass(frozen=True)
class Bucket:
    """Entries that are measured as one: same param group, same owner, as many holders."""

    param_group: int
    owner: bool
    holders: int
    entries: tuple[int, ...]
    """Indices into `Plan.entries`."""
    cache: RangeCache = field(default_factory=RangeCache, compare=False)
    pick: Picker = field(init=False, compare=False)
    """Takes what belongs to these entries out of a list of all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pick", picker(self.entries))


@dataclass
class Plan:
    """What all ranks agreed about the gradients. Made by `build_plan`; do not make one by hand."""

    entries: tuple[Entry, ...]
    parameters: tuple[Tensor, ...]
    """The entries' parameters. Strong references: a parameter that something refers to weakly cannot be swapped, as
    `Module.to()` does with DTensors. A plan that is kept between function calls has none (functional.py)."""
    buckets: tuple[Bucket, ...]
    param_groups: tuple[str, ...]
    """Names of the param groups, in the order of the packet's slots; the last is "default"."""
    group_reference: GroupReference
    rank: int
    world_size: int
    device: torch.device
    """Where the packet lives: the device that the process group's backend can reduce."""
    classes: tuple[tuple[int, ...], ...]
    """For every layout class of this rank its entries, as indices."""
    class_table: Tensor
    """Identities of the layout classes of all ranks, int64 on the CPU, shape [world size, most classes on a rank],
    padded with 0: equal numbers mean equal elements."""
    other_placements: bool = False
    """Whether any rank of the run has gradients that are placed unlike their parameters; the same on all ranks."""
    reductions: tuple[Reduction, ...] = ()
    """What must be summed over mesh axes before it is measured."""
    ddp: tuple[weakref.ReferenceType[DistributedDataParallel], ...] = ()
    fsdp2: tuple[weakref.ReferenceType[FSDPModule], ...] = ()
    """FSDP2 units, which are asked whether they synchronise."""
    frozen: tuple[int, ...] = ()
    """Entries whose parameters did not want a gradient when the plan was made."""
    verified: bool = False
    """Whether gradients of replicas were found alike at a first measurement with finite, nonzero norm."""
    waits: bool = False
    """Whether every step must wait for the packet's sum: some power sum was found not to fit into float64, or a factor
    to be too small for a fused optimizer."""

    distributed: bool = field(init=False)
    """What every step would otherwise find out again, here and below: whether any entry is a DTensor."""
    coarse: bool = field(init=False)
    """Whether this rank's first look at some gradients tells nan and inf of whole gradients only."""
    flattened: tuple[int, ...] = field(init=False)
    """Entries that FSDP1 manages."""
    present: float = field(init=False)
    """Sum of the weights of the entries that this rank owns."""
    present_share: float = field(init=False)
    """Sum of (weight / holders) of all entries of this rank."""
    elements: int = field(init=False)
    """Elements that this rank owns."""

    @property
    def is_alive(self) -> bool:
        """Whether the wrappers that the plan asks something in every step still exist."""
        return not any(wrapper() is None for wrapper in self.ddp) and not any(unit() is None for unit in self.fsdp2)

    def __post_init__(self) -> None:
        owned = [entry for entry in self.entries if entry.owned_by(self.rank)]
        self.distributed = any(entry.placements is not None for entry in self.entries)
        self.coarse = any(parameter.device.type not in ("cpu", "meta") for parameter in self.parameters)
        self.flattened = tuple(index for index, entry in enumerate(self.entries) if entry.layout.scheme == "fsdp1")
        self.present = math.fsum(entry.weight for entry in owned)
        self.present_share = math.fsum(entry.weight / len(entry.holders) for entry in self.entries)
        self.elements = sum(entry.local_numel for entry in owned)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The run's process group; None in a single process."""
        return self.group_reference.get()

    @property
    def strategy(self) -> str:
        """The layouts in use, such as "ddp" or "fsdp1+plain"."""
        return "+".join(sorted({entry.layout.scheme for entry in self.entries})) or "empty"

    def explain(self) -> str:
        """The plan as a table: parameter, layout, ranks, param group, holders."""
        rows = [("parameter", "layout", "where", "local elements", "param group", "holders")]
        rows += [
            (
                entry.name,
                entry.layout.kind,
                entry.layout.where,
                f"{entry.local_numel:,}",
                self.param_groups[entry.param_group],
                _ranks(entry.holders, self.world_size),
            )
            for entry in self.entries
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        total = sum(entry.local_numel for entry in self.entries)
        lines.append(
            f"rank {self.rank} of {self.world_size}: {len(self.entries)} parameters, {total:,} local elements, "
            f"layout {self.strategy}"
        )
        return "\n".join(lines)


def _ranks(holders: Sequence[int], world_size: int) -> str:
    if len(holders) == world_size:
        return "all ranks" if world_size > 1 else "rank 0"
    shown = ", ".join(str(rank) for rank in holders[:4])
    return f"{'rank' if len(holders) == 1 else 'ranks'} {shown}{', ...' if len(holders) > 4 else ''}"
