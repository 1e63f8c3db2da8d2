"""The script that fetches Prometheus and Alertmanager, where it cannot; `make test` itself begins with where it can."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "fetch_servers.sh"
BASICS = (
    "sh",
    "dirname",
    "cksum",
    "cat",
    "mktemp",
    "mkdir",
    "rm",
    "mv",
    "grep",
    "tail",
    "head",
    "sed",
    "basename",
)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder for PATH with nothing but what every system has."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in BASICS:
        program = shutil.which(name)
        assert program is not None
        (folder / name).symlink_to(program)
    return folder


def _fake(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def _fetch(path: Path, target: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(SCRIPT), str(target)],
        env={"PATH": str(path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_system_without_apt(bare, tmp_path):
    result = _fetch(bare, tmp_path / "tools")
    assert result.returncode == 0
    assert result.stdout == (
        "No Prometheus and Alertmanager here (this system has no apt-get): going on without them.\n"
    )
    assert result.stderr == ""
    assert list(tmp_path.iterdir()) == [bare]


def test_in_ci_a_missing_server_is_a_failure(bare, tmp_path):
    assert _fetch(bare, tmp_path / "tools", CI="true").returncode == 1
    assert _fetch(bare, tmp_path / "tools", CI="false").returncode == 0


def test_an_archive_that_does_not_answer_leaves_nothing_behind(bare, tmp_path):
    _fake(bare, "apt-get", "echo 'E: Unable to fetch some archives'; exit 100")
    _fake(bare, "dpkg-deb", "exit 1")
    target = tmp_path / "with a space" / "tools"
    target.parent.mkdir()
    result = _fetch(bare, target)
    assert result.returncode == 0
    assert "(apt-get: E: Unable to fetch some archives): going on without them." in result.stdout
    assert list(target.parent.iterdir()) == []


def test_a_broken_package_leaves_nothing_behind(bare, tmp_path):
    _fake(bare, "apt-get", 'case "$*" in *download*) : >half.deb ;; esac')
    _fake(bare, "dpkg-deb", 'mkdir -p "$3/usr"; exit 2')
    result = _fetch(bare, tmp_path / "tools")
    assert result.returncode == 0
    assert "(cannot unpack half.deb)" in result.stdout
    assert list(tmp_path.iterdir()) == [bare]


def test_apt_is_kept_to_private_folders(bare, tmp_path):
    """So it needs neither root nor the system's lists, and changes neither."""
    _fake(bare, "apt-get", f"for word; do echo \"$word\" >>'{tmp_path}/said'; done; exit 100")
    _fake(bare, "dpkg-deb", "exit 1")
    _fetch(bare, tmp_path / "tools")
    said = (tmp_path / "said").read_text().splitlines()
    options = dict(word.split("=", 1) for word in said if "=" in word)
    for name in ("Dir::State", "Dir::State::Lists", "Dir::Cache", "Dir::Cache::Archives"):
        assert options[name].startswith(f"{tmp_path}/tools.")
    assert "update" in said
    assert "download" in said
    assert "install" not in said


def test_servers_that_are_installed_are_enough(bare, tmp_path):
    for name in ("prometheus", "promtool", "prometheus-alertmanager", "amtool"):
        _fake(bare, name, "exit 0")
    result = _fetch(bare, tmp_path / "tools", CI="true")
    assert (result.returncode, result.stdout) == (0, "")
    assert not (tmp_path / "tools").exists()
