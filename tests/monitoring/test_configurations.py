"""The configurations for Prometheus, Alertmanager, Grafana and compose, by the programs that read them."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from distclip.cli.demo_prometheus import _free_port
from distclip.telemetry.discovery import publish_target
from distclip.telemetry.exporter import LINGER_LIMIT


def test_prometheus_accepts_its_configuration(run, folder):
    run("promtool", "check", "config", folder / "prometheus" / "prometheus.yml")


def test_prometheus_sees_the_end_of_a_run(folder):
    """An endpoint lingers for two scrapes, but no longer than a limit; a run that is new is found within a scrape."""
    configuration = yaml.safe_load((folder / "prometheus" / "prometheus.yml").read_text())
    interval = int(configuration["global"]["scrape_interval"].removesuffix("s"))
    assert 2 * interval <= LINGER_LIMIT
    (discovery,) = configuration["scrape_configs"][0]["file_sd_configs"]
    assert int(discovery["refresh_interval"].removesuffix("s")) <= interval


def test_prometheus_finds_a_target_that_distclip_announces(run, folder, tmp_path):
    shutil.copytree(folder / "prometheus", tmp_path / "prometheus")
    publish_target(tmp_path / "prometheus" / "targets", "r", "127.0.0.1", 9519)
    configuration = tmp_path / "prometheus" / "prometheus.yml"
    printed = run("promtool", "check", "service-discovery", "--timeout=2s", configuration, "distclip")
    found = json.loads(printed)
    assert [target["labels"]["__address__"] for target in found] == ["127.0.0.1:9519"]


@pytest.mark.parametrize(("severity", "receiver"), [("critical", "team"), ("warning", "team"), ("info", "log")])
def test_alertmanager_routes(run, folder, severity, receiver):
    configuration = folder / "alertmanager" / "alertmanager.yml"
    run("amtool", "check-config", configuration)
    labels = (f"severity={severity}", "alertname=DistclipRunStalled", "run=r")
    assert run("amtool", "config", "routes", "test", f"--config.file={configuration}", *labels).strip() == receiver


@pytest.fixture
def alertmanager(program: Callable[[str], Path], folder: Path, tmp_path: Path) -> Iterator[str]:
    """A real Alertmanager with the shipped configuration; its address."""
    address = f"127.0.0.1:{_free_port()}"
    command = [
        str(program("alertmanager")),
        f"--config.file={folder / 'alertmanager' / 'alertmanager.yml'}",
        f"--storage.path={tmp_path / 'data'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    ]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_for(lambda: _ask(f"http://{address}/api/v2/status"))
            yield f"http://{address}"
        finally:
            process.terminate()


def _ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return json.loads(answer.read() or b"null")


def _wait_for(ask: Callable[[], Any]) -> Any:
    end = time.monotonic() + 30
    while True:
        try:
            if found := ask():
                return found
        except OSError:
            pass
        assert time.monotonic() < end, "no answer in 30 s"
        time.sleep(0.05)


def test_a_lesser_alert_is_silent_only_beside_a_worse_one_of_its_run(alertmanager):
    """Also where the label `run` is missing on both sides, which Alertmanager takes for equal."""
    once, persistent = "DistclipNonfiniteGradient", "DistclipNonfiniteGradientPersistent"
    applied = "DistclipNonfiniteStepApplied"
    posted = [  # Alertmanager takes note of them in this order: what must be silent last shows that all are known
        {"alertname": persistent, "where": "no run"},
        {"alertname": once, "where": "no run"},
        {"alertname": once, "run": "alone"},
        {"alertname": persistent, "run": "persists"},
        {"alertname": once, "run": "persists"},
        {"alertname": "DistclipZeroGradients", "run": "persists"},
        {"alertname": applied, "run": "applied"},
        {"alertname": once, "run": "applied"},
    ]
    _ask(f"{alertmanager}/api/v2/alerts", [{"labels": labels} for labels in posted])

    def silent() -> list[dict[str, str]] | None:
        alerts = _ask(f"{alertmanager}/api/v2/alerts")
        found = [alert["labels"] for alert in alerts if alert["status"]["inhibitedBy"]]
        return found if {"alertname": once, "run": "applied"} in found else None

    found = _wait_for(silent)
    assert sorted(found, key=str) == [{"alertname": once, "run": "applied"}, {"alertname": once, "run": "persists"}]


def test_compose_mounts_what_is_there(folder):
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    assert set(compose["services"]) == {"prometheus", "alertmanager", "grafana"}
    for service in compose["services"].values():
        name, _, version = service["image"].partition(":")
        assert name
        assert version[-1].isdigit(), "pinned, so that it is the same tomorrow"
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert (folder / source).is_dir() if source.startswith("./") else source in compose["volumes"]


def test_grafana_is_provisioned_from_where_compose_mounts(folder):
    mounts = yaml.safe_load((folder / "compose.yaml").read_text())["services"]["grafana"]["volumes"]
    places = dict(reversed(mount.removesuffix(":ro").split(":")) for mount in mounts)
    provider = yaml.safe_load((folder / "grafana/provisioning/dashboards/distclip.yaml").read_text())["providers"][0]
    assert (folder / places[provider["options"]["path"]] / "distclip.json").is_file()
    source = yaml.safe_load((folder / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    prometheus = yaml.safe_load((folder / "prometheus" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
