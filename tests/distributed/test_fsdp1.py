"""FSDP1 beyond one flat model: strategies mixed by nesting, ignored modules, replicas made by hand, other dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

import distclip
from distclip.testing import oracle
from distclip.testing.collectives import count
from tests.distributed.failures import fails_alike

NORM_TYPES = (1.0, 2.0, float("inf"))


class Model(nn.Module):
    """Layers of sizes that four ranks cannot split evenly, so that shards begin in the middle of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.middle = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.last = nn.Linear(5, 2)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(torch.tanh(self.first(batch))))
        return out


def wrap(module: nn.Module, use_orig_params: bool, **arguments: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, use_orig_params=use_orig_params, device_id=torch.device("cpu"), **arguments)


def batches(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, generator=generator) for _ in range(number)]


def reference(model: nn.Module) -> dict[str, Any]:
    """Gradients of the model in one process: the mean over the ranks' batches."""
    alone = Model()
    alone.load_state_dict(model.state_dict())
    parts = batches(dist.get_world_size())
    for batch in parts:
        (alone(batch).square().sum() / len(parts)).backward()
    return oracle.gather_full_gradients(alone)


def backward(model: nn.Module) -> None:
    model(batches(dist.get_world_size())[dist.get_rank()]).square().sum().backward()


def compare(model: nn.Module, wanted: dict[str, Any]) -> dict[str, Any]:
    """Norms, and gradients after clipping, over the reference."""
    norms = [distclip.get_total_norm(model, p).item() / oracle.norm(wanted.values(), p) for p in NORM_TYPES]
    with count() as issued:
        distclip.clip_grad_norm_(model, 0.1)
    after, clipped = oracle.gather_full_gradients(model), oracle.clipped(wanted, 0.1, 2.0)
    return {
        "norms": norms,
        "issued": dict(issued),
        "names": after.keys() == clipped.keys(),
        "worst": max(float(abs(after[name] - clipped[name]).max()) for name in clipped),
    }


def right(said: dict[str, Any]) -> None:
    assert said["norms"] == pytest.approx([1.0] * len(NORM_TYPES), rel=1e-6)
    assert said["issued"] == {"allreduce": 1}
    assert said["names"]
    assert said["worst"] < 1e-7


# --- nested --------------------------------------------------------------------------------------------------------


