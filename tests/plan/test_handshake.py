"""Matching fingerprints is a pure function of the table, and right for thousands of ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from distclip.plan.handshake import match


def test_holders_disputes_and_what_must_be_everywhere() -> None:
    table = torch.tensor(
        [
            [11, 1, 91, 1, 21, 5, 92, 0],
            [11, 1, 91, 1, 22, 6, 92, 0],
            [11, 1, 91, 1, 21, 7, 92, 0],
            [0, 0, 0, 0, 0, 0, 0, 0],
        ]
    )
    holders, knowing, disputed = match(table, [2, 2, 2, 0])
    assert holders == {11: (0, 1, 2), 21: (0, 2), 22: (1,)}
    assert knowing == {91: {0, 1, 2}, 92: {0, 1, 2}}
    assert disputed == {11, 21}  # 11 is missing on rank 3, 21 has two contents


@given(ranks=st.integers(1, 3000), shards=st.integers(1, 64))
def test_a_mesh_of_shards_and_replicas(ranks: int, shards: int) -> None:
    table = torch.tensor([[100 + rank % shards, rank % shards, 7, 0] for rank in range(ranks)])
    holders, knowing, disputed = match(table, [1] * ranks)
    assert not disputed
    assert holders[100] == tuple(range(0, ranks, shards))
    assert knowing[7] == set(range(ranks))
