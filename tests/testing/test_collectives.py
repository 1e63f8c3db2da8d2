"""What `collectives.count` sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from distclip.testing import RankFailure, collectives

Ranks = Callable[..., list[Any]]


def nothing() -> None:
    torch.ones(3).sum()


def one() -> None:
    dist.all_reduce(torch.ones(3))


def nobody_waits() -> None:
    for _ in range(5):
        dist.all_reduce(torch.ones(3), async_op=True)


def subgroup() -> None:
    dist.all_reduce(torch.ones(3), group=dist.new_group([0, 1]))


def objects() -> None:
    dist.all_gather_object([None, None], "a name")


def ddp() -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()


def fsdp1() -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    model(torch.ones(2, 4)).sum().backward()


def fsdp2() -> None:
    model = nn.Linear(4, 4)
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()


def dtensor() -> None:
    mesh = init_device_mesh("cpu", (2,))
    distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None).sum().full_tensor()


def messages() -> None:
    value = torch.ones(1)
    dist.send(value, 1) if dist.get_rank() == 0 else dist.recv(value, 0)
    dist.barrier()


def count(function: Callable[[], None]) -> dict[str, int]:
    with collectives.count() as issued:
        function()
    return dict(issued)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (nothing, {}),
        (one, {"allreduce": 1}),
        (nobody_waits, {"allreduce": 5}),
        (subgroup, {"allreduce": 1}),
        (objects, {"allgather": 2}),
        (dtensor, {"allreduce": 1}),
        (fsdp2, {"allgather_base": 1, "reduce_scatter_base": 1}),
        (messages, {"send": 1, "barrier": 1}),
    ],
)
def test_calls_are_counted(ranks: Ranks, function: Callable[[], None], wanted: dict[str, int]) -> None:
    assert ranks(count, 2, function)[0] == wanted


@pytest.mark.parametrize(("function", "key"), [(ddp, "allreduce"), (fsdp1, "reduce_scatter_base")])
def test_calls_from_a_backward_pass_are_counted(ranks: Ranks, function: Callable[[], None], key: str) -> None:
    assert [issued[key] for issued in ranks(count, 2, function)] == [1, 1]


def fail() -> None:
    dist.all_reduce(torch.ones(1))
    raise KeyError("inside")


def count_twice() -> tuple[dict[str, int], dict[str, int]]:
    with pytest.raises(KeyError):
        count(fail)
    return count(one), count(nothing)


def test_counting_starts_anew_also_after_an_exception(ranks: Ranks) -> None:
    assert ranks(count_twice, 2)[1] == ({"allreduce": 1}, {})


def test_counting_is_silent(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    ranks(count, 2, one)
    assert capfd.readouterr() == ("", "")


def test_an_error_in_the_block_gets_out(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="KeyError: 'inside'"):
        ranks(count, 2, fail)
