"""What a job finds when it starts, and what comes back from it."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from distclip.testing import RankFailure, RankPool

Ranks = Callable[..., list[Any]]


@dataclass
class Point:
    x: int


def add_up(factor: float) -> tuple[int, int, float]:
    value = torch.tensor(float(dist.get_rank() + 1)) * factor
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value.item()


@pytest.mark.parametrize(("world_size", "total"), [(1, 1.0), (2, 3.0), (3, 6.0), (4, 10.0), (8, 36.0)])
def test_ranks_compute_together(ranks: Ranks, world_size: int, total: float) -> None:
    assert ranks(add_up, world_size, 10.0) == [(rank, world_size, total * 10) for rank in range(world_size)]


def test_arguments_by_name(ranks: Ranks) -> None:
    assert ranks(add_up, 2, factor=2.0) == [(0, 2, 6.0), (1, 2, 6.0)]


def move(point: Point) -> Point:
    return Point(point.x + dist.get_rank())


def test_classes_of_the_test_module_travel_both_ways(ranks: Ranks) -> None:
    moved = ranks(move, 2, Point(3))
    assert moved == [Point(3), Point(4)]
    assert type(moved[0]) is Point


def tensors_of_many_types() -> list[torch.Tensor]:
    return [
        torch.tensor([1.0, 2.5], dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.tensor(3.0, dtype=torch.float64, requires_grad=True),
        torch.ones(2, 3).to_sparse(),
        torch.empty(0),
    ]


def test_tensors_come_back_with_type_and_values(ranks: Ranks) -> None:
    for found, wanted in zip(ranks(tensors_of_many_types, 2)[1], tensors_of_many_types(), strict=True):
        assert (found.dtype, found.layout, found.requires_grad) == (wanted.dtype, wanted.layout, wanted.requires_grad)
        assert torch.equal(found.to_dense(), wanted.to_dense())


def what_torchrun_sets() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in names}


def test_environment_is_that_of_torchrun(ranks: Ranks) -> None:
    assert ranks(what_torchrun_sets, 2)[1] == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }


def group_facts(key: str) -> tuple[bool, float, str]:
    store = dist.distributed_c10d._get_default_store()
    fresh = not store.check([key])
    dist.barrier()
    store.set(key, "seen")
    group = dist.group.WORLD
    assert group is not None
    return fresh, group._get_backend(torch.device("cpu")).options._timeout.total_seconds(), dist.get_backend()


def test_each_job_has_a_group_and_a_store_of_its_own(ranks: Ranks) -> None:
    assert ranks(group_facts, 2, "key") == [(True, 15.0, "gloo")] * 2
    assert ranks(group_facts, 2, "key") == [(True, 15.0, "gloo")] * 2


def sum_over_a_mesh(groups_before: int) -> tuple[str, float]:
    for _ in range(groups_before):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    tensor = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Replicate(), Shard(0)])
    partial = (tensor * 2).sum()
    assert partial.placements == (Replicate(), Partial())
    return mesh.get_group(1).group_name, partial.full_tensor().item()


def test_meshes_of_earlier_jobs_are_forgotten(ranks: Ranks) -> None:
    # An equal mesh of an earlier job has groups of other names, and torch's cache of DTensor operators gives it back.
    found = [ranks(sum_over_a_mesh, 4, groups)[0] for groups in (0, 3)]
    assert found[0][0] != found[1][0]
    assert [total for _, total in found] == [56.0, 56.0]


def settings() -> dict[str, Any]:
    return {
        "variable": os.environ.get("DISTCLIP_TEST"),
        "home": os.environ.get("HOME"),
        "folder": os.getcwd(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "subnormal": (torch.tensor(1e-39) * 1.0).item() > 0,
        "filters": len(warnings.filters),
        "random": (random.random(), torch.rand(()).item(), np.random.rand()),
        "group": dist.get_world_size(),
    }


def change_everything(fail: bool) -> None:
    os.environ["DISTCLIP_TEST"] = "1"
    del os.environ["HOME"]
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(True)
    torch.set_float32_matmul_precision("medium")
    torch.set_flush_denormal(True)
    warnings.simplefilter("ignore")
    if fail:
        raise RuntimeError("half-way")


@pytest.mark.parametrize("fail", [False, True])
def test_what_a_job_changes_is_undone(ranks: Ranks, fail: bool) -> None:
    before = ranks(settings, 2)
    assert before[0] == before[1]
    assert before[0]["threads"] == 1
    assert before[0]["folder"] == str(Path.cwd())
    if fail:
        with pytest.raises(RankFailure, match="half-way"):
            ranks(change_everything, 2, fail)
    else:
        ranks(change_everything, 2, fail)
    assert ranks(settings, 2) == before


def chatter() -> None:
    print("from python")
    os.system("echo from a child")


def test_output_is_shown_with_its_rank(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(chatter, 2)
    shown = capsys.readouterr().out.splitlines()
    assert sorted(shown) == [f"[rank {rank}] from {what}" for rank in (0, 1) for what in ("a child", "python")]


def hash_of_a_word() -> int:
    return hash("gradient")


def test_neighbours_hash_strings_differently(ranks: Ranks) -> None:
    # Else a plan that depends on the order of a set would work here and nowhere else.
    first, second, *_ = ranks(hash_of_a_word, 4)
    assert first != second


@pytest.mark.parametrize("world_size", [0, 9, -1])
def test_world_size_is_checked(ranks: Ranks, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size is {world_size}, must be 1 to 8"):
        ranks(add_up, world_size, 1.0)


def own_pid() -> int:
    return os.getpid()


def parent_pid() -> int:
    return os.getppid()


def running(pid: int) -> bool:
    """Whether it does anything yet: not gone, and not a zombie that only waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_life_of_a_pool() -> None:
    with RankPool(max_ranks=3) as pool:
        first = pool.run(own_pid, 2)
        assert len(set(first)) == 2
        assert pool.run(own_pid, 2) == first, "processes are used again"
        assert pool.run(own_pid, 3)[:2] == first, "and others come when they are needed"
        with pytest.raises(ValueError, match="must be 1 to 3"):
            pool.run(own_pid, 4)
        os.kill(pool.run(parent_pid, 1)[0], signal.SIGKILL)
        while running(first[0]):
            time.sleep(0.01)
        assert pool.run(add_up, 2, 1.0) == [(0, 2, 3.0), (1, 2, 3.0)], "a nursery that died is replaced"
        (tensors,) = pool.run(tensors_of_many_types, 1)
        last = pool.run(own_pid, 3) + pool.run(parent_pid, 3)
    assert tensors[0].tolist() == [1.0, 2.5], "results outlive the process they came from"
    assert not any(map(running, last))
    with pytest.raises(RuntimeError, match="the pool is closed"):
        pool.run(own_pid, 1)
