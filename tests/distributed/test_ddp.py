"""DistributedDataParallel and its options: ignored and unused parameters, bucket views, a static graph, join."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import distclip
from distclip.testing import RankFailure, oracle
from distclip.testing.collectives import count
from tests.distributed.failures import fails_alike


class Branches(nn.Module):
    """`always` is used in every forward, `sometimes` where the input asks for it, `never` not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(2, 2)
        self.sometimes = nn.Linear(2, 2)
        self.never = nn.Linear(2, 2)

    def forward(self, batch: Tensor, branch: bool = True) -> Tensor:
        out: Tensor = self.always(batch)
        return self.sometimes(out) if branch else out


def _reference(model: nn.Module, calls: list[tuple[Tensor, bool]]) -> dict[str, Any]:
    """Mean over the calls of the gradients of a model in one process."""
    alone = Branches()
    alone.load_state_dict(model.state_dict())
    for batch, branch in calls:
        (alone(batch, branch).square().sum() / len(calls)).backward()
    return oracle.gather_full_gradients(alone)


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 2, generator=generator) for _ in range(dist.get_world_size())]


# --- options that change where gradients lie or whether there are any ----------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "find_unused_parameters": {"find_unused_parameters": True},
    "find_unused_parameters, bucket views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "static_graph, bucket views": {"static_graph": True, "gradient_as_bucket_view": True},
    "small buckets": {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5},
}


def _with_options(name: str) -> list[dict[str, Any]]:
    """Three steps; where the graph may change, one rank alone leaves a branch out."""
    torch.manual_seed(0)
    model = Branches()
    wrapped = DistributedDataParallel(model, **OPTIONS[name])
    clipper = distclip.GradientClipper(wrapped, max_norm=0.5)
    batches = _batches()
    said = []
    for step in range(3):
        branches = [rank == 0 or step == 1 or "static" in name for rank in range(len(batches))]
        wrapped.zero_grad()
        wrapped(batches[dist.get_rank()], branches[dist.get_rank()]).square().sum().backward()
        wanted = _reference(model, list(zip(batches, branches, strict=True)))
        before = oracle.gather_full_gradients(wrapped)
        with count() as issued:
            norm = clipper.clip_().total_norm.item()
        after = oracle.gather_full_gradients(wrapped)
        clipped = oracle.clipped(wanted, 0.5, 2.0)
        said.append(
            {
                "issued": dict(issued),
                "names": [sorted(before), sorted(wanted)],
                "norm": norm / oracle.norm(wanted.values(), 2.0),
                "worst": max(float(abs(after[key] - clipped[key]).max()) for key in wanted),
            }
        )
    return said


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_options(ranks: Any, name: str) -> None:
    for said in ranks(_with_options, 2, name):
        for step, result in enumerate(said):
            names, wanted = result["names"]
            assert names == wanted
            assert not any(key.startswith("never") for key in names)
            assert result["norm"] == pytest.approx(1.0, rel=1e-6)
            assert result["worst"] < 1e-6
            # the first measurement of a plan compares replicas as well
            assert result["issued"] == ({"allreduce": 1, "allgather": 1} if step == 0 else {"allreduce": 1})


def _unused_without_the_option() -> None:
    torch.manual_seed(0)
    model = Branches()
    wrapped = DistributedDataParallel(model)
    wrapped(_batches()[0], dist.get_rank() == 0).square().sum().backward()
    distclip.clip_grad_norm_(wrapped, 1.0)


def test_a_parameter_that_one_rank_did_not_use_is_named(ranks: Any) -> None:
    """Without find_unused_parameters its gradient stays on that rank."""
    text = fails_alike(ranks, distclip.LayoutError, _unused_without_the_option, 2)
    assert "'sometimes.weight' has none on 1 of its holders 0, 1" in text
    assert "find_unused_parameters=True" in text


# --- accumulation --------------------------------------------------------------------------------------------------


def _accumulated(views: bool) -> dict[str, Any]:
    """Three micro-batches, of which the last synchronises; before it the clipper refuses, and then it counts all."""
    torch.manual_seed(0)
    model = Branches()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    clipper = distclip.GradientClipper(wrapped, max_norm=0.5)
    batches = _batches()
    mine = batches[dist.get_rank()]
    refused = []
    for factor in (1.0, 2.0):
        with wrapped.no_sync():
            wrapped(mine * factor).square().sum().backward()
        for call in (clipper.clip_, lambda: distclip.get_total_norm(wrapped)):
            try:
                call()
            except distclip.LayoutError as error:
                refused.append(str(error))
    with torch.no_grad():
        wrapped(mine)  # validation in between changes nothing
    wrapped(mine * 3.0).square().sum().backward()
    calls = [(batch * factor, True) for batch in batches for factor in (1.0, 2.0, 3.0)]
    wanted = oracle.norm(_reference(model, calls).values(), 2.0) * 3  # a sum over micro-batches, a mean over ranks
    return {"refused": refused, "norm": clipper.clip_().total_norm.item() / wanted}


