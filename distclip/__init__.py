"""distclip: correct gradient clipping for distributed PyTorch.

Between `loss.backward()` and `optimizer.step()`: measure the gradients of the whole model however they are laid out,
bring all ranks to one decision, carry it out, and report what happened.

    functions   `clip_grad_norm_`, `get_total_norm`, `clip_grad_value_`: the shape of torch.nn.utils
    class       `GradientClipper` and its `StepReport`: clip, step or skip, with and without GradScaler
    telemetry   `phase`: tells that no steps are due
    errors      `DistclipError` and what derives from it

Names are imported on first use, so that the `distclip` command answers without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distclip.clipper import GradientClipper
    from distclip.errors import AgreementError, ConfigError, DistclipError, LayoutError, NonfiniteGradientError
    from distclip.functional import clip_grad_norm_, clip_grad_value_, get_total_norm
    from distclip.plan.groups import ParamGroup
    from distclip.report import GroupReport, HostReport, StepReport
    from distclip.reporter import phase

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "ConfigError",
    "DistclipError",
    "GradientClipper",
    "GroupReport",
    "HostReport",
    "LayoutError",
    "NonfiniteGradientError",
    "ParamGroup",
    "StepReport",
    "clip_grad_norm_",
    "clip_grad_value_",
    "get_total_norm",
    "phase",
]

_MODULES = {
    "GradientClipper": "clipper",
    "StepReport": "report",
    "GroupReport": "report",
    "HostReport": "report",
    "ParamGroup": "plan.groups",
    "clip_grad_norm_": "functional",
    "clip_grad_value_": "functional",
    "get_total_norm": "functional",
    "phase": "reporter",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'distclip' has no attribute {name!r}")
    return getattr(importlib.import_module(f"distclip.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
