"""What runs inside a rank process: take a job, join its process group, call the function, send back what came of it.

A rank leaves its process group only when the pool tells it to, because closing connections earlier could disturb ranks
that are still busy with the same collective. After each job it restores what a function may have changed globally
(`_restore`), so that the order of tests does not matter.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.tensor import debug as dtensor_debug

from distclip.testing.messages import Job, Raised, Returned
from distclip.testing.shipping import load

GROUP_TIMEOUT = timedelta(seconds=15)
"""Of the default process group: a collective that waits longer than this fails."""
SEED = 0
"""All ranks begin every job with this seed, as jobs do that build the same model everywhere."""


def serve(connection_fd: int, stack_fd: int) -> None:
    """Work off jobs until the pool closes the connection."""
    connection = Connection(connection_fd)
    faulthandler.enable(file=stack_fd)
    faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    before = _State()
    connection.send(os.getpid())
    try:
        while True:
            job: Job = connection.recv()
            # The last resort for a rank that hangs while it holds the interpreter lock and has lost its pool.
            faulthandler.dump_traceback_later(job.deadline + 60.0, exit=True, file=stack_fd)
            connection.send(_run(job))
            connection.recv()  # the pool says that no rank needs this one any more
            _leave()
            before.restore()
            faulthandler.cancel_dump_traceback_later()
            connection.send(job.number)
    except EOFError:
        return


def _run(job: Job) -> Returned | Raised:
    try:
        sys.path[:] = job.search_path
        os.environ.update(_torchrun_environment(job))
        function = load(job.function)
        args, kwargs = pickle.loads(job.arguments)
        _join(job)
        value = function(*args, **kwargs)
        return Returned(_pack(value))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the rank must live on and tell
        return _raised(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _torchrun_environment(job: Job) -> dict[str, str]:
    rank, world_size = str(job.rank), str(job.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }


def _join(job: Job) -> None:
    # Not a TCPStore: each of its connections looks up the name of its peer, which can take seconds where DNS is slow.
    dist.init_process_group(
        "gloo",
        store=FileStore(job.store, job.world_size),
        rank=job.rank,
        world_size=job.world_size,
        timeout=GROUP_TIMEOUT,
    )


def _leave() -> None:
    # Models in reference cycles (FSDP) hold process groups, which would stay connected.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _pack(value: Any) -> bytes:
    try:
        # Plain pickle: tensors travel as bytes, not as handles of shared memory that need the sender to stay alive.
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__name__} that can't be pickled ({error}): return plain values or "
            "local tensors (of a DTensor, to_local() or full_tensor())"
        ) from error


def _raised(error: BaseException) -> Raised:
    summary = "".join(traceback.format_exception_only(error)).strip()
    text = "".join(_format(error))
    packed: bytes | None
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # an exception class may do anything in __reduce__ or __init__; the text still tells
        packed = None
    return Raised(packed, summary, text)


def _format(error: BaseException) -> Sequence[str]:
    lines = list(traceback.format_exception(error))
    # A bare `assert a == b` says nothing here, because pytest does not rewrite assertions in the ranks.
    if isinstance(error, AssertionError) and error.__traceback__ is not None:
        frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
        values = [f"    {name} = {_short(value)}\n" for name, value in frame.f_locals.items()]
        lines += ["with\n", *values] if values else []
    return lines


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # somebody else's __repr__
        text = f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return text if len(text) <= 300 else text[:297] + "..."


class _State:
    """Global settings that a job may change, as they were before it."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.directory = os.getcwd()
        self.filters = warnings.filters[:]
        self.dtype = torch.get_default_dtype()
        self.matmul_precision = torch.get_float32_matmul_precision()
        self.seed()

    def restore(self) -> None:
        """Back to what was, also where the job failed half-way."""
        os.chdir(self.directory)
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        warnings.filters[:] = self.filters  # type: ignore[index]
        torch.set_default_dtype(self.dtype)
        torch.set_default_device(None)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.set_grad_enabled(True)
        torch.set_flush_denormal(False)
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.set_num_threads(1)
        # DTensor remembers meshes. One of an earlier job is equal to one of this job but holds groups that are gone.
        # Private name; torch 2.6 has none, so there ranks that change meshes from job to job may meet dead groups.
        getattr(dtensor_debug, "_clear_sharding_prop_cache", lambda: None)()
        self.seed()

    @staticmethod
    def seed() -> None:
        """The same random numbers for every job, whatever ran before."""
        random.seed(SEED)
        torch.manual_seed(SEED)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(SEED)
