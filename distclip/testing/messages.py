"""What the pool and a rank say to each other: a `Job` there, `Returned` or `Raised` back."""

from __future__ import annotations

from dataclasses import dataclass

from distclip.testing.shipping import FunctionReference


@dataclass(frozen=True)
class Job:
    """One call of a function, as it is sent to one rank."""

    number: int
    rank: int
    world_size: int
    store: str
    """Path of the file in which the ranks of this job find each other; does not exist yet."""
    function: FunctionReference
    arguments: bytes
    """Pickled (args, kwargs); unpickled only after the function's file was loaded, for classes that live in it."""
    deadline: float
    """Seconds that the pool will wait."""
    search_path: list[str]
    """`sys.path` of the pool's process."""


@dataclass(frozen=True)
class Returned:
    """The function returned."""

    value: bytes
    """Pickled."""


@dataclass(frozen=True)
class Raised:
    """The function, or what had to be done around it, raised."""

    error: bytes | None
    """The pickled exception, or None where it would not survive the journey."""
    summary: str
    """Class and message."""
    text: str
    """The traceback."""