def _nested(root: str, child: str, use_orig_params: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    wanted = reference(model)
    rank = dist.get_rank()
    inner = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    outer = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    groups = {"HYBRID_SHARD": (inner, outer), "_HYBRID_SHARD_ZERO2": (inner, outer)}

    def nest(module: nn.Module, strategy: str) -> FullyShardedDataParallel:
        return wrap(
            module,
            use_orig_params,
            sharding_strategy=ShardingStrategy[strategy],
            process_group=groups.get(strategy, dist.group.WORLD),
        )

    model.middle = nest(model.middle, child)  # type: ignore[assignment]
    wrapped = nest(model, root)
    backward(wrapped)
    return compare(wrapped, wanted)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(
    ("root", "child"),
    [
        ("FULL_SHARD", "HYBRID_SHARD"),
        ("HYBRID_SHARD", "FULL_SHARD"),
        ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"),
        ("FULL_SHARD", "NO_SHARD"),
    ],
)
def test_units_of_other_strategies_inside_each_other(ranks: Any, root: str, child: str, use_orig_params: bool) -> None:
    for said in ranks(_nested, 4, root, child, use_orig_params):
        right(said)


def _auto_wrapped(policy: str, use_orig_params: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    wanted = reference(model)
    policies: dict[str, Any] = {
        "by class": ModuleWrapPolicy({nn.Linear}),
        "by size": lambda **arguments: size_based_auto_wrap_policy(min_num_params=30, **arguments),
    }
    wrapped = wrap(model, use_orig_params, auto_wrap_policy=policies[policy])
    assert sum(isinstance(module, FullyShardedDataParallel) for module in wrapped.modules()) > 1
    backward(wrapped)
    return compare(wrapped, wanted)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("policy", ["by class", "by size"])
def test_auto_wrapped_units(ranks: Any, policy: str, use_orig_params: bool) -> None:
    for said in ranks(_auto_wrapped, 3, policy, use_orig_params):
        right(said)


# --- replicas made by hand -----------------------------------------------------------------------------------------


def _outer_replication(use_orig_params: bool, reduced: bool) -> dict[str, Any]:
    """FSDP1 over pairs of ranks, and the user's own all-reduce between the pairs."""
    torch.manual_seed(0)
    model = Model()
    wanted = reference(model)
    rank = dist.get_rank()
    inner = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    outer = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    wrapped = wrap(model, use_orig_params, process_group=inner, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    backward(wrapped)
    for parameter in wrapped.parameters() if reduced else ():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=outer)
            parameter.grad /= 2
    return compare(wrapped, wanted)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_sharded_in_pairs_and_replicated_between_them_by_hand(ranks: Any, use_orig_params: bool) -> None:
    for said in ranks(_outer_replication, 4, use_orig_params, True):
        right(said)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_pairs_that_were_not_synchronised_are_refused_by_name(ranks: Any, use_orig_params: bool) -> None:
    text = fails_alike(ranks, distclip.LayoutError, _outer_replication, 4, use_orig_params, False)
    name = "first.weight" if use_orig_params else "first._flat_param"
    assert f"'{name}': norms" in text


# --- ignored modules -----------------------------------------------------------------------------------------------


def _ignored(use_orig_params: bool, declared: bool) -> dict[str, Any]:
    """`last` is left out of FSDP, so every rank has its own gradient of it."""
    torch.manual_seed(0)
    model = Model()
    wrapped = wrap(model, use_orig_params, ignored_modules=[model.last])
    backward(wrapped)
    own = [parameter.grad.double().numpy() for parameter in model.last.parameters() if parameter.grad is not None]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    shared = [gradient for name, gradient in oracle.gather_full_gradients(wrapped).items() if "last" not in name]
    assert len(shared) == 6
    wanted = oracle.norm([*shared, *(gradient for gradients in everyone for gradient in gradients)], 2.0)
    owned = ["last.*"] if declared else []
    norm = distclip.clip_grad_norm_(wrapped, 0.1, owned=owned).item()
    after = [parameter.grad.double().numpy() for parameter in model.last.parameters() if parameter.grad is not None]
    return {
        "norm": norm / wanted,
        "worst": max(float(abs(a - b * 0.1 / wanted).max()) for a, b in zip(after, own, strict=True)),
        "again": distclip.get_total_norm(wrapped, owned=owned).item(),
    }


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_ignored_modules_that_are_declared_count_on_every_rank(ranks: Any, use_orig_params: bool) -> None:
    for said in ranks(_ignored, 2, use_orig_params, True):
        assert said["norm"] == pytest.approx(1.0, rel=1e-6)
        assert said["worst"] < 1e-7
        assert said["again"] == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_ignored_modules_that_are_not_declared_are_refused_by_name(ranks: Any, use_orig_params: bool) -> None:
    text = fails_alike(ranks, distclip.LayoutError, _ignored, 2, use_orig_params, False)
    assert "'last.weight': norms" in text
    assert "'last.bias': norms" in text
    assert "'first." not in text
    assert "owned=" in text


# --- dtypes and frozen parameters ----------------------------------------------------------------------------------


def _low_precision(use_orig_params: bool) -> tuple[str, float, float]:
    torch.manual_seed(0)
    model = Model()
    half = torch.bfloat16
    wrapped = wrap(model, use_orig_params, mixed_precision=MixedPrecision(half, half, keep_low_precision_grads=True))
    wrapped(batches(1)[0]).square().sum().backward()
    dtypes = {str(parameter.grad.dtype) for parameter in wrapped.parameters() if parameter.grad is not None}
    wanted = oracle.norm(oracle.gather_full_gradients(wrapped).values(), 2.0)
    norm = distclip.clip_grad_norm_(wrapped, 0.1).item()
    return ", ".join(dtypes), norm / wanted, oracle.norm(oracle.gather_full_gradients(wrapped).values(), 2.0)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_gradients_kept_in_bfloat16_beside_float32_parameters(ranks: Any, use_orig_params: bool) -> None:
    for dtypes, ratio, after in ranks(_low_precision, 2, use_orig_params):
        assert dtypes == "torch.bfloat16"
        assert ratio == pytest.approx(1.0, rel=1e-6)
        assert after == pytest.approx(0.1, rel=4e-3)


def _partly_frozen() -> dict[str, Any]:
    """A frozen layer in a unit with trained ones, and a frozen unit."""
    torch.manual_seed(0)
    model = Model()
    wanted = {name: value for name, value in reference(model).items() if name.startswith(("first.w", "last"))}
    model.first.bias.requires_grad_(False)
    model.middle.requires_grad_(False)
    model.middle = wrap(model.middle, True)  # type: ignore[assignment]
    wrapped = wrap(model, True)
    backward(wrapped)
    return compare(wrapped, wanted)


def test_frozen_parameters_inside_and_between_units(ranks: Any) -> None:
    for said in ranks(_partly_frozen, 3):
        right(said)
