"""Rules, dashboard and runbooks use metrics, labels and label values that an endpoint really has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from distclip.cli.rules import rule_files
from distclip.data import data_path
from distclip.telemetry.catalogue import BY_NAME, FAILURE_KINDS, START_REASONS, STATES
from distclip.telemetry.layout import PHASES

FOLDER = data_path("monitoring")
FILES = sorted(path for path in FOLDER.rglob("*") if path.suffix in {".yaml", ".yml", ".json", ".md"})
RUNBOOKS = sorted((FOLDER / "runbooks").glob("*.md"))
SUFFIXES = {"summary": ("_sum", "_count"), "histogram": ("_sum", "_count", "_bucket")}
SERIES = {name for name, metric in BY_NAME.items() if metric.kind not in SUFFIXES} | {
    name + suffix for name, metric in BY_NAME.items() for suffix in SUFFIXES.get(metric.kind, ())
}
VALUES = {
    ("distclip_run_state", "state"): set(STATES),
    ("distclip_run_phase", "phase"): set(PHASES),
    ("distclip_worker_group_starts_total", "reason"): set(START_REASONS),
    ("distclip_worker_failures_total", "kind"): set(FAILURE_KINDS),
    ("distclip_streaks_total", "kind"): set(BY_NAME["distclip_streaks_total"].fields),
    ("distclip_skipped_steps_total", "reason"): set(BY_NAME["distclip_skipped_steps_total"].fields),
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_every_metric_exists(file: Path):
    assert set(re.findall(r"\bdistclip_\w+", file.read_text())) <= SERIES


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_every_label_exists(file: Path):
    for name, selector in re.findall(r"\b(distclip_\w+)\{([^}]*)\}", file.read_text().replace('\\"', '"')):
        for label, value in re.findall(r'(\w+)\s*(?:=~|!=|=)\s*"([^"]*)"', selector):
            metric = BY_NAME[name]
            assert label in {"run", "instance", *metric.labels}, f"{name} has no label {label}"
            if (name, label) in VALUES:
                assert value in VALUES[name, label], f"{name} has no {label}={value!r}"


@pytest.mark.parametrize("runbook", RUNBOOKS, ids=lambda runbook: runbook.stem)
def test_every_runbook_has_the_four_parts(runbook: Path):
    lines = runbook.read_text().splitlines()
    assert lines[0] == f"# {runbook.stem}"
    headings = [line for line in lines if line.startswith("## ")]
    assert headings == ["## Meaning", "## Impact", "## Diagnosis", "## Mitigation"]
    for link in re.findall(r"\]\(([^)]+)\)", runbook.read_text()):
        assert (runbook.parent / link).is_file()


def test_one_runbook_per_alert():
    rules = [
        rule for file in rule_files() for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]
    ]
    assert {rule["alert"] for rule in rules} == {runbook.stem for runbook in RUNBOOKS}
    for rule in rules:
        assert rule["annotations"]["runbook_url"] == f"runbooks/{rule['alert']}.md"


@pytest.mark.parametrize("runbook", RUNBOOKS, ids=lambda runbook: runbook.stem)
def test_queries_in_runbooks_are_promql(run, tmp_path, runbook: Path):
    queries = [text for text in re.findall(r"`([^`]+)`", runbook.read_text()) if "distclip_" in text]
    rules = [{"record": f"runbook:query_{number}", "expr": text} for number, text in enumerate(queries)]
    assert rules
    file = tmp_path / "runbook.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "runbook", "rules": rules}]}))
    run("promtool", "check", "rules", file)


def test_the_readme_lists_every_alert():
    listed = re.findall(r"\[(Distclip\w+)\]\(runbooks/\1\.md\)", (FOLDER / "README.md").read_text())
    assert sorted(listed) == [runbook.stem for runbook in RUNBOOKS]
