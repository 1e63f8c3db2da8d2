"""Every metric that an endpoint can show, as data: name, type, labels, level and what a person concludes from it.

The collector builds families from this list and from nothing else; tests of rules and dashboards can ask it whether a
metric that they use exists.

    for metric in METRICS: print(metric.name, metric.kind, metric.labels, metric.help)

Every series also has the label `run`. Run-level series are the same on every node of a run (a step is decided once for
all ranks), so rules and panels use `max by (run)` and never a sum over nodes; the few series that describe one node say
so. Timestamps are Unix time in seconds. A series whose value is not known is absent; nan is never shown.

`field` names the value in a rank's spool file (`layout.FIELDS`) that feeds the metric; for a counter with labels it is
one field per label value. Metrics without it come from the agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from distclip.telemetry.settings import Level

Kind = Literal["counter", "gauge", "info", "stateset", "summary", "histogram"]

Ranks = Literal["lowest", "oldest", "largest", "each"]

STATES: Final = ("initializing", "rendezvous", "running", "restarting", "succeeded", "failed", "stopped")
START_REASONS: Final = ("initial", "failure", "membership")
FAILURE_KINDS: Final = ("exit", "signal", "exception")


@dataclass(frozen=True)
class Metric:
    """One metric; `name` is the full one that a query uses (for a summary or histogram, without `_count` and so on)."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    level: Level = Level.NODE
    fields: Mapping[str, str] = field(default_factory=dict)
    """Label value (of the last label; "" where there is none) to spool field."""
    ranks: Ranks = "lowest"
    """For a gauge from the spool: which of the node's ranks speaks for the node."""


def _counter(name: str, help: str, spool_field: str) -> Metric:
    return Metric(f"distclip_{name}_total", "counter", help, fields={"": spool_field})


def _gauge(name: str, help: str, spool_field: str | None = None, ranks: Ranks = "lowest") -> Metric:
    return Metric(f"distclip_{name}", "gauge", help, fields={"": spool_field} if spool_field else {}, ranks=ranks)


