"""Runs on two ranks: every case with the real DeepSpeed, and what came out as JSON, for test_deepspeed.py to judge.

One process per rank runs all cases, since starting DeepSpeed takes longer than any of them.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
import math
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.distributed.fsdp import fully_shard

import distclip
from distclip.integrations.deepspeed import internals
from distclip.telemetry.record import RunInfo, StepRecord

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SETTINGS = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 10**9,
    "train_micro_batch_size_per_gpu": 1,
}
X, X10, NAN = [3.0, 4.0], [30.0, 40.0], [math.nan, 4.0]
CASES: dict[str, Callable[[], Any]] = {}


def case(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    CASES[name] = functools.partial(function, *args, **kwargs)


def configuration(stage: int, precision: str, clip: float | None, offload: bool, sums: str | None, **more: Any) -> Any:
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    result = {**SETTINGS, "zero_optimization": zero}
    if clip is not None:
        result["gradient_clipping"] = clip
    if precision != "fp32":
        result[precision] = {"enabled": True, **more.pop(precision, {})}
    if sums:
        result["data_types"] = {"grad_accum_dtype": sums}
    return {**result, **more}


def weights(engine: Any) -> torch.Tensor:
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return torch.cat([parameter.detach().float().flatten() for parameter in parameters])


def make(
    stage: int,
    precision: str = "fp32",
    clip: float | None = 1.0,
    offload: bool = False,
    sums: str | None = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    clipper: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[Any, Any]:
    """A 2x2 matrix of zeros and SGD with a rate of 1, in an engine, with its clipper."""
    if model is None:
        model = nn.Linear(2, 2, bias=False)
        nn.init.zeros_(model.weight)
    optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    config = configuration(stage, precision, clip, offload, sums, **more)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model.parameters()), config=config)
    options = {"max_norm": 1.0 if clip is None else clip or 1.0, "telemetry": None, **(clipper or {})}
    return engine, distclip.GradientClipper(engine, **options)


def told(report: distclip.StepReport, engine: Any, before: torch.Tensor) -> dict[str, Any]:
    host = report.host()
    norm = engine.get_global_grad_norm()
    return {
        "norm": host.total_norm,
        "coefficient": host.clip_coefficient,
        "nonfinite": host.nonfinite,
        "stepped": host.stepped,
        "reason": host.skip_reason,
        "scale": host.loss_scale,
        "groups": host.param_groups,
        "update": float((weights(engine) - before).norm()),
        "weights": weights(engine).tolist(),
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
        "deepspeed": None if norm is None else float(norm),
    }


def train(inputs: list[list[float]], others: list[list[float]] | None = None, **options: Any) -> list[dict[str, Any]]:
    """One micro-batch for each input; rank 1 has `others`. The loss is the sum of the outputs."""
    engine, clipper = make(**options)
    mine = inputs if dist.get_rank() == 0 else others or inputs
    results = []
    for values in mine:
        before = weights(engine)
        x = torch.tensor([values], dtype=DTYPES[options.get("precision", "fp32")])
        engine.backward(engine(x).sum())
        results.append(told(clipper.step(), engine, before))
    engine.destroy()
    return results


FORMS = [
    ("fp32", None, False),
    ("fp32", None, True),
    ("bf16", None, False),
    ("bf16", None, True),
    ("bf16", "fp32", False),
    ("bf16", "fp32", True),
    ("fp16", None, False),
    ("fp16", "fp32", True),
]
for stage in range(4):
    for precision, sums, offload in FORMS:
        if stage == 0 and (offload or sums or precision == "fp16"):
            continue
        form = f"{stage} {precision}{' fp32 sums' if sums else ''}{' offload' if offload else ''}"
        usual = {"stage": stage, "precision": precision, "sums": sums, "offload": offload}
        if precision == "fp16":
            usual["fp16"] = {"initial_scale_power": 4}
        # good, a nan on rank 1, good again
        case(f"steps {form}", train, [X, X, X], [X, NAN, X], **usual)
        case(f"accumulate {form}", train, [X, X, X10, X10], gradient_accumulation_steps=2, **usual)
        own = {**usual, "clip": 0.0, "clipper": {"decides": "distclip"}}
        case(f"distclip steps {form}", train, [X, X, X], [X, NAN, X], **own)
        if precision == "fp32":
            case(f"uneven {form}", train, [X], [[5.0, 12.0]], **usual)

for stage in (1, 2, 3):
    growing = {"stage": stage, "precision": "fp16", "fp16": {"initial_scale_power": 4, "loss_scale_window": 1}}
    case(f"growth binding {stage}", train, [X] * 6, **growing)
    case(f"growth free {stage}", train, [[0.3, 0.4]] * 6, clip=1000.0, **growing)
    case(f"growth distclip {stage}", train, [X] * 6, **{**growing, "clip": 0.0, "clipper": {"decides": "distclip"}})
for stage in range(4):
    case(
        f"unchecked {stage}",
        train,
        [X, X, X],
        [X, NAN, X],
        stage=stage,
        precision="bf16",
        bf16={"check_grad_overflow": False},
    )
    zeroing = {"decides": "distclip", "nonfinite": "zero"}
    for sums in (None, "fp32") if stage == 1 else (None,):
        case(
            f"zeroing {stage}{' fp32 sums' if sums else ''}",
            train,
            [X, X],
            [X, NAN],
            stage=stage,
            precision="bf16",
            clip=0.0,
            sums=sums,
            clipper=zeroing,
        )
    case(f"propagating {stage}", train, [X], [NAN], stage=stage, clipper={"nonfinite": "propagate"})
    case(f"inf-norm {stage}", train, [X], stage=stage, clip=0.0, clipper={"norm_type": math.inf})
    case(
        f"unmanaged {stage}",
        train,
        [X, X10],
        stage=stage,
        managed_gradient_accumulation=False,
    )
    case(f"huge {stage}", train, [[3e38, 0.0]], stage=stage)


def stage0_fp16(scale: float | None) -> Any:
    return train([X], stage=0, precision="fp16", fp16={} if scale is None else {"loss_scale": scale})


case("stage 0 fp16", stage0_fp16, None)
case("stage 0 fp16 scale 1", stage0_fp16, 1.0)


def two_layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def two_layer_loss(model: Any) -> torch.Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    return model(x).square().mean()


def same_model() -> dict[str, Any]:
    """DDP, FSDP2 and ZeRO 0 to 3: norm, and the weights after one clipped step."""
    results: dict[str, Any] = {}
    plain = two_layers()
    for name, wrapped in (("ddp", nn.parallel.DistributedDataParallel(two_layers())), ("fsdp2", fully_shard(plain))):
        clipper = distclip.GradientClipper(wrapped, torch.optim.SGD(wrapped.parameters(), lr=1.0), max_norm=0.1)
        two_layer_loss(wrapped).backward()
        results[name] = float(clipper.step().total_norm)
    for stage in range(4):
        engine, clipper = make(stage, model=two_layers(), clip=0.1)
        engine.backward(two_layer_loss(engine))
        before = weights(engine)
        results[f"zero{stage}"] = told(clipper.step(), engine, before)["norm"]
        results[f"elements{stage}"] = sum(entry.local_numel for entry in clipper.plan.entries)
        results[f"strategy{stage}"] = clipper.plan.strategy
        engine.destroy()
    return results


case("same model", same_model)


def public_gradients(stage: int, offload: bool, precision: str) -> dict[str, Any]:
    """The norm against that of what DeepSpeed's own public call gives, which gathers each gradient."""
    model = two_layers().to(DTYPES[precision])
    engine, clipper = make(stage, precision, model=model, offload=offload)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank())).to(DTYPES[precision])
    engine.backward(engine(x).square().mean())
    measured = clipper.measure()
    squares = 0.0
    for parameter in engine.module.parameters():
        gradient = parameter.grad if stage == 0 else deepspeed.utils.safe_get_full_grad(parameter)
        squares += float(gradient.double().square().sum())
    before = weights(engine)
    stepped = told(clipper.step(), engine, before)
    engine.destroy()
    return {"measured": float(measured.total_norm), "public": math.sqrt(squares), "stepped": stepped["norm"]}


