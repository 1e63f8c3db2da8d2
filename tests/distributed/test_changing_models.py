"""A model that gets other layers after a clipper was built: the clipper counts what the model has now, or all ranks
learn what differs."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import distclip
from distclip.plan.structure import Structure
from distclip.testing import RankFailure, oracle
from distclip.testing.collectives import count

LIMIT = 0.5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.body(batch)
        out = self.head(out) * self.scale if hasattr(self, "scale") else self.head(out)
        return out


def _add_parameter(model: Model) -> None:
    model.scale = nn.Parameter(torch.full((2,), 3.0))


def _add_layer(model: Model) -> None:
    model.body.append(nn.Linear(4, 4))


def _replace_layer(model: Model) -> None:
    model.head = nn.Linear(4, 3)


def _replace_parameter(model: Model) -> None:
    model.head.weight = nn.Parameter(torch.ones(2, 4))


def _delete_layer(model: Model) -> None:
    del model.body[1]


def _delete_parameter(model: Model) -> None:
    del model.head.bias
    model.head.bias = None


CHANGES = {
    "a parameter is added": _add_parameter,
    "a layer is added": _add_layer,
    "a layer is replaced": _replace_layer,
    "a parameter is replaced": _replace_parameter,
    "a layer is deleted": _delete_layer,
    "a parameter is deleted": _delete_parameter,
}


def _agrees(clipper: distclip.GradientClipper, model: nn.Module) -> dict[str, Any]:
    """Clip what the last backward left; compare with the oracle's view of the model as it is now."""
    wanted = oracle.gather_full_gradients(model)
    clipped = oracle.clipped(wanted, LIMIT, 2.0)
    norm = clipper.clip_().total_norm.item()
    after = oracle.gather_full_gradients(model)
    return {
        "norm": norm / oracle.norm(wanted.values(), 2.0),
        "names": sorted(after) == sorted(clipped) == sorted(entry.name for entry in clipper.plan.entries),
        "worst": max(float(abs(after[name] - clipped[name]).max()) for name in clipped),
    }


def _right(said: dict[str, Any]) -> None:
    assert said["norm"] == pytest.approx(1.0, rel=1e-6)
    assert said["names"]
    assert said["worst"] < 1e-6


def _backward(model: nn.Module) -> None:
    # Gradients of layers that are gone stay set: only what the model has now is cleared.
    model.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()


def _changed(how: str, wrap: str, changed: tuple[int, ...]) -> list[dict[str, Any]]:
    """Before the change, twice after it, and how many collectives the last step needed."""
    torch.manual_seed(0)
    model = Model()
    run: Any = torch.compile(model, backend="eager") if wrap == "compiled" else model
    clipper = distclip.GradientClipper(run, max_norm=LIMIT)
    _backward(run)
    said = [_agrees(clipper, run)]
    if not changed or dist.get_rank() in changed:
        torch.manual_seed(1)
        CHANGES[how](model)
    for _ in range(2):
        _backward(run)
        said.append(_agrees(clipper, run))
    _backward(run)
    with count() as issued:
        clipper.clip_()
    return [*said, dict(issued)]


@pytest.mark.parametrize("wrap", ["plain", "compiled"])
@pytest.mark.parametrize("how", CHANGES)
def test_a_change_counts_from_the_next_step_without_any_optimizer(how: str, wrap: str) -> None:
    *said, _ = _changed(how, wrap, ())
    for each in said:
        _right(each)


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_on_all_ranks_counts_from_the_next_step(ranks: Any, how: str) -> None:
    for *said, issued in ranks(_changed, 2, how, "plain", (0, 1)):
        for each in said:
            _right(each)
        assert issued == {"allreduce": 1}


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("a parameter is added", "'scale' (2, float32) is only on rank 1"),
        ("a layer is added", "'body.2.weight' (4x4, float32) is only on rank 1"),
        ("a layer is replaced", "'head.weight' (3x4, float32) is only on rank 1"),
        ("a parameter is replaced", "'head.weight' (plain) holds different values on ranks 0, 1"),
        ("a layer is deleted", "'body.1.weight' (4x4, float32) is only on rank 0"),
        ("a parameter is deleted", "'head.bias' (2, float32) is only on rank 0"),
    ],
)
def test_a_change_on_one_rank_is_named_on_all(ranks: Any, how: str, text: str) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(_changed, 2, how, "plain", (1,))
    errors = failure.value.errors
    assert [type(errors[rank]) for rank in (0, 1)] == [distclip.LayoutError] * 2
    assert str(errors[0]) == str(errors[1])
    assert text in str(errors[0])


def _asked_again() -> list[str]:
    model = Model()
    clipper = distclip.GradientClipper(model, max_norm=LIMIT)
    if dist.get_rank() == 1:
        _add_parameter(model)
    said = []
    for _ in range(2):
        _backward(model)
        try:
            clipper.clip_()
        except distclip.LayoutError as error:
            said.append(str(error))
    return said


def test_a_change_that_could_not_be_planned_is_an_error_in_every_step(ranks: Any) -> None:
    said = ranks(_asked_again, 2)
    assert said[0] == said[1]
    assert [text.count("'scale' (2, float32) is only on rank 1") for text in said[0]] == [1, 1]


# --- wrappers ------------------------------------------------------------------------------------------------------


