"""`RankPool`: real rank processes, kept warm, that run a function on N ranks of a fresh gloo process group.

What a job may count on, in every rank:

- The default process group holds exactly the ranks asked for. It is new, gone afterwards, and its time limit is 15 s.
- `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE` are set as torchrun sets them.
- One thread (`OMP_NUM_THREADS=1`), the same random seed, and the environment that the pool was made in; what the job
  changes of environment, folder, warning filters, default dtype and device, grad mode or seeds is undone after it.
  Changes inside modules (patched attributes, caches) stay.
- What it prints appears in the caller's standard output, marked with the rank.

How it works: the pool starts two nursery processes (distclip.testing.nursery) that import torch and fork ranks. Each
rank is connected to the pool by a socket, over which jobs, results and exceptions travel as pickles. The ranks of a job
find each other by a file in a temporary folder, and then talk over the loopback interface.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

from distclip.testing.failures import RankDied, RankError, RankFailure, RankHung, RemoteTraceback
from distclip.testing.messages import Job, Raised, Returned
from distclip.testing.processes import Nursery, RankProcess
from distclip.testing.shipping import refer

DEADLINE = 60.0
"""Seconds that a job may take, unless it is given another limit."""
PATIENCE = 2.0
"""Seconds after the first failure for the other ranks to raise errors of their own. Then the failed ranks leave their
process group, so that ranks waiting in a collective get an error from it; as long again, and what is left is killed."""
CLEAN_UP = 20.0
"""Seconds that a rank may take to leave its process group after a job."""


class RankPool:
    """Rank processes that are started when first needed, reused from job to job and replaced when a job breaks them.

    `max_ranks` is the largest world size that will be accepted. Jobs of several threads run one after the other.
    Use it as a context manager or call `close`; at exit of the interpreter it closes itself, and when its process is
    killed the ranks end too.
    """

    def __init__(self, max_ranks: int = 8) -> None:
        self._max_ranks = max_ranks
        self._environment = _environment()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._jobs = 0
        self._nurseries: list[Nursery] = []
        self._ranks: list[RankProcess] = []
        self._folder = ""
        self._closed = False
        atexit.register(self.close)

    def run(
        self, function: Callable[..., Any], world_size: int, /, *args: Any, deadline: float = DEADLINE, **kwargs: Any
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on ranks 0 .. world_size - 1 of a fresh gloo group; the results, by rank.

        The function must be at the top level of a file; arguments and results must be picklable (tensors of any dtype
        travel as bytes). `deadline` is the time limit of the whole job in seconds; it is not passed on.

        Raises `RankFailure` when a rank raised, died or hung, `TypeError` for a function or argument that can't be
        sent, `ValueError` for a world size outside 1 .. max_ranks.
        """
        if not 1 <= world_size <= self._max_ranks:
            raise ValueError(f"world_size is {world_size}, must be 1 to {self._max_ranks}")
        reference = refer(function)
        try:
            arguments = pickle.dumps((args, kwargs))
        except Exception as error:  # __reduce__ of an argument may raise anything
            raise TypeError(f"an argument for {reference.qualname} can't be pickled: {error}") from error
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            ranks = self._prepare(world_size)
            self._jobs += 1
            try:
                store = os.path.join(self._folder, f"job{self._jobs}")
                for rank, process in enumerate(ranks):
                    process.send(
                        Job(self._jobs, rank, world_size, store, reference, arguments, deadline, list(sys.path))
                    )
                progress = _Progress(ranks, deadline)
                progress.follow()
            except BaseException:
                # Ctrl-C or a time limit of the caller: what the ranks are doing is not known any more.
                for process in ranks:
                    process.end()
                raise
            finally:
                _show_output(ranks)
        return progress.results(str(reference))

    def close(self) -> None:
        """End all processes. Can be called twice; the pool can't be used afterwards."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        for nursery in self._nurseries:
            nursery.close()
        for rank in self._ranks:
            rank.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, world_size: int) -> list[RankProcess]:
        """The first `world_size` ranks, all idle; starts those that are missing, replaces those that are broken."""
        if not self._nurseries:
            self._folder = tempfile.mkdtemp(prefix="distclip-")
            self._nurseries = [Nursery(self._environment, self._folder) for _ in range(2)]
        for place in range(world_size):
            if place == len(self._ranks):
                self._ranks.append(self._fork(place))
            elif not self._ranks[place].ready(CLEAN_UP):
                broken = self._ranks[place]
                self._ranks[place] = self._fork(place)
                broken.close()
        for place, rank in enumerate(self._ranks[:world_size]):
            if not rank.ready(CLEAN_UP):
                raise RuntimeError(f"rank process {place} ended while it started:\n{rank.output()}")
        return self._ranks[:world_size]

    def _fork(self, place: int) -> RankProcess:
        side = place % len(self._nurseries)
        try:
            return RankProcess(self._nurseries[side])
        except OSError:  # the nursery was killed, by the system when memory is short, say
            dead = self._nurseries[side]
            self._nurseries[side] = Nursery(self._environment, self._folder)
            dead.close()
            return RankProcess(self._nurseries[side])


class _Progress:
    """What is known of one job while it runs."""

    def __init__(self, ranks: list[RankProcess], deadline: float) -> None:
        self._ranks = ranks
        self._deadline = deadline
        self._values: dict[int, bytes] = {}
        self._errors: dict[int, BaseException] = {}
        self._texts: dict[int, str] = {}
        self._stopped: dict[int, str] = {}
        self._leaving = False
        self._released: set[int] = set()
        self._busy = {process.connection: rank for rank, process in enumerate(ranks)}

    def follow(self) -> None:
        """Wait for the end of the job, whatever the end is."""
        self._listen(self._deadline, until_error=True)
        if self._busy and self._errors:
            self._listen(PATIENCE)
            # Leaving the group closes connections, which wakes ranks that wait for a failed one in a collective.
            self._leaving = True
            self._release(set(self._errors) | set(self._values))
            self._listen(PATIENCE)
        self._stop()
        self._release(set(self._errors) | set(self._values))

    def results(self, job: str) -> list[Any]:
        """What the ranks returned, or their failure."""
        if self._errors:
            raise RankFailure(job, len(self._ranks), self._errors, self._texts, self._stopped)
        return [pickle.loads(self._values[rank]) for rank in range(len(self._ranks))]

    def _listen(self, timeout: float, until_error: bool = False) -> None:
        """Take in what ranks report until all have or the time is over; with `until_error` until one has failed."""
        end = time.monotonic() + timeout
        while self._busy and not (until_error and self._errors):
            arrived = wait(list(self._busy), max(0.0, end - time.monotonic()))
            if not arrived:
                return
            for connection in arrived:
                self._take(connection)

    def _take(self, connection: Any) -> None:
        rank = self._busy.pop(connection)
        process = self._ranks[rank]
        try:
            outcome: Returned | Raised = connection.recv()
        except (EOFError, OSError):
            code = process.end(grace=1.0)
            error = RankDied(f"the process of rank {rank} {_ending(code)}", code)
            self._fail(rank, error, "\n".join([f"RankDied: {error}", process.crash(), process.output()]))
            return
        if isinstance(outcome, Returned):
            self._values[rank] = outcome.value
        else:
            self._fail(rank, _revive(outcome), outcome.text)
        if self._leaving:
            self._release({rank})

    def _fail(self, rank: int, error: BaseException, text: str) -> None:
        self._errors[rank] = error
        self._texts[rank] = text

    def _release(self, ranks: set[int]) -> None:
        for rank in ranks - self._released:
            self._released.add(rank)
            self._ranks[rank].release()

    def _stop(self) -> None:
        """Take the stacks of ranks that have not finished, and end them."""
        hung = not self._errors
        stacks = {
            rank: self._ranks[rank].stack() or "no stack: it does not react to signals" for rank in self._busy.values()
        }
        for rank, stack in stacks.items():
            self._ranks[rank].end()
            if hung:
                error = RankHung(f"rank {rank} had not finished after {self._deadline:g} s")
                self._fail(rank, error, f"RankHung: {error}\n{stack}")
            else:
                self._stopped[rank] = stack


def _environment() -> dict[str, str]:
    """What the ranks see: what is set now, one thread each, the loopback interface, and a profiler that is silent."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {"KINETO_LOG_LEVEL": "99", **os.environ, **threads, **interface}


def _revive(outcome: Raised) -> BaseException:
    """The exception as it was in the rank, with its traceback there as the cause."""
    error: BaseException
    try:
        error = pickle.loads(outcome.error) if outcome.error is not None else RankError(outcome.summary)
    except Exception:  # its class can be loaded in the rank, but not here
        error = RankError(outcome.summary)
    error.__cause__ = RemoteTraceback(outcome.text)
    return error


def _ending(code: int | None) -> str:
    if code is None:
        return "ended, nobody knows how"
    if code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"ended by itself with exit code {code}"


def _show_output(ranks: list[RankProcess]) -> None:
    for rank, process in enumerate(ranks):
        for line in process.output().splitlines():
            print(f"[rank {rank}] {line}")
