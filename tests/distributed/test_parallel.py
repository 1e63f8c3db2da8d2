"""Tensor, sequence, pipeline and expert parallel, and their products: figures, gradients after, collectives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import distclip
from distclip.testing import oracle
from distclip.testing.collectives import count
from tests.distributed.block import Block
from tests.distributed.failures import fails_alike


def placed(gradient: Tensor, mesh: DeviceMesh, placements: list[Any]) -> nn.Parameter:
    """A zero parameter whose gradient is `gradient`, distributed alike."""
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
    parameter.grad = distribute_tensor(gradient, mesh, placements)
    return parameter


def plain(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def _tensor_parallel() -> tuple[float, dict[str, int], list[float]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    pairs = [
        ("sharded", placed(torch.tensor([3.0, 4.0]), mesh, [Shard(0)])),
        ("replicated", plain(torch.tensor([12.0]))),
    ]
    clipper = distclip.GradientClipper(pairs, max_norm=1.0)
    norm = clipper.measure().total_norm.item()
    with count() as issued:
        clipper.clip_()
    return norm, dict(issued), [oracle.gather_full_gradient(p).ravel().tolist() for _, p in pairs]


def test_tensor_parallel_with_plain_replicated_parameters(ranks: Any) -> None:
    for norm, issued, after in ranks(_tensor_parallel, 2):
        assert norm == 13.0
        assert issued == {"allreduce": 1}
        assert after[0] == pytest.approx([3 / 13, 4 / 13], rel=1e-6)
        assert after[1] == pytest.approx([12 / 13], rel=1e-6)


def clip(source: list[Any], **arguments: Any) -> dict[str, Any]:
    """Clip to 1; the norm, the whole gradients after, and the collectives of a step that is not a plan's first."""
    distclip.get_total_norm(source, **arguments)
    with count() as issued:
        norm = distclip.clip_grad_norm_(source, 1.0, **arguments).item()
    parameters = [item[1] if isinstance(item, tuple) else item for item in source]
    after: list[Any] = [oracle.gather_full_gradient(parameter) for parameter in parameters]
    return {
        "norm": norm,
        "after": [value for array in after if array is not None for value in array.ravel().tolist()],
        "issued": dict(issued),
    }


def clipped(said: dict[str, Any], norm: float, gradients: list[float]) -> None:
    """Whether `clip` came to this norm, and to these gradients over it."""
    assert said["norm"] == pytest.approx(norm, rel=1e-7)
    assert said["after"] == pytest.approx([value / norm for value in gradients], rel=1e-6)
    assert said["issued"] == {"allreduce": 1}


