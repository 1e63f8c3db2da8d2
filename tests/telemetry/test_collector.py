from __future__ import annotations

import math
import os

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from distclip.telemetry.catalogue import BY_NAME, METRICS
from distclip.telemetry.collector import NodeCollector
from distclip.telemetry.node import Attempt, Node
from distclip.telemetry.settings import Level
from distclip.telemetry.spool import SpoolWriter
from distclip.telemetry.tally import Streaks, Tally


class Bench:
    """A node with two ranks that can be fed, and its page as a dict."""

    def __init__(self, folder, level, make_info, make_record):
        self.node = Node("r1", level)
        self.registry = CollectorRegistry()
        self.registry.register(NodeCollector(self.node))
        self._folder, self._make_info, self._make_record = folder, make_info, make_record

    def start(self, has_optimizer=True, ranks=(0, 1)):
        self.node.start_attempt(self._folder, "initial", Attempt(2, 4, 3, 3))
        self._ranks = {}
        for rank in ranks:
            writer = SpoolWriter(self._folder, self._make_info(rank, has_optimizer=has_optimizer))
            self._ranks[rank] = (writer, Tally(), Streaks())

    def step(self, rank, step, norm=2.0, **changes):
        writer, tally, streaks = self._ranks[rank]
        tally.add(self._make_record(step, norm, **changes), streaks)
        writer.publish(tally.values)

    def page(self):
        text = generate_latest(self.registry).decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        assert not any(math.isnan(sample.value) for sample in samples)
        return {
            (sample.name, *(value for key, value in sorted(sample.labels.items()) if key != "run")): sample.value
            for sample in samples
            if sample.labels["run"] == "r1"
        }


@pytest.fixture
def bench(tmp_path, make_info, make_record):
    return Bench(tmp_path, Level.NODE, make_info, make_record)


@pytest.fixture
def rank_bench(tmp_path, make_info, make_record):
    return Bench(tmp_path, Level.RANK, make_info, make_record)


def test_counters_exist_at_zero_before_anything_happens(bench):
    page = bench.page()
    for metric in METRICS:
        if metric.kind == "counter" and metric.level == Level.NODE and "applied" not in metric.name:
            labels = [name for name in metric.fields if name] or [()]
            values = [value for (name, *_), value in page.items() if name == metric.name]
            assert values, metric.name
            assert len(values) >= len(labels)
            assert set(values) == {0.0}
    assert page["distclip_gradient_norm_observed_count",] == 0
    assert page["distclip_step_duration_seconds_count",] == 0
    assert page["distclip_run_state", "initializing"] == 1
    assert page["distclip_run_phase", "training"] == 1
    assert ("distclip_gradient_norm",) not in page
    assert ("distclip_run_end_timestamp_seconds",) not in page


def test_a_step(bench):
    bench.start()
    for rank in (0, 1):
        bench.step(rank, 7, 2.0, loss_scale=512.0, missing_tensors=rank, diverged=True)
    page = bench.page()
    expected = {
        ("distclip_steps_total",): 1,
        ("distclip_clipped_steps_total",): 1,
        ("distclip_replica_divergences_total",): 1,
        ("distclip_gradient_norm",): 2,
        ("distclip_gradient_norm_limit",): 1,
        ("distclip_clip_coefficient",): 0.5,
        ("distclip_gradient_rms",): 0.5,
        ("distclip_last_step",): 7,
        ("distclip_last_step_timestamp_seconds",): 1007,
        ("distclip_rank_report_timestamp_seconds",): 1007,
        ("distclip_loss_scale",): 512,
        ("distclip_learning_rate",): 0.1,
        ("distclip_loss",): 3,
        ("distclip_missing_gradient_tensors",): 1,
        ("distclip_step_duration_seconds_sum",): 0.5,
        ("distclip_clip_duration_seconds_sum",): 0.125,
        ("distclip_gradient_norm_observed_bucket", "1.0"): 0,
        ("distclip_gradient_norm_observed_bucket", "3.16"): 1,
        ("distclip_gradient_norm_observed_bucket", "+Inf"): 1,
        ("distclip_gradient_norm_observed_count",): 1,
        ("distclip_gradient_norm_observed_sum",): 2,
        ("distclip_nonfinite_steps_applied_total",): 0,
        ("distclip_run_info", "skip", "2", "fixed", "fsdp2"): 1,
        ("distclip_world_size",): 2,
        ("distclip_world_size_max",): 4,
        ("distclip_worker_restarts_remaining",): 3,
        ("distclip_worker_restarts_max",): 3,
        ("distclip_worker_group_starts_total", "initial"): 1,
        ("distclip_run_state", "running"): 1,
        ("distclip_run_state", "initializing"): 0,
    }
    assert {key: page.get(key) for key in expected} == expected


