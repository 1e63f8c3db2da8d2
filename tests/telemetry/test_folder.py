from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distclip.telemetry.folder import SpoolFolder, file_name_of, is_attempt
from distclip.telemetry.layout import FILE_BYTES

KILLED = """
import os, signal, sys
from pathlib import Path
from distclip.telemetry.folder import SpoolFolder
folder = SpoolFolder.create("dead", Path(sys.argv[1]))
folder.attempt(0, 2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_made_private_and_removed(tmp_path):
    folder = SpoolFolder.create("a/b c", tmp_path / "new")
    assert folder.path.parent == tmp_path / "new"
    assert folder.path.name.startswith("distclip-a_b_c-")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    attempt = folder.attempt(0, ranks=4)
    assert attempt.parent == folder.path
    assert not list(attempt.iterdir())
    assert is_attempt(attempt)
    assert not is_attempt(folder.path)
    folder.remove()
    folder.remove()
    assert not list((tmp_path / "new").iterdir())


def test_two_agents_of_one_run_have_two_folders(tmp_path):
    one, two = SpoolFolder.create("r", tmp_path), SpoolFolder.create("r", tmp_path)
    assert one.path != two.path
    two.remove()
    assert one.path.is_dir()
    one.remove()


def test_by_default_it_is_in_memory():
    folder = SpoolFolder.create("r", None)
    try:
        assert folder.path.parent == Path("/dev/shm")
    finally:
        folder.remove()


@pytest.mark.parametrize("wanted", ["/proc/nowhere", "/dev/null/x"])
def test_a_place_that_cannot_be_used_is_one_warning_and_the_default(wanted, caplog):
    folder = SpoolFolder.create("r", Path(wanted))
    try:
        assert folder.path.parent == Path("/dev/shm")
        assert len(caplog.records) == 1
        assert f"DISTCLIP_SPOOL={wanted}" in caplog.text
    finally:
        folder.remove()


def test_nowhere_at_all_is_none_and_leaves_nothing(tmp_path, room_for, caplog):
    run = f"nowhere-{os.getpid()}"
    with room_for(FILE_BYTES):
        assert SpoolFolder.create(run, tmp_path) is None
    assert len(caplog.records) == 2
    assert "training goes on" in caplog.records[-1].getMessage()
    assert not list(tmp_path.iterdir())
    assert not list(Path("/dev/shm").glob(f"*distclip-{run}-*"))


def test_no_room_for_all_ranks_is_found_before_they_start(tmp_path, room_for, caplog):
    folder = SpoolFolder.create("r", tmp_path)
    with room_for(7 * FILE_BYTES):
        enough, short = folder.attempt(0, ranks=7), folder.attempt(1, ranks=8)
    folder.remove()
    assert enough is not None
    assert short is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_the_next_agent_removes_what_a_killed_one_left_and_nothing_else(tmp_path):
    living = SpoolFolder.create("living", tmp_path)
    (tmp_path / "distclip-not-a-spool").mkdir()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("distclip-dead-*"))) == 1
    following = SpoolFolder.create("next", tmp_path)
    assert not list(tmp_path.glob("distclip-dead-*"))
    assert living.path.is_dir()
    assert (tmp_path / "distclip-not-a-spool").is_dir()
    living.remove()
    following.remove()


def test_what_another_machine_left_on_a_shared_file_system_is_left_alone(tmp_path):
    """Where locks are not seen by other machines, its agent may well live."""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (elsewhere,) = tmp_path.iterdir()
    (elsewhere / "agent.lock").write_text("another machine")
    SpoolFolder.create("next", tmp_path).remove()
    assert list(tmp_path.iterdir()) == [elsewhere]


def test_a_forked_child_does_not_remove_its_parents_folder(tmp_path):
    folder = SpoolFolder.create("r", tmp_path)
    child = os.fork()
    if child == 0:
        folder.remove()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert folder.path.is_dir()
    folder.remove()


def test_file_names():
    assert file_name_of("team/run:1 (a)") == "team_run_1__a_"
    assert len(file_name_of("x" * 500)) == 64
