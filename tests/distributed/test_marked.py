"""Experts that carry Megatron-LM's and DeepSpeed's mark and no group: each is counted once, whoever else has it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distclip
from distclip.plan.marked import _constant
from distclip.testing import RankFailure, oracle
from distclip.testing.collectives import count

NORM_TYPES = (1.0, 2.0, math.inf)


class Expert(nn.Module):
    """Biases of zeros and a norm layer of ones, which are alike in all experts."""

    def __init__(self, layer: int, number: int) -> None:
        super().__init__()
        torch.manual_seed(100 * layer + number)
        self.up = nn.Linear(2, 3)
        self.norm = nn.LayerNorm(3)
        nn.init.zeros_(self.up.bias)
        for index, parameter in enumerate(self.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 + layer + 3.0 * number + index)
            parameter.allreduce = False  # type: ignore[attr-defined]


class Layer(nn.Module):
    def __init__(self, layer: int, experts: dict[str, int]) -> None:
        """`experts`: name on this rank -> number in the whole model."""
        super().__init__()
        self.experts = nn.ModuleDict({name: Expert(layer, number) for name, number in experts.items()})


# Which experts ranks 0 to 3 have, by layer.
PLACEMENTS: dict[str, list[list[list[int]]]] = {
    "EP 2 x DP 2": [[[0], [1], [0], [1]]],
    "EP 2 x DP 2, two each": [[[0, 1], [2, 3], [0, 1], [2, 3]]],
    "neighbours share": [[[0, 1], [1, 2], [2, 3], [3, 0]]],
    "layers of other sizes": [[[0], [1], [0], [1]], [[0], [0], [0], [0]], [[0], [1], [2], [3]]],
    "some ranks have none": [[[], [0], [0], [1]], [[], [], [5], []]],
}


def _run(name: str, numbering: str) -> dict[str, Any]:
    rank = dist.get_rank()
    here = [layer[rank] for layer in PLACEMENTS[name]]

    def names(numbers: list[int]) -> dict[str, int]:
        return {str(number if numbering == "global" else at): number for at, number in enumerate(numbers)}

    dense = nn.Linear(1, 2)
    nn.init.ones_(dense.weight)
    nn.init.ones_(dense.bias)
    for parameter in dense.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    model = nn.ModuleDict({f"layer{at}": Layer(at, names(numbers)) for at, numbers in enumerate(here)})
    model["dense"] = dense
    once = [
        Expert(at, number)
        for at, layer in enumerate(PLACEMENTS[name])
        for number in {n for numbers in layer for n in numbers}
    ]
    wanted = [array for part in [*once, dense] for array in oracle.gather_full_gradients(part).values()]
    norms = [distclip.get_total_norm(model, p).item() / oracle.norm(wanted, p) for p in NORM_TYPES]
    clipper = distclip.GradientClipper(model, max_norm=0.5)
    clipper.measure()
    before = oracle.gather_full_gradients(model)
    with count() as issued:
        clipper.clip_()
    after = oracle.gather_full_gradients(model)
    factor = oracle.coefficient(oracle.norm(wanted, 2.0), 0.5)
    holders = {entry.name: entry.holders for entry in clipper.plan.entries if "experts" in entry.name}
    true = {
        f"layer{at}.experts.{expert}": tuple(r for r in range(4) if number in PLACEMENTS[name][at][r])
        for at, numbers in enumerate(here)
        for expert, number in names(numbers).items()
    }
    return {
        "norms": norms,
        "worst": max(float(abs(after[key] - before[key] * factor).max()) for key in before),
        "issued": dict(issued),
        "holders": all(holders[key] == true[".".join(key.split(".")[:3])] for key in holders),
    }


@pytest.mark.parametrize("name", PLACEMENTS)
def test_each_expert_counts_once(ranks: Any, name: str) -> None:
    for said in ranks(_run, 4, name, "global"):
        assert said["norms"] == pytest.approx([1.0] * len(NORM_TYPES), rel=1e-6)
        assert said["worst"] < 1e-6
        assert said["issued"] == {"allreduce": 1}
        assert said["holders"]


@pytest.mark.parametrize("name", ["EP 2 x DP 2", "EP 2 x DP 2, two each", "layers of other sizes"])
def test_names_that_every_rank_counts_for_itself_do_not_make_experts_the_same(ranks: Any, name: str) -> None:
    for said in ranks(_run, 4, name, "local"):
        assert said["norms"] == pytest.approx([1.0] * len(NORM_TYPES), rel=1e-6)
        assert said["worst"] < 1e-6
        assert said["issued"] == {"allreduce": 1}
        assert said["holders"]


def scalar(gradient: float, value: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor([value]))
    parameter.grad = torch.tensor([gradient])
    parameter.allreduce = False  # type: ignore[attr-defined]
    return parameter


def _alike(value: float) -> None:
    """Different experts under one name whose values happen to be the same."""
    distclip.get_total_norm([("experts.0.weight", scalar(1.0 + dist.get_rank(), value))])


def test_experts_that_look_the_same_and_are_not_are_refused_in_the_first_step(ranks: Any) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(_alike, 2, 0.0)
    errors = failure.value.errors
    assert [type(errors[rank]) for rank in (0, 1)] == [distclip.LayoutError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "'experts.0.weight': norms 1, 2 on ranks 0, 1" in str(errors[0])
    assert "owned=" in str(errors[0])


def _drifted(declared: bool) -> float:
    """Copies of one expert with a common gradient, which do not have the same values any more."""
    source = [("experts.0.weight", scalar(5.0, 1.0 + 1e-3 * dist.get_rank()))]
    owned: Any = {"experts.*": dist.group.WORLD} if declared else ()
    return distclip.get_total_norm(source, owned=owned).item()


def test_copies_that_drifted_apart_are_an_error_where_the_group_is_declared(ranks: Any) -> None:
    """By the mark alone they are two experts: nothing says otherwise."""
    assert ranks(_drifted, 2, False) == pytest.approx([50**0.5] * 2, rel=1e-7)
    with pytest.raises(RankFailure) as failure:
        ranks(_drifted, 2, True)
    for error in failure.value.errors.values():
        assert "'experts.0.weight' (plain) holds different values on ranks 0, 1" in str(error)


def _cost(owned: list[str]) -> int:
    with count() as issued:
        norm = distclip.GradientClipper([("experts.0.weight", scalar(3.0, 1.0))], owned=owned).measure().total_norm
    assert norm.item() == pytest.approx(18**0.5 if owned else 3.0, rel=1e-7)
    return issued["allgather"]


def test_experts_that_are_declared_too_need_no_comparison(ranks: Any) -> None:
    marked, declared = ranks(_cost, 2, []), ranks(_cost, 2, ["experts.*"])
    # the exchange of hashes, and the first gradients of what was found to be a copy
    assert [cost - 2 for cost in marked] == declared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8])
def test_constants_of_any_dtype_are_known(dtype: torch.dtype) -> None:
    for shape in ((2, 3), ()):
        assert _constant(torch.ones(shape).to(dtype))
    assert not _constant(torch.eye(2).to(dtype))
    assert not _constant(torch.eye(3).to(dtype)[:, :2].T)
    assert _constant(torch.empty(0, dtype=dtype))


def test_one_process() -> None:
    assert distclip.get_total_norm([("a.0.w", scalar(3.0, 0.0)), ("a.1.w", scalar(4.0, 0.0))]).item() == 5.0
