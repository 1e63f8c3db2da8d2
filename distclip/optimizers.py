"""What a clipper must know of the optimizers that share its norm: that they are usable, and what they hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from distclip.errors import ConfigError
from distclip.fold import SMALLEST, foldable, is_fused
from distclip.plan.plan import Plan

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""What `GradientClipper` takes as its second argument."""


def as_optimizers(optimizer: Optimizers | None) -> tuple[torch.optim.Optimizer, ...]:
    """One or several optimizers as a tuple.

    Raises:
        TypeError: something else.
        ConfigError: an optimizer that needs a closure.
    """
    if optimizer is None:
        return ()
    optimizers = tuple(optimizer) if isinstance(optimizer, Iterable) else (optimizer,)
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or several, not {type(each).__name__}")
        if isinstance(each, torch.optim.LBFGS):
            raise ConfigError("LBFGS calls its closure many times in a step, so there is no single gradient to clip")
    return optimizers


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_coverage(
    parameters: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer], scaled: bool, stepping: bool = False
) -> None:
    """Whether what is stepped is what is measured.

    With a scaler all of it must be, because distclip unscales only what it measures. Without one the optimizer may hold
    more, which is then neither clipped nor watched. `stepping`: backward has run, so that what has no gradient now will
    not be stepped.

    Raises:
        ConfigError: no optimizer with a scaler, or an optimizer that holds none of the source's parameters, or others
            too with a scaler.
    """
    if scaled and not optimizers:
        raise ConfigError("scaler= needs the optimizer too: GradientClipper(model, optimizer, scaler=scaler)")
    known = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        held = parameters_of(optimizer)
        strange = [parameter for parameter in held if id(parameter) not in known]
        unknown = sum(not stepping or parameter.grad is not None for parameter in strange)
        if known and held and len(strange) == len(held):
            raise ConfigError(
                f"{type(optimizer).__name__} holds none of the parameters of the source, so it would step something "
                "else: make the optimizer after the model is wrapped, from the same model"
            )
        if unknown and scaled:
            raise ConfigError(
                f"the optimizer holds {unknown} parameters that the source does not have, so their gradients would "
                "never be unscaled: pass the whole module, or an optimizer for the parameters of the source only"
            )
        if unknown:
            warnings.warn(
                f"{type(optimizer).__name__} holds {unknown} parameters that the source does not have: they are "
                "stepped without being clipped, and a nan in them is not seen",
                stacklevel=4,
            )


def check_fold(fold: Any, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """The `fold` argument.

    Raises:
        ConfigError: an unknown word, or "always" with an optimizer that cannot.
    """
    if fold not in ("auto", "never", "always"):
        raise ConfigError(f"fold must be 'auto', 'never' or 'always', not {fold!r}")
    reasons = [reason for optimizer in optimizers if (reason := foldable(optimizer))]
    if fold == "always" and (reasons or not optimizers):
        raise ConfigError(f"fold='always' is not possible: {reasons[0] if reasons else 'there is no optimizer'}")
    return str(fold)


class FoldPlan:
    """Which optimizers can take the factor into their step, for one plan."""

    def __init__(self, plan: Plan, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        index_of = {id(parameter): index for index, parameter in enumerate(plan.parameters)}
        self._entries: dict[torch.optim.Optimizer, frozenset[int]] = {}
        self._groups: dict[torch.optim.Optimizer, frozenset[int]] = {}
        for optimizer in optimizers:
            indices = {index_of.get(id(parameter), -1) for parameter in parameters_of(optimizer)}
            # A parameter outside the plan must not be multiplied with the others; addends of Partial gradients are
            # no gradients that a fused kernel should see scaled.
            if foldable(optimizer) is None and -1 not in indices and not plan.reductions:
                self._entries[optimizer] = frozenset(indices)
                self._groups[optimizer] = frozenset(plan.entries[index].param_group for index in indices)
        every = len(self._entries) == len(optimizers) > 0
        here = all(parameter.device == plan.device for each in self._entries for parameter in parameters_of(each))
        others = {*range(len(plan.parameters))}.difference(*self._entries.values())
        self._others = [plan.parameters[index] for index in sorted(others)] if every and here else None

    def for_all(self, limited: Collection[int]) -> dict[torch.optim.Optimizer, int] | None:
        """Optimizer -> a param group whose factor is that of all its parameters, if every gradient can be left to them.

        `limited` are the param groups with a limit of their own. None where something must be multiplied, or lies on
        another device than the packet.
        """
        if self._others is None or any(parameter.grad is not None for parameter in self._others):
            return None
        if not all(map(is_fused, self._entries)):
            return None
        if any(len(groups) > 1 and groups.intersection(limited) for groups in self._groups.values()):
            return None
        return {optimizer: min(groups) for optimizer, groups in self._groups.items() if groups}

    def choose(self, factors: Sequence[float]) -> tuple[dict[torch.optim.Optimizer, float], frozenset[int]]:
        """Optimizer -> factor for those that fold, and the entries that need no multiplication then.

        `factors` are those of the param groups. One optimizer can take one factor only; 1.0 needs no folding, and
        nan, 0 and tiny numbers are multiplied.
        """
        folds: dict[torch.optim.Optimizer, float] = {}
        for optimizer, groups in self._groups.items():
            found = {factors[group] for group in groups}
            if len(found) != 1 or not is_fused(optimizer):
                continue
            if (factor := found.pop()) != 1.0 and SMALLEST <= factor < float("inf"):
                folds[optimizer] = factor
        return folds, frozenset().union(*(self._entries[optimizer] for optimizer in folds))


def as_follower(follower: Any) -> Callable[[], object]:
    """Something to call after a real step: a callable, or an object with `step()` such as a scheduler.

    Raises:
        TypeError: neither.
    """
    step = getattr(follower, "step", follower)
    if not callable(step):
        raise TypeError(f"after_step takes callables and objects with step(), not {type(follower).__name__}")
    return step  # type: ignore[no-any-return]
