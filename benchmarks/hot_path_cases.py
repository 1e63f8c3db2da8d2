"""What `hot_path.py` times: gradients of a given shape and layout, and the calls that clip them.

Runs inside the processes that `hot_path.py` starts. Every case is timed interleaved, in rounds of read, distclip and
peer, so that a busy machine slows all of them alike; only ratios are to be believed. Each round starts with another of
them, because what a call finds in the caches depends on which one came before. On several ranks a round's time is that
of the slowest rank, after a barrier. What a call did to the gradients is undone after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

import distclip
from distclip.testing.collectives import count

DISTCLIP, READ = "distclip", "read"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Shapes = list[tuple[int, ...]]


def shapes_of(name: str, shrink: int) -> Shapes:
    """The gradients of a set; `shrink` makes it that much smaller."""
    if name == "GPT-2":
        width, layers = 768 // max(1, shrink // 12), max(1, 12 // shrink)
        vector, wide = (width,), (4 * width,)
        attention: Shapes = [vector, vector, (3 * width, width), (3 * width,), (width, width), vector]
        block = [*attention, vector, vector, (4 * width, width), wide, (width, 4 * width), vector]
        return [(50257 // shrink, width), (1024, width), *block * layers, vector, vector]
    count, shape = {"10 x 10M": (10, (10_000_000 // shrink,)), "3000 x 33k": (3000 // shrink, (129, 256))}.get(
        name, (3000 // shrink, (8, 8))
    )
    return [shape] * count


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    layout: str
    """plain, dtensor (sharded over the ranks), fsdp1 or scaler (plain, with a GradScaler)."""
    world: int
    name: str
    dtype: str
    clips: bool


@dataclass
class Bench:
    """Gradients and what can be done to them."""

    gradients: list[Tensor]
    """Local tensors, so that a call can be undone."""
    norm: float
    calls: Callable[[float], dict[str, Callable[[], Any]]]
    """max_norm -> name -> a call that clips and returns the norm."""
    scale: float = 1.0
    """What each call divides the gradients by, apart from clipping."""
    after: Callable[[], None] = lambda: None
    """What must follow each call; not timed."""


def run(case: Case, shrink: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round for the read and every call; the same on all ranks."""
    bench = _make(case.layout, case.name, case.dtype, shrink)
    flat = torch.ones(sum(gradient.numel() for gradient in bench.gradients), dtype=DTYPES[case.dtype])
    limit = bench.norm * (0.9 if case.clips else 1e6)
    undo = bench.scale * (1 / 0.9 if case.clips else 1.0)
    calls: dict[str, Callable[[], Any]] = {READ: lambda: flat.sum(), **bench.calls(limit)}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = [*calls.items()]
    for turn in range(rounds + 2):
        for name, call in order:
            if dist.is_initialized():
                dist.barrier()
            started = time.perf_counter()
            found = call()
            elapsed = time.perf_counter() - started
            if name != READ:
                bench.after()
                _expect(case, name, found, bench.norm)
                if undo != 1.0:
                    torch._foreach_mul_(bench.gradients, undo)
            if turn >= 2:  # the first rounds plan, touch memory and fill caches
                seconds[name].append(elapsed)
        order.append(order.pop(0))
    return slowest(seconds)


def _expect(case: Case, name: str, found: Any, norm: float) -> None:
    """A call that does not do its work would be fast: see that the norm is right, as far as torch can tell it."""
    value = float(found.full_tensor() if isinstance(found, DTensor) else found)
    if abs(value / norm - 1) > 0.02:
        raise RuntimeError(f"{name} found the norm {value} in {case}, but it is {norm}")


