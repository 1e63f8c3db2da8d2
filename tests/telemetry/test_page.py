"""docs/telemetry.md says what the code does. Run this file as a program to write the page's table of metrics anew."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from distclip.cli.demo_prometheus import find_tool
from distclip.telemetry import settings
from distclip.telemetry.catalogue import BY_NAME, METRICS
from distclip.telemetry.discovery import publish_target
from distclip.telemetry.events import JsonLog
from distclip.telemetry.record import Culprit

PAGE = Path(__file__).parents[2] / "docs" / "telemetry.md"
TABLE = re.compile(r"^\| metric \| .*?\n(?!\|)", re.MULTILINE | re.DOTALL)
SUFFIXES = {"summary": ("_sum", "_count"), "histogram": ("_sum", "_count", "_bucket")}


def table() -> str:
    """The page's table of metrics, as it should be."""
    rows = ["| metric | type | labels | level | what to conclude |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.level.name.lower()} | {metric.help} |")
    return "\n".join(rows) + "\n"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def promtool():
    """`promtool(...)`: run the real one, expect success, return what it printed."""
    program = find_tool("promtool")
    if program is None:
        assert os.environ.get("CI") != "true", "promtool is missing: make tools"
        pytest.skip("promtool is not on this machine and `make tools` could not fetch it")

    def run(*arguments):
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_the_table_is_the_catalogue():
    (found,) = TABLE.findall(PAGE.read_text())
    assert found == table(), f"write it anew with: python {Path(__file__).name}"


def test_every_metric_on_the_page_exists():
    known = set(BY_NAME) | {f"{m.name}{end}" for m in METRICS for end in SUFFIXES.get(m.kind, ())}
    assert set(re.findall(r"\bdistclip_[a-z_]+\b", PAGE.read_text())) - known == set()


def test_the_settings_are_those_of_the_code():
    def rows(text):
        return dict(re.findall(r"^\| `(DISTCLIP_\w+)` \| (.*?) \|", text, re.MULTILINE))

    on_page, in_code = rows(PAGE.read_text()), rows(settings.__doc__)
    assert set(on_page) == set(in_code) == set(re.findall(r'"(DISTCLIP_\w+)"', Path(settings.__file__).read_text()))
    assert on_page["DISTCLIP_PORT"] == f"`{settings.Settings().port}`"
    assert on_page["DISTCLIP_BIND"] == f"`{settings.Settings().bind}`"
    assert on_page["DISTCLIP_LEVEL"] == f"`{settings.Settings().level.name.lower()}`"
    for name in ("SD_DIR", "EVENTS", "STEP_LOG"):
        assert on_page[f"DISTCLIP_{name}"] == "none"
        assert getattr(settings.Settings(), name.lower()) is None


def test_example_lines_are_what_the_logs_write(tmp_path, make_record, make_info):
    examples = [json.loads(block) for block in blocks("json")]
    assert [example["event"] for example in examples] == ["nonfinite", None]
    log = JsonLog(tmp_path / "log.jsonl", examples[0]["run"], events_only=False)
    log.open(make_info())
    for example in examples:
        numbers = {name: float(value) if value in ("nan", "inf") else value for name, value in example.items()}
        numbers["culprits"] = tuple(Culprit(**culprit) for culprit in example["culprits"])
        step, norm = numbers.pop("step"), numbers.pop("total_norm")
        timestamp = numbers.pop("time")
        given = {name: value for name, value in numbers.items() if name not in ("run", "rank", "event")}
        log.record(make_record(step, norm, timestamp=timestamp, **given))
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [list(json.loads(line).items()) for line in lines] == [list(example.items()) for example in examples]


def test_prometheus_finds_runs_with_the_configuration_on_the_page(tmp_path, promtool):
    (configuration,) = blocks("yaml")
    (tmp_path / "prometheus.yml").write_text(configuration)
    publish_target(tmp_path / "targets", "r1", "127.0.0.1", 9519)
    promtool("check", "config", tmp_path / "prometheus.yml")
    printed = promtool("check", "service-discovery", "--timeout=2s", tmp_path / "prometheus.yml", "distclip")
    assert [target["labels"]["__address__"] for target in json.loads(printed)] == ["127.0.0.1:9519"]


def test_queries_on_the_page_are_promql(tmp_path, promtool):
    queries = [
        line.partition("#")[0].strip() for block in blocks("promql") for line in block.splitlines() if line.strip()
    ]
    assert len(queries) >= 4
    rules = [{"record": f"page:query_{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "page", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "rules.yaml")


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
