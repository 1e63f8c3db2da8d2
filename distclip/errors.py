"""The errors a user of distclip can meet.

All derive from `DistclipError`. An error that concerns the whole run is raised with the same text on every rank,
so that a log of any rank tells the story.
"""

from __future__ import annotations


class DistclipError(Exception):
    """Base class of every error that distclip raises on purpose."""


class ConfigError(DistclipError, ValueError):
    """An argument, flag, environment variable or file is wrong; the text names it and says what to do."""


def for_all_ranks(error: Exception) -> Exception:
    """`error` as one that every rank can raise: what a user's function raised may be of a class that others lack."""
    if isinstance(error, (DistclipError, TypeError)):
        return error
    told = ConfigError(f"{type(error).__name__}: {error}")
    told.__cause__ = error
    return told


class LayoutError(DistclipError, RuntimeError):
    """It is not clear who holds which gradient, so no norm would be right; the text names the parameter or rank."""


class AgreementError(DistclipError, RuntimeError):
    """The ranks did not come together: one did not arrive, or they disagree about loss scale, limit or model."""


class NonfiniteGradientError(DistclipError, RuntimeError):
    """A gradient holds nan or inf and `nonfinite="raise"` (or the limit of consecutive skips) was asked for.

    The text names ranks, parameters, nan or inf and how many elements, and is the same on every rank.
    """
