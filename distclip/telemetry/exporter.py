"""A node's one endpoint, from the start of an agent to after its end; used by every launcher alike.

    exporter = Exporter("r1", settings)
    exporter.start()                                       # http://127.0.0.1:9519/metrics
    environment = exporter.start_attempt("initial", 8, Attempt())    # for that of the workers
    exporter.node.worker_started(rank=0, pid=4711)
    exporter.finish("succeeded")                           # reads the last values, removes the spool folder
    exporter.linger(exporter.linger_seconds())             # so that Prometheus sees the end
    exporter.close()

Nothing here raises because of a full disk, a taken port or a bad address: it warns once on the logger
"distclip.telemetry" and does without.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from distclip.telemetry.collector import NodeCollector
from distclip.telemetry.discovery import publish_target
from distclip.telemetry.folder import SpoolFolder
from distclip.telemetry.node import Attempt, Node
from distclip.telemetry.server import EndpointServer, ScrapeClock, serve
from distclip.telemetry.settings import DEFAULT_BIND, Settings

logger = logging.getLogger("distclip.telemetry")

LINGER_LIMIT: Final = 30.0
"""Seconds for which an endpoint outlives its run at most."""
STOPPED_LINGER_LIMIT: Final = 20.0
"""The same after a signal: whoever sent it (Kubernetes, Slurm) kills what is still there after some 30 seconds. It is
above the 15 s between two scrapes, so that a Ctrl-C is not taken for a run that vanished."""
_ANNOUNCE_SECONDS: Final = 1.0
"""To wait for the announcement. It looks this machine's name up, which can take minutes where DNS is out of order, and
goes on in the background then: training is not to wait for it."""


class Exporter:
    """Endpoint, spool folder and discovery file of one agent. Only the process that made it cleans up."""

    def __init__(self, run: str, settings: Settings) -> None:
        self.node = Node(run, settings.level)
        self._settings = settings
        self._clock = ScrapeClock()
        self._server: EndpointServer | None = None
        self._target: Path | None = None
        self._target_lock = threading.Lock()
        self._folder: SpoolFolder | None = None
        self._attempt_folder: Path | None = None
        self._attempts = 0
        self._pid = os.getpid()
        self._hurry = threading.Event()

    @property
    def url(self) -> str | None:
        """Where the endpoint is, without a path; None where there is none."""
        return self._server.url if self._server is not None else None

    def start(self) -> None:
        """Open the port and announce it. Where no port can be had there is one warning and no endpoint."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(NodeCollector(self.node))
        self._server = self._listen(registry)
        if self._server is not None and self._settings.sd_dir is not None:
            announcing = threading.Thread(
                target=self._announce, args=(self._server, self._settings.sd_dir), name="distclip-announce", daemon=True
            )
            announcing.start()
            announcing.join(_ANNOUNCE_SECONDS)

    def start_attempt(self, reason: str, ranks: int, attempt: Attempt) -> dict[str, str]:
        """Get ready for a start of `ranks` workers on this node; returns variables for their environment.

        Call it when the workers of the attempt before are gone. `reason` is one of `catalogue.START_REASONS`.
        """
        if self._folder is not None and not self._folder.path.is_dir():  # somebody cleans up in memory or in /tmp
            self._folder.remove()
            self._folder = None
        if self._folder is None:
            self._folder = SpoolFolder.create(self.node.run, self._settings.spool)
        folder = None if self._folder is None else self._folder.attempt(self._attempts, ranks)
        self._attempts += 1
        self.node.start_attempt(folder, reason, attempt)
        if self._folder is not None and self._attempt_folder is not None:
            self._folder.drop(self._attempt_folder)
        self._attempt_folder = folder
        return {"DISTCLIP_RUN_ID": self.node.run, "DISTCLIP_SPOOL": str(folder or "")}

    def finish(self, state: str) -> None:
        """The run is over: "succeeded", "failed" or "stopped"; the workers are gone. A second call does nothing."""
        self.node.finish(state)
        if self._folder is not None:
            self._folder.remove()

    def linger_seconds(self) -> float:
        """How long `linger` should wait now, so that Prometheus has two chances to see the end."""
        limit = STOPPED_LINGER_LIMIT if self.node.state == "stopped" else LINGER_LIMIT
        return 0.0 if self._server is None else self._clock.linger_seconds(limit)

    def linger(self, seconds: float) -> None:
        """Keep the endpoint for that long; ends early where another thread calls `close` or a signal handler raises."""
        self._hurry.wait(seconds)

    def close(self) -> None:
        """Close the port, withdraw the announcement, remove the spool folder. A second call does nothing."""
        if os.getpid() != self._pid:
            return
        self._hurry.set()
        self.finish("stopped")
        self._withdraw()
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _announce(self, server: EndpointServer, folder: Path) -> None:
        try:
            target = publish_target(folder, self.node.run, server.bind_address, server.port)
        except OSError as error:
            logger.warning("distclip: Prometheus will not find %s by file: %s", server.url, error)
            return
        with self._target_lock:
            self._target = target
        if self._hurry.is_set():  # closed meanwhile
            self._withdraw()

    def _withdraw(self) -> None:
        with self._target_lock:
            if self._target is not None:
                with contextlib.suppress(OSError):  # gone, or its file system is: then nobody can read it either
                    self._target.unlink()
                self._target = None

    def _listen(self, registry: CollectorRegistry) -> EndpointServer | None:
        for bind in dict.fromkeys((self._settings.bind, DEFAULT_BIND)):
            try:
                server, complaint = serve(registry, self._health, self._clock, bind, self._settings.port)
            except (OSError, RuntimeError, UnicodeError) as error:  # no thread can be started; no name of a host
                logger.warning("distclip: no endpoint on %s: %s", bind, error)
                continue
            if complaint is not None:
                logger.warning("distclip: %s", complaint)
            return server
        return None

    def _health(self) -> dict[str, object]:
        return {"status": "ok", "run": self.node.run, "state": self.node.state}
