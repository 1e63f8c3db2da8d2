"""The pool's handles on its processes: `Nursery`, which forks, and `RankProcess`, which is forked.

Output and stacks of a rank go into unnamed temporary files that the pool reads: nothing is left on disk, however either
side ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from distclip.testing.nursery import FORK, REAP, REPLY, REQUEST, STILL_RUNNING

_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from distclip.testing.nursery import main
main(int(sys.argv[1]), sys.argv[3])
"""
START_TIMEOUT = 120.0
"""Seconds for importing torch, on a machine that has a lot else to do."""


class Nursery:
    """A process that forks ranks. Starting it returns at once; the first `fork` waits until it has imported torch.

    `folder` is the pool's, and is removed by the process when the pool can no longer do so.
    """

    def __init__(self, environment: Mapping[str, str], folder: str) -> None:
        self._control, theirs = socket.socketpair()
        self._output = _unnamed_file()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(sys.path), folder],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the pool's process, which then closes the pool
            )
        self._control.settimeout(START_TIMEOUT)
        self._ready = False

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def fork(self, connection_fd: int, output_fd: int, stack_fd: int) -> int:
        """The pid of a new rank that has the three file descriptors.

        Raises `RuntimeError` when the process could not even start, `OSError` when it has died since.
        """
        self._wait_for_imports()
        socket.send_fds(self._control, [REQUEST.pack(FORK, 0)], [connection_fd, output_fd, stack_fd])
        return self._reply()

    def exit_code(self, pid: int) -> int | None:
        """How a rank ended, once only; None while it runs, or where nobody knows because the nursery is gone."""
        try:
            self._control.sendall(REQUEST.pack(REAP, pid))
            code = self._reply()
        except OSError:
            return None
        return None if code == STILL_RUNNING else code

    def close(self) -> None:
        """End it, and with it every rank that it forked and that still runs."""
        self._control.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._output)

    def _wait_for_imports(self) -> None:
        if not self._ready:
            try:
                self._reply()
            except OSError as error:
                text = _from(self._output, 0).decode(errors="replace")
                raise RuntimeError(f"the process that forks the ranks could not start:\n{text}") from error
            self._ready = True

    def _reply(self) -> int:
        reply = self._control.recv(REPLY.size)
        if len(reply) < REPLY.size:
            raise ConnectionResetError("the process that forks the ranks has ended")
        (value,) = REPLY.unpack(reply)
        return int(value)


class RankProcess:
    """One rank process, alive or not."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._output = _unnamed_file()
        self._stacks = _unnamed_file()
        self._output_read = 0
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                self.pid = nursery.fork(theirs.fileno(), self._output, self._stacks)
            except BaseException:
                self._forget()
                raise
            self.connection = Connection(ours.detach())
        self.usable = True
        """Not ended by us and not known to be dead."""
        self.exit_code: int | None = None
        self._idle = False

    def ready(self, timeout: float) -> bool:
        """Wait until it has cleaned up after its last job (or has started); False if it died or does not come back."""
        if self.usable and not self._idle:
            try:
                self._idle = self.connection.poll(timeout)
                if self._idle:
                    self.connection.recv()
            except (EOFError, OSError):
                self._idle = False
        # A rank that waits for a job sends nothing: something to read is the end of the connection.
        return self.usable and self._idle and not wait([self.connection], 0)

    def send(self, job: Any) -> None:
        """Hand it a job. A rank that has just died is noticed when its answer is awaited."""
        self._idle = False
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(job)

    def release(self) -> None:
        """Tell it that no other rank needs its connections any more."""
        if self.usable:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.connection.send(None)

    def output(self) -> str:
        """What it has written to stdout and stderr since the last call."""
        text = _from(self._output, self._output_read)
        self._output_read += len(text)
        return text.decode(errors="replace")

    def stack(self) -> str:
        """Where every Python thread of it is just now; empty where it can't even run a signal handler."""
        start = os.fstat(self._stacks).st_size
        try:
            os.kill(self.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return ""
        text, previous = b"", b""
        end = time.monotonic() + 1.0
        while (not text or text != previous) and time.monotonic() < end:
            time.sleep(0.02)
            previous, text = text, _from(self._stacks, start)
        return text.decode(errors="replace")

    def crash(self) -> str:
        """The stack that a fatal signal left behind, if any."""
        return _from(self._stacks, 0).decode(errors="replace")

    def end(self, grace: float = 0.0) -> int | None:
        """Make sure that it has ended: wait `grace` seconds for it to end by itself, then kill it.

        Returns the exit code as `subprocess` does (minus the number of a signal); None where nobody knows.
        """
        if self.usable:
            self.usable = False
            self.connection.close()
            code = self._wait(grace) if grace else None
            # Where the nursery is gone its ranks are too, and the pid may belong to somebody else.
            if code is None and self._nursery.alive:
                os.kill(self.pid, signal.SIGKILL)
                code = self._wait(5.0)
            self.exit_code = code
        return self.exit_code

    def close(self) -> None:
        """End it and forget what it wrote."""
        self.end()
        self._forget()

    def _forget(self) -> None:
        for file in (self._output, self._stacks):
            os.close(file)

    def _wait(self, timeout: float) -> int | None:
        end = time.monotonic() + timeout
        while (code := self._nursery.exit_code(self.pid)) is None and self._nursery.alive and time.monotonic() < end:
            time.sleep(0.005)
        return code


def _unnamed_file() -> int:
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    return descriptor


def _from(file: int, start: int) -> bytes:
    """The rest of a file that another process writes to; the shared position stays where the writer has it."""
    size = os.fstat(file).st_size
    return os.pread(file, size - start, start) if size > start else b""
