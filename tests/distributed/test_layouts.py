"""The figures of every layout, on real ranks: norm before, gradients after, and the number of collectives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import distclip
from distclip.testing import RankFailure, oracle
from distclip.testing.collectives import count

CPU = torch.device("cpu")


def _parameter(gradient: Tensor, mesh: Any, placements: list[Any]) -> nn.Parameter:
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
    parameter.grad = distribute_tensor(gradient, mesh, placements)
    return parameter


# --- FSDP2 and HSDP: DTensor parameters ---------------------------------------------------------------------------


def _sharded_2x2() -> tuple[str, float, dict[str, int]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = _parameter(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), mesh, [Shard(0)])
    first = distclip.clip_grad_norm_([parameter], 1.0)
    after = distclip.get_total_norm([parameter])
    with count() as collectives:
        distclip.clip_grad_norm_([parameter], 1.0)
    return first.numpy().tobytes().hex(), after.item(), dict(collectives)


def test_one_parameter_over_two_ranks_is_five_bit_for_bit(ranks: Any) -> None:
    results = ranks(_sharded_2x2, 2)
    five = torch.tensor(5.0, dtype=torch.float64).numpy().tobytes().hex()
    assert [first for first, _, _ in results] == [five, five]
    assert [after for _, after, _ in results] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert all(collectives == {"allreduce": 1} for _, _, collectives in results)


def _hsdp() -> tuple[float, list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parameter = _parameter(torch.tensor([3.0, 4.0]), mesh, [Replicate(), Shard(0)])
    norm = distclip.clip_grad_norm_([parameter], 1.0).item()
    return norm, oracle.gather_full_gradient(parameter).tolist()  # type: ignore[union-attr]


def test_hsdp_counts_replicas_once(ranks: Any) -> None:
    for norm, after in ranks(_hsdp, 4):
        assert norm == 5.0
        assert after == pytest.approx([0.6, 0.8], rel=1e-6)


def _empty_shard(norm_type: float) -> tuple[float, list[float]]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 5, bias=False)
    fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
    layer(torch.randn(2, 3)).sum().backward()
    full = oracle.gather_full_gradient(layer.weight)
    norm = distclip.clip_grad_norm_(layer, 0.25, norm_type)
    wanted = oracle.norm([full], norm_type)
    clipped = oracle.gather_full_gradient(layer.weight)
    scaled = full * min(1.0, 0.25 / (wanted + 1e-6))
    return norm.item() / wanted, (clipped - scaled).ravel().tolist()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_an_empty_shard_takes_part(ranks: Any, norm_type: float) -> None:
    for ratio, difference in ranks(_empty_shard, 4, norm_type):
        assert ratio == pytest.approx(1.0, rel=1e-6)
        assert difference == pytest.approx([0.0] * 15, abs=1e-7)


# --- FSDP1 ---------------------------------------------------------------------------------------------------------


def _fsdp1(strategy: str, use_orig_params: bool) -> tuple[float, float]:
    layer = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(layer.weight)
    wrapped = FullyShardedDataParallel(
        layer, sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params, device_id=CPU
    )
    wrapped(torch.tensor([[3.0, 4.0]])).sum().backward()
    norm = distclip.clip_grad_norm_(wrapped, 1.0).item()
    after = distclip.get_total_norm(wrapped).item()
    return norm, after


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1_strategies(ranks: Any, strategy: str, use_orig_params: bool) -> None:
    for norm, after in ranks(_fsdp1, 2, strategy, use_orig_params):
        assert norm == pytest.approx(50**0.5, rel=1e-6)
        assert after == pytest.approx(1.0, abs=1e-6)


def _fsdp1_hybrid(use_orig_params: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    reference = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    reference.load_state_dict(model.state_dict())
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=CPU,
    )
    batch = torch.randn(4, 3)
    wrapped(batch).square().sum().backward()
    reference(batch).square().sum().backward()
    wanted = oracle.norm([oracle.gather_full_gradient(p) for p in reference.parameters()], 2.0)
    return [distclip.clip_grad_norm_(wrapped, 1.0).item() / wanted, distclip.get_total_norm(wrapped).item()]


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_hybrid_shard_counts_replicas_once(ranks: Any, use_orig_params: bool) -> None:
    for ratio, after in ranks(_fsdp1_hybrid, 4, use_orig_params):
        assert ratio == pytest.approx(1.0, rel=1e-6)
        assert after == pytest.approx(1.0, abs=1e-5)


def _fsdp1_bare() -> None:
    wrapped = FullyShardedDataParallel(nn.Linear(2, 2), use_orig_params=True, device_id=CPU)
    wrapped(torch.ones(1, 2)).sum().backward()
    distclip.clip_grad_norm_(wrapped.parameters(), 1.0)


def test_bare_fsdp1_parameters_are_refused(ranks: Any) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(_fsdp1_bare, 2)
    assert all(isinstance(error, distclip.LayoutError) for error in failure.value.errors.values())
    assert "pass the FullyShardedDataParallel module" in str(failure.value.errors[0])
    assert str(failure.value.errors[0]) == str(failure.value.errors[1])


# --- DDP -----------------------------------------------------------------------------------------------------------


def _ddp(no_sync: bool) -> float:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    wrapped = DistributedDataParallel(layer)
    clipper = distclip.GradientClipper(wrapped, max_norm=100.0)
    inputs = [1.0, 3.0] if dist.get_rank() == 0 else [5.0, 7.0]
    with wrapped.no_sync():
        (wrapped(torch.tensor([[inputs[0]]])) / 2).sum().backward()
    if not no_sync:
        (wrapped(torch.tensor([[inputs[1]]])) / 2).sum().backward()
    return clipper.clip_().total_norm.item()


def test_ddp_accumulation_counts_at_the_boundary_only(ranks: Any) -> None:
    assert ranks(_ddp, 2, False) == [4.0, 4.0]
    with pytest.raises(RankFailure) as failure:
        ranks(_ddp, 2, True)
    for error in failure.value.errors.values():
        assert isinstance(error, distclip.LayoutError)
        assert "no_sync" in str(error)


def _unsynchronised(kind: str) -> None:
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(2, 2)
    torch.manual_seed(0)
    layer = nn.Linear(2, 2)
    if kind == "fsdp2":
        model: Any = fully_shard(layer)
        model.set_requires_gradient_sync(False)
        model(batch).sum().backward()
    else:
        strategy = ShardingStrategy.NO_SHARD if kind == "no_shard" else ShardingStrategy.FULL_SHARD
        model = FullyShardedDataParallel(layer, use_orig_params=True, device_id=CPU, sharding_strategy=strategy)
        with model.no_sync():
            model(batch).sum().backward()
    distclip.clip_grad_norm_(model, 1.0)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "no_shard"])
def test_gradients_that_were_not_synchronised_are_refused(ranks: Any, kind: str) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(_unsynchronised, 2, kind)
    assert len(failure.value.errors) == 2
    for error in failure.value.errors.values():
        assert isinstance(error, distclip.LayoutError)
        assert "synchronised" in str(error)
