from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from distclip.telemetry.layout import FIELDS, FILE_BYTES, INDEX, fresh_values
from distclip.telemetry.spool import PATTERN, SpoolError, SpoolWriter, read_spool

KILLED = """
import os, signal, sys
from pathlib import Path
from distclip.telemetry.layout import INDEX, fresh_values
from distclip.telemetry.record import RunInfo
from distclip.telemetry.spool import SpoolWriter
writer = SpoolWriter(Path(sys.argv[1]), RunInfo(7, 3, 8, "cpu", "ddp", "fixed", "skip", 2.0, "2", True))
values = fresh_values()
for step in range(1, 1001):
    values[INDEX["steps"]] = step
    writer.publish(values)
os.kill(os.getpid(), signal.SIGKILL)
"""

HAMMER = """
import sys
from pathlib import Path
from array import array
from distclip.telemetry.layout import FIELDS
from distclip.telemetry.record import RunInfo
from distclip.telemetry.spool import SpoolWriter
writer = SpoolWriter(Path(sys.argv[1]), RunInfo(7, 3, 8, "cpu", "ddp", "fixed", "skip", 2.0, "2", True))
number = 0
while True:
    number += 1
    writer.publish(array("d", [float(number)] * len(FIELDS)))
    if number == 1:
        print(writer.path, flush=True)
"""


def test_what_is_written_is_read(tmp_path, make_info):
    info = make_info(3, norm_type=float("inf"), strategy="hsdp+tp")
    writer = SpoolWriter(tmp_path, info)
    values = fresh_values()
    values[INDEX["steps"]] = 12345678.0
    writer.publish(values)
    assert list(tmp_path.iterdir()) == list(tmp_path.glob(PATTERN)) == [writer.path]
    snapshot = read_spool(writer.path)
    assert snapshot.info == info
    assert snapshot.value("steps") == 12345678.0


def test_a_new_file_has_counters_at_zero_and_a_report_time(tmp_path, make_info):
    snapshot = read_spool(SpoolWriter(tmp_path, make_info()).path)
    assert snapshot.value("steps") == 0
    assert snapshot.value("report_timestamp") > 1e9


def test_a_rank_can_describe_itself_anew(tmp_path, make_info):
    writer = SpoolWriter(tmp_path, make_info(strategy="ddp"))
    writer.describe(make_info(strategy="fsdp2"))
    assert read_spool(writer.path).info.strategy == "fsdp2"


def test_long_and_odd_texts_are_shortened_and_never_break_the_file(tmp_path, make_info):
    odd = '"\\\n\0é' * 100
    writer = SpoolWriter(
        tmp_path, make_info(strategy=odd, policy=odd, device=odd, nonfinite=odd, torch_version="9" * 999)
    )
    info = read_spool(writer.path).info
    assert len(info.torch_version) == 64
    assert info.strategy.startswith('"\\???')


def test_a_reader_never_sees_a_half_written_state(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HAMMER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            path = type(tmp_path)(process.stdout.readline().strip())
            seen, reads = set(), 0
            while reads < 3000 or len(seen) < 100:  # the writer must really be writing meanwhile
                snapshot = read_spool(path)
                assert len(set(snapshot.values)) == 1
                seen.add(snapshot.values[0])
                reads += 1
            assert snapshot.info.rank == 7
        finally:
            process.kill()


def test_what_was_published_survives_kill_9(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (path,) = tmp_path.glob(PATTERN)
    assert read_spool(path).value("steps") == 1000


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_bytes(path.read_bytes()[: FILE_BYTES // 2]), "truncated"),
        (lambda path: path.write_bytes(os.urandom(FILE_BYTES)), "corrupt"),
        (lambda path: path.write_bytes(path.read_bytes()[:64] + bytes(FILE_BYTES - 64)), "corrupt"),
        (lambda path: path.unlink(), "missing"),
        (lambda path: (path.unlink(), path.mkdir()), "unreadable"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "empty"),
    ],
)
def test_a_damaged_file_gives_its_reason(tmp_path, make_info, damage, reason):
    path = SpoolWriter(tmp_path, make_info()).path
    copy = tmp_path / "rank-0-1.spool"  # a live file must not be cut short under its writer
    copy.write_bytes(path.read_bytes())
    damage(copy)
    with pytest.raises(SpoolError) as caught:
        read_spool(copy)
    assert caught.value.reason == reason


def test_a_file_of_another_layout_is_refused(tmp_path, make_info, monkeypatch):
    monkeypatch.setattr("distclip.telemetry.layout.FINGERPRINT", 1)
    path = SpoolWriter(tmp_path, make_info()).path
    monkeypatch.undo()
    with pytest.raises(SpoolError) as caught:
        read_spool(path)
    assert caught.value.reason == "version"


def test_a_missing_folder_and_no_room_are_errors_at_once_and_leave_nothing(tmp_path, make_info, room_for):
    with pytest.raises(FileNotFoundError):
        SpoolWriter(tmp_path / "gone", make_info())
    with room_for(FILE_BYTES - 1), pytest.raises(OSError, match="File too large"):
        SpoolWriter(tmp_path, make_info())
    assert not list(tmp_path.iterdir())


def test_every_page_is_reserved(tmp_path, make_info):
    path = SpoolWriter(tmp_path, make_info()).path
    assert path.stat().st_size == FILE_BYTES
    assert path.stat().st_blocks * 512 >= FILE_BYTES
    assert len(FIELDS) * 8 < FILE_BYTES
