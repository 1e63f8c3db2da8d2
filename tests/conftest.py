"""What all tests share: real gloo ranks, started once and only when a test asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distclip import simd
from distclip.testing import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """The pool itself, for tests about it."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks(pool: RankPool) -> Callable[..., list[Any]]:
    """`ranks(function, world_size, *args, **kwargs)`: what the function returned on each rank of a fresh gloo group."""
    return pool.run


@pytest.fixture(scope="module", params=["numkong", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """NumKong's kernels and torch's: what may use either is tested with both."""
    if request.param == "numkong":
        # it is among the packages for development, so what would be skipped without it must not go unseen
        assert simd.works(), "NumKong is not installed, or its kernels are not as distclip.simd needs them"
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simd, "works", lambda: False)
        yield
