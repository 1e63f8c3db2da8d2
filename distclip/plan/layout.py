"""The layout of one parameter as one rank sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["replicated", "sharded", "partial", "owned"]


@dataclass(frozen=True)
class Layout:
    """Which elements of a tensor this rank holds, in words and as an identity that ranks can compare.

    Parameters with equal layouts form a *layout class*: one pair of fingerprints stands for all of them.
    """

    kind: Kind
    scheme: str
    """Who laid it out: "plain", "ddp", "fsdp1" or "dtensor" (FSDP2, HSDP, tensor parallel)."""
    where: str
    """For people: mesh, placements or sharding strategy."""
    identity: tuple[object, ...]
    """Equal on two ranks exactly if they hold the same elements of tensors of the same name.

    Made of small numbers and strings that mean the same on every rank (mesh shape, placements, coordinate on the
    sharded axes), never of global ranks: a copy of the whole mesh elsewhere must have the same identity.
    """
    everywhere: bool = False
    """Whether every rank of the run must hold it. True for plain tensors, where nothing says otherwise."""
