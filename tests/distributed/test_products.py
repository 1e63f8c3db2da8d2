"""Products of layouts on up to eight ranks, each data-parallel replica with a batch of its own, against one process."""

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
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import distclip
from distclip.testing import RankFailure, oracle
from distclip.testing.collectives import count

NORM_TYPES = (1.0, 2.0, 3.0, math.inf)
LIMIT = 0.1


class Block(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, hidden)
        self.down = nn.Linear(hidden, 4)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(self.norm(batch))))
        return out


def _batches(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, 4, generator=generator) for _ in range(number)]


def _reference(batches: list[Tensor], hidden: int = 8) -> dict[str, Any]:
    """Mean gradients over the replicas' batches."""
    alone = Block(hidden)
    for batch in batches:
        (alone(batch).square().sum() / len(batches)).backward()
    return oracle.gather_full_gradients(alone)


def _parallelize(block: nn.Module, tp: DeviceMesh, sequence: bool) -> None:
    if sequence:
        up, down = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(block, tp, {"norm": SequenceParallel(), "up": up, "down": down})
    else:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _backward(model: nn.Module, batch: Tensor, tp: DeviceMesh, sequence: bool) -> None:
    out = model(batch.chunk(tp.size(), dim=1)[tp.get_local_rank()] if sequence else batch)
    (out.to_local() if isinstance(out, DTensor) else out).square().sum().backward()


