"""The plan: for every parameter its name, its layout over the ranks and its param group, agreed by all ranks.

A plan is made once, from the parameters and not from the gradients that happen to exist, and by all ranks together:

1. `sources` walks the module (or takes parameters) and gives every parameter a clean name and the wrapper it lives in;
2. `layouts` turns wrappers, meshes and placements into an *identity*: which elements of the tensor lie on this rank;
3. `fingerprint` condenses the parameters of one layout class into two 64-bit numbers: what they are, what they hold;
4. `handshake` exchanges those numbers once. Ranks with equal numbers hold the same elements; the lowest owns them.

The result is a `Plan`. It holds no gradient.
"""

from __future__ import annotations

from distclip.plan.build import build_plan
from distclip.plan.plan import Entry, Plan

__all__ = ["Entry", "Plan", "build_plan"]
