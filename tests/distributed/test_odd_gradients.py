"""Gradients that are missing, empty, huge, tiny, sparse, complex, of mixed dtypes or oddly laid out: 1 and 2 ranks."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import distclip
from distclip.testing import RankFailure, oracle
from distclip.testing.collectives import count

NORM_TYPES = (1.0, 2.0, 3.0, math.inf)


def plain(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


def spread(gradient: Tensor, placement: Placement | None = None) -> nn.Parameter:
    """A parameter whose gradient is distributed over all ranks: plain with one rank, a DTensor with several."""
    if dist.get_world_size() == 1:
        return plain(gradient)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = [placement or Shard(0)]
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
    parameter.grad = distribute_tensor(gradient, mesh, placements)
    return parameter


def whole(parameter: Tensor) -> list[Any]:
    """All elements of the gradient, after a gather."""
    gradient = oracle.gather_full_gradient(parameter)
    assert gradient is not None
    flat: list[Any] = gradient.ravel().tolist()
    return flat


# --- missing -------------------------------------------------------------------------------------------------------


def _none_on_one_rank(norm_type: float) -> tuple[float, dict[str, int], float | None]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
    if dist.get_rank() == 0:
        parameter.grad = DTensor.from_local(torch.tensor([3.0]), mesh, [Shard(0)], run_check=False)
    clipper = distclip.GradientClipper([parameter], norm_type=norm_type)
    norm = clipper.measure().total_norm.item()
    with count() as issued:
        clipper.clip_()
    gradient = parameter.grad
    return norm, dict(issued), gradient.to_local().item() if isinstance(gradient, DTensor) else None


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_a_rank_whose_only_gradient_is_none_takes_part(ranks: Any, norm_type: float) -> None:
    collectives = {"allreduce": 2 if math.isinf(norm_type) else 1}
    first, second = ranks(_none_on_one_rank, 2, norm_type)
    assert first == (3.0, collectives, pytest.approx(1.0, rel=1e-6))
    assert second == (3.0, collectives, None)


def _none_at_all() -> list[float]:
    parameter, shard = plain(torch.ones(2)), spread(torch.tensor([3.0, 4.0]))
    gradient, parameter.grad, shard.grad = shard.grad, None, None
    said = [distclip.clip_grad_norm_([parameter, shard], 1.0, p).item() for p in NORM_TYPES]
    shard.grad = gradient
    return [*said, distclip.get_total_norm([parameter, shard]).item()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_gradient_at_all_is_norm_zero_and_the_next_ones_count(ranks: Any, world_size: int) -> None:
    assert ranks(_none_at_all, world_size) == [[0.0, 0.0, 0.0, 0.0, 5.0]] * world_size


# --- empty ---------------------------------------------------------------------------------------------------------


def _one_row() -> list[Any]:
    said: list[Any] = [distclip.get_total_norm([spread(torch.tensor([[3.0, -4.0]]))], p).item() for p in NORM_TYPES]
    parameter = spread(torch.tensor([[3.0, -4.0]]))
    distclip.clip_grad_norm_([parameter], 1.0)
    return [*said, whole(parameter)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_row_over_two_ranks_leaves_one_shard_empty(ranks: Any, world_size: int) -> None:
    for *norms, after in ranks(_one_row, world_size):
        assert norms == pytest.approx([7.0, 5.0, 91 ** (1 / 3), 4.0], rel=1e-6)
        assert after == pytest.approx([0.6, -0.8], rel=1e-6)


def _nothing_to_measure(beside: bool) -> list[float]:
    empty = [plain(torch.zeros(0)), plain(torch.zeros(0, 3).half()), spread(torch.zeros(3, 0)), spread(torch.zeros(0))]
    parameters = [*empty, spread(torch.tensor([3.0, 4.0]))] if beside else empty
    return [distclip.clip_grad_norm_(parameters, 1e9, p).item() for p in (1.0, 2.0, math.inf)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_without_elements(ranks: Any, world_size: int) -> None:
    assert ranks(_nothing_to_measure, world_size, False) == [[0.0, 0.0, 0.0]] * world_size
    assert ranks(_nothing_to_measure, world_size, True) == [[7.0, 5.0, 4.0]] * world_size


# --- precision -----------------------------------------------------------------------------------------------------


def _mixed() -> tuple[float, list[float]]:
    dtypes = {3: torch.float16, 4: torch.float32, 12: torch.bfloat16, 84: torch.float64}
    parameters = [spread(torch.tensor([0, value], dtype=dtype)) for value, dtype in dtypes.items()]
    norm = distclip.clip_grad_norm_(parameters, 8.5).item()
    return norm, [whole(parameter)[1] for parameter in parameters]


@pytest.mark.parametrize("world_size", [1, 2])
def test_four_dtypes_in_one_model(ranks: Any, world_size: int) -> None:
    for norm, after in ranks(_mixed, world_size):
        assert norm == pytest.approx(85.0, rel=1e-7)
        for value, wanted, bits in zip(after, [0.3, 0.4, 1.2, 8.4], [10, 23, 7, 23], strict=True):
            # right to the last bit of each dtype, and in float64 to what the norm is good for
            assert value == pytest.approx(wanted, rel=2.0**-bits)


def _half(shards: bool) -> tuple[float, list[float]]:
    ones = torch.full((4,), 40000.0, dtype=torch.float16)
    parameters = [spread(ones)] if shards else [plain(part.clone()) for part in ones.tensor_split(4)]
    norm = distclip.clip_grad_norm_(parameters, 1.0).item()
    return norm, [value for parameter in parameters for value in whole(parameter)]


@pytest.mark.parametrize(("world_size", "shards"), [(1, False), (2, False), (2, True)])
def test_half_precision_has_norms_beyond_its_range(ranks: Any, world_size: int, shards: bool) -> None:
    for norm, after in ranks(_half, world_size, shards):
        assert norm == pytest.approx(80000.0, rel=1e-7)
        assert after == [0.5] * 4


def _split_bfloat16() -> list[float]:
    ones = torch.ones(150, dtype=torch.bfloat16)
    said = [
        distclip.get_total_norm([plain(part.clone()) for part in ones.tensor_split(parts)]).item()
        for parts in (1, 2, 3, 4, 8)
    ]
    return [*said, distclip.get_total_norm([spread(ones)]).item()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_norm_does_not_depend_on_how_tensors_are_split(ranks: Any, world_size: int) -> None:
    for said in ranks(_split_bfloat16, world_size):
        assert said == pytest.approx([150**0.5] * 6, rel=1e-7)


def _extreme(flush: bool) -> dict[str, Any]:
    torch.set_flush_denormal(flush)
    try:
        huge, tiny = spread(torch.tensor([3e38, 3e38])), spread(torch.full((4,), 1e-30))
        return {
            "tiny": distclip.get_total_norm([tiny]).item(),
            "huge": distclip.clip_grad_norm_([huge], 1.0).item(),
            "after": whole(huge),
        }
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_finite_gradients_have_a_finite_norm_and_no_norm_is_lost(ranks: Any, world_size: int, flush: bool) -> None:
    for said in ranks(_extreme, world_size, flush):
        assert said["huge"] == pytest.approx(3e38 * 2**0.5, rel=1e-6)
        assert said["tiny"] == pytest.approx(2e-30, rel=1e-6)
        assert said["after"] == pytest.approx([0.5**0.5] * 2, rel=1e-6)


def _bits(parameter: Tensor) -> bytes:
    gradient = parameter.grad
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    assert local is not None
    return local.numpy().tobytes()


def _read_only(values: list[float], how: str) -> tuple[bool, float]:
    parameter = spread(torch.tensor(values), Replicate() if how == "addends" else Shard(0))
    if how == "addends":
        assert isinstance(parameter.grad, DTensor)
        parameter.grad = DTensor.from_local(torch.tensor(values) / 2, parameter.grad.device_mesh, [Partial()])
    before = _bits(parameter)
    if how == "max_norm=inf":
        norm = distclip.clip_grad_norm_([parameter], math.inf)
    elif how == "max_norm=None":
        norm = distclip.GradientClipper([parameter], max_norm=None, nonfinite="zero").measure().total_norm
    else:
        norm = distclip.get_total_norm([parameter])
    return _bits(parameter) == before, norm.item()


@pytest.mark.parametrize("how", ["get_total_norm", "max_norm=inf", "max_norm=None", "addends"])
def test_measuring_shards_and_addends_leaves_every_bit_as_it_was(ranks: Any, how: str) -> None:
    for values, norm in (([math.inf, 1.0], math.inf), ([math.nan, 1.0], math.nan), ([3e38, 3e38], 3e38 * 2**0.5)):
        if how == "max_norm=None" and not math.isfinite(norm):
            norm = 1.0  # with nonfinite="zero" the norm is that of the rest
        for same, said in ranks(_read_only, 2, values, how):
            assert same
            assert said == pytest.approx(norm, rel=1e-6, nan_ok=True)


# --- sparse, complex, strides --------------------------------------------------------------------------------------


def _sparse(how: str) -> dict[str, Any]:
    """Token 1 comes twice, and its rows add up before they are measured: row 1 is [6, 8], rows 0 and 2 are [3, 4]."""
    embedding = nn.Embedding(3, 2, sparse=True)
    nn.init.zeros_(embedding.weight)
    tokens = torch.tensor([0, 1, 1, 2])
    model: Any = DistributedDataParallel(embedding) if how == "ddp" else embedding
    (model(tokens) * torch.tensor([3.0, 4.0])).sum().backward()
    gradient = embedding.weight.grad
    assert gradient is not None
    if how == "ddp":
        assert gradient.is_coalesced()  # by DDP's all-reduce
    else:
        assert not gradient.is_coalesced()
    owned = ["weight"] if how == "owned" else []
    norms = [distclip.get_total_norm(model, p, owned=owned).item() for p in NORM_TYPES]
    distclip.clip_grad_norm_(model, 1.0, owned=owned)
    assert embedding.weight.grad is gradient
    return {"norms": norms, "sparse": gradient.is_sparse, "after": gradient.to_dense().ravel().tolist()}


@pytest.mark.parametrize(("world_size", "how"), [(1, "plain"), (2, "plain"), (2, "ddp"), (2, "owned")])
def test_a_sparse_embedding_is_clipped_through_its_values(ranks: Any, world_size: int, how: str) -> None:
    # what each of two owners has is counted, so the model has twice the elements
    once = [3.0, 4.0, 6.0, 8.0, 3.0, 4.0] * (2 if how == "owned" else 1)
    l1, l2, l3, largest = sum(once), sum(x * x for x in once) ** 0.5, sum(x**3 for x in once) ** (1 / 3), 8.0
    for said in ranks(_sparse, world_size, how):
        assert said["norms"] == pytest.approx([l1, l2, l3, largest], rel=1e-6)
        assert said["sparse"]
        assert said["after"] == pytest.approx([x / l2 for x in once[:6]], rel=1e-6)


def _complex() -> dict[str, Any]:
    parameters = [spread(torch.tensor([3 + 4j, 0, 0])), spread(torch.tensor([0, 12j], dtype=torch.complex128))]
    norms = [distclip.get_total_norm(parameters, p).item() for p in NORM_TYPES]
    distclip.clip_grad_norm_(parameters, 1.0)
    after = [value for parameter in parameters for value in whole(parameter) if value]
    bad = spread(torch.tensor([complex(math.inf, math.nan), 1.0]))
    return {"norms": norms, "after": after, "bad": distclip.get_total_norm([bad]).item()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_complex_gradients_count_by_their_absolute_value(ranks: Any, world_size: int) -> None:
    for said in ranks(_complex, world_size):
        assert said["norms"] == pytest.approx([17.0, 13.0, (125 + 1728) ** (1 / 3), 12.0], rel=1e-6)
        assert said["after"] == pytest.approx([(3 + 4j) / 13, 12j / 13], rel=1e-6)
        assert math.isnan(said["bad"])


def _strides() -> dict[str, Any]:
    sieve = torch.full((3, 3), 7.0)
    sieve[1, ::2] = torch.tensor([3.0, 4.0])
    columns = torch.tensor([[3.0, 7.0], [4.0, 7.0]])
    parameters = [plain(sieve[1, ::2]), plain(columns.t()[:1]), plain(torch.tensor(50**0.5))]
    norm = distclip.clip_grad_norm_(parameters, 1.0).item()
    expanded = plain(torch.tensor([2.5]).expand(4))
    return {
        "norm": norm,
        "after": [value for parameter in parameters for value in whole(parameter)],
        "between": {*sieve[::2].ravel().tolist(), sieve[1, 1].item(), *columns[:, 1].tolist()},
        "expanded": distclip.clip_grad_norm_([expanded], 1.0).item(),
        "expanded after": whole(expanded),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_strided_scalar_and_expanded_gradients(ranks: Any, world_size: int) -> None:
    for said in ranks(_strides, world_size):
        assert said["norm"] == pytest.approx(10.0, rel=1e-7)
        assert said["after"] == pytest.approx([0.3, 0.4, 0.3, 0.4, 0.5**0.5], rel=1e-6)
        assert said["between"] == {7.0}  # what lies between the elements is not theirs to scale
        assert said["expanded"] == pytest.approx(5.0, rel=1e-7)
        assert said["expanded after"] == pytest.approx([0.5] * 4, rel=1e-6)


def _float8(frozen: bool) -> float:
    base = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), requires_grad=not frozen)
    return distclip.get_total_norm([("base", base), ("adapter", plain(torch.tensor([3.0, 4.0])))]).item()


@pytest.mark.parametrize("world_size", [1, 2])
def test_float8_is_refused_by_name_unless_it_is_frozen(ranks: Any, world_size: int) -> None:
    assert ranks(_float8, world_size, True) == [5.0] * world_size
    with pytest.raises(RankFailure) as failure:
        ranks(_float8, world_size, False)
    for error in failure.value.errors.values():
        assert isinstance(error, distclip.ConfigError)
        assert str(error) == "parameter 'base' has dtype torch.float8_e4m3fn, which distclip cannot measure"


# --- offloaded, tied -----------------------------------------------------------------------------------------------


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def _offloaded(kind: str) -> tuple[float, float, float]:
    model, reference = _model(), _model()
    if kind == "fsdp2":
        for layer in (*model, model):
            fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
        wrapped: Any = model
    else:
        wrapped = FullyShardedDataParallel(
            model,
            cpu_offload=CPUOffload(offload_params=True),
            use_orig_params=kind == "fsdp1",
            device_id=torch.device("cpu"),
        )
    batch = torch.randn(4, 3)
    reference(batch).square().sum().backward()
    # FSDP1 pins its host memory and waits for a stream, neither of which exists without an accelerator.
    with (
        mock.patch.object(Tensor, "pin_memory", lambda self: self),
        mock.patch.object(torch.cpu.Stream, "synchronize", create=True),
    ):
        wrapped(batch).square().sum().backward()
    wanted = oracle.norm(oracle.gather_full_gradients(reference).values(), 2.0)
    norm = distclip.clip_grad_norm_(wrapped, 0.5).item()
    after = oracle.norm(oracle.gather_full_gradients(wrapped).values(), 2.0)
    return norm / wanted, after, distclip.get_total_norm(wrapped).item()


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "fsdp1 flat"])
def test_gradients_that_were_offloaded_to_the_host(ranks: Any, kind: str) -> None:
    for ratio, after, again in ranks(_offloaded, 2, kind):
        assert ratio == pytest.approx(1.0, rel=1e-6)
        assert after == pytest.approx(0.5, rel=1e-5)
        assert again == pytest.approx(after, rel=1e-6)


class Tied(nn.Module):
    """Two names, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(tokens))
        return out


def _tied(wrap: str) -> tuple[float, float]:
    torch.manual_seed(0)
    model: Any = Tied()
    reference = Tied()
    reference.load_state_dict(model.state_dict())
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    elif wrap == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        fully_shard(model)
    tokens = torch.tensor([0, 3, 3])
    for each in (model, reference):
        each(tokens).square().sum().backward()
    wanted = oracle.norm(oracle.gather_full_gradients(reference).values(), 2.0)
    norm = distclip.clip_grad_norm_([*model.named_parameters()] * 2 if wrap == "fsdp2" else model, 1.0).item()
    return norm / wanted, oracle.norm(oracle.gather_full_gradients(model).values(), 2.0)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp1", "fsdp2"])
def test_a_tied_or_repeated_parameter_counts_once_and_is_scaled_once(ranks: Any, wrap: str) -> None:
    for ratio, after in ranks(_tied, 2, wrap):
        assert ratio == pytest.approx(1.0, rel=1e-6)
        assert after == pytest.approx(1.0, rel=1e-5)
