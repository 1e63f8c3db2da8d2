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

from torch.profiler import ProfilerActivity, profile

_NAMESPACE = "c10d::"


@contextmanager
def count() -> Iterator[Counter[str]]:
    """Count what this thread, and a backward pass started in it on CPU, issues inside the `with` block.

    The counter is filled when the block ends. Its keys are torch's operator names without underscores at their ends:
    `allreduce`, `allreduce_coalesced`, `allgather`, `allgather_base`, `reduce_scatter_base`, `broadcast`, `barrier`,
    `alltoall`, `send`, `recv` and so on; a key that is missing counts as 0. Collectives that another thread issues are
    not seen. Can't be nested: it uses torch's profiler.
    """
    issued: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        yield issued
    for event in recorded.events() or ():
        if event.name.startswith(_NAMESPACE):
            issued[event.name.removeprefix(_NAMESPACE).strip("_")] += 1