@pytest.mark.parametrize("views", [False, True])
def test_accumulation_is_refused_off_the_boundary_and_whole_at_it(ranks: Any, views: bool) -> None:
    for said in ranks(_accumulated, 2, views):
        assert len(said["refused"]) == 4
        assert all("the last backward ran under DistributedDataParallel.no_sync()" in text for text in said["refused"])
        assert said["norm"] == pytest.approx(1.0, rel=1e-6)


# --- parameters that DDP ignores -----------------------------------------------------------------------------------


class WithExpert(nn.Module):
    """A shared layer and an expert that DDP is told to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(1, 1, bias=False)
        self.expert = nn.Linear(1, 1, bias=False)
        for layer in (self.shared, self.expert):
            nn.init.ones_(layer.weight)

    def forward(self, shared: Tensor, own: Tensor) -> Tensor:
        out: Tensor = self.shared(shared) + self.expert(own)
        return out


def _ignored(other_values: bool) -> tuple[float, list[float], list[float]]:
    """The mean gradient of `shared` is 2; that of `expert` is 3 on rank 0 and 6 on rank 1: sqrt(4 + 9 + 36) = 7."""
    rank = dist.get_rank()
    model = WithExpert()
    if other_values:
        nn.init.constant_(model.expert.weight, float(rank))
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, ["expert.weight"])
    wrapped = DistributedDataParallel(model)
    clipper = distclip.GradientClipper(wrapped, max_norm=0.7, owned=["expert.*"])
    said = []
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.tensor([[1.0 + 2 * rank]]), torch.tensor([[3.0 + 3 * rank]])).sum().backward()
        said.append(clipper.clip_().total_norm.item())
    assert said[0] == said[1]
    gradients = [p.grad.item() for p in model.parameters() if p.grad is not None]
    return said[0], gradients, [2 * 0.1, (3.0 + 3 * rank) * 0.1]


@pytest.mark.parametrize("other_values", [False, True])
def test_ignored_parameters_that_are_declared_count_on_every_rank(ranks: Any, other_values: bool) -> None:
    for norm, after, wanted in ranks(_ignored, 2, other_values):
        assert norm == pytest.approx(7.0, rel=1e-7)
        assert after == pytest.approx(wanted, rel=1e-6)


def _ignored_and_alike(source: str, declared: str, frozen: bool = False, ranks_of_ddp: int = 2) -> list[Any]:
    """Values of `expert` and its gradient are 1 on all ranks: by themselves they look like those of a replica."""
    model = WithExpert()
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, ["expert.weight"])
    model.expert.requires_grad_(not frozen)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone = groups[dist.get_rank()] if ranks_of_ddp == 1 else None
    wrapped = DistributedDataParallel(model, process_group=alone)
    sources: dict[str, Any] = {
        "wrapped": wrapped,
        "inside": wrapped.module,
        "parameters": list(wrapped.module.named_parameters()),
    }
    owned: dict[str, Any] = {"": (), "alone": ["expert.*"], "over all": {"expert.*": dist.group.WORLD}}
    try:
        clipper = distclip.GradientClipper(sources[source], max_norm=0.5, owned=owned[declared])
    except distclip.LayoutError as error:
        return [str(error)]
    wrapped(torch.ones(1, 1), torch.ones(1, 1)).sum().backward()
    norm = clipper.clip_().total_norm.item()
    return [norm, *(p.grad.item() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("source", ["wrapped", "inside", "parameters"])
def test_ignored_parameters_that_are_not_declared_are_refused_however_alike_they_are(ranks: Any, source: str) -> None:
    said = ranks(_ignored_and_alike, 2, source, "")
    assert said[0] == said[1]
    assert "told to ignore 'expert.weight', so nobody reduces" in said[0][0]
    assert "owned=[...]" in said[0][0]


@pytest.mark.parametrize(("declared", "wanted"), [("alone", 3**0.5), ("over all", 2**0.5)])
def test_ignored_parameters_count_as_declared(ranks: Any, declared: str, wanted: float) -> None:
    for norm, *after in ranks(_ignored_and_alike, 2, "wrapped", declared):
        assert norm == pytest.approx(wanted, rel=1e-7)
        assert after == pytest.approx([0.5 / wanted] * 2, rel=1e-6)


def test_ignored_parameters_without_gradients_or_without_other_ranks_are_as_any_others(ranks: Any) -> None:
    assert ranks(_ignored_and_alike, 2, "wrapped", "", frozen=True) == [[1.0, pytest.approx(0.5, rel=1e-5)]] * 2
    # a wrapper over one rank reduces nothing anyway: what its ranks hold alike is compared as without it
    for norm, *after in ranks(_ignored_and_alike, 2, "wrapped", "", ranks_of_ddp=1):
        assert norm == pytest.approx(2**0.5, rel=1e-7)
        assert after == pytest.approx([0.5 / 2**0.5] * 2, rel=1e-5)


def _delayed() -> tuple[float, list[float]]:
    """DDP calls parameters that it reduces late, by a hook, ignored too: they are reduced all the same."""
    rank = dist.get_rank()
    model = WithExpert()
    late: Any = {"delay_all_reduce_named_params": [("expert.weight", model.expert.weight)]}
    late["param_to_hook_all_reduce"] = model.shared.weight
    wrapped = DistributedDataParallel(model, **late)
    clipper = distclip.GradientClipper(wrapped, max_norm=1.0)
    wrapped(torch.tensor([[1.0 + 4 * rank]]), torch.tensor([[3.0 + 2 * rank]])).sum().backward()
    norm = clipper.clip_().total_norm.item()
    return norm, [p.grad.item() for p in model.parameters() if p.grad is not None]


def test_parameters_that_are_reduced_late_are_replicas(ranks: Any) -> None:
    for norm, after in ranks(_delayed, 2):
        assert norm == pytest.approx(5.0, rel=1e-7)
        assert after == pytest.approx([0.6, 0.8], rel=1e-5)


# --- join ----------------------------------------------------------------------------------------------------------


def _join(batches: list[int]) -> tuple[list[float], str]:
    """A loop under join(), of as many steps as this rank has batches."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    wrapped = DistributedDataParallel(layer)
    clipper = distclip.GradientClipper(wrapped, max_norm=0.5)
    rank = dist.get_rank()
    norms = []
    try:
        with wrapped.join(throw_on_early_termination=True):
            for step in range(batches[rank]):
                wrapped.zero_grad()
                wrapped(torch.tensor([[float(1 + step + 2 * rank)]])).sum().backward()
                norms.append(clipper.clip_().total_norm.item())
    except RuntimeError as error:
        return norms, str(error)
    return norms, "all batches"


