"""The handshake: ranks compare the fingerprints of their layout classes, once, and learn who holds what.

Two classes with equal structure and equal content are the same elements, wherever they lie: inside a mesh, in another
copy of the mesh, or on ranks without any mesh. Equal structure with unequal content means that replicas drifted apart
or that a stage or expert was not declared: a `LayoutError`, never a guess. A class that must be everywhere (plain
tensors) and is missing on a rank is one as well.

What travels: one row of six integers per rank, then 16 bytes per rank and layout class. Only classes that disagree
exchange numbers per parameter, and only names that end up in the error travel as text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from distclip.errors import ConfigError, LayoutError
from distclip.plan.collectives import gather_integers, gather_objects, raise_together
from distclip.plan.fingerprint import combine, content_of, structure_of
from distclip.plan.layout import Layout

_SHOWN = 10


@dataclass(frozen=True)
class Member:
    """One parameter of a layout class, as the handshake needs it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    local: Tensor


@dataclass(frozen=True)
class LayoutClass:
    """Parameters of one layout, in plan order."""

    layout: Layout
    members: tuple[Member, ...]

    def structure(self) -> int:
        """What the class is: names, order, shapes, dtypes and which elements lie here."""
        return structure_of((self.layout.identity, [(m.name, m.shape, m.dtype) for m in self.members]))

    def content(self) -> int:
        """What the class holds."""
        return combine([content_of(member.local) for member in self.members])


def holders_of(
    classes: Sequence[LayoutClass],
    problem: Exception | None,
    arguments: dict[str, str],
    group: dist.ProcessGroup | None,
) -> tuple[list[tuple[int, ...]], Tensor]:
    """Exchange fingerprints; for every class of this rank return the ranks that hold the same elements, ascending.

    Also returns the table of all ranks' class identities (see `Plan.class_table`). `problem` is what went wrong on
    this rank before: then every rank raises it. `arguments` are what must be given alike on all ranks, as text.

    Raises:
        ConfigError: arguments differ between ranks, or no rank has a parameter.
        LayoutError: replicas differ, or a plain tensor is not on all ranks.
    """
    count = sum(len(item.members) for item in classes)
    header = gather_integers([problem is not None, len(classes), structure_of(sorted(arguments.items())), count], group)
    if header[:, 0].any():
        raise_together(problem, group)
    if (header[:, 2] != header[0, 2]).any():
        raise ConfigError(arguments_differ(gather_objects(arguments, group)))
    if not header[:, 3].any():
        raise ConfigError(
            "source has no parameters on any rank: pass the module whose gradients are to be clipped, after its "
            "parameters were made"
        )
    width = int(header[:, 1].max())
    structures = [item.structure() for item in classes]
    contents = [item.content() for item in classes]
    row = [number for pair in zip(structures, contents, strict=True) for number in pair]
    everywhere = [int(item.layout.everywhere) for item in classes]
    table = gather_integers(row + [0] * (2 * width - len(row)) + everywhere + [0] * (width - len(classes)), group)

    by_structure: dict[int, dict[int, int]] = defaultdict(dict)
    must_be_everywhere: set[int] = set()
    for rank, numbers in enumerate(table.tolist()):
        for index in range(int(header[rank, 1])):
            by_structure[numbers[2 * index]][rank] = numbers[2 * index + 1]
            if numbers[2 * width + index]:
                must_be_everywhere.add(numbers[2 * index])
    world_size = table.shape[0]
    # Computed from the table alone, which is the same everywhere: all ranks come to the same conclusion.
    disputed = {
        structure
        for structure, content_by_rank in by_structure.items()
        if len(set(content_by_rank.values())) > 1
        or (structure in must_be_everywhere and len(content_by_rank) < world_size)
    }
    if disputed:
        mine = [item for item, structure in zip(classes, structures, strict=True) if structure in disputed]
        _raise_dispute(mine, group)
    holders = [tuple(sorted(by_structure[structure])) for structure in structures]
    return holders, table[:, : 2 * width : 2].contiguous()


def arguments_differ(arguments: list[dict[str, str]]) -> str:
    """The text of an error that names the first argument with several values, and who gave which."""
    for name in arguments[0]:
        values: dict[str, list[int]] = defaultdict(list)
        for rank, given in enumerate(arguments):
            values[given.get(name, "missing")].append(rank)
        if len(values) > 1:
            told = ", ".join(f"{value} on {_on(ranks)}" for value, ranks in values.items())
            return f"{name} must be the same on every rank, but is {told}"
    return "arguments must be the same on every rank"


def _raise_dispute(classes: Sequence[LayoutClass], group: dist.ProcessGroup | None) -> None:
    """Find by per-parameter numbers which parameters differ, and raise their names on every rank."""
    members = [(item.layout, member) for item in classes for member in item.members]
    numbers = [
        number
        for layout, member in members
        for number in (
            structure_of((layout.identity, member.name, member.shape, member.dtype)),
            content_of(member.local),
        )
    ]
    lengths = gather_integers([len(numbers)], group)
    table = gather_integers(numbers + [0] * (int(lengths.max()) - len(numbers)), group).tolist()
    where: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, row in enumerate(table):
        for index in range(0, int(lengths[rank]), 2):
            where[row[index]][rank] = row[index + 1]
    world_size = len(table)
    telling: list[str] = []
    for index, (layout, member) in enumerate(members):
        content_by_rank = where[numbers[2 * index]]
        own = min(content_by_rank) == (dist.get_rank(group) if group is not None else 0)
        if not own or len(telling) == _SHOWN:
            continue  # the lowest holder tells, so that a name comes once
        if len(set(content_by_rank.values())) > 1:
            telling.append(
                f"{member.name!r} ({layout.scheme}) holds different values on {_on(sorted(content_by_rank))}"
            )
        elif layout.everywhere and len(content_by_rank) < world_size:
            shape = "x".join(map(str, member.shape)) or "scalar"
            telling.append(f"{member.name!r} ({shape}, {member.dtype}) is only on {_on(sorted(content_by_rank))}")
    told = [text for texts in gather_objects(telling, group) for text in texts]
    if not told:
        told = ["the same parameters come in another order"]
    more = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    raise LayoutError(
        f"the ranks do not hold the same plain or replicated parameters: {'; '.join(told[:_SHOWN])}{more}. Replicas "
        "that lost synchronisation must be synchronised first; parameters of a pipeline stage need pipeline_group=, "
        "parameters that only this rank has (experts) need owned=, ranks that do not belong to this model need group="
    )


def _on(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
