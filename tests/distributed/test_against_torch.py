"""Where `torch.nn.utils.clip_grad_norm_` is right, distclip gives the same norm and the same clipped gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import distclip

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def _model(wrap: str, sizes: list[int], dtype: torch.dtype, seed: int) -> Any:
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b, bias=index % 2 == 0) for index, (a, b) in enumerate(itertools.pairwise(sizes))]
    model: Any = nn.Sequential(*layers).to(dtype)
    if wrap == "ddp":
        return DistributedDataParallel(model)
    if wrap == "fsdp2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if wrap == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    return model


def _full(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _compare(
    wrap: str, sizes: list[int], dtype_name: str, norm_type: float, max_norm: float, factor: float, seed: int
) -> tuple[float, float, float]:
    """Largest relative difference of norm and gradients, with float64 torch as the judge where dtypes round."""
    dtype = DTYPES[dtype_name]
    model = _model(wrap, sizes, dtype, seed)
    (model(torch.randn(3, sizes[0], dtype=dtype)).square().sum() * factor).backward()
    before = [_full(p.grad).double() for p in model.parameters()]
    reference = [nn.Parameter(torch.zeros_like(gradient)) for gradient in before]
    for parameter, gradient in zip(reference, before, strict=True):
        parameter.grad = gradient.clone()
    wanted = torch.nn.utils.clip_grad_norm_(reference, max_norm, norm_type)
    norm = distclip.clip_grad_norm_(model, max_norm, norm_type)
    worst = 0.0
    for parameter, other in zip(model.parameters(), reference, strict=True):
        assert other.grad is not None
        # the result cannot be closer than its own dtype allows
        rounded = other.grad.to(dtype).double()
        step = torch.finfo(dtype).eps * other.grad.abs() + torch.finfo(dtype).tiny
        difference = (_full(parameter.grad).double() - rounded).abs()
        worst = max(worst, float((difference / step).max()))
    assert norm.dtype == torch.float64
    return norm.item(), wanted.item(), worst


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wrap=st.sampled_from(["none", "ddp", "fsdp2", "hsdp"]),
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    dtype=st.sampled_from(sorted(DTYPES)),
    norm_type=st.sampled_from([1.0, 2.0, 3.0, math.inf, 0.5]),
    max_norm=st.sampled_from([1e-3, 0.3, 1.0, 17.0, 1e6]),
    factor=st.sampled_from([1.0, 1e-3, 0.0]),
    seed=st.integers(0, 2**16),
)
def test_same_norm_and_same_gradients_as_torch_in_float64(
    ranks: Any, wrap: str, sizes: list[int], dtype: str, norm_type: float, max_norm: float, factor: float, seed: int
) -> None:
    for norm, wanted, worst in ranks(
        _compare, 1 if wrap == "none" else 2, wrap, sizes, dtype, norm_type, max_norm, factor, seed
    ):
        assert math.isclose(norm, wanted, rel_tol=1e-6, abs_tol=1e-12)
        # one unit in the last place for 16-bit types; ten in float32 are 1.2e-6
        assert worst <= (1.01 if dtype in ("bfloat16", "float16") else 10)
