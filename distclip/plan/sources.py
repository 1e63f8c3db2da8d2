"""What a user passes as `source`, turned into (clean name, parameter, wrappers around it).

A source is a module, a list of modules (the pipeline parts of this rank), parameters, or (name, parameter) pairs.
Names are clean: without what DDP, FSDP1, `torch.compile` and activation checkpointing put in front, so that the same
parameter has the same name however the model is wrapped. A parameter that is reachable twice (tied) counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from distclip.errors import ConfigError, LayoutError
from distclip.integrations import is_deepspeed_engine
from distclip.plan.dtensor import hidden_by, hidden_in
from distclip.plan.fsdp1 import is_flattened

Source = nn.Module | Iterable[nn.Module] | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Tensor
"""What `clip_grad_norm_`, `get_total_norm` and `GradientClipper` take as their first argument."""

# Attribute names under which wrappers keep the wrapped module. "module" is only dropped below DDP: it is an ordinary
# name in user code.
_WRAPPER_CHILDREN = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


@dataclass(frozen=True)
class Found:
    """One parameter of the source on this rank."""

    name: str
    parameter: Tensor
    fsdp1: FullyShardedDataParallel | None = None
    """The nearest FSDP1 unit around it, which knows its process group."""
    ddp: DistributedDataParallel | None = None


def items_of(source: Any) -> list[Any]:
    """The source as a list that can be walked again (a generator of parameters can be walked once only).

    Raises:
        TypeError: `source` is neither a module, a tensor nor something to iterate over.
        ConfigError: it is a DeepSpeed engine.
    """
    if is_deepspeed_engine(source):
        raise ConfigError(
            "a DeepSpeed engine keeps its gradients in partitions of its own: use GradientClipper(engine), whose "
            "step() measures them and calls engine.step()"
        )
    if isinstance(source, (nn.Module, Tensor)):
        return [source]
    try:
        return list(source)
    except TypeError:
        raise TypeError(
            "source must be a module, a list of modules, parameters or (name, parameter) pairs, "
            f"not {type(source).__name__}"
        ) from None


def modules_of(items: list[Any]) -> list[nn.Module]:
    """The modules that a source consists of; empty where it consists of parameters."""
    return items if items and all(isinstance(item, nn.Module) for item in items) else []


def tensors_of(items: list[Any]) -> list[Any]:
    """The parameters of a source without names and checks, in a fixed order: cheap enough for every call."""
    modules = modules_of(items)
    if modules:
        return [parameter for module in modules for parameter in (*module.parameters(), *_hidden(module))]
    if not any(issubclass(kind, tuple) for kind in set(map(type, items))):
        return items
    return [item[1] if isinstance(item, tuple) and len(item) == 2 else item for item in items]


def _hidden(module: nn.Module) -> list[Tensor]:
    return hidden_by(module) if isinstance(module, DistributedDataParallel) else []


def walk(items: list[Any]) -> list[Found]:
    """List the parameters of `items_of(source)` in a fixed order, each once, frozen ones included.

    Raises:
        TypeError: an item is not of a kind named above.
        ConfigError: gradients or results of operations were passed where parameters belong, or a dtype cannot be
            measured.
        LayoutError: bare FSDP1 parameters, which do not know their process group.
    """
    return _unique(_walk(items))


def names_of(items: list[Any]) -> set[str]:
    """All clean names of the parameters of `items_of(source)`: every one of a parameter that has several."""
    return {found.name for found in _walk(items)}


def _walk(items: list[Any]) -> Iterator[Found]:
    modules = modules_of(items)
    return _walk_modules(modules) if modules else _walk_parameters(items)


def _walk_modules(modules: Iterable[nn.Module]) -> Iterator[Found]:
    for part in modules:
        seen: set[int] = set()
        hiding = bool(_hidden(part))
        # An explicit stack keeps depth-first order, like named_parameters(), and copes with very deep models.
        stack: list[tuple[nn.Module, str, FullyShardedDataParallel | None, DistributedDataParallel | None]]
        stack = [(part, "", None, None)]
        while stack:
            module, prefix, fsdp1, ddp = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            if isinstance(module, FullyShardedDataParallel):
                fsdp1 = module
            elif isinstance(module, DistributedDataParallel):
                ddp = module
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield Found(prefix + name, parameter, fsdp1 if is_flattened(parameter) else None, ddp)
            if hiding:
                for name, part_of in hidden_in(module):
                    yield Found(prefix + name, part_of, None, ddp)
            for name, child in reversed(module._modules.items()):
                if child is None:
                    continue
                inner = name in _WRAPPER_CHILDREN or (name == "module" and isinstance(module, DistributedDataParallel))
                stack.append((child, prefix if inner else f"{prefix}{name}.", fsdp1, ddp))


def _walk_parameters(items: list[Any]) -> Iterator[Found]:
    # DDP's own named_parameters() puts "module." before every name; a child that is called so stands before some.
    below_ddp = all(isinstance(item, tuple) and str(item[0]).startswith("module.") for item in items)
    for index, item in enumerate(items):
        named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
        name, parameter = item if named else (f"parameter[{index}]", item)
        if not isinstance(parameter, Tensor):
            raise TypeError(
                f"source item {index} is {type(parameter).__name__}; pass a module, a list of modules, parameters or "
                "(name, parameter) pairs"
            )
        if not parameter.requires_grad and parameter.grad is None and not isinstance(parameter, nn.Parameter):
            raise ConfigError(
                f"source item {name!r} is a plain tensor without requires_grad, probably a gradient: pass the "
                "parameters themselves; distclip reads their .grad"
            )
        if not parameter.is_leaf and not parameter.retains_grad:
            raise ConfigError(
                f"source item {name!r} is computed from other tensors, so backward leaves no gradient in it: pass the "
                "parameters that it is made of, or call retain_grad() on it before backward"
            )
        if is_flattened(parameter):
            raise LayoutError(
                f"parameter {name!r} belongs to FSDP1, whose parameters do not carry their process group: pass the "
                "FullyShardedDataParallel module instead of its parameters"
            )
        name = name.removeprefix("module.") if below_ddp else name
        yield Found(".".join(part for part in name.split(".") if part not in _WRAPPER_CHILDREN), parameter)


def _unique(found: Iterable[Found]) -> list[Found]:
    seen: set[int] = set()
    result = []
    for item in found:
        if id(item.parameter) in seen:
            continue
        seen.add(id(item.parameter))
        # a frozen float8 base under trained adapters never has a gradient
        if item.parameter.dtype in _REFUSED and (item.parameter.requires_grad or item.parameter.grad is not None):
            raise ConfigError(
                f"parameter {item.name!r} has dtype {item.parameter.dtype}, which distclip cannot measure"
            )
        if is_lazy(item.parameter):
            raise ConfigError(
                f"parameter {item.name!r} has no shape yet: run a forward pass through the lazy module first"
            )
        result.append(item)
    return result


_REFUSED = frozenset(dtype for name, dtype in vars(torch).items() if name.startswith("float8_"))
