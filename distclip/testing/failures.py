"""How a job on several ranks can fail, and how the failure is told.

`RankFailure` is the one exception that `RankPool.run` raises for a job that went wrong. It holds the original exception
of every rank that raised one, so that a test can say `failure.errors[1]` and look at its type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RankError(RuntimeError):
    """Stands for an exception that could not travel from its rank (not picklable); the text has class and message."""


class RankDied(RuntimeError):
    """The process of a rank ended in the middle of a job: `os._exit`, a signal, a crash in native code."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """As in `subprocess`: the exit status, or minus the number of the signal; None where it is not known."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.exit_code)


class RankHung(TimeoutError):
    """The rank had not finished when the job's time was over."""


class RemoteTraceback(Exception):
    """The traceback in the rank as text: the `__cause__` of an exception that came from a rank."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class RankFailure(RuntimeError):
    """At least one rank of a job raised, died or hung. The text tells the story of each.

    A rank that lost its connection because another one failed is listed too, after the one that failed first.
    """

    def __init__(
        self,
        job: str,
        world_size: int,
        errors: Mapping[int, BaseException],
        texts: Mapping[int, str],
        stopped: Mapping[int, str],
    ) -> None:
        super().__init__(_story(job, world_size, errors, texts, stopped))
        self.errors: dict[int, BaseException] = dict(errors)
        """Rank -> its own exception, `RankDied` or `RankHung`; the rank that failed first comes first."""
        self.stopped: dict[int, str] = dict(stopped)
        """Rank -> stack, for ranks that had raised nothing but were still busy shortly after another one had failed."""


def _story(
    job: str, world_size: int, errors: Mapping[int, BaseException], texts: Mapping[int, str], stopped: Mapping[int, str]
) -> str:
    lines = [f"{len(errors)} of {world_size} ranks failed in {job}"]
    # The same text from every rank is the usual case of a wrong assertion: once is enough.
    by_text: dict[str, list[int]] = {}
    for rank in errors:
        by_text.setdefault(texts[rank], []).append(rank)
    for text, ranks in by_text.items():
        lines += ["", f"--- {_named(ranks)}", text.rstrip()]
    for rank, stack in stopped.items():
        lines += ["", f"--- rank {rank}: still busy after the failure above, stopped here", stack.rstrip()]
    return "\n".join(lines)


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
