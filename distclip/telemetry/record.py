"""What one step looks like to telemetry: plain host values, no tensors, nothing that needs torch.

`StepRecord` is the only thing that flows from the clipper into telemetry. `Sink` is what receives it: the spool
(rank -> node -> Prometheus), the event log, the step log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Culprit:
    """One parameter of one rank whose gradient held nan or inf."""

    rank: int
    parameter: str
    nan: int | None
    """Elements that are nan on that rank; None: some, not counted."""
    inf: int | None
    """Likewise for inf."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One measured step, as host values. Norms may be nan or inf here; sinks decide what they export."""

    step: int
    """Counts measured steps of this process from 1; goes on over restarts when the clipper's state is loaded."""
    timestamp: float
    """Unix time in seconds at the end of the step."""
    total_norm: float
    """Norm over everything before clipping: nan if any element is nan, else inf if any is inf."""
    limit: float | None
    """max_norm, or None when only measuring."""
    clip_coefficient: float
    clipped: bool
    nan: int
    """Bad elements over all ranks, each at its owner; those on replicas count only where no owner has one. Where
    a device decided the step without the host (`distclip.late`), gradients with such elements; so are the two below."""
    inf: int
    local_nan: int
    """Bad elements on this rank."""
    local_inf: int
    local_norm: float
    """Norm of the finite elements that this rank holds."""
    stepped: bool | None
    """Whether the optimizer ran; None where distclip does not know (functional calls, `clip_`)."""
    skip_reason: str | None
    """None, "nonfinite", "no_gradients", "undecided", "spike" or "policy"."""
    elements: int
    """Gradient elements over the whole run that were measured, each once; norm / sqrt(elements) is the RMS."""
    missing_tensors: int
    """Parameters without a gradient on this rank."""
    loss_scale: float | None
    learning_rate: float | None
    loss: float | None
    step_seconds: float | None
    """Time since the previous record of this clipper; None for the first."""
    clip_seconds: float
    """Time spent inside distclip in this step."""
    wait_seconds: float
    """Part of it spent waiting in the packet's all-reduce."""
    diverged: bool = False
    """Whether replicas had different gradients in this step: lost synchronisation or corrupt data."""
    culprits: tuple[Culprit, ...] = ()
    """At most 10, over all ranks, when the step was nonfinite; the same on every rank."""

    @property
    def nonfinite(self) -> bool:
        """Whether any element anywhere was nan or inf."""
        return self.nan + self.inf > 0


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What does not change from step to step; becomes `distclip_run_info` and `distclip_rank_info`."""

    rank: int
    local_rank: int
    world_size: int
    device: str
    strategy: str
    """Layouts in the plan, such as "fsdp2" or "ddp"."""
    policy: str
    """Such as "fixed"."""
    nonfinite: str
    """The nonfinite mode, such as "skip"."""
    norm_type: float
    torch_version: str
    has_optimizer: bool
    """Whether distclip sees optimizer steps, so that applied nonfinite steps can be counted."""


class Sink(Protocol):
    """Receives what happens in this rank. No method may raise, block or take long."""

    def open(self, info: RunInfo) -> None:
        """Called once before the first record (and again when the plan changes)."""

    def record(self, record: StepRecord) -> None:
        """Called once for each measured step."""

    def nonfinite_applied(self) -> None:
        """An optimizer stepped with gradients that were known to be nonfinite: weights are probably poisoned."""

    def phase(self, name: str) -> None:
        """Whether steps are due: "training", "evaluation", "checkpoint" or "other"."""

    def close(self) -> None:
        """The clipper or the process is going away."""