for stage in range(4):
    for precision in ("fp32", "bf16"):
        for offload in (False, True) if stage else (False,):
            case(
                f"public {stage} {precision}{' offload' if offload else ''}",
                public_gradients,
                stage,
                offload,
                precision,
            )


def state_after_skip(stage: int, decides: str) -> dict[str, Any]:
    """Optimizer state, learning rate and followers before and after a skipped step."""
    followed: list[int] = []
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    clip = 1.0 if decides == "deepspeed" else 0.0
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=configuration(stage, "fp32", clip, False, None),
    )
    clipper = distclip.GradientClipper(engine, telemetry=None, decides=decides)
    clipper.after_step(lambda: followed.append(1))
    seen = []
    for values in (X, X if dist.get_rank() == 0 else NAN, X):
        engine.backward(engine(torch.tensor([values])).sum())
        clipper.step()
        state = [
            value.double().sum().item()
            for entries in engine.basic_optimizer.state.values()
            for key, value in sorted(entries.items())
            if torch.is_tensor(value)
        ]
        seen.append([state, engine.get_lr()[0], len(followed), weights(engine).tolist()])
    engine.destroy()
    return {"seen": seen}


for stage in range(4):
    for decides in ("deepspeed", "distclip"):
        case(f"state {stage} {decides}", state_after_skip, stage, decides)


