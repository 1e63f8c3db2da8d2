"""Partial gradients: each rank of a mesh axis has one addend of the gradient, not the gradient.

Sequence parallel leaves `Partial` gradients on `Replicate` parameters (norm layers). A norm is not linear, so addends
must be summed before they are measured: one all-reduce per mesh axis, of all such gradients together, into scratch.
`p.grad` stays Partial; multiplying every addend by the coefficient multiplies their sum.

What placements a gradient has is seen from the gradient, and a rank may have none in this step (an expert without
tokens). So the ranks of each mesh agree on them when the plan is made.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from distclip.errors import LayoutError
from distclip.plan.collectives import GroupReference, packet_device

# What a gradient's placement on one mesh axis is, as a number that a MAX over ranks can agree on.
_UNKNOWN, _AS_PARAMETER, _REPLICATE, _SUM, _AVERAGE, _OTHER, _SHARD = range(7)


@dataclass(frozen=True)
class Reduction:
    """Entries of one mesh whose gradients are Partial on the same axes; reduced together."""

    entries: tuple[int, ...]
    numels: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axes: tuple[tuple[GroupReference, float], ...]
    """For every Partial axis its process group, and what the sum is divided by (the group's size for averages)."""


def reductions_of(
    parameters: Sequence[Tensor | None], placements: Sequence[tuple[Placement, ...] | None]
) -> list[Reduction]:
    """What must be reduced before measuring, in an order that is the same on all ranks of a mesh."""
    found: dict[tuple[DeviceMesh, tuple[Placement, ...], torch.dtype, torch.device], list[int]] = defaultdict(list)
    for index, (parameter, placed) in enumerate(zip(parameters, placements, strict=True)):
        if placed is None or not isinstance(parameter, DTensor) or not any(p.is_partial() for p in placed):
            continue
        if parameter.device_mesh.get_coordinate() is None:
            continue
        partial = tuple(p if p.is_partial() else Replicate() for p in placed)
        with torch.no_grad():
            device = parameter.to_local().device
        # sums of half precision addends are made in float32
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        found[parameter.device_mesh, partial, dtype, device].append(index)
    return [
        Reduction(
            entries=tuple(indices),
            numels=tuple(_local_numel(parameters[index], placements[index]) for index in indices),
            dtype=dtype,
            device=device,
            axes=tuple(
                (GroupReference(mesh.get_group(axis)), float(mesh.size(axis)) if placement.reduce_op == "avg" else 1.0)
                for axis, placement in enumerate(partial)
                if isinstance(placement, Partial)
            ),
        )
        for (mesh, partial, dtype, device), indices in found.items()
    ]


def _local_numel(parameter: Tensor | None, placed: Sequence[Placement] | None) -> int:
    """Elements that a gradient with these placements has here; it can be sharded otherwise than its parameter."""
    assert isinstance(parameter, DTensor)
    mesh, shape = parameter.device_mesh, list(parameter.shape)
    for placement, at, size in zip(placed or (), mesh.get_coordinate() or (), mesh.shape, strict=True):
        if isinstance(placement, Shard):
            chunk = -(-shape[placement.dim] // size)
            shape[placement.dim] = max(0, min(chunk, shape[placement.dim] - chunk * at))
        elif not (placement.is_replicate() or placement.is_partial()):
            with torch.no_grad():  # strided shards: always those of the parameter
                return parameter.to_local().numel()
    return math.prod(shape)


def reduce_partials(reductions: Sequence[Reduction], local: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """Sum the addends of all ranks: entry -> flat scratch with the true gradient of this rank's elements.

    Collective over the mesh axes concerned. A rank without a gradient adds zeros.
    """
    result: dict[int, Tensor] = {}
    for reduction in reductions:
        scratch = torch.zeros(sum(reduction.numels), dtype=reduction.dtype, device=reduction.device)
        parts = torch.split(scratch, list(reduction.numels))
        for part, index in zip(parts, reduction.entries, strict=True):
            gradient = local[index]
            if gradient is not None and gradient.numel() == part.numel():
                part.copy_(gradient.reshape(-1))
        for group, divisor in reduction.axes:
            # over the ranks of one mesh axis, each with one addend
            dist.all_reduce(scratch, group=group.get())
            if divisor != 1.0:
                # by real parts, because an infinite complex number over a real one is torch's inf + nan j
                (torch.view_as_real(scratch) if scratch.is_complex() else scratch).div_(divisor)
        # Every rank of the mesh holds the sum, also one whose own addend was missing.
        result.update(zip(reduction.entries, parts, strict=True))
    return result


def placements_differ(parameter: Tensor) -> bool:
    """Whether this parameter has a gradient here whose placements are not the parameter's."""
    gradient = parameter.grad
    return (
        isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements
    )


def agree_placements(parameters: Sequence[Tensor], names: Sequence[str]) -> list[tuple[Placement, ...] | None]:
    """The placements of every gradient, known on all ranks of its mesh even where a rank has no gradient now.

    Collective over the axes of every mesh, in the order in which meshes first appear; None for plain tensors. Only
    called when some rank has a gradient with other placements than its parameter.

    Raises:
        LayoutError: ranks have different placements for one gradient, or a Partial that is neither sum nor average.
    """
    by_mesh: dict[DeviceMesh, list[int]] = defaultdict(list)
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            by_mesh[parameter.device_mesh].append(index)
    result: list[tuple[Placement, ...] | None] = [None] * len(parameters)
    for mesh, indices in by_mesh.items():
        if mesh.get_coordinate() is None:
            for index in indices:
                result[index] = _placements_of(parameters[index])
            continue
        rows = torch.tensor([_codes(parameters[index], mesh.ndim) for index in indices], dtype=torch.int64)
        # largest and, negated, smallest known code of every axis: over each mesh axis in turn, so over the whole mesh
        both = torch.stack([rows, torch.where(rows == _UNKNOWN, -(1 << 40), -rows)]).to(
            packet_device(mesh.get_group(0))
        )
        for axis in range(mesh.ndim):
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
        largest, smallest = both[0].tolist(), (-both[1]).tolist()
        for position, index in enumerate(indices):
            if any(high != low for high, low in zip(largest[position], smallest[position], strict=True) if high):
                raise LayoutError(f"the gradient of {names[index]!r} has different placements on the ranks of its mesh")
            result[index] = _placed(parameters[index], largest[position], names[index])
    return result


def _placements_of(parameter: Tensor) -> tuple[Placement, ...]:
    assert isinstance(parameter, DTensor)
    return parameter.placements


def _codes(parameter: Tensor, ndim: int) -> list[int]:
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return [_UNKNOWN] * ndim
    return [
        _AS_PARAMETER if mine == own else _code(mine)
        for mine, own in zip(gradient.placements, _placements_of(parameter), strict=True)
    ]


def _code(placement: Placement) -> int:
    if isinstance(placement, Partial):
        return {"sum": _SUM, "avg": _AVERAGE}.get(placement.reduce_op, _OTHER)
    if isinstance(placement, Shard):
        return _SHARD + placement.dim
    return _REPLICATE if placement.is_replicate() else _OTHER


def _placed(parameter: Tensor, codes: Sequence[int], name: str) -> tuple[Placement, ...]:
    placements: list[Placement] = []
    for code, own in zip(codes, _placements_of(parameter), strict=True):
        if code in (_UNKNOWN, _AS_PARAMETER):
            placements.append(own)
        elif code >= _SHARD:
            placements.append(Shard(code - _SHARD))
        elif code in (_SUM, _AVERAGE):
            placements.append(Partial("sum" if code == _SUM else "avg"))
        elif code == _REPLICATE:
            placements.append(Replicate())
        else:
            raise LayoutError(
                f"the gradient of {name!r} has a placement that distclip does not know; redistribute it to the "
                "parameter's placements first"
            )
    return tuple(placements)
