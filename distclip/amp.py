"""GradScaler: the scale that backward used, and one commit decision for all ranks and optimizers.

torch's scaler decides per rank and per optimizer whether to step. distclip measures the scaled gradients, folds
1/scale into the clip coefficient, and then tells the scaler the *agreed* found_inf as if it had unscaled itself: its
`step()` and `update()` then come to the same result on every rank. One `ScalerLink` stands between a clipper and its
scaler and sees to it that gradients are unscaled exactly once, whatever was called before and in which order.

Private names, all in this file: `_scale`, `_growth_tracker` and `_per_optimizer_states` of `torch.amp.GradScaler`
(torch/amp/grad_scaler.py, torch 2.3 to 2.13; FSDP1's `ShardedGradScaler` inherits them) and its `OptState`.
`check_scaler` fails loudly where one is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from distclip.errors import ConfigError
from distclip.optimizers import parameters_of
from distclip.plan.dtensor import local_of


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
    for name in ("_scale", "_growth_tracker", "_per_optimizer_states"):
        if not hasattr(scaler, name):
            raise ConfigError(
                f"torch {torch.__version__}: GradScaler has no {name}, which distclip needs to bring all ranks to one "
                "decision; use a version of distclip that knows this torch"
            )
    return scaler


class ScalerLink:
    """What one clipper knows about its scaler: links to the same scaler update it once, after all have stepped."""

    def __init__(self, scaler: GradScaler, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.scaler = scaler
        self._optimizers = tuple(optimizers)
        self._found: list[Tensor] = []
        """The found_inf tensors that this link gave to the scaler last."""
        self._unscaled: tuple[weakref.ReferenceType[Tensor], int] | None = None
        """One gradient that this link unscaled, and its version then: shows whether a backward has run since."""
        self._stepped = False
        links = _links.setdefault(scaler, weakref.WeakSet())
        for link in list(links):
            if set(map(id, self._optimizers)) & set(map(id, link._optimizers)):
                links.discard(link)  # a new clipper for the same optimizers takes the place of the old one
        links.add(self)
        if getattr(scaler.unscale_, "scaler", None) is not scaler:  # that of a shallow copy is the original's
            scaler.unscale_ = _Unscale(scaler)  # type: ignore[method-assign]

    def scale_to_undo(self) -> float | Tensor:
        """What the gradients must be divided by: the scale that backward used, or 1.0 if that was done already.

        The scale in use is the current one as long as `update()` has not run since the backward.

        Raises:
            ConfigError: a call is missing or in the wrong place; the text says which to move.
        """
        wrappers = self._wrappers()
        states = [
            self.scaler._per_optimizer_states.get(wrappers.get(id(optimizer), id(optimizer)))
            for optimizer in self._optimizers
        ]
        stages = [OptState.READY if state is None else state["stage"] for state in states]
        if self._stepped and not any(states):
            self._stepped = False  # the caller has called update()
        if OptState.STEPPED in stages or self._stepped:
            raise ConfigError(
                "scaler.step(optimizer) has already run since the last scaler.update(): clip between backward() and "
                "scaler.step(), and call scaler.update() once at the end of every step"
                + (_SHARED if len(_links[self.scaler]) > 1 else "")
            )
        unscaled = [stage is OptState.UNSCALED for stage in stages]
        if not any(unscaled):
            if self._is_unscaled():
                raise ConfigError(
                    "these gradients were unscaled in an earlier step and no backward() has run since: they would be "
                    "divided by the loss scale twice. Call optimizer.zero_grad() and backward() between steps"
                )
            return self.scaler._scale if self.scaler._scale is not None else float(self.scaler.get_scale())
        if not all(unscaled):
            raise ConfigError(
                "scaler.unscale_ was called for some of the optimizers only: call it for all that share this norm, or "
                "for none and let distclip unscale"
            )
        ours = any(tensor is mine for state in states if state for tensor in _found(state) for mine in self._found)
        if ours and not self._is_unscaled() and self._first_gradient() is not None:
            # of another backward, or of a step that was skipped or broke off: still scaled, or half way
            raise ConfigError(
                "scaler.update() has not been called since the last clip_(), and these are not the gradients that it "
                "unscaled: call scaler.step(optimizer) and scaler.update() after every clip_(), also where should_step "
                "is False, or use clipper.step(), which does"
            )
        return 1.0

    def record(self, found_inf: Tensor, device: torch.device) -> None:
        """Tell the scaler that these optimizers' gradients are unscaled, and the agreed `found_inf` (bool [])."""
        if self.scaler._scale is None:
            # This rank has scaled no loss in this run (a pipeline stage without the loss): update() needs the tensor.
            self.scaler.scale(torch.ones((), device=device))
        assert self.scaler._scale is not None
        target = self.scaler._scale.device
        self._found = []
        for key in self._keys():
            state = self.scaler._per_optimizer_states[key]
            # A tensor of its own for each: update() adds them up in place. Exactly 0 or 1: kernels test == 1.
            found = found_inf.to(device=target, dtype=torch.float32).clone()
            state["found_inf_per_device"] = {target: found}
            state["stage"] = OptState.UNSCALED
            self._found.append(found)

    def mark_unscaled(self) -> None:
        """Remember that the gradients, as they are now, have been divided by the scale."""
        gradient = self._first_gradient()
        self._unscaled = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def _is_unscaled(self) -> bool:
        """Whether these are the gradients that this link unscaled, with nothing written to them since."""
        if self._unscaled is None:
            return False
        reference, version = self._unscaled
        gradient = self._first_gradient()
        return gradient is not None and reference() is gradient and gradient._version == version

    def _first_gradient(self) -> Tensor | None:
        for optimizer in self._optimizers:
            for param_group in optimizer.param_groups:
                for parameter in param_group["params"]:
                    if parameter.grad is not None:
                        with torch.no_grad():
                            return local_of(parameter.grad)
        return None

    def _keys(self) -> set[int]:
        """How the scaler may know these optimizers: what the caller hands to scaler.step() may be a wrapper."""
        return {*map(id, self._optimizers), *self._wrappers().values()}

    def _wrappers(self) -> dict[int, int]:
        """id of an optimizer -> that of something else that holds the same parameters and was unscaled in its place."""
        seen: dict[int, frozenset[int]] = getattr(self.scaler.unscale_, "seen", {})
        ours = {id(optimizer) for optimizer in self._optimizers}
        found: dict[int, int] = {}
        for key, state in self.scaler._per_optimizer_states.items():
            if key in ours or state["stage"] is OptState.READY or key not in seen:
                continue
            for optimizer in self._optimizers:
                if not seen[key].isdisjoint(map(id, parameters_of(optimizer))):
                    found[id(optimizer)] = key
        return found

    @property
    def alone(self) -> bool:
        """Whether no other clipper uses this scaler."""
        return len(_links[self.scaler]) == 1

    def finish(self, learned: bool | Tensor) -> None:
        """This clipper's optimizers have stepped or skipped; the last link of the scaler to come here updates it.

        `learned` is False where there was no gradient at all, so that nothing is known about the scale. A bool tensor
        (of a link that is alone) is not waited for: the device takes the update back where it is false.
        """
        self._stepped = True
        if learned is False:
            # A found_inf of 0 would count as a good step, and make the scale grow.
            for key in self._keys():
                self.scaler._per_optimizer_states.pop(key, None)
        links = list(_links[self.scaler])
        if not all(link._stepped for link in links):
            return
        for link in links:
            link._stepped = False
        if isinstance(learned, Tensor):
            kept = [state for state in (self.scaler._scale, self.scaler._growth_tracker) if state is not None]
            before = [state.clone() for state in kept]
            self.scaler.update()
            for state, old in zip(kept, before, strict=True):
                state.copy_(torch.where(learned, state, old))
        elif any(state["found_inf_per_device"] for state in self.scaler._per_optimizer_states.values()):
            self.scaler.update()


class _Unscale:
    """Stands in for a scaler's `unscale_`, and remembers whose parameters each call went to.

    The scaler knows optimizers by identity only. A wrapper around the optimizer that distclip got (accelerate,
    Lightning, a class of the user's) is another object with the same gradients, which must not be unscaled twice.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self.seen: dict[int, frozenset[int]] = {}
        """id of what `unscale_` was called with -> ids of its parameters; holds while the scaler has a state for it."""

    def __call__(self, optimizer: Any) -> None:
        type(self.scaler).unscale_(self.scaler, optimizer)
        self.seen[id(optimizer)] = frozenset(map(id, parameters_of(optimizer)))


_links: weakref.WeakKeyDictionary[GradScaler, weakref.WeakSet[ScalerLink]] = weakref.WeakKeyDictionary()

_SHARED = (
    ". This scaler is shared by several clippers: step each of them once before any steps again, or give each a scaler "
    "of its own"
)


def _found(state: dict[str, Any]) -> list[Tensor]:
    return list(state["found_inf_per_device"].values())
