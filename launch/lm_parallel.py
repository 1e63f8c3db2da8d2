"""Where the ranks of `train_lm.py` run, and how its model is spread over them.

One place for everything that differs between a laptop and a cluster: the process group, the wrapper (`--wrap`), the
number format (`--precision`) and the gradient scaler that goes with both. The training loop sees a module, two context
managers and maybe a scaler.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

WRAPS = ("none", "ddp", "fsdp1", "fsdp2", "hsdp", "zero0", "zero1", "zero2", "zero3")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Place:
    """This process among all ranks."""

    rank: int
    world_size: int
    device: torch.device


def expected_ranks() -> int | None:
    """How many ranks there will be, known before they meet; None for a process that was started by hand."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None


def wrap_problem(kind: str, replicate: int, ranks: int | None) -> str | None:
    """Why the model cannot be spread in this way over that many ranks, and what to do; None where it can."""
    if kind == "none" and (ranks or 1) > 1:
        return f"--wrap: none is for a single process, not for {ranks} ranks; use {', '.join(WRAPS[1:])}"
    if kind != "none" and ranks is None:
        return f"--wrap: {kind} needs ranks: start with torchrun --nproc-per-node 2 train_lm.py --wrap {kind}"
    if kind == "hsdp" and ranks is not None and ranks % replicate:
        return f"--replicate: {replicate} does not divide the {ranks} ranks"
    return None


@contextlib.contextmanager
def started() -> Iterator[Place]:
    """Join torchrun's other ranks (NCCL on CUDA, gloo on CPU), or be a run of one process when started by hand.

    A process group that exists already is used, and left alone at the end.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    ours = "RANK" in os.environ and not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        if dist.is_initialized():
            yield Place(dist.get_rank(), dist.get_world_size(), device)
        else:
            yield Place(0, 1, device)
    finally:
        if ours:
            # gloo's threads need Python's lock to let go of the last collective's tensors: without this pause a process
            # that ends at once may abort (torch 2.13, most often with DeepSpeed, which keeps the group)
            time.sleep(0.3)
            dist.destroy_process_group()


def wrap(
    model: nn.Module, parts: type[nn.Module], kind: str, precision: str, replicate: int, place: Place
) -> nn.Module:
    """Spread the model over the ranks; FSDP gathers the modules of class `parts` one by one."""
    model.to(place.device)
    if kind == "none":
        return model
    dtype = DTYPES[precision]
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({parts}),
            mixed_precision=None
            if precision == "fp32"
            else MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32),
            device_id=place.device,
            use_orig_params=True,
        )
    policy = MixedPrecisionPolicy() if precision == "fp32" else MixedPrecisionPolicy(dtype, torch.float32)
    mesh = hsdp_mesh(replicate, place) if kind == "hsdp" else init_device_mesh(place.device.type, (place.world_size,))
    for module in model.modules():
        if isinstance(module, parts):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def hsdp_mesh(replicate: int, place: Place) -> DeviceMesh:
    """`replicate` copies of the model, each sharded over the rest of the ranks."""
    shape = (replicate, place.world_size // replicate)
    return init_device_mesh(place.device.type, shape, mesh_dim_names=("replicate", "shard"))


def is_zero(kind: str) -> bool:
    """Whether DeepSpeed is to hold the model (see `lm_deepspeed.py`)."""
    return kind.startswith("zero")


def computing(kind: str, precision: str, place: Place) -> contextlib.AbstractContextManager[object]:
    """Around forward: autocast where the wrapper does not choose the number format itself (FSDP and DeepSpeed do)."""
    if precision == "fp32" or kind not in ("none", "ddp"):
        return contextlib.nullcontext()
    return torch.autocast(place.device.type, DTYPES[precision])


def make_scaler(kind: str, precision: str, place: Place) -> torch.amp.GradScaler | None:
    """fp16 gradients underflow unless the loss is scaled up first; the other formats have the range."""
    if precision != "fp16" or is_zero(kind):
        return None  # DeepSpeed scales by itself
    if kind == "fsdp1":
        return ShardedGradScaler(place.device.type)
    return torch.amp.GradScaler(place.device.type)


@contextlib.contextmanager
def synchronising(model: nn.Module, last: bool) -> Iterator[None]:
    """Around forward and backward of one micro-batch: ranks exchange gradients only in the last of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    elif isinstance(model, DistributedDataParallel | FullyShardedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield
