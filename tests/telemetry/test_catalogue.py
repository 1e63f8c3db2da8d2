from __future__ import annotations

import re

import pytest

from distclip.telemetry.catalogue import BY_NAME, METRICS
from distclip.telemetry.layout import COUNTERS, GAUGES


def test_names_are_unique_and_follow_the_conventions():
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"distclip_[a-z0-9_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert (metric.kind == "info") == metric.name.endswith("_info")
        assert not re.search(r"_(ms|millis|percent|age)\b", metric.name)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_helps_say_something_on_one_line(metric):
    assert "\n" not in metric.help
    assert metric.help.endswith(".")
    assert len(metric.help.split()) >= 5


def test_fields_exist():
    for metric in METRICS:
        assert set(metric.fields.values()) <= set(COUNTERS if metric.kind == "counter" else GAUGES), metric.name


def test_only_allowed_labels():
    allowed = {"rank", "reason", "kind", "state", "phase", "local_rank", "device"}
    for metric in METRICS:
        assert set(metric.labels) <= allowed
