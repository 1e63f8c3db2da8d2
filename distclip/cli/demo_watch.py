"""The demo's eyes: takes in the step log and Prometheus's alerts while the job runs, and fills the scene."""

from __future__ import annotations

import json
import time
from pathlib import Path
from subprocess import Popen

from distclip.cli.demo_prometheus import Prometheus
from distclip.cli.demo_story import FAULTS, read_step
from distclip.cli.demo_view import Firing, Scene, View

_JOB_SECONDS = 300.0  # limit; the job takes about a minute on two cores
_ALERT_SECONDS = 20.0  # that alerts may still come in after the job's end
_POLL_SECONDS = 0.25


class Watch:
    """Follows one job. `log` is distclip's step log, `targets` the folder of its file_sd file."""

    def __init__(self, scene: Scene, log: Path, targets: Path, prometheus: Prometheus | None) -> None:
        self._scene = scene
        self._log = log
        self._targets = targets
        self._prometheus = prometheus
        self._offset = 0
        self._endpoint_known = False

    def follow(self, job: Popen[bytes], view: View) -> int | None:
        """Show the job until it has ended and its alerts are in; its exit code, None when it takes too long."""
        end = time.monotonic() + _JOB_SECONDS
        self._scene.doing = "the ranks are starting"
        while job.poll() is None:
            if time.monotonic() > end:
                return None
            self._look()
            if self._scene.steps:
                self._scene.doing = "training"
            view.show(self._scene)
            time.sleep(_POLL_SECONDS)
        end = time.monotonic() + _ALERT_SECONDS
        self._look()
        while job.returncode == 0 and self._alerts_missing() and time.monotonic() < end:
            self._scene.doing = "waiting for alerts"
            view.show(self._scene)
            time.sleep(_POLL_SECONDS)
            self._look()
        view.show(self._scene)
        return job.returncode

    def _alerts_missing(self) -> bool:
        expected = {fault.alert for fault in FAULTS if fault.alert}
        return self._prometheus is not None and not expected <= self._scene.firings.keys()

    def _look(self) -> None:
        self._read_steps()
        self._read_endpoint()
        if self._prometheus is not None:
            self._read_alerts(self._prometheus)

    def _read_steps(self) -> None:
        """Take in the whole lines that are new."""
        if not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._scene.steps.extend(read_step(line) for line in whole.decode().splitlines())

    def _read_endpoint(self) -> None:
        """Find out where distclip answers, from the file that it writes for Prometheus."""
        for file in [] if self._endpoint_known else sorted(self._targets.glob("*.json")):
            target = json.loads(file.read_text())[0]["targets"][0]
            self._scene.places.append(f"metrics http://{target}/metrics")
            self._endpoint_known = True

    def _read_alerts(self, prometheus: Prometheus) -> None:
        now = time.time()
        self._scene.states = {alert.name: alert.state for alert in prometheus.alerts()}
        for name, state in self._scene.states.items():
            if state == "firing":
                self._scene.firings.setdefault(name, Firing(now, now)).last = now
