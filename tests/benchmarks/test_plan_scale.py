"""What a plan costs on 16,384 ranks, simulated: megabytes and seconds, however many parameters there are."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from distclip.plan import marked
from distclip.plan.sources import Found

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import plan_scale

RANKS = 16_384


def test_the_table_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of docs/cost.md, with room for a busy machine."""
    plan_scale.main([RANKS])
    rows = [line for line in capsys.readouterr().out.splitlines() if "16,384 │" in line]
    assert len(rows) == 4
    for row in rows:
        received = float(re.findall(r"([\d.]+) MB", row)[0])
        seconds = float(row.split("│")[6])
        assert received < 3.0
        assert seconds < 10.0


def test_marked_experts_are_found_among_a_million(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 expert modules on each rank, those of a rank also on every 256th other: 8 MB and a moment."""
    modules = 64
    found = []
    for index in range(modules):
        parameter = nn.Parameter(torch.arange(2.0) + index)
        parameter.allreduce = False  # type: ignore[attr-defined]
        found.append(Found(f"experts.{index}.weight", parameter))
    sent = []

    def gather(row: list[int], group: object) -> torch.Tensor:
        sent.append(8 * len(row) * RANKS)
        kinds = torch.arange(RANKS)[:, None] % 256
        return torch.tensor(row)[None, :] + kinds  # rank 0's own, and other numbers on 255 ranks of 256

    monkeypatch.setattr(marked, "gather_integers", gather)
    started = time.perf_counter()
    holders = marked.holders_by_content(found, range(modules), modules, None)
    assert time.perf_counter() - started < 10.0
    assert sent == [8 * modules * RANKS]
    assert set(holders.values()) == {tuple(range(0, RANKS, 256))}
