"""measure() against numpy's long doubles: dtypes, arrangements, norms, nasty values; its exactness; no large copies.

Long doubles (x86: 64 bits of mantissa, exponents to 1e4932) hold every power of every number used here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distclip import simd
from distclip.measure import Bundle, RangeCache, max_abs, measure, scaled_power_sum
from distclip.measure.device import measure_on_device

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
NORM_TYPES = (1.0, 2.0, 3.0, 0.5, 2.5, 6.0, math.inf)
ARRANGEMENTS = ("plain", "transposed", "sliced", "flat", "expanded", "scalar", "sparse", "conjugate")
SPECIAL = (0.0, -0.0, 1e-30, -1e-30, 1e-40, 3e38, -3e38, 1e-7, 65504.0, math.nan, math.inf, -math.inf)

pytestmark = pytest.mark.usefixtures("kernels")


class Expected(NamedTuple):
    amount: Any
    nan: int
    inf: int
    largest: Any


def elements(gradient: Tensor) -> Any:
    """Every element as the gradient shows it, one-dimensional, in long doubles."""
    # Not to_dense(): it makes inf + nan j of inf + 0 j. The zeros that are not stored do not matter.
    dense = gradient.detach() if gradient.layout is torch.strided else gradient.detach().coalesce().values()
    wide = dense.to(torch.complex128 if dense.is_complex() else torch.float64).resolve_conj()
    return wide.numpy().reshape(-1).astype(np.clongdouble if dense.is_complex() else np.longdouble)


def expected(gradients: Sequence[Tensor], norm_type: float, scale: float = 1.0) -> Expected:
    amount, largest = np.longdouble(0), np.longdouble(0)
    nan = inf = 0
    for gradient in gradients:
        array = elements(gradient)
        is_nan = np.isnan(array.real) | np.isnan(array.imag)
        magnitude = np.hypot(array.real, array.imag)[~is_nan]
        finite = magnitude[np.isfinite(magnitude)]
        nan += int(is_nan.sum())
        inf += len(magnitude) - len(finite)
        if len(finite):
            largest = max(largest, finite.max())
            if not math.isinf(norm_type):
                amount += ((finite / np.longdouble(scale)) ** np.longdouble(norm_type)).sum()
    return Expected(largest if math.isinf(norm_type) else amount, nan, inf, largest)


def norm_error(amount: float, wanted: Any, norm_type: float) -> float:
    """Relative error of the norm that follows from an amount."""
    if wanted == 0:
        return abs(amount)
    return float(
        abs((np.longdouble(amount) / wanted) ** np.longdouble(1 if math.isinf(norm_type) else 1 / norm_type) - 1)
    )


def check(gradients: Sequence[Tensor], norm_type: float, found: Tensor) -> None:
    wanted = expected(gradients, norm_type)
    amount, nan, inf, flag = found.tolist()
    assert (nan, inf) == (wanted.nan, wanted.inf)
    if wanted.amount > 1e308 or 0 < wanted.amount < 1e-290:
        assert flag == 1.0
        scale = max_abs(gradients).item()
        assert norm_error(scale, wanted.largest, math.inf) < 1e-15
        scaled = scaled_power_sum(gradients, norm_type, scale).item()
        assert norm_error(scaled, expected(gradients, norm_type, scale).amount, norm_type) < 1e-12
    else:
        assert flag == 0.0
        assert norm_error(amount, wanted.amount, norm_type) < 1e-6


def arrange(tensor: Tensor, arrangement: str) -> Tensor:
    """The numbers of a matrix (some of them, or some of them several times) lying in memory in another way."""
    if arrangement == "transposed":
        return tensor.t()
    if arrangement == "sliced":
        return tensor[:, ::2]
    if arrangement == "flat":
        return tensor.reshape(-1)
    if arrangement == "expanded":
        return tensor.unsqueeze(1).expand(-1, 3, -1)
    if arrangement == "scalar" and tensor.numel():
        return tensor[0, 0]
    if arrangement == "conjugate":
        return tensor.conj()
    if arrangement == "sparse":  # every row of the sparse tensor comes in two parts, to be summed
        rows = torch.arange(tensor.shape[0]) // 2
        size = (max(1, tensor.shape[0]), tensor.shape[1])
        return torch.sparse_coo_tensor(rows[None], tensor, size, check_invariants=True)
    return tensor


@st.composite
def gradient(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.integers(0, 40)), draw(st.integers(1, 100))
    magnitude = draw(st.sampled_from((1.0, 1e-3, 1e-12, 1e4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    base = torch.randn(*shape, generator=generator, dtype=dtype.to_real() if dtype.is_floating_point else torch.float64)
    kind = draw(st.sampled_from(("random", "constant", "special")))
    base = torch.full_like(base, 0.1) if kind == "constant" else base
    base = base.to(torch.complex128 if dtype.is_complex else torch.float64) * magnitude
    if kind == "special" and base.numel():
        parts = torch.view_as_real(base).view(-1) if base.is_complex() else base.view(-1)
        for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=4)):
            parts[draw(st.integers(0, parts.numel() - 1))] = value
    return arrange(base.to(dtype), draw(st.sampled_from(ARRANGEMENTS)))


@given(gradients=st.lists(gradient(), max_size=6), norm_type=st.sampled_from(NORM_TYPES), cached=st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_bucket_is_measured_as_long_doubles_say(gradients: list[Tensor], norm_type: float, cached: bool) -> None:
    before = [gradient.clone() for gradient in gradients]
    check(gradients, norm_type, measure(Bundle(gradients, RangeCache()) if cached else gradients, norm_type))
    for gradient, copy in zip(gradients, before, strict=True):
        np.testing.assert_array_equal(elements(gradient), elements(copy), "measuring must not write")


@given(
    gradients=st.lists(gradient(), min_size=1, max_size=4),
    norm_type=st.sampled_from((0.5, 1.0, 2.0, 3.0, math.inf)),
)
@settings(max_examples=150, deadline=None)
def test_the_device_path_agrees_where_all_is_finite(gradients: list[Tensor], norm_type: float) -> None:
    # On CUDA this path runs; nothing in it depends on the device, so it can be checked here.
    found, each = measure_on_device(gradients, norm_type)
    wanted = expected(gradients, norm_type)
    assert (found[1] > 0, found[2] > 0) == (wanted.nan > 0, wanted.inf > 0) or wanted.nan
    if wanted.nan == wanted.inf == 0 and 1e-290 < wanted.amount < 1e308:
        assert norm_error(found[0].item(), wanted.amount, norm_type) < 1e-12
        assert found[3] == 0
    for gradient, mark in zip(gradients, each.tolist(), strict=True):
        alone = expected([gradient], norm_type)
        assert math.isnan(mark) == (alone.nan > 0)
        assert math.isinf(mark) == (alone.inf > 0 and not alone.nan)


@given(cuts=st.lists(st.integers(0, 200_000), max_size=8), norm_type=st.sampled_from((1.0, 2.0, 3.0, math.inf)))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_does_not_depend_on_how_tensors_are_split(
    dtype: torch.dtype, cuts: list[int], norm_type: float
) -> None:
    flat = torch.randn(200_000, generator=torch.Generator().manual_seed(len(cuts))).to(dtype)
    bounds = [0, *sorted(cuts), 200_000]
    pieces = [flat[low:high].clone() for low, high in pairwise(bounds)]
    whole, split = measure([flat], norm_type)[0], measure(pieces, norm_type)[0]
    assert abs(split.item() / whole.item() - 1) < 2e-7 * (1 if math.isinf(norm_type) else norm_type)


@pytest.mark.parametrize("numel", [5, 255, 4_099, 33_000, 70_001, 600_000, 3_000_017])
@pytest.mark.parametrize("values", ["constant", "random", "absorbing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_l2_norm_is_exact_to_one_in_a_million(dtype: torch.dtype, values: str, numel: int) -> None:
    if values == "constant":
        worst = [torch.full((numel,), value) for value in (0.1, 1.7, 2.4e-4)]
    elif values == "random":
        worst = [torch.randn(numel, generator=torch.Generator().manual_seed(numel))]
    else:  # each accumulator first meets a 1, and then only numbers whose squares vanish beside it
        worst = [torch.full((numel,), 2.4e-4) for _ in range(5)]
        for gradient, period in zip(worst, (256, 512, 1024, 8192, 1 << 20), strict=True):
            for row in gradient.split(period):
                row[: 8 if period == 512 else 16] = 1.0
    for gradient in worst:
        gradient = gradient.to(dtype)
        amount = measure([gradient], 2.0)[0].item()
        wanted = gradient.to(torch.float64).square().sum().item()
        assert abs(math.sqrt(amount / wanted) - 1) <= 1e-6


@pytest.mark.parametrize(
    ("value", "norm_type", "norm"),
    [
        (3e38, 2.0, 3e38 * math.sqrt(2)),
        (1e-30, 2.0, 1e-30 * math.sqrt(2)),
        (1e-21, 2.0, 1e-21 * math.sqrt(2)),  # the square is subnormal: not 0, but inexact
        (3e38, 1.0, 6e38),
        (1e20, 3.0, 1e20 * 2 ** (1 / 3)),
        (1e-20, 3.0, 1e-20 * 2 ** (1 / 3)),
        (3e38, math.inf, 3e38),
    ],
)
def test_fp32_overflow_and_underflow_do_not_reach_the_norm(value: float, norm_type: float, norm: float) -> None:
    amount, nan, inf, flag = measure([torch.tensor([value, -value])], norm_type).tolist()
    assert norm_error(amount, np.longdouble(norm) ** (1 if math.isinf(norm_type) else norm_type), norm_type) < 1e-6
    assert (nan, inf, flag) == (0, 0, 0)


def test_tiny_values_count_also_beside_a_nan() -> None:
    gradients = [torch.tensor([math.nan, math.inf]), torch.full((1000,), 1e-30)]
    amount, nan, inf, _ = measure(gradients, 2.0).tolist()
    assert amount == pytest.approx(1e-57, rel=1e-6)
    assert (nan, inf) == (1, 1)


def test_a_sum_beyond_fp64_is_flagged_and_can_be_had_scaled() -> None:
    gradients = [torch.tensor([3e200, 4e200], dtype=torch.float64), torch.tensor([1.0])]
    assert measure(gradients, 2.0).tolist() == [math.inf, 0, 0, 1]
    scale = max_abs(gradients).item()
    assert scale == 4e200
    assert scale * math.sqrt(scaled_power_sum(gradients, 2.0, scale).item()) == pytest.approx(5e200)
    assert measure([torch.tensor([3e-200, 4e-200], dtype=torch.float64)], 2.0)[3] == 1


def test_zero_and_nothing() -> None:
    for gradients in ([], [torch.empty(0)], [torch.zeros(5), -torch.zeros(2, dtype=torch.bfloat16)]):
        for norm_type in NORM_TYPES:
            assert measure(gradients, norm_type).tolist() == [0, 0, 0, 0]
        assert max_abs(gradients) == 0
        assert scaled_power_sum(gradients, 2.0, 1.0) == 0


def test_a_nan_behind_an_infinity_is_a_nan() -> None:
    gradient = torch.tensor([complex(math.inf, math.nan), complex(1, math.inf), 3 + 4j])
    for norm_type, amount in ((1.0, 5), (2.0, 25), (math.inf, 5)):
        assert measure([gradient], norm_type).tolist() == [amount, 1, 1, 0]


def test_a_gradient_that_is_part_of_a_graph_can_be_measured() -> None:
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    (gradient,) = torch.autograd.grad((weight**2).sum(), weight, create_graph=True)
    found = measure([gradient], 2.0)
    assert found[0].item() == pytest.approx(52)
    assert not found.requires_grad


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan])
def test_a_norm_type_that_is_not_positive_is_refused(norm_type: float) -> None:
    with pytest.raises(ValueError, match="norm_type must be positive"):
        measure([torch.ones(2)], norm_type)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_is_no_scale_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="scale"):
        scaled_power_sum([torch.ones(2)], 2.0, scale)


def test_what_is_not_a_gradient_is_refused() -> None:
    with pytest.raises(TypeError, match="floating point"):
        measure([torch.ones(2, dtype=torch.int64)], 2.0)
    with pytest.raises(TypeError, match="layout"):
        measure([torch.ones(2).to_mkldnn()], 2.0)


class LargestAllocation(TorchDispatchMode):
    """Notes the largest memory that any operation allocated for a result."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors([args, kwargs or {}])}
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def _tensors(tree: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


@pytest.mark.parametrize(("norm_type", "poison"), [(1.0, 0.0), (2.0, 0.0), (2.0, math.nan), (math.inf, 0.0)])
@pytest.mark.parametrize("arrangement", ["plain", "transposed", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_no_gradient_is_copied_as_a_whole(
    dtype: torch.dtype, arrangement: str, norm_type: float, poison: float
) -> None:
    gradient = arrange(torch.ones(4096, 2048, dtype=dtype), arrangement)
    gradient[7, 7] = poison
    assert gradient.numel() * gradient.element_size() >= 8 << 20
    with LargestAllocation() as largest:
        measure([gradient], norm_type)
    in_place = simd.works() and dtype in simd.DTYPES and (arrangement, norm_type, poison) == ("plain", 2.0, 0.0)
    assert (0 if in_place else 1) <= largest.bytes <= 5 << 20


def test_no_host_read_on_an_accelerator() -> None:
    # Tensors on the meta device have no values: whatever wants one on the host raises.
    gradients = [torch.empty(4000, 30, device="meta"), torch.empty(5, device="meta", dtype=torch.bfloat16)]
    gradients += [torch.empty(3, device="meta", dtype=dtype) for dtype in (torch.float64, torch.complex64)]
    gradients += [torch.empty(6, 6, device="meta").t(), torch.empty(6, 6, device="meta")[:, ::2]]
    for norm_type in NORM_TYPES:
        found = measure(gradients, norm_type)
        assert (found.shape, found.dtype, found.device.type) == ((4,), torch.float64, "meta")
    assert max_abs(gradients).device.type == scaled_power_sum(gradients, 2.0, 1.0).device.type == "meta"
    with pytest.raises((RuntimeError, NotImplementedError)):
        found[0].item()


def test_a_default_device_or_dtype_makes_no_difference() -> None:
    gradients = [torch.ones(5), torch.ones(2000, dtype=torch.bfloat16), torch.ones(3, 3).t(), torch.empty(0)]
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            for norm_type in NORM_TYPES:
                wanted = 1 if math.isinf(norm_type) else 2014
                assert measure(gradients, norm_type).tolist() == [pytest.approx(wanted), 0, 0, 0]
            assert max_abs(gradients).item() == 1
            assert measure([], 2.0).tolist() == [0, 0, 0, 0]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_measures_without_waiting() -> None:
    generator = torch.Generator().manual_seed(0)
    host = [torch.randn(size, generator=generator).to(dtype) for size in (3, 70_001) for dtype in DTYPES[:4]]
    host += [torch.tensor([3e38, 1e-30]), torch.tensor([3 + 4j]), torch.randn(6, 6, generator=generator).t()]
    for gradients in (host, [*host, torch.tensor([math.nan]), torch.tensor([math.inf])]):
        device = [gradient.cuda() for gradient in gradients]
        for norm_type in (1.0, 2.0, 3.0, math.inf):
            torch.cuda.set_sync_debug_mode("error")
            try:
                found = measure(device, norm_type)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert found.device.type == "cuda"
            assert norm_error(found[0].item(), expected(host, norm_type).amount, norm_type) < 1e-6
            assert found[1:].tolist() == [float(len(gradients) > len(host))] * 2 + [0.0]
    mixed = measure([torch.tensor([3.0]), torch.tensor([4.0]).cuda()], 2.0)
    assert mixed.tolist() == [25.0, 0.0, 0.0, 0.0]
    assert mixed.device.type == "cuda"
