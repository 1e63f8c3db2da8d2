"""What the kinds of engine have in common, and how private names of DeepSpeed are read: with a check and a version."""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distclip.errors import ConfigError

TESTED = "0.19.8"
"""The version of DeepSpeed that the tests use."""


@dataclass(frozen=True)
class Slot:
    """A run of elements of one parameter whose gradient this rank steps; each element of the model is in one slot."""

    name: str
    numel: int
    dtype: torch.dtype
    """Of the gradient."""
    device: torch.device


class Inside(ABC):
    """One engine's gradients and its way to step, as this rank sees them."""

    needs: tuple[str, ...] = ()
    """Attributes of the optimizer that this class reads."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        require(self.optimizer, *self.needs)
        self.names = {id(parameter): name for name, parameter in engine.module.named_parameters()}

    @abstractmethod
    def slots(self) -> list[Slot]:
        """What this rank steps, in a fixed order; [] where it steps whole parameters through their `.grad`."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """The gradient of each slot, 1-d, as it lies in DeepSpeed's buffers: writing to it changes the step."""

    def everything(self) -> list[Tensor]:
        """All that DeepSpeed looks at before it steps: the gradients, and copies of those that other ranks step."""
        return self.gradients()

    @property
    def written(self) -> dict[str, Any]:
        """DeepSpeed's configuration as the user wrote it."""
        return dict(self.engine._config._param_dict)

    @property
    def clips_apart(self) -> str | None:
        """What makes DeepSpeed clip the ranks by different norms, if anything does."""
        return None

    @property
    def offloaded(self) -> bool:
        """Whether DeepSpeed has taken norms and overflow of gradients already when they were moved to the CPU."""
        return False

    @property
    def loss_scale(self) -> float:
        """The factor in the gradients: what backward multiplied the loss by."""
        return float(self.optimizer.loss_scale)

    @abstractmethod
    def skipping(self) -> contextlib.AbstractContextManager[None]:
        """Within the block DeepSpeed's optimizer step skips as it does on overflow: scale, buffers and counters."""

    @contextlib.contextmanager
    def scale_updated_afterwards(self) -> Iterator[None]:
        """Within the block the loss scale stays what backward used; DeepSpeed's update of it follows at the end.

        DeepSpeed updates the scale first and then divides gradients that carry the old scale by the new one: wherever
        the scale grows, the step is off by the growth factor.
        """
        if not hasattr(self.optimizer, "_update_scale"):
            yield
            return
        overflows: list[bool] = []
        with shadowed(self.optimizer, "_update_scale", overflows.append):
            yield
        for overflow in overflows:
            self.optimizer._update_scale(overflow)


@contextlib.contextmanager
def shadowed(target: Any, name: str, value: Any) -> Iterator[None]:
    """Within the block the attribute `name` of this one object is `value`."""
    own = vars(target)
    had, before = name in own, own.get(name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if had:
            setattr(target, name, before)
        else:
            delattr(target, name)


def no_gradients() -> ConfigError:
    """What to raise where DeepSpeed has no averaged gradients."""
    return ConfigError(
        "DeepSpeed has no averaged gradients now: measure() works between the last backward of a step and step()"
    )


def require(target: Any, *names: str) -> None:
    """Fail loudly where an attribute that this file reads is gone.

    Raises:
        ConfigError: names what is missing and the version.
    """
    missing = [name for name in names if not hasattr(target, name)]
    if missing:
        raise ConfigError(
            f"DeepSpeed {version()}: {type(target).__name__} has no {', '.join(missing)}, which distclip reads (it was "
            f"tested with {TESTED}); use that version, or a distclip that knows this one"
        )


def version() -> str:
    """The version of DeepSpeed in use."""
    return str(importlib.import_module("deepspeed").__version__)
