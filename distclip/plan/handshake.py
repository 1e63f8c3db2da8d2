"""The handshake: ranks compare the fingerprints of their layout classes, once, and learn who holds what.

Two classes with equal structure and equal content are the same elements, wherever they lie: inside a mesh, in another
copy of the mesh, or on ranks without any mesh. Equal structure with unequal content means that replicas drifted apart
or that a stage or expert was not declared: a `LayoutError`, never a guess. A plain tensor that is missing on a rank is
one as well, and so is a part of a sharded tensor that a rank of its mesh does not know.

What travels: one row of a few integers per rank, then 32 bytes per rank and layout class. Only classes that disagree
exchange numbers per parameter, and only names that end up in the error travel as text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from distclip.errors import ConfigError, LayoutError
from distclip.plan.collectives import gather_integers, gather_objects, raise_together
from distclip.plan.declaration import check_words
from distclip.plan.fingerprint import combine, content_of, structure_of
from distclip.plan.layout import Layout

_SHOWN = 10
_COLUMNS = 4
"""Numbers per layout class: structure, content, common structure, whether it must be everywhere."""


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

    def numbers(self) -> list[int]:
        """The row of this class: see `_COLUMNS`."""
        what = [(member.name, member.shape, member.dtype) for member in self.members]
        content = combine([content_of(member.local) for member in self.members])
        structure = structure_of((self.layout.family, self.layout.coordinate, what))
        if self.layout.by_content:
            structure = combine([structure, content])
        # shapes of FSDP1 shards differ between ranks, names do not
        common = structure_of((self.layout.family, [(name, dtype) for name, _, dtype in what]))
        return [structure, content, common, int(self.layout.everywhere)]


def introduce(
    problem: Exception | None,
    arguments: dict[str, str],
    names: Sequence[str],
    words: Mapping[str, bool],
    group: dist.ProcessGroup | None,
    *,
    other_placements: bool,
    marked: int,
) -> tuple[bool, int]:
    """First exchange: errors, arguments, and what later ones are needed.

    Returns whether any rank has gradients placed unlike their parameters, and the largest number of marked parameters.

    `problem` is what went wrong on this rank before: then every rank raises it. `arguments` are what must be given
    alike on all ranks, as text. `names` are those of this rank's parameters, `words` are `Declaration.words`.

    Raises:
        ConfigError: arguments differ between ranks, no rank has a parameter, or a word means none.
    """
    meaningless = not all(words.values())
    header = gather_integers(
        [
            problem is not None,
            structure_of(sorted(arguments.items())),
            len(names),
            other_placements,
            len(words),
            meaningless,
            marked,
        ],
        group,
    )
    if header[:, 0].any():
        raise_together(problem, group)
    if (header[:, 1] != header[0, 1]).any():
        raise ConfigError(arguments_differ(gather_objects(arguments, group)))
    if not header[:, 2].any():
        raise ConfigError(
            "source has no parameters on any rank: pass the module whose gradients are to be clipped, after its "
            "parameters were made"
        )
    if header[:, 5].any():
        check_words(words, int(header[:, 4].max()), names, group)
    return bool(header[:, 3].any()), int(header[:, 6].max())


def holders_of(
    classes: Sequence[LayoutClass], problem: Exception | None, group: dist.ProcessGroup | None
) -> tuple[list[tuple[int, ...]], Tensor]:
    """Exchange fingerprints; for every class of this rank return the ranks that hold the same elements, ascending.

    Also returns the table of all ranks' class identities (see `Plan.class_table`).

    Raises:
        LayoutError: replicas differ, or a tensor is not known on all ranks where it must be.
    """
    header = gather_integers([problem is not None, len(classes)], group)
    if header[:, 0].any():
        raise_together(problem, group)
    width = int(header[:, 1].max())
    mine = [item.numbers() for item in classes]
    row = [number for numbers in mine for number in numbers]
    table = gather_integers(row + [0] * (_COLUMNS * width - len(row)), group)
    holders, knowing, disputed = match(table, header[:, 1].tolist())
    lonely = {
        numbers[0]
        for item, numbers in zip(classes, mine, strict=True)
        if not set(_peers(item.layout, group)) <= knowing[numbers[2]]
    }
    # What is missing in a mesh only its own ranks can see, so all must hear of it.
    if disputed or bool(gather_integers([len(lonely)], group).any()):
        _raise_dispute(
            [item for item, numbers in zip(classes, mine, strict=True) if numbers[0] in disputed | lonely], group
        )
    return [holders[numbers[0]] for numbers in mine], table[:, ::_COLUMNS].contiguous()


def match(table: Tensor, counts: Sequence[int]) -> tuple[dict[int, tuple[int, ...]], dict[int, set[int]], set[int]]:
    """From all ranks' numbers: structure -> ranks that hold it, common structure -> ranks that know it, and disputes.

    `table` is int64 [ranks, classes * 4], `counts` how many classes each rank has. Computed from the table alone, which
    is the same everywhere, so that all ranks come to the same conclusion; seconds for tens of thousands of ranks.
    """
    contents: dict[int, int] = {}
    holders: dict[int, list[int]] = defaultdict(list)
    knowing: dict[int, set[int]] = defaultdict(set)
    disputed: set[int] = set()
    everywhere: set[int] = set()
    for rank, numbers in enumerate(table.tolist()):
        for at in range(0, counts[rank] * _COLUMNS, _COLUMNS):
            structure, content, common, must = numbers[at : at + _COLUMNS]
            holders[structure].append(rank)
            knowing[common].add(rank)
            if contents.setdefault(structure, content) != content:
                disputed.add(structure)
            if must:
                everywhere.add(structure)
    disputed |= {structure for structure in everywhere if len(holders[structure]) < len(counts)}
    return {structure: tuple(dict.fromkeys(ranks)) for structure, ranks in holders.items()}, knowing, disputed


def _peers(layout: Layout, group: dist.ProcessGroup | None) -> list[int]:
    """The ranks of `group` that must know this class; those outside it (pass group= for a subset) are left out."""
    if group is None:
        return []
    known = {rank: index for index, rank in enumerate(dist.get_process_group_ranks(group))}
    return [known[rank] for rank in layout.peers if rank in known]


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
    mine = [LayoutClass(layout, (member,)).numbers() for layout, member in members]
    numbers = [number for row in mine for number in row]
    lengths = gather_integers([len(numbers)], group)
    table = gather_integers(numbers + [0] * (int(lengths.max()) - len(numbers)), group).tolist()
    contents: dict[int, dict[int, int]] = defaultdict(dict)
    knowing: dict[int, set[int]] = defaultdict(set)
    for rank, row in enumerate(table):
        for at in range(0, int(lengths[rank]), _COLUMNS):
            contents[row[at]][rank] = row[at + 1]
            # plain tensors of other shapes are other tensors; shards of one tensor differ in shape
            knowing[row[at] if row[at + 3] else row[at + 2]].add(rank)
    own = dist.get_rank(group) if group is not None else 0
    telling: list[str] = []
    for (layout, member), (structure, _, common, must) in zip(members, mine, strict=True):
        here = knowing[structure if must else common]
        wanted = set(range(len(table))) if must else set(_peers(layout, group))
        differ = len(set(contents[structure].values())) > 1
        if len(telling) == _SHOWN or min(contents[structure] if differ else here) != own:
            continue  # the lowest holder tells, so that a name comes once
        if differ:
            telling.append(f"{member.name!r} ({layout.scheme}) holds different values on {_on(contents[structure])}")
        elif not wanted <= here:
            shape = "x".join(map(str, member.shape)) or "scalar"
            telling.append(f"{member.name!r} ({shape}, {member.dtype}) is only on {_on(here)}")
    told = [text for texts in gather_objects(telling, group) for text in texts]
    if not told:
        told = ["the same parameters come in another order"]
    more = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    raise LayoutError(
        f"the ranks do not hold the same parameters: {'; '.join(told[:_SHOWN])}{more}. Replicas that lost "
        "synchronisation must be synchronised first; parameters of a pipeline stage need pipeline_group=, parameters "
        "that only this rank has (experts) need owned=, ranks that do not belong to this model need group="
    )


def _on(where: Iterable[int]) -> str:
    ranks = sorted(where)
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
