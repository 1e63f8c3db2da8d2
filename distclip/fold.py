"""Fold the clip factor into a fused optimizer's own step, so that clipping costs no pass over the gradients.

The fused kernels of Adam, AdamW, SGD and Adagrad divide every gradient by `optimizer.grad_scale` (a 0-d float32 tensor)
while they read it; GradScaler unscales that way. Setting it to 1 / factor gives the same step as multiplying first, to
float32 rounding. The kernels write the divided gradient back, so `.grad` holds raw gradients before the step and
clipped ones after it.

Source: torch/optim/_multi_tensor and fused kernels; `_step_supports_amp_scaling` (torch 2.0 to 2.13) marks optimizers
that read `grad_scale`; it is private and used in this file only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

SMALLEST = 2.0**-100
"""Factors below this are multiplied in, in two steps: 1 / factor would leave float32."""

_WITH_DTENSOR = (torch.optim.Adam, torch.optim.AdamW)
"""Fused SGD and Adagrad have no sharding strategy and raise on DTensor parameters when `grad_scale` is set."""


def foldable(optimizer: torch.optim.Optimizer) -> str | None:
    """None if the factor can ride on this optimizer's step, else why not."""
    name = type(optimizer).__name__
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or not all(
        group.get("fused") for group in optimizer.param_groups
    ):
        return f"{name} is not fused: only torch.optim.Adam, AdamW, SGD and Adagrad with fused=True read grad_scale"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor) and not isinstance(optimizer, _WITH_DTENSOR):
                return f"fused {name} cannot take grad_scale for DTensor parameters"
            if parameter.device.type == "cpu" and parameter.dtype in (torch.float16, torch.bfloat16):
                return f"on CPU the fused kernels of {name} round grad_scale to {parameter.dtype}"
    return None


@contextlib.contextmanager
def folded(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Within the block, `optimizer.step()` uses its gradients multiplied by `factor` (not 0, at least 2^-100).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> weight.grad = torch.ones(1)
        >>> optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
        >>> with folded(optimizer, 0.25):
        ...     optimizer.step()
        >>> weight.item(), weight.grad.item()
        (-0.25, 0.25)
    """
    device = optimizer.param_groups[0]["params"][0].device
    optimizer.grad_scale = torch.tensor(1.0 / factor, dtype=torch.float32, device=device)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        # GradScaler.step() deletes it too
        if hasattr(optimizer, "grad_scale"):
            del optimizer.grad_scale
