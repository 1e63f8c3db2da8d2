"""One thread for the tests of measuring: their many small calls lose more than they gain by waking a second one.

With one thread NumKong reads most gradients, so what depends on kernels is tested with it and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distclip.measure import simd


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["numkong", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "numkong":
        # it is among the packages for development, so what would be skipped without it must not go unseen
        assert simd.works(), "NumKong is not installed, or its kernels are not as distclip.measure.simd needs them"
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simd, "works", lambda: False)
        yield
