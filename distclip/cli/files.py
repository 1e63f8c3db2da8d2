"""`distclip monitoring DIR` and `distclip launch DIR`: write out the folders that travel with the package.

Nothing that a user has changed is lost: when a file is there already with other content, nothing at all is written
until `--force` is given.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from distclip.data import data_path
from distclip.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_WHAT = {
    "monitoring": "Prometheus rules and their tests, Alertmanager, Grafana dashboards, runbooks, compose file",
    "launch": "the example training job and launch templates",
}
_SHOWN_CONFLICTS = 5
_IGNORED = ("__pycache__",)


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the two subcommands to the `distclip` command."""
    for name, what in _WHAT.items():
        parser = subparsers.add_parser(name, help=f"write out {what}", description=f"Write out {what}.")
        parser.add_argument("directory", metavar="DIR", type=Path, help="where to; made when it is not there")
        parser.add_argument("--force", action="store_true", help="overwrite files that differ")
        parser.set_defaults(func=run, name=name)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the subcommand and say in one line what was written."""
    written = write_out(arguments.name, arguments.directory, force=arguments.force)
    print(f"{len(written)} files written to {arguments.directory}")
    return 0


def write_out(name: str, directory: Path, *, force: bool = False) -> list[Path]:
    """Copy the data folder `name` ("launch" or "monitoring") into `directory` and return the files written.

    Files that are there with the same content are left alone and not returned; other files in `directory` stay.

    Raises:
        ConfigError: a file is there with other content and `force` is not given (then nothing is written), `directory`
            is a file, or the system refuses to write.

    Example:
        >>> write_out("monitoring", Path("monitoring"))  # doctest: +SKIP
    """
    source = data_path(name)
    try:
        pairs = [(file, directory / file.relative_to(source)) for file in _files(source)]
        pending = [(file, target) for file, target in pairs if not _same(file, target)]
        conflicts = [target for _, target in pending if target.exists() or target.is_symlink()]
        if conflicts and not force:
            shown = ", ".join(str(target) for target in conflicts[:_SHOWN_CONFLICTS])
            more = f" and {len(conflicts) - _SHOWN_CONFLICTS} more" if len(conflicts) > _SHOWN_CONFLICTS else ""
            raise ConfigError(f"not overwriting {shown}{more}: give --force, or another directory")
        directory.mkdir(parents=True, exist_ok=True)
        for file, target in pending:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
            if file.stat().st_mode & 0o100:
                target.chmod(target.stat().st_mode | 0o111)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error}") from error
    return [target for _, target in pending]


def _files(source: Path) -> Iterator[Path]:
    for path in sorted(source.rglob("*")):
        if path.is_file() and not any(part in _IGNORED for part in path.relative_to(source).parts):
            yield path


def _same(file: Path, target: Path) -> bool:
    return target.is_file() and target.read_bytes() == file.read_bytes()
