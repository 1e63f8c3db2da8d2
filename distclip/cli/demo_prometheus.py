"""The demo's Prometheus: found, started on a free port with the repository's rules, asked for its alerts.

It is the real server with the rules that ship with distclip. Only their times are shortened, since nobody watches a
demo for ten minutes, and it scrapes once a second for the same reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from distclip.cli.demo_children import Children
from distclip.cli.rules import rule_files, shorten

SCRAPE_SECONDS = 1
RULES_SHORTENED = 15  # times: windows of 5 and 10 minutes become 20 and 40 seconds
_RULE_FLOOR = 15.0  # seconds; long enough for some scrapes in each window, also on a machine that is busy
_READY_SECONDS = 30.0
_TRIES = 3

_CONFIG = """\
global:
  scrape_interval: {interval}s
  evaluation_interval: {interval}s
rule_files: ["rules/*.yaml"]
scrape_configs:
  - job_name: distclip
    file_sd_configs:
      - files: ["targets/*.json"]
        refresh_interval: {interval}s
"""


def find_tool(name: str) -> Path | None:
    """Where the program `name` is: in the folder $DISTCLIP_TOOLS, in `.tools/bin` of the checkout, or on the path."""
    checkout = Path(__file__).resolve().parents[2]
    folders = [Path(os.environ["DISTCLIP_TOOLS"])] if os.environ.get("DISTCLIP_TOOLS") else []
    if (checkout / "pyproject.toml").is_file():
        folders.append(checkout / ".tools" / "bin")
    for folder in folders:
        if os.access(folder / name, os.X_OK):
            return folder / name
    found = shutil.which(name)
    return Path(found) if found else None


@dataclass(frozen=True)
class Alert:
    """One alert as Prometheus has it now."""

    name: str
    state: str
    """"pending" or "firing"."""


class Prometheus:
    """A running server. `targets` is the folder that it reads file_sd files from."""

    def __init__(self, process: Popen[bytes], url: str, targets: Path) -> None:
        self._process = process
        self.url = url
        self.targets = targets

    @classmethod
    def start(cls, program: Path, folder: Path, children: Children) -> Prometheus | None:
        """Start `program` with its files in `folder`; None where it does not come up (its log says why)."""
        targets = folder / "targets"
        targets.mkdir(parents=True)
        (folder / "rules").mkdir()
        for file in rule_files():
            text = shorten(file.read_text(), factor=1 / RULES_SHORTENED, floor=_RULE_FLOOR)
            (folder / "rules" / file.name).write_text(text)
        config = folder / "prometheus.yaml"
        config.write_text(_CONFIG.format(interval=SCRAPE_SECONDS))
        for _ in range(_TRIES):  # a port that is free now may be taken a moment later
            address = f"127.0.0.1:{_free_port()}"
            command = [
                str(program),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ]
            server = cls(children.start(command, folder / "prometheus.log"), f"http://{address}", targets)
            if server._ready():
                return server
        return None

    def alerts(self) -> list[Alert]:
        """All alerts that are pending or firing; none when the server does not answer."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            answer = json.loads(self._get("/api/v1/alerts"))
            return [Alert(alert["labels"]["alertname"], alert["state"]) for alert in answer["data"]["alerts"]]
        return []

    def _ready(self) -> bool:
        end = time.monotonic() + _READY_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._get("/-/ready")
                return True
            time.sleep(0.1)
        return False

    def _get(self, path: str) -> bytes:
        # Without proxies: the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, timeout=2.0) as response:
            body: bytes = response.read()
        return body


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
