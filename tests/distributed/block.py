"""A model for layouts that cut it: with parameters to replicate, and two layers to shard by columns and by rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """The same parameters on every rank that gives the same seed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(self.norm(batch))))
        return out
