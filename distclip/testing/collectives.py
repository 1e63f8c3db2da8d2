"""Counting the collectives that a piece of code issues, so that a test can hold it to its promise.

    from distclip.testing import collectives

    with collectives.count() as issued:
        clipper.step()
    assert issued == {"allreduce": 1}

What counts is the call, whatever the backend makes of it and whether anybody waits for it: gloo, for one, carries out a
reduce-scatter as an all-reduce. Object collectives count as what they are made of (an `all_gather_object` is two
`allgather`), point-to-point messages as `send` and `recv`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_NATIVE, _FUNCTIONAL = "c10d", "_c10d_functional"

_ISSUED = {
    "all_reduce": "allreduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_into_tensor": "allgather_into_tensor_coalesced",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "isend": "send",
    "irecv": "recv",
}
"""What functional collectives (torch/csrc/distributed/c10d/Functional.cpp), such as DTensor's, issue. One that is not
here counts under its own name, rather than not at all."""

_LOCAL = frozenset(("wait_tensor", "wrap_tensor_autograd"))
"""Functional operators that issue nothing."""


@contextmanager
def count() -> Iterator[Counter[str]]:
    """Count what this thread, and a backward pass started in it on CPU, issues inside the `with` block.

    The keys are torch's operator names without underscores at their ends: `allreduce`, `allreduce_coalesced`,
    `allgather`, `allgather_base`, `reduce_scatter_base`, `broadcast`, `barrier`, `alltoall`, `send`, `recv` and so on;
    a key that is missing counts as 0. Collectives that another thread issues are not seen.
    """
    issued: Counter[str] = Counter()
    with _Watch(issued):
        yield issued


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator on its way to its kernel; a profiler would lose some where the machine is busy."""

    def __init__(self, issued: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._issued = issued

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its local tensors comes by here
        name = func._schema.name.partition("::")[2].strip("_")
        if func.namespace == _NATIVE:
            self._issued[name] += 1
        elif func.namespace == _FUNCTIONAL and name not in _LOCAL:
            self._issued[_ISSUED.get(name, name)] += 1
        return func(*args, **(kwargs or {}))
