"""What an agent knows of its run on its node: state, starts, failures, workers, and what the ranks have written.

    node = Node("r1", Level.NODE)
    node.start_attempt(folder, reason="initial", world_size=8)
    node.worker_started(rank=0, pid=4711)
    node.finish("succeeded")
    node.view()        # everything at one moment, for the collector

Safe to use from several threads: the agent changes it, the endpoint's threads read it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from distclip.telemetry.catalogue import FAILURE_KINDS, START_REASONS
from distclip.telemetry.ledger import Ledger, Totals
from distclip.telemetry.settings import Level
from distclip.telemetry.spool import Snapshot


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is known of one start of the workers; None where the launcher does not say."""

    world_size: int | None = None
    world_size_max: int | None = None
    restarts_remaining: int | None = None
    restarts_max: int | None = None


@dataclass(frozen=True, slots=True)
class View:
    """A node at one moment."""

    run: str
    level: Level
    state: str
    started: float
    ended: float | None
    starts: Mapping[str, int]
    failures: Mapping[str, int]
    attempt: Attempt
    workers: Mapping[int, bool]
    """Rank to whether its process is alive."""
    ranks: Mapping[int, Snapshot]
    """Rank to its latest values in the present attempt."""
    run_totals: Totals
    rank_totals: Mapping[int, Totals]
    errors: Mapping[str, int]
    sees_optimizer: bool
    """Whether any rank has ever said that distclip sees its optimizer."""


class Node:
    """The state of one run on one node; see the module's text."""

    def __init__(self, run: str, level: Level = Level.NODE) -> None:
        self.run = run
        self._level = level
        self._lock = threading.Lock()
        self._state = "initializing"
        self._started = time.time()
        self._ended: float | None = None
        self._starts = dict.fromkeys(START_REASONS, 0)
        self._failures = dict.fromkeys(FAILURE_KINDS, 0)
        self._attempt = Attempt()
        self._failed_now = False
        self._workers: dict[int, tuple[int, str | None]] = {}
        self._ledger = Ledger()
        self._sees_optimizer = False

    @property
    def state(self) -> str:
        """One of `catalogue.STATES`."""
        return self._state

    def wait_for_others(self) -> None:
        """The rendezvous has begun: the node waits for the others."""
        with self._lock:
            self._state = "rendezvous"

    def start_attempt(self, folder: Path | None, reason: str, attempt: Attempt) -> None:
        """The workers are being started; they write into `folder`. `reason` is one of `catalogue.START_REASONS`."""
        with self._lock:
            if reason == "failure" and not self._failed_now:
                self._failures["exit"] += 1  # nobody has told how the last attempt failed, but it did
            self._failed_now = False
            self._ledger.open_attempt(folder)
            self._starts[reason] += 1
            self._attempt = attempt
            self._workers = {}
            self._state = "running"

    def worker_started(self, rank: int, pid: int) -> None:
        """A worker of the present attempt is there."""
        mark = _start_mark(pid)
        with self._lock:
            self._workers[rank] = (pid, mark)

    def worker_failed(self, kind: str) -> None:
        """A worker failed; the first of an attempt counts, since the launcher stops the others because of it."""
        with self._lock:
            if not self._failed_now:
                self._failed_now = True
                self._failures[kind] += 1

    def workers_stopped(self) -> None:
        """The launcher has stopped the workers, to start them again unless no restart is left."""
        with self._lock:
            out_of_restarts = self._failed_now and not self._attempt.restarts_remaining
            if self._state == "running" and not out_of_restarts:
                self._state = "restarting"

    def finish(self, state: str) -> None:
        """The run is over on this node: "succeeded", "failed" or "stopped". The first call counts."""
        with self._lock:
            if self._ended is not None:
                return
            self._ledger.close_attempt()
            self._state = state
            # Not before the start, also where the clock was set back: an end that is older is that of an earlier run.
            self._ended = max(time.time(), self._started)

    def view(self) -> View:
        """Everything at this moment, after reading the ranks' files."""
        with self._lock:
            self._ledger.refresh()
            ranks = self._ledger.gauges()
            self._sees_optimizer |= any(snapshot.info.has_optimizer for snapshot in ranks.values())
            attempt = self._attempt
            if attempt.world_size is None and ranks:
                attempt = replace(attempt, world_size=next(iter(ranks.values())).info.world_size)
            return View(
                run=self.run,
                level=self._level,
                state=self._state,
                started=self._started,
                ended=self._ended,
                starts=dict(self._starts),
                failures=dict(self._failures),
                attempt=attempt,
                workers={rank: _alive(pid, mark) for rank, (pid, mark) in sorted(self._workers.items())},
                ranks=ranks,
                run_totals=self._ledger.run_totals(),
                rank_totals=self._ledger.rank_totals(),
                errors=dict(self._ledger.errors),
                sees_optimizer=self._sees_optimizer,
            )


def _start_mark(pid: int) -> str | None:
    """When the process was started, in the kernel's ticks; None where it is gone or a zombie.

    A pid alone does not name a process: once it has ended, another one may get it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else fields[19]


def _alive(pid: int, mark: str | None) -> bool:
    return mark is not None and _start_mark(pid) == mark
