"""Records and rank descriptions for telemetry tests: an ordinary step unless a test says otherwise."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from distclip.telemetry.record import RunInfo, StepRecord


@pytest.fixture
def room_for() -> Callable[[int], AbstractContextManager[None]]:
    """`with room_for(bytes)`: the kernel refuses room for a larger file, as a full disk does.

    The limit holds for the whole process, also for pytest's own report when that goes to a file: it surrounds the one
    call under test, never a whole test or the code between two tests.
    """

    @contextmanager
    def room_for(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return room_for


@pytest.fixture
def make_record() -> Callable[..., StepRecord]:
    def make(step: int = 1, norm: float = 2.0, **changes: Any) -> StepRecord:
        fields: dict[str, Any] = {
            "step": step,
            "timestamp": 1000.0 + step,
            "total_norm": norm,
            "limit": 1.0,
            "clip_coefficient": 0.5,
            "clipped": True,
            "nan": 0,
            "inf": 0,
            "local_nan": 0,
            "local_inf": 0,
            "local_norm": 1.5,
            "stepped": True,
            "skip_reason": None,
            "elements": 16,
            "missing_tensors": 0,
            "loss_scale": None,
            "learning_rate": 0.1,
            "loss": 3.0,
            "step_seconds": 0.5,
            "clip_seconds": 0.125,
            "wait_seconds": 0.0625,
        }
        return StepRecord(**{**fields, **changes})

    return make


@pytest.fixture
def make_info() -> Callable[..., RunInfo]:
    def make(rank: int = 0, **changes: Any) -> RunInfo:
        fields: dict[str, Any] = {
            "rank": rank,
            "local_rank": rank,
            "world_size": 2,
            "device": "cpu",
            "strategy": "fsdp2",
            "policy": "fixed",
            "nonfinite": "skip",
            "norm_type": 2.0,
            "torch_version": "2.13.0",
            "has_optimizer": True,
        }
        return RunInfo(**{**fields, **changes})

    return make
