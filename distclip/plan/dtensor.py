"""DTensor (FSDP2, HSDP, tensor parallel): which elements of a distributed tensor lie on this rank.

Everything follows from the mesh and the placements: ranks whose coordinates differ on an axis with `Shard` hold
different elements; ranks that differ only on axes with `Replicate` hold the same ones. Placements are those of the
gradient, which can differ from the parameter's: sequence parallel leaves `Partial` gradients on `Replicate`
parameters.

Tensor parallel inside DDP (`DistributedDataParallel(model, device_mesh=mesh["dp"])`) makes plain parameters of local
parts, on which torch leaves mesh and placements; and from the first forward on the module has DTensors made of them in
their place, which are no parameters any more.

Private names, all in this file: `_st_info` (torch/distributed/tensor/parallel/ddp.py, torch 2.3 to 2.13) with its
`DTensorSpec`, and DDP's `_module_parameters` (torch 1.11 to 2.13), for what is said above; `AsyncCollectiveTensor`
(torch 2.0 to 2.13); and FSDP2's `_fsdp_param_groups` (a list since torch 2.9, one `_fsdp_param_group` before), whose
`reduce_grads` says whether the next backward synchronises; without it that check is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.parallel import DistributedDataParallel

from distclip.plan.layout import Kind, Layout


def dtensor_layout(mesh: DeviceMesh, placements: Sequence[Placement]) -> Layout:
    """Layout of a DTensor on `mesh` whose gradient has `placements`.

    Source: `torch/distributed/tensor/placement_types.py`.
    """
    coordinate = mesh.get_coordinate()
    # Addends of a Partial axis are summed before they are measured (plan/partial.py): every rank then has the sum.
    whole = [placement.is_replicate() or placement.is_partial() for placement in placements]
    names = mesh.mesh_dim_names or tuple(str(axis) for axis in range(mesh.ndim))
    where = ", ".join(
        f"{name}={size}:{_short(placement)}"
        for name, size, placement in zip(names, mesh.shape, placements, strict=True)
    )
    kind: Kind = "replicated" if all(whole) else "sharded"
    if any(placement.is_partial() for placement in placements):
        kind = "partial"
    family = (
        "dtensor",
        tuple(mesh.shape),
        tuple("whole" if is_whole else str(p) for p, is_whole in zip(placements, whole, strict=True)),
    )
    if coordinate is None:  # this rank is outside the mesh and holds no element at all
        return Layout(kind, "dtensor", where, family, ("outside",))
    place = tuple(-1 if is_whole else at for at, is_whole in zip(coordinate, whole, strict=True))
    return Layout(kind, "dtensor", where, family, place, tuple(mesh.mesh.flatten().tolist()))


def local_of(tensor: Tensor) -> Tensor:
    """The local part of a DTensor (call under `no_grad`: 30 times cheaper), or the tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    # the result of a collective that is still under way, as tensor parallel can leave it
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def spec_of(parameter: Tensor) -> DTensorSpec | None:
    """Mesh and placements of a plain parameter that is the local part of a DTensor, as DDP makes them."""
    spec = getattr(parameter, "_st_info", None)
    return spec if isinstance(spec, DTensorSpec) else None


def hidden_by(wrapper: DistributedDataParallel) -> list[Tensor]:
    """Local parts of DTensors among DDP's parameters, which the wrapped module may not show as parameters."""
    if not hasattr(wrapper, "device_mesh"):
        return []
    return [parameter for parameter in getattr(wrapper, "_module_parameters", ()) if spec_of(parameter) is not None]


def hidden_in(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and local part of the DTensors that stand in the place of a module's parameters."""
    for name, value in vars(module).items():
        if isinstance(value, DTensor) and value.grad_fn is not None:
            part = getattr(value.grad_fn.next_functions[0][0], "variable", None)
            if isinstance(part, Tensor) and spec_of(part) is not None:
                yield name, part


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
