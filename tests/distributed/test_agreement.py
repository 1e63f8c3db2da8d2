"""What ranks must agree on: who is here, arguments, replicas, plans. Every disagreement is one error, on every rank."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import distclip
from distclip import functional
from distclip.testing.collectives import count
from tests.distributed.failures import fails_alike


def _parameter(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def _one_rank_is_wrong(what: str) -> None:
    wrong = dist.get_rank() == 1
    parameter = _parameter(torch.ones(2))
    if what == "max_norm":
        distclip.clip_grad_norm_([parameter], -1.0 if wrong else 1.0)
    elif what == "norm_type":
        distclip.get_total_norm([parameter], 0.0 if wrong else 2.0)
    elif what == "source":
        distclip.clip_grad_norm_(3 if wrong else [parameter], 1.0)  # type: ignore[arg-type]
    elif what == "clipper":
        distclip.GradientClipper([parameter], nonfinite="no" if wrong else "skip")  # type: ignore[arg-type]
    elif what == "multiplier":
        distclip.GradientClipper([parameter]).clip_(-1.0 if wrong else 1.0)
    elif what == "owned":
        distclip.GradientClipper([parameter], owned=5 if wrong else ())  # type: ignore[arg-type]
    elif what == "function":
        names = {} if wrong else {"parameter[0]": "all"}
        distclip.GradientClipper([parameter], param_groups=lambda name: names[name])


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("max_norm", distclip.ConfigError, "max_norm must be > 0"),
        ("norm_type", distclip.ConfigError, "norm_type must be > 0"),
        ("source", TypeError, "source must be a module"),
        ("clipper", distclip.ConfigError, "nonfinite must be one of"),
        ("multiplier", distclip.ConfigError, "grad_multiplier must be finite"),
        ("owned", TypeError, "Value after * must be an iterable"),
        ("function", distclip.ConfigError, "KeyError: 'parameter[0]'"),
    ],
)
def test_an_error_of_one_rank_is_raised_by_all(ranks: Any, what: str, kind: type[Exception], text: str) -> None:
    said = fails_alike(ranks, kind, _one_rank_is_wrong, 2, what)
    assert said.startswith(text)
    assert said.endswith("(on rank 1 of 2)")


def _loaded_on_one_rank_only() -> None:
    clipper = distclip.GradientClipper([_parameter(torch.ones(2))])
    if dist.get_rank() == 0:
        clipper.load_state_dict({"steps": 7, "consecutive_skips": 3})
    clipper.clip_()


def test_a_state_that_was_loaded_on_one_rank_only_is_an_error(ranks: Any) -> None:
    said = fails_alike(ranks, distclip.AgreementError, _loaded_on_one_rank_only, 2)
    assert "load_state_dict" in said
    assert "3 on rank 0, 0 on rank 1" in said


def _called_outside_its_group() -> float:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(TypeError, match="this rank is not in group="):
            distclip.get_total_norm([_parameter(torch.ones(1))], group=group)
        return 1.0
    return distclip.get_total_norm([_parameter(torch.ones(1))], group=group).item()


def test_a_rank_outside_the_group_is_told(ranks: Any) -> None:
    assert ranks(_called_outside_its_group, 2) == [1.0, 1.0]


def _arguments_differ(call: str) -> None:
    limit = float(1 + dist.get_rank())
    parameter = _parameter(torch.ones(2))
    if call == "function":
        distclip.clip_grad_norm_([parameter], 1.0)
        distclip.clip_grad_norm_([parameter], limit)
    else:
        distclip.GradientClipper([parameter], max_norm=limit)


@pytest.mark.parametrize(("call", "kind"), [("function", distclip.AgreementError), ("clipper", distclip.ConfigError)])
def test_arguments_that_differ_are_named(ranks: Any, call: str, kind: type[Exception]) -> None:
    said = fails_alike(ranks, kind, _arguments_differ, 2, call)
    assert said == "max_norm must be the same on every rank, but is 1.0 on rank 0, 2.0 on rank 1"


def _clipper_arguments_differ(name: str, values: tuple[Any, Any]) -> None:
    parameter = _parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    value = values[dist.get_rank()]
    given: dict[str, Any] = {name: torch.amp.GradScaler("cpu") if value == "a scaler" else value}
    distclip.GradientClipper([parameter], optimizer, **given)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("norm_type", (2.0, 1.0)),
        ("nonfinite", ("skip", "zero")),
        ("max_consecutive_skips", (10, 11)),
        ("param_groups", (None, {"all": distclip.ParamGroup("*")})),
        ("param_groups", ({"all": distclip.ParamGroup("*")}, {"all": distclip.ParamGroup("*", max_norm=0.5)})),
        ("scaler", (None, "a scaler")),
    ],
)
def test_clippers_built_with_other_arguments_are_told_which(ranks: Any, name: str, values: tuple[Any, Any]) -> None:
    said = fails_alike(ranks, distclip.ConfigError, _clipper_arguments_differ, 2, name, values)
    assert said.startswith(f"{name} must be the same on every rank, but is ")
    assert said.count(" on rank ") == 2


def _missing_rank() -> str:
    from distclip.plan import collectives

    collectives.ARRIVAL_SECONDS = 1.0
    if dist.get_rank() == 2:
        return "stayed away"
    try:
        distclip.GradientClipper([_parameter(torch.ones(2))])
    except distclip.AgreementError as error:
        return str(error)
    finally:
        collectives.ARRIVAL_SECONDS = 300.0
    return "nothing"


def test_a_rank_that_does_not_come_is_named(ranks: Any) -> None:
    said = ranks(_missing_rank, 4)
    assert said[2] == "stayed away"
    for text in (said[0], said[1], said[3]):
        assert text.startswith("distclip's plan: rank 2 of 4 did not come within 1 s")
        assert "pass group= for a subset" in text


# --- replicas ------------------------------------------------------------------------------------------------------


def _other_values() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[1].weight[0, 0] += 1e-3
    distclip.GradientClipper(model)


def test_replicas_with_other_values_are_named_before_the_first_step(ranks: Any) -> None:
    said = fails_alike(ranks, distclip.LayoutError, _other_values, 2)
    assert "'1.weight' (plain) holds different values on ranks 0, 1" in said
    assert "0.weight" not in said
    assert "owned=" in said


def _other_models() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2), nn.Linear(2, 3)] if dist.get_rank() == 1 else [nn.Linear(2, 2)]
    distclip.GradientClipper(nn.Sequential(*layers))


def test_a_plain_parameter_that_only_some_ranks_hold_is_named(ranks: Any) -> None:
    said = fails_alike(ranks, distclip.LayoutError, _other_models, 2)
    assert "'1.weight' (3x2, float32) is only on rank 1" in said


def _equal_at_first() -> None:
    parameter = _parameter(torch.full((2,), 1.0 + dist.get_rank()))
    distclip.clip_grad_norm_([("expert.bias", parameter)], 1.0)


def test_equal_initial_values_do_not_hide_an_undeclared_expert(ranks: Any) -> None:
    said = fails_alike(ranks, distclip.LayoutError, _equal_at_first, 2)
    assert "'expert.bias': norms 1.41421, 2.82843 on ranks 0, 1" in said


def _later_divergence() -> tuple[float, float]:
    parameter = _parameter(torch.ones(2))
    clipper = distclip.GradientClipper([parameter], max_norm=None)
    first = clipper.clip_().total_norm.item()
    parameter.grad = torch.full((2,), 1.0 + dist.get_rank())
    return first, clipper.clip_().total_norm.item()


def test_a_later_divergence_is_survived_and_all_ranks_say_the_same(ranks: Any) -> None:
    said = ranks(_later_divergence, 2)
    assert said[0] == said[1] == pytest.approx((2**0.5, 2**0.5), rel=1e-7)


def _missing_on_some() -> None:
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    model.weight.grad = torch.ones(2, 2)
    if dist.get_rank() == 0:
        model.bias.grad = torch.ones(2)
    distclip.clip_grad_norm_(model, 1.0)


def test_a_replicated_gradient_on_some_holders_only_is_named(ranks: Any) -> None:
    said = fails_alike(ranks, distclip.LayoutError, _missing_on_some, 2)
    assert "'bias' has none on 1 of its holders 0, 1" in said
    assert "find_unused_parameters" in said


def _declared() -> dict[str, float]:
    rank = dist.get_rank()
    values = {0: [2.0, 4.0], 1: [6.0, 8.0]}[rank]
    pairs = [(f"experts.{index}", _parameter(torch.tensor([value]))) for index, value in enumerate(values)]
    both = distclip.get_total_norm(pairs, owned=["experts.*"]).item()
    largest = distclip.get_total_norm(pairs, float("inf"), owned=["experts.*"]).item()
    one = distclip.get_total_norm(pairs if rank == 0 else [], owned=["experts.*"]).item()
    stage = distclip.get_total_norm([_parameter(torch.tensor([3.0 + rank]))], pipeline_group=dist.group.WORLD).item()
    return {"both": both, "largest": largest, "one": one, "stage": stage}


def test_declared_owners_and_stages(ranks: Any) -> None:
    for said in ranks(_declared, 2):
        assert said["both"] == pytest.approx(120**0.5, rel=1e-7)
        assert said["largest"] == 8.0
        assert said["one"] == pytest.approx(20**0.5, rel=1e-7)
        assert said["stage"] == 5.0


# --- plans that change ---------------------------------------------------------------------------------------------


def _other_cache() -> list[float]:
    first, second = _parameter(torch.tensor([3.0])), _parameter(torch.tensor([4.0]))
    said = [distclip.get_total_norm([first, second]).item()]
    if dist.get_rank() == 1:
        # The same parameter as other objects: rank 1 finds no plan, rank 0 does.
        first, second = _parameter(torch.tensor([3.0])), _parameter(torch.tensor([4.0]))
    said.append(distclip.get_total_norm([first, second]).item())
    said.append(distclip.get_total_norm([first, second]).item())
    return said


def test_a_cache_hit_beside_a_miss_does_not_hang(ranks: Any) -> None:
    assert ranks(_other_cache, 2) == [[5.0] * 3] * 2


def _verified_here_only() -> list[float]:
    model = DistributedDataParallel(nn.Linear(4, 2))
    norms = []
    for step in range(3):
        model(torch.ones(3, 4)).sum().backward()
        norms.append(distclip.clip_grad_norm_(model, 1e9).item())
        (plan,) = [kept.plan for kept in functional._calls[dist.group.WORLD].plans.values()]
        assert plan.verified
        # as where one rank found another plan for the same source: it must not make the comparison alone
        plan.verified = step != dist.get_rank()
        model.zero_grad()
    return norms


def test_replicas_are_compared_by_all_ranks_or_none(ranks: Any) -> None:
    (norms, others) = ranks(_verified_here_only, 2)
    assert norms == others
    assert len(set(norms)) == 1


def _forgotten_on_one_rank() -> list[float]:
    parameters = [_parameter(torch.tensor([3.0, 4.0])) for _ in range(3)]
    norms = [distclip.get_total_norm([parameters[0]]).item()]
    if dist.get_rank() == 1:
        # as where a new parameter got the identity of the only one so far, which is no more
        functional._calls[dist.group.WORLD].plans.clear()
    norms.append(distclip.get_total_norm([parameters[1]]).item())
    if dist.get_rank() == 1:
        functional._calls[dist.group.WORLD].plans.clear()
    norms.append(distclip.get_total_norm([parameters[1]]).item())  # known to rank 0 only
    return norms


def test_a_rank_that_has_forgotten_its_plans_meets_the_others(ranks: Any) -> None:
    assert ranks(_forgotten_on_one_rank, 2) == [[5.0] * 3] * 2


def _steady_collectives() -> list[dict[str, int]]:
    parameter = _parameter(torch.tensor([3.0, 4.0]))
    clipper = distclip.GradientClipper([parameter], max_norm=0.5)
    clipper.clip_()
    said = []
    for limit in (2.0, 3.0, float("inf")):
        distclip.get_total_norm([parameter], limit)
        with count() as issued:
            distclip.get_total_norm([parameter], limit)
        said.append(dict(issued))
    with count() as issued:
        clipper.clip_()
    return [*said, dict(issued)]


def test_one_collective_a_step_and_one_more_for_the_inf_norm(ranks: Any) -> None:
    for said in ranks(_steady_collectives, 2):
        assert said == [{"allreduce": 1}, {"allreduce": 1}, {"allreduce": 2}, {"allreduce": 1}]


def _beyond_float64() -> list[float]:
    gradient = torch.tensor([3e200, 4e200], dtype=torch.float64)
    tiny = torch.tensor([3e-200, 4e-200], dtype=torch.float64)
    ones = torch.full((4,), 1e30)
    return [
        distclip.get_total_norm([_parameter(gradient)]).item() / 1e200,
        distclip.get_total_norm([_parameter(tiny)]).item() / 1e-200,
        distclip.get_total_norm([_parameter(ones)], 16.0).item() / 1e30 / 4 ** (1 / 16),
    ]


def test_power_sums_beyond_float64_take_a_maximum_first(ranks: Any) -> None:
    for said in ranks(_beyond_float64, 2):
        assert said == pytest.approx([5.0, 5.0, 1.0], rel=1e-6)


def _subset() -> float | None:
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    return distclip.get_total_norm([_parameter(torch.tensor([3.0, 4.0]))], group=group).item()


def test_a_subset_of_the_ranks(ranks: Any) -> None:
    assert ranks(_subset, 4) == [None, 5.0, None, 5.0]


def _threads_of_gloo() -> int:
    tasks = Path("/proc/self/task")
    return sum("gloo" in (task / "comm").read_text() for task in tasks.iterdir())


def _uses_everything() -> int:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    group = dist.new_group([0, 1])
    distclip.clip_grad_norm_([parameter], 1.0)
    distclip.GradientClipper([_parameter(torch.ones(2))], group=group).clip_()
    return _threads_of_gloo()


def test_plans_do_not_keep_destroyed_groups_alive(ranks: Any) -> None:
    before = max(ranks(_uses_everything, 2))
    for _ in range(3):
        last = ranks(_uses_everything, 2)
    assert max(last) <= before


def _destroyed() -> str:
    clipper = distclip.GradientClipper([_parameter(torch.ones(2))], group=dist.new_group([0, 1]))
    dist.destroy_process_group()
    gc.collect()
    try:
        clipper.clip_()
    except distclip.AgreementError as error:
        return str(error)
    return "went on alone"


def test_a_clipper_does_not_go_on_alone_when_its_group_is_gone(ranks: Any) -> None:
    for text in ranks(_destroyed, 2):
        assert "was destroyed: make a new GradientClipper" in text
