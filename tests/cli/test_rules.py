from __future__ import annotations

import re

import pytest

from distclip.cli.rules import rule_files, shorten


def test_every_duration_is_shortened_but_not_below_the_floor():
    text = """\
# windows: [30m] in a comment too
- alert: A5m
  expr: max by (run) (increase(steps_total{run="5m"}[10m])) > 5 and x offset 1h
  for: 5m
"""
    assert (
        shorten(text, factor=1 / 60, floor=8)
        == """\
# windows: [30s] in a comment too
- alert: A5m
  expr: max by (run) (increase(steps_total{run="5m"}[10s])) > 5 and x offset 60s
  for: 8s
"""
    )


def test_what_is_shorter_than_the_floor_stays():
    assert shorten("for: 30s", factor=0.5, floor=60) == "for: 30s"


def test_parts_of_a_second():
    assert shorten("[5s] [250ms]", factor=0.5, floor=0) == "[2500ms] [125ms]"


def test_factor_one_keeps_the_meaning():
    assert shorten("for: 2h [1d]", factor=1, floor=0) == "for: 7200s [86400s]"


@pytest.mark.parametrize(("factor", "floor"), [(0, 1), (-1, 1), (1.5, 1), (float("nan"), 1), (0.5, -1)])
def test_bad_arguments(factor, floor):
    with pytest.raises(ValueError, match="must be"):
        shorten("for: 5m", factor=factor, floor=floor)


@pytest.mark.parametrize("file", rule_files(), ids=lambda file: file.name)
def test_the_shipped_rules_hold_durations_in_the_known_forms_only(file):
    """Else `shorten` would leave some of them long."""
    text = re.sub(r"#.*", "", file.read_text())
    text = re.sub(r"annotations:.*?(?=- alert|\Z)", "", text, flags=re.DOTALL)
    durations = re.findall(r"\b\d+(?:ms|s|m|h|d|w|y)\b", text)
    assert durations
    shortened = re.findall(r"(?:for: |\[|offset )(\d+(?:ms|s|m|h|d))\b", text)
    assert shortened == durations
    assert "interval:" not in text
