"""What the README says of torch's own calls is shown here, so that the table stays true when torch changes.

Nothing here tests distclip: what it does in the same cases is in the tests beside this one.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from distclip.testing import RankFailure


def _with(gradient: list[float], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(gradient), dtype=dtype))
    parameter.grad = torch.tensor(gradient, dtype=dtype)
    return parameter


def _gradient(parameter: nn.Parameter) -> list[float]:
    assert parameter.grad is not None
    return parameter.grad.tolist()  # type: ignore[no-any-return]


def test_max_norm_inf_turns_large_gradients_into_nan() -> None:
    parameter = _with([3e38, 3e38])
    clip_grad_norm_([parameter], math.inf)
    assert all(math.isnan(value) for value in _gradient(parameter))


def test_a_negative_max_norm_flips_signs() -> None:
    parameter = _with([3.0, 4.0])
    clip_grad_norm_([parameter], -1.0)
    assert _gradient(parameter) == pytest.approx([-0.6, -0.8], rel=1e-5)


def test_a_repeated_parameter_counts_and_is_scaled_twice() -> None:
    parameter = _with([3.0, 4.0])
    assert clip_grad_norm_([parameter, parameter], 1.0).item() == pytest.approx(50**0.5)
    assert math.hypot(*_gradient(parameter)) == pytest.approx(5 / 50, rel=1e-5)


def test_finite_gradients_become_zero() -> None:
    for parameter in (_with([3e38, 3e38]), _with([40000.0] * 4, torch.float16)):
        assert math.isinf(clip_grad_norm_([parameter], 1.0).item())
        assert set(_gradient(parameter)) == {0.0}


def test_no_gradients_under_a_scaler() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(torch.optim.SGD([parameter]))


def test_one_of_two_optimizers_steps() -> None:
    good, bad = _with([1.0]), _with([math.nan])
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in (good, bad)]
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert (good.item(), bad.item()) == (-1.0, 0.0)


def _fsdp1(strategy: str) -> float:
    wrapped = FullyShardedDataParallel(
        nn.Linear(2, 2, bias=False),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    wrapped(torch.tensor([[3.0, 4.0]])).sum().backward()
    return clip_grad_norm_(wrapped.parameters(), 1.0).item()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_each_rank_of_fsdp1_gets_its_own_norm(ranks: Any, strategy: str) -> None:
    assert ranks(_fsdp1, 2, strategy) == pytest.approx([5.0, 5.0])


def _one_rank_steps() -> list[float]:
    parameter = _with([[2.0, 2.0], [math.inf, 2.0]][dist.get_rank()])
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD([parameter], lr=1.0))
    scaler.update()
    return [scaler.get_scale(), *parameter.tolist()]


def test_scales_and_weights_of_ranks_part(ranks: Any) -> None:
    assert ranks(_one_rank_steps, 2) == [[2.0, -1.0, -1.0], [1.0, 0.0, 0.0]]


def _under_no_sync() -> float:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with model.no_sync():
        model(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
    return clip_grad_norm_(model.parameters(), 100.0).item()


def test_no_sync_is_clipped_by_each_rank_alone(ranks: Any) -> None:
    assert ranks(_under_no_sync, 2) == [1.0, 2.0]


def _several_meshes(plain: bool) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parameters = []
    for axis in ("dp", "tp"):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(2), mesh[axis], [Shard(0)]))
        parameter.grad = distribute_tensor(torch.ones(2), mesh[axis], [Shard(0)])
        parameters.append(parameter)
    if plain:
        parameters = [parameters[0], _with([1.0, 1.0])]
    with pytest.raises(RuntimeError) as error:
        clip_grad_norm_(parameters, 1.0)
    return str(error.value)


@pytest.mark.parametrize("plain", [False, True])
def test_two_meshes_or_plain_parameters_beside_dtensors_raise(ranks: Any, plain: bool) -> None:
    assert all(ranks(_several_meshes, 4, plain))


def _empty_shard() -> None:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(1), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(1), mesh, [Shard(0)])
    clip_grad_norm_([parameter], 1.0, math.inf).full_tensor()  # type: ignore[attr-defined]


def test_an_empty_shard_breaks_the_inf_norm(ranks: Any) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(_empty_shard, 2, deadline=20.0)
    assert 1 in failure.value.errors
    assert "identity" in str(failure.value.errors[1])