def test_join_with_as_many_batches_on_every_rank(ranks: Any) -> None:
    assert ranks(_join, 2, [3, 3]) == [([2.0, 3.0, 4.0], "all batches")] * 2


def test_join_ends_all_ranks_when_the_first_runs_out_of_batches(ranks: Any) -> None:
    for norms, said in ranks(_join, 2, [2, 4]):
        assert norms == [2.0, 3.0]
        assert "exhausted" in said


def _uneven_join(call: str, batches: list[int], micro_batches: int = 1) -> None:
    layer = nn.Linear(1, 1)
    wrapped = DistributedDataParallel(layer)
    clipper = distclip.GradientClipper(wrapped) if call == "clipper" else None
    with wrapped.join():
        for batch in range(batches[dist.get_rank()]):
            last = (batch + 1) % micro_batches == 0
            with nullcontext() if last else wrapped.no_sync():
                wrapped(torch.ones(1, 1)).sum().backward()
            if last and clipper is not None:
                clipper.clip_()
            elif last:
                distclip.clip_grad_norm_(wrapped, 1.0)


@pytest.mark.parametrize("call", ["clipper", "function"])
@pytest.mark.parametrize(
    ("batches", "micro_batches"), [([1, 1], 1), ([1, 3], 1), ([3, 1], 1), ([0, 2], 1), ([2, 0], 1), ([1, 4], 2)]
)
def test_join_with_uneven_inputs_ends_on_all_ranks(
    ranks: Any, batches: list[int], micro_batches: int, call: str
) -> None:
    """Whoever comes to clip refuses, before any collective; who has run out already ends with the process group."""
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        ranks(_uneven_join, 2, call, batches, micro_batches)
    assert time.monotonic() - started < 10.0  # the pool's time limit for a collective is 15 s
    errors = failure.value.errors
    assert sorted(errors) == [0, 1]
    clipping = [error for rank, error in errors.items() if batches[rank] >= micro_batches]
    assert {type(error) for error in clipping} == {distclip.LayoutError}
    assert len({str(error) for error in clipping}) == 1
    assert "throw_on_early_termination=True" in str(clipping[0])


# --- models that come and go ---------------------------------------------------------------------------------------


def _one_after_the_other() -> list[str]:
    told = []
    for number in range(8):
        model = DistributedDataParallel(nn.Linear(64, 2, bias=False))
        with model.no_sync() if number % 2 else nullcontext():
            model(torch.full((2, 64), 1.0 + dist.get_rank())).sum().backward()
        try:
            told.append(f"{distclip.clip_grad_norm_(model, 1e9).item():.3f}")
        except distclip.LayoutError:
            told.append("refused")
        del model
        gc.collect()  # so that the next one gets the same addresses
    return told


def test_the_plan_of_a_model_that_is_gone_serves_no_other(ranks: Any) -> None:
    assert ranks(_one_after_the_other, 2) == [["33.941", "refused"] * 4] * 2