def slowest(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Each round's longest time over the ranks."""
    if not dist.is_initialized():
        return seconds
    table = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return dict(zip(seconds, table.tolist(), strict=True))


def first_calls(count: int) -> dict[str, list[float]]:
    """Seconds of the very first call on new DTensors, distclip's before torch's."""
    parameters = _sharded([(8, 8)] * count, torch.float32)
    seconds: dict[str, list[float]] = {}
    for name, call in ((DISTCLIP, distclip.clip_grad_norm_), ("torch", nn.utils.clip_grad_norm_)):
        dist.barrier()
        started = time.perf_counter()
        call(parameters, 1e9)
        seconds[name] = [time.perf_counter() - started]
    return slowest(seconds)


def collectives(size: int) -> int:
    """How many collectives one ordinary distclip call makes."""
    parameters = _sharded([(8, 8)] * size, torch.float32)
    distclip.clip_grad_norm_(parameters, 1e9)
    distclip.clip_grad_norm_(parameters, 1e9)
    with count() as issued:
        distclip.clip_grad_norm_(parameters, 1e9)
    return issued.total()


@lru_cache(maxsize=1)
def _make(layout: str, name: str, dtype: str, shrink: int) -> Bench:
    return _BENCHES[layout](shapes_of(name, shrink), DTYPES[dtype])


def _gradient(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    numel = torch.Size(shape).numel()
    values = torch.randn(min(numel, 1 << 16), generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values.repeat(-(-numel // max(1, len(values))))[:numel].reshape(shape).clone()


def _plain_parameters(shapes: Shapes, dtype: torch.dtype) -> list[nn.Parameter]:
    parameters = []
    for seed, shape in enumerate(shapes):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = _gradient(shape, dtype, seed)
        parameters.append(parameter)
    return parameters


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _sharded(shapes: Shapes, dtype: torch.dtype) -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = []
    for seed, (rows, *rest) in enumerate(shapes):
        size, rank = dist.get_world_size(), dist.get_rank()
        local = rows // size + (rank < rows % size)  # as torch.chunk would give them for two ranks
        whole, stride = torch.Size((rows, *rest)), torch.empty(rows, *rest, device="meta").stride()
        shards = (torch.zeros(local, *rest, dtype=dtype), _gradient((local, *rest), dtype, seed + rank))
        weight, gradient = (
            DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=whole, stride=stride) for shard in shards
        )
        parameter = nn.Parameter(weight)
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def _bench(parameters: list[nn.Parameter], gradients: list[Tensor]) -> Bench:
    def calls(limit: float) -> dict[str, Callable[[], Any]]:
        return {
            DISTCLIP: lambda: distclip.clip_grad_norm_(parameters, limit),
            "torch": lambda: nn.utils.clip_grad_norm_(parameters, limit),
        }

    return Bench(gradients, distclip.get_total_norm(parameters).item(), calls)


def _bench_plain(shapes: Shapes, dtype: torch.dtype) -> Bench:
    parameters = _plain_parameters(shapes, dtype)
    return _bench(parameters, _gradients(parameters))


def _bench_dtensor(shapes: Shapes, dtype: torch.dtype) -> Bench:
    parameters = _sharded(shapes, dtype)
    with torch.no_grad():
        return _bench(parameters, [gradient.to_local() for gradient in _gradients(parameters)])  # type: ignore[attr-defined]


def _bench_fsdp1(shapes: Shapes, dtype: torch.dtype) -> Bench:
    blocks = [shapes[:2], *(shapes[start : start + 12] for start in range(2, len(shapes) - 2, 12)), shapes[-2:]]
    cpu = torch.device("cpu")
    wrapped = [FullyShardedDataParallel(_Sum(block, dtype), device_id=cpu) for block in blocks]
    model = FullyShardedDataParallel(nn.Sequential(*wrapped), device_id=cpu)
    model(torch.zeros((), dtype=dtype)).backward()
    gradients = _gradients(list(model.parameters()))
    for seed, gradient in enumerate(gradients):
        gradient.copy_(_gradient(tuple(gradient.shape), dtype, seed + dist.get_rank()))

    def calls(limit: float) -> dict[str, Callable[[], Any]]:
        return {
            DISTCLIP: lambda: distclip.clip_grad_norm_(model, limit),
            "torch": lambda: model.clip_grad_norm_(limit),
        }

    return Bench(gradients, distclip.get_total_norm(model).item(), calls)


class _Sum(nn.Module):
    """Adds up its parameters: a gradient for each, at little cost."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def forward(self, total: Tensor) -> Tensor:
        return total + torch.stack([weight.sum() for weight in self.weights]).sum()


def _bench_scaler(shapes: Shapes, dtype: torch.dtype) -> Bench:
    parameters = _plain_parameters(shapes, dtype)
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    scale = 4.0
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1 << 30) for _ in range(2))
    for scaler in (ours, theirs):
        scaler.scale(torch.ones(()))  # as a loss would be, so that the scale exists

    def calls(limit: float) -> dict[str, Callable[[], Any]]:
        clipper = distclip.GradientClipper(parameters, optimizer, max_norm=limit, scaler=ours, telemetry=None)

        def unscale_and_clip() -> Tensor:
            theirs.unscale_(optimizer)
            return nn.utils.clip_grad_norm_(parameters, limit)

        return {DISTCLIP: lambda: clipper.clip_().total_norm, "torch": unscale_and_clip}

    def after() -> None:
        for scaler in (ours, theirs):
            if scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
                scaler.update()

    norm = distclip.get_total_norm(parameters).item() / scale
    return Bench(_gradients(parameters), norm, calls, scale, after)


_BENCHES = {"plain": _bench_plain, "dtensor": _bench_dtensor, "fsdp1": _bench_fsdp1, "scaler": _bench_scaler}
