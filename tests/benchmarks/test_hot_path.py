"""The benchmark runs in every layout, and its verdict says what the rows say. No time is judged here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import hot_path
import hot_path_cases
from hot_path_cases import Case

SHRINK = 1000


@pytest.mark.parametrize("layout", ["plain", "scaler"])
@pytest.mark.parametrize("clips", [False, True])
def test_one_process(layout: str, clips: bool) -> None:
    for dtype in ("fp32", "bf16"):
        seconds = hot_path_cases.run(Case(layout, 1, "3000 x 33k", dtype, clips), SHRINK, rounds=2)
        assert {name: len(times) for name, times in seconds.items()} == {"read": 2, "distclip": 2, "torch": 2}
        assert all(time > 0 for times in seconds.values() for time in times)


@pytest.mark.parametrize("layout", ["dtensor", "fsdp1"])
def test_two_ranks(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = list(hot_path.measure(layout, 2, SHRINK, rounds=1))
    chosen = [case for case in hot_path.cases() if case.layout == layout]
    assert [case for case, _ in found if case is not None] == chosen
    for case, seconds in found:
        if case is None:
            assert seconds["collectives"] == 1
            assert seconds["first"]["torch"][0] > 0
        else:
            assert hot_path.row_of(case, seconds)["speed_up_min"] > 0


def test_a_call_that_finds_a_wrong_norm_is_not_timed_silently() -> None:
    with pytest.raises(RuntimeError, match="found the norm"):
        hot_path_cases._expect(Case("plain", 1, "GPT-2", "fp32", False), "torch", 1.1, 1.0)


def test_the_sets_are_those_of_the_table() -> None:
    sizes = {name: [*map(_numel, hot_path_cases.shapes_of(name, 1))] for name in hot_path.SETS}
    assert (len(sizes["GPT-2"]), sum(sizes["GPT-2"])) == (148, 124_439_808)
    assert sizes["10 x 10M"] == [10_000_000] * 10
    assert sizes["3000 x 33k"] == [33_024] * 3000
    assert sizes["3000 x 64"] == [64] * 3000


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for length in shape:
        numel *= length
    return numel


def test_the_verdict_follows_the_rows() -> None:
    seconds = {"read": [1.0, 2.0], "distclip": [1.0, 4.0], "torch": [9.0, 9.0]}
    rows: list[dict[str, Any]] = [hot_path.row_of(case, seconds) for case in hot_path.cases()]
    assert {row["speed_up_min"] for row in rows} == {9.0}
    assert {row["speed_up_median"] for row in rows} == {(9.0 + 9.0 / 4.0) / 2}
    assert {row["x_limit_median"] for row in rows} == {(1.0 + 2.0) / 2}
    first = hot_path.first_row({"first": {"distclip": [0.1], "torch": [20.0]}, "collectives": 1, "count": 3000})
    assert all(met for *_, met in hot_path.verdict(rows, first))
    rows[7]["speed_up_median"] = 0.89
    aims = hot_path.verdict(rows, first | {"first_call_ms": 2500.0, "collectives": 2})
    assert [met for *_, met in aims] == [True, True, False, True, False, False]
    assert "0.89 x (plain x1 " in aims[2][1]
