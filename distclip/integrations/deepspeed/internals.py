"""Where DeepSpeed keeps its gradients, its loss scale and its way to skip a step: the one file with private names.

DeepSpeed has public calls for gradients (`safe_get_full_grad`, `safe_get_local_grad`), but they copy every gradient to
float32, the first with a collective for each parameter, and there is none that skips a step, that sees gradients right
before the optimizer where the caller owns the accumulation boundary, or that tells the scale a backward used. So this
file reads attributes. They are those of DeepSpeed 0.19.8; each class lists what it needs and `inspect` fails with a
clear error where one is gone. tests/integrations/ runs all of it against the real DeepSpeed.

An engine's optimizer is one of five things, by stage and number format:

    stage 0, fp32             the plain torch optimizer                          `Whole`
    stage 0, bf16 or fp16     FP16_Optimizer, FP16_UnfusedOptimizer              `WholeHalf`
    stage 1, bf16 with fp32   BF16_Optimizer: all gradients on all ranks, each   `Flat`
      accumulation            rank steps its partition
    stages 1 and 2            DeepSpeedZeroOptimizer                             `Partitions`
    stage 3                   DeepSpeedZeroOptimizer_Stage3                      `ParameterPartitions`

Source: deepspeed/runtime/engine.py, bf16_optimizer.py, fp16/, zero/stage_1_and_2.py, zero/stage3.py.
"""

# ruff: noqa: D102 - what the five kinds override is documented once, in Inside

from __future__ import annotations

import contextlib
import glob
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distclip.errors import ConfigError

TESTED = "0.19.8"
"""The version of DeepSpeed that the tests use."""


@dataclass(frozen=True)
class Slot:
    """A run of elements of one parameter whose gradient this rank steps; each element of the model is in one slot."""

    name: str
    numel: int
    dtype: torch.dtype
    """Of the gradient."""
    device: torch.device


class Inside(ABC):
    """One engine's gradients and its way to step, as this rank sees them."""

    needs: tuple[str, ...] = ()
    """Attributes of the optimizer that this class reads."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        require(self.optimizer, *self.needs)
        self.names = {id(parameter): name for name, parameter in engine.module.named_parameters()}

    @abstractmethod
    def slots(self) -> list[Slot]:
        """What this rank steps, in a fixed order; [] where it steps whole parameters through their `.grad`."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """The gradient of each slot, 1-d, as it lies in DeepSpeed's buffers: writing to it changes the step."""

    def everything(self) -> list[Tensor]:
        """All that DeepSpeed looks at before it steps: the gradients, and copies of those that other ranks step."""
        return self.gradients()

    @property
    def written(self) -> dict[str, Any]:
        """DeepSpeed's configuration as the user wrote it."""
        return dict(self.engine._config._param_dict)

    @property
    def clips_apart(self) -> str | None:
        """What makes DeepSpeed clip the ranks by different norms, if anything does."""
        return None

    @property
    def offloaded(self) -> bool:
        """Whether DeepSpeed has taken norms and overflow of gradients already when they were moved to the CPU."""
        return False

    @property
    def loss_scale(self) -> float:
        """The factor in the gradients: what backward multiplied the loss by."""
        return float(self.optimizer.loss_scale)

    @abstractmethod
    def skipping(self) -> contextlib.AbstractContextManager[None]:
        """Within the block DeepSpeed's optimizer step skips as it does on overflow: scale, buffers and counters."""

    @contextlib.contextmanager
    def scale_updated_afterwards(self) -> Iterator[None]:
        """Within the block the loss scale stays what backward used; DeepSpeed's update of it follows at the end.

        DeepSpeed updates the scale first and then divides gradients that carry the old scale by the new one: wherever
        the scale grows, the step is off by the growth factor.
        """
        if not hasattr(self.optimizer, "_update_scale"):
            yield
            return
        overflows: list[bool] = []
        with shadowed(self.optimizer, "_update_scale", overflows.append):
            yield
        for overflow in overflows:
            self.optimizer._update_scale(overflow)


class Whole(Inside):
    """Stage 0 in fp32: DeepSpeed averages `.grad` of whole parameters, like DDP, and calls the plain optimizer."""

    def slots(self) -> list[Slot]:
        return []

    def gradients(self) -> list[Tensor]:
        return []

    def parameters(self) -> list[tuple[str, Any]]:
        """All parameters of this rank with their names."""
        return [
            (name, parameter)
            for name, parameter in self.engine.module.named_parameters()
            # held by another pipeline stage too, which counts it
            if not getattr(parameter, "ds_pipe_replicated", False)
        ]

    def groups(self) -> dict[str, Any]:
        """Pattern -> group over which copies are the same, for parameters that not all ranks have: experts, stages."""
        found = {}
        for name, parameter in self.parameters():
            if getattr(parameter, "allreduce", True) is False:
                experts = importlib.import_module("deepspeed.utils.groups")
                found[glob.escape(name)] = experts._get_expert_data_parallel_group(parameter.group_name)
            elif self.engine.pipeline_parallelism:
                found[glob.escape(name)] = self.engine.mpu.get_data_parallel_group()
        return found

    @property
    def loss_scale(self) -> float:
        return 1.0

    @property
    def clips_apart(self) -> str | None:
        if self.engine.has_moe_layers:
            return "experts"
        return "pipeline stages" if self.engine.pipeline_parallelism else None

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        # The engine asks its optimizer for `overflow` to know whether it stepped; a torch optimizer has no such thing.
        with shadowed(self.optimizer, "step", lambda closure=None: None), shadowed(self.optimizer, "overflow", True):
            yield