def _two_meshes(two_dimensional: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    a = placed(torch.tensor([3.0, 0.0]), mesh["dp"], [Shard(0)])
    if two_dimensional:
        a = placed(torch.tensor([[3.0, 0.0]]), mesh, [Shard(0), Shard(1)])
    return clip([a, placed(torch.tensor([0.0, 4.0]), mesh["tp"], [Shard(0)])])


@pytest.mark.parametrize("two_dimensional", [False, True])
def test_several_meshes(ranks: Any, two_dimensional: bool) -> None:
    for said in ranks(_two_meshes, 4, two_dimensional):
        clipped(said, 5.0, [3.0, 0.0, 0.0, 4.0])


def _sequence_parallel(shape: tuple[int, ...], nonfinite: str) -> dict[str, Any]:
    """A block with sequence-parallel norm, against the same block in one process."""
    torch.manual_seed(0)
    reference, block = Block(), Block()
    block.load_state_dict(reference.state_dict())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
    tp = mesh["tp"] if len(shape) == 2 else mesh
    parallelize_module(
        block,
        tp,
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )
    if len(shape) == 2:
        fully_shard(block, mesh=mesh["dp"])
    batch = torch.randn(2, 4, 4)
    reference(batch).square().sum().backward()
    part = batch.chunk(2, dim=1)[tp.get_local_rank()]
    out = block(part)
    (out.to_local() if isinstance(out, DTensor) else out).square().sum().backward()
    partial = [p for p in block.parameters() if any(q.is_partial() for q in p.grad.placements)]  # type: ignore[union-attr]
    wanted = [oracle.gather_full_gradient(p) for p in reference.parameters()]
    clipper = distclip.GradientClipper(block, max_norm=0.5, nonfinite=nonfinite)  # type: ignore[arg-type]
    norm = clipper.measure().total_norm.item()
    with count() as issued:
        clipper.clip_()
    got = [oracle.gather_full_gradient(p) for p in block.parameters()]
    limit = 0.5 / oracle.norm(wanted, 2.0)
    worst = max(float(abs(a - b * limit).max()) for a, b in zip(got, wanted, strict=True))
    return {
        "partial": len(partial),
        "still": sum(any(q.is_partial() for q in p.grad.placements) for p in partial),  # type: ignore[union-attr]
        "norm": norm / oracle.norm(wanted, 2.0),
        "worst": worst,
        "issued": dict(issued),
    }


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_sequence_parallel_gradients_are_summed_before_they_are_measured(ranks: Any, shape: tuple[int, ...]) -> None:
    for said in ranks(_sequence_parallel, math.prod(shape), shape, "skip"):
        if len(shape) == 1:
            assert said["partial"] == said["still"] == 2
            assert said["issued"] == {"allreduce": 2}  # the packet, and one for the addends
        assert said["norm"] == pytest.approx(1.0, rel=1e-6)
        assert said["worst"] < 1e-6


def _partial(value: float, mode: str) -> tuple[float, list[float]]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    addend = [torch.tensor([1.0, 4.0, 5.0]), torch.tensor([2.0, 0.0, value])][dist.get_rank()]
    parameter.grad = DTensor.from_local(addend, mesh, [Partial()])
    clipper = distclip.GradientClipper([("norm", parameter)], max_norm=1.0, nonfinite=mode)  # type: ignore[arg-type]
    report = clipper.clip_()
    return report.total_norm.item(), parameter.grad.full_tensor().tolist()


def test_addends_are_measured_by_their_sum_and_zeroed_together(ranks: Any) -> None:
    for norm, after in ranks(_partial, 2, -5.0, "skip"):
        assert norm == 5.0
        assert after == pytest.approx([0.6, 0.8, 0.0], rel=1e-6)
    for norm, after in ranks(_partial, 2, math.nan, "zero"):
        assert norm == 5.0
        assert after == pytest.approx([0.6, 0.8, 0.0], rel=1e-6)


def _partial_functional() -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    other = plain(torch.tensor([3.0, 4.0]))
    said = []
    for step in range(3):
        addend = torch.tensor([[3.0, 0.0], [0.0, 4.0]])[dist.get_rank()]
        parameter.grad = DTensor.from_local(addend, mesh, [Partial()])
        said.append(distclip.get_total_norm([parameter]).item())
        # caches that differ: rank 1 comes with parameters that it has not shown before
        again = [other] if step == 0 or dist.get_rank() == 0 else [plain(torch.tensor([3.0, 4.0]))]
        said.append(distclip.get_total_norm(again).item())
        if step and dist.get_rank() == 1:
            fresh = nn.Parameter(parameter.detach().clone())
            fresh.grad, parameter = parameter.grad, fresh
        said.append(distclip.get_total_norm([parameter]).item())
    return said


def test_functions_with_partial_gradients_do_not_hang_when_caches_differ(ranks: Any) -> None:
    assert ranks(_partial_functional, 2) == [[5.0] * 9] * 2


def _stages(norm_type: float) -> tuple[float, float]:
    gradient = torch.tensor([3.0 + dist.get_rank()])
    parameter = plain(gradient)
    norm = distclip.clip_grad_norm_([("0.weight", parameter)], 1.0, norm_type, pipeline_group=dist.group.WORLD).item()
    assert parameter.grad is not None
    return norm, parameter.grad.item()


@pytest.mark.parametrize(("norm_type", "wanted"), [(2.0, 5.0), (1.0, 7.0), (3.0, 4.497941), (math.inf, 4.0)])
def test_hand_made_stages_with_the_same_names(ranks: Any, norm_type: float, wanted: float) -> None:
    said = ranks(_stages, 2, norm_type)
    assert [norm for norm, _ in said] == pytest.approx([wanted] * 2, rel=1e-6)
    assert [after for _, after in said] == pytest.approx([3 / wanted, 4 / wanted], rel=1e-6)


def _tied() -> dict[str, Any]:
    rank = dist.get_rank()
    embedding = plain(torch.tensor([3.0]))  # summed over first and last stage, as Megatron-LM does
    own = plain(torch.tensor([[4.0], [12.0]][rank]))
    name = "embedding.weight" if rank == 0 else "head.weight"
    return clip(
        [(name, embedding), ("layer.weight", own)],
        pipeline_group=dist.group.WORLD,
        tied=[("embedding.weight", "head.weight")],
    )


def test_an_embedding_held_by_two_stages_counts_once(ranks: Any) -> None:
    for rank, said in enumerate(ranks(_tied, 2)):
        clipped(said, 13.0, [3.0, [4.0, 12.0][rank]])


def _experts(how: str, norm_type: float) -> tuple[float, list[float]]:
    rank = dist.get_rank()
    values = [[2.0, 4.0], [6.0, 8.0]][rank % 2]
    if how == "none on rank 1" and rank == 1:
        values = []
    parameters = [(f"experts.{2 * rank + index}.weight", plain(torch.tensor([v]))) for index, v in enumerate(values)]
    if how == "marked":
        for index, (_, parameter) in enumerate(parameters):
            parameter.data.fill_(float(10 * rank + index))
            parameter.allreduce = False  # type: ignore[attr-defined]
    owned = () if how == "marked" else ["experts.*"]
    norm = distclip.clip_grad_norm_(parameters, 1.0, norm_type, owned=owned).item()
    return norm, [p.grad.item() * norm / v for (_, p), v in zip(parameters, values, strict=True) if p.grad is not None]


@pytest.mark.parametrize(
    ("how", "norm_type", "wanted"),
    [
        ("owned", 2.0, 10.954451),
        ("owned", math.inf, 8.0),
        ("none on rank 1", 2.0, 4.472136),
        ("marked", 2.0, 10.954451),
    ],
)
def test_experts_owned_by_ranks(ranks: Any, how: str, norm_type: float, wanted: float) -> None:
    for rank, (norm, after) in enumerate(ranks(_experts, 2, how, norm_type)):
        assert norm == pytest.approx(wanted, rel=1e-7)
        assert after == pytest.approx([1.0] * (0 if how == "none on rank 1" and rank == 1 else 2), rel=1e-6)


def _replicated_experts() -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """EP 2 x DP 2: ranks 0 and 2 share experts, ranks 1 and 3 the others."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    values = [[2.0, 4.0], [6.0, 8.0]][rank % 2]
    pairs = [(f"experts.{index}.weight", plain(torch.tensor([v]))) for index, v in enumerate(values)]
    source = [*pairs, ("dense", plain(torch.tensor([5.0])))]
    owned = {"experts.*": groups[rank % 2]}
    holders = [entry.holders for entry in distclip.GradientClipper(source, owned=owned).plan.entries]
    return clip(source, owned=owned), holders


def test_experts_with_replicas(ranks: Any) -> None:
    for rank, (said, holders) in enumerate(ranks(_replicated_experts, 4)):
        clipped(said, 145**0.5, [[2.0, 4.0, 5.0], [6.0, 8.0, 5.0]][rank % 2])
        assert holders == [(rank % 2, rank % 2 + 2)] * 2 + [(0, 1, 2, 3)]


def _experts_without_tokens() -> dict[str, Any]:
    rank = dist.get_rank()
    parameters = [(f"experts.{rank}", nn.Parameter(torch.zeros(1))), ("dense", plain(torch.tensor([4.0])))]
    if rank == 0:
        parameters[0][1].grad = torch.tensor([3.0])
    return clip(parameters, owned=["experts.*"])


def test_an_expert_without_tokens(ranks: Any) -> None:
    for rank, said in enumerate(ranks(_experts_without_tokens, 2)):
        clipped(said, 5.0, [[3.0, 4.0], [4.0]][rank])


def _sub_mesh_experts() -> dict[str, Any]:
    """Dense parameters on the whole mesh, experts on their own mesh (EP 2, FSDP 2 within)."""
    dense_mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    moe = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
    dense = placed(torch.arange(1.0, 9.0), dense_mesh, [Shard(0)])
    experts = placed(torch.arange(1.0, 13.0).view(4, 3), moe, [Shard(0), Shard(1)])
    return clip([("dense", dense), ("experts", experts)])


def test_experts_on_their_own_mesh(ranks: Any) -> None:
    values = [float(value) for value in (*range(1, 9), *range(1, 13))]
    for said in ranks(_sub_mesh_experts, 4):
        clipped(said, sum(value**2 for value in values) ** 0.5, values)


def _another_model() -> None:
    mesh = init_device_mesh("cpu", (2,))
    names = ["a", "b"] if dist.get_rank() == 0 else ["a", "c"]
    parameters = [(name, nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))) for name in names]
    distclip.GradientClipper(parameters)


def test_ranks_of_a_mesh_with_other_parameters_are_told(ranks: Any) -> None:
    text = fails_alike(ranks, distclip.LayoutError, _another_model, 2)
    assert "'b' (4, float32) is only on rank 0" in text
    assert "'c' (4, float32) is only on rank 1" in text


def _groups_per_stage() -> tuple[list[str], float, float]:
    rank = dist.get_rank()
    parameter = plain(torch.tensor([3.0 + rank]))
    clipper = distclip.GradientClipper(
        [(f"layer{rank}", parameter)], pipeline_group=dist.group.WORLD, param_groups=lambda name: name
    )
    report = clipper.clip_()
    return list(report.param_groups), report.total_norm.item(), report.param_groups["layer1"].norm.item()


def test_stages_agree_on_the_groups_that_a_function_names(ranks: Any) -> None:
    assert ranks(_groups_per_stage, 2) == [(["layer0", "layer1", "default"], 5.0, 4.0)] * 2


def _limits_on_shards(wrap: str) -> list[float]:
    torch.manual_seed(0)
    model: Any = Block()
    if wrap == "fsdp2":
        model = fully_shard(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        model = parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model(torch.randn(2, 4, 4)).square().sum().backward()
    groups = {"up": distclip.ParamGroup("up.*", max_norm=0.25), "norm": distclip.ParamGroup(["norm.*"])}
    clipper = distclip.GradientClipper(model, max_norm=0.5, param_groups=groups)
    clipper.clip_()
    full = {name: oracle.gather_full_gradient(p) for name, p in model.named_parameters()}
    up = oracle.norm([g for name, g in full.items() if name.startswith("up")], 2.0)
    return [up, oracle.norm([g for name, g in full.items() if not name.startswith("up")], 2.0)]


@pytest.mark.parametrize("wrap", ["fsdp2", "tp"])
def test_limits_of_groups_over_shards(ranks: Any, wrap: str) -> None:
    for norms in ranks(_limits_on_shards, 2, wrap):
        assert norms == pytest.approx([0.25, 0.5], rel=1e-5)


def _value() -> tuple[list[float], str]:
    mesh = init_device_mesh("cpu", (2,))
    sharded = placed(torch.tensor([3.0, -4.0, 0.5]), mesh, [Shard(0)])
    distclip.clip_grad_value_([sharded], 1.0)
    partial = nn.Parameter(distribute_tensor(torch.zeros(1), mesh, [Replicate()]))
    partial.grad = DTensor.from_local(torch.ones(1), mesh, [Partial()])
    with pytest.raises(distclip.LayoutError) as error:
        distclip.clip_grad_value_([("norm.weight", partial)], 1.0)
    return oracle.gather_full_gradient(sharded).tolist(), str(error.value)


def test_clipping_by_value_is_exact_on_shards_and_refused_on_addends(ranks: Any) -> None:
    for after, text in ranks(_value, 2):
        assert after == [1.0, -1.0, 0.5]
        assert "'norm.weight' is Partial" in text
