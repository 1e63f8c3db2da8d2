"""Turns steps into counters and gauges inside the rank, so that nothing between two scrapes is lost.

A scrape sees the latest values only: a streak of six bad steps that came and went between two of them would be
invisible in a gauge. So everything that happens is counted here, at the moment it happens.

    tally = Tally()
    streaks = Streaks()
    tally.add(record, streaks)
    tally.values[INDEX["steps"]]   # 1.0

Nothing that is not finite gets into the values (a histogram's sum would stay nan for ever), and no counter falls: a
nonfinite norm, loss or coefficient leaves the gauge at its last finite value, and counters tell that it happened.
"""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from distclip.telemetry.layout import BUCKETS, INDEX, NORM_BOUNDS, PHASES, fresh_values
from distclip.telemetry.record import StepRecord

TINY_NORM: Final = 1e-6
"""A norm below this, but not 0, is tiny: whatever the optimizer does with it is mostly rounding."""
NONFINITE_STREAK: Final = 5
"""Nonfinite steps in a row that make a streak."""
ZERO_STREAK: Final = 3
"""Zero, or tiny, steps in a row that make a streak."""

_I: Final = INDEX
_FIRST_BUCKET: Final = INDEX[BUCKETS[0]]
_SKIPPED: Final = {reason: INDEX[f"skipped_{reason}"] for reason in ("nonfinite", "no_gradients", "spike", "policy")}


@dataclass(slots=True)
class Streaks:
    """Bad steps in a row, of one clipper: two clippers in one process must not end each other's streaks."""

    nonfinite: int = 0
    zero: int = 0
    tiny: int = 0


def is_zero(record: StepRecord) -> bool:
    """Whether the step's gradient norm is exactly 0."""
    return not record.nonfinite and record.total_norm == 0.0


def is_tiny(record: StepRecord) -> bool:
    """Whether the step's gradient norm is above 0 and below `TINY_NORM`."""
    return not record.nonfinite and 0.0 < record.total_norm < TINY_NORM


class Tally:
    """The values of one rank; `values` is laid out like `layout.FIELDS` and may be published at any time."""

    def __init__(self) -> None:
        self.values: array[float] = fresh_values()

    def add(self, record: StepRecord, streaks: Streaks, norm_type: float = 2.0) -> None:
        """Count one measured step; `streaks` and `norm_type` are those of its clipper."""
        values = self.values
        values[_I["steps"]] += 1
        if record.clipped:
            values[_I["clipped"]] += 1
        if record.skip_reason is not None:
            values[_SKIPPED.get(record.skip_reason, _SKIPPED["policy"])] += 1
        if record.diverged:
            values[_I["diverged"]] += 1
        if record.local_nan:
            values[_I["local_nan"]] += 1
        if record.local_inf:
            values[_I["local_inf"]] += 1
        self._count_streaks(record, streaks)
        self._add_seconds(record)
        self._add_norm(record, norm_type)
        limit = _finite(record.limit)
        values[_I["limit"]] = math.nan if limit is None else limit
        self._set("last_step", record.step)
        self._set("last_step_timestamp", record.timestamp)
        self._reported(record.timestamp)
        self._set("missing_tensors", record.missing_tensors)
        self._set("coefficient", record.clip_coefficient)
        self._set("local_norm", record.local_norm)
        self._set("loss_scale", record.loss_scale)
        self._set("learning_rate", record.learning_rate)
        self._set("loss", record.loss)

    def nonfinite_applied(self) -> None:
        """Count an optimizer step that used nonfinite gradients."""
        self.values[_I["nonfinite_applied"]] += 1

    def phase(self, name: str) -> None:
        """Say what the rank is doing; an unknown name is "other"."""
        self.values[_I["phase"]] = PHASES.index(name if name in PHASES else "other")
        self._reported(time.time())

    def _reported(self, timestamp: float) -> None:
        self._set("report_timestamp", timestamp)
        self.values[_I["report_clock"]] = time.monotonic()

    def _set(self, field: str, value: float | None) -> None:
        number = _finite(value)
        if number is not None:
            self.values[_I[field]] = number

    def _grow(self, field: str, amount: float) -> None:
        total = self.values[_I[field]] + max(0.0, _finite(amount) or 0.0)
        if math.isfinite(total):
            self.values[_I[field]] = total

    def _count_streaks(self, record: StepRecord, streaks: Streaks) -> None:
        values = self.values
        nonfinite, zero, tiny = record.nonfinite, is_zero(record), is_tiny(record)
        streaks.nonfinite = streaks.nonfinite + 1 if nonfinite else 0
        streaks.zero = streaks.zero + 1 if zero else 0
        streaks.tiny = streaks.tiny + 1 if tiny else 0
        if nonfinite:
            values[_I["nonfinite"]] += 1
            values[_I["streak_nonfinite"]] += streaks.nonfinite == NONFINITE_STREAK
        elif zero:
            values[_I["zero"]] += 1
            values[_I["streak_zero"]] += streaks.zero == ZERO_STREAK
        elif tiny:
            values[_I["tiny"]] += 1
            values[_I["streak_tiny"]] += streaks.tiny == ZERO_STREAK
        values[_I["consecutive_nonfinite"]] = streaks.nonfinite
        values[_I["consecutive_zero"]] = streaks.zero

    def _add_seconds(self, record: StepRecord) -> None:
        values = self.values
        if record.step_seconds is not None:
            values[_I["step_seconds_count"]] += 1
            self._grow("step_seconds_sum", record.step_seconds)
        values[_I["clip_seconds_count"]] += 1
        self._grow("clip_seconds_sum", record.clip_seconds)
        self._grow("wait_seconds", record.wait_seconds)

    def _add_norm(self, record: StepRecord, norm_type: float) -> None:
        values, norm = self.values, _finite(record.total_norm)
        if norm is None:
            return
        values[_I["norm"]] = norm
        values[_FIRST_BUCKET + bisect_left(NORM_BOUNDS, norm)] += 1
        self._grow("norm_sum", norm)
        elements = _finite(record.elements)
        if norm_type == 2.0 and elements is not None and elements > 0:
            values[_I["rms"]] = norm / math.sqrt(elements)


def _finite(value: float | None) -> float | None:
    """The value as a float; None for what is not known, not finite, or an int beyond float64."""
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
