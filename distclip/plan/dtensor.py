"""DTensor (FSDP2, HSDP, tensor parallel): which elements of a distributed tensor lie on this rank.

Everything follows from the mesh and the placements: ranks whose coordinates differ on an axis with `Shard` hold
different elements; ranks that differ only on axes with `Replicate` hold the same ones. Placements are those of the
gradient, which can differ from the parameter's: sequence parallel leaves `Partial` gradients on `Replicate`
parameters.

Private names, all in this file: FSDP2's `_fsdp_param_groups` (a list since torch 2.9, one `_fsdp_param_group`
before), whose `reduce_grads` says whether the next backward synchronises. Without it that check is left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Shard

from distclip.plan.layout import Layout


def dtensor_layout(parameter: DTensor, placements: tuple[Placement, ...]) -> Layout:
    """Layout of a DTensor whose gradient has `placements`.

    Source: `torch/distributed/tensor/placement_types.py`.
    """
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    sharded = tuple(
        coordinate[axis] if coordinate is not None and not placement.is_replicate() else None
        for axis, placement in enumerate(placements)
    )
    names = mesh.mesh_dim_names or tuple(str(axis) for axis in range(mesh.ndim))
    where = ", ".join(
        f"{name}={size}:{_short(placement)}"
        for name, size, placement in zip(names, mesh.shape, placements, strict=True)
    )
    if any(placement.is_partial() for placement in placements):
        kind = "partial"
    elif all(placement.is_replicate() for placement in placements):
        kind = "replicated"
    else:
        kind = "sharded"
    words = tuple(str(placement) for placement in placements)
    # A rank outside the mesh holds no element at all: "outside" keeps it apart from coordinate 0.
    identity = ("dtensor", tuple(mesh.shape), words, sharded if coordinate is not None else "outside")
    return Layout(kind=kind, scheme="dtensor", where=where, identity=identity)  # type: ignore[arg-type]


def local_of(tensor: Tensor) -> Tensor:
    """The local part of a DTensor (call under `no_grad`: 30 times cheaper), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fsdp2_units(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """The FSDP2 units in these modules."""
    return [unit for module in modules for unit in module.modules() if isinstance(unit, FSDPModule)]


def synchronises(unit: FSDPModule) -> bool:
    """Whether an FSDP2 unit is set to reduce gradients in backward."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return all(group is None or getattr(group, "reduce_grads", True) for group in groups)


def _short(placement: Placement) -> str:
    if placement.is_replicate():
        return "R"
    if placement.is_partial():
        return "P"
    return f"S({placement.dim})" if isinstance(placement, Shard) else str(placement)
