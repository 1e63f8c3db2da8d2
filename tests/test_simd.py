"""NumKong's kernels against fp64: sizes, offsets, nasty numbers; and what happens where it is missing or wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from distclip import simd
from distclip.apply import clamp_, scale_, zero_nonfinite_
from distclip.measure import measure

DTYPES = tuple(simd.DTYPES)
BIG = (1 << 22) + 7


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], bool]]:
    """Whether `works` accepts a module in NumKong's place."""

    def ask(module: Any) -> bool:
        monkeypatch.setattr(simd, "_numkong", module)
        simd.works.cache_clear()
        return simd.works()

    yield ask
    monkeypatch.undo()
    simd.works.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 3, 255, 256, 257, 1000, 33_024, 70_001, BIG])
@pytest.mark.parametrize("offset", [0, 1, 5])
def test_squares_are_those_of_fp64_wherever_the_numbers_begin(dtype: torch.dtype, numel: int, offset: int) -> None:
    buffer = torch.randn(offset + numel + 3, generator=torch.Generator().manual_seed(numel)).to(dtype)
    buffer[:offset] = buffer[offset + numel :] = math.nan  # a number too many would show
    values = buffer[offset : offset + numel]
    assert simd.squares(values.data_ptr(), values.dtype, numel) == pytest.approx(
        values.double().square().sum().item(), rel=5e-7
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 300, 33_024, BIG])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_shows_wherever_it_is(dtype: torch.dtype, numel: int, value: float) -> None:
    values = torch.ones(numel, dtype=dtype)
    for position in {0, 1, numel // 2, numel - 2, numel - 1} & set(range(numel)):
        values[position] = value
        found = simd.squares(values.data_ptr(), values.dtype, numel)
        assert math.isnan(found) if math.isnan(value) else found == math.inf
        values[position] = 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38, 1e-30, 1e-40])
def test_what_is_odd_is_measured_again(dtype: torch.dtype, value: float) -> None:
    gradients = [torch.ones(40_000, dtype=dtype), torch.full((20_000,), 0.5, dtype=dtype)]
    gradients[1][1234] = min(value, torch.finfo(dtype).max) if math.isfinite(value) else value
    finite = torch.cat([gradient[gradient.isfinite()].double() for gradient in gradients])
    amount, nan, inf, flag = measure(gradients, 2.0).tolist()
    assert amount == pytest.approx(finite.square().sum().item(), rel=2e-6)
    assert (nan, inf, flag) == (math.isnan(value), math.isinf(value), 0)


def bits(values: Tensor) -> Tensor:
    """What tells -0.0 from 0.0; all nan alike."""
    whole = values.view(torch.int32 if values.dtype is torch.float32 else torch.int16)
    return torch.where(values.isnan(), torch.full_like(whole, -1), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 5])
@pytest.mark.parametrize("factor", [0.9, 1 / 3, 1e-5, 2.0**-100, -0.5, 3.7, 1e30])
def test_every_number_there_is_is_multiplied_as_torch_would(dtype: torch.dtype, offset: int, factor: float) -> None:
    patterns = (torch.arange(1 << 16, dtype=torch.int32) * 65537).to(
        torch.int32 if dtype is torch.float32 else torch.int16
    )
    buffer = torch.cat([patterns[:offset], patterns, patterns[:3]]).view(dtype)
    values = buffer[offset:-3]
    wanted = buffer.clone()
    wanted[offset:-3] = (values.float() * torch.tensor(factor)).to(dtype)  # neighbours keep what they are
    simd.multiply_(values.data_ptr(), dtype, values.numel(), factor)
    assert torch.equal(bits(buffer), bits(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 3, 31, 33, 1000, 33_024, BIG])
