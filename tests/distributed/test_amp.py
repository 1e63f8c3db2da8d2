"""GradScaler and fused optimizers: whatever was called before and in which order, gradients are unscaled once."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import distclip

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
}


def scaled_up(scale: float) -> GradScaler:
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=3)
    scaler.scale(torch.ones(()))
    return scaler


def parameter_with(*gradient: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(gradient)))
    parameter.grad = torch.tensor(gradient)
    return parameter


# --- folding into fused optimizers ---------------------------------------------------------------------------------


def _train(name: str, wrap: str, fold: str, scaled: bool, bad_step: int) -> list[Tensor]:
    """Five steps; what the weights are after each."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if wrap == "fsdp2":
        model = fully_shard(model)
    kind, arguments = OPTIMIZERS[name]
    optimizer = kind(model.parameters(), lr=0.1, fused=True, **arguments)
    scaler = scaled_up(8.0) if scaled else None
    clipper = distclip.GradientClipper(model, optimizer, max_norm=0.3, scaler=scaler, fold=fold)  # type: ignore[arg-type]
    after = []
    for step in range(5):
        loss = model(torch.randn(2, 3)).square().sum() * (math.nan if step == bad_step else 1.0)
        (loss if scaler is None else scaler.scale(loss)).backward()
        report = clipper.step()
        assert report.stepped is (step != bad_step)
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        optimizer.zero_grad()
        full = [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]
        after.append(torch.cat([part.flatten() for part in full]))
    return after


def _folded_equals_multiplied(name: str, wrap: str, scaled: bool, bad_step: int) -> float:
    worst = 0.0
    for one, other in zip(
        _train(name, wrap, "auto", scaled, bad_step), _train(name, wrap, "never", scaled, bad_step), strict=True
    ):
        worst = max(worst, float((one - other).abs().max() / other.abs().max()))
    return worst


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_folding_gives_the_same_step_as_multiplying(ranks: Any, name: str, scaled: bool) -> None:
    # A bad very first step too: a fused SGD whose momentum buffer does not exist yet must not be called at all.
    for bad_step in (-1, 0, 2):
        assert max(ranks(_folded_equals_multiplied, 1, name, "none", scaled, bad_step)) < 2e-6


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_folding_on_fsdp2_parameters(ranks: Any, name: str) -> None:
    assert max(ranks(_folded_equals_multiplied, 2, name, "fsdp2", True, 1)) < 2e-6


def test_gradients_are_raw_before_a_folded_step_and_clipped_after_it() -> None:
    parameter = parameter_with(3.0, 4.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    seen: list[list[float]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameter.grad.tolist()))  # type: ignore[union-attr]
    distclip.GradientClipper([parameter], optimizer, max_norm=1.0, fold="always").step()
    assert seen == [[3.0, 4.0]]
    assert parameter.grad is not None
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-6)
    assert parameter.tolist() == pytest.approx([-0.6, -0.8], rel=1e-6)


def test_an_exception_in_a_folded_step_leaves_no_trace() -> None:
    parameter = parameter_with(3.0, 4.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)

    def fail(*_: Any) -> None:
        raise KeyError("from a hook")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        distclip.GradientClipper([parameter], optimizer, max_norm=1.0).step()
    assert not hasattr(optimizer, "grad_scale")


def test_several_limits_for_one_optimizer_are_multiplied_instead() -> None:
    one, two = parameter_with(3.0), parameter_with(4.0)
    optimizer = torch.optim.SGD([one, two], lr=1.0, fused=True)
    groups = {"one": distclip.ParamGroup("one", max_norm=1.5)}
    distclip.GradientClipper([("one", one), ("two", two)], optimizer, max_norm=1.0, param_groups=groups).step()
    assert [one.item(), two.item()] == pytest.approx([-1.5, -1.0], rel=1e-6)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: torch.optim.SGD([p], lr=1.0), "SGD is not fused"),
        (lambda p: torch.optim.RMSprop([p], lr=1.0), "RMSprop is not fused"),
        (lambda p: None, "there is no optimizer"),
    ],
)
def test_fold_always_says_why_not(make: Any, text: str) -> None:
    parameter = parameter_with(1.0)
    with pytest.raises(distclip.ConfigError, match=text):
        distclip.GradientClipper([parameter], make(parameter), fold="always")
    with pytest.raises(distclip.ConfigError, match="fold must be 'auto', 'never' or 'always'"):
        distclip.GradientClipper([parameter], make(parameter), fold="no")  # type: ignore[arg-type]


