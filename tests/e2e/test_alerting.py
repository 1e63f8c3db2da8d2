"""From a rank's step to a person's inbox: endpoints, Prometheus and Alertmanager for real, with the shipped rules and
configurations. Only their times are shortened, and the receiver is a web hook of this test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from distclip.cli.demo_prometheus import find_tool
from distclip.cli.rules import rule_files, shorten
from distclip.data import data_path
from distclip.telemetry.exporter import Exporter
from distclip.telemetry.node import Attempt
from distclip.telemetry.record import RunInfo, StepRecord
from distclip.telemetry.settings import Settings
from distclip.telemetry.sinks import RankSpool, SpoolSink

MONITORING = data_path("monitoring")
WAIT_SECONDS = 120  # a limit for a machine that is busy; it takes a quarter of it
INFO = RunInfo(0, 0, 2, "cpu", "ddp", "fixed", "skip", 2.0, "2", True)
KILLED = """
import sys, time
from pathlib import Path
from distclip.telemetry.exporter import Exporter
from distclip.telemetry.node import Attempt
from distclip.telemetry.settings import Settings
exporter = Exporter("killed", Settings(port=0, spool=Path(sys.argv[2]), sd_dir=Path(sys.argv[1])))
exporter.start()
exporter.start_attempt("initial", 1, Attempt())
time.sleep(600)
"""


def _step(number: int, *, nan: int = 0) -> StepRecord:
    return StepRecord(
        step=number,
        timestamp=time.time(),
        total_norm=float("nan") if nan else 0.5,
        limit=1.0,
        clip_coefficient=1.0,
        clipped=False,
        nan=nan,
        inf=0,
        local_nan=nan,
        local_inf=0,
        local_norm=0.5,
        stepped=not nan,
        skip_reason="nonfinite" if nan else None,
        elements=100,
        missing_tensors=0,
        loss_scale=None,
        learning_rate=0.1,
        loss=1.0,
        step_seconds=0.1,
        clip_seconds=0.01,
        wait_seconds=0.0,
    )


class Inbox:
    """What Alertmanager sent: (status, alert name, run) of each alert in each message."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str, str]] = []
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for alert in message["alerts"]:
                    labels = alert["labels"]
                    inbox.received.append((alert["status"], labels["alertname"], labels["run"]))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Keep quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def _get(url: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=5) as answer:
        return answer.read()


def _until(condition: Callable[[], Any], what: Callable[[], object] = lambda: "") -> None:
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            if condition():
                return
        except OSError:
            pass  # not up yet
        assert time.monotonic() < end, what()
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) for _ in range(count)]
    for server in servers:
        server.server_close()
    return [server.server_address[1] for server in servers]


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    inbox = Inbox()
    yield inbox
    inbox.server.shutdown()
    inbox.server.server_close()


