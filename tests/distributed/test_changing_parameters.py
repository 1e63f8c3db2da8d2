"""Parameters that are added, removed, frozen or unfrozen after the plan was made: right or an error, never a hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

import distclip
from tests.distributed.failures import fails_alike


class Layers(nn.Module):
    """Scalars whose gradients the test sets: a = 3, b = 4, ..."""

    def __init__(self, values: dict[str, float]) -> None:
        super().__init__()
        for name, value in values.items():
            self.add(name, value)

    def add(self, name: str, value: float) -> None:
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([value])
        self.register_parameter(name, parameter)


def _change(how: str, call: str, changed: tuple[int, ...]) -> list[float]:
    """Norms before and after a change on some ranks, and once more."""
    model = Layers({"a": 3.0, "b": 4.0})
    if how == "unfrozen":
        model.b.grad = None
        model.b.requires_grad_(False)
    clipper = distclip.GradientClipper(model) if call == "clipper" else None

    def measure() -> float:
        return distclip.get_total_norm(model).item() if clipper is None else clipper.measure().total_norm.item()

    said = [measure()]
    if dist.get_rank() in changed:
        if how == "unfrozen":
            model.b.requires_grad_(True)
            model.b.grad = torch.tensor([4.0])
        elif how == "frozen":
            model.b.requires_grad_(False)
            model.b.grad = None
        elif how == "removed":
            model.b.grad = None  # as zero_grad() does; a clipper counts a gradient until it is gone
            del model.b
        else:
            model.add("c", 12.0)
    return [*said, measure(), measure()]


@pytest.mark.parametrize(
    ("how", "call", "wanted"),
    [
        ("unfrozen", "clipper", [3.0, 5.0, 5.0]),
        ("unfrozen", "function", [3.0, 5.0, 5.0]),
        ("frozen", "clipper", [5.0, 3.0, 3.0]),
        ("frozen", "function", [5.0, 3.0, 3.0]),
        ("removed", "clipper", [5.0, 3.0, 3.0]),
        ("removed", "function", [5.0, 3.0, 3.0]),
        ("added", "function", [5.0, 13.0, 13.0]),
    ],
)
def test_a_change_on_all_ranks_counts_from_the_next_step(ranks: Any, how: str, call: str, wanted: list[float]) -> None:
    assert ranks(_change, 2, how, call, (0, 1)) == [wanted, wanted]


@pytest.mark.parametrize(
    ("how", "call", "text"),
    [
        ("unfrozen", "clipper", "'b' has none on 0 of its holders 0, 1"),
        ("unfrozen", "function", "'b' has none on 0 of its holders 0, 1"),
        ("frozen", "clipper", "'b' has none on 1 of its holders 0, 1"),
        ("frozen", "function", "'b' has none on 1 of its holders 0, 1"),
        ("removed", "clipper", "'b' (1, float32) is only on rank 0"),
        ("removed", "function", "'b' (1, float32) is only on rank 0"),
        ("added", "function", "'c' (1, float32) is only on rank 1"),
    ],
)
def test_a_change_on_one_rank_is_named_on_all(ranks: Any, how: str, call: str, text: str) -> None:
    assert text in fails_alike(ranks, distclip.LayoutError, _change, 2, how, call, (1,))


def _frozen_base(wrap: bool) -> tuple[float, float, int]:
    """Ratios to the true norm while layer 0 is frozen and after it was unfrozen."""
    torch.manual_seed(0)
    model, reference = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    if wrap:
        for layer in (*model, model):
            fully_shard(layer)
    clipper = distclip.GradientClipper(model, max_norm=None)
    batch = torch.randn(4, 3)
    ratios = []
    for frozen in (True, False):
        for each in (model, reference):
            each[0].requires_grad_(not frozen)
            each.zero_grad()
            each(batch).square().sum().backward()
        wanted = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
        ratios.append(clipper.measure().total_norm.item() / wanted.item())
    return ratios[0], ratios[1], sum(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("wrap", [False, True])
def test_a_frozen_base_that_is_unfrozen_for_a_second_phase(ranks: Any, wrap: bool) -> None:
    for frozen, all_of_it, gradients in ranks(_frozen_base, 2, wrap):
        assert frozen == pytest.approx(1.0, rel=1e-6)
        assert all_of_it == pytest.approx(1.0, rel=1e-6)
        assert gradients == 4


def _addends(names: list[str]) -> list[tuple[str, nn.Parameter]]:
    """Replicated parameters, each with the addends [3, 0] and [0, 4] of one gradient."""
    mesh = init_device_mesh("cpu", (2,))
    pairs = []
    for name in names:
        parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()], run_check=False))
        addend = torch.tensor([[3.0, 0.0], [0.0, 4.0]])[dist.get_rank()]
        parameter.grad = DTensor.from_local(addend, mesh, [Partial()], run_check=False)
        pairs.append((name, parameter))
    return pairs


def _bad_argument() -> None:
    clipper = distclip.GradientClipper(_addends(["a"]))
    assert clipper.clip_().total_norm.item() == 5.0
    clipper.clip_(grad_multiplier=-1.0 if dist.get_rank() == 1 else 1.0)


def test_a_bad_argument_of_one_rank_leaves_nobody_waiting_for_its_addends(ranks: Any) -> None:
    said = fails_alike(ranks, distclip.ConfigError, _bad_argument, 2)
    assert said == "grad_multiplier must be finite and > 0, not -1 (on rank 1 of 2)"


def _more_addends_on_one_rank() -> None:
    distclip.get_total_norm(_addends(["a"] if dist.get_rank() == 0 else ["a", "b"]))


def test_ranks_with_other_parameters_are_told_before_they_add_addends_up(ranks: Any) -> None:
    said = fails_alike(ranks, distclip.LayoutError, _more_addends_on_one_rank, 2)
    assert "'b' (2, float32) is only on rank 1" in said


def _moves() -> list[str]:
    model: Any = fully_shard(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    clipper = distclip.GradientClipper(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    clipper.step()
    distclip.get_total_norm(model)
    optimizer.zero_grad()
    model.to(torch.bfloat16)
    return [str(parameter.dtype) for parameter in model.parameters()]


def test_an_fsdp2_model_can_still_be_moved(ranks: Any) -> None:
    assert ranks(_moves, 2) == [["torch.bfloat16"] * 2] * 2


def _wrapped_later() -> tuple[float, float]:
    torch.manual_seed(0)
    model: Any = nn.Linear(2, 2, bias=False)
    clipper = distclip.GradientClipper(model, max_norm=None)
    fully_shard(model)
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    return clipper.clip_().total_norm.item(), distclip.get_total_norm(model).item()


def test_a_model_that_is_wrapped_after_the_clipper_was_made_counts(ranks: Any) -> None:
    for norm, wanted in ranks(_wrapped_later, 2):
        assert norm == wanted == pytest.approx(50**0.5)
