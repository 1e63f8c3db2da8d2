"""The `distclip` command: one module per group of subcommands, each with `add_parser(subparsers)`.

A subcommand sets `func`, a function from the parsed arguments to an exit code. What went wrong in a way that the user
can mend is raised as `DistclipError` and ends as one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import distclip
from distclip.errors import DistclipError

_COMMANDS = ("distclip.cli.demo", "distclip.cli.check", "distclip.cli.sidecar", "distclip.cli.files")
"""Modules that add subcommands, in the order of the help page. They import nothing heavy before they run."""

_EXIT_ERROR = 2
_EXIT_INTERRUPTED = 130  # what a shell reports for a process that ended by SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `distclip` command with `argv` (default: the process's arguments) and return its exit code.

    Usage errors and `--help` end the process as argparse does, with code 2 and 0.

    Example:
        >>> main(["monitoring", "/tmp/monitoring-of-distclip"])  # doctest: +SKIP
        0
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.func(arguments)
    except DistclipError as error:
        print(f"distclip: error: {error}", file=sys.stderr)
        return _EXIT_ERROR
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distclip",
        description="Correct gradient clipping for distributed PyTorch: one norm, one decision, metrics and alerts.",
    )
    parser.add_argument("--version", action="version", version=f"distclip {distclip.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in _COMMANDS:
        importlib.import_module(name).add_parser(subparsers)
    return parser