def raising(stage: int) -> dict[str, Any]:
    """The error, and a step afterwards."""
    engine, clipper = make(stage, clipper={"nonfinite": "raise"})
    x = torch.tensor([X if dist.get_rank() == 0 else NAN])
    engine.backward(engine(x).sum())
    try:
        clipper.step()
        text = "none"
    except distclip.NonfiniteGradientError as error:
        text = str(error)
    before = weights(engine)
    engine.backward(engine(torch.tensor([X])).sum())
    result = {"error": text, "after": told(clipper.step(), engine, before), "micro_steps": engine.micro_steps}
    engine.destroy()
    return result


for stage in range(4):
    case(f"raising {stage}", raising, stage)


def grouped(stage: int) -> dict[str, Any]:
    """A group with a limit of its own, which DeepSpeed does not have."""
    options = {"param_groups": {"first": distclip.ParamGroup(match="0.*", max_norm=0.01)}, "max_norm": 1e-3}
    engine, clipper = make(stage, model=two_layers(), clip=0.0, clipper=options)
    before = weights(engine)
    engine.backward(two_layer_loss(engine))
    result = told(clipper.step(), engine, before)
    moved = weights(engine) - before
    engine.destroy()
    return {**result, "moved": [float(moved[:42].norm()), float(moved[42:].norm())], "decides": clipper.decides}


for stage in range(4):
    case(f"grouped {stage}", grouped, stage)


