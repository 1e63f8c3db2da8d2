"""The spool folder of one agent: on tmpfs, private, removed at the end, and swept by the next agent if that failed.

    folder = SpoolFolder.create(run, wanted=None)     # /dev/shm/distclip-r1-5f0c..., or None with a warning
    attempt = folder.attempt(0, ranks=8)              # .../attempt-0, where eight ranks are sure to find room
    folder.remove()

An agent that is killed cannot clean up. It holds a lock on a file in its folder, which the kernel lets go when the
process dies, so the next agent that starts on the machine finds such folders and removes them. The file says which
machine that was, because on some network file systems a lock is not seen by the others.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import socket
import tempfile
import uuid
from pathlib import Path
from typing import Final

from distclip.telemetry.layout import FILE_BYTES

logger = logging.getLogger("distclip.telemetry")

_LOCK: Final = "agent.lock"
_ATTEMPT: Final = "attempt-"


def file_name_of(run: str) -> str:
    """The run id as a part of a file name: other characters than letters, digits, dot, minus become "_"."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", run)[:64]


def is_attempt(path: Path) -> bool:
    """Whether an agent made this folder for its workers; else it is where somebody wants an agent's folder to be."""
    return path.name.startswith(_ATTEMPT)


class SpoolFolder:
    """One agent's folder, with one folder in it per start of the workers."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._pid = os.getpid()

    @classmethod
    def create(cls, run: str, wanted: Path | None) -> SpoolFolder | None:
        """Make the folder in `wanted`, else in /dev/shm, else in the temporary folder; None where nothing can be made.

        Each place that was asked for and cannot be used costs one warning.
        """
        for base in (wanted, Path("/dev/shm"), Path(tempfile.gettempdir())):
            if base is None:
                continue
            try:
                base.mkdir(parents=True, exist_ok=True)
                _sweep(base)
                return cls._create_in(base, run)
            except OSError as error:
                if base == wanted:
                    logger.warning(
                        "distclip: the spool cannot be in DISTCLIP_SPOOL=%s, using the default: %s", base, error
                    )
        logger.warning("distclip: no place for a spool folder; there are no metrics of the ranks, training goes on")
        return None

    @classmethod
    def _create_in(cls, base: Path, run: str) -> SpoolFolder:
        name = f"distclip-{file_name_of(run)}-{uuid.uuid4().hex[:12]}"
        draft = base / f".{name}.new"
        draft.mkdir(mode=0o700)
        try:
            _reserve(draft, 2)
            lock = os.open(draft / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _try_lock(lock)
            os.write(lock, _machine())
            return cls(draft.rename(base / name), lock)  # under its name only with the lock: no sweep can come between
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def attempt(self, number: int, ranks: int) -> Path | None:
        """A new empty folder for one start of the workers; None, with a warning, where `ranks` files find no room."""
        path = self.path / f"{_ATTEMPT}{number}"
        try:
            path.mkdir(mode=0o700)
            _reserve(path, ranks)
            return path
        except OSError as error:
            logger.warning(
                "distclip: no metrics of the ranks, training goes on: the spool folder cannot be used: %s", error
            )
            return None

    def drop(self, attempt: Path) -> None:
        """Remove the folder of an attempt that is over and counted."""
        shutil.rmtree(attempt, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything. In a forked child nothing happens; a second call does nothing."""
        if os.getpid() == self._pid and self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _reserve(folder: Path, files: int) -> None:
    """Raises `OSError` where `files` spool files do not fit into the file system now."""
    probe = folder / ".probe"
    descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, files * FILE_BYTES)
    finally:
        os.close(descriptor)
        probe.unlink()


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _machine() -> bytes:
    """What tells this machine from all others, as long as it runs; the same in all of its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:  # a sandbox that shows little of the kernel
        return socket.gethostname().encode()


def _sweep(base: Path) -> None:
    """Remove folders of this user's agents on this machine that are dead."""
    for folder in base.glob("distclip-*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # not a spool folder, or one that its agent removes at this moment
        try:
            if _try_lock(descriptor) and os.read(descriptor, 256) == _machine():
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