class WholeHalf(Whole):
    """Stage 0 in bf16 or fp16: whole parameters too, and master weights in fp32."""

    needs = ("_skip_invalid_grad_norm", "loss_scale_config", "overflow")

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        scale = self.optimizer.loss_scale_config
        if scale.use_grad_scaling and (scale.dynamic_loss_scale or scale.cur_scale != 1.0):
            raise ConfigError(
                "ZeRO stage 0 with fp16: DeepSpeed's backward does not scale the loss, yet its step divides by the "
                f'scale (now {scale.cur_scale:g}), so every update would be too small by that. Set "fp16.loss_scale" '
                'to 1, or use "bf16", or "zero_optimization.stage" 1'
            )

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        def skip(closure: Any = None) -> Any:
            return self.optimizer._skip_invalid_grad_norm()

        with shadowed(self.optimizer, "step", skip):
            yield


class Flat(Inside):
    """Stage 1 in bf16 with fp32 accumulation: every rank has all averaged gradients and steps its part of them."""

    needs = (
        "bf16_groups",
        "bf16_groups_flat",
        "real_dp_process_group",
        "fp32_groups_gradients",
        "fp32_groups_gradients_flat",
        "clear_hp_grads",
        "clear_lp_grads",
    )

    def slots(self) -> list[Slot]:
        return [
            Slot(self.names[id(parameter)], length, whole.dtype, whole.device)
            for parameter, whole, _, length in self._parts()
        ]

    def gradients(self) -> list[Tensor]:
        return [whole.view(-1).narrow(0, start, length) for _, whole, start, length in self._parts()]

    def everything(self) -> list[Tensor]:
        return list(self.optimizer.fp32_groups_gradients_flat)

    @property
    def loss_scale(self) -> float:
        return 1.0

    def _parts(self) -> Iterator[tuple[Any, Tensor, int, int]]:
        """(parameter, its whole gradient, where this rank's part starts, how long it is)."""
        optimizer = self.optimizer
        for index, parameters in enumerate(optimizer.bf16_groups):
            group = optimizer.real_dp_process_group[index]
            size = optimizer.bf16_groups_flat[index].numel() // dist.get_world_size(group)
            mine, offset = dist.get_rank(group) * size, 0
            for parameter, whole in zip(parameters, optimizer.fp32_groups_gradients[index], strict=True):
                first, last = max(offset, mine), min(offset + whole.numel(), mine + size)
                if first < last and not getattr(parameter, "ds_pipe_replicated", False):
                    yield parameter, whole, first - offset, last - first
                offset += whole.numel()

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        def skip(closure: Any = None) -> None:
            self.optimizer.overflow = True
            self.optimizer._global_grad_norm = float("inf")
            self.optimizer.clear_hp_grads()
            self.optimizer.clear_lp_grads()

        with shadowed(self.optimizer, "step", skip):
            yield


class Partitions(Inside):
    """Stages 1 and 2: the parameters of a group laid end to end and cut into one partition for each rank."""

    needs = (
        "params_in_partition",
        "real_dp_process_group",
        "partition_size",
        "grad_start_offset",
        "grad_partition_insertion_offset",
        "get_param_id",
        "gradient_accumulation_dtype",
        "averaged_gradients",
        "cpu_offload",
        "single_partition_of_fp32_groups",
        "check_overflow",
        "check_grad_overflow",
        "_update_scale",
        "_wait_for_offload_copies",
    )

    def slots(self) -> list[Slot]:
        result = []
        for index, parameter, _, _, length in self._parts():
            flat = self.optimizer.single_partition_of_fp32_groups[index]
            dtype = flat.dtype if self.offloaded else self.optimizer.gradient_accumulation_dtype
            device = flat.device if self.offloaded else parameter.device
            result.append(Slot(self.names[id(parameter)], length, dtype, device))
        return result

    def gradients(self) -> list[Tensor]:
        if self.offloaded:
            self.optimizer._wait_for_offload_copies()
        result: list[Tensor] = []
        for index, _, position, offset, length in self._parts():
            if self.offloaded:
                flat = self.optimizer.single_partition_of_fp32_groups[index].grad
                result.append(flat.view(-1).narrow(0, offset, length))
            else:
                result.append(self._averaged(index)[position].view(-1))
        return result

    @property
    def offloaded(self) -> bool:
        return bool(self.optimizer.cpu_offload)

    def _averaged(self, index: int) -> list[Tensor]:
        """Gradients of one group, in the order of `params_in_partition`, without the zeros that fill up partitions."""
        tensors = self.optimizer.averaged_gradients.get(index)
        if tensors is None:
            raise no_gradients()
        return [tensor for tensor in tensors if not getattr(tensor, "_zero_padding", False)]

    def _parts(self) -> Iterator[tuple[int, Any, int, int, int]]:
        """(group, parameter, its position in the group, where it lies in this rank's partition, how long it is)."""
        optimizer = self.optimizer
        for index, parameters in enumerate(optimizer.params_in_partition):
            rank = dist.get_rank(optimizer.real_dp_process_group[index])
            starts = optimizer.grad_start_offset[index][rank]
            offsets = optimizer.grad_partition_insertion_offset[index][rank]
            for position, parameter in enumerate(parameters):
                key = optimizer.get_param_id(parameter)
                room = int(optimizer.partition_size[index]) - int(offsets[key])
                length = min(parameter.numel() - int(starts[key]), room)
                if length > 0 and not getattr(parameter, "ds_pipe_replicated", False):
                    yield index, parameter, position, int(offsets[key]), length

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        def overflow(partition_gradients: bool = True) -> None:
            self.optimizer.overflow = True

        # bf16 with check_grad_overflow off and fp32 do not check at all unless told to.
        with (
            shadowed(self.optimizer, "check_overflow", overflow),
            shadowed(self.optimizer, "check_grad_overflow", True),
        ):
            yield
        if self.offloaded:
            # DeepSpeed forgets this where gradients are accumulated in fp32, and the nan stays in all later sums.
            for index in self.optimizer.averaged_gradients:
                self.optimizer.averaged_gradients[index] = None


