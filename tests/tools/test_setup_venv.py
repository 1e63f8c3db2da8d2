"""What the set-up script does again and what it does not, with an interpreter that only writes down what it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "setup_venv.sh"
PYTHON = """\
#!/bin/sh
case "$1 $2" in
    "-c import sys; print"*) echo "${VERSION:-3.11}" ;;
    "-c import sys, venv"*) exit "${TOO_OLD:-0}" ;;
    "-m venv") rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo venv >>"$SAID" ;;
    "-m pip") echo "pip $*" >>"$SAID"; exit "${PIP_FAILS:-0}" ;;
esac
"""


class Clone:
    """A folder with a space in its name that looks enough like a clone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a clone"
        (self.folder / "tools").mkdir(parents=True)
        shutil.copy(SCRIPT, self.folder / "tools")
        (self.folder / "pyproject.toml").write_text("project")
        (self.folder / "constraints.txt").write_text("constraints")
        self._python = folder / "python"
        self._python.write_text(PYTHON)
        self._python.chmod(0o755)
        self._said = folder / "said"

    def set_up(self, *arguments: str, expect: int = 0, **environment: str) -> list[str]:
        """Run the script; returns what the interpreter was told to do."""
        self._said.write_text("")
        result = subprocess.run(
            ["sh", str(self.folder / "tools" / SCRIPT.name), *arguments],
            cwd="/",
            env={"PATH": os.environ["PATH"], "PYTHON": str(self._python), "SAID": str(self._said), **environment},
            timeout=60,
        )
        assert result.returncode == expect
        return [line.split()[0] for line in self._said.read_text().splitlines()]

    @property
    def last_call(self) -> str:
        return self._said.read_text().splitlines()[-1]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_once_is_enough(clone):
    assert clone.set_up() == ["venv", "pip"]
    assert "--constraint constraints.txt" in clone.last_call
    assert "--editable .[dev]" in clone.last_call
    assert clone.set_up() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_change_installs_again_into_the_same_venv(clone, name):
    clone.set_up()
    (clone.folder / name).write_text("changed")
    assert clone.set_up() == ["pip"]
    assert clone.set_up() == []


def test_other_options_for_pip_install_again(clone):
    clone.set_up()
    assert clone.set_up("--extra-index-url", "file:///wheels") == ["pip"]
    assert "--extra-index-url file:///wheels" in clone.last_call


def test_what_failed_is_tried_again(clone):
    assert clone.set_up(expect=1, PIP_FAILS="1") == ["venv", "pip"]
    assert clone.set_up() == ["pip"]


def test_a_clone_that_was_moved_or_has_another_python_gets_a_new_venv(clone):
    """Scripts in a venv hold the path that it was made at."""
    clone.set_up()
    clone.folder = clone.folder.rename(clone.folder.with_name("moved"))
    assert clone.set_up() == ["venv", "pip"]
    assert clone.set_up(VERSION="3.12") == ["venv", "pip"]


def test_a_python_that_will_not_do(clone, capfd):
    assert clone.set_up(expect=1, TOO_OLD="1") == []
    assert "needs Python 3.10 or later with venv" in capfd.readouterr().err
