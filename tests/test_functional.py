"""The functions in a single process: figures, bad input, and that reading leaves every bit as it was."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distclip
from distclip import functional, get_total_norm


def _parameter(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    return parameter


@pytest.mark.parametrize(
    ("norm_type", "wanted"), [(1.0, 7.0), (2.0, 5.0), (3.0, 91 ** (1 / 3)), (math.inf, 4.0), ("inf", 4.0)]
)
def test_norm_types(norm_type: Any, wanted: float) -> None:
    parameters = [_parameter(torch.tensor([3.0])), _parameter(torch.tensor([[-4.0]]))]
    assert distclip.get_total_norm(parameters, norm_type).item() == pytest.approx(wanted, rel=1e-7)


def test_the_result_is_a_plain_float64_scalar() -> None:
    norm = distclip.clip_grad_norm_(_parameter(torch.tensor([3.0, 4.0])), 1.0)
    assert type(norm) is Tensor
    assert norm.dtype == torch.float64
    assert norm.shape == ()
    assert not norm.requires_grad


@pytest.mark.parametrize(
    ("gradient", "norm"),
    [([math.inf, 1.0], math.inf), ([math.nan, 1.0], math.nan), ([math.nan, math.inf], math.nan), ([3e38, 3e38], None)],
)
@pytest.mark.parametrize("limit", [None, math.inf])
def test_measuring_writes_nothing(gradient: list[float], norm: float | None, limit: float | None) -> None:
    parameter = _parameter(torch.tensor(gradient))
    before = parameter.grad.numpy().tobytes()  # type: ignore[union-attr]
    said = distclip.get_total_norm(parameter) if limit is None else distclip.clip_grad_norm_(parameter, limit)
    assert parameter.grad.numpy().tobytes() == before  # type: ignore[union-attr]
    assert said.item() == pytest.approx(3e38 * 2**0.5 if norm is None else norm, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_gradients_are_left_untouched(value: float) -> None:
    parameter = _parameter(torch.tensor([value, 30.0]))
    distclip.clip_grad_norm_(parameter, 1.0)
    assert parameter.grad is not None
    assert parameter.grad[1] == 30.0


def test_error_if_nonfinite_names_the_parameter() -> None:
    layer = nn.Linear(2, 1)
    layer.weight.grad = torch.tensor([[math.nan, 1.0]])
    layer.bias.grad = torch.ones(1)
    with pytest.raises(distclip.NonfiniteGradientError, match=r"rank 0: 'weight' has 1 nan"):
        distclip.clip_grad_norm_(layer, 1.0, error_if_nonfinite=True)


def test_a_repeated_or_tied_parameter_counts_once() -> None:
    parameter = _parameter(torch.tensor([3.0, 4.0]))
    assert distclip.clip_grad_norm_([parameter, parameter], 1.0).item() == 5.0
    assert parameter.grad is not None
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)


def test_names_and_sources_are_interchangeable() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model(torch.ones(1, 2)).sum().backward()
    wanted = distclip.get_total_norm(model).item()
    for source in (model.parameters(), list(model.parameters()), model.named_parameters(), [model[0], model[1]]):
        assert distclip.get_total_norm(source).item() == wanted


@pytest.mark.parametrize("max_norm", [-1.0, 0.0, math.nan])
def test_bad_max_norm(max_norm: float) -> None:
    with pytest.raises(distclip.ConfigError, match="max_norm must be > 0"):
        distclip.clip_grad_norm_(_parameter(torch.ones(1)), max_norm)
    with pytest.raises(distclip.ConfigError, match="max_norm must be > 0"):
        distclip.GradientClipper([_parameter(torch.ones(1))], max_norm=max_norm)


@pytest.mark.parametrize("norm_type", [0, -2.0, math.nan, -math.inf])
def test_bad_norm_type(norm_type: float) -> None:
    with pytest.raises(distclip.ConfigError, match="norm_type must be > 0 or inf"):
        distclip.get_total_norm(_parameter(torch.ones(1)), norm_type)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (
            {"nonfinite": "ignore"},
            distclip.ConfigError,
            "nonfinite must be one of 'skip', 'raise', 'zero', 'propagate'",
        ),
        ({"max_norm": "big"}, TypeError, "max_norm must be a number"),
        ({"max_consecutive_skips": -1}, distclip.ConfigError, "max_consecutive_skips must be a whole number"),
        ({"max_norm": 10**400}, TypeError, "max_norm must be a number"),
        ({"optimizer": "sgd"}, TypeError, r"optimizer must be a torch\.optim\.Optimizer"),
        ({"optimizer": 1.0}, TypeError, r"optimizer must be a torch\.optim\.Optimizer or several, not float"),
        ({"scaler": object()}, distclip.ConfigError, r"scaler must be a torch\.amp\.GradScaler"),
        ({"scaler": torch.amp.GradScaler("cpu")}, distclip.ConfigError, "scaler= needs the optimizer"),
        ({"telemetry": "prometheus"}, distclip.ConfigError, "telemetry must be 'auto', None or a Sink"),
        ({"owned": "experts.*"}, TypeError, "take a list of patterns"),
        ({"tied": [("a", 5)]}, TypeError, "take patterns or names, not int"),
        ({"pipeline_group": "stages"}, TypeError, "pipeline_group= or owned= takes a torch.distributed process group"),
        ({"group": "ranks"}, TypeError, "group= takes a torch.distributed process group, not str"),
    ],
)
def test_bad_clipper_arguments(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        distclip.GradientClipper(nn.Linear(1, 1), **arguments)


def test_lbfgs_is_refused() -> None:
    layer = nn.Linear(1, 1)
    with pytest.raises(distclip.ConfigError, match="LBFGS"):
        distclip.GradientClipper(layer, torch.optim.LBFGS(layer.parameters()))


def test_an_optimizer_with_foreign_parameters_is_refused_under_a_scaler() -> None:
    layer, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*layer.parameters(), *other.parameters()])
    with pytest.raises(distclip.ConfigError, match="holds 2 parameters that the source does not have"):
        distclip.GradientClipper(layer, optimizer, scaler=torch.amp.GradScaler("cpu"))


def test_step_without_optimizer_says_what_to_do() -> None:
    clipper = distclip.GradientClipper([_parameter(torch.ones(1))])
    with pytest.raises(distclip.ConfigError, match=r"step\(\) needs the optimizer"):
        clipper.step()


def test_gradients_passed_for_parameters() -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    with pytest.raises(distclip.ConfigError, match="probably a gradient"):
        distclip.clip_grad_norm_(gradients, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [distclip.get_total_norm, distclip.GradientClipper])
def test_a_result_of_an_operation_passed_for_a_parameter(call: Any) -> None:
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    doubled = weight * 2.0
    doubled.sum().backward()
    with pytest.raises(distclip.ConfigError, match=r"'doubled' is computed from other tensors"):
        call([("doubled", doubled)])
    with pytest.raises(distclip.ConfigError, match=r"'parameter\[0\]' is computed from other tensors"):
        distclip.clip_grad_value_(doubled, 1.0)


def test_a_result_that_keeps_its_gradient_is_a_parameter_like_any_other() -> None:
    doubled = torch.tensor([1.0, 1.0], requires_grad=True) * 2.0
    doubled.retain_grad()
    (doubled * torch.tensor([3.0, 4.0])).sum().backward()
    assert distclip.clip_grad_norm_(doubled, 1.0).item() == 5.0
    assert doubled.grad is not None
    assert doubled.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


@pytest.mark.parametrize("source", [3, ["weight"], [nn.Linear(1, 1), 3], {"a": 1}])
def test_a_source_of_another_kind(source: Any) -> None:
    with pytest.raises(TypeError, match=r"pass a module|must be a module"):
        distclip.get_total_norm(source)


def test_an_empty_source_is_an_error() -> None:
    with pytest.raises(distclip.ConfigError, match="no parameters on any rank"):
        distclip.get_total_norm([])


def test_plans_are_cached_by_the_identity_of_the_parameters() -> None:
    first, second = _parameter(torch.tensor([3.0])), _parameter(torch.tensor([4.0]))
    for _ in range(2):
        assert distclip.get_total_norm([first]).item() == 3.0
        assert distclip.get_total_norm([first, second]).item() == 5.0
    second.grad = None
    assert distclip.get_total_norm([first, second]).item() == 3.0


def test_a_parameter_that_is_unfrozen_later_counts() -> None:
    layer = nn.Linear(1, 1)
    layer.bias.requires_grad_(False)
    layer.weight.grad = torch.tensor([[3.0]])
    clipper = distclip.GradientClipper(layer)
    assert clipper.measure().total_norm.item() == 3.0
    layer.bias.requires_grad_(True)
    layer.bias.grad = torch.tensor([4.0])
    assert clipper.measure().total_norm.item() == 5.0


def test_explain_is_a_table() -> None:
    text = distclip.GradientClipper(nn.Sequential(nn.Linear(3, 2))).explain()
    assert text.splitlines()[0].split() == [
        "parameter",
        "layout",
        "where",
        "local",
        "elements",
        "param",
        "group",
        "holders",
    ]
    assert "0.weight" in text
    assert "rank 0 of 1: 2 parameters, 8 local elements, layout plain" in text


def test_a_step_on_a_laptop() -> None:
    layer = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    clipper = distclip.GradientClipper(layer, optimizer, max_norm=1.0)
    layer(torch.tensor([[3.0, 4.0]])).sum().backward()
    report = clipper.step()
    host = report.host()
    assert host.total_norm == 5.0
    assert host.clip_coefficient == pytest.approx(0.2, rel=1e-6)
    assert (host.step, host.clipped, host.stepped, host.skip_reason) == (1, True, True, None)
    assert layer.weight.tolist()[0] == pytest.approx([-0.6, -0.8], rel=1e-5)


def test_grad_multiplier_comes_before_the_norm() -> None:
    parameter = _parameter(torch.tensor([30.0, 40.0]))
    report = distclip.GradientClipper([parameter], max_norm=1.0).clip_(grad_multiplier=0.1)
    assert report.total_norm.item() == pytest.approx(5.0)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)


def test_state_survives() -> None:
    parameter = _parameter(torch.tensor([math.nan]))
    clipper = distclip.GradientClipper([parameter])
    clipper.clip_()
    other = distclip.GradientClipper([parameter])
    other.load_state_dict(clipper.state_dict())
    assert other.clip_().step == 2
    assert other.state_dict() == {"steps": 2, "consecutive_skips": 2}


@pytest.mark.parametrize(
    ("state", "text"),
    [({}, "lacks 'steps' and 'consecutive_skips'"), ({"steps": 3}, "lacks 'consecutive_skips'")],
)
def test_a_state_of_something_else_is_refused_whole(state: dict[str, int], text: str) -> None:
    clipper = distclip.GradientClipper([_parameter(torch.tensor([3.0, 4.0]))], max_norm=1.0)
    with pytest.raises(distclip.ConfigError, match=text):
        clipper.load_state_dict(state)
    assert clipper.state_dict() == {"steps": 0, "consecutive_skips": 0}


def test_a_clipper_is_not_copied() -> None:
    clipper = distclip.GradientClipper(nn.Linear(1, 1))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="build one for each model"):
            copied(clipper)


def test_max_norm_none_only_measures() -> None:
    parameter = _parameter(torch.tensor([3.0, 4.0]))
    report = distclip.GradientClipper([parameter], max_norm=None).clip_()
    assert report.total_norm.item() == 5.0
    assert report.clip_coefficient.item() == 1.0
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3.0, 4.0]


def test_param_groups_have_limits_of_their_own() -> None:
    model = nn.ModuleDict({"emb": nn.Linear(1, 1, bias=False), "a": nn.Linear(1, 1, bias=False)})
    model["emb"].weight.grad = torch.tensor([[10.0]])
    model["a"].weight.grad = torch.tensor([[4.0]])
    groups = {"embedding": distclip.ParamGroup(match="*emb*", max_norm=0.5)}
    report = distclip.GradientClipper(model, max_norm=1.0, param_groups=groups).clip_()
    assert report.total_norm.item() == pytest.approx(116**0.5)
    assert report.param_groups["embedding"].norm.item() == 10.0
    assert report.param_groups["embedding"].coefficient.item() == pytest.approx(0.05, rel=1e-6)
    assert report.clip_coefficient.item() == report.param_groups["default"].coefficient.item()
    assert model["emb"].weight.grad.item() == pytest.approx(0.5, rel=1e-6)
    assert model["a"].weight.grad.item() == pytest.approx(1.0, rel=1e-6)


def test_param_groups_without_limit_are_clipped_together() -> None:
    model = nn.Linear(1, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0]]), torch.tensor([4.0])
    report = distclip.GradientClipper(model, max_norm=1.0, param_groups=lambda name: name).clip_()
    assert list(report.param_groups) == ["bias", "weight", "default"]
    assert report.host().param_groups["weight"]["norm"] == 3.0
    assert model.weight.grad.item() == pytest.approx(0.6, rel=1e-6)
    assert model.bias.grad.item() == pytest.approx(0.8, rel=1e-6)


@pytest.mark.parametrize(
    ("groups", "kind", "text"),
    [
        ({"a": distclip.ParamGroup(match="nothing*")}, distclip.ConfigError, "'a' matches no parameter on any rank"),
        ({"default": distclip.ParamGroup(match="*")}, distclip.ConfigError, "its limit is max_norm"),
        ({"a": distclip.ParamGroup(match="*", max_norm=0.0)}, distclip.ConfigError, "max_norm must be > 0"),
        ({"a": "weight"}, TypeError, "must map names to ParamGroup"),
        ({"a": distclip.ParamGroup(match=[])}, distclip.ConfigError, "'a': match names no pattern"),
        ({"a": distclip.ParamGroup(match=None)}, TypeError, "'a': match takes a pattern or several, not None"),  # type: ignore[arg-type]
        ({"a": distclip.ParamGroup(match=["*", 3])}, TypeError, "'a': match takes a pattern or several"),  # type: ignore[list-item]
        (["weight"], TypeError, "must map names to ParamGroup, or be a function"),
        (lambda name: 3, distclip.ConfigError, "must return a group"),
    ],
)
def test_bad_param_groups(groups: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        distclip.GradientClipper(nn.Linear(1, 1), param_groups=groups)


def test_clip_grad_value() -> None:
    parameter = _parameter(torch.tensor([3.0, -0.5, math.nan, -math.inf]))
    distclip.clip_grad_value_([parameter], 1.0)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == pytest.approx([1.0, -0.5, math.nan, -1.0], nan_ok=True)
    sparse = nn.Embedding(3, 1, sparse=True)
    sparse(torch.tensor([1, 1, 2])).sum().backward()
    distclip.clip_grad_value_(sparse, 1.5)
    assert sparse.weight.grad is not None
    assert sparse.weight.grad.to_dense().flatten().tolist() == [0.0, 1.5, 1.0]
    with pytest.raises(distclip.ConfigError, match="clip_value must be >= 0"):
        distclip.clip_grad_value_([parameter], -1.0)
    with pytest.raises(distclip.LayoutError, match="complex"):
        distclip.clip_grad_value_([_parameter(torch.ones(1, dtype=torch.complex64))], 1.0)


def test_a_parameter_that_is_added_to_model_and_optimizer_counts() -> None:
    model = nn.ModuleList([nn.Linear(1, 1, bias=False)])
    model[0].weight.grad = torch.tensor([[3.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    clipper = distclip.GradientClipper(model, optimizer, max_norm=100.0)
    assert clipper.step().total_norm.item() == 3.0
    model.append(nn.Linear(1, 1, bias=False))
    model[1].weight.grad = torch.tensor([[4.0]])
    optimizer.add_param_group({"params": model[1].parameters()})
    assert clipper.step().total_norm.item() == 5.0


def test_a_deepspeed_engine_is_for_the_clipper() -> None:
    kind = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    with pytest.raises(distclip.ConfigError, match=r"use GradientClipper\(engine\)"):
        distclip.clip_grad_norm_(kind(), 1.0)


def test_an_optimizer_of_other_parameters_is_refused_or_named() -> None:
    layer, other = nn.Linear(1, 1), nn.Linear(1, 1)
    with pytest.raises(distclip.ConfigError, match="SGD holds none of the parameters of the source"):
        distclip.GradientClipper(layer, torch.optim.SGD(other.parameters()))
    both = torch.optim.SGD([*layer.parameters(), *other.parameters()])
    with pytest.warns(UserWarning, match="SGD holds 2 parameters that the source does not have"):
        distclip.GradientClipper(layer, both)


def test_a_lazy_module_must_have_run() -> None:
    with pytest.raises(distclip.ConfigError, match="'weight' has no shape yet"):
        distclip.GradientClipper(nn.LazyLinear(2))


def test_calls_keep_no_model_alive() -> None:
    layer = nn.Linear(1, 1)
    layer.weight.grad = torch.ones(1, 1)
    distclip.get_total_norm(layer)
    gone = weakref.ref(layer.weight)
    del layer
    gc.collect()
    assert gone() is None


def test_a_plan_is_not_used_for_other_parameters_that_have_its_identities() -> None:
    # As when a model is deleted and the next one gets the same addresses: here one parameter becomes another.
    parameter = nn.Parameter(torch.zeros(4))
    for made, numel in enumerate((4, 4, 9, 9, 4)):
        before = functional._single.made
        parameter.data, parameter.grad = torch.zeros(numel), None
        parameter.grad = torch.ones(numel)
        assert get_total_norm([parameter]).item() == math.sqrt(numel)
        assert functional._single.made - before == (made in (0, 2, 4))


def test_a_call_leaves_the_plans_of_other_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (nn.Linear(count, 1, bias=False) for count in (3, 4))
    for layer in (one, other):
        layer.weight.grad = torch.ones_like(layer.weight)
    survey, busy = functional.survey, threading.Event()

    def meanwhile(*arguments: Any, **named: Any) -> Any:
        if not busy.is_set():
            busy.set()
            thread = threading.Thread(target=get_total_norm, args=(other,))
            thread.start()
            thread.join()
        return survey(*arguments, **named)

    wanted = get_total_norm(one), get_total_norm(other)
    monkeypatch.setattr(functional, "survey", meanwhile)
    assert get_total_norm(one) == wanted[0]
    assert busy.is_set()
