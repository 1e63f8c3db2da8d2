"""The fixed policy: a limit that does not change from step to step.

Param groups with a limit of their own are clipped by their own norm; all others together by theirs. Everything here
is computed from reduced values only, with the same operations in the same order, so that the result is bit-identical
on every rank. No host synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the norm before dividing, as `torch.nn.utils.clip_grad_norm_` does (torch/nn/utils/clip_grad.py)."""


@dataclass(frozen=True)
class Decision:
    """How much of the gradients may pass. float64 tensors on the packet's device."""

    total_norm: Tensor
    """[], over everything, before clipping: nan if any element is nan, else inf if any is inf."""
    norms: Tensor
    """[param groups], likewise."""
    coefficients: Tensor
    """[param groups], each min(1, limit / (norm + 1e-6)); 1 where nothing may be multiplied."""
    nonfinite: Tensor
    """[], bool."""

    @property
    def clipped(self) -> Tensor:
        """Whether any coefficient is below 1: bool []."""
        return (self.coefficients < 1.0).any()


def decide_fixed(
    norms: Tensor,
    nan: Tensor,
    inf: Tensor,
    limits: Sequence[float | None],
    max_norm: float | None,
    norm_type: float,
    *,
    by_rest: bool = False,
    as_torch: bool = False,
) -> Decision:
    """Decide from the norm of the finite elements and the counts of bad ones, all [param groups].

    `limits` are those of the param groups that have one; `max_norm` holds for all others together; None never clips.
    With `by_rest` the bad elements are about to become 0, so the norm of the rest counts. With `as_torch` a nonfinite
    norm reaches the coefficient as in torch (nan, or 0 for inf). Otherwise nonfinite gradients are not multiplied.

    Example:
        >>> zero = torch.zeros(1, dtype=torch.float64)
        >>> decision = decide_fixed(zero + 5.0, zero, zero, [None], 1.0, 2.0)
        >>> round(decision.coefficients.item(), 6)
        0.2
    """
    nonfinite = ((nan + inf) > 0).any()
    shown = norms if by_rest else norms.masked_fill(inf > 0, torch.inf).masked_fill(nan > 0, torch.nan)
    total = _combine(shown, norm_type)
    # No indexing by lists here: on a device that would copy the list there first.
    groups = [*zip(shown.unbind(), limits, strict=True)]
    rest = [norm for norm, limit in groups if limit is None]
    if rest and max_norm is not None:
        shared = _coefficient(total if len(rest) == len(groups) else _combine(torch.stack(rest), norm_type), max_norm)
    else:
        shared = torch.ones_like(total)
    coefficients = torch.stack([shared if limit is None else _coefficient(norm, limit) for norm, limit in groups])
    if not as_torch and not by_rest:
        coefficients = coefficients.masked_fill(nonfinite, 1.0)
    return Decision(total, shown, coefficients, nonfinite)


def _coefficient(norm: Tensor, limit: float) -> Tensor:
    # clamp keeps nan; a limit of inf gives inf, clamped to 1, but inf / inf would be nan: it never clips
    if limit == float("inf"):
        return torch.ones_like(norm)
    return torch.clamp(limit / (norm + EPSILON), max=1.0)


def _combine(norms: Tensor, norm_type: float) -> Tensor:
    """The norm over several disjoint parts from their norms, without overflow: nan beats inf, inf beats numbers."""
    if norms.numel() == 1:
        return norms[0]
    finite = torch.where(norms.isfinite(), norms, torch.zeros_like(norms))
    combined = finite.amax()
    if not math.isinf(norm_type):
        largest = combined.clamp_min(torch.finfo(torch.float64).tiny)
        combined = largest * ((finite / largest) ** norm_type).sum() ** (1.0 / norm_type)
    combined = torch.where(norms.isinf().any(), torch.full_like(combined, torch.inf), combined)
    return torch.where(norms.isnan().any(), torch.full_like(combined, torch.nan), combined)
