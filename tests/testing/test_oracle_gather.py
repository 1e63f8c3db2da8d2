"""What the oracle gathers from wrapped models, against the same model trained in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from distclip.testing import RankFailure, oracle

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 5)
        self.narrow = nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.wide(x).tanh())


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Model(nn.Module):
    """Odd sizes, so that shards are uneven; one parameter that never gets a gradient and one that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 3)
        self.blocks = nn.Sequential(Block(), Block())
        self.unused = nn.Parameter(torch.ones(3))
        self.last = Tied(self.first.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x)))


def reference_gradients(world_size: int) -> dict[str, oracle.Array]:
    """Of the mean of the ranks' losses, in one process."""
    model = Model()
    sum(loss(model, rank) / world_size for rank in range(world_size)).backward()  # type: ignore[union-attr]
    return {name: p.grad.double().numpy() for name, p in model.named_parameters() if p.grad is not None}


def loss(model: nn.Module, rank: int) -> torch.Tensor:
    x = torch.linspace(-1, 1, 14).reshape(2, 7) + rank
    return model(x).square().sum()


def wrap_none(model: Model) -> nn.Module:
    return model


def wrap_ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def wrap_fsdp1(model: Model, strategy: str, use_orig_params: bool, nested: bool) -> nn.Module:
    groups = None
    if "HYBRID" in strategy:
        mesh = init_device_mesh("cpu", (2, 2))
        groups = (mesh.get_group(1), mesh.get_group(0))
    return FullyShardedDataParallel(
        model,
        process_group=groups,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy({Block}) if nested else None,
        device_id=CPU,
    )


def wrap_fsdp2(model: Model, shape: tuple[int, ...]) -> nn.Module:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gathered(wrap: Callable[..., nn.Module], *args: Any) -> tuple[dict[str, oracle.Array], bool]:
    """The gathered gradients, and whether the gradients of the wrapped model are untouched."""
    torch.manual_seed(0)
    model = wrap(Model(), *args)
    loss(model, dist.get_rank()).backward()
    before = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    copies = {name: local(gradient).clone() for name, gradient in before.items()}
    found = oracle.gather_full_gradients(model)
    after = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    same = all(after[name] is gradient for name, gradient in before.items())
    return found, same and all(torch.equal(local(before[name]), copies[name]) for name in copies)


def local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
WRAPPED: list[tuple[Any, ...]] = [
    (1, wrap_none),
    (2, wrap_ddp),
    *((4, wrap_fsdp1, strategy, orig, nested) for strategy in STRATEGIES for orig in (0, 1) for nested in (0, 1)),
    (4, wrap_fsdp2, (4,)),
    (4, wrap_fsdp2, (2, 2)),
]


@pytest.mark.parametrize("case", WRAPPED, ids=lambda case: "-".join(str(getattr(x, "__name__", x)) for x in case))
def test_gathered_gradients_are_those_of_one_process(ranks: Ranks, case: tuple[Any, ...]) -> None:
    world_size, wrap, *args = case
    torch.manual_seed(0)
    wanted = reference_gradients(world_size)
    for found, untouched in ranks(gathered, world_size, wrap, *args):
        assert untouched
        # DDP fills an unused parameter's gradient with zeros, and so does a flat parameter of FSDP1.
        zeros = found.pop("unused", None)
        assert zeros is None or not zeros.any()
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert found[name].dtype == np.float64
            np.testing.assert_allclose(found[name], gradient, rtol=2e-5, atol=1e-5, err_msg=name)


MESH_GRADIENTS = [
    # placements on a 2x2 mesh, the local gradient of rank r, and the whole by hand
    ((Replicate(), Replicate()), [[1.0, 2.0]] * 4, [1.0, 2.0]),
    ((Replicate(), Shard(0)), [[1.0], [2.0]] * 2, [1.0, 2.0]),
    ((Replicate(), Partial()), [[1.0, 2.0], [10.0, 20.0]] * 2, [11.0, 22.0]),
    ((Partial(), Partial()), [[1.0], [10.0], [100.0], [1000.0]], [1111.0]),
    ((Partial(), Shard(0)), [[1.0], [2.0], [10.0], [20.0]], [11.0, 22.0]),
    ((Partial("avg"), Replicate()), [[1.0], [1.0], [4.0], [4.0]], [2.5]),
    ((Replicate(), Shard(0)), [[1.0, 2.0], [3.0]] * 2, [1.0, 2.0, 3.0]),
    ((Replicate(), Shard(0)), [[7.0], []] * 2, [7.0]),
]


