"""Stage 3: every rank has and steps its partition of each parameter."""

# ruff: noqa: D102 - what the kinds override is documented once, in Inside

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from distclip.errors import ConfigError
from distclip.integrations.deepspeed.internals.base import Inside, Slot, no_gradients, shadowed


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
