"""The layout of one parameter as one rank sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["replicated", "sharded", "partial", "owned"]


@dataclass(frozen=True)
class Layout:
    """Which elements of a tensor this rank holds, in words and as an identity that ranks can compare.

    Parameters with equal layouts form a *layout class*: a few numbers stand for all of them. Two ranks hold the same
    elements of tensors of the same names exactly if `family` and `coordinate` are equal. Both are made of small numbers
    and strings that mean the same on every rank (mesh shape, placements, coordinate on sharded axes), never of global
    ranks: a copy of the whole mesh elsewhere must look the same.
    """

    kind: Kind
    scheme: str
    """Who laid it out: "plain", "ddp", "fsdp1" or "dtensor" (FSDP2, HSDP, tensor parallel)."""
    where: str
    """For people: mesh, placements or sharding strategy."""
    family: tuple[object, ...] = ()
    """How tensors are split, the same on all ranks that have parts of them."""
    coordinate: tuple[object, ...] = ()
    """Which of the parts lies here."""
    peers: tuple[int, ...] = ()
    """Global ranks that must have parts of the same tensors: those of the mesh or FSDP1 unit."""
    everywhere: bool = False
    """Whether every rank of the run must hold it. True for plain tensors, where nothing says otherwise."""
    by_content: bool = False
    """Whether copies are known by their values alone: experts that carry a mark but no group."""
