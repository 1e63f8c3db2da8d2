"""Stage 0: every rank has all gradients and steps all of them."""

# ruff: noqa: D102 - what the kinds override is documented once, in Inside

from __future__ import annotations

import contextlib
import glob
import importlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from distclip.errors import ConfigError
from distclip.integrations.deepspeed.internals.base import Inside, Slot, shadowed


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
