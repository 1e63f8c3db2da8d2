"""What an error of one rank must become: the same on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from distclip.testing import RankFailure


def fails_alike(ranks: Any, kind: type[Exception], function: Any, world_size: int, *args: Any) -> str:
    """Run, expect the same error on every rank, and return its text."""
    with pytest.raises(RankFailure) as failure:
        ranks(function, world_size, *args)
    errors = failure.value.errors
    assert sorted(errors) == list(range(world_size)), failure.value
    assert {type(error) for error in errors.values()} == {kind}, failure.value
    texts = {str(error) for error in errors.values()}
    assert len(texts) == 1, texts
    return texts.pop()
