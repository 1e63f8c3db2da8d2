"""What `distclip check` compares with: the norm of gathered gradients, and what torch's own function would say.

The reference shares nothing with distclip's plan. Every gradient is gathered in full over its own mesh or FSDP1 group
(`distclip.testing.oracle`) and measured in float64; then all ranks put the norms of all gradients side by side, by
name. What several ranks have under one name and with one norm is one tensor; what is declared as owned is one per rank.

Memory: DTensors are gathered one at a time, a model of FSDP1 as a whole, into host memory, by every rank.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.nn.parallel import DistributedDataParallel

from distclip.plan.collectives import gather_objects, resolve
from distclip.plan.fingerprint import structure_of
from distclip.testing import oracle

TOLERANCE = 1e-5
"""Relative difference up to which two norms are the same."""

Named = tuple[str, Tensor]
Source = Sequence[nn.Module] | Sequence[Named]


@dataclass(frozen=True)
class Reference:
    """The norm of all gathered gradients, the same on every rank."""

    norm: float
    gradients: int
    """How many tensors it is made of, over all ranks."""
    differing: tuple[str, ...]
    """Parameters that are not owned, and whose gradient nevertheless differs between ranks."""


@dataclass(frozen=True)
class _Part:
    """One gradient as this rank sees it after gathering."""

    name: str
    shape: tuple[int, ...]
    norm: float
    scope: tuple[int, ...]
    """The ranks that own it together, where it is declared as owned."""
    may_differ: bool
    """Whether other ranks may have other tensors under this name."""


def same(one: float, other: float) -> bool:
    """Whether two norms agree: to `TOLERANCE`, or both nan, or both inf."""
    return math.isclose(one, other, rel_tol=TOLERANCE) or (math.isnan(one) and math.isnan(other))


def reference(source: Source, owned: Sequence[str], p: float) -> Reference:
    """Gather and measure the gradients of `source`, a list of modules or of (name, parameter) pairs, on all ranks.

    Collective over all ranks. Gradients are only read.

    Example (a single process):
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> reference([("weight", weight)], owned=[], p=2.0).norm
        5.0
    """
    parts = list(_parts(source, owned, p))
    found: dict[tuple[object, ...], list[_Part]] = defaultdict(list)
    for part in (part for parts_of_rank in gather_objects(parts, resolve(None)) for part in parts_of_rank):
        copies = found[part.name, part.shape, part.scope]
        if not any(same(part.norm, known.norm) for known in copies):
            copies.append(part)
    norms = [part.norm for copies in found.values() for part in copies]
    return Reference(
        norm=oracle.norm([np.array(norms)], p),
        gradients=len(norms),
        differing=tuple(
            dict.fromkeys(copies[0].name for copies in found.values() if len(copies) > 1 and not copies[0].may_differ)
        ),
    )


def _parts(source: Source, owned: Sequence[str], p: float) -> Iterator[_Part]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    pairs: list[Named] = []
    for item in source:
        if isinstance(item, nn.Module):
            if any(isinstance(module, FullyShardedDataParallel) for module in item.modules()):
                yield from _fsdp1_parts(item, owned, p, rank)
            else:
                inner = item.module if isinstance(item, DistributedDataParallel) else item
                pairs += [(_plain(name), parameter) for name, parameter in inner.named_parameters()]
                pairs += _split_by_ddp(inner) if inner is not item else ()
        else:
            pairs.append(item)
    pairs = list({id(parameter): (name, parameter) for name, parameter in pairs}.values())
    placements = _placements_on_all_ranks(pairs)
    for key, (name, parameter) in zip(_keys(pairs), pairs, strict=True):
        scope: tuple[int, ...] = (rank,) if _is_declared(name, owned) else ()
        if isinstance(parameter, DTensor):
            if parameter.device_mesh.get_coordinate() is None:
                continue  # this rank is outside the mesh
            mesh = tuple(parameter.device_mesh.mesh.flatten().tolist())
            present = [placed for peer in mesh if (placed := placements[peer].get(key)) is not None]
            if not present:
                continue
            if parameter.grad is None:
                parameter = _with_zeros(parameter, present[0])
            scope = mesh if scope else ()
        gradient = oracle.gather_full_gradient(parameter)
        if gradient is not None:
            may_differ = bool(scope) or _is_marked(parameter)
            yield _Part(name, gradient.shape, oracle.norm([gradient], p), scope, may_differ)


def _split_by_ddp(model: nn.Module) -> Iterator[Named]:
    """DTensors that DDP put in the place of parameters after a forward; their gradients are in the plain local parts.

    As they are no parameters any more, each is told as a stand-in with the gradient.
    """
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, DTensor) and value.grad_fn is not None:
                local = value.grad_fn.next_functions[0][0].variable.grad  # type: ignore[union-attr]
                stand_in = value.detach()
                if local is not None:
                    stand_in.grad = DTensor.from_local(
                        local,
                        value.device_mesh,
                        value.placements,
                        run_check=False,
                        shape=value.shape,
                        stride=value.stride(),
                    )
                yield _plain(f"{prefix}.{name}" if prefix else name), stand_in


def _fsdp1_parts(model: nn.Module, owned: Sequence[str], p: float, rank: int) -> Iterator[_Part]:
    """All of a model that holds FSDP1 units; what they do not manage is plain."""
    plain = {
        _plain(name): parameter
        for name, parameter in model.named_parameters()
        if not getattr(parameter, "_fsdp_flattened", False)
    }
    for name, gradient in oracle.gather_full_gradients(model).items():
        declared = _is_declared(name, owned)
        # of parts that a unit manages every rank of its group has the whole, and other groups have others
        scope = (rank,) if declared and name in plain else ()
        may_differ = declared or _is_marked(plain.get(name))
        yield _Part(name, gradient.shape, oracle.norm([gradient], p), scope, may_differ)


def _is_declared(name: str, owned: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in owned)


def _is_marked(parameter: Tensor | None) -> bool:
    """Whether it carries the mark of Megatron-LM and DeepSpeed on experts, whose copies nothing names."""
    return getattr(parameter, "allreduce", True) is False


def _keys(pairs: Iterable[Named]) -> Iterator[tuple[str, int]]:
    """Names, told apart where several modules have the same."""
    seen: Counter[str] = Counter()
    for name, _ in pairs:
        seen[name] += 1
        yield name, seen[name]


def _placements_on_all_ranks(pairs: Sequence[Named]) -> list[dict[tuple[str, int], tuple[Placement, ...]]]:
    """For every rank, the placements of those gradients that are DTensors.

    Gathering is a collective of the mesh, so a rank without a gradient must know that the others have one.
    """
    mine = {
        key: parameter.grad.placements
        for key, (_, parameter) in zip(_keys(pairs), pairs, strict=True)
        if isinstance(parameter.grad, DTensor)
    }
    return gather_objects(mine, resolve(None))


def _with_zeros(parameter: DTensor, placements: tuple[Placement, ...]) -> Tensor:
    """A stand-in for a parameter without a gradient here, whose gradient is 0 with these placements."""
    mesh, shape = parameter.device_mesh, parameter.shape
    whole = [Replicate() if placement.is_partial() else placement for placement in placements]
    with torch.no_grad():
        zeros = dtensor.zeros(shape, dtype=parameter.dtype, device_mesh=mesh, placements=whole)
        stand_in = torch.zeros_like(parameter)
        stand_in.grad = DTensor.from_local(
            zeros.to_local(), mesh, placements, run_check=False, shape=shape, stride=zeros.stride()
        )
    return stand_in


def _plain(name: str) -> str:
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name


def torch_says(gradients: Sequence[Tensor], p: float, norm: float) -> str:
    """What `torch.nn.utils.get_total_norm` makes of these gradients on each rank, in words; `norm` is the right one.

    Collective over all ranks. It is asked only where its own collectives are sure to match on all ranks of each mesh.
    """
    group = resolve(None)
    described = [_described(gradient) for gradient in gradients]
    peers = sorted({rank for gradient in gradients if isinstance(gradient, DTensor) for rank in _ranks_of(gradient)})
    plans = gather_objects((structure_of(described), peers), group)
    empty = math.isinf(p) and any(_local(gradient).numel() == 0 for gradient in gradients)
    if any(plans[peer][0] != signature for signature, peers in plans for peer in peers):
        return "not asked: ranks of one mesh have different gradients, so its collectives would not match"
    if any(gather_objects(empty, group)):
        return "not asked: a shard is empty somewhere, where its inf-norm raises while other ranks wait"
    try:
        total = torch.nn.utils.get_total_norm(list(gradients), p)
        said: float | str = (total.full_tensor() if isinstance(total, DTensor) else total).item()
    except Exception as error:
        # Whatever it raises is the finding.
        said = f"raises {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return _in_words(gather_objects(said, group), norm)


def _described(gradient: Tensor) -> tuple[object, ...]:
    """What decides which collectives torch issues for it."""
    placed = (gradient.placements, gradient.device_mesh.shape) if isinstance(gradient, DTensor) else ()
    return str(placed), tuple(gradient.shape), gradient.dtype


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _ranks_of(gradient: DTensor) -> list[int]:
    ranks: list[int] = gradient.device_mesh.mesh.flatten().tolist()
    return ranks


def _in_words(said: Sequence[float | str], norm: float) -> str:
    texts = {f"{value:.9g}" if isinstance(value, float) else value for value in said}
    shown = ", ".join(
        f"{value:.9g} on rank {rank}" if isinstance(value, float) else f"{value} on rank {rank}"
        for rank, value in enumerate(said[:4])
    ) + (", ..." if len(said) > 4 else "")
    numbers = [value for value in said if isinstance(value, float)]
    if len(numbers) < len(said):
        return texts.pop() if len(texts) == 1 else shown
    if all(same(number, norm) for number in numbers):
        return f"{numbers[0]:.9g}, the same"
    if all(same(number, numbers[0]) for number in numbers):
        return f"{numbers[0]:.9g}: wrong"
    return f"wrong: not the same on every rank ({shown}), so each would clip by another factor"