# --- order and repetition ------------------------------------------------------------------------------------------


def test_stepping_twice_on_the_same_gradients_is_an_error_and_not_a_second_unscale() -> None:
    for fused in (False, True):
        parameter = parameter_with(3.0, 4.0)
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
        clipper = distclip.GradientClipper([parameter], optimizer, max_norm=100.0, scaler=scaled_up(4.0))
        clipper.step()
        with pytest.raises(distclip.ConfigError, match=r"no backward\(\) has run since"):
            clipper.step()
        parameter.grad = torch.tensor([3.0, 4.0])
        assert clipper.step().total_norm.item() == 1.25


def test_a_forgotten_update_is_an_error() -> None:
    parameter = parameter_with(3.0, 4.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = scaled_up(4.0)
    clipper = distclip.GradientClipper([parameter], optimizer, max_norm=100.0, scaler=scaler)
    clipper.clip_()
    parameter.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(distclip.ConfigError, match=r"scaler\.update\(\) has not been called since the last clip_"):
        clipper.clip_()


def test_an_update_that_was_left_out_because_of_a_skip_is_an_error() -> None:
    parameter = parameter_with(3.0, math.inf)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = scaled_up(4.0)
    clipper = distclip.GradientClipper([parameter], optimizer, max_norm=None, scaler=scaler)
    assert not clipper.clip_().should_step  # the first step of a run with a high initial scale
    parameter.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(distclip.ConfigError, match="also where should_step is False"):
        clipper.clip_()
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert clipper.clip_().total_norm.item() == 2.5


def test_after_a_step_that_broke_off_nothing_passes_as_unscaled() -> None:
    parameter = parameter_with(3.0, 4.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = scaled_up(4.0)
    clipper = distclip.GradientClipper([parameter], optimizer, max_norm=None, scaler=scaler)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        clipper.step()
    hook.remove()
    parameter.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(distclip.ConfigError, match="are not the gradients that it unscaled"):
        clipper.step()
    scaler.update()
    assert clipper.step().total_norm.item() == 1.25


def test_a_shallow_copy_of_a_scaler_unscales_by_its_own_scale() -> None:
    parameter = parameter_with(3.0, 4.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    first = scaled_up(4.0)
    distclip.GradientClipper([parameter], optimizer, scaler=first)
    second = copy.copy(first)
    second.scale(torch.ones(()))
    second.update(2.0)
    clipper = distclip.GradientClipper([parameter], optimizer, max_norm=None, scaler=second)
    second.unscale_(optimizer)
    assert clipper.step().total_norm.item() == 2.5
    assert first.get_scale() == 4.0


def test_clipping_between_step_and_update_is_an_error() -> None:
    parameter = parameter_with(3.0, 4.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = scaled_up(4.0)
    clipper = distclip.GradientClipper([parameter], optimizer, scaler=scaler)
    clipper.clip_()
    scaler.step(optimizer)
    with pytest.raises(distclip.ConfigError, match=r"clip between backward\(\) and scaler\.step\(\)"):
        clipper.clip_()
    scaler.update()
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clipper.clip_().total_norm.item() == 1.25


def test_unscaling_for_one_of_two_optimizers_is_an_error() -> None:
    one, two = parameter_with(3.0), parameter_with(4.0)
    optimizers = [torch.optim.SGD([one], lr=1.0), torch.optim.SGD([two], lr=1.0)]
    scaler = scaled_up(4.0)
    clipper = distclip.GradientClipper([one, two], optimizers, scaler=scaler)
    scaler.unscale_(optimizers[0])
    with pytest.raises(distclip.ConfigError, match="for some of the optimizers only"):
        clipper.step()


def test_clipping_before_any_backward_is_a_skip() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    clipper = distclip.GradientClipper([parameter], optimizer, scaler=scaler)
    assert clipper.step().skip_reason == "no_gradients"
    report = clipper.clip_()
    assert report.skip_reason == "no_gradients"
    scaler.step(optimizer)
    scaler.update()


class Wrapper:
    """An optimizer inside another object, as accelerate and Lightning have them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def _through_a_wrapper(how: str, bad: bool) -> tuple[float, float, list[float]]:
    parameter = parameter_with(3072.0, math.inf if bad and dist.get_rank() == 1 else 4096.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    wrapper, scaler = Wrapper(optimizer), scaled_up(1024.0)
    clipper = distclip.GradientClipper([("w", parameter)], optimizer, max_norm=1.0, scaler=scaler, owned=["w"])
    scaler.unscale_(wrapper)  # type: ignore[arg-type]
    if how == "step":
        report = clipper.step()
    else:
        report = clipper.clip_()
        scaler.step(wrapper)  # type: ignore[arg-type]
        scaler.update()
    return float(report.total_norm), scaler.get_scale(), parameter.tolist()


@pytest.mark.parametrize("how", ["step", "clip_"])
def test_gradients_unscaled_through_a_wrapper_are_not_unscaled_twice(ranks: Any, how: str) -> None:
    for norm, scale, weight in ranks(_through_a_wrapper, 2, how, False):
        assert norm == pytest.approx(math.sqrt(2) * 5.0)
        assert scale == 1024.0
        assert weight == pytest.approx([-0.6 / math.sqrt(2), -0.8 / math.sqrt(2)], rel=1e-6)
    for norm, scale, weight in ranks(_through_a_wrapper, 2, how, True):  # the wrapper's step sees what all agreed
        assert norm == math.inf
        assert scale == 512.0
        assert weight == [0.0, 0.0]


def test_another_optimizer_of_the_same_scaler_is_no_wrapper() -> None:
    one, two = parameter_with(8.0), parameter_with(8.0)
    mine, other = torch.optim.SGD([one], lr=1.0), torch.optim.SGD([two], lr=1.0)
    scaler = scaled_up(4.0)
    clipper = distclip.GradientClipper([one], mine, max_norm=10.0, scaler=scaler)
    scaler.unscale_(other)
    assert float(clipper.clip_().total_norm) == 2.0
    scaler.step(mine)
    scaler.step(other)
    scaler.update()
    assert [one.item(), two.item()] == [-2.0, -2.0]
    assert copy.deepcopy(scaler).get_scale() == pickle.loads(pickle.dumps(scaler)).get_scale() == scaler.get_scale()


def test_a_step_without_gradients_teaches_the_scaler_nothing() -> None:
    one, two = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    clippers = [
        distclip.GradientClipper([parameter], torch.optim.SGD([parameter], lr=1.0), scaler=scaler)
        for parameter in (one, two)
    ]
    for has_gradient, scale in ((True, 8.0), (False, 8.0), (False, 8.0), (True, 16.0)):
        for parameter, clipper in zip((one, two), clippers, strict=True):
            parameter.grad = scaler.scale(torch.ones(2)) if has_gradient else None
            clipper.step()
        assert scaler.get_scale() == scale
    two.grad = scaler.scale(torch.full((2,), math.nan))  # one of two that share the scaler has something to teach
    one.grad = None
    for clipper in clippers:
        clipper.step()
    assert scaler.get_scale() == 8.0


def _scale_grows() -> list[float]:
    """growth_interval 1: the factor undone in a step is the one that its backward used, though update changes it."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0, growth_interval=1)
    clipper = distclip.GradientClipper([parameter], optimizer, max_norm=1.0, scaler=scaler)
    said = []
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale((parameter * torch.tensor([3.0, 4.0])).sum()).backward()
        said.append(clipper.step().total_norm.item())
    return [*said, scaler.get_scale(), *parameter.tolist()]


def test_the_scale_that_backward_used_is_undone(ranks: Any) -> None:
    for said in ranks(_scale_grows, 2):
        assert said == pytest.approx([5.0, 5.0, 5.0, 16.0, -1.8, -2.4], rel=1e-5)


# --- several optimizers, several clippers ---------------------------------------------------------------------------


def _two_optimizers(bad: int) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (2,))
    parameters = []
    for index in range(2):
        parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        gradient = torch.tensor([1.0, 2.0, 3.0, math.inf if index == bad else 4.0])
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        parameters.append(parameter)
    optimizers = [torch.optim.SGD([parameters[0]], lr=1.0), torch.optim.AdamW([parameters[1]], lr=1.0, fused=True)]
    scaler = scaled_up(8.0)
    report = distclip.GradientClipper(parameters, optimizers, scaler=scaler).step()
    moved = [not torch.equal(p.detach().to_local(), torch.ones(2)) for p in parameters]
    return report.stepped, scaler.get_scale(), moved


@pytest.mark.parametrize(("bad", "wanted"), [(0, (False, 4.0, [False] * 2)), (1, (False, 4.0, [False] * 2))])
def test_optimizers_that_share_a_norm_step_together_or_not_at_all(ranks: Any, bad: int, wanted: Any) -> None:
    assert ranks(_two_optimizers, 2, bad) == [wanted] * 2
    assert ranks(_two_optimizers, 2, -1) == [(True, 8.0, [True] * 2)] * 2


def _gan(bad: str) -> tuple[Any, ...]:
    scaler = scaled_up(8.0)
    parameters = {name: parameter_with(8.0) for name in ("generator", "critic")}
    clippers = {
        name: distclip.GradientClipper(
            [(name, parameter)], torch.optim.SGD([parameter], lr=1.0), max_norm=100.0, scaler=scaler
        )
        for name, parameter in parameters.items()
    }
    if bad:
        parameters[bad].grad = torch.tensor([math.nan])
    stepped = {name: clipper.step().stepped for name, clipper in clippers.items()}
    return stepped, scaler.get_scale(), {name: parameter.item() for name, parameter in parameters.items()}


def test_clippers_that_share_a_scaler_decide_for_themselves_and_update_once(ranks: Any) -> None:
    good = ({"generator": True, "critic": True}, 8.0, {"generator": -1.0, "critic": -1.0})
    assert ranks(_gan, 2, "") == [good] * 2
    for bad in ("generator", "critic"):
        stepped = {name: name != bad for name in ("generator", "critic")}
        weights = {name: 0.0 if name == bad else -1.0 for name in ("generator", "critic")}
        assert ranks(_gan, 2, bad) == [(stepped, 4.0, weights)] * 2


def test_a_shared_scaler_that_one_clipper_does_not_use_is_explained() -> None:
    scaler = scaled_up(8.0)
    one, two = parameter_with(1.0), parameter_with(1.0)
    first = distclip.GradientClipper([one], torch.optim.SGD([one], lr=1.0), scaler=scaler)
    second = distclip.GradientClipper([two], torch.optim.SGD([two], lr=1.0), scaler=scaler)
    first.step()
    one.grad = torch.ones(1)
    with pytest.raises(distclip.ConfigError, match="This scaler is shared by several clippers"):
        first.step()
    second.step()
    assert first.step().stepped is True


def test_a_new_clipper_takes_the_place_of_the_old_one() -> None:
    scaler = scaled_up(8.0)
    parameter = parameter_with(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    old = distclip.GradientClipper([parameter], optimizer, scaler=scaler)
    new = distclip.GradientClipper([parameter], optimizer, scaler=scaler, max_norm=0.5)
    for _ in range(2):
        parameter.grad = torch.ones(1)
        assert new.step().stepped is True
    assert old.plan is not new.plan


# --- what follows a step --------------------------------------------------------------------------------------------


def _followers() -> tuple[float, int, float, bool]:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=1.0)
    clipper = distclip.GradientClipper([parameter], optimizer)
    counted: list[int] = []
    clipper.after_step(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), lambda: counted.append(1))
    same = True
    for step, bad_rank in enumerate((-1, 0, 1, -1)):
        before = {key: value.clone() for key, value in optimizer.state.get(parameter, {}).items()}
        parameter.grad = torch.tensor([math.nan if dist.get_rank() == bad_rank else 1.0])
        report = clipper.step()
        assert report.stepped is (bad_rank < 0), step
        if not report.stepped:
            after = optimizer.state[parameter]
            same = same and all(torch.equal(before[key], after[key]) for key in after)
    return optimizer.param_groups[0]["lr"], len(counted), optimizer.state[parameter]["step"].item(), same


def test_schedulers_and_counters_advance_on_real_steps_only(ranks: Any) -> None:
    assert ranks(_followers, 2) == [(0.25, 2, 2.0, True)] * 2


def test_after_step_takes_only_what_it_can_call() -> None:
    with pytest.raises(TypeError, match="after_step takes callables"):
        distclip.GradientClipper([parameter_with(1.0)]).after_step("scheduler")
