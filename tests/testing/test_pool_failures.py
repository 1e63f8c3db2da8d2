"""Ranks that raise, die or hang: each is told by name, and the next job works."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distclip.errors import LayoutError
from distclip.testing import RankDied, RankError, RankFailure, RankHung

Ranks = Callable[..., list[Any]]


class TwoArguments(Exception):
    """Can be pickled, but not unpickled: the usual mistake."""

    def __init__(self, name: str, value: int) -> None:
        super().__init__(f"{name} is {value}")


def total() -> float:
    value = torch.ones(())
    dist.all_reduce(value)
    return value.item()


@pytest.fixture(autouse=True)
def next_job_works(ranks: Ranks) -> Any:
    yield
    assert ranks(total, 4) == [4.0] * 4


def raise_everywhere() -> None:
    raise LayoutError(f"parameter of rank {dist.get_rank()}")


def test_every_rank_raises(ranks: Ranks) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(raise_everywhere, 4)
    errors = caught.value.errors
    assert set(errors) == {0, 1, 2, 3}
    assert all(type(error) is LayoutError for error in errors.values())
    assert [str(errors[rank]) for rank in range(4)] == [f"parameter of rank {rank}" for rank in range(4)]
    assert "in raise_everywhere" in str(errors[2].__cause__)
    assert "4 of 4 ranks failed in tests/testing/test_pool_failures.py::raise_everywhere" in str(caught.value)


def raise_alike() -> None:
    raise ValueError("the same")


def test_the_same_story_is_told_once(ranks: Ranks) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(raise_alike, 4)
    assert str(caught.value).count("ValueError: the same") == 1


def compare() -> None:
    found, wanted = 3 + dist.get_rank(), 3
    assert found == wanted


def test_an_assertion_shows_the_values_around_it(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"rank 1\n(.*\n)*AssertionError\n(.*\n)*with\n +found = 4\n +wanted = 3"):
        ranks(compare, 2)


def raise_on(bad: int) -> None:
    if dist.get_rank() == bad:
        raise KeyError("lonely")
    total()


def test_ranks_that_wait_for_a_failed_one_are_woken(ranks: Ranks) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(raise_on, 4, 2)
    errors = caught.value.errors
    assert next(iter(errors)) == 2, "the cause comes first"
    assert isinstance(errors.pop(2), KeyError)
    assert set(errors) == {0, 1, 3}
    assert all("Connection closed by peer" in str(error) for error in errors.values())
    assert caught.value.stopped == {}


def raise_or_sleep() -> None:
    if dist.get_rank() == 0:
        raise KeyError("first")
    time.sleep(600)


def test_a_rank_that_does_not_wake_is_stopped_and_its_stack_told(ranks: Ranks) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(raise_or_sleep, 2)
    assert set(caught.value.errors) == {0}
    assert "in raise_or_sleep" in caught.value.stopped[1]
    assert "rank 1: still busy after the failure" in str(caught.value)


def raise_unpicklable() -> None:
    error = ValueError("with a lock inside")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def raise_two_arguments() -> None:
    raise TwoArguments("depth", 3)


@pytest.mark.parametrize(
    ("job", "text"),
    [(raise_unpicklable, "ValueError: with a lock inside"), (raise_two_arguments, "TwoArguments: depth is 3")],
)
def test_an_exception_that_cannot_travel_is_replaced(ranks: Ranks, job: Callable[[], None], text: str) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(job, 1)
    assert type(caught.value.errors[0]) is RankError
    assert text in str(caught.value.errors[0])


def leave() -> None:
    raise SystemExit(3)


def test_system_exit_is_an_error_like_others(ranks: Ranks) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(leave, 1)
    assert isinstance(caught.value.errors[0], SystemExit)


def return_a_lock() -> Any:
    return threading.Lock()


def test_a_result_that_cannot_travel_is_an_error(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"returned a lock that can't be pickled .*: return plain values"):
        ranks(return_a_lock, 1)


def die(how: str) -> None:
    if dist.get_rank() == 1:
        print("last words")
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        ctypes.string_at(0)
    total()


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("exit", 7, "rank 1 ended by itself with exit code 7"),
        ("kill", -signal.SIGKILL, r"rank 1 was ended by signal 9 \(Killed\)"),
        ("crash", -signal.SIGSEGV, r"rank 1 was ended by signal 11 \(Segmentation fault\)(.*\n)*.* in die\n"),
    ],
)
def test_a_rank_that_dies(ranks: Ranks, how: str, code: int, text: str) -> None:
    with pytest.raises(RankFailure, match=text) as caught:
        ranks(die, 2, how)
    error = caught.value.errors[1]
    assert isinstance(error, RankDied)
    assert error.exit_code == code
    assert "last words" in str(caught.value)
    assert "Connection" in str(caught.value.errors[0]), "the other rank lost its peer"


def own_pid() -> int:
    return os.getpid()


def test_a_rank_that_dies_between_jobs_is_replaced(ranks: Ranks) -> None:
    before = ranks(own_pid, 2)
    os.kill(before[1], signal.SIGKILL)
    after = ranks(own_pid, 2)
    assert after[0] == before[0]
    assert after[1] != before[1]


def hang(bad: int) -> None:
    if dist.get_rank() == bad:
        while True:
            time.sleep(0.01)
    total()


def test_a_job_that_hangs_names_the_ranks_and_their_stacks(ranks: Ranks) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(hang, 2, 1, deadline=1.0)
    errors = caught.value.errors
    assert {rank: type(error) for rank, error in errors.items()} == {0: RankHung, 1: RankHung}
    assert str(errors[1]) == "rank 1 had not finished after 1 s"
    first, second = str(caught.value).split("--- rank 1")
    assert "in total" in first
    assert "in hang" in second


def hang_in_native_code() -> None:
    # PyDLL keeps the interpreter lock, so that no Python code can run in this process any more.
    ctypes.PyDLL(None).sleep(600)


def test_a_rank_that_hangs_with_the_interpreter_lock(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="in hang_in_native_code"):
        ranks(hang_in_native_code, 1, deadline=1.0)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_that_does_not_react_at_all(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="no stack: it does not react to signals"):
        ranks(stop, 1, deadline=1.0)


class Interruption(BaseException):
    """What Ctrl-C or a time limit of the test would raise."""


def interrupt(number: int, frame: FrameType | None) -> None:
    raise Interruption


def test_an_interrupted_job_leaves_nothing_behind(ranks: Ranks) -> None:
    before = ranks(own_pid, 2)
    old = signal.signal(signal.SIGUSR2, interrupt)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    try:
        with pytest.raises(Interruption):
            ranks(hang, 2, 0)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, old)
    assert set(ranks(own_pid, 2)).isdisjoint(before)
