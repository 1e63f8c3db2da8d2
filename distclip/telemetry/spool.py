"""A rank's spool file: written by the training process after every step, read by the agent at every scrape.

    writer = SpoolWriter(folder, info)     # rank-3-71234.spool, one page, mapped into memory
    writer.publish(tally.values)           # a few microseconds, no system call, never waits

    snapshot = read_spool(path)            # SpoolError(reason) for anything that is not a good file
    snapshot.value("steps")

Writing into the mapping cannot fail later: the page is reserved with `posix_fallocate` first, so a full file system is
an `OSError` when the file is made and never a SIGBUS in the middle of training. Readers use plain reads, so a file that
somebody cuts short cannot hurt the agent either. A file appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from distclip.telemetry.layout import (
    FILE_BYTES,
    INDEX,
    INFO,
    INFO_BYTES,
    VALUES,
    fresh_values,
    header_problem,
    write_header,
)
from distclip.telemetry.record import RunInfo

PATTERN: Final = "rank-*.spool"
REASONS: Final = ("missing", "unreadable", "empty", "truncated", "version", "corrupt")
"""Why a file or the folder was skipped; the values of the label `reason` of `distclip_collect_errors_total`."""

_READS: Final = 3
_TEXT_LIMIT: Final = 64
"""Characters of a text in `RunInfo` that are kept, so that all of them fit into their slot."""


class SpoolError(Exception):
    """A spool file that cannot be used; `reason` is one of `REASONS`."""

    def __init__(self, reason: str, path: Path) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason


class SpoolWriter:
    """Owns one rank's file. Only the process that made it may write.

    Raises `OSError` from the constructor where the folder is missing, not writable or full.
    """

    def __init__(self, folder: Path, info: RunInfo) -> None:
        self._sequence = 0
        self._info_sequence = 0
        self.path = folder / f"rank-{info.rank}-{os.getpid()}.spool"
        draft = folder / f".{self.path.name}.new"
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, FILE_BYTES)
            self._map = mmap.mmap(descriptor, FILE_BYTES)
            self._page = memoryview(self._map)
            write_header(self._page)
            self.describe(info)
            values = fresh_values()
            values[INDEX["report_timestamp"]], values[INDEX["report_clock"]] = time.time(), time.monotonic()
            self.publish(values)
            os.rename(draft, self.path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def describe(self, info: RunInfo) -> None:
        """Write who this rank is; again when the plan changes."""
        self._info_sequence += 1
        INFO.write(self._page, self._info_sequence, _encode_info(info))

    def publish(self, values: array[float]) -> None:
        """Make `values` (laid out like `layout.FIELDS`) visible to readers, all at once."""
        self._sequence += 1
        VALUES.write(self._page, self._sequence, values.tobytes())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one spool file held at one moment."""

    info: RunInfo
    values: array[float]

    def value(self, field: str) -> float:
        """One field of `layout.FIELDS`; nan where it is not known."""
        return self.values[INDEX[field]]


def read_spool(path: Path) -> Snapshot:
    """Read one file; tries again a bounded number of times where the writer was faster than the read.

    Raises `SpoolError` for a file that is gone, not readable, empty, cut short, of another version or damaged.
    """
    for _ in range(_READS):
        page = _read_page(path)
        problem = header_problem(page)
        if problem is not None:
            raise SpoolError(problem, path)
        info, values = INFO.read(page), VALUES.read(page)
        if info is not None and values is not None:
            numbers = array("d")
            numbers.frombytes(values[1])
            return Snapshot(_decode_info(info[1], path), numbers)
    raise SpoolError("corrupt", path)


def _read_page(path: Path) -> bytes:
    try:
        # Not blocking: where somebody put a named pipe in the file's place, the agent must not wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            page = file.read(FILE_BYTES)
    except FileNotFoundError as error:
        raise SpoolError("missing", path) from error
    except OSError as error:
        raise SpoolError("unreadable", path) from error
    if not page:
        raise SpoolError("empty", path)
    if len(page) < FILE_BYTES:
        raise SpoolError("truncated", path)
    return page


def _encode_info(info: RunInfo) -> bytes:
    fields = {name: getattr(info, name) for name in RunInfo.__slots__}
    for name, value in fields.items():
        if isinstance(value, str):
            fields[name] = "".join(c if c.isascii() and c.isprintable() else "?" for c in value[:_TEXT_LIMIT])
    fields["norm_type"] = str(info.norm_type)  # inf is not JSON
    return json.dumps(fields).encode("ascii").ljust(INFO_BYTES)


def _decode_info(text: bytes, path: Path) -> RunInfo:
    try:
        fields = json.loads(text)
        fields["norm_type"] = float(fields["norm_type"])
        return RunInfo(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise SpoolError("version", path) from error
