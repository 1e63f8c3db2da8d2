"""Time distclip's clipping against torch's own, beside one read of the same memory.

    python benchmarks/hot_path.py [--quick] [--json FILE] [--check]

Prints a line for every set of gradients, precision and layout, with and without something to clip:

    x-limit    time of distclip / time of one read (`flat.sum()` over as many elements): the least clipping can cost
    speed-up   time of the other call / time of distclip

Of each ratio that of the shortest times, and the median over rounds of the ratio within a round. Aims are about the
median: how fast memory is drifts while this runs, up to twofold on virtual machines. The calls of one round see the
same, but the shortest times of two calls may come from different minutes.

"torch" is `torch.nn.utils.clip_grad_norm_`, for FSDP1 its own method, and with a GradScaler `unscale_` and
`clip_grad_norm_`. One process uses all cores, each of two ranks (gloo) its share, unless OMP_NUM_THREADS is set. At the
end the figures that distclip aims at, and whether this run met them.

Ratios are of one run, interleaved; they still vary by some 15 % on a quiet machine. On one where other programs want
the same cores, threads of one call wait for each other and no ratio means anything: set OMP_NUM_THREADS=1 there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hot_path_cases import DISTCLIP, READ, Case, collectives, first_calls, run
from rich.console import Console
from rich.table import Table

from distclip import simd

SETS = ("GPT-2", "10 x 10M", "3000 x 33k", "3000 x 64")
PRECISIONS = ("fp32", "bf16")
Row = dict[str, Any]


def cases() -> Iterator[Case]:
    for layout, world, names in (
        ("plain", 1, SETS),
        ("scaler", 1, ("GPT-2", "3000 x 64")),
        ("plain", 2, SETS),
        ("dtensor", 2, SETS),
        ("fsdp1", 2, ("GPT-2",)),
    ):
        for name in names:
            for dtype in PRECISIONS:
                for clips in (False, True):
                    yield Case(layout, world, name, dtype, clips)


def on_rank(rank: int, world: int, store: str, chosen: list[Case], shrink: int, rounds: int, results: Any) -> None:
    """What each started process does: all cases of one layout; rank 0 sends what was found."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // world)))
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    if chosen[0].layout == "dtensor":
        count = 3000 // shrink
        found = {"first": first_calls(count), "collectives": collectives(count), "count": count}
        if rank == 0:
            results.put((None, found))
    for case in chosen:
        seconds = run(case, shrink, rounds)
        if rank == 0:
            results.put((case, seconds))
    if world > 1:
        dist.destroy_process_group()


def measure(layout: str, world: int, shrink: int, rounds: int) -> Iterator[tuple[Case | None, dict[str, Any]]]:
    """Run one layout's cases in processes of their own and yield results as they come."""
    chosen = [case for case in cases() if (case.layout, case.world) == (layout, world)]
    awaited = len(chosen) + (layout == "dtensor")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, str(Path(folder) / "store"), chosen, shrink, rounds, results)
        ranks = [context.Process(target=on_rank, args=(rank, *arguments)) for rank in range(world)]
        try:
            for rank in ranks:
                rank.start()
            while awaited:
                try:
                    yield results.get(timeout=1)
                    awaited -= 1
                except queue.Empty:
                    if any(rank.exitcode for rank in ranks):
                        raise SystemExit("a rank died: see its traceback above") from None
            for rank in ranks:
                rank.join()
        finally:
            for rank in ranks:
                rank.kill()


def row_of(case: Case, seconds: dict[str, list[float]]) -> Row:
    row: Row = asdict(case) | {"peer": next(name for name in seconds if name not in (READ, DISTCLIP))}
    ours, read, peer = (seconds[name] for name in (DISTCLIP, READ, row["peer"]))
    row |= {"ms_min": min(ours) * 1e3, "x_limit_min": min(ours) / min(read), "speed_up_min": min(peer) / min(ours)}
    row |= {"ms_median": statistics.median(ours) * 1e3}
    row |= {"x_limit_median": _median_ratio(ours, read), "speed_up_median": _median_ratio(peer, ours)}
    return row | {"seconds": seconds}


def _median_ratio(times: list[float], others: list[float]) -> float:
    """The median over rounds of how much longer one call took than another in the same round."""
    return statistics.median(time / other for time, other in zip(times, others, strict=True))