class ParameterPartitions(Inside):
    """Stage 3: each parameter cut into one partition for each rank, the last ones filled up."""

    needs = (
        "fp16_groups",
        "grad_position",
        "get_param_id",
        "gradient_accumulation_dtype",
        "averaged_gradients",
        "offload_optimizer",
        "fp32_partitioned_groups_flat",
        "_get_param_partition_rank",
        "_overflow_check_and_loss_scale_update",
        "_update_scale",
    )

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        if getattr(self.optimizer, "swap_optimizer", False):
            raise ConfigError(
                '"zero_optimization.offload_optimizer.device": "nvme": the gradients are on disk when distclip is to '
                'measure; use "cpu"'
            )

    def slots(self) -> list[Slot]:
        result = []
        for index, _, parameter, length in self._parts():
            flat = self.optimizer.fp32_partitioned_groups_flat[index]
            dtype = flat.dtype if self.offloaded else self.optimizer.gradient_accumulation_dtype
            device = flat.device if self.offloaded else self._on_accelerator(parameter)
            result.append(Slot(self.names[id(parameter)], length, dtype, device))
        return result

    def gradients(self) -> list[Tensor]:
        optimizer = self.optimizer
        result: list[Tensor] = []
        for index, position, parameter, length in self._parts():
            if self.offloaded:
                group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                result.append(optimizer.fp32_partitioned_groups_flat[group].grad.narrow(0, offset, length))
            elif optimizer.averaged_gradients.get(index) is None:
                raise no_gradients()
            else:
                result.append(optimizer.averaged_gradients[index][position].view(-1).narrow(0, 0, length))
        return result

    @property
    def offloaded(self) -> bool:
        return bool(self.optimizer.offload_optimizer)

    def _on_accelerator(self, parameter: Any) -> torch.device:
        return torch.device(self.engine.device)

    def _parts(self) -> Iterator[tuple[int, int, Any, int]]:
        """(sub-group, position in it, parameter, elements of it here without filling)."""
        for index, parameters in enumerate(self.optimizer.fp16_groups):
            for position, parameter in enumerate(parameters):
                size = int(parameter.partition_numel())
                left = int(parameter.ds_numel) - size * int(self.optimizer._get_param_partition_rank(parameter))
                if parameter.requires_grad and min(size, left) > 0:
                    yield index, position, parameter, min(size, left)

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        def overflow(update_scale: bool = True) -> bool:
            self.optimizer.overflow = True
            return True

        with shadowed(self.optimizer, "_overflow_check_and_loss_scale_update", overflow):
            yield


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


@contextlib.contextmanager
def shadowed(target: Any, name: str, value: Any) -> Iterator[None]:
    """Within the block the attribute `name` of this one object is `value`."""
    own = vars(target)
    had, before = name in own, own.get(name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if had:
            setattr(target, name, before)
        else:
            delattr(target, name)


def no_gradients() -> ConfigError:
    """What to raise where DeepSpeed has no averaged gradients."""
    return ConfigError(
        "DeepSpeed has no averaged gradients now: measure() works between the last backward of a step and step()"
    )


def require(target: Any, *names: str) -> None:
    """Fail loudly where an attribute that this file reads is gone.

    Raises:
        ConfigError: names what is missing and the version.
    """
    missing = [name for name in names if not hasattr(target, name)]
    if missing:
        raise ConfigError(
            f"DeepSpeed {version()}: {type(target).__name__} has no {', '.join(missing)}, which distclip reads (it was "
            f"tested with {TESTED}); use that version, or a distclip that knows this one"
        )


def version() -> str:
    """The version of DeepSpeed in use."""
    return str(importlib.import_module("deepspeed").__version__)
