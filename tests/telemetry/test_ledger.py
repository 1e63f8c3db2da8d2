from __future__ import annotations

import shutil

import pytest

from distclip.telemetry.layout import BUCKETS, NORM_BOUNDS
from distclip.telemetry.ledger import Ledger
from distclip.telemetry.spool import SpoolWriter
from distclip.telemetry.tally import Streaks, Tally


class Rank:
    """A rank's spool file in a folder, fed with steps."""

    def __init__(self, folder, info, make_record):
        self._writer = SpoolWriter(folder, info)
        self.path = folder / f"rank-{info.rank}-{info.rank}.spool"
        self._writer.path.rename(self.path)  # ranks of one process would share a name
        self._tally, self._streaks, self._make = Tally(), Streaks(), make_record

    def step(self, step, norm=2.0, **changes):
        self._tally.add(self._make(step, norm, **changes), self._streaks)
        self._writer.publish(self._tally.values)


@pytest.fixture
def rank(make_record, make_info):
    return lambda folder, number=0: Rank(folder, make_info(number), make_record)


@pytest.fixture
def attempts(tmp_path):
    folders = [tmp_path / f"attempt-{number}" for number in range(3)]
    for folder in folders:
        folder.mkdir()
    return folders


def test_counters_are_the_nodes_largest_and_grow_over_attempts(rank, attempts):
    ledger = Ledger()
    ledger.open_attempt(attempts[0])
    zero, one = rank(attempts[0], 0), rank(attempts[0], 1)
    for step in (1, 2):
        zero.step(step)
    one.step(1)
    ledger.refresh()
    assert ledger.run_totals()["steps"] == 2
    assert {number: totals["steps"] for number, totals in ledger.rank_totals().items()} == {0: 2, 1: 1}

    one.step(2)
    zero.step(3, diverged=True)  # after the last scrape of this attempt: still counted
    ledger.open_attempt(attempts[1])
    assert ledger.run_totals()["steps"] == 3
    assert ledger.run_totals()["diverged"] == 1
    assert ledger.gauges() == {}

    rank(attempts[1], 0).step(3, norm=0.0, diverged=True)  # repeated after the restart
    ledger.refresh()
    assert ledger.run_totals()["steps"] == 4
    assert ledger.run_totals()["diverged"] == 2
    assert ledger.run_totals()["zero"] == 1
    assert ledger.gauges()[0].value("norm") == 0.0
    assert set(ledger.gauges()) == {0}
    assert ledger.rank_totals()[1]["steps"] == 2  # it left; its counters stay


def test_a_closed_attempt_keeps_its_last_gauges_and_is_not_read_again(rank, attempts):
    ledger = Ledger()
    ledger.open_attempt(attempts[0])
    rank(attempts[0]).step(5)
    ledger.close_attempt()
    shutil.rmtree(attempts[0])
    ledger.refresh()
    ledger.close_attempt()
    assert ledger.gauges()[0].value("last_step") == 5
    assert ledger.run_totals()["steps"] == 1
    assert ledger.rank_totals()[0]["steps"] == 1
    assert not any(ledger.errors.values())


def test_buckets_are_cumulative(rank, attempts):
    ledger = Ledger()
    ledger.open_attempt(attempts[0])
    worker = rank(attempts[0])
    for norm in (1.0, 1.0, 5.0, 1e9):
        worker.step(1, norm)
    ledger.refresh()
    totals = ledger.run_totals()
    assert [totals[name] for name in BUCKETS] == [0.0] * 20 + [2.0] * 2 + [3.0] * 11 + [4.0]
    assert NORM_BOUNDS[20] == 1.0


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b"x" * 4096), "corrupt"),
        (lambda path: path.unlink(), "missing"),
        (lambda path: (path.rename(path.with_suffix(".moved")), path.write_bytes(b"")), "empty"),
        (lambda path: (path.rename(path.with_suffix(".moved")), path.write_bytes(b"x")), "truncated"),
    ],
)
def test_a_bad_file_is_skipped_counted_warned_of_once_and_no_counter_falls(rank, attempts, damage, reason, caplog):
    ledger = Ledger()
    ledger.open_attempt(attempts[0])
    zero, one = rank(attempts[0], 0), rank(attempts[0], 1)
    zero.step(1)
    for step in (1, 2, 3):
        one.step(step)
    ledger.refresh()
    damage(one.path)
    for _ in range(2):
        ledger.refresh()
    zero.step(2)
    ledger.refresh()
    assert ledger.errors[reason] == 3
    assert sum(ledger.errors.values()) == 3
    assert len(caplog.records) == 1
    assert ledger.run_totals()["steps"] == 3
    assert ledger.gauges()[0].value("last_step") == 2
    assert (1 in ledger.gauges()) == (reason != "missing")
    ledger.open_attempt(attempts[1])
    assert ledger.run_totals()["steps"] == 3


def test_a_folder_that_is_gone_is_counted(rank, attempts, caplog):
    ledger = Ledger()
    ledger.open_attempt(attempts[0])
    rank(attempts[0]).step(1)
    ledger.refresh()
    shutil.rmtree(attempts[0])
    ledger.refresh()
    assert ledger.errors["missing"] == 2  # the folder, and the file that was known
    assert ledger.run_totals()["steps"] == 1
    assert ledger.gauges() == {}


def test_other_files_in_the_folder_are_nobodys_business(attempts):
    (attempts[0] / ".rank-0-1.spool.new").write_bytes(b"")
    (attempts[0] / "notes.txt").write_bytes(b"")
    ledger = Ledger()
    ledger.open_attempt(attempts[0])
    ledger.refresh()
    assert not any(ledger.errors.values())


def test_processes_of_one_rank_add_up_and_the_latest_has_the_gauges_though_the_clock_was_set_back(rank, attempts):
    """As under a launcher that restarts its workers, of which a sidecar knows nothing."""
    ledger = Ledger()
    ledger.open_attempt(attempts[0])
    first = rank(attempts[0])
    for step in (1, 2, 3):
        first.step(step, timestamp=5000.0)
    ledger.refresh()
    first.path.rename(attempts[0] / "rank-0-9.spool")  # a process of its own, whose name sorts behind the next one's
    again = rank(attempts[0])
    again.step(3, timestamp=1000.0, norm=7.0)
    rank(attempts[0], 1).step(3)
    ledger.refresh()
    assert ledger.run_totals()["steps"] == 4
    assert ledger.rank_totals()[0]["steps"] == 4
    assert ledger.gauges()[0].value("norm") == 7.0
    ledger.open_attempt(attempts[1])
    assert ledger.run_totals()["steps"] == 4


def test_no_spool_is_no_error():
    ledger = Ledger()
    ledger.open_attempt(None)
    ledger.refresh()
    assert ledger.run_totals()["steps"] == 0
    assert not any(ledger.errors.values())
