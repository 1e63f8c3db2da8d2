from __future__ import annotations

import argparse
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import distclip
import distclip.cli
from distclip.cli import main
from distclip.errors import ConfigError


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"distclip {distclip.__version__}\n"


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    page = capsys.readouterr().out
    for command in ("demo", "monitoring", "launch"):
        assert re.search(rf"^    {command}\b", page, re.MULTILINE)


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["monitoring"], ["launch", "a", "b"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: distclip" in capsys.readouterr().err


def _command(outcome):
    """A module with the subcommand `try`, which returns or raises `outcome`."""

    def run(arguments: argparse.Namespace) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return SimpleNamespace(add_parser=lambda subparsers: subparsers.add_parser("try").set_defaults(func=run))


@pytest.mark.parametrize(
    ("outcome", "code", "text"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (ConfigError("max_norm is wrong"), 2, "distclip: error: max_norm is wrong\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_a_command_ends(outcome, code, text, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "a_command", _command(outcome))
    monkeypatch.setattr(distclip.cli, "_COMMANDS", ("a_command",))
    assert main(["try"]) == code
    assert capsys.readouterr().err == text


def test_a_bug_is_not_hidden(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_command", _command(ZeroDivisionError()))
    monkeypatch.setattr(distclip.cli, "_COMMANDS", ("a_command",))
    with pytest.raises(ZeroDivisionError):
        main(["try"])


def test_as_a_module():
    command = [sys.executable, "-m", "distclip.cli", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == f"distclip {distclip.__version__}\n"
