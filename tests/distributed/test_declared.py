"""Declared parameters whose holders differ from one parameter to the next: each is still counted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distclip


def scalar(gradient: float, value: float = 0.0) -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor([value]))
    parameter.grad = torch.tensor([gradient])
    return parameter


def after(source: list[tuple[str, nn.Parameter]]) -> list[float]:
    return [parameter.grad.item() for _, parameter in source if parameter.grad is not None]


def _tied_on_other_stages() -> tuple[float, list[float]]:
    """An embedding on the first and last of four stages, a norm layer on the first two."""
    rank = dist.get_rank()
    pairs = [("own", scalar(0.0))]
    if rank in (0, 3):
        pairs.append(("embedding" if rank == 0 else "head", scalar(3.0)))
    if rank in (0, 1):
        pairs.append(("norm", scalar(4.0)))
    tied: list[str | tuple[str, ...]] = [("embedding", "head"), "norm"]
    norm = distclip.clip_grad_norm_(pairs, 1.0, pipeline_group=dist.group.WORLD, tied=tied).item()
    return norm, after(pairs)


def test_tied_parameters_of_different_stages(ranks: Any) -> None:
    gradients = [[0.0, 0.6, 0.8], [0.0, 0.8], [0.0], [0.0, 0.6]]
    for (norm, clipped), wanted in zip(ranks(_tied_on_other_stages, 4), gradients, strict=True):
        assert norm == 5.0
        assert clipped == pytest.approx(wanted, rel=1e-6)


def _owned_by_groups_of_other_sizes() -> float:
    """`a` is one per rank, `b` one per pair, `c` one for all: 4 * 1 + 2 * 16 + 1 * 64 = 100."""
    rank = dist.get_rank()
    alone = [dist.new_group([index]) for index in range(4)]
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups: dict[str, Any] = {"a": alone[rank], "b": pairs[rank // 2], "c": dist.group.WORLD}
    source = [("a", scalar(1.0)), ("b", scalar(4.0)), ("c", scalar(8.0))]
    clipper = distclip.GradientClipper(source, max_norm=1.0, owned=groups)
    norm = clipper.clip_().total_norm.item()
    assert after(source) == pytest.approx([0.1, 0.4, 0.8], rel=1e-6)
    return norm


def test_owners_of_which_some_are_groups(ranks: Any) -> None:
    assert ranks(_owned_by_groups_of_other_sizes, 4) == [10.0] * 4


def _marked() -> tuple[float, list[float]]:
    """EP 2 x DP 2 by Megatron's mark, which names no group: routed experts in pairs, a shared expert everywhere."""
    expert = dist.get_rank() % 2
    source = [
        ("layers.0.shared_expert.weight", scalar(6.0, value=0.5)),
        (f"layers.0.experts.{expert}.weight", scalar(8.0 * expert, value=1.0 + expert)),
    ]
    for _, parameter in source:
        parameter.allreduce = False  # type: ignore[attr-defined]
    return distclip.clip_grad_norm_(source, 1.0).item(), after(source)


def test_a_marked_shared_expert_beside_marked_routed_ones(ranks: Any) -> None:
    for rank, (norm, clipped) in enumerate(ranks(_marked, 4)):
        assert norm == 10.0
        assert clipped == pytest.approx([0.6, 0.8 * (rank % 2)], rel=1e-6)
