"""Checksums see every bit, not the way a tensor lies in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distclip.plan.fingerprint import combine, content_of, structure_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@given(size=st.integers(1, 70), at=st.integers(0, 69), offset=st.integers(0, 3))
def test_a_changed_element_changes_the_checksum(dtype: torch.dtype, size: int, at: int, offset: int) -> None:
    values = torch.arange(size + offset).remainder(2).to(dtype)[offset:]
    other = values.clone()
    other[at % size] = 1 - other[at % size].to(torch.complex64).real.to(torch.int8).item()
    assert content_of(values) == content_of(values.clone())
    assert content_of(values) != content_of(other)


def test_layout_in_memory_does_not_count() -> None:
    values = torch.randn(6, 5)
    assert content_of(values.t()) == content_of(values.t().contiguous())
    assert content_of(values[:, 1:4]) == content_of(values[:, 1:4].clone())
    one = torch.tensor([2.5])
    assert content_of(one.expand(1)) == content_of(one[0].expand(1)) == content_of(one)
    assert content_of(one[0].expand(3)) == content_of(torch.full((3,), 2.5))


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(3, device="meta"), torch.empty(2, 0)])
def test_tensors_without_values(tensor: torch.Tensor) -> None:
    assert content_of(tensor) == 0


def test_order_and_structure_count() -> None:
    assert combine([1, 2]) != combine([2, 1])
    assert combine([1]) != combine([1, 0])
    assert structure_of(("a", 1)) == structure_of(("a", 1)) != structure_of(("a", 2))
    assert -(2**63) <= structure_of("x") < 2**63