def test_any_number_of_numbers_is_multiplied_once(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel + 2, generator=torch.Generator().manual_seed(numel)).to(dtype)
    wanted = values.clone()
    wanted[1:-1] = (values[1:-1].float() * torch.tensor(0.123)).to(dtype)
    simd.multiply_(values[1:-1].data_ptr(), dtype, numel, 0.123)
    assert torch.equal(values, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_at_an_address_are_left_to_torch(dtype: torch.dtype) -> None:
    plain = torch.ones(40, 20, dtype=dtype)
    assert simd.reaches(plain)
    assert simd.reaches(plain[3:].view(-1))
    zeros = torch._efficientzerotensor((40,), dtype=dtype)
    for odd in (plain.t(), plain[:, ::2], plain[0].expand(3, 20), torch._neg_view(plain), zeros, plain.double()):
        assert not simd.reaches(odd)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_another_class_is_left_to_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # the memory of a subclass need not be what it shows: a collective may be under way
    for name in ("squares", "multiply_"):
        monkeypatch.setattr(simd, name, lambda *_: pytest.fail("reached by address"))
    gradient = torch.ones(40_000, dtype=dtype).as_subclass(type("Lazy", (Tensor,), {}))
    assert measure([gradient], 2.0).tolist() == pytest.approx([40_000, 0, 0, 0])
    scale_([gradient], 0.5)
    assert torch.equal(gradient, torch.full((40_000,), 0.5, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [3, 5_000, 40_001, 300_001])
def test_zeros_without_memory_are_zeros(dtype: torch.dtype, numel: int) -> None:
    # what the derivative of a sign leaves in .grad: a penalty on the L1 norm of gradients comes to that
    parameter = torch.nn.Parameter(torch.ones(numel, dtype=dtype))
    torch.sgn(parameter).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.data_ptr() == 0
    assert measure([parameter.grad], 2.0).tolist() == [0, 0, 0, 0]
    others = [torch.ones(numel, dtype=dtype), torch.ones(5, dtype=dtype), torch.ones(4, 2, dtype=dtype).t()]
    scale_([others[0], parameter.grad, *others[1:]], 0.5)
    scale_([parameter.grad], 0.5)
    zero_nonfinite_([parameter.grad])
    clamp_([parameter.grad], 1.0)
    assert not parameter.grad.any()
    assert all(torch.equal(other, torch.full_like(other, 0.5)) for other in others)  # multiplied once
    assert measure([parameter.grad, torch.full((numel,), 0.5, dtype=dtype)], 2.0)[0].item() == pytest.approx(numel / 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_default_dtype_does_not_matter(probe: Callable[[Any], bool], dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            assert probe(simd._numkong)
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_is_broken_off_has_a_new_version(monkeypatch: pytest.MonkeyPatch) -> None:
    # as by Ctrl-C between two gradients: a double backward must notice that one of them has changed
    gradients = [torch.ones(70_000, dtype=torch.bfloat16) for _ in range(3)]
    addresses = []
    assert simd.works()

    def interrupted(address: int, dtype: torch.dtype, numel: int, factor: float) -> None:
        addresses.append(address)
        if len(addresses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(simd, "multiply_", interrupted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        scale_(gradients, 0.5)
    assert all(gradient._version == 1 for gradient in gradients)


def test_without_numkong_or_with_another_one_torch_measures(probe: Callable[[Any], bool]) -> None:
    real = simd._numkong
    assert probe(real)
    assert not probe(None)
    assert not probe(SimpleNamespace())  # other names
    assert measure([torch.ones(40_000)], 2.0).tolist() == pytest.approx([40_000, 0, 0, 0])

    def replaced(**names: Any) -> SimpleNamespace:
        real_names = {name: getattr(real, name) for name in ("from_pointer", "dot", "moments", "scale")}
        return SimpleNamespace(**real_names | names)

    assert probe(replaced())
    assert not probe(replaced(moments=lambda view: (0.0, 1.0)))
    assert not probe(replaced(dot=lambda left, right: SimpleNamespace(sum=lambda: 1.0)))
    assert not probe(replaced(moments=lambda view: (0.0, min(real.moments(view)[1], 1e300))))  # hides infinity

    def loses_the_sign_of_zero(view: Any, *, alpha: float, beta: float, out: Any) -> None:
        real.scale(view, alpha=alpha, beta=0.0, out=out)

    def rounds_the_factor(view: Any, *, alpha: float, beta: float, out: Any) -> None:
        real.scale(view, alpha=torch.tensor(alpha).bfloat16().item(), beta=beta, out=out)

    assert not probe(replaced(scale=loses_the_sign_of_zero))
    assert not probe(replaced(scale=rounds_the_factor))

    def in_plain_fp32(left: Any, right: Any) -> Any:
        rows = torch.frombuffer(bytearray(left.astype("f32")), dtype=torch.float32).view(left.shape)
        total = torch.zeros(len(rows))
        for column in rows.unbind(1):
            total += column * column
        return SimpleNamespace(sum=total.double().sum().item)

    halves = torch.full((2, 256), 0.5, dtype=torch.bfloat16)
    matrix = real.from_pointer(halves.data_ptr(), (2, 256), "bf16")
    assert in_plain_fp32(matrix, matrix).sum() == 128.0  # right where nothing is lost
    assert not probe(replaced(dot=in_plain_fp32))
