from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distclip.cli import main
from distclip.cli.files import write_out
from distclip.data import data_path
from distclip.errors import ConfigError


def _tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("name", ["launch", "monitoring"])
def test_writes_the_folder(name, tmp_path, capsys):
    target = tmp_path / "made" / name
    assert main([name, str(target)]) == 0
    assert _tree(target) == _tree(data_path(name))
    assert f"{len(_tree(target))} files written to {target}" in capsys.readouterr().out


def test_a_second_time_changes_nothing(tmp_path):
    write_out("monitoring", tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert write_out("monitoring", tmp_path) == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_what_a_user_changed_is_kept_and_nothing_else_written(tmp_path, capsys):
    mine = tmp_path / "prometheus" / "prometheus.yml"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert main(["monitoring", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error == f"distclip: error: not overwriting {mine}: give --force, or another directory\n"
    assert _tree(tmp_path) == {"prometheus/prometheus.yml": b"mine"}


def test_many_conflicts_are_counted(tmp_path):
    for path in write_out("monitoring", tmp_path):
        path.write_text("mine")
    with pytest.raises(ConfigError, match=r"not overwriting (\S+, ){4}\S+ and \d+ more: "):
        write_out("monitoring", tmp_path)


def test_force_overwrites_and_leaves_other_files(tmp_path):
    mine = tmp_path / "README.md"
    mine.write_text("mine")
    other = tmp_path / "other.txt"
    other.write_text("other")
    assert main(["monitoring", str(tmp_path), "--force"]) == 0
    assert mine.read_bytes() == (data_path("monitoring") / "README.md").read_bytes()
    assert other.read_text() == "other"


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "here").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*here"):
        write_out("launch", tmp_path / "here")


def test_a_folder_in_the_way_of_a_file(tmp_path):
    (tmp_path / "README.md").mkdir()
    with pytest.raises(ConfigError, match=r"not overwriting .*README\.md"):
        write_out("monitoring", tmp_path)
    with pytest.raises(ConfigError, match=r"cannot write to .*README\.md"):
        write_out("monitoring", tmp_path, force=True)


def test_a_folder_that_may_not_be_written():
    """Nobody can make a folder there, root neither."""
    with pytest.raises(ConfigError, match="cannot write to /proc/distclip"):
        write_out("launch", Path("/proc/distclip"))


def test_a_script_stays_executable(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    script = source / "start.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o555)
    monkeypatch.setattr("distclip.cli.files.data_path", lambda name: source)
    (written,) = write_out("launch", tmp_path / "target")
    assert os.access(written, os.X_OK)
    written.write_text("and can be changed")


def test_written_rules_are_found_by_the_written_configuration(tmp_path):
    write_out("monitoring", tmp_path)
    assert sorted(path.name for path in (tmp_path / "prometheus" / "rules").iterdir()) == [
        "gradients.yaml",
        "runs.yaml",
    ]


def test_the_command_needs_no_torch(tmp_path):
    """`distclip --help` answers at once: torch alone takes two seconds to import."""
    program = "import sys, distclip.cli; distclip.cli.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program, "launch", str(tmp_path)], timeout=60, capture_output=True)
    assert result.returncode == 0, result.stderr
