"""Which functions can be sent to the ranks, and what is said about the others."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distclip.testing.shipping import FunctionReference, load, refer

Ranks = Callable[..., list[Any]]


def answer() -> int:
    return 42


class Holder:
    @staticmethod
    def answer() -> int:
        return 43

    def method(self) -> int:
        return 44


def hidden() -> int:
    return 1


visible = hidden


def hidden() -> int:  # type: ignore[no-redef]
    return 2


def test_functions_and_static_methods_are_found_again(ranks: Ranks) -> None:
    assert ranks(answer, 2) == [42, 42]
    assert ranks(Holder.answer, 2) == [43, 43]


def test_a_nested_function_is_refused_with_advice(ranks: Ranks) -> None:
    def nested() -> None: ...

    with pytest.raises(TypeError, match=r"<locals>.nested can't be sent .* move it to module level, and pass"):
        ranks(nested, 2)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda: 1, "lambda.* move it to module level"),
        (Holder().method, "is another object: pass a function that can be found under its own name"),
        (visible, "is another object"),
        (functools.partial(answer), "top level of a file, and its arguments as further arguments of run"),
        (os.getpid, "module 'posix' has no file"),
    ],
)
def test_what_another_process_could_not_find_is_refused(function: Callable[[], int], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        refer(function)


def test_an_argument_that_cannot_travel_is_named(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match="an argument for answer can't be pickled"):
        ranks(answer, 2, lambda: 1)


def import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("some_job", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["some_job"] = module
    spec.loader.exec_module(module)
    return module


def test_a_file_is_loaded_once_and_again_when_it_has_changed(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "some_job.py"
    path.write_text("calls = []\ndef call(): calls.append(1); return len(calls)\n")
    module = import_file(path)
    assert [ranks(module.call, 1) for _ in range(2)] == [[1], [2]]
    path.write_text("def call(): return 'changed'\n")
    assert ranks(import_file(path).call, 1) == ["changed"]


def test_a_module_that_can_be_imported_is_not_loaded_a_second_time() -> None:
    # Else its classes would exist twice, and isinstance would fail between the two.
    assert load(refer(refer)) is refer


def test_an_error_while_loading_is_the_rank_s(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "some_job.py"
    path.write_text("import os\nassert os.environ.get('RANK') is None, 'not in a rank'\ndef call(): pass\n")
    module = import_file(path)
    with pytest.raises(RuntimeError, match=r"1 of 1 ranks failed(.*\n)*AssertionError: not in a rank"):
        ranks(module.call, 1)


def test_a_reference_reads_like_a_test_of_pytest() -> None:
    assert str(FunctionReference("m", os.path.abspath("tests/test_m.py"), "f")) == "tests/test_m.py::f"
