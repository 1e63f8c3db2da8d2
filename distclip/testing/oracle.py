"""The truth to compare with: full gradients as numpy arrays in float64, their norm and what clipping makes of them.

    gradients = oracle.gather_full_gradients(model)             # a collective: call it on every rank
    assert total == pytest.approx(oracle.norm(gradients.values(), 2.0))
    wanted = oracle.clipped(gradients, max_norm=1.0, p=2.0)

Nothing here is fast, and nothing here is shared with the code under test: every rank holds every element of the model,
sums are plain float64. The gradients themselves are only read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

Array = npt.NDArray[Any]
"""float64, or complex128 for a complex gradient."""

EPSILON = 1e-6
"""Added to the norm before dividing, as torch does."""

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def gather_full_gradients(model: nn.Module) -> dict[str, Array]:
    """The whole gradient of every parameter that has one on any rank, on every rank, by the parameter's plain name.

    Works for a module on its own, DDP, FSDP1 (every strategy, `use_orig_params` both ways, nested), FSDP2, and anything
    else made of DTensors. A parameter that is a plain tensor is taken as it is on this rank. Names are those of the
    model before it was wrapped. Tied parameters appear once, under their first name.

    Collective over the groups of FSDP1 modules and over the meshes of DTensors. Raises `ValueError` for an FSDP1
    gradient that was not reduced (`no_sync`).
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    gradients: dict[str, Array] = {}
    flattened: set[int] = set()
    for name, module in model.named_modules():
        handle = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if handle is not None:
            prefix = _plain(f"{name}." if name else "")
            gradients.update({prefix + _plain(key): value for key, value in _fsdp1_gradients(handle).items()})
            flattened.update(map(id, handle.flat_param._params or ()), {id(handle.flat_param)})
    for name, parameter in model.named_parameters():
        if id(parameter) not in flattened:
            gradient = gather_full_gradient(parameter)
            if gradient is not None:
                gradients[_plain(name)] = gradient
    return gradients


def gather_full_gradient(parameter: Tensor) -> Array | None:
    """The whole gradient of one parameter: of a DTensor with any placements (Partial too), or of a plain tensor.

    None where there is no gradient. A collective over the mesh of a DTensor. Addends of a Partial gradient are added in
    float64. Raises `ValueError` for a parameter of FSDP1, which does not know where its shard belongs.
    """
    if getattr(parameter, "_fsdp_flattened", False):
        raise ValueError("this is a parameter of FSDP1: give the module to gather_full_gradients")
    gradient = parameter.grad
    if gradient is None:
        return None
    with torch.no_grad():
        if isinstance(gradient, DTensor):
            local = _wide(gradient.to_local())
            gradient = DTensor.from_local(
                local,
                gradient.device_mesh,
                gradient.placements,
                run_check=False,
                shape=gradient.shape,
                stride=gradient.stride(),
            ).full_tensor()
        return _array(gradient)


def norm(gradients: Iterable[Array], p: float) -> float:
    """The p-norm over all elements of all arrays: nan if any is nan, else inf if any is inf, 0.0 if there are none.

    `p` is any number above 0, or inf for the largest absolute value; of a complex number the absolute value counts.
    """
    if not p > 0:
        raise ValueError(f"p is {p}, must be above 0")
    arrays = [array.ravel() for array in gradients]
    if any(np.isnan(array).any() for array in arrays):
        return float("nan")
    largest = max((float(np.abs(array).max()) for array in arrays if array.size), default=0.0)
    if largest == 0.0 or np.isinf(largest) or np.isinf(p):
        return largest
    # Relative to the largest no power overflows, and what underflows does not matter.
    powers = sum(float(np.sum((np.abs(array) / largest) ** p)) for array in arrays)
    return largest * float(powers ** (1.0 / p))


def coefficient(total_norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied with: min(1, max_norm / (total_norm + 1e-6)); 1 if max_norm is inf."""
    if np.isinf(max_norm):
        return 1.0
    return float(np.minimum(1.0, max_norm / (total_norm + EPSILON)))


@overload
def clipped(gradients: Mapping[str, Array], max_norm: float, p: float) -> dict[str, Array]: ...
@overload
def clipped(gradients: Iterable[Array], max_norm: float, p: float) -> list[Array]: ...
def clipped(
    gradients: Mapping[str, Array] | Iterable[Array], max_norm: float, p: float
) -> dict[str, Array] | list[Array]:
    """New arrays: all gradients multiplied with the `coefficient` of their common norm. A mapping stays a mapping."""
    if isinstance(gradients, Mapping):
        return dict(zip(gradients, clipped(gradients.values(), max_norm, p), strict=True))
    arrays = list(gradients)
    factor = coefficient(norm(arrays, p), max_norm)
    return [array * factor for array in arrays]


def _fsdp1_gradients(handle: Any) -> dict[str, Array]:
    """The gradients of one flat parameter of FSDP1, by name within its module.

    Shards are all-gathered over the handle's group and cut by FSDP's own bookkeeping. With `use_orig_params` the
    gradients of the original parameters are what counts, because they are what an optimizer sees.
    """
    flat = handle.flat_param
    group = handle.process_group
    names = list(flat._fqns)
    if not handle.uses_sharded_strategy and handle._use_orig_params:
        found = {name: p.grad for name, p in zip(names, flat._params, strict=True)}
        return {name: _array(gradient) for name, gradient in found.items() if gradient is not None}
    present: list[bool]
    if handle._use_orig_params:
        local, present = _shard_of_original_gradients(flat)
    else:
        if flat.grad is not None and flat.grad.shape != flat.shape:
            raise ValueError(f"the gradient of {names} is {tuple(flat.grad.shape)}, not a shard {tuple(flat.shape)}")
        local = _wide(torch.zeros_like(flat) if flat.grad is None else flat.grad).cpu()
        present = [flat.grad is not None] * len(names)
    if not handle.uses_sharded_strategy:
        whole = local
    else:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, (local, present), group=group)
        whole = torch.cat([part for part, _ in parts])[: flat._unpadded_unsharded_size.numel()]
        present = [any(flags) for flags in zip(*(flags for _, flags in parts), strict=True)]
    views = handle._get_unflat_views(whole)
    return {name: _array(view) for name, view, has in zip(names, views, present, strict=True) if has}


def _shard_of_original_gradients(flat: Any) -> tuple[Tensor, list[bool]]:
    """This rank's shard of a flat gradient, put together from the gradients that `use_orig_params` shows."""
    local = _wide(torch.zeros(flat._sharded_size, dtype=flat.dtype))
    present = []
    for parameter, where in zip(flat._params, flat._shard_param_infos, strict=True):
        gradient = parameter.grad
        if gradient is not None and where.in_shard:
            if gradient.numel() != where.numel_in_shard:
                raise ValueError(f"a gradient has {gradient.numel()} elements, its shard has {where.numel_in_shard}")
            start = where.offset_in_shard
            local[start : start + where.numel_in_shard] = _wide(gradient).cpu().flatten()
        present.append(gradient is not None and where.in_shard)
    return local, present


def _wide(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _array(tensor: Tensor) -> Array:
    array: Array = _wide(tensor).cpu().resolve_conj().numpy().copy()
    return array


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
