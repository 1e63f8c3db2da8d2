"""Checks of what users pass, shared by the functions and the clipper. Each error names the argument and the way out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from distclip.errors import ConfigError
from distclip.plan.groups import DEFAULT, ParamGroup

NonfiniteMode = Literal["skip", "raise", "zero", "propagate"]


def check_max_norm(max_norm: Any) -> float:
    """A limit: a number > 0; inf never clips."""
    value = _number("max_norm", max_norm)
    if math.isnan(value) or value <= 0.0:
        raise ConfigError(
            f"max_norm must be > 0 (inf never clips), not {value:g}; get_total_norm or max_norm=None only measures"
        )
    return value


def check_norm_type(norm_type: Any) -> float:
    """The p of a p-norm: a number > 0, or inf."""
    value = float("inf") if norm_type == "inf" else _number("norm_type", norm_type)
    if math.isnan(value) or value <= 0.0:
        raise ConfigError(f"norm_type must be > 0 or inf, not {value:g}; 2.0 is the usual L2 norm")
    return value


def check_nonfinite(mode: Any) -> NonfiniteMode:
    """What to do with nan and inf."""
    if mode not in get_args(NonfiniteMode):
        known = ", ".join(repr(name) for name in get_args(NonfiniteMode))
        raise ConfigError(f"nonfinite must be one of {known}, not {mode!r}")
    return mode  # type: ignore[no-any-return]


def check_multiplier(multiplier: Any) -> float:
    """A factor of all gradients: a finite number > 0."""
    value = _number("grad_multiplier", multiplier)
    if not math.isfinite(value) or value <= 0.0:
        raise ConfigError(f"grad_multiplier must be finite and > 0, not {value:g}")
    return value


def check_count(name: str, count: Any) -> int:
    """A whole number >= 0."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ConfigError(f"{name} must be a whole number >= 0, not {count!r}")
    return count


def check_param_groups(groups: Any) -> dict[str, float]:
    """The limits of the param groups that have one."""
    if groups is None or callable(groups):
        return {}
    if not isinstance(groups, Mapping):
        raise TypeError(
            f"param_groups must map names to ParamGroup, or be a function of a parameter's name, not {groups!r}"
        )
    limits = {}
    for key, group in groups.items():
        if not isinstance(key, str) or not isinstance(group, ParamGroup):
            raise TypeError(
                f"param_groups must map names to ParamGroup(match=..., max_norm=...), not {key!r}: {group!r}"
            )
        patterns = [group.match] if isinstance(group.match, str) else group.match
        if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"param group {key!r}: match takes a pattern or several, not {group.match!r}")
        if not patterns:
            raise ConfigError(f"param group {key!r}: match names no pattern, so the group would be empty")
        if key == DEFAULT:
            raise ConfigError(f"param group {DEFAULT!r} is the name of what no group claims: its limit is max_norm")
        if group.max_norm is not None:
            limits[key] = check_max_norm(group.max_norm)
    return limits


def check_clip_value(value: Any) -> float:
    """A bound of absolute values: a number >= 0."""
    bound = _number("clip_value", value)
    if math.isnan(bound) or bound < 0.0:
        raise ConfigError(f"clip_value must be >= 0, not {bound:g}")
    return bound


def check_telemetry(telemetry: Any) -> None:
    """ "auto", None, or something to hand records to."""
    if telemetry not in ("auto", None) and not callable(getattr(telemetry, "record", None)):
        raise ConfigError(f"telemetry must be 'auto', None or a Sink, not {telemetry!r}")


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}") from None
