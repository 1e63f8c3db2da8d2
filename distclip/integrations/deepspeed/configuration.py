"""What in DeepSpeed's configuration makes clipping something else than the user asked for.

Every text names the key to change. Read through the engine's public getters.
"""

from __future__ import annotations

from typing import Any, Literal

from distclip.errors import ConfigError
from distclip.integrations.deepspeed.internals import TESTED, Inside, version

Decides = Literal["deepspeed", "distclip"]

SHORT_WINDOW = 100
"""Steps; a loss scale that doubles more often than this overflows, and skips a step, about as often."""


def check(
    inside: Inside, max_norm: float | None, decides: Decides, nonfinite: str, norm_type: float, grouped: bool
) -> list[str]:
    """Return a warning for each thing worth one.

    Raises:
        ConfigError: what was asked for cannot be had with this configuration.
    """
    engine = inside.engine
    limit = float(engine.gradient_clipping())
    if decides == "distclip":
        if limit > 0:
            how = f"is {limit:g}" if "gradient_clipping" in inside.written else f"is missing, which means {limit:g},"
            raise ConfigError(
                f'"gradient_clipping" {how} in DeepSpeed\'s configuration, but distclip is to clip here: set it to 0, '
                "or gradients would be clipped twice"
            )
        if nonfinite == "zero" and inside.offloaded:
            raise ConfigError(
                'nonfinite="zero" does not work with "zero_optimization.offload_optimizer": DeepSpeed looks for nan '
                'while it moves gradients to the CPU, before distclip can change them; use nonfinite="skip"'
            )
        return [*_about_scale(engine), *_about_version()]
    if nonfinite == "zero" or norm_type != 2.0 or grouped:
        raise ConfigError(
            'DeepSpeed clips by the 2-norm of everything and knows no nonfinite="zero" and no param_groups=: pass '
            'decides="distclip"'
        )
    if limit > 0 and inside.clips_apart:
        raise ConfigError(
            f"ZeRO stage 0 with {inside.clips_apart}: DeepSpeed clips by norms without what other ranks hold. Set "
            '"gradient_clipping" to 0 and pass decides="distclip", or use "zero_optimization.stage" 1'
        )
    return [*_about_limit(inside, limit, max_norm), *_about_scale(engine), *_about_version()]


def _about_limit(inside: Inside, limit: float, max_norm: float | None) -> list[str]:
    if "gradient_clipping" not in inside.written:
        means = f"DeepSpeed {version()} then clips to {limit:g}" if limit > 0 else "nothing is clipped"
        return [f'"gradient_clipping" is missing from DeepSpeed\'s configuration, so {means}: say what you mean']
    if limit <= 0:
        if max_norm is None or max_norm == float("inf"):
            return []
        return [
            f'max_norm={max_norm:g}, but "gradient_clipping" is 0 in DeepSpeed\'s configuration, so nothing is '
            f'clipped: set it to {max_norm:g}, or pass decides="distclip"'
        ]
    if max_norm is None or abs(limit - max_norm) > 1e-9 * limit:
        return [
            f'"gradient_clipping" is {limit:g} in DeepSpeed\'s configuration, but max_norm={max_norm}: DeepSpeed '
            f"clips, so {limit:g} holds"
        ]
    return []


def _about_scale(engine: Any) -> list[str]:
    if not engine.fp16_enabled():
        return []
    if not engine.dynamic_loss_scale():
        return [
            f'"fp16.loss_scale" is {float(engine.loss_scale()):g}, so the scale never adapts: steps that overflow are '
            "skipped, and so may be all that follow; 0 makes it dynamic"
        ]
    window = int((engine.dynamic_loss_scale_args() or {}).get("scale_window", 1000))
    if window < SHORT_WINDOW:
        return [
            f'"fp16.loss_scale_window" is {window}: the loss scale doubles after every {window} good steps, so it '
            "overflows and skips a step about that often; 1000 is usual"
        ]
    return []


def _about_version() -> list[str]:
    if version() == TESTED:
        return []
    return [f"deepspeed=={version()} is not the version that distclip was tested with, which is deepspeed=={TESTED}"]
