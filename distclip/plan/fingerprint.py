"""Fingerprints: what the parameters of one layout class are, and what they hold, in two 64-bit integers.

Ranks exchange these instead of lists of names, so that a plan costs 16 bytes per rank and layout class however many
parameters there are. The structure covers names, order, shapes, dtypes and the layout's identity; the content is an
integer checksum of the local values: exact, independent of threads and the same on CPU and GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_INT64 = (1 << 64) - 1


def structure_of(parts: object) -> int:
    """A signed 64-bit hash of `repr(parts)`, the same in every process (unlike `hash`)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def content_of(tensor: Tensor) -> int:
    """A signed 64-bit checksum of the bits of a local tensor; 0 for tensors without storage (meta).

    Reads the tensor once and waits for it: only for plans, never in a step.
    """
    if tensor.is_meta or tensor.numel() == 0:
        return 0
    values = tensor.detach()
    if values.is_sparse or values.is_quantized:
        return 0
    flat = (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).contiguous().view(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)  # one element, expanded: contiguous with any stride
    flat = flat.view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()  # words must begin at the tensor's first byte, wherever it lies in its storage
    words = flat.numel() // 8 * 8
    total = int(flat[:words].view(torch.int64).sum().item()) + int(flat[words:].sum(dtype=torch.int64).item())
    return _signed(total)


def combine(contents: Sequence[int]) -> int:
    """Fold the checksums of several tensors into one that depends on their order."""
    total = 0
    for content in contents:
        total = (total * 6364136223846793005 + (content & _INT64) + 1442695040888963407) & _INT64
    return _signed(total)


def _signed(value: int) -> int:
    value &= _INT64
    return value - (1 << 64) if value >> 63 else value
