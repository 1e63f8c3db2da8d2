"""How a function gets from a test module into a rank: as the path of its file and its name in there.

Functions are not pickled, because pickle would import their module by name, and with pytest's
`--import-mode=importlib` a test module can't be imported by name. The rank loads the file once, and again when it has
changed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_loaded: dict[str, tuple[tuple[int, int], ModuleType]] = {}


@dataclass(frozen=True)
class FunctionReference:
    """Where a function can be found again by a process that has the same files."""

    module: str
    path: str
    qualname: str

    def __str__(self) -> str:
        return f"{os.path.relpath(self.path)}::{self.qualname}"


def refer(function: Callable[..., Any]) -> FunctionReference:
    """The reference of a function at the top level of a file (or of a static method of a class there).

    Raises `TypeError` for anything that another process could not find again: nested functions, lambdas, methods of an
    object, `functools.partial`, functions typed into a prompt.
    """
    qualname = getattr(function, "__qualname__", None)
    module_name = getattr(function, "__module__", None)
    shown = qualname or repr(function)
    if not isinstance(qualname, str) or not isinstance(module_name, str):
        raise TypeError(
            f"{shown} can't be sent to the ranks: pass a function defined at the top level of a file, "
            "and its arguments as further arguments of run"
        )
    if "<locals>" in qualname or "<lambda>" in qualname:
        raise TypeError(
            f"{shown} can't be sent to the ranks because it is nested in another function or is a lambda: move it to "
            "module level, and pass what it uses from around it as arguments"
        )
    module = sys.modules.get(module_name)
    path = getattr(module, "__file__", None)
    if path is None or not os.path.isfile(path):
        raise TypeError(
            f"{shown} can't be sent to the ranks because module {module_name!r} has no file: put it into one"
        )
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise TypeError(
            f"{shown} can't be sent to the ranks because {module_name}.{qualname} is another object: pass a function "
            "that can be found under its own name at the top level of its file"
        )
    return FunctionReference(module_name, os.path.abspath(path), qualname)


def load(reference: FunctionReference) -> Callable[..., Any]:
    """The function itself, in this process. Raises whatever its file raises when it is run."""
    target: Any = _module(reference)
    for part in reference.qualname.split("."):
        target = getattr(target, part)
    function: Callable[..., Any] = target
    return function


def _module(reference: FunctionReference) -> ModuleType:
    status = os.stat(reference.path)
    stamp = (status.st_mtime_ns, status.st_size)
    known = _loaded.get(reference.path)
    if known is not None and known[0] == stamp:
        return known[1]
    if known is None and _importable(reference):
        module = importlib.import_module(reference.module)
    else:
        module = _run_file(reference)
    _loaded[reference.path] = (stamp, module)
    return module


def _importable(reference: FunctionReference) -> bool:
    """Whether an ordinary import gives this very file: then its classes must not exist a second time."""
    if reference.module == "__main__":
        return False
    loaded = sys.modules.get(reference.module)
    if loaded is not None:
        return getattr(loaded, "__file__", None) == reference.path
    try:
        spec = importlib.util.find_spec(reference.module)
    except (ImportError, ValueError):
        # The parent package is not importable, as for a test folder that is no package.
        return False
    return spec is not None and spec.origin == reference.path


def _run_file(reference: FunctionReference) -> ModuleType:
    # A script's `if __name__ == "__main__"` part must not run in the ranks. The name is the one that multiprocessing
    # registers for the main module in every process that has imported it, so that results can be unpickled.
    is_main = reference.module == "__main__"
    name = "__mp_main__" if is_main else reference.module
    spec = importlib.util.spec_from_file_location(name, reference.path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{reference.path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if is_main:
        sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module
