"""What all tests share: real gloo ranks, started once and only when a test asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

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
