"""Stages 1 and 2, and bf16 with fp32 accumulation: every rank steps its partition of flat buffers of gradients."""

# ruff: noqa: D102 - what the kinds override is documented once, in Inside

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distclip.integrations.deepspeed.internals.base import Inside, Slot, no_gradients, shadowed


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
