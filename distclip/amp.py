"""GradScaler: the scale that backward used, and one commit decision for all ranks and optimizers.

torch's scaler decides per rank and per optimizer whether to step. distclip measures the scaled gradients, folds
1/scale into the clip coefficient, and then tells the scaler the *agreed* found_inf as if it had unscaled itself: its
`step()` and `update()` then come to the same result on every rank.

Private names, all in this file: `_scale` and `_per_optimizer_states` of `torch.amp.GradScaler`
(torch/amp/grad_scaler.py, torch 2.3 to 2.13; FSDP1's `ShardedGradScaler` inherits them) and its `OptState`.
`check_scaler` fails loudly where one is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from distclip.errors import ConfigError


def check_scaler(scaler: Any) -> GradScaler | None:
    """Return the scaler if it scales at all; None for no scaler or `enabled=False`.

    Raises:
        ConfigError: not a GradScaler, or one of a torch version whose inner state distclip does not know.
    """
    if scaler is None:
        return None
    if not isinstance(scaler, GradScaler):
        raise ConfigError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")
    if not scaler.is_enabled():
        return None
    for name in ("_scale", "_per_optimizer_states"):
        if not hasattr(scaler, name):
            raise ConfigError(
                f"torch {torch.__version__}: GradScaler has no {name}, which distclip needs to bring all ranks to one "
                "decision; use a version of distclip that knows this torch"
            )
    return scaler


def scale_in_use(scaler: GradScaler) -> float | Tensor:
    """The scale that the last backward used: a 0-d float32 tensor, or the initial scale if `scale()` never ran.

    It is the current scale as long as `update()` has not run since.
    """
    return scaler._scale if scaler._scale is not None else float(scaler.get_scale())


def already_unscaled(scaler: GradScaler, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether the caller has called `scaler.unscale_` for these optimizers since the last update.

    Raises:
        ConfigError: for some of them only, or one has stepped already.
    """
    stages = [_stage(scaler, optimizer) for optimizer in optimizers]
    if OptState.STEPPED in stages:
        raise ConfigError(
            "scaler.step(optimizer) has already run in this step: clip between backward() and scaler.step(), and call "
            "scaler.update() once at the end"
        )
    unscaled = [stage is OptState.UNSCALED for stage in stages]
    if any(unscaled) and not all(unscaled):
        raise ConfigError(
            "scaler.unscale_ was called for some of the optimizers only: call it for all that share this norm, or for "
            "none and let distclip unscale"
        )
    return any(unscaled)


def _stage(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> OptState:
    state = scaler._per_optimizer_states.get(id(optimizer))
    stage = OptState.READY if state is None else state["stage"]
    assert isinstance(stage, OptState)
    return stage


def record_decision(
    scaler: GradScaler, optimizers: Sequence[torch.optim.Optimizer], found_inf: Tensor, device: torch.device
) -> None:
    """Tell the scaler that these optimizers' gradients are unscaled, and the agreed `found_inf` (bool [])."""
    if scaler._scale is None:
        # This rank has not scaled any loss in this run (a pipeline stage without the loss): update() needs the tensor.
        scaler.scale(torch.ones((), device=device))
    assert scaler._scale is not None
    target = scaler._scale.device
    for optimizer in optimizers:
        state = scaler._per_optimizer_states[id(optimizer)]
        # A tensor of its own for every optimizer: update() adds them up in place. Exactly 0 or 1: kernels test == 1.
        state["found_inf_per_device"] = {target: found_inf.to(device=target, dtype=torch.float32).clone()}
        state["stage"] = OptState.UNSCALED
