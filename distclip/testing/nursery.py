"""Where rank processes come from: a process that has imported torch once, and forks a rank when asked.

Importing torch costs seconds of CPU in every process; eight ranks on two cores would take half a minute to start, and
each rank that a test kills a few seconds more. A fork costs milliseconds. It is safe here because the nursery only ever
imports: it runs no operator and owns no thread (checked at start).

The pool keeps two nurseries, and ranks come from them in turn. Forked ranks share the seed of string hashes and their
addresses, so that a set iterates in the same order on all of them; real ranks do not. With two nurseries, even and odd
ranks differ, and code that relies on such an order fails in tests as it would in a cluster.

The nursery talks with the pool over a socket: `fork` comes with three file descriptors (the rank's own socket, its
output and its stack file) and is answered by a pid; `reap` is answered by an exit code. When the socket closes, because
the pool was closed or its process was killed, the nursery kills its ranks, removes the pool's folder and ends.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import traceback

FORK = b"f"
REAP = b"r"
REQUEST = struct.Struct("!cq")
REPLY = struct.Struct("!q")
STILL_RUNNING = 1 << 32
_PR_SET_PDEATHSIG = 1


def main(control_fd: int, folder: str) -> None:
    """Import, say so by one reply, and serve until the pool closes the socket."""
    control = socket.socket(fileno=control_fd)
    parent = os.getppid()
    _import_everything()
    if threading.active_count() != 1:
        raise RuntimeError(f"a thread is running after the imports, ranks can't be forked: {threading.enumerate()}")
    # What was imported stays for ever: not looking at it makes each collection in a rank about fifty times cheaper.
    gc.collect()
    gc.freeze()
    children: set[int] = set()
    control.sendall(REPLY.pack(os.getpid()))
    try:
        _serve(control, children, parent)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # taking torch down in an orderly manner takes a second


def _serve(control: socket.socket, children: set[int], parent: int) -> None:
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while os.getppid() == parent:
        # The time limit is for the case that a fork of the pool's process keeps its end of the socket open.
        if not poll.poll(1000):
            continue
        message, fds, _, _ = socket.recv_fds(control, REQUEST.size, 3)
        if len(message) < REQUEST.size:
            return
        kind, pid = REQUEST.unpack(message)
        if kind == FORK:
            pid = _fork(control, *fds)
            children.add(pid)
            for fd in fds:
                os.close(fd)
            control.sendall(REPLY.pack(pid))
        else:
            # A child stays a zombie until it is asked for, so that its pid can't be given to a stranger before.
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.discard(pid)
            control.sendall(REPLY.pack(os.waitstatus_to_exitcode(status) if done else STILL_RUNNING))


def _fork(control: socket.socket, connection_fd: int, output_fd: int, stack_fd: int) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if sys.platform == "linux":
            # Ends with the nursery, even where the rank hangs in native code.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == nursery:
            control.close()
            os.dup2(output_fd, 1)
            os.dup2(output_fd, 2)
            os.close(output_fd)
            from distclip.testing import rank

            rank.serve(connection_fd, stack_fd)
            status = 0
    except BaseException:
        # Nothing may get back into the nursery's loop; the pool shows this text as the rank's last output.
        traceback.print_exc()
    finally:
        os._exit(status)


def _import_everything() -> None:
    """What most jobs use, so that it is there when a rank is born."""
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.nn.parallel
    import torch.profiler

    import distclip.testing.rank
    import distclip.testing.shipping  # noqa: F401

    torch.set_num_threads(1)
