"""The fixed layout of a rank's spool file: one page that two processes share without waiting for each other.

    0     header      magic, fingerprint of the layout, size; written once, before the file gets its final name
    64    info   A,B  who the rank is, as JSON (`RunInfo`)
    2144  values A,B  counters and gauges, all float64, in the order of `FIELDS`

Info and values each have two slots that are written in turn. A slot is a sequence number, the payload and a checksum
over both. A reader takes the valid slot with the higher number, so a writer never waits for a reader, and one that is
killed in the middle of a write loses that write and nothing before it. The checksum makes this independent of the
machine's memory ordering and tells a damaged file from a good one.

A value that is not known is nan in the file and is left out of the metrics.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from typing import Final

COUNTERS: Final = (
    "steps",
    "clipped",
    "nonfinite",
    "zero",
    "tiny",
    "skipped_nonfinite",
    "skipped_no_gradients",
    "skipped_spike",
    "skipped_policy",
    "streak_nonfinite",
    "streak_zero",
    "streak_tiny",
    "nonfinite_applied",
    "diverged",
    "local_nan",
    "local_inf",
    "wait_seconds",
    "step_seconds_count",
    "step_seconds_sum",
    "clip_seconds_count",
    "clip_seconds_sum",
    "norm_sum",
)
"""Fields that only grow while a worker lives; the buckets of `NORM_BOUNDS` follow them."""

NORM_BOUNDS: Final = tuple(float(f"{10 ** (half / 2):.3g}") for half in range(-20, 13))
"""Upper bounds of the histogram of gradient norms: two per decade, 1e-10 to 1e6."""

BUCKETS: Final = tuple(f"norm_bucket_{index}" for index in range(len(NORM_BOUNDS) + 1))
"""Observations per bucket, not cumulative; the last one is above every bound."""

GAUGES: Final = (
    "last_step",
    "last_step_timestamp",
    "norm",
    "limit",
    "coefficient",
    "rms",
    "local_norm",
    "consecutive_nonfinite",
    "consecutive_zero",
    "missing_tensors",
    "loss_scale",
    "learning_rate",
    "loss",
    "phase",
    "report_timestamp",
    "report_clock",
)
"""Fields that describe the latest step; nan where nothing is known. `report_clock` is the machine's monotonic time of
the report: it tells the order of two processes' reports also where somebody sets the clock back."""

FIELDS: Final = COUNTERS + BUCKETS + GAUGES
INDEX: Final = {name: index for index, name in enumerate(FIELDS)}
PHASES: Final = ("training", "evaluation", "checkpoint", "other")
"""The field `phase` is an index into this."""

MAGIC: Final = b"distclip"
FINGERPRINT: Final = zlib.crc32("\n".join((*FIELDS, *map(repr, NORM_BOUNDS))).encode())
"""Differs between versions of distclip whose fields differ, so that no reader takes one field for another."""

INFO_BYTES: Final = 1024
VALUES_BYTES: Final = 8 * len(FIELDS)
FILE_BYTES: Final = 4096

_HEADER: Final = struct.Struct("<8sIII")
_SEQUENCE: Final = struct.Struct("<Q")
_CHECKSUM: Final = struct.Struct("<I")
_SLOT_EXTRA: Final = 16
_INFO_AT: Final = 64
_VALUES_AT: Final = _INFO_AT + 2 * (INFO_BYTES + _SLOT_EXTRA)


class SlotPair:
    """Two alternating slots of one payload size inside a page; the same class writes and reads them."""

    def __init__(self, offset: int, payload_bytes: int) -> None:
        self.offset = offset
        self.payload_bytes = payload_bytes
        self._slot_bytes = payload_bytes + _SLOT_EXTRA

    def write(self, page: memoryview, sequence: int, payload: bytes) -> None:
        """Write `payload` (exactly `payload_bytes` long) under `sequence` into the slot that is not the latest."""
        assert len(payload) == self.payload_bytes, "it would run into the next slot"
        start = self.offset + (sequence & 1) * self._slot_bytes
        body = _SEQUENCE.pack(sequence) + payload
        page[start : start + len(body)] = body
        _CHECKSUM.pack_into(page, start + len(body), zlib.crc32(body))

    def read(self, page: bytes) -> tuple[int, bytes] | None:
        """Sequence number and payload of the latest valid slot; None where neither is valid."""
        best: tuple[int, bytes] | None = None
        for half in (0, 1):
            start = self.offset + half * self._slot_bytes
            body = page[start : start + _SEQUENCE.size + self.payload_bytes]
            (sequence,) = _SEQUENCE.unpack_from(body)
            (checksum,) = _CHECKSUM.unpack_from(page, start + len(body))
            if sequence and checksum == zlib.crc32(body) and (best is None or sequence > best[0]):
                best = (sequence, body[_SEQUENCE.size :])
        return best


INFO: Final = SlotPair(_INFO_AT, INFO_BYTES)
VALUES: Final = SlotPair(_VALUES_AT, VALUES_BYTES)


def write_header(page: memoryview) -> None:
    """Mark the page as a spool file of this layout."""
    fields = (MAGIC, FINGERPRINT, FILE_BYTES)
    _HEADER.pack_into(page, 0, *fields, zlib.crc32(repr(fields).encode()))


def header_problem(page: bytes) -> str | None:
    """None for a page of this layout, "version" for one of another distclip, "corrupt" for anything else."""
    magic, fingerprint, size, checksum = _HEADER.unpack_from(page)
    if magic != MAGIC or checksum != zlib.crc32(repr((magic, fingerprint, size)).encode()):
        return "corrupt"
    if fingerprint != FINGERPRINT or size != FILE_BYTES:
        return "version"
    return None


def fresh_values() -> array[float]:
    """Values of a rank that has not made a step: counters 0, gauges unknown."""
    values = array("d", [0.0] * len(COUNTERS + BUCKETS) + [float("nan")] * len(GAUGES))
    values[INDEX["consecutive_nonfinite"]] = values[INDEX["consecutive_zero"]] = 0.0
    values[INDEX["phase"]] = 0.0
    return values


assert _VALUES_AT + 2 * (VALUES_BYTES + _SLOT_EXTRA) <= FILE_BYTES