def first_row(found: dict[str, Any]) -> Row:
    ours, peer = (found["first"][name][0] for name in (DISTCLIP, "torch"))
    return {
        "first_call_of": found["count"],
        "first_call_ms": ours * 1e3,
        "first_call_speed_up": peer / ours,
        "collectives": found["collectives"],
    }


def verdict(rows: list[Row], first: Row) -> list[tuple[str, str, bool]]:
    """(the aim, what was found in the median, whether it is met)."""

    def speed_up(layout: str, world: int, name: str, dtype: str, clips: bool) -> float:
        key = (layout, world, name, dtype, clips)
        fields = ("layout", "world", "name", "dtype", "clips")
        return float(next(row["speed_up_median"] for row in rows if tuple(row[each] for each in fields) == key))

    gpt2 = speed_up("plain", 1, "GPT-2", "fp32", False)
    tiny = speed_up("plain", 1, "3000 x 64", "fp32", False)
    sharded = speed_up("dtensor", 2, "3000 x 64", "fp32", False)
    worst = min(rows, key=lambda row: float(row["speed_up_median"]))
    least = float(worst["speed_up_median"])
    where = f"{worst['layout']} x{worst['world']} {worst['name']} {worst['dtype']}{' clips' if worst['clips'] else ''}"
    cliff = float(first["first_call_ms"]) / 1e3
    return [
        ("GPT-2 fp32, nothing to clip: at least 1.8 x torch", f"{gpt2:.2f} x", gpt2 >= 1.8),
        ("3000 x 64 fp32, nothing to clip: at least 3 x torch", f"{tiny:.2f} x", tiny >= 3),
        ("no line under 0.9 x torch", f"{least:.2f} x ({where})", least >= 0.9),
        ("3000 DTensors after the first call: at least 3 x torch", f"{sharded:.2f} x", sharded >= 3),
        ("no cliff at the first call of 3000 DTensors: under 2 s", f"{cliff:.2f} s", cliff < 2),
        ("at most one collective a step", str(first["collectives"]), first["collectives"] <= 1),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Time distclip's clipping against torch's own.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the data and fewer rounds: a look, no figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all times there")
    parser.add_argument("--check", action="store_true", help="exit with 1 where an aim is not met")
    options = parser.parse_args()
    shrink, rounds = (10, 5) if options.quick else (1, 30)
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("layout", "ranks", "gradients", "precision", "clips", title="min / median of each", box=None)
    for column in ("distclip ms", "x-limit", "speed-up"):
        table.add_column(column, justify="right")
    rows: list[Row] = []
    first: Row = {}
    for layout, world in dict.fromkeys((case.layout, case.world) for case in cases()):
        for case, seconds in measure(layout, world, shrink, rounds):
            if case is None:
                first = first_row(seconds)
                continue
            row = row_of(case, seconds)
            rows.append(row)
            pairs = [f"{row[f'{key}_min']:.2f} / {row[f'{key}_median']:.2f}" for key in ("ms", "x_limit", "speed_up")]
            table.add_row(layout, str(world), case.name, case.dtype, "yes" if case.clips else "no", *pairs)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    console.print(table)
    console.print(
        f"\n{'With' if simd.works() else 'Without'} NumKong's kernels (pip install 'distclip[cpu]').",
        markup=False,
        highlight=False,
    )
    console.print(
        f"First call of {first['first_call_of']} DTensors: {first['first_call_ms']:.0f} ms, "
        f"{first['first_call_speed_up']:.1f} x faster than torch's.\n"
    )
    aims = verdict(rows, first)
    console.print("By the median over rounds:")
    for aim, found, met in aims:
        console.print(f"{'met    ' if met else 'NOT MET'}  {aim}: {found}", highlight=False, soft_wrap=True)
    if options.quick:
        console.print("(--quick: too little data for these to mean much)")
    if options.json is not None:
        versions = {
            "torch": torch.__version__,
            "numkong": simd.works(),
            "cpus": os.cpu_count(),
            "quick": options.quick,
        }
        report = versions | {"rows": rows, "first_call": first, "aims": [[*aim] for aim in aims]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(options.check and not all(met for *_, met in aims))


if __name__ == "__main__":
    sys.exit(main())
