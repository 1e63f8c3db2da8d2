"""readable() and writable() show the same numbers as the gradient, in memory that can be walked; blocks() covers it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from distclip.measure.values import blocks, readable, writable


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """A view of a small buffer: permuted, sliced and expanded dimensions in any combination."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    tensor = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    for dim in range(tensor.dim()):
        if draw(st.booleans()):
            tensor = tensor[(slice(None),) * dim + (slice(draw(st.integers(0, 2)), None, draw(st.integers(1, 3))),)]
    if draw(st.booleans()):
        dim = draw(st.integers(0, tensor.dim()))
        tensor = tensor.unsqueeze(dim)
        sizes = [-1] * tensor.dim()
        sizes[dim] = draw(st.integers(1, 4))
        tensor = tensor.expand(sizes)
    return tensor


@given(tensor=strided())
@settings(max_examples=300, deadline=None)
def test_readable_shows_each_element_as_often_as_the_gradient_does(tensor: torch.Tensor) -> None:
    values, repeat = readable(tensor)
    assert sorted(values.flatten().tolist() * repeat) == sorted(tensor.flatten().tolist())
    if tensor.numel():
        assert values.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@given(tensor=strided())
@settings(max_examples=300, deadline=None)
def test_writing_through_writable_reaches_each_number_once(tensor: torch.Tensor) -> None:
    wanted = tensor.clone() * 2
    writable(tensor).mul_(2)
    assert torch.equal(tensor, wanted)


@given(tensor=strided(), size=st.integers(1, 7))
@settings(max_examples=300, deadline=None)
def test_blocks_are_small_and_cover_everything_once(tensor: torch.Tensor, size: int) -> None:
    parts = list(blocks(tensor, size))
    assert all(0 < part.numel() <= size for part in parts)
    assert sorted(v for part in parts for v in part.flatten().tolist()) == sorted(tensor.flatten().tolist())
    assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts)


@pytest.mark.parametrize("shape", [(), (7,), (3, 1, 4), (0, 3)])
def test_what_fills_its_memory_becomes_one_dimensional(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    assert readable(tensor)[0].dim() == 1
    assert readable(tensor.permute(tuple(reversed(range(tensor.dim())))))[0].is_contiguous()
    assert readable(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))[0].dim() == 1


def test_sparse_duplicates_are_summed_for_reading_and_all_reached_for_writing() -> None:
    gradient = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 5.0], (4,), check_invariants=True)
    assert readable(gradient)[0].tolist() == [3.0, 5.0]
    writable(gradient).mul_(2)
    assert gradient.to_dense().tolist() == [6.0, 0.0, 10.0, 0.0]
    compressed = torch.eye(3).to_sparse_csr()
    writable(compressed).mul_(2)
    assert readable(compressed)[0].tolist() == [2.0, 2.0, 2.0]
    assert torch.equal(compressed.to_dense(), 2 * torch.eye(3))


def test_flags_of_a_lazily_conjugated_or_negated_gradient_are_dropped() -> None:
    gradient = torch.tensor([1 + 2j])
    for values in (readable(gradient.conj())[0], writable(gradient.conj())):
        assert torch.view_as_real(values).abs().tolist() == [[1.0, 2.0]]
    negated = gradient.conj().imag
    assert negated.is_neg()
    writable(negated).mul_(3)
    assert negated.tolist() == [-6.0]
