"""The all-reduce of a few numbers: right, gives its core away where the others are late, and tells what went wrong."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distclip import reduce
from distclip.reduce import all_reduce
from distclip.testing import RankFailure


def _reduce(late: float) -> tuple[list[float], list[float], float]:
    if dist.get_rank() == 1:
        time.sleep(late)
    total = torch.tensor([1.0, dist.get_rank()], dtype=torch.float64)
    highest = total.clone()
    busy = time.thread_time()
    all_reduce(total, dist.group.WORLD)
    busy = time.thread_time() - busy
    all_reduce(highest, dist.group.WORLD, dist.ReduceOp.MAX)
    return total.tolist(), highest.tolist(), busy


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_ranks_get_the_same(ranks: Callable[..., list[Any]], world: int) -> None:
    for total, highest, _ in ranks(_reduce, world, 0.0):
        assert total == [world, world * (world - 1) / 2]
        assert highest == [1.0, world - 1.0]


def test_a_rank_that_came_early_falls_asleep(ranks: Callable[..., list[Any]]) -> None:
    late = 50 * reduce.AWAKE_SECONDS
    for total, _, busy in ranks(_reduce, 2, late):
        assert total == [2.0, 1.0]
        assert busy < late / 2


@pytest.mark.parametrize(
    ("said", "ranks", "awake"), [(None, 4, True), (None, 5, False), ("2", 1000, True), ("5", 5, False), ("?", 4, True)]
)
def test_ranks_stay_awake_only_where_each_has_a_core(
    monkeypatch: pytest.MonkeyPatch, said: str | None, ranks: int, awake: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if said is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    assert reduce._cores_suffice.__wrapped__(ranks) is awake


def _one_rank_leaves() -> None:
    if dist.get_rank() == 1:
        raise KeyError("left")
    all_reduce(torch.ones(1), dist.group.WORLD)


def test_a_rank_that_is_gone_is_an_error_on_those_that_wait(ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(_one_rank_leaves, 2)
    assert isinstance(failure.value.errors[0], RuntimeError)  # gloo's: the connection is closed
    assert isinstance(failure.value.errors[1], KeyError)


def _on_another_backend() -> list[float]:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    assert FakeStore
    group = dist.new_group(backend="fake")
    numbers = torch.ones(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce, "_give_way", lambda: pytest.fail("waits for a work that never says it is done"))
        all_reduce(numbers, group)
    return numbers.tolist()


def test_a_backend_that_does_not_say_when_it_is_done_is_not_watched(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(_on_another_backend, 2) == [[1.0]] * 2


def _without_yield() -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(os, "sched_yield")
        importlib.reload(reduce)
    numbers = torch.tensor([1.0 + dist.get_rank()])
    reduce.all_reduce(numbers, dist.group.WORLD)
    importlib.reload(reduce)
    return numbers.tolist()


def test_where_a_thread_cannot_give_way_it_sleeps(ranks: Callable[..., list[Any]]) -> None:
    # as on Windows
    assert ranks(_without_yield, 2) == [[3.0], [3.0]]
