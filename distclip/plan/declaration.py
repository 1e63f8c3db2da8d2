"""What a user declares about layouts that no mesh shows: `owned=`, `tied=`, `pipeline_group=`, `param_groups=`.

A word that means no parameter anywhere is a slip of the pen, and what it was meant for would be counted wrongly or
clipped by another limit. One rank alone cannot tell, because a stage or expert can lie on other ranks only; so ranks
that have such a word compare hashes, once per plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist

from distclip.errors import ConfigError
from distclip.plan.collectives import check_group, gather_integers, raise_together
from distclip.plan.fingerprint import structure_of
from distclip.plan.groups import ParamGroups
from distclip.plan.sources import modules_of, names_of


@dataclass(frozen=True)
class Declaration:
    """What the user says about layouts that no mesh shows; equal in effect for functions and the clipper."""

    owned: Sequence[str] | dict[str, dist.ProcessGroup] = ()
    """Patterns of parameters that only this rank has, or pattern -> group over which the copies are the same."""
    tied: Sequence[str | tuple[str, ...]] = ()
    """Parameters that several pipeline stages hold together."""
    pipeline_group: dist.ProcessGroup | None = None
    param_groups: ParamGroups = None

    def problem(self) -> None:
        """Raise TypeError for arguments of the wrong kind."""
        if isinstance(self.owned, str) or isinstance(self.tied, str):
            raise TypeError("owned= and tied= take a list of patterns or names, not a string: write ['experts.*']")
        words = [*self.owned, *(name for item in self.tied for name in ((item,) if isinstance(item, str) else item))]
        for word in words:
            if not isinstance(word, str):
                raise TypeError(f"owned= and tied= take patterns or names, not {type(word).__name__}")
        for group in [self.pipeline_group, *(self.owned.values() if isinstance(self.owned, dict) else ())]:
            check_group("pipeline_group= or owned=", group)

    def owners_of(self, name: str) -> tuple[int, ...] | None:
        """The ranks that hold copies, where `name` is declared owned: all of them, so that no class is mixed."""
        for pattern in self.owned:
            if fnmatchcase(name, pattern):
                if isinstance(self.owned, dict):
                    return tuple(dist.get_process_group_ranks(self.owned[pattern]))
                return (dist.get_rank() if dist.is_initialized() else 0,)
        return None

    def declares(self, name: str) -> bool:
        """Whether something is said of this parameter alone."""
        return self.owners_of(name) is not None or name in self.aliases()

    def aliases(self) -> dict[str, str]:
        """Every name of a tied parameter -> the first of its names."""
        return {
            alias: (item if isinstance(item, str) else item[0])
            for item in self.tied
            for alias in ([item] if isinstance(item, str) else item)
        }

    def words(self, items: list[Any]) -> dict[str, bool]:
        """Every pattern and name, told as in an error -> whether it means a parameter of this rank's source."""
        patterns = {f"owned= pattern {pattern!r}": [pattern] for pattern in self.owned}
        for key, group in self.param_groups.items() if isinstance(self.param_groups, Mapping) else ():
            for pattern in [group.match] if isinstance(group.match, str) else group.match:
                patterns[f"pattern {pattern!r} of param group {key!r}"] = [pattern]
        ties: dict[str, Sequence[str]] = {}
        for item in self.tied:
            names = (item,) if isinstance(item, str) else item
            if modules_of(items):
                ties.update((f"tied= name {name!r}", [name]) for name in names)
            else:  # torch lists a parameter under one name only, whatever other modules call it
                ties[f"tied= name {' or '.join(map(repr, names))}"] = names
        if not patterns and not ties:
            return {}
        here = names_of(items)
        found = {word: any(fnmatchcase(name, pattern) for name in here) for word, (pattern,) in patterns.items()}
        return found | {word: not here.isdisjoint(names) for word, names in ties.items()}


def check_words(words: Mapping[str, bool], most: int, names: Sequence[str], group: dist.ProcessGroup | None) -> None:
    """Raise ConfigError on every rank for a word that means no parameter on any rank; collective.

    `words` are `Declaration.words` of this rank, `most` the number of words of the rank that has most.
    """
    row = [number for word, found in words.items() for number in (structure_of(word), int(found))]
    table = gather_integers(row + [0] * (2 * most - len(row)), group).view(-1, 2).tolist()
    meaningful = {word for word, found in table if found}
    if all(word in meaningful for word, _ in table if word):
        return
    lost = [word for word in words if structure_of(word) not in meaningful]
    problem = ConfigError(
        f"{', '.join(lost)} matches no parameter on any rank; parameters are called {', '.join(map(repr, names[:3]))}"
        f"{', ...' if len(names) > 3 else ''}: see GradientClipper(model).explain() for all names"
    )
    raise_together(problem if lost else None, group)
