"""The collectives of planning and of errors: few, small, and never on the hot path of a step.

Every function here is reached by all ranks of the group alike. Without a process group each is the identity.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from distclip.errors import AgreementError
from distclip.reduce import all_reduce

ARRIVAL_SECONDS = 300.0
"""How long a rank waits for the others to come to a plan before it names those that did not."""

SETTLING_SECONDS = 0.3
"""What the threads of a process group get to finish a collective before an error is raised."""

_arrivals: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How often this process came to a plan of a group; all its ranks have come as often."""


def packet_device(group: dist.ProcessGroup | None, tensors: Sequence[Tensor] = ()) -> torch.device:
    """The device whose tensors the group's backend reduces; in a single process that of the tensors.

    With a group it must not depend on what this rank happens to hold. In a single process whose tensors lie on several
    devices it is the first that is not the CPU: results are gathered there without waiting for any of them.
    """
    if group is not None:
        nccl = "nccl" in dist.get_backend(group)
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    # a model on the meta device gets its memory later
    devices = (tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta"))
    return next(devices, torch.device("cpu"))


def resolve(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """`group`, else the world of an initialised `torch.distributed`, else None for a single process."""
    if group is not None:
        given: Any = group
        if given is dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError("this rank is not in group=: call on the ranks of the group only")
        check_group("group=", group)
        return group
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return None


def check_group(argument: str, group: Any) -> None:
    """TypeError for what is not a process group; None and what `new_group` gives to other ranks pass."""
    absent = group is None or group is dist.GroupMember.NON_GROUP_MEMBER
    if not absent and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{argument} takes a torch.distributed process group, not {type(group).__name__}; of a DeviceMesh take "
            "mesh.get_group()"
        )


class GroupReference:
    """A process group that is not kept alive by being remembered.

    Plans outlive steps, and a group that something still refers to after `destroy_process_group` keeps its threads and
    connections. torch itself holds every group until it is destroyed.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._reference = None if group is None else weakref.ref(group)

    def get(self) -> dist.ProcessGroup | None:
        """The group, or None for a single process.

        Raises:
            AgreementError: the group has been destroyed since.
        """
        if self._reference is None:
            return None
        group = self._reference()
        if group is None:
            raise AgreementError(
                "the process group of this plan was destroyed: make a new GradientClipper after init_process_group"
            )
        return group


def wait_for_all(group: dist.ProcessGroup | None, what: str) -> None:
    """Return when every rank of the group has come here; after `ARRIVAL_SECONDS` name those that have not.

    A plain collective would hang until the process group's timeout and then name nobody. The store is asked instead:
    one counter, and one key per rank that is only looked at when somebody is missing.

    Private name: `_get_default_store` (torch.distributed.distributed_c10d, torch 1.9 to 2.13); where it is gone, the
    collective that follows waits alone.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    get_store = getattr(dist.distributed_c10d, "_get_default_store", None)
    if get_store is None:
        return
    store = get_store()
    size = dist.get_world_size(group)
    # A restart that shares its agent's store meets the keys of the attempt before; they only make this wait shorter.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    turn = _arrivals[group] = _arrivals.get(group, 0) + 1
    base = f"distclip/{attempt}/{group.group_name}/{turn}"
    store.set(f"{base}/{dist.get_rank(group)}", "here")
    if store.add(f"{base}/count", 1) >= size:
        store.set(f"{base}/all", "here")
        return
    try:
        store.wait([f"{base}/all"], timedelta(seconds=ARRIVAL_SECONDS))
    except RuntimeError as error:  # DistStoreError; DistNetworkError when rank 0 and with it the store is gone
        missing = [rank for rank in range(size) if not _is_set(store, f"{base}/{rank}")]
        raise AgreementError(
            f"{what}: {_ranks(missing)} of {size} did not come within {ARRIVAL_SECONDS:.0f} s. Every rank of the group "
            "must reach this call; pass group= for a subset of the ranks"
        ) from error


def _is_set(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:10])) + (", ..." if len(ranks) > 10 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def gather_integers(values: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """All ranks' rows of int64, shape [world size, len(values)], on the CPU. Rows must be equally long."""
    row = torch.tensor(list(values), dtype=torch.int64)
    return _gather(row, group)


def gather_floats(values: Sequence[float], group: dist.ProcessGroup | None) -> Tensor:
    """All ranks' rows of float64, shape [world size, len(values)], on the CPU. Rows must be equally long."""
    return _gather(torch.tensor(list(values), dtype=torch.float64), group)


def _gather(row: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return row.unsqueeze(0)
    row = row.to(packet_device(group))
    table = row.new_empty(dist.get_world_size(group), row.numel())
    if row.numel():
        # not all_gather_into_tensor, which torch 2.13 renames
        dist.all_gather(list(table.unbind(0)), row, group=group)
    return table.cpu()


def all_equal(number: int, group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks come with the same small number: one all-reduce of two integers."""
    if group is None:
        return True
    both = torch.tensor([number, -number], device=packet_device(group))
    all_reduce(both, group, dist.ReduceOp.MAX)
    highest, lowest = both.tolist()
    return bool(highest == -lowest)


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """All ranks' values, pickled: only where an error is about to be raised."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    # An error that follows often ends in destroy_process_group at once. torch 2.13 can then wait for ever: the group is
    # destroyed with the GIL held, while a thread of gloo needs the GIL to let go of the tensors of the last collective.
    time.sleep(SETTLING_SECONDS)
    return values


def broadcast_object(value: Any, source: int, group: dist.ProcessGroup | None) -> Any:
    """The value of rank `source` of the group, pickled, on every rank."""
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, source), group=group)
    return box[0]


def raise_together(problem: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise the same error on every rank if any rank has a `problem`: that of the lowest such rank.

    Type and text are those of that rank, which is named where there are several ranks.
    """
    problems = gather_objects(None if problem is None else (type(problem), str(problem)), group)
    if problem is not None and all(item == problems[0] for item in problems):
        raise problem
    told = [rank for rank, item in enumerate(problems) if item is not None]
    if told:
        kind, text = problems[told[0]]
        raise kind(f"{text} (on {_ranks(told)} of {len(problems)})")
