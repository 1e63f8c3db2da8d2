"""Every example in a docstring of the package runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import distclip

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(distclip.__path__, "distclip.")
    if not module.name.endswith("__main__") and "._data" not in module.name
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


def test_the_public_names_have_examples() -> None:
    from distclip import GradientClipper, StepReport, clip_grad_norm_, get_total_norm, phase

    for item in (GradientClipper, StepReport, clip_grad_norm_, get_total_norm, phase):
        assert ">>>" in (item.__doc__ or ""), item


def test_all_public_names_exist() -> None:
    for name in distclip.__all__:
        assert getattr(distclip, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'clip'"):
        distclip.clip  # noqa: B018 - the access is the test