@dataclass
class Prometheus:
    """A running server that tells a running Alertmanager."""

    url: str
    targets: Path
    """The folder in which it looks for endpoints."""

    def runs(self, expression: str) -> set[str]:
        """The runs that the expression has a result for."""
        answer = json.loads(_get(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"))
        return {result["metric"]["run"] for result in answer["data"]["result"]}


@pytest.fixture
def prometheus(tmp_path: Path, inbox: Inbox) -> Iterator[Prometheus]:
    programs = [find_tool(name) for name in ("prometheus", "alertmanager")]
    if None in programs:
        assert os.environ.get("CI") != "true", "Prometheus and Alertmanager are missing: make tools"
        pytest.skip("Prometheus and Alertmanager are not on this machine and `make tools` could not fetch them")
    scraper, sender = _free_ports(2)

    alerting = yaml.safe_load((MONITORING / "alertmanager" / "alertmanager.yml").read_text())
    alerting["route"] |= {"group_wait": "1s", "group_interval": "1s"}
    for receiver in alerting["receivers"]:
        receiver["webhook_configs"] = [{"url": inbox.url}]
    (tmp_path / "alertmanager.yml").write_text(yaml.safe_dump(alerting))

    scraping = yaml.safe_load((MONITORING / "prometheus" / "prometheus.yml").read_text())
    scraping["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    scraping["scrape_configs"][0]["file_sd_configs"][0]["refresh_interval"] = "500ms"
    scraping["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{sender}"]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(scraping))
    (tmp_path / "rules").mkdir()
    for file in rule_files():
        # 10 minutes become 15 seconds.
        (tmp_path / "rules" / file.name).write_text(shorten(file.read_text(), factor=1 / 40, floor=5))
    (tmp_path / "targets").mkdir()

    commands = [
        [
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/prometheus",
            f"--web.listen-address=127.0.0.1:{scraper}",
            "--log.level=warn",
        ],
        [
            f"--config.file={tmp_path}/alertmanager.yml",
            f"--storage.path={tmp_path}/alertmanager",
            f"--web.listen-address=127.0.0.1:{sender}",
            "--cluster.listen-address=",
            "--log.level=warn",
        ],
    ]
    processes = [
        subprocess.Popen([str(program), *arguments]) for program, arguments in zip(programs, commands, strict=True)
    ]
    try:
        _until(lambda: _get(f"http://127.0.0.1:{scraper}/-/ready"))
        _until(lambda: _get(f"http://127.0.0.1:{sender}/-/ready"))
        yield Prometheus(f"http://127.0.0.1:{scraper}", tmp_path / "targets")
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


class NodeOfRun:
    """One node of a run: an endpoint, and a rank that feeds it from this process."""

    def __init__(self, run: str, folder: Path, targets: Path) -> None:
        folder.mkdir()
        self.exporter = Exporter(run, Settings(port=0, spool=folder, sd_dir=targets))
        self.exporter.start()
        spool = self.exporter.start_attempt("initial", 1, Attempt())["DISTCLIP_SPOOL"]
        self._sink = SpoolSink(RankSpool(Path(spool)))
        self._sink.open(INFO)
        self._steps = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def step(self, count: int = 1, *, nan: int = 0) -> None:
        with self._lock:
            for _ in range(count):
                self._steps += 1
                self._sink.record(_step(self._steps, nan=nan))

    def _train(self) -> None:
        while not self._ended.wait(0.2):
            self.step()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self.exporter.finish("succeeded")
        self.exporter.linger(self.exporter.linger_seconds())
        self.exporter.close()


@pytest.mark.soak  # it is the waiting of Prometheus and Alertmanager that takes time
def test_an_alert_arrives_once_and_ends(prometheus: Prometheus, inbox: Inbox, tmp_path: Path) -> None:
    """A streak between two scrapes on two nodes, a run that is killed, and one that ends well."""
    command = [sys.executable, "-c", KILLED, str(prometheus.targets), str(tmp_path / "killed")]
    nodes = [NodeOfRun("sick", tmp_path / f"sick{number}", prometheus.targets) for number in (0, 1)]
    well = NodeOfRun("well", tmp_path / "well", prometheus.targets)
    sick = ("DistclipNonfiniteGradientPersistent", "sick")
    gone = ("DistclipRunVanished", "killed")
    known = "min by (run) (count_over_time(distclip_nonfinite_steps_total[1m])) >= 3"
    try:
        with subprocess.Popen(command) as killed:
            try:
                _until(lambda: prometheus.runs(known) == {"sick", "well", "killed"})
                for node in nodes:
                    node.step(6, nan=1)
                well.end()
            finally:
                killed.kill()
        _until(lambda: {("firing", *gone), ("resolved", *sick)} <= set(inbox.received), lambda: inbox.received)
    finally:
        for node in [*nodes, well]:
            node.end()
    # Nothing twice although two nodes said it, nothing of the lesser alert, nothing of the run that ended well.
    assert sorted(inbox.received) == [("firing", *sick), ("firing", *gone), ("resolved", *sick)]