def _wrapped(how: str) -> tuple[dict[str, Any], str, bool]:
    """The model is wrapped after the clipper was made, from inside, so that the source stays the same object."""
    model: Any = Model()
    clipper = distclip.GradientClipper(model, max_norm=LIMIT)
    _backward(model)
    clipper.measure()
    if how == "ddp":
        model.body = DistributedDataParallel(model.body)
    elif how == "fsdp1":
        model.body = FullyShardedDataParallel(model.body, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        fully_shard(model.body)
    _backward(model)
    said = _agrees(clipper, model)
    refused = False
    if how == "ddp":
        with model.body.no_sync():
            _backward(model)
        try:
            clipper.clip_()
        except distclip.LayoutError as error:
            refused = "no_sync" in str(error)
    return said, clipper.plan.strategy, refused


@pytest.mark.parametrize(
    ("how", "strategy"), [("ddp", "ddp+plain"), ("fsdp1", "fsdp1+plain"), ("fsdp2", "dtensor+plain")]
)
def test_a_part_that_is_wrapped_later_is_seen(ranks: Any, how: str, strategy: str) -> None:
    for said, found, refused in ranks(_wrapped, 2, how):
        assert said["norm"] == pytest.approx(1.0, rel=1e-6)
        assert said["worst"] < 1e-6
        assert found == strategy
        assert refused is (how == "ddp")


def test_a_model_that_gets_its_memory_later() -> None:
    """`to_empty` makes new parameters, and writes them where no hook sees it."""
    with torch.device("meta"):
        model = Model()
    clipper = distclip.GradientClipper(model, max_norm=LIMIT)
    model.to_empty(device="cpu")
    model.load_state_dict(Model().state_dict())
    _backward(model)
    _right(_agrees(clipper, model))


def _replans(wrap: str) -> int:
    """How many plans four ordinary steps of a wrapped model take."""
    model: Any = Model()
    if wrap == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif wrap == "fsdp2":
        model = fully_shard(model)
    else:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    clipper = distclip.GradientClipper(model)
    plans = set()
    for _ in range(4):
        _backward(model)
        nn.Linear(1, 1)  # somebody else's module, made in between
        clipper.clip_()
        plans.add(id(clipper.plan))
    return len(plans)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp1", "fsdp2"])
def test_what_wrappers_do_in_every_step_is_no_change(ranks: Any, wrap: str) -> None:
    assert ranks(_replans, 2, wrap) == [1, 1]


# --- with an optimizer ---------------------------------------------------------------------------------------------


def _optimizer_too(scaled: bool) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    clipper = distclip.GradientClipper(model, optimizer, max_norm=LIMIT, scaler=scaler)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        wanted = oracle.norm(oracle.gather_full_gradients(model).values(), 2.0) / (4.0 if scaled else 1.0)
        assert clipper.step().total_norm.item() == pytest.approx(wanted, rel=1e-6)
        after = oracle.norm(oracle.gather_full_gradients(model).values(), 2.0)
        assert after == pytest.approx(LIMIT, rel=1e-5)

    step()
    layer = nn.Linear(4, 4)
    optimizer.add_param_group({"params": list(layer.parameters())})
    model.body.append(layer)
    step()
    del model.body[2]  # its parameters stay in the optimizer, without gradients
    step()


@pytest.mark.parametrize("scaled", [False, True])
def test_parameters_that_come_and_go_in_model_and_optimizer(scaled: bool) -> None:
    _optimizer_too(scaled)


def _foreign(scaled: bool) -> str:
    """One rank's optimizer gets a parameter with a gradient that no model has."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    clipper = distclip.GradientClipper(model, optimizer, scaler=scaler)
    foreign = nn.Parameter(torch.ones(1))
    foreign.grad = torch.ones(1)
    if not dist.is_initialized() or dist.get_rank() == 1:
        optimizer.add_param_group({"params": [foreign]})
    loss = model(torch.ones(2, 3)).square().sum()
    (loss if scaler is None else scaler.scale(loss)).backward()
    try:
        clipper.step()
    except distclip.ConfigError as error:
        return str(error)
    return "stepped"


def test_a_parameter_that_only_the_optimizer_got_is_an_error_where_it_would_never_be_unscaled(ranks: Any) -> None:
    said = ranks(_foreign, 2, True)
    assert said[0] == said[1]
    assert "holds 1 parameters that the source does not have" in said[0]
    assert said[0].endswith("(on rank 1 of 2)")
    with pytest.warns(UserWarning, match="stepped without being clipped"):
        assert _foreign(False) == "stepped"


# --- what is left behind -------------------------------------------------------------------------------------------


def test_a_clipper_takes_its_hook_along() -> None:
    model = Model()
    optimizers = [torch.optim.SGD(model.body.parameters()), torch.optim.SGD(model.head.parameters())]
    for _ in range(3):
        clipper = distclip.GradientClipper(model, optimizers)
        assert [len(each._optimizer_step_post_hooks) for each in optimizers] == [1, 1]
        del clipper
        gc.collect()
        assert [len(each._optimizer_step_post_hooks) for each in optimizers] == [0, 0]


def test_an_optimizer_with_a_clipper_can_be_copied_and_outlived() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    clipper = distclip.GradientClipper(model, optimizer)
    copy.deepcopy(optimizer).step()
    del optimizer
    _backward(model)
    assert clipper.step().stepped is True


def test_a_structure_is_compared_by_what_it_means() -> None:
    model = Model()
    items: list[Any] = [model]
    structure = Structure(items)
    model.extra = nn.Identity()
    assert not structure.changed(items)  # nothing with parameters
    model.extra.inner = nn.Linear(1, 1)
    assert structure.changed(items)
    assert structure.changed(items)  # until a new one is made
    structure = Structure(items)
    model.head._parameters["bias"] = model.head._parameters.pop("bias")
    assert not structure.changed(items)
    model.head._parameters["bias"] = nn.Parameter(torch.zeros(2))  # written past __setattr__
    assert structure.changed(items)
    assert Structure([*items]).changed(items)  # another source
