"""Patterns and names that mean no parameter on any rank are errors; those that mean one on some ranks are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distclip
from distclip.testing import RankFailure
from distclip.testing.collectives import count


def scalar(gradient: float, value: float = 0.0) -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor([value]))
    parameter.grad = torch.tensor([gradient])
    return parameter


def _expert(arguments: dict[str, Any], call: str) -> tuple[float, float | None, dict[str, int]]:
    """A dense parameter on both ranks, experts 0 and 1 on rank 0, expert 2 on rank 1: 2, 1, 2 and 4 make 5."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    source = [("dense", scalar(2.0))]
    source += [[("experts.0", scalar(1.0)), ("experts.1", scalar(2.0))], [("experts.2", scalar(4.0))]][rank]
    with count() as issued:
        if call == "function":
            norm = distclip.clip_grad_norm_(source, 1.0, **arguments).item()
        else:
            norm = distclip.GradientClipper(source, max_norm=1.0, **arguments).clip_().total_norm.item()
    gradient = source[-1][1].grad
    return norm, None if gradient is None else gradient.item(), dict(issued)


@pytest.mark.parametrize("call", ["function", "clipper"])
@pytest.mark.parametrize("owned", [["experts.*"], ["experts.[01]", "experts.2"]])
def test_patterns_that_mean_something_on_some_ranks_only(ranks: Any, owned: list[str], call: str) -> None:
    said = ranks(_expert, 2, {"owned": owned}, call)
    assert [norm for norm, _, _ in said] == pytest.approx([5.0, 5.0], rel=1e-7)
    assert [after for _, after, _ in said] == pytest.approx([0.4, 0.8], rel=1e-6)
    # an exchange more where a rank cannot tell by itself, for the plan only
    assert said[0][2] == said[1][2]


def test_only_ranks_that_cannot_tell_cost_an_exchange(ranks: Any) -> None:
    everywhere, somewhere = (
        ranks(_expert, 2, {"owned": owned}, "clipper") for owned in (["e*"], ["e*0", "e*1", "e*2"])
    )
    assert somewhere[0][2]["allgather"] == everywhere[0][2]["allgather"] + 1
    assert somewhere[0][2]["allreduce"] == everywhere[0][2]["allreduce"]


@pytest.mark.parametrize("call", ["function", "clipper"])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"owned": ["experts.*", "expert.*"]}, "owned= pattern 'expert.*' matches no parameter on any rank"),
        ({"owned": ["experts.*"], "tied": ["dnse"]}, "tied= name 'dnse' matches no parameter on any rank"),
        (
            {"owned": ["experts.*"], "tied": [("head", "tail")]},
            "tied= name 'head' or 'tail' matches no parameter on any rank",
        ),
    ],
)
def test_a_word_that_means_nothing_is_an_error_on_all_ranks(
    ranks: Any, arguments: dict[str, Any], text: str, call: str
) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(_expert, 2, arguments, call)
    errors = failure.value.errors
    assert [type(errors[rank]) for rank in (0, 1)] == [distclip.ConfigError] * 2
    assert str(errors[0]) == str(errors[1])
    assert text in str(errors[0])
    assert "parameters are called 'dense', 'experts.0', 'experts.1'" in str(errors[0])


def _on_one_rank_only() -> None:
    owned = ["experts.*", "exprts.2"] if dist.get_rank() == 1 else ["experts.*"]
    _expert({"owned": owned}, "clipper")


def test_a_word_of_one_rank_that_means_nothing_is_an_error_on_all(ranks: Any) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(_on_one_rank_only, 2)
    errors = failure.value.errors
    assert [type(errors[rank]) for rank in (0, 1)] == [distclip.ConfigError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "owned= pattern 'exprts.2' matches no parameter on any rank" in str(errors[0])
    assert str(errors[0]).endswith("(on rank 1 of 2)")


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (
            {"e": distclip.ParamGroup(["experts.*", "*.bias"])},
            r"pattern '\*\.bias' of param group 'e' matches no param",
        ),
        ({"e": distclip.ParamGroup("expert.*")}, r"pattern 'expert\.\*' of param group 'e' matches no parameter"),
        (
            {"e": distclip.ParamGroup("experts.*"), "late": distclip.ParamGroup("experts.1")},
            "param group 'late' gets no parameter: all that 'experts.1' matches belongs to groups",
        ),
    ],
)
def test_patterns_of_param_groups(groups: Any, text: str) -> None:
    with pytest.raises(distclip.ConfigError, match=text):
        _expert({"param_groups": groups}, "clipper")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 1, bias=False)
        self.head = nn.Linear(1, 1, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.weight.grad = torch.tensor([[3.0]])


def test_a_pipeline_of_one_stage_knows_both_names_of_a_tied_parameter() -> None:
    """The same call must do for any number of stages."""
    model, tied = Tied(), [("embedding.weight", "head.weight")]
    assert distclip.get_total_norm(model, tied=tied).item() == 3.0
    assert distclip.get_total_norm(model, tied=["head.weight"], owned=["head.*"]).item() == 3.0
    assert distclip.get_total_norm(model.named_parameters(), tied=tied).item() == 3.0
    with pytest.raises(distclip.ConfigError, match=r"tied= name 'haed\.weight' matches no parameter on any rank"):
        distclip.get_total_norm(model, tied=[("embedding.weight", "haed.weight")])
