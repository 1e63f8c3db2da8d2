"""The small all-reduces of a step: waited for awake, because with gloo falling asleep costs more than they do.

gloo sends from threads of its own, and the calling thread sleeps until they are done: by then its core may be asleep
too. Between two ranks that arrive together, 20 numbers take 0.9 ms on average if the callers stay awake and give way to
those threads, and 2 ms if they sleep. MPI libraries wait in the same way, and, as here, not where ranks share cores:
there a rank that waits awake is in the way of those it waits for. What remains is gloo's own: mostly half a
millisecond, but in some steps several, while its polling thread keeps a core from the one that holds the lock it polls
for.
"""

from __future__ import annotations

import os
import time
from functools import lru_cache

import torch.distributed as dist
from torch import Tensor

AWAKE_SECONDS = 0.01
"""How long a rank that came early stays awake: other programs may want its core, and get it only in turn."""

# Windows has none; a sleep of no length gives way too, but often takes longer
_give_way = getattr(os, "sched_yield", lambda: time.sleep(0))


def all_reduce(numbers: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Reduce a small tensor over all ranks of a group, in place; collective.

    On an accelerator nothing is waited for: what follows on its queue comes after.
    """
    # other backends may not say when they are done
    if numbers.device.type != "cpu" or "gloo" not in dist.get_backend(group) or not _cores_suffice(group.size()):
        dist.all_reduce(numbers, op=op, group=group)
        return
    work = dist.all_reduce(numbers, op=op, group=group, async_op=True)
    end = time.perf_counter() + AWAKE_SECONDS
    while not work.is_completed() and time.perf_counter() < end:
        _give_way()
    work.wait()  # raises what went wrong


@lru_cache
def _cores_suffice(ranks: int) -> bool:
    """Whether each rank of this node has a core: of a group of so many, if the launcher does not say how many are here.

    The environment is that of torchrun: LOCAL_WORLD_SIZE.
    """
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return (int(here) if here.isdecimal() else ranks) <= cores