def test_no_rank_appears_at_level_node(bench):
    bench.start()
    bench.step(0, 1)
    for family in text_string_to_metric_families(generate_latest(bench.registry).decode()):
        for sample in family.samples:
            assert "rank" not in sample.labels


def test_level_rank(rank_bench):
    rank_bench.start()
    rank_bench.node.worker_started(0, os.getpid())
    rank_bench.step(0, 8, local_nan=1)
    rank_bench.step(1, 7)
    page = rank_bench.page()
    expected = {
        ("distclip_last_step", "0"): 8,
        ("distclip_last_step", "1"): 7,
        ("distclip_last_step_timestamp_seconds", "1"): 1007,
        ("distclip_rank_report_timestamp_seconds",): 1007,
        ("distclip_local_nonfinite_steps_total", "nan", "0"): 1,
        ("distclip_local_nonfinite_steps_total", "inf", "1"): 0,
        ("distclip_clip_wait_seconds_total", "1"): 0.0625,
        ("distclip_local_gradient_norm", "0"): 1.5,
        ("distclip_rank_info", "cpu", "1", "1"): 1,
        ("distclip_worker_up", "0"): 1,
        ("distclip_workers_up",): 1,
        ("distclip_steps_total",): 1,
    }
    assert {key: page.get(key) for key in expected} == expected
    assert ("distclip_last_step",) not in page  # one label set per metric


@pytest.mark.parametrize("ranks", [2, 8])
def test_each_level_has_as_many_series_as_the_docs_say(tmp_path, make_info, make_record, ranks):
    sizes = {}
    for level in (Level.NODE, Level.RANK):
        folder = tmp_path / level.name
        folder.mkdir()
        bench = Bench(folder, level, make_info, make_record)
        bench.start(ranks=range(ranks))
        for rank in range(ranks):
            bench.node.worker_started(rank, os.getpid())
            bench.step(rank, 1, loss_scale=1024.0)
        sizes[level] = len(bench.page())
    assert 95 <= sizes[Level.NODE] <= 105  # "about 100, whatever the number of ranks"
    assert sizes[Level.RANK] == sizes[Level.NODE] - 2 + 8 * ranks  # "8 more per rank"; two that are replaced


def test_hundreds_of_ranks_are_collected_well_within_a_scrape(tmp_path, make_info, make_record):
    bench = Bench(tmp_path, Level.RANK, make_info, make_record)
    bench.start(ranks=range(512))
    for rank in range(512):
        bench.step(rank, 1)
    page = bench.page()
    assert page["distclip_last_step", "511"] == 1
    assert page["distclip_collect_duration_seconds",] < 1.0  # a twentieth of it on two free cores


def test_the_oldest_rank_speaks_for_the_node(bench):
    bench.start()
    bench.step(0, 8)
    bench.step(1, 7)
    assert bench.page()["distclip_last_step",] == 7
    assert bench.page()["distclip_last_step_timestamp_seconds",] == 1007


def test_nonfinite_values_never_reach_the_page(bench):
    bench.start()
    bench.step(0, 1, float("nan"), nan=1, loss=float("nan"), clip_coefficient=float("nan"), limit=float("inf"))
    page = bench.page()
    assert page["distclip_nonfinite_steps_total",] == 1
    assert not {("distclip_gradient_norm",), ("distclip_loss",), ("distclip_gradient_norm_limit",)} & set(page)


def test_applied_steps_are_absent_where_nobody_sees_the_optimizer(bench):
    bench.start(has_optimizer=False)
    bench.step(0, 1)
    assert ("distclip_nonfinite_steps_applied_total",) not in bench.page()


def test_phases_and_the_end(bench):
    bench.start()
    writer, tally, _ = bench._ranks[0]
    tally.phase("checkpoint")
    writer.publish(tally.values)
    page = bench.page()
    assert page["distclip_run_phase", "checkpoint"] == 1
    assert page["distclip_run_phase", "training"] == 0
    bench.node.finish("failed")
    page = bench.page()
    assert page["distclip_run_state", "failed"] == 1
    assert page["distclip_run_state", "running"] == 0
    assert page["distclip_run_end_timestamp_seconds",] >= page["distclip_run_start_timestamp_seconds",]


def test_valid_openmetrics_with_helps_and_types(rank_bench):
    rank_bench.start()
    rank_bench.step(0, 1)
    families = {family.name: family for family in parse_openmetrics(generate_openmetrics(rank_bench.registry).decode())}
    for name, family in families.items():
        full = {"counter": f"{name}_total", "info": f"{name}_info"}.get(family.type, name)
        metric = BY_NAME[full]
        assert family.documentation == metric.help
        assert family.type == {"stateset": "gauge"}.get(metric.kind, metric.kind)


def test_one_metric_can_be_asked_for(bench):
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(bench.node))
    page = generate_latest(registry.restricted_registry(["distclip_steps_total"])).decode()
    assert "distclip_steps_total" in page
    assert "distclip_run_state" not in page
