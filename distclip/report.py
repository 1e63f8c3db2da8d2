"""What a step came to: `StepReport`, for the caller.

Numbers are 0-d tensors that stay on the device until somebody reads them. The questions a loop asks (`should_step`,
`stepped`, `nonfinite`, `skip_reason`) are plain Python values: a `Verdict`, for which the first one asked waits once if
the host does not have it yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

SkipReason = Literal["nonfinite", "no_gradients", "accumulating", "undecided", "policy"]
"""Why a step must not or did not run. "accumulating": more micro-batches are to come, nothing was measured;
"undecided": a rank needed a new plan or had an error to tell, and no rank waited to hear of it in this step (see
`distclip.late`); "policy": somebody else skipped a step that was finite, such as DeepSpeed."""


@dataclass(frozen=True)
class Verdict:
    """What the host must know about a step."""

    nonfinite: bool
    """Whether any gradient anywhere held nan or inf."""
    skip_reason: SkipReason | None
    """Why the optimizer must not run, or None if it may."""


@dataclass(frozen=True)
class GroupReport:
    """One param group in one step: 0-d tensors."""

    norm: Tensor
    """Before clipping: nan if any element is nan, else inf if any is inf."""
    coefficient: Tensor
    nan: Tensor
    """How many elements of the group are nan, over all ranks; how many gradients hold one where the device decided the
    step without the host (`distclip.late`)."""
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
    _judge: Callable[[], Verdict] = field(repr=False)
    """Gives the verdict; may wait for the device."""
    _stepped: bool | Literal["as decided"] | None = None

    @classmethod
    def accumulating(cls, step: int) -> StepReport:
        """Between accumulation boundaries: no step was due, so all numbers are None; `step` is that of the last one."""
        # The fields promise tensors, so that a loop that steps each time need not ask; one that accumulates asks
        # skip_reason or stepped first.
        nothing: Any = None
        return cls(step, nothing, nothing, nothing, None, {}, lambda: Verdict(False, "accumulating"))

    @cached_property
    def verdict(self) -> Verdict:
        """What the host must know, read once."""
        return self._judge()

    @property
    def nonfinite(self) -> bool:
        """Whether any gradient anywhere held nan or inf."""
        return self.verdict.nonfinite

    @property
    def should_step(self) -> bool:
        """Whether the optimizer may step: the same on every rank. Ask it after `clip_()`."""
        return self.verdict.skip_reason is None

    @property
    def skip_reason(self) -> SkipReason | None:
        """Why the step must not run, or None if it may."""
        return self.verdict.skip_reason

    @property
    def stepped(self) -> bool | None:
        """Whether the optimizer ran; None until a step ran."""
        if self._stepped == "as decided":
            self._stepped = self.should_step
        return self._stepped

    def was_stepped(self, ran: bool | None = None) -> None:
        """Say that a step was due and whether it ran; None: as decided, which is looked up when somebody asks."""
        self._stepped = "as decided" if ran is None else ran

    def host(self) -> HostReport:
        """All of it as plain numbers; waits for the device."""
        accumulating = self.skip_reason == "accumulating"
        return HostReport(
            step=self.step,
            total_norm=None if accumulating else float(self.total_norm),
            clip_coefficient=None if accumulating else float(self.clip_coefficient),
            clipped=None if accumulating else bool(self.clipped),
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
