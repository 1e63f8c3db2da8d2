"""Event log and step log: what happened, as JSON lines that a person can grep and a notebook can load.

The event log (`DISTCLIP_EVENTS`) has one line for every step that was nonfinite, skipped, diverged, zero or tiny; the
step log (`DISTCLIP_STEP_LOG`) has one for every step. Both have the same fields:

    {"time": 1760000000.0, "run": "r1", "rank": 0, "step": 20, "event": "nonfinite", "total_norm": "nan", "limit": 1.0,
     "clip_coefficient": 1.0, "skip_reason": "nonfinite", "stepped": false, "nan": 4096, "inf": 0, "diverged": false,
     "loss_scale": null, "loss": "nan", "culprits": [{"rank": 1, "parameter": "head.weight", "nan": 4096, "inf": 0}]}

`time` is Unix time in seconds. `event` is "nonfinite", "skipped", "diverged", "zero", "tiny" or null, the first that
fits. A number that is not finite is the text "nan", "inf" or "-inf": a line is always strict JSON. Rank 0 alone writes,
since a decision is the same on every rank; lines are appended, so a restarted run goes on in the same file. A line has
left the process before the call returns: an error raised in the same step does not lose it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from distclip.telemetry.record import RunInfo, StepRecord
from distclip.telemetry.tally import is_tiny, is_zero


def event_of(record: StepRecord) -> str | None:
    """What is special about this step: "nonfinite", "skipped", "diverged", "zero", "tiny", or None."""
    if record.nonfinite:
        return "nonfinite"
    if record.skip_reason is not None:
        return "skipped"
    if record.diverged:
        return "diverged"
    if is_zero(record):
        return "zero"
    if is_tiny(record):
        return "tiny"
    return None


class JsonLog:
    """A sink that appends one line per step, or per step with an event where `events_only`.

    Raises `OSError` from `open` and `record` where the file cannot be written; `sinks.auto_sink` turns that into one
    warning. The folder is made where it is missing.
    """

    def __init__(self, path: Path, run: str | None, *, events_only: bool) -> None:
        self._path = path
        self._run = run
        self._events_only = events_only
        self._descriptor: int | None = None
        self._pid = os.getpid()

    def open(self, info: RunInfo) -> None:
        """Open the file, on rank 0 only."""
        if info.rank != 0 or self._descriptor is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Not blocking: a named pipe that nobody reads, or reads slowly, is an error here and no wait.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._descriptor = os.open(self._path, flags, 0o644)

    def record(self, record: StepRecord) -> None:
        """Append the step's line, if it is due."""
        if self._descriptor is None or os.getpid() != self._pid:
            return
        event = event_of(record)
        if event is None and self._events_only:
            return
        line = json.dumps(self._fields(record, event), allow_nan=False).encode() + b"\n"
        if os.write(self._descriptor, line) != len(line):
            raise OSError(f"{self._path}: only a part of a line could be written; is the disk full?")

    def nonfinite_applied(self) -> None:
        """Nothing: the step's own line says `stepped`."""

    def phase(self, name: str) -> None:
        """Nothing: phases are no steps."""

    def close(self) -> None:
        """Nothing: every line has left already, and other clippers of the process may go on."""

    def _fields(self, record: StepRecord, event: str | None) -> dict[str, object]:
        return {
            "time": _number(record.timestamp),
            "run": self._run,
            "rank": 0,
            "step": record.step,
            "event": event,
            "total_norm": _number(record.total_norm),
            "limit": _number(record.limit),
            "clip_coefficient": _number(record.clip_coefficient),
            "skip_reason": record.skip_reason,
            "stepped": record.stepped,
            "nan": record.nan,
            "inf": record.inf,
            "diverged": record.diverged,
            "loss_scale": _number(record.loss_scale),
            "loss": _number(record.loss),
            "culprits": [
                {"rank": culprit.rank, "parameter": culprit.parameter, "nan": culprit.nan, "inf": culprit.inf}
                for culprit in record.culprits
            ],
        }


def _number(value: float | None) -> float | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