class Recorder:
    """A sink that keeps all it gets."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.infos: list[RunInfo] = []
        self.applied = 0

    def open(self, info: RunInfo) -> None:
        self.infos.append(info)

    def record(self, record: StepRecord) -> None:
        self.records.append(record)

    def nonfinite_applied(self) -> None:
        self.applied += 1

    def phase(self, name: str) -> None: ...

    def close(self) -> None: ...


def telemetry(stage: int, nonfinite: str) -> dict[str, Any]:
    sink = Recorder()
    options = {"telemetry": sink, "nonfinite": nonfinite}
    settings = {"bf16": {"check_grad_overflow": False}}
    engine, clipper = make(stage, "bf16", clipper=options, gradient_accumulation_steps=2, **settings)
    for values in (X, X, X, X if dist.get_rank() == 0 else NAN, X, X):
        engine.backward(engine(torch.tensor([values], dtype=torch.bfloat16)).sum())
        clipper.step(loss=2.5)
    engine.destroy()
    return {
        "strategy": sink.infos[0].strategy,
        "has_optimizer": sink.infos[0].has_optimizer,
        "applied": sink.applied,
        "records": [
            {
                "step": record.step,
                "norm": record.total_norm,
                "limit": record.limit,
                "coefficient": record.clip_coefficient,
                "nan": record.nan,
                "inf": record.inf,
                "stepped": record.stepped,
                "reason": record.skip_reason,
                "elements": record.elements,
                "lr": record.learning_rate,
                "loss": record.loss,
                "culprits": sorted({(culprit.rank, culprit.parameter) for culprit in record.culprits}),
            }
            for record in sink.records
        ],
    }


for stage in range(4):
    case(f"telemetry {stage}", telemetry, stage, "skip")
case("applied", telemetry, 2, "propagate")


def warned(version: str | None = None, **options: Any) -> dict[str, Any]:
    """What is said when an engine is wrapped, or why it is refused."""
    true, error = deepspeed.__version__, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deepspeed.__version__ = version or true
        try:
            make(**options)[0].destroy()
        except (distclip.ConfigError, TypeError) as problem:
            error = str(problem)
        finally:
            deepspeed.__version__ = true
    return {
        "notes": [str(note.message) for note in caught if str(note.message).startswith("DeepSpeed: ")],
        "error": error,
    }


case("notes: none", warned, stage=2)
case("notes: missing", warned, stage=2, clip=None)
case("notes: zero", warned, stage=2, clip=0.0)
case("notes: measure only", warned, stage=2, clip=0.0, clipper={"max_norm": None})
case("notes: other", warned, stage=2, clip=0.5, clipper={"max_norm": 1.0})
case("notes: window", warned, stage=2, precision="fp16", fp16={"loss_scale_window": 1})
case("notes: static", warned, stage=2, precision="fp16", fp16={"loss_scale": 128})
case("notes: version", warned, "0.99.0", stage=2)
case("notes: twice", warned, stage=2, clipper={"decides": "distclip"})
case("notes: lacks", warned, stage=2, clipper={"decides": "deepspeed", "nonfinite": "zero"})
case("notes: offload", warned, stage=2, clip=0.0, offload=True, clipper={"nonfinite": "zero"})
case("notes: decides", warned, stage=2, clipper={"decides": "me"})


def guards() -> dict[str, Any]:
    """Each in turn: an attribute is gone, an optimizer is unknown, the place to measure is not passed."""
    said = {}
    for stage in range(4):
        engine, _ = make(stage, "bf16" if stage == 0 else "fp32")
        try:
            internals.require(engine.optimizer, *internals.inspect(engine).needs, "gone")
        except distclip.ConfigError as error:
            said[f"gone {stage}"] = str(error)
        engine.destroy()
    engine, clipper = make(2)
    engine.backward(engine(torch.tensor([X])).sum())
    said["clip_"] = _error(lambda: clipper.clip_())
    said["multiplier"] = _error(lambda: clipper.step(0.5))
    said["no pipeline"] = _error(lambda: clipper.train_batch())
    engine.is_gradient_accumulation_boundary = lambda: True
    engine.step, step = (lambda lr_kwargs=None: None), engine.step
    said["not passed"] = _error(lambda: clipper.step())
    engine.step = step
    engine.optimizer = object()
    said["unknown"] = _error(lambda: distclip.GradientClipper(engine))
    return said


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except distclip.DistclipError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


case("guards", guards)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4, bias=False)
        expert = nn.Linear(4, 4, bias=False)
        self.moe = MoE(4, expert, num_experts=2, ep_size=2, k=1, capacity_factor=4.0, min_capacity=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, _, _ = self.moe(self.dense(x))
        return output


def experts(stage: int, precision: str, decides: str) -> dict[str, Any]:
    """Dense and expert gradients by DeepSpeed's public call: dense once, experts of both ranks."""
    torch.manual_seed(0)
    model = Experts()
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )
    clip = 1.0 if decides == "deepspeed" else 0.0
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(groups, lr=1.0),
        config=configuration(stage, precision, clip, False, None),
    )
    clipper = distclip.GradientClipper(engine, telemetry=None, decides=decides)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(5 + dist.get_rank())).to(DTYPES[precision])
    engine.backward((engine(x) ** 2).sum())
    squares = torch.zeros(2, dtype=torch.float64)
    for parameter in engine.module.parameters():
        gradient = parameter.grad if stage == 0 else deepspeed.utils.safe_get_full_grad(parameter)
        squares[int(getattr(parameter, "allreduce", True) is False)] += gradient.double().square().sum()
    dist.all_reduce(squares[1:])
    before = [parameter.detach().double().clone() for parameter in engine.module.parameters()]
    result = told(clipper.step(), engine, weights(engine))
    moved = torch.zeros(2, dtype=torch.float64)
    for parameter, old in zip(engine.module.parameters(), before, strict=True):
        moved[int(getattr(parameter, "allreduce", True) is False)] += (parameter.detach().double() - old).square().sum()
    dist.all_reduce(moved[1:])
    engine.destroy()
    return {**result, "public": math.sqrt(squares.sum()), "update": math.sqrt(moved.sum()), "expert": squares.tolist()}


