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
from torch import Tensor
from torch.distributed.tensor import DTensor

SMALLEST = 2.0**-100
"""Factors below this are multiplied in, in two steps: 1 / factor would leave float32."""

_WITH_DTENSOR = (torch.optim.Adam, torch.optim.AdamW)
"""Fused SGD and Adagrad have no sharding strategy and raise on DTensor parameters when `grad_scale` is set."""


def foldable(optimizer: torch.optim.Optimizer) -> str | None:
    """None if the factor can ride on this optimizer's step, else why not."""
    name = type(optimizer).__name__
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or not is_fused(optimizer):
        return f"{name} is not fused: only torch.optim.Adam, AdamW, SGD and Adagrad with fused=True read grad_scale"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor) and not isinstance(optimizer, _WITH_DTENSOR):
                return f"fused {name} cannot take grad_scale for DTensor parameters"
            if parameter.device.type == "cpu" and parameter.dtype in (torch.float16, torch.bfloat16):
                return f"on CPU the fused kernels of {name} round grad_scale to {parameter.dtype}"
    return None


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its next step is a fused one: loading a state takes over the flag that was saved with it."""
    return all(group.get("fused") for group in optimizer.param_groups)


@contextlib.contextmanager
def folded(optimizer: torch.optim.Optimizer, factor: float | Tensor, *, closed: Tensor | None = None) -> Iterator[None]:
    """Within the block, `optimizer.step()` uses its gradients multiplied by `factor` (not 0, at least 2^-100).

    With `closed`, a bool [], the kernels look at it themselves: where it is true nothing is written, Adam's step count
    included. Neither is waited for if it lies on the device.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> weight.grad = torch.ones(1)
        >>> optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
        >>> with folded(optimizer, 0.25):
        ...     optimizer.step()
        >>> weight.item(), weight.grad.item()
        (-0.25, 0.25)
        >>> with folded(optimizer, 0.25, closed=torch.tensor(True)):
        ...     optimizer.step()
        >>> weight.item()
        -0.25
    """
    device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
    divisor = (1.0 / torch.as_tensor(factor, dtype=torch.float64)).to(device)
    attributes = {"grad_scale": divisor.to(torch.float32)}
    if closed is not None:
        attributes["found_inf"] = closed.to(device, torch.float32)  # exactly 0 or 1: the kernels test == 1
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in attributes:
            # GradScaler.step() deletes them too
            if hasattr(optimizer, name):
                delattr(optimizer, name)


def has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every parameter with a gradient has the momentum that its step will use.

    Fused SGD makes the buffer in its first step and leaves it uninitialised when `found_inf` is set there: that step
    must be known to be good.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    return all(
        optimizer.state[parameter].get("momentum_buffer") is not None
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for parameter in group["params"]
        if parameter.grad is not None
    )
