from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from distclip.cli.rules import rule_files, shorten

METRIC = re.compile(r"\bdistclip_\w+")


def _rules() -> list[dict[str, Any]]:
    return [
        rule for file in rule_files() for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]
    ]


def test_promtool_accepts_the_rules(run):
    run("promtool", "check", "rules", *rule_files())


def test_promtool_cases(run, folder):
    """Each alert firing and not firing; the cases are in monitoring/prometheus/tests."""
    cases = sorted((folder / "prometheus" / "tests").glob("*.yaml"))
    assert [case.name for case in cases] == [file.name for file in rule_files()]
    run("promtool", "test", "rules", *cases)


def test_promtool_cases_can_fail(run, folder, tmp_path):
    """A rule that counts nodes instead of events is found out."""
    for part in ("rules", "tests"):
        (tmp_path / part).mkdir()
        for file in (folder / "prometheus" / part).glob("*.yaml"):
            text = file.read_text()
            (tmp_path / part / file.name).write_text(text.replace("max by (run)", "max by (run, instance)"))
    for file in rule_files():
        with pytest.raises(AssertionError, match="FAILED"):
            run("promtool", "test", "rules", tmp_path / "tests" / file.name)


def test_every_alert_has_cases(folder):
    cases = "".join(file.read_text() for file in (folder / "prometheus" / "tests").glob("*.yaml"))
    for rule in _rules():
        assert f'alertname="{rule["alert"]}", alertstate="firing"' in cases
        assert f"alertname: {rule['alert']}" in cases


@pytest.mark.parametrize("rule", _rules(), ids=lambda rule: rule["alert"])
def test_every_metric_is_taken_once_for_the_run(rule):
    """Each node exports the run's series: one that is not inside `max by (run)` alerts once per node."""
    names = METRIC.findall(rule["expr"])
    inside = re.findall(r"max by \(run\)\s*\((?:increase\(|last_over_time\()?(distclip_\w+)", rule["expr"])
    assert names
    assert inside == names
    assert "sum" not in rule["expr"]


@pytest.mark.parametrize("rule", _rules(), ids=lambda rule: rule["alert"])
def test_every_alert_says_what_it_means(rule):
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert "$labels.run" in rule["annotations"]["summary"]


@pytest.mark.parametrize("file", rule_files(), ids=lambda file: file.name)
def test_shortened_rules_are_good_rules(run, tmp_path, file: Path):
    short = tmp_path / file.name
    short.write_text(shorten(file.read_text(), factor=1 / 30, floor=10))
    run("promtool", "check", "rules", short)
