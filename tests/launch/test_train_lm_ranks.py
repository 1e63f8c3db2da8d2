"""The example job on real gloo ranks: every wrapper trains the same model, and checkpoints survive."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import train_lm

Ranks = Callable[..., list[Any]]
SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--batch", "4", "--bytes", "100000"]


def job(*arguments: str) -> list[float]:
    return train_lm.main([*SMALL, *arguments])


def test_all_wrappers_train_the_same_model(ranks: Ranks) -> None:
    common = ("--steps", "6", "--accumulate", "2", "--inject", "nan@3:rank=1")
    runs = {wrap: ranks(job, 2, "--wrap", wrap, *common) for wrap in ("ddp", "fsdp1", "fsdp2", "hsdp")}
    for wrap, losses in runs.items():
        assert losses[0] == pytest.approx(runs["ddp"][0], abs=2e-4), wrap
        assert not math.isnan(losses[0][2]), wrap
        assert math.isnan(losses[1][2]), wrap
        assert losses[0][5] < losses[0][0] - 0.05, wrap


def test_hsdp_trains_the_same_for_every_shape_of_the_mesh(ranks: Ranks) -> None:
    plain = ranks(job, 4, "--wrap", "fsdp2", "--steps", "4")[3]
    for replicate in ("1", "2", "4"):
        losses = ranks(job, 4, "--wrap", "hsdp", "--replicate", replicate, "--steps", "4")[3]
        assert losses == pytest.approx(plain, abs=2e-4), replicate


def test_half_precision_works_with_every_wrapper(ranks: Ranks) -> None:
    common = ("--steps", "4", "--inject", "nan@2:rank=1")
    full = ranks(job, 2, "--wrap", "ddp", *common)[0]
    for wrap in ("ddp", "fsdp1", "fsdp2", "hsdp"):
        for precision in ("bf16", "fp16"):
            half = ranks(job, 2, "--wrap", wrap, "--precision", precision, *common)[0]
            assert half == pytest.approx(full, abs=0.05), (wrap, precision)
            assert half != full, (wrap, precision)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp1", "fsdp2", "hsdp"])
def test_a_run_that_stopped_goes_on_as_if_it_had_not(
    ranks: Ranks, tmp_path: Path, wrap: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--wrap", wrap, "--precision", "fp16", "--inject", "nan@2")  # which halves the loss scale
    straight = ranks(job, 2, *common, "--steps", "6")
    keep = ("--checkpoint", str(tmp_path), "--checkpoint-every", "3")
    ranks(job, 2, *common, *keep, "--steps", "4")
    capsys.readouterr()
    rest = ranks(job, 2, *common, *keep, "--steps", "6")
    for rank in (0, 1):
        # Two equal runs differ in the last digits: the order of a sum depends on where in memory a shard lies.
        assert rest[rank] == pytest.approx(straight[rank][3:], abs=1e-4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[rank 0] resumes at step 4 of 6")
    assert "loss scale 32768" in lines[1]


def test_a_checkpoint_can_be_taken_up_by_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    keep = ("--wrap", "fsdp2", "--checkpoint", str(tmp_path), "--checkpoint-every", "4")
    first = ranks(job, 2, *keep, "--steps", "4")
    rest = ranks(job, 4, *keep, "--steps", "6")
    assert [len(losses) for losses in rest] == [2] * 4
    assert max(rest[0]) < first[0][0]
