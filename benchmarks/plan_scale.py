"""What a plan costs on many ranks: bytes that a rank receives and seconds that it thinks, simulated in one process.

    python benchmarks/plan_scale.py [RANKS ...]

The table of all ranks' numbers is made as the handshake would gather it, for a model of 3000 parameters, and matched by
the function that the handshake uses. Lists of names, which others exchange, are counted beside it.
"""

from __future__ import annotations

import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from distclip.plan.fingerprint import structure_of
from distclip.plan.handshake import match

PARAMETERS = 3000
NAME_BYTES = 40
HEADER_BYTES = 8 * (7 + 2 + 1)


def simulate(layout: str, ranks: int) -> Tensor:
    """All ranks' rows, int64 [ranks, classes * 4]."""
    rows = []
    classes: list[tuple[str, tuple[int, ...], int]]
    for rank in range(ranks):
        if layout == "DDP":
            classes = [("plain", (), 1)]
        elif layout == "FSDP2":
            classes = [("shard", (rank,), 0)]
        elif layout == "HSDP, 8 shards":
            classes = [("hsdp", (rank % 8,), 0)]
        else:  # pipeline of 16 stages, tensor parallel 8, the rest FSDP2, norms replicated over tensor parallel
            stage, place = rank % 16, rank // 16
            classes = [(f"tp{stage}", (place % 8, place // 8), 0), (f"norm{stage}", (place // 8,), 0)]
        row: list[int] = []
        for family, coordinate, everywhere in classes:
            row += [structure_of((family, coordinate)), structure_of((family, coordinate, 1)), structure_of(family)]
            row.append(everywhere)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64)


def main(sizes: list[int]) -> None:
    table = Table(title=f"planning {PARAMETERS} parameters", caption="received by each rank, once per plan")
    for column in ("ranks", "layout", "classes", "received", "lists of names", "seconds", "holders of one"):
        table.add_column(column, justify="right")
    for ranks in sizes:
        for layout in ("DDP", "FSDP2", "HSDP, 8 shards", "PP x TP x FSDP2"):
            numbers = simulate(layout, ranks)
            classes = numbers.shape[1] // 4
            started = time.perf_counter()
            holders, _, disputed = match(numbers, [classes] * ranks)
            seconds = time.perf_counter() - started
            assert not disputed
            table.add_row(
                f"{ranks:,}",
                layout,
                str(classes),
                f"{(numbers.numel() * 8 + HEADER_BYTES * ranks) / 1e6:.2f} MB",
                f"{ranks * PARAMETERS * NAME_BYTES / 1e6:,.0f} MB",
                f"{seconds:.3f}",
                f"{len(holders[int(numbers[0, 0])]):,}",
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or [8, 1024, 16384])
