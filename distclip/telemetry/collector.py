"""Turns a node's view into the metric families of the catalogue, for prometheus_client.

    registry = CollectorRegistry()
    registry.register(NodeCollector(node))

It has a registry of its own: what a program exposes through prometheus_client's global one is not touched.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from distclip import __version__
from distclip.telemetry.catalogue import METRICS, STATES, Metric
from distclip.telemetry.layout import BUCKETS, NORM_BOUNDS, PHASES
from distclip.telemetry.node import Node, View
from distclip.telemetry.settings import Level

Samples = list[tuple[tuple[str, ...], float]]
"""Values of the labels after `run`, and the value."""

_LE: Final = [*(floatToGoString(bound) for bound in NORM_BOUNDS), "+Inf"]  # type: ignore[no-untyped-call]
_PER_RANK: Final = ("distclip_last_step", "distclip_last_step_timestamp_seconds")
"""Node-level gauges that are replaced by one series per rank at level rank."""


class NodeCollector(Collector):
    """Collects one node; each call reads the ranks' files anew."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._build = {
            "version": __version__,
            "torch": _version("torch"),
            "python": platform.python_version(),
        }

    def describe(self) -> Iterable[Family]:
        """All families, without samples."""
        return [_family(metric) for metric in METRICS]

    def collect(self) -> Iterator[Family]:
        """All families of the view's level that have something to say."""
        begun = time.perf_counter()
        view = self._node.view()
        agent = self._from_agent(view)
        for metric in METRICS:
            if metric.level > view.level:
                continue
            if metric.name == "distclip_collect_duration_seconds":
                agent[metric.name] = [((), time.perf_counter() - begun)]
            family = _family(metric, per_rank=metric.name in _PER_RANK and view.level >= Level.RANK)
            if metric.kind == "summary":
                _add_summary(family, metric, view)
            elif metric.kind == "histogram":
                _add_histogram(family, view)
            elif metric.kind == "info":
                self._add_info(family, metric, view)
            elif isinstance(family, (CounterMetricFamily, GaugeMetricFamily)):
                samples = agent.get(metric.name)
                if samples is None:
                    samples = _counter(metric, view) if metric.kind == "counter" else _gauge(metric, view)
                for labels, value in samples:
                    family.add_metric([view.run, *labels], value)
            if family.samples:
                yield family

    def _from_agent(self, view: View) -> dict[str, Samples]:
        attempt = view.attempt
        phase = next((int(snapshot.value("phase")) for snapshot in view.ranks.values()), 0)
        return {
            "distclip_run_state": [((state,), float(state == view.state)) for state in STATES],
            "distclip_run_phase": [((name,), float(index == phase)) for index, name in enumerate(PHASES)],
            "distclip_run_start_timestamp_seconds": [((), view.started)],
            "distclip_run_end_timestamp_seconds": _known(view.ended),
            "distclip_worker_group_starts_total": [((reason,), float(n)) for reason, n in view.starts.items()],
            "distclip_worker_failures_total": [((kind,), float(n)) for kind, n in view.failures.items()],
            "distclip_worker_restarts_remaining": _known(attempt.restarts_remaining),
            "distclip_worker_restarts_max": _known(attempt.restarts_max),
            "distclip_world_size": _known(attempt.world_size),
            "distclip_world_size_max": _known(attempt.world_size_max),
            "distclip_workers_up": [((), float(sum(view.workers.values())))],
            "distclip_worker_up": [((str(rank),), float(up)) for rank, up in view.workers.items()],
            "distclip_collect_errors_total": [((reason,), float(n)) for reason, n in view.errors.items()],
        }

    def _add_info(self, family: Family, metric: Metric, view: View) -> None:
        assert isinstance(family, InfoMetricFamily)
        if metric.name == "distclip_build_info":
            family.add_metric([view.run], self._build)
        elif metric.name == "distclip_rank_info":
            for rank, snapshot in view.ranks.items():
                labels = {"local_rank": str(snapshot.info.local_rank), "device": snapshot.info.device}
                family.add_metric([view.run], {"rank": str(rank), **labels})
        elif view.ranks:
            info = next(iter(view.ranks.values())).info
            names = {"strategy": info.strategy, "policy": info.policy, "nonfinite": info.nonfinite}
            family.add_metric([view.run], {**names, "norm_type": f"{info.norm_type:g}"})


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # a build that was copied into place


def _family(metric: Metric, per_rank: bool = False) -> Family:
    if metric.kind == "info":
        return InfoMetricFamily(metric.name.removesuffix("_info"), metric.help, labels=["run"])
    labels = ["run", *metric.labels, *(["rank"] if per_rank else [])]
    if metric.kind == "counter":
        return CounterMetricFamily(metric.name, metric.help, labels=labels)
    if metric.kind == "summary":
        return SummaryMetricFamily(metric.name, metric.help, labels=labels)
    if metric.kind == "histogram":
        return HistogramMetricFamily(metric.name, metric.help, labels=labels)
    # A state set is a gauge with one series per state: OpenMetrics' own type wants its label named like the metric.
    return GaugeMetricFamily(metric.name, metric.help, labels=labels)


def _known(value: float | None) -> Samples:
    return [] if value is None else [((), float(value))]


def _counter(metric: Metric, view: View) -> Samples:
    if metric.name == "distclip_nonfinite_steps_applied_total" and not view.sees_optimizer:
        return []
    if metric.labels[:1] == ("rank",):
        return [
            ((str(rank), label) if label else (str(rank),), totals[field])
            for rank, totals in view.rank_totals.items()
            for label, field in metric.fields.items()
        ]
    return [((label,) if label else (), view.run_totals[field]) for label, field in metric.fields.items()]


def _gauge(metric: Metric, view: View) -> Samples:
    field = metric.fields[""]
    values = {rank: snapshot.value(field) for rank, snapshot in view.ranks.items()}
    known = {rank: value for rank, value in values.items() if not math.isnan(value)}
    if not known:
        return []
    if metric.ranks == "each" or (metric.name in _PER_RANK and view.level >= Level.RANK):
        return [((str(rank),), value) for rank, value in known.items()]
    if metric.ranks == "oldest":
        return [((), min(known.values()))]
    if metric.ranks == "largest":
        return [((), max(known.values()))]
    return [((), known[min(known)])]


def _add_summary(family: Family, metric: Metric, view: View) -> None:
    assert isinstance(family, SummaryMetricFamily)
    stem = "step_seconds" if metric.name == "distclip_step_duration_seconds" else "clip_seconds"
    family.add_metric([view.run], int(view.run_totals[f"{stem}_count"]), view.run_totals[f"{stem}_sum"])


def _add_histogram(family: Family, view: View) -> None:
    assert isinstance(family, HistogramMetricFamily)
    buckets = [(le, view.run_totals[name]) for le, name in zip(_LE, BUCKETS, strict=True)]
    family.add_metric([view.run], buckets, view.run_totals["norm_sum"])
