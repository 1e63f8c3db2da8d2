"""Scaling and cleaning in place: the factor is exact, every layout is reached, and 1.0 writes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from distclip.apply import _scale_on_device, scale_, zero_nonfinite_
from distclip.measure import Bundle, RangeCache
from distclip.measure.ranges import LONG, SHORT

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)


def rounded_once(gradient: Tensor, factor: float) -> Tensor:
    """The product with an fp32 factor in fp32, then one rounding to the gradient's dtype; in fp64 for fp64."""
    if gradient.dtype in (torch.float64, torch.complex128):
        return gradient * factor
    wide = torch.complex64 if gradient.is_complex() else torch.float32
    return (gradient.to(wide) * torch.tensor(factor, dtype=torch.float32)).to(gradient.dtype)


@given(
    dtypes=st.lists(st.sampled_from(DTYPES), max_size=5),
    factor=st.floats(1e-12, 1e4),
    cached=st.booleans(),
    seed=st.integers(0, 100),
)
@settings(max_examples=200, deadline=None)
def test_the_factor_is_never_rounded_to_the_gradients_dtype(
    dtypes: list[torch.dtype], factor: float, cached: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(7, 9, generator=generator, dtype=torch.float32).to(dtype) for dtype in dtypes]
    wanted = [rounded_once(gradient, factor) for gradient in gradients]
    scale_(Bundle(gradients, RangeCache()) if cached else gradients, factor)
    for gradient, product in zip(gradients, wanted, strict=True):
        assert torch.equal(gradient, product)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """What scales a gradient depends on how many threads torch has."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads", "kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 100, SHORT, SHORT + 1, LONG, LONG + 1, 600_000])
def test_half_precision_is_exact_at_every_size(dtype: torch.dtype, numel: int) -> None:
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    wanted = rounded_once(gradient, 0.7391234)
    scale_([gradient], 0.7391234)
    assert torch.equal(gradient, wanted)
    assert gradient._version == 1  # a double backward must notice


@pytest.mark.usefixtures("threads", "kernels")
def test_flushed_subnormal_numbers_are_flushed_by_every_kernel() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        for numel in (100, SHORT + 1, LONG + 1):
            gradient = torch.full((numel,), 1e-39, dtype=torch.bfloat16)
            scale_([gradient], 0.5)
            assert not gradient.any()
    finally:
        torch.set_flush_denormal(False)


def test_a_factor_below_2_to_the_minus_100_is_applied_as_two() -> None:
    gradients = [
        torch.tensor([3e38]),
        torch.tensor([3e38], dtype=torch.bfloat16),
        torch.tensor([3e200]).double() * 1e162,
    ]
    torch.set_flush_denormal(True)  # where it works, a subnormal fp32 factor would make 0 of these
    try:
        scale_(gradients[:2], 2.4e-39)
    finally:
        torch.set_flush_denormal(False)
    assert gradients[0].item() == pytest.approx(0.72, rel=1e-6)
    assert gradients[1].item() == pytest.approx(0.72, rel=4e-3)
    tiny = [torch.tensor([1e300], dtype=torch.float64)]
    scale_(tiny, 1e-300)
    assert tiny[0].item() == pytest.approx(1.0, rel=1e-15)


def test_one_writes_nothing_and_other_factors_do() -> None:
    gradients = [torch.ones(3), torch.ones(3, dtype=torch.bfloat16)]
    versions = [gradient._version for gradient in gradients]
    scale_(gradients, 1.0)
    scale_(gradients, torch.tensor(1.0, dtype=torch.float64))
    assert [gradient._version for gradient in gradients] == versions
    scale_(gradients, 0.5)
    assert [gradient._version for gradient in gradients] != versions
    scale_([], 0.5)


def test_a_default_device_makes_no_difference() -> None:
    gradients = [torch.ones(3), torch.ones(3, dtype=torch.bfloat16)]
    uncoalesced = torch.sparse_coo_tensor([[0, 0]], [math.inf, 1.0], (3,), check_invariants=True)
    with torch.device("meta"):
        scale_(gradients, 0.5)
        zero_nonfinite_([uncoalesced])
    assert gradients[0].tolist() == gradients[1].tolist() == [0.5] * 3
    assert uncoalesced.to_dense().tolist() == [0.0] * 3


def test_a_0d_tensor_is_as_good_as_a_number() -> None:
    gradient = torch.tensor([1.0, 2.0])
    scale_([gradient], torch.tensor(0.5, dtype=torch.float64))
    assert gradient.tolist() == [0.5, 1.0]
    with pytest.raises(ValueError, match="0-d"):
        scale_([gradient], torch.tensor([0.5]))


@pytest.mark.parametrize("cached", [False, True])
def test_every_arrangement_is_scaled_once(cached: bool) -> None:
    buffer = torch.ones(20)
    padding = torch.full((3,), 7.0)
    holed = torch.cat([torch.ones(4), padding, torch.ones(4)])
    gradients = [
        buffer[:8],
        buffer[8:].view(3, 4),
        holed[:4],
        holed[7:],
        torch.ones(4, 6).t(),
        torch.ones(4, 6)[:, ::2],
        torch.ones(3, 1).expand(3, 5),
        torch.tensor(1.0),
        torch.empty(0),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 1.0, 1.0], (4,), check_invariants=True),
        torch.sparse_coo_tensor([[0, 2]], [1.0, 1.0], (4,), check_invariants=True).coalesce(),
        torch.ones(3, 3).to_sparse_csr(),
    ]
    wanted = [gradient.to_dense() * 0.5 for gradient in gradients]
    scale_(Bundle(gradients, RangeCache()) if cached else gradients, 0.5)
    for gradient, half in zip(gradients, wanted, strict=True):
        assert torch.equal(gradient.to_dense(), half)
    assert holed[4:7].tolist() == [7.0] * 3


def test_adjacent_views_are_written_as_one_range() -> None:
    buffer = torch.ones(3000)
    gradients = list(buffer.split(3))
    scale_(Bundle(gradients, RangeCache()), 0.5)
    assert buffer._version == 1  # one write, not a thousand
    assert torch.equal(buffer, torch.full((3000,), 0.5))


def test_a_leaf_that_requires_grad_can_be_scaled() -> None:
    leaf = torch.ones(2, requires_grad=True)
    scale_([leaf], 0.5)
    assert leaf.tolist() == [0.5, 0.5]


def test_the_device_kernel_rounds_once_too() -> None:
    # The path for a factor that only an accelerator knows; its kernels exist on CPU as well.
    gradients = [torch.randn(50, generator=torch.Generator().manual_seed(1)).to(dtype) for dtype in DTYPES[:4]]
    gradients += [torch.randn(6, 6).t(), torch.ones(2, 1).expand(2, 3), torch.tensor([1 + 2j]).conj(), torch.empty(0)]
    gradients += [torch.tensor([3 + 4j], dtype=torch.complex128)]
    wanted = [rounded_once(gradient, 0.7391234) for gradient in gradients]
    _scale_on_device(gradients, torch.tensor(0.7391234, dtype=torch.float64))
    for gradient, product in zip(gradients, wanted, strict=True):
        assert torch.equal(gradient.resolve_conj(), product.resolve_conj())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_scales_without_waiting_and_rounds_once() -> None:
    host = [torch.randn(50, generator=torch.Generator().manual_seed(1)).to(dtype) for dtype in DTYPES]
    for factor in (0.7391234, torch.tensor(0.7391234, dtype=torch.float64, device="cuda")):
        gradients = [gradient.cuda() for gradient in host]
        torch.cuda.set_sync_debug_mode("error")
        try:
            scale_(gradients, factor)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for gradient, original in zip(gradients, host, strict=True):
            assert torch.equal(gradient.cpu(), rounded_once(original, 0.7391234))


def test_nonfinite_elements_become_zero_and_others_keep_their_bits() -> None:
    nan, inf = math.nan, math.inf
    gradient = torch.tensor([[1.0, nan, -inf], [inf, -0.0, 1e-40]])
    gradients = [
        gradient.clone(),
        gradient.clone().to(torch.bfloat16),
        gradient.clone().t(),
        gradient.clone()[:, ::2],
        torch.tensor([nan, 1.0]).unsqueeze(1).expand(2, 3),
        torch.tensor([complex(1, nan), complex(inf, 0), 1 + 2j]),
        torch.tensor(nan),
        torch.empty(0),
    ]
    wanted = [torch.where(each.isfinite(), each, 0) for each in gradients]
    zero_nonfinite_(gradients)
    for each, clean in zip(gradients, wanted, strict=True):
        assert torch.equal(each, clean)
    assert math.copysign(1.0, gradients[0][1, 1].item()) == -1.0


def test_a_sparse_element_whose_sum_is_not_finite_becomes_zero() -> None:
    indices = [[2, 0, 2, 1, 0], [1, 1, 1, 0, 0]]
    gradient = torch.sparse_coo_tensor(indices, [math.inf, 1.0, -math.inf, 5.0, 2.0], (4, 2), check_invariants=True)
    zero_nonfinite_([gradient])
    assert gradient.to_dense().tolist() == [[2.0, 1.0], [5.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    overflowing = torch.sparse_coo_tensor(
        [[0, 0, 1]], [[6e4, 1.0], [6e4, 1.0], [1.0, 1.0]], (3, 2), dtype=torch.float16, check_invariants=True
    )
    zero_nonfinite_([overflowing])
    assert overflowing.to_dense().tolist() == [[0.0, 2.0], [1.0, 1.0], [0.0, 0.0]]
    coalesced = torch.sparse_coo_tensor([[0, 1]], [math.nan, 1.0], (3,), check_invariants=True).coalesce()
    zero_nonfinite_([coalesced])
    assert coalesced.to_dense().tolist() == [0.0, 1.0, 0.0]
