"""A sink for tests of what a clipper reports."""

from __future__ import annotations

from distclip.telemetry.record import RunInfo, StepRecord


class Recorder:
    """Keeps what it is given; no phase is entered and nobody closes it."""

    def __init__(self) -> None:
        self.info: list[RunInfo] = []
        self.records: list[StepRecord] = []
        self.applied = 0

    def open(self, info: RunInfo) -> None:
        self.info.append(info)

    def record(self, record: StepRecord) -> None:
        self.records.append(record)

    def nonfinite_applied(self) -> None:
        self.applied += 1

    def phase(self, name: str) -> None:
        raise AssertionError("no phase was entered")

    def close(self) -> None:
        raise AssertionError("nobody closed it")