def _compare(model: nn.Module, wanted: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """Norms, gradients after clipping and collectives, next to the reference."""
    norms = [
        distclip.get_total_norm(model, p, **arguments).item() / oracle.norm(wanted.values(), p) for p in NORM_TYPES
    ]
    clipper = distclip.GradientClipper(model, max_norm=LIMIT, **arguments)
    clipper.measure()
    with count() as issued:
        clipper.clip_()
    after, clipped = oracle.gather_full_gradients(model), oracle.clipped(wanted, LIMIT, 2.0)
    gradients = [parameter.grad for parameter in model.parameters()]
    placements = [placement for g in gradients if isinstance(g, DTensor) for placement in g.placements]
    return {
        "norms": norms,
        "names": after.keys() == clipped.keys(),
        "worst": max(float(abs(after[name] - clipped[name]).max()) for name in clipped),
        "issued": dict(issued),
        "partial": any(placement.is_partial() for placement in placements),
        "strided": any(isinstance(placement, _StridedShard) for placement in placements),
    }


def _right(said: dict[str, Any]) -> None:
    assert said["norms"] == pytest.approx([1.0] * len(NORM_TYPES), rel=1e-6)
    assert said["names"]
    assert said["worst"] < 1e-7
    # the packet, and one for the addends of a mesh axis where there are any
    assert said["issued"] == {"allreduce": 2 if said["partial"] else 1}


def _sharded_times_tensor(shape: tuple[int, ...], sequence: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp")[-len(shape) :])
    tp = mesh["tp"]
    block: Any = Block()
    _parallelize(block, tp, sequence)
    fully_shard(block, mesh=mesh["replicate", "shard"] if len(shape) == 3 else mesh["shard"])
    batches = _batches(math.prod(shape) // tp.size())
    _backward(block, batches[dist.get_rank() // tp.size()], tp, sequence)
    return _compare(block, _reference(batches))


@pytest.mark.parametrize("sequence", [False, True])
def test_hsdp_times_tensor_parallel_on_eight_ranks(ranks: Any, sequence: bool) -> None:
    for said in ranks(_sharded_times_tensor, 8, (2, 2, 2), sequence):
        _right(said)
        assert said["strided"]


@pytest.mark.parametrize("sequence", [False, True])
def test_fsdp2_times_tensor_parallel(ranks: Any, sequence: bool) -> None:
    for said in ranks(_sharded_times_tensor, 4, (2, 2), sequence):
        _right(said)
        assert said["strided"]


def _ddp_times_tensor(call: str) -> list[dict[str, Any]]:
    """Three steps. From the first forward on, the module does not show its split weights as parameters any more."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    block = Block()
    _parallelize(block, mesh["tp"], False)
    wrapped = DistributedDataParallel(block, device_mesh=mesh["dp"])
    parameters = {name.removeprefix("module."): p for name, p in wrapped.named_parameters()}
    clipper = distclip.GradientClipper(wrapped, max_norm=LIMIT) if call == "clipper" else None
    batches = _batches(2)
    wanted = _reference(batches)
    clipped = oracle.clipped(wanted, LIMIT, 2.0)
    said = []
    for _ in range(3):
        for parameter in parameters.values():
            parameter.grad = None
        _backward(wrapped, batches[dist.get_rank() // 2], mesh["tp"], False)
        norms = [distclip.get_total_norm(wrapped, p).item() / oracle.norm(wanted.values(), p) for p in NORM_TYPES]
        with count() as issued:
            if clipper is None:
                distclip.clip_grad_norm_(wrapped, LIMIT)
            else:
                clipper.clip_()
        worst = 0.0
        for name, parameter in parameters.items():
            gradient, spec = parameter.grad, getattr(parameter, "_st_info", None)
            if spec is not None:
                gradient = DTensor.from_local(gradient, spec.mesh, spec.placements, run_check=False)
            after = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            worst = max(worst, float(abs(after.double().numpy() - clipped[name]).max()))
        said.append({"norms": norms, "worst": worst, "issued": dict(issued), "shown": len([*wrapped.parameters()])})
    return said


@pytest.mark.parametrize("call", ["clipper", "function"])
def test_ddp_times_tensor_parallel(ranks: Any, call: str) -> None:
    for steps in ranks(_ddp_times_tensor, 4, call):
        for step, said in enumerate(steps):
            assert said["norms"] == pytest.approx([1.0] * len(NORM_TYPES), rel=1e-6)
            assert said["worst"] < 1e-7
            assert said["shown"] == 2  # what torch leaves of six
            # the first measurement of a plan compares replicas as well
            extra = {"allgather": 1} if call == "clipper" and step == 0 else {}
            assert said["issued"] == {"allreduce": 1, **extra}


def _three_dimensions() -> dict[str, Any]:
    """PP 2 x TP 2 x FSDP2 2; every stage is a block of its own with the same names."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    block = Block()
    _parallelize(block, mesh["tp"], True)
    fully_shard(block, mesh=mesh["dp"])
    by_stage = [[batch * (1.0 + each) for batch in _batches(2)] for each in range(2)]
    _backward(block, by_stage[stage][replica], mesh["tp"], True)
    wanted = [_reference(batches) for batches in by_stage]
    everything = [value for each in wanted for value in each.values()]
    clipper = distclip.GradientClipper(block, max_norm=LIMIT, pipeline_group=mesh["pp"].get_group())
    norm = clipper.measure().total_norm.item() / oracle.norm(everything, 2.0)
    clipper.clip_()
    factor = oracle.coefficient(oracle.norm(everything, 2.0), LIMIT)
    after = oracle.gather_full_gradients(block)
    return {"norm": norm, "worst": max(float(abs(after[name] - wanted[stage][name] * factor).max()) for name in after)}


def test_pipeline_times_tensor_times_fsdp2_with_sequence_parallel(ranks: Any) -> None:
    for said in ranks(_three_dimensions, 8):
        assert said["norm"] == pytest.approx(1.0, rel=1e-6)
        assert said["worst"] < 1e-7


# --- strided shards ------------------------------------------------------------------------------------------------


def _strided(rows: int) -> dict[str, Any]:
    """What FSDP2 over tensor parallel leaves, made by hand: sharded on axis 1 first, then on axis 0."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(1.0, rows + 1.0)
    dp, tp = mesh.get_coordinate() or (0, 0)
    inner = whole.tensor_split([math.ceil(rows / 2)])[tp]
    local = inner.tensor_split([math.ceil(len(inner) / 2)])[dp].clone()
    placements = [_StridedShard(0, split_factor=2), Shard(0)]

    def spread(values: Tensor) -> DTensor:
        return DTensor.from_local(values, mesh, placements, run_check=False, shape=whole.shape, stride=(1,))

    parameter = nn.Parameter(spread(torch.zeros_like(local)))
    parameter.grad = spread(local)
    norms = [distclip.get_total_norm([parameter], p).item() / oracle.norm([whole.numpy()], p) for p in NORM_TYPES]
    with count() as issued:
        distclip.clip_grad_norm_([parameter], LIMIT)
    factor = oracle.coefficient(oracle.norm([whole.double().numpy()], 2.0), LIMIT)
    after = parameter.grad.to_local()
    rest = inner.tensor_split([math.ceil(len(inner) / 2)])[dp] * factor
    return {
        "norms": norms,
        "worst": float((after - rest).abs().amax()) if len(rest) else 0.0,
        "issued": dict(issued),
    }


@pytest.mark.parametrize("rows", [8, 7, 5, 2])
def test_strided_shards_of_any_length(ranks: Any, rows: int) -> None:
    """Seven rows are shards of 2, 2, 2 and 1; two leave some ranks with nothing."""
    for said in ranks(_strided, 4, rows):
        assert said["norms"] == pytest.approx([1.0] * len(NORM_TYPES), rel=1e-6)
        assert said["worst"] < 1e-7
        assert said["issued"] == {"allreduce": 1}


# --- FSDP2 that leaves parameters out ------------------------------------------------------------------------------


def _ignored(how: str) -> list[Any]:
    """`norm` is ignored, so each rank has a gradient of its own; all of them begin as ones and zeros."""
    rank = dist.get_rank()
    block: Any = Block()
    fully_shard(block, ignored_params=set(block.norm.parameters()))
    batches = _batches(2)
    block(batches[rank]).square().sum().backward()
    mean, own = _reference(batches), _reference([batches[rank]])
    everywhere = [_reference([batch]) for batch in batches]
    if how == "reduced by hand":
        for parameter in block.norm.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        own = mean
    wanted = {name: own[name] if name.startswith("norm") else value for name, value in mean.items()}
    counted = [value for name, value in mean.items() if not name.startswith("norm")]
    for each in [mean] if how == "reduced by hand" else everywhere:
        counted += [value for name, value in each.items() if name.startswith("norm")]
    owned = ["norm.*"] if how == "owned" else ()
    norms = [distclip.get_total_norm(block, p, owned=owned).item() / oracle.norm(counted, p) for p in NORM_TYPES]
    with count() as issued:
        distclip.clip_grad_norm_(block, LIMIT, owned=owned)
    factor = oracle.coefficient(oracle.norm(counted, 2.0), LIMIT)
    after = oracle.gather_full_gradients(block)
    worst = max(float(abs(after[name] - wanted[name] * factor).max()) for name in wanted)
    return [norms, worst, dict(issued)]


@pytest.mark.parametrize("how", ["owned", "reduced by hand"])
def test_fsdp2_ignored_parameters(ranks: Any, how: str) -> None:
    for norms, worst, issued in ranks(_ignored, 2, how):
        assert norms == pytest.approx([1.0] * len(NORM_TYPES), rel=1e-6)
        assert worst < 1e-7
        assert issued == {"allreduce": 1}


def test_fsdp2_ignored_parameters_that_nobody_declared_are_refused_by_name(ranks: Any) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(_ignored, 2, "undeclared")
    errors = failure.value.errors
    assert [type(errors[rank]) for rank in (0, 1)] == [distclip.LayoutError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "'norm.weight': norms" in str(errors[0])
    assert "'norm.bias': norms" in str(errors[0])
    assert "'up." not in str(errors[0])
    assert "owned=" in str(errors[0])


# --- parameters on parts of a mesh ---------------------------------------------------------------------------------


def _sub_mesh() -> dict[str, Any]:
    """Layers of one model on all axes, on one axis, on the other, and on none, one of them in addends."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(2)
    values = [torch.randn(5, 3, generator=generator) for _ in range(5)]
    where: list[Any] = [
        (mesh, [Shard(0), Shard(1)]),
        (mesh["dp"], [Shard(0)]),
        (mesh["tp"], [Shard(1)]),
        (mesh, [Replicate(), Shard(0)]),
    ]
    model = nn.ParameterDict()
    for index, (part, placements) in enumerate(where):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(5, 3), part, placements))
        parameter.grad = distribute_tensor(values[index], part, placements)
        model[f"p{index}"] = parameter
    addends = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh["tp"], [Replicate()]))
    half = DTensor.from_local(values[4] / 2, mesh["tp"], [Partial()], run_check=False)
    addends.grad, model["p4"] = half, addends
    model["p5"] = nn.Parameter(torch.zeros(2))
    model["p5"].grad = torch.tensor([3.0, 4.0])
    wanted = {f"p{index}": value.double().numpy() for index, value in enumerate([*values, torch.tensor([3.0, 4.0])])}
    return _compare(model, wanted)


def test_parameters_on_several_parts_of_one_mesh(ranks: Any) -> None:
    for said in ranks(_sub_mesh, 4):
        _right(said)
        assert said["partial"]
