from __future__ import annotations

import math

import pytest

from distclip.telemetry.layout import BUCKETS, INDEX, NORM_BOUNDS
from distclip.telemetry.tally import Streaks, Tally


class Bench:
    def __init__(self, make_record):
        self.tally = Tally()
        self.streaks = Streaks()
        self._make = make_record
        self._step = 0

    def add(self, norm=2.0, **changes):
        self._step += 1
        self.tally.add(self._make(self._step, norm, **changes), self.streaks)

    def __getitem__(self, field):
        return self.tally.values[INDEX[field]]


@pytest.fixture
def bench(make_record):
    return Bench(make_record)


def test_an_ordinary_step(bench):
    bench.add(2.0)
    assert bench["steps"] == bench["clipped"] == bench["clip_seconds_count"] == 1
    assert bench["norm"] == bench["norm_sum"] == 2.0
    assert bench["rms"] == 0.5  # 2 / sqrt(16)
    assert bench["coefficient"] == 0.5
    assert bench["limit"] == 1.0
    assert bench["last_step"] == 1
    assert bench["last_step_timestamp"] == bench["report_timestamp"] == 1001.0
    assert bench["local_norm"] == 1.5
    assert bench["step_seconds_sum"] == 0.5
    assert bench["wait_seconds"] == 0.0625
    assert bench["loss"] == 3.0
    assert math.isnan(bench["loss_scale"])
    assert bench["nonfinite"] == bench["zero"] == bench["tiny"] == bench["skipped_nonfinite"] == 0


def test_a_nonfinite_step_leaves_gauges_at_their_last_finite_values(bench):
    bench.add(2.0)
    bench.add(
        float("nan"),
        nan=3,
        local_nan=3,
        inf=1,
        local_inf=1,
        skip_reason="nonfinite",
        clipped=False,
        loss=float("inf"),
        clip_coefficient=float("nan"),
        local_norm=float("inf"),
    )
    assert bench["nonfinite"] == bench["skipped_nonfinite"] == bench["local_nan"] == bench["local_inf"] == 1
    assert bench["consecutive_nonfinite"] == 1
    assert bench["norm"] == 2.0
    assert bench["norm_sum"] == 2.0
    assert bench["loss"] == 3.0
    assert bench["coefficient"] == 0.5
    assert bench["local_norm"] == 1.5
    assert bench["last_step"] == 2
    assert sum(bench[name] for name in BUCKETS) == 1


def test_a_streak_between_two_looks_is_counted_though_no_gauge_shows_it(bench):
    bench.add()
    for _ in range(6):
        bench.add(float("nan"), nan=1)
    bench.add()
    assert bench["consecutive_nonfinite"] == 0
    assert bench["streak_nonfinite"] == 1
    assert bench["nonfinite"] == 6


@pytest.mark.parametrize(("norm", "field"), [(0.0, "zero"), (9e-7, "tiny"), (1e-12, "tiny")])
def test_zero_and_tiny_streaks(bench, norm, field):
    for _ in range(2):
        bench.add(norm)
    assert bench[f"streak_{field}"] == 0
    for _ in range(4):
        bench.add(norm)
    assert bench[field] == 6
    assert bench[f"streak_{field}"] == 1
    assert bench["consecutive_zero"] == (6 if field == "zero" else 0)
    bench.add()
    for _ in range(3):
        bench.add(norm)
    assert bench[f"streak_{field}"] == 2


def test_1e_6_is_not_tiny(bench):
    bench.add(1e-6)
    assert bench["tiny"] == 0


def test_two_clippers_do_not_end_each_others_streaks(bench, make_record):
    other = Streaks()
    for _ in range(5):
        bench.add(float("nan"), nan=1)
        bench.tally.add(make_record(1, 1.0), other)
    assert bench["streak_nonfinite"] == 1


@pytest.mark.parametrize(
    ("norm", "bucket"), [(0.0, 0), (1e-10, 0), (1.1e-10, 1), (1.0, 20), (1.1, 21), (1e6, 32), (2e6, 33), (1e300, 33)]
)
def test_buckets_include_their_upper_bound(bench, norm, bucket):
    bench.add(norm)
    assert [bench[name] for name in BUCKETS] == [float(index == bucket) for index in range(len(NORM_BOUNDS) + 1)]


def test_the_sum_of_norms_never_becomes_infinite(bench):
    for _ in range(2):
        bench.add(1.5e308)
    assert bench["norm_sum"] == 1.5e308


@pytest.mark.parametrize("reason", ["nonfinite", "no_gradients", "spike", "policy"])
def test_skips_by_reason(bench, reason):
    bench.add(skip_reason=reason)
    assert bench[f"skipped_{reason}"] == 1


def test_an_unknown_reason_is_counted_as_policy(bench):
    bench.add(skip_reason="a later version's reason")
    assert bench["skipped_policy"] == 1


def test_no_limit_and_an_infinite_one_are_no_limit(bench):
    for limit in (None, math.inf):
        bench.add(limit=limit)
        assert math.isnan(bench["limit"])


def test_rms_is_for_the_two_norm_only(make_record):
    tally = Tally()
    tally.add(make_record(), Streaks(), norm_type=math.inf)
    assert math.isnan(tally.values[INDEX["rms"]])


def test_divergences(bench):
    bench.add()
    assert bench["diverged"] == 0
    for _ in range(2):
        bench.add(diverged=True)
    assert bench["diverged"] == 2


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, -1.0, 10**400, -(10**400)])
def test_sums_of_seconds_and_norms_take_no_odd_number_and_never_fall(bench, odd):
    bench.add(2.0)
    bench.add(odd, step_seconds=odd, clip_seconds=odd, wait_seconds=odd)
    assert bench["steps"] == bench["clip_seconds_count"] == 2
    assert (bench["norm_sum"], bench["step_seconds_sum"], bench["clip_seconds_sum"]) == (2.0, 0.5, 0.125)
    assert bench["wait_seconds"] == 0.0625


def test_phases(bench):
    bench.tally.phase("checkpoint")
    assert bench["phase"] == 2
    bench.tally.phase("warm-up of something")
    assert bench["phase"] == 3


def test_applied_nonfinite_steps(bench):
    bench.tally.nonfinite_applied()
    assert bench["nonfinite_applied"] == 1
