"""Coalescing: exactly adjacent views of one storage are merged, nothing else is, and the cache notices every change."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from distclip import simd
from distclip.apply import scale_
from distclip.measure import Bundle, RangeCache, measure
from distclip.measure.layouts import layouts
from distclip.measure.ranges import MEDIUM, PACK, SMALL, Span

pytestmark = pytest.mark.usefixtures("kernels")


def spans(gradients: list[Tensor]) -> list[Span]:
    return [
        span
        for layout in layouts(gradients)
        for span in (*layout.spans(), *(s for pack in layout.packs for s in pack.spans))
    ]


def test_adjacent_views_of_one_buffer_become_one_range_whatever_their_order_and_shape() -> None:
    buffer = torch.arange(100.0)
    parts = [buffer[60:100].view(4, 10), buffer[0:10], buffer[10:60].view(5, 10)]
    assert spans(parts) == [Span(first=1, numel=100, tensors=3)]
    assert torch.equal(spans(parts)[0].view(parts), buffer)


def test_padding_is_not_bridged() -> None:
    buffer = torch.full((100,), float("nan"))
    parts = [buffer[0:49], buffer[49:56], buffer[64:100]]
    for part in parts:
        part.fill_(1.0)
    assert [(span.first, span.numel) for span in spans(parts)] == [(0, 56), (2, 36)]
    assert measure(parts, 1.0).tolist() == [92.0, 0, 0, 0]


def test_what_only_looks_adjacent_is_not_merged() -> None:
    memory = bytearray(80)
    one, two = (
        torch.frombuffer(memory, dtype=torch.float32, count=10),
        torch.frombuffer(memory, dtype=torch.float32, offset=40),
    )
    assert two.data_ptr() == one.data_ptr() + 40  # adjacent, but two storages
    assert [span.tensors for span in spans([one, two, torch.ones(9)[3:5]])] == [1, 1, 1]
    buffer = torch.zeros(40)
    halves = [buffer[:10], buffer[10:].view(torch.bfloat16)]
    assert [span.tensors for span in spans(halves)] == [1, 1]
    assert [span.tensors for span in spans([buffer[5:15], buffer[0:10], buffer[0:10]])] == [1, 1, 1]


def test_small_ranges_of_one_dtype_are_packed_up_to_a_limit_and_long_ones_left_alone() -> None:
    limit = MEDIUM.start if simd.works() else SMALL
    count = 2 * PACK // limit + 3
    small = [torch.ones(limit // 4 - 1) for _ in range(count)]
    (layout,) = layouts([*small, torch.ones(limit // 4), torch.ones(3, dtype=torch.bfloat16), torch.ones(3, 2).t()])
    assert [span.first for span in layout.spans()] == [count]
    assert layout.others == [count + 2]
    assert [sum(span.numel for span in pack.spans) == pack.numel <= PACK // 4 for pack in layout.packs] == [True] * 4
    assert sorted(span.first for pack in layout.packs for span in pack.spans) == [*range(count), count + 1]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_cut_of_a_buffer_is_read_exactly_once(data: st.DataObject) -> None:
    buffer = torch.ones(data.draw(st.integers(1, 300)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(buffer)), max_size=10)))
    parts = [buffer[low:high] for low, high in zip([0, *cuts], [*cuts, len(buffer)], strict=True)]
    chosen = [part for part in parts if data.draw(st.booleans())]
    chosen = data.draw(st.permutations(chosen))
    assert measure(chosen, 1.0)[0] == sum(part.numel() for part in chosen)
    assert sum(span.numel for span in spans(chosen)) == sum(part.numel() for part in chosen)
    for one, other in zip(spans(chosen), spans(chosen)[1:], strict=False):  # nothing adjacent is left unmerged
        end = one.view(chosen).data_ptr() + 4 * one.numel
        assert end != other.view(chosen).data_ptr()


def test_the_cache_is_used_while_nothing_moves_and_holds_no_gradient() -> None:
    cache = RangeCache()
    buffer = torch.zeros(10)
    gradients = [buffer[:5], buffer[5:]]
    first = cache.layouts(gradients)
    buffer.add_(1.0)
    assert cache.layouts([buffer[:5], buffer[5:]]) is first
    assert measure(Bundle(gradients, cache), 1.0)[0] == 10
    import gc
    import weakref

    alive = weakref.ref(gradients[0])
    del gradients, buffer
    gc.collect()
    assert alive() is None


def test_new_memory_needs_no_new_layout_while_gradients_are_cut_alike() -> None:
    # backward gives most gradients other addresses in every step
    def step(value: float) -> list[Tensor]:
        buffer = torch.full((300,), value)
        return [buffer[100:300].view(2, 100), torch.full((7, 3), value), buffer[:100], torch.full((40_000,), value)]

    cache = RangeCache()
    steps = [step(float(value)) for value in range(1, 4)]
    first = cache.layouts(steps[0])
    for value, gradients in enumerate(steps, 1):
        assert cache.layouts(gradients) is first
        assert measure(Bundle(gradients, cache), 1.0)[0] == 40_321 * value


@pytest.mark.parametrize("cut", [(slice(0, 10), slice(11, 21)), (slice(10, 20), slice(0, 10)), (slice(0, 10),) * 2])
def test_the_cache_notices_where_views_touch_no_more(cut: tuple[slice, slice]) -> None:
    buffer = torch.arange(30.0)
    cache = RangeCache()
    cache.layouts([buffer[:10], buffer[10:20]])
    gradients = [buffer[part] for part in cut]
    assert measure(Bundle(gradients, cache), 1.0)[0] == sum(gradient.sum() for gradient in gradients)


@pytest.mark.parametrize("numel", [100, 40_000])
def test_the_cache_notices_a_lazy_negation(numel: int) -> None:
    cache = RangeCache()
    for gradient in (torch.ones(numel), torch._neg_view(torch.full((numel,), 2.0)), torch.full((numel,), 3.0)):
        value = abs(gradient[0].item())
        bundle = Bundle([gradient], cache)
        assert measure(bundle, 1.0)[0] == numel * value
        scale_(bundle, 0.5)
        assert gradient.abs().sum() == numel * value / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("which", [slice(None), slice(1), slice(3, None), slice(7, 8)])
def test_as_many_elements_in_other_shapes_are_read_all_the_same(
    dtype: torch.dtype, norm_type: float, which: slice, recwarn: pytest.WarningsRecorder
) -> None:
    for shape, other in (((6, 4), (4, 6)), ((6, 4), (3, 2, 4)), ((24,), (4, 6)), ((160, 256), (256, 160))):
        cache = RangeCache()
        gradients = [torch.randn(shape).to(dtype) for _ in range(9)]
        before = measure(Bundle(gradients, cache), norm_type)
        changed = list(gradients)
        changed[which] = [gradient.view(other) for gradient in changed[which]]
        torch.testing.assert_close(measure(Bundle(changed, cache), norm_type), before, rtol=1e-6, atol=0)
        torch.testing.assert_close(measure(Bundle(gradients, cache), norm_type), before, rtol=1e-6, atol=0)
    assert not recwarn.list


@pytest.mark.parametrize("change", ["moved", "shape", "reshaped", "dtype", "strides", "fewer", "more"])
def test_the_cache_notices(change: str) -> None:
    cache = RangeCache()
    buffer = torch.ones(24)
    gradients = [buffer[:12].view(3, 4), buffer[12:]]
    before = measure(Bundle(gradients, cache), 1.0)
    assert before[0] == 24
    changed = {
        "moved": [torch.full((3, 4), 2.0), torch.full((12,), 2.0)],
        "shape": [buffer[:4], buffer[12:]],
        "reshaped": [buffer[:12].view(2, 6), buffer[12:].view(6, 2)],
        "dtype": [buffer[:12].view(torch.int32).view(torch.float32).view(torch.float64), buffer[12:]],
        "strides": [buffer[:24:2].view(3, 4), buffer[12:]],
        "fewer": [buffer[:12]],
        "more": [buffer[:12], buffer[12:], torch.ones(1)],
    }[change]
    wanted = sum(gradient.to(torch.float64).abs().sum().item() for gradient in changed)
    assert measure(Bundle(changed, cache), 1.0)[0].item() == pytest.approx(wanted)
    assert measure(Bundle(gradients, cache), 1.0)[0] == 24


def test_the_cache_notices_separate_storages_where_one_buffer_was() -> None:
    memory = bytearray(80)
    whole = torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)
    cache = RangeCache()
    merged = [whole[:10], whole[10:]]
    assert [span.tensors for pack in cache.layouts(merged)[0].packs for span in pack.spans] == [2]
    apart = [
        torch.frombuffer(memory, dtype=torch.float32, count=10),
        torch.frombuffer(memory, dtype=torch.float32, offset=40),
    ]
    assert [gradient.data_ptr() for gradient in apart] == [gradient.data_ptr() for gradient in merged]
    assert measure(Bundle(apart, cache), 1.0)[0] == 20
    assert [span.tensors for pack in cache.layouts(apart)[0].packs for span in pack.spans] == [1, 1]
