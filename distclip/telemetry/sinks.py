"""Where a rank's steps go: `auto_sink` reads the environment and gives a clipper one sink, or None.

    sink = auto_sink()
    if sink is not None:
        sink.open(info)
        sink.record(record)

Three sinks exist, and any of them can be on at once: the spool file that becomes metrics (`DISTCLIP_SPOOL`, where an
agent has set it to a folder for its workers: without one nobody would read the file, or remove it), the event log
(`DISTCLIP_EVENTS`) and the step log (`DISTCLIP_STEP_LOG`). One that fails is dropped with one warning on the logger
"distclip.telemetry"; training goes on.

All clippers of a process share its one spool file and its logs: their counters add up, gauges show the latest step of
any of them. Give each clipper a sink of its own, so that a good step of one does not end the streak of another.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from distclip.telemetry.events import JsonLog
from distclip.telemetry.folder import is_attempt
from distclip.telemetry.record import RunInfo, Sink, StepRecord
from distclip.telemetry.settings import Settings, named_run_id, read_settings
from distclip.telemetry.spool import SpoolWriter
from distclip.telemetry.tally import Streaks, Tally

logger = logging.getLogger("distclip.telemetry")


class RankSpool:
    """The one spool file of this process in one folder, and the counters in it.

    Safe to use from several threads. In a forked child (a data loader's worker) every call does nothing: the file is
    the parent's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._tally = Tally()
        self._writer: SpoolWriter | None = None

    def describe(self, info: RunInfo) -> None:
        """Make the file, or say anew who this rank is. Raises `OSError` where the file cannot be made."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._writer is None:
                self._writer = SpoolWriter(self._folder, info)
            else:
                self._writer.describe(info)

    def update(self, change: Callable[[Tally], None]) -> None:
        """Change the counters and publish them."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            change(self._tally)
            if self._writer is not None:
                self._writer.publish(self._tally.values)


class SpoolSink:
    """One clipper's way into its process's spool file."""

    def __init__(self, spool: RankSpool) -> None:
        self._spool = spool
        self._streaks = Streaks()
        self._norm_type = 2.0

    def open(self, info: RunInfo) -> None:
        """Make or relabel the file; from here on its counters exist, at 0. Raises `OSError` where that fails."""
        self._norm_type = info.norm_type
        self._spool.describe(info)

    def record(self, record: StepRecord) -> None:
        """Count one step."""
        self._spool.update(lambda tally: tally.add(record, self._streaks, self._norm_type))

    def nonfinite_applied(self) -> None:
        """Count an optimizer step with nonfinite gradients."""
        self._spool.update(Tally.nonfinite_applied)

    def phase(self, name: str) -> None:
        """Say what the rank is doing."""
        self._spool.update(lambda tally: tally.phase(name))

    def close(self) -> None:
        """Nothing: the file stays, so that the agent can read the last values; the agent removes it."""


class SafeSinks:
    """Hands everything to several sinks; one that raises is dropped with one warning and never asked again.

    `dropped` holds the names of those, so that the clippers of a process do not warn one by one.
    """

    def __init__(self, sinks: dict[str, Sink], dropped: set[str] | None = None) -> None:
        self._sinks = sinks
        self._dropped = set() if dropped is None else dropped

    def open(self, info: RunInfo) -> None:
        """See `Sink.open`."""
        self._each(lambda sink: sink.open(info))

    def record(self, record: StepRecord) -> None:
        """See `Sink.record`."""
        self._each(lambda sink: sink.record(record))

    def nonfinite_applied(self) -> None:
        """See `Sink.nonfinite_applied`."""
        self._each(lambda sink: sink.nonfinite_applied())

    def phase(self, name: str) -> None:
        """See `Sink.phase`."""
        self._each(lambda sink: sink.phase(name))

    def close(self) -> None:
        """See `Sink.close`."""
        self._each(lambda sink: sink.close())

    def _each(self, call: Callable[[Sink], None]) -> None:
        for name, sink in self._sinks.items():
            if name in self._dropped:
                continue
            try:
                call(sink)
            except Exception as error:
                # Whatever goes wrong in telemetry, a training of weeks must not die of it.
                self._dropped.add(name)
                logger.warning("distclip: no more %s from this rank, training goes on: %s", name, error)


class _ProcessSinks:
    """What the clippers of one process share, for one environment. Nothing is opened before the first of them is."""

    def __init__(self, settings: Settings, run: str | None) -> None:
        self._dropped: set[str] = set()
        self._spool: tuple[str, RankSpool] | None = None
        self._logs: dict[str, Sink] = {}
        if settings.spool is not None and is_attempt(settings.spool):
            self._spool = f"metrics (DISTCLIP_SPOOL={settings.spool})", RankSpool(settings.spool)
        if settings.events is not None:
            name = f"event log (DISTCLIP_EVENTS={settings.events})"
            self._logs[name] = JsonLog(settings.events, run, events_only=True)
        if settings.step_log is not None:
            name = f"step log (DISTCLIP_STEP_LOG={settings.step_log})"
            self._logs[name] = JsonLog(settings.step_log, run, events_only=False)

    def for_clipper(self) -> Sink | None:
        """A sink of its own for one more clipper."""
        sinks = dict(self._logs)
        if self._spool is not None:
            sinks[self._spool[0]] = SpoolSink(self._spool[1])
        return SafeSinks(sinks, self._dropped) if sinks else None


_shared: dict[tuple[int, Settings, str | None], _ProcessSinks] = {}


def auto_sink() -> Sink | None:
    """The sinks that the environment asks for, as one, for one clipper; None where it asks for none. Never raises."""
    settings, _ = read_settings(os.environ)  # the agent has already complained about bad values
    run = named_run_id(os.environ, os.environ.get("TORCHELASTIC_RUN_ID"))
    return _shared.setdefault((os.getpid(), settings, run), _ProcessSinks(settings, run)).for_clipper()
