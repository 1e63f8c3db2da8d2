"""What a step came to: `StepReport`, for the caller.

Numbers are 0-d tensors that stay on the device until somebody reads them. The questions a loop asks (`should_step`,
`stepped`, `nonfinite`, `skip_reason`) are plain Python values; the first one asked waits once for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

SkipReason = Literal["nonfinite", "no_gradients", "accumulating", "policy"]
"""Why a step must not or did not run. "accumulating": more micro-batches are to come, nothing was measured; "policy":
somebody else skipped a step that was finite, such as DeepSpeed."""


@dataclass(frozen=True)
class GroupReport:
    """One param group in one step: 0-d tensors."""

    norm: Tensor
    """Before clipping: nan if any element is nan, else inf if any is inf."""
    coefficient: Tensor
    nan: Tensor
    """How many elements of the group are nan, over all ranks."""
    inf: Tensor


@dataclass(frozen=True)
class HostReport:
    """A StepReport as plain Python numbers."""

    step: int
    total_norm: float | None
    """None while accumulating, as the next two are."""
    clip_coefficient: float | None
    clipped: bool | None
    nonfinite: bool
    should_step: bool
    stepped: bool | None
    skip_reason: SkipReason | None
    loss_scale: float | None
    param_groups: dict[str, dict[str, float]]


@dataclass
class StepReport:
    """The agreed result of one step; equal on every rank.

    Example:
        >>> import torch, distclip
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> clipper = distclip.GradientClipper(model, optimizer, max_norm=1.0)
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> report = clipper.step()
        >>> report.total_norm.item(), report.stepped
        (5.0, True)
    """

    step: int
    """Counts measured steps from 1."""
    total_norm: Tensor
    """Over everything, before clipping, float64 []."""
    clip_coefficient: Tensor
    """That of the parameters without a limit of their own, float64 []."""
    clipped: Tensor
    """Whether anything was multiplied because of a limit, bool []."""
    loss_scale: Tensor | None
    """The scale that backward used, where a scaler is in use."""
    param_groups: Mapping[str, GroupReport]
    stepped: bool | None = None
    """Whether the optimizer ran; None until a step ran."""
    _nonfinite: Tensor | None = None
    _steps_anyway: bool = False
    """Whether a nonfinite gradient does not stop the step (nonfinite="zero" and "propagate")."""
    _no_gradients: bool = False
    _other_reason: SkipReason | None = None
    """A reason that the gradients do not show."""
    _read: bool | None = field(default=None, repr=False)

    @classmethod
    def accumulating(cls, step: int) -> StepReport:
        """Between accumulation boundaries: no step was due, so all numbers are None; `step` is that of the last one."""
        # The fields promise tensors, so that a loop that steps each time need not ask; one that accumulates asks
        # skip_reason or stepped first.
        nothing: Any = None
        return cls(step, nothing, nothing, nothing, None, {}, _other_reason="accumulating", _read=False)

    @property
    def nonfinite(self) -> bool:
        """Whether any gradient anywhere held nan or inf."""
        if self._read is None:
            self._read = bool(self._nonfinite)
        return self._read

    @property
    def should_step(self) -> bool:
        """Whether the optimizer may step: the same on every rank. Ask it after `clip_()`."""
        if self._no_gradients or self._other_reason is not None:
            return False
        return self._steps_anyway or not self.nonfinite

    @property
    def skip_reason(self) -> SkipReason | None:
        """Why the step must not run, or None if it may."""
        if self._no_gradients or self._other_reason is not None:
            return self._other_reason or "no_gradients"
        return None if self.should_step else "nonfinite"

    def host(self) -> HostReport:
        """All of it as plain numbers; waits once for the device."""
        return HostReport(
            step=self.step,
            total_norm=None if self._other_reason == "accumulating" else float(self.total_norm),
            clip_coefficient=None if self._other_reason == "accumulating" else float(self.clip_coefficient),
            clipped=None if self._other_reason == "accumulating" else bool(self.clipped),
            nonfinite=self.nonfinite,
            should_step=self.should_step,
            stepped=self.stepped,
            skip_reason=self.skip_reason,
            loss_scale=None if self.loss_scale is None else float(self.loss_scale),
            param_groups={
                name: {
                    "norm": float(group.norm),
                    "coefficient": float(group.coefficient),
                    "nan": float(group.nan),
                    "inf": float(group.inf),
                }
                for name, group in self.param_groups.items()
            },
        )
