"""`distclip sidecar -- COMMAND`: metrics of a run that another launcher than torchrun starts."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from distclip.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the `distclip` command."""
    parser = subparsers.add_parser(
        "sidecar",
        help="run a command (deepspeed, accelerate, srun, ...) with an endpoint for Prometheus beside it",
        usage="distclip sidecar -- COMMAND [ARGUMENT ...]",
        description="Run a command with an endpoint for Prometheus beside it. The DISTCLIP_* variables say where.",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, after --")
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the subcommand; its exit code is the command's."""
    from distclip.launcher.sidecar import run_beside  # not before it is needed: `--help` is to be quick

    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ConfigError("nothing to run: distclip sidecar -- COMMAND")
    return run_beside(command, os.environ)
