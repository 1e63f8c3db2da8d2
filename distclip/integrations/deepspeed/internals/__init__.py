"""Where DeepSpeed keeps its gradients, its loss scale and its way to skip a step: the one folder with private names.

DeepSpeed has public calls for gradients (`safe_get_full_grad`, `safe_get_local_grad`), but they copy every gradient to
float32, the first with a collective for each parameter, and there is none that skips a step, that sees gradients right
before the optimizer where the caller owns the accumulation boundary, or that tells the scale a backward used. So this
folder reads attributes. They are those of DeepSpeed 0.19.8; each class lists what it needs and `inspect` fails with a
clear error where one is gone. tests/integrations/ runs all of it against the real DeepSpeed.

An engine's optimizer is one of five things, by stage and number format; whole.py, partitions.py and parameters.py have
them:

    stage 0, fp32             the plain torch optimizer                          `Whole`
    stage 0, bf16 or fp16     FP16_Optimizer, FP16_UnfusedOptimizer              `WholeHalf`
    stage 1, bf16 with fp32   BF16_Optimizer: all gradients on all ranks, each   `Flat`
      accumulation            rank steps its partition
    stages 1 and 2            DeepSpeedZeroOptimizer                             `Partitions`
    stage 3                   DeepSpeedZeroOptimizer_Stage3                      `ParameterPartitions`

Source: deepspeed/runtime/engine.py, bf16_optimizer.py, fp16/, zero/stage_1_and_2.py, zero/stage3.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from distclip.errors import ConfigError
from distclip.integrations.deepspeed.internals.base import (
    TESTED,
    Inside,
    Slot,
    require,
    shadowed,
    version,
)
from distclip.integrations.deepspeed.internals.parameters import ParameterPartitions
from distclip.integrations.deepspeed.internals.partitions import Flat, Partitions
from distclip.integrations.deepspeed.internals.whole import Whole, WholeHalf

__all__ = ["TESTED", "Inside", "Slot", "Whole", "before_optimizer", "inspect", "require", "version"]

_KINDS: dict[str, type[Inside]] = {
    "FP16_Optimizer": WholeHalf,
    "FP16_UnfusedOptimizer": WholeHalf,
    "BF16_Optimizer": Flat,
    "DeepSpeedZeroOptimizer": Partitions,
    "DeepSpeedZeroOptimizer_Stage3": ParameterPartitions,
}


def inspect(engine: Any) -> Inside:
    """Look into an engine.

    Raises:
        ConfigError: DeepSpeed is used in a way, or is of a version, that distclip does not know; says which.
    """
    require(engine, "_take_model_step", "_config", "basic_optimizer", "enable_backward_allreduce", "has_moe_layers")
    optimizer = engine.optimizer
    kind = _KINDS.get(type(optimizer).__name__)
    if kind is None and isinstance(optimizer, torch.optim.Optimizer):
        kind = Whole
    if kind is None:
        raise ConfigError(
            f"DeepSpeed's {type(optimizer).__name__} is not one that distclip can look into: it knows ZeRO stages 0 to "
            "3 with torch's or DeepSpeed's own Adam, AdamW and the like"
        )
    if not engine.enable_backward_allreduce and not engine.pipeline_parallelism:
        raise ConfigError(
            f"{type(engine.basic_optimizer).__name__} does not average gradients before it steps (1-bit optimizers "
            "compress them instead), so there is no gradient of the whole run to measure"
        )
    if any(getattr(parameter, "use_muon", False) for parameter in engine.module.parameters()):
        raise ConfigError(
            "with Muon DeepSpeed clips the orthogonalised update, not the gradient; distclip cannot measure"
        )
    if engine.mpu is not None and _model_parallel_size(engine.mpu) > 1:
        raise ConfigError("DeepSpeed with tensor parallelism (mpu) is not supported: only data, expert and pipeline")
    if getattr(engine, "torch_autocast_z0_gradscaler", None) is not None:
        raise ConfigError('"torch_autocast" with fp16 in stage 0 is not supported: use "fp16", "bf16" or stage 1')
    return kind(engine)


def _model_parallel_size(mpu: Any) -> int:
    for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return 1


@contextlib.contextmanager
def before_optimizer(engine: Any, call: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Within the block the engine, when it is about to take a step, calls `call(take_the_step)` instead.

    That is the one moment where gradients are complete in every mode of accumulation and in the pipeline engine, which
    never calls `engine.step()`, and not yet clipped.
    """
    original = engine._take_model_step
    with shadowed(engine, "_take_model_step", lambda lr_kwargs=None: call(lambda: original(lr_kwargs))):
        yield