def gather_on_mesh(
    placements: tuple[Placement, ...], locals_: list[list[float]], size: int, dtype: torch.dtype
) -> tuple[oracle.Array | None, tuple[Placement, ...], list[float]]:
    mesh = init_device_mesh("cpu", (2, 2))

    def distributed(values: list[float]) -> DTensor:
        local = torch.tensor(values, dtype=dtype)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size([size]), stride=(1,))

    parameter = distributed(locals_[dist.get_rank()]).requires_grad_()
    assert oracle.gather_full_gradient(parameter) is None
    parameter.grad = distributed(locals_[dist.get_rank()])
    found = oracle.gather_full_gradient(parameter)
    assert isinstance(parameter.grad, DTensor)
    return found, parameter.grad.placements, parameter.grad.to_local().tolist()


@pytest.mark.parametrize(("placements", "locals_", "whole"), MESH_GRADIENTS)
def test_any_placement_is_gathered(
    ranks: Ranks, placements: tuple[Placement, ...], locals_: list[list[float]], whole: list[float]
) -> None:
    results = ranks(gather_on_mesh, 4, placements, locals_, len(whole), torch.float32)
    for rank, (found, placements_after, local_after) in enumerate(results):
        assert found.tolist() == whole
        assert placements_after == placements
        assert local_after == locals_[rank]


def test_partial_gradients_are_added_in_float64(ranks: Ranks) -> None:
    # In bfloat16 the sum of 256 and 1 is 256.
    locals_ = [[256.0], [1.0], [0.0], [0.0]]
    found = ranks(gather_on_mesh, 4, (Partial(), Partial()), locals_, 1, torch.bfloat16)
    assert [whole.tolist() for whole, _, _ in found] == [[257.0]] * 4


def test_plain_gradients_of_every_kind() -> None:
    parameter = torch.zeros(3, requires_grad=True)
    parameter.grad = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (3,), check_invariants=True)
    whole = oracle.gather_full_gradient(parameter)
    assert whole is not None
    assert whole.tolist() == [0.0, 5.0, 0.0]
    complex_parameter = torch.zeros(1, dtype=torch.complex64, requires_grad=True)
    complex_parameter.grad = torch.tensor([1 + 2j]).conj()
    whole = oracle.gather_full_gradient(complex_parameter)
    assert whole is not None
    assert whole.dtype == np.complex128
    assert whole.tolist() == [1 - 2j]


def test_an_array_is_a_copy() -> None:
    parameter = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    parameter.grad = torch.ones(1, dtype=torch.float64)
    whole = oracle.gather_full_gradient(parameter)
    assert whole is not None
    whole[0] = 7.0
    assert parameter.grad.item() == 1.0


def some_ranks_only(use_orig_params: bool) -> list[str]:
    """With four ranks the only gradient lies on one of them, and nan there must be seen by all."""
    model = FullyShardedDataParallel(nn.Linear(2, 2, bias=False), use_orig_params=use_orig_params, device_id=CPU)
    model(torch.ones(1, 2)).sum().backward()
    for parameter in model.parameters():
        if dist.get_rank() == 3 and parameter.grad is not None:
            parameter.grad.fill_(float("nan"))
    return [str(value) for value in oracle.gather_full_gradients(model)["weight"].ravel()]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_one_rank_has_everybody_sees(ranks: Ranks, use_orig_params: bool) -> None:
    assert ranks(some_ranks_only, 4, use_orig_params) == [["1.0", "1.0", "1.0", "nan"]] * 4


def replaced_gradient() -> list[float]:
    model = FullyShardedDataParallel(nn.Linear(2, 2, bias=False), use_orig_params=True, device_id=CPU)
    model(torch.ones(1, 2)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = torch.full_like(parameter.grad, 5.0 + dist.get_rank())
    whole: list[float] = oracle.gather_full_gradients(model)["weight"].ravel().tolist()
    return whole


def test_what_counts_is_the_gradient_that_the_optimizer_sees(ranks: Ranks) -> None:
    assert ranks(replaced_gradient, 2) == [[5.0, 5.0, 6.0, 6.0]] * 2


def unsynchronised(use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(nn.Linear(2, 2, bias=False), use_orig_params=use_orig_params, device_id=CPU)
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    oracle.gather_full_gradients(model)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_gradient_that_was_not_reduced_is_refused(ranks: Ranks, use_orig_params: bool) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(unsynchronised, 2, use_orig_params)
    assert {type(error) for error in caught.value.errors.values()} == {ValueError}


def single_parameter() -> None:
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=CPU)
    for parameter in model.parameters():
        oracle.gather_full_gradient(parameter)


def test_a_parameter_of_fsdp1_alone_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="give the module to gather_full_gradients"):
        ranks(single_parameter, 2)