for stage in (0, 1, 2):
    for precision in ("fp32", "bf16"):
        for decides in ("deepspeed", "distclip"):
            if stage or decides == "distclip":
                case(f"experts {stage} {precision} {decides}", experts, stage, precision, decides)


case("experts refused", experts, 0, "fp32", "deepspeed")


class Layer(nn.Linear):
    """The same weights wherever it is made."""

    def __init__(self, index: int) -> None:
        torch.manual_seed(index)
        super().__init__(4, 4)


def pipeline(stage: int, precision: str, decides: str) -> dict[str, Any]:
    """Two stages of two layers, against the same four layers in one process."""
    network = PipelineModule(
        layers=[LayerSpec(Layer, index) for index in range(4)],
        num_stages=2,
        loss_fn=lambda output, target: (output - target).square().sum(),
        partition_method="uniform",
    )
    clip = 1.0 if decides == "deepspeed" else 0.0
    config = configuration(stage, precision, clip, False, None, train_batch_size=2, gradient_accumulation_steps=2)
    engine, *_ = deepspeed.initialize(
        model=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1), config=config
    )
    clipper = distclip.GradientClipper(engine, telemetry=None, decides=decides)
    whole = nn.Sequential(*[Layer(index) for index in range(4)])
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    norms, expected, stepped = [], [], []
    for _ in range(3):
        batch = [(torch.randn(1, 4, generator=generator), torch.randn(1, 4, generator=generator)) for _ in range(2)]
        report = clipper.train_batch(iter([(x.to(DTYPES[precision]), t.to(DTYPES[precision])) for x, t in batch]))
        optimizer.zero_grad()
        for x, target in batch:
            ((whole(x) - target).square().sum() / 2).backward()
        expected.append(float(nn.utils.clip_grad_norm_(whole.parameters(), 1.0)))
        optimizer.step()
        norms.append(float(report.total_norm))
        stepped.append(report.stepped)
    engine.destroy()
    return {"norms": norms, "expected": expected, "stepped": stepped}


for stage, precision in ((0, "fp32"), (0, "bf16"), (1, "fp32"), (1, "bf16")):
    for decides in ("deepspeed", "distclip"):
        if (stage, precision, decides) != (0, "fp32", "deepspeed"):
            case(f"pipeline {stage} {precision} {decides}", pipeline, stage, precision, decides)
case("pipeline refused", pipeline, 0, "fp32", "deepspeed")


def main(out: Path, only: str) -> None:
    # The C++ part that DeepSpeed would build here needs a compiler; without it gloo does the work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed asks the processor for fast fp16; torch computes it on any.
    get_accelerator().is_fp16_supported = lambda: True
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False, timeout=datetime.timedelta(seconds=20))
    results: dict[str, Any] = {}
    for name, function in CASES.items():
        if only in name:
            try:
                results[name] = function()
            except Exception as error:  # any error is a result, to be shown by the test that did not expect it
                results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
