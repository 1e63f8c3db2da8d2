"""Keeps a node's counters growing over restarts, and its gauges those of the present attempt only.

Each start of the workers writes into a folder of its own. While an attempt runs, `refresh` reads its files; when it is
over, `close_attempt` reads them a last time and adds its counters to those of all attempts before.

A run-level counter is the same on every rank, give or take the step that is being counted just now, so the node's value
is the largest of its ranks'; a step that is repeated after a restart counts again. The files of one rank add up: under
`distclip sidecar` a launcher that restarts its workers, unheard, lets them write into the same folder. A file that is
skipped (damaged, cut short, gone) keeps what was read from it before, so that no counter falls; a rank whose file is
gone has no gauges.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Final

from distclip.telemetry.layout import BUCKETS, COUNTERS, INDEX
from distclip.telemetry.spool import PATTERN, REASONS, Snapshot, SpoolError, read_spool

logger = logging.getLogger("distclip.telemetry")

_PLAIN: Final = len(COUNTERS)
_ALL: Final = len(COUNTERS) + len(BUCKETS)


class Totals:
    """Counters by field name; buckets are cumulative, as Prometheus wants them. Add two with `+`."""

    def __init__(self, numbers: list[float] | None = None) -> None:
        self._numbers = numbers if numbers is not None else [0.0] * _ALL

    @classmethod
    def of(cls, snapshot: Snapshot) -> Totals:
        """The counters of one rank's file."""
        values = snapshot.values
        return cls([*values[:_PLAIN], *accumulate(values[_PLAIN:_ALL])])

    def __getitem__(self, field: str) -> float:
        return self._numbers[INDEX[field]]

    def __add__(self, other: Totals) -> Totals:
        return Totals([a + b for a, b in zip(self._numbers, other._numbers, strict=True)])

    def largest(self, other: Totals) -> Totals:
        """Field by field the larger of the two."""
        return Totals([max(a, b) for a, b in zip(self._numbers, other._numbers, strict=True)])


class Ledger:
    """The spool files of one node over all attempts. Not safe for several threads: `node.Node` holds the lock."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = dict.fromkeys(REASONS, 0)
        self._folder: Path | None = None
        self._known: dict[Path, Snapshot] = {}
        self._present: set[Path] = set()
        self._run_before = Totals()
        self._ranks_before: dict[int, Totals] = {}
        self._warned: set[tuple[str, Path]] = set()

    def open_attempt(self, folder: Path | None) -> None:
        """Close the present attempt and read from `folder` from now on; None where the workers have no spool."""
        self.close_attempt()
        self._known, self._present = {}, set()
        self._folder = folder

    def close_attempt(self) -> None:
        """Read the present attempt's files a last time; its counters stay, and so do its gauges until the next one."""
        if self._folder is None:
            return
        self.refresh()
        self._folder = None
        self._run_before = self._run_before + self._run_now()
        for rank, totals in self._ranks_now().items():
            self._ranks_before[rank] = self._ranks_before.get(rank, Totals()) + totals

    def refresh(self) -> None:
        """Read every file of the present attempt; what cannot be used is skipped, counted, and warned of once."""
        if self._folder is None:
            return
        try:
            listed = set(self._folder.glob(PATTERN))
            if not listed and not self._folder.is_dir():
                self._skip(SpoolError("missing", self._folder), self._folder)
        except OSError:
            listed = set()
            self._skip(SpoolError("unreadable", self._folder), self._folder)
        for path in sorted(listed | set(self._known)):
            try:
                self._known[path] = read_spool(path)
                self._present.add(path)
            except SpoolError as error:
                if error.reason == "missing":
                    self._present.discard(path)
                self._skip(error, path)

    def gauges(self) -> dict[int, Snapshot]:
        """The latest values of each rank of the present (or last) attempt whose file is there, by rank."""
        latest: dict[int, Snapshot] = {}
        for path in sorted(self._present):
            snapshot = self._known[path]
            other = latest.get(snapshot.info.rank)
            if other is None or snapshot.value("report_clock") > other.value("report_clock"):
                latest[snapshot.info.rank] = snapshot
        return dict(sorted(latest.items()))

    def run_totals(self) -> Totals:
        """Counters of the run over all attempts, as this node saw them."""
        return self._run_before if self._folder is None else self._run_before + self._run_now()

    def rank_totals(self) -> Mapping[int, Totals]:
        """Counters of each rank that ever lived on this node, over all attempts."""
        if self._folder is None:
            return dict(sorted(self._ranks_before.items()))
        now = self._ranks_now()
        ranks = sorted({*now, *self._ranks_before})
        return {rank: self._ranks_before.get(rank, Totals()) + now.get(rank, Totals()) for rank in ranks}

    def _run_now(self) -> Totals:
        totals = Totals()
        for of_rank in self._ranks_now().values():
            totals = totals.largest(of_rank)
        return totals

    def _ranks_now(self) -> dict[int, Totals]:
        totals: dict[int, Totals] = {}
        for snapshot in self._known.values():
            mine = Totals.of(snapshot)
            before = totals.get(snapshot.info.rank)
            totals[snapshot.info.rank] = mine if before is None else before + mine
        return totals

    def _skip(self, error: SpoolError, path: Path) -> None:
        self.errors[error.reason] += 1
        if (error.reason, path) not in self._warned:
            self._warned.add((error.reason, path))
            logger.warning("distclip: metrics of a rank are not up to date, training is not touched: %s", error)