METRICS: Final = (
    Metric("distclip_build_info", "info", "Versions of distclip, torch and Python: nodes that differ are suspect."),
    Metric("distclip_run_info", "info", "How this run clips: layouts in its plan, policy, nonfinite mode, norm type."),
    Metric(
        "distclip_rank_info",
        "info",
        "Where a rank lives on this node: find the GPU behind a rank that misbehaves.",
        ("rank", "local_rank", "device"),
        Level.RANK,
    ),
    Metric(
        "distclip_run_state",
        "stateset",
        "What the run is doing, as this node's agent sees it: 1 for the present state. Only `running` makes steps.",
        ("state",),
    ),
    Metric(
        "distclip_run_phase",
        "stateset",
        "What the training loop says it is doing: 1 for the present phase. No steps are due outside `training`.",
        ("phase",),
    ),
    _gauge(
        "run_start_timestamp_seconds",
        "When this node's agent started: later than on other nodes means that it joined late.",
    ),
    _gauge(
        "run_end_timestamp_seconds",
        "When the run ended; absent while it goes on. It ended, it did not vanish.",
    ),
    Metric(
        "distclip_worker_group_starts_total",
        "counter",
        "Starts of the workers and why: `failure` grows when workers die, `membership` when nodes join or leave.",
        ("reason",),
    ),
    Metric(
        "distclip_worker_failures_total",
        "counter",
        "How the first worker to fail on this node ended, once per failed start: a signal is often the memory killer.",
        ("kind",),
    ),
    _gauge("worker_restarts_remaining", "Failures that this node may still have: at 0 the next one ends the run."),
    _gauge(
        "worker_restarts_max", "Failures that the launcher was told to tolerate: with 0 the first one ends the run."
    ),
    _gauge("world_size", "Ranks in this attempt: below distclip_world_size_max the run goes on with fewer."),
    _gauge("world_size_max", "Ranks that the run has when all nodes are there; absent where it is not known."),
    _gauge("workers_up", "Workers alive on this node: one too few died, or is not started yet."),
    Metric(
        "distclip_worker_up",
        "gauge",
        "Whether the process of this rank is alive: 0 names the rank that died.",
        ("rank",),
        Level.RANK,
    ),
    _counter("steps", "Measured steps, repeated ones after a restart included: no growth means no training.", "steps"),
    _counter(
        "clipped_steps",
        "Steps whose gradients were scaled down: near all of them means the limit is the learning rate.",
        "clipped",
    ),
    _counter(
        "nonfinite_steps",
        "Steps with nan or inf in any gradient of any rank: a few are normal with fp16 only.",
        "nonfinite",
    ),
    _counter("zero_gradient_steps", "Steps whose gradient norm was exactly 0: nothing was learned from them.", "zero"),
    _counter(
        "tiny_gradient_steps",
        "Steps with a norm above 0 but below 1e-6, which prints as 0.0: the signal has vanished.",
        "tiny",
    ),
    Metric(
        "distclip_skipped_steps_total",
        "counter",
        "Steps in which the optimizer was not run, and why: each is a batch that was paid for and not used.",
        ("reason",),
        fields={reason: f"skipped_{reason}" for reason in ("nonfinite", "no_gradients", "spike", "policy")},
    ),
    Metric(
        "distclip_streaks_total",
        "counter",
        "Streaks of bad steps that reached 5 nonfinite, 3 zero or 3 tiny in a row: it does not recover by itself.",
        ("kind",),
        fields={kind: f"streak_{kind}" for kind in ("nonfinite", "zero", "tiny")},
    ),
    _counter(
        "nonfinite_steps_applied",
        "Optimizer steps taken with nonfinite gradients: the weights are probably poisoned, go back to a checkpoint. "
        "Absent where distclip does not see the optimizer.",
        "nonfinite_applied",
    ),
    _counter(
        "replica_divergences",
        "Steps in which copies of one gradient differed between ranks: lost synchronisation or corrupt data, and the "
        "weights drift apart.",
        "diverged",
    ),
    Metric(
        "distclip_local_nonfinite_steps_total",
        "counter",
        "Steps in which this rank held nan or inf: the rank that leads is where to look for bad data or hardware.",
        ("rank", "kind"),
        Level.RANK,
        {"nan": "local_nan", "inf": "local_inf"},
    ),
    _gauge(
        "last_step",
        "Latest step of the rank that is furthest behind on this node; per rank at level rank.",
        "last_step",
        "oldest",
    ),
    _gauge(
        "last_step_timestamp_seconds",
        "When the rank that is furthest behind on this node made its latest step; per rank at level rank.",
        "last_step_timestamp",
        "oldest",
    ),
    Metric("distclip_step_duration_seconds", "summary", "Time from step to step: its rate is the speed of training."),
    Metric("distclip_clip_duration_seconds", "summary", "Time inside distclip: what clipping costs of each step."),
    Metric(
        "distclip_clip_wait_seconds_total",
        "counter",
        "Time this rank waited for the others in distclip: the rank that waits least is the slow one.",
        ("rank",),
        Level.RANK,
        {"": "wait_seconds"},
    ),
    _gauge(
        "gradient_norm",
        "Norm of all gradients before clipping, of the latest step in which it was finite: a long rise often comes "
        "before the loss diverges.",
        "norm",
    ),
    Metric(
        "distclip_gradient_norm_observed",
        "histogram",
        "Finite norms before clipping, of every step: shows the spikes and the drift that a sampled gauge misses.",
    ),
    _gauge(
        "gradient_norm_limit",
        "Norm above which gradients are scaled down: far above the usual norm it does nothing; absent without a limit.",
        "limit",
    ),
    _gauge("clip_coefficient", "What gradients were multiplied with: 1 means not clipped.", "coefficient"),
    _gauge(
        "gradient_rms", "Root mean square of a gradient element: comparable between models of different sizes.", "rms"
    ),
    Metric(
        "distclip_local_gradient_norm",
        "gauge",
        "Norm of the finite gradients that this rank holds: one that stands out points to its data or layer.",
        ("rank",),
        Level.RANK,
        {"": "local_norm"},
        "each",
    ),
    _gauge(
        "consecutive_nonfinite_steps",
        "Nonfinite steps in a row, now: above 0 at several scrapes in a row means that it does not recover.",
        "consecutive_nonfinite",
    ),
    _gauge(
        "consecutive_zero_gradient_steps",
        "Steps with a norm of exactly 0 in a row, now: while it grows the run computes and learns nothing.",
        "consecutive_zero",
    ),
    _gauge(
        "missing_gradient_tensors",
        "Parameters without a gradient: above 0, a part of the model takes no part.",
        "missing_tensors",
        "largest",
    ),
    _gauge(
        "loss_scale", "Loss scale of AMP: falling without end means that gradients never become finite.", "loss_scale"
    ),
    _gauge(
        "learning_rate",
        "Learning rate of the optimizer's first param group: 0 explains why nothing changes.",
        "learning_rate",
    ),
    _gauge(
        "loss",
        "Loss given to step(), of the latest step in which it was finite: beside the norm it tells which moved first.",
        "loss",
    ),
    _gauge("collect_duration_seconds", "Time this scrape took: it grows with the ranks of the node, not with steps."),
    Metric(
        "distclip_collect_errors_total",
        "counter",
        "Spool files or folders that a scrape had to skip, and why: while it grows, a rank's values are old.",
        ("reason",),
    ),
    _gauge(
        "rank_report_timestamp_seconds",
        "When the rank heard of least recently on this node last reported: old means that it hangs, or that no steps "
        "are due.",
        "report_timestamp",
        "oldest",
    ),
)
"""All of them, in the order in which the endpoint shows them."""

BY_NAME: Final = {metric.name: metric for metric in METRICS}
