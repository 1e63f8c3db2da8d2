from __future__ import annotations

import math
import struct

import pytest

from distclip.telemetry.layout import (
    BUCKETS,
    COUNTERS,
    FILE_BYTES,
    GAUGES,
    INDEX,
    NORM_BOUNDS,
    VALUES,
    SlotPair,
    fresh_values,
    header_problem,
    write_header,
)


def test_two_bounds_per_decade_from_1e_10_to_1e6():
    assert len(NORM_BOUNDS) == 33
    assert NORM_BOUNDS[0] == 1e-10
    assert NORM_BOUNDS[-1] == 1e6
    assert NORM_BOUNDS[20:23] == (1.0, 3.16, 10.0)
    assert len(BUCKETS) == len(NORM_BOUNDS) + 1


def test_a_reader_sees_the_latest_payload():
    pair, page = SlotPair(8, 4), bytearray(100)
    assert pair.read(bytes(page)) is None
    for sequence in range(1, 6):
        pair.write(memoryview(page), sequence, struct.pack("<I", sequence))
        assert pair.read(bytes(page)) == (sequence, struct.pack("<I", sequence))


@pytest.mark.parametrize("cut", range(1, 16))
def test_a_write_that_was_cut_short_anywhere_loses_only_itself(cut):
    pair, page = SlotPair(0, 4), bytearray(64)
    pair.write(memoryview(page), 1, b"old1")
    pair.write(memoryview(page), 2, b"old2")
    whole = bytearray(page)
    pair.write(memoryview(whole), 3, b"new3")
    changed = [index for index in range(64) if whole[index] != page[index]]
    torn = bytearray(page)
    begin = changed[0]
    torn[begin : begin + cut] = whole[begin : begin + cut]
    expected = (3, b"new3") if torn == whole else (2, b"old2")
    assert pair.read(bytes(torn)) == expected


def test_a_header_of_another_layout_is_told_from_garbage():
    page = bytearray(FILE_BYTES)
    assert header_problem(bytes(page)) == "corrupt"
    write_header(memoryview(page))
    assert header_problem(bytes(page)) is None
    page[0] ^= 1
    assert header_problem(bytes(page)) == "corrupt"


def test_fresh_values_have_counters_at_zero_and_unknown_gauges():
    values = fresh_values()
    assert all(values[INDEX[name]] == 0 for name in (*COUNTERS, *BUCKETS))
    unknown = {name for name in GAUGES if math.isnan(values[INDEX[name]])}
    assert unknown == set(GAUGES) - {"consecutive_nonfinite", "consecutive_zero", "phase"}
    assert len(values.tobytes()) == VALUES.payload_bytes
