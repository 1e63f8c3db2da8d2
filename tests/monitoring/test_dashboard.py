from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from distclip.telemetry.catalogue import STATES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dashboard(folder) -> dict[str, Any]:
    return json.loads((folder / "grafana" / "dashboards" / "distclip.json").read_text())


@pytest.fixture(scope="module")
def expressions(dashboard) -> list[str]:
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return queries + [annotation["expr"] for annotation in dashboard["annotations"]["list"]]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="grafana-foundation-sdk needs Python 3.11")
def test_is_what_the_script_makes(folder):
    script = runpy.run_path(str(ROOT / "tools" / "make_dashboard.py"))
    committed = folder / "grafana" / "dashboards" / "distclip.json"
    assert script["TARGET"] == committed
    assert script["render"]() == committed.read_text(), "run: make dashboard"


def test_has_what_a_person_looks_for(dashboard):
    titles = {panel["title"]: panel for panel in dashboard["panels"]}
    assert {"State", "Age of the last step", "Gradient norm and limit", "Events", "Clipped share"} <= set(titles)
    norm = titles["Gradient norm and limit"]
    assert norm["fieldConfig"]["defaults"]["custom"]["scaleDistribution"] == {"type": "log", "log": 10}
    assert len(norm["targets"]) == 2
    assert [(variable["name"], variable["type"]) for variable in dashboard["templating"]["list"]] == [
        ("datasource", "datasource"),
        ("run", "query"),
    ]


def test_panels_are_apart_and_queries_have_names_of_their_own(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells
        names = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(names)) == len(names)
        assert all(names)


def test_every_panel_follows_the_variables(dashboard):
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "$datasource"}
            assert panel["description"]
        for target in panel.get("targets", []):
            selectors = re.findall(r"distclip_\w+\{([^}]*)\}", target["expr"])
            assert len(selectors) == len(re.findall(r"distclip_\w+", target["expr"]))
            assert all('run=~"$run"' in selector for selector in selectors)
            assert "max by (run" in target["expr"]


def _plain(expression: str) -> str:
    """The expression as Prometheus gets it."""
    plain = expression.replace("$__rate_interval", "1m").replace("$run", "a|b")
    assert "$" not in plain
    return plain


def test_promtool_accepts_every_expression(run, tmp_path, expressions):
    rules = [{"record": f"panel:query_{number}", "expr": _plain(text)} for number, text in enumerate(expressions)]
    assert len(rules) > 10
    file = tmp_path / "dashboard.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run("promtool", "check", "rules", file)


def test_no_query_gives_nan_while_nothing_happens(run, tmp_path, expressions):
    """A run without a step, and one that stands still: everywhere a number or nothing."""
    names = sorted({name for text in expressions for name in re.findall(r"distclip_\w+", text)})
    series = [
        {"series": f'{name}{{run="{which}", state="running"}}', "values": "0x20"} for name in names for which in "ab"
    ]
    # nan is the only value that differs from itself.
    checks = [
        {"expr": f"({text}) != ({text})", "eval_time": "4m", "exp_samples": []} for text in map(_plain, expressions)
    ]
    file = tmp_path / "nan.yaml"
    file.write_text(
        yaml.safe_dump({"tests": [{"interval": "15s", "input_series": series, "promql_expr_test": checks}]})
    )
    run("promtool", "test", "rules", file)


def test_the_state_panel_shows_each_state(run, tmp_path, dashboard):
    panel = next(panel for panel in dashboard["panels"] if panel["title"] == "State")
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    states = {result["text"]: int(code) for code, result in mapping["options"].items()}
    series = [
        {"series": f'distclip_run_state{{run="a", instance="{node}", state="{state}"}}', "values": values}
        for node in ("node0", "node1")
        for state, values in {
            other: f"{int(other == 'running')}x4 {int(other == 'failed')}x4" for other in states
        }.items()
    ]
    checks = [
        {
            "expr": _plain(panel["targets"][0]["expr"]),
            "eval_time": time,
            "exp_samples": [{"labels": '{run="a"}', "value": states[state]}],
        }
        for time, state in (("1m", "running"), ("2m", "failed"))
    ]
    file = tmp_path / "state.yaml"
    file.write_text(
        yaml.safe_dump({"tests": [{"interval": "15s", "input_series": series, "promql_expr_test": checks}]})
    )
    run("promtool", "test", "rules", file)
    assert set(states) == set(STATES)
