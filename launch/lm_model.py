"""The model and the data of `train_lm.py`: a small transformer that learns to write Python.

The text is on every machine already: the standard library's own source files, read as bytes. So there is nothing to
download, no tokeniser (the vocabulary is the 256 values of a byte), and the loss means something: a model that knows
nothing starts at ln 256 = 5.55 nats per byte, and has to fall from there.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


class Block(nn.Module):
    """Attention, then a feed-forward part, each behind its own norm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward_in = nn.Linear(width, 4 * width)
        self.feed_forward_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> the same shape."""
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.feed_forward_out(F.gelu(self.feed_forward_in(self.feed_forward_norm(x))))
        return x + added


class LanguageModel(nn.Module):
    """Decoder-only transformer over bytes; the embedding is also the output layer (tied)."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the residual stream 2 * layers times starts smaller, so that the sum does not grow.
                into_residual = name.endswith(("attention_out.weight", "feed_forward_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if into_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Bytes as int64 [batch, length] -> logits [batch, length, 256]."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """How badly each byte of int64 [batch, length + 1] is foreseen: mean cross entropy in nats per byte, 0-d, fp32."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def read_source(limit: int) -> Tensor:
    """The first `limit` bytes of the standard library's source files, in the order of their paths: uint8 [limit].

    Raises:
        SystemExit: this Python has no source files (some embedded builds keep them in a zip).
    """
    root = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}  # lie inside the same folder, and differ from machine to machine
    text = bytearray()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if not installed.intersection(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise SystemExit(f"train_lm: no Python source files under {root} to train on")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def draw_batch(text: Tensor, batch: int, context: int, key: tuple[int, ...]) -> Tensor:
    """`batch` random pieces of the text, int64 [batch, context + 1]; the same key gives the same pieces.

    With (seed, step, micro-batch, rank) as key there is no state of the data to save: a run that resumes at step 500
    sees what it would have seen.
    """
    generator = torch.Generator().manual_seed(random.Random(repr(key)).getrandbits(63))
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    return text[starts + torch.arange(context + 1)].long()
