"""Param groups: parameters that statistics and limits are kept for together.

Given as patterns with limits, or as a function from a parameter's name to a group's name. Whatever no group claims
belongs to "default". All ranks must come to the same list of groups, because it fixes the length of the packet, so the
names that a function gives are agreed when the plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch.distributed as dist

from distclip.errors import ConfigError
from distclip.plan.collectives import gather_integers, gather_objects
from distclip.plan.fingerprint import structure_of

DEFAULT = "default"
"""The group of everything that no other claims."""


@dataclass(frozen=True)
class ParamGroup:
    """Which parameters belong together, and the limit of their norm.

    `match` is a pattern, or several, of clean parameter names (fnmatch: `*`, `?`, `[...]`). With a `max_norm` the group
    is clipped by its own norm; without one it is clipped together with all others, and only its statistics are kept.

    Example:
        >>> ParamGroup(match="*embedding*", max_norm=0.5).claims("model.embedding.weight")
        True
    """

    match: str | Sequence[str]
    max_norm: float | None = None

    def claims(self, name: str) -> bool:
        """Whether a parameter of this name belongs to the group."""
        patterns = [self.match] if isinstance(self.match, str) else self.match
        return any(fnmatchcase(name, pattern) for pattern in patterns)


ParamGroups = Mapping[str, ParamGroup] | Callable[[str], "str | None"] | None
"""What `GradientClipper(param_groups=...)` takes."""


def assign(groups: ParamGroups, names: Sequence[str]) -> list[str]:
    """The group of every parameter: the first that claims it."""
    if groups is None:
        return [DEFAULT] * len(names)
    if isinstance(groups, Mapping):
        return [next((key for key, group in groups.items() if group.claims(name)), DEFAULT) for name in names]
    found = [groups(name) for name in names]
    for name, key in zip(names, found, strict=True):
        if key is not None and not isinstance(key, str):
            raise ConfigError(
                f"param_groups returned {key!r} for {name!r}: it must return a group's name, or None for the default"
            )
    return [DEFAULT if key is None else key for key in found]


def agree(groups: ParamGroups, assigned: Sequence[str], process_group: dist.ProcessGroup | None) -> tuple[str, ...]:
    """The names of all groups, in the same order on every rank; "default" comes last.

    Collective where groups are given.

    Raises:
        ConfigError: earlier groups claim all that a group matches.
    """
    if groups is None:
        return (DEFAULT,)
    if isinstance(groups, Mapping):
        counts = gather_integers([assigned.count(key) for key in groups], process_group).sum(dim=0).tolist()
        for key, count in zip(groups, counts, strict=True):
            if not count:
                raise ConfigError(
                    f"param group {key!r} gets no parameter: all that {groups[key].match!r} matches belongs to groups "
                    "that are named before it. Name it before them, or narrow their patterns"
                )
        return (*groups, DEFAULT)
    mine = sorted(set(assigned) - {DEFAULT})
    hashes = gather_integers([structure_of(mine)], process_group)
    if (hashes == hashes[0]).all():
        return (*mine, DEFAULT)
    # Stages of a pipeline have other parameters and so other groups.
    everyone = gather_objects(mine, process_group)
    return (*sorted({key for keys in everyone for key in keys}), DEFAULT)
