"""Child processes that never outlive the demo, however it ends.

- Ended in the ordinary way, or by Ctrl-C, SIGTERM or SIGHUP: `Children.stop` ends each child and all that it started,
  first politely, then not. A child is the head of a session of its own, so that a Ctrl-C in the terminal reaches only
  the demo, which then ends the children in order.
- Killed with SIGKILL: no code of the demo runs any more. Linux itself then sends each child SIGTERM, as it was asked to
  (`PR_SET_PDEATHSIG`); torchrun's agent and Prometheus both end on it and take what they started with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
GRACE = 10.0
"""Seconds that children have to end on SIGTERM before they are killed."""


class Stopped(KeyboardInterrupt):
    """A signal asked the demo to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Within, the first SIGINT, SIGTERM or SIGHUP raises `Stopped`; later ones are ignored, so that cleaning up ends.

    SIGINT too, because a shell starts background jobs with SIGINT ignored, which Python inherits.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signum)

    with _handled_by(stop):
        yield


@contextlib.contextmanager
def _handled_by(handler: Any) -> Iterator[None]:
    before = {each: signal.signal(each, handler) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)


class Children:
    """A context manager that starts processes and, at its end, leaves none."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []

    def start(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process whose output goes to the file `log`."""
        output = log.open("wb")
        self._logs.append(output)
        parent = os.getpid()

        def before_exec() -> None:
            _die_with_parent(parent)

        child = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=before_exec,
        )
        self._running.append(child)
        return child

    def stop(self) -> None:
        """End all children and everything below them; returns when they are gone, after `GRACE` seconds by force.

        Signals that would stop the demo are ignored meanwhile: it is about to end, and nothing may be forgotten.
        """
        with _handled_by(signal.SIG_IGN):
            self._end_all()

    def _end_all(self) -> None:
        running = [child for child in self._running if child.poll() is None]
        families = {child.pid: _descendants(child.pid) for child in running}
        for child in running:
            child.terminate()
        end = time.monotonic() + GRACE
        for child in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))
            # A torchrun agent starts its workers in sessions of their own, so its death need not be theirs.
            for pid, started in {**families[child.pid], **_descendants(child.pid)}.items():
                if _start_time(pid) == started:  # still the same process, and not a later one with its number
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            child.kill()
            child.wait()
        self._running.clear()
        for log in self._logs:
            log.close()
        self._logs.clear()

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _die_with_parent(parent: int) -> None:
    """Runs in the child before it becomes the program: ask Linux for SIGTERM when the parent is gone."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it was gone before the request
            os._exit(1)


_libc = ctypes.CDLL(None)  # loaded here, because between fork and exec nothing should be


def _descendants(pid: int) -> dict[int, int]:
    """Processes below `pid`, with the time each started at; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    starts: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(folder.name))
        if fields is not None:
            children.setdefault(fields[0], []).append(int(folder.name))
            starts[int(folder.name)] = fields[1]
    found: dict[int, int] = {}
    pending = [pid]
    while pending:
        for child in children.get(pending.pop(), []):
            found[child] = starts[child]
            pending.append(child)
    return found


def _start_time(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None else fields[1]


def _stat(pid: int) -> tuple[int, int] | None:
    """Parent and start time (clock ticks since boot) of a process, or None when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold spaces and brackets
    return None if fields[0] == "Z" else (int(fields[1]), int(fields[19]))
