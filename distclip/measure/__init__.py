"""Measure gradients: how large they are, and whether any of them is not finite, in about one read of memory.

`measure` looks at the local gradients of one bucket and returns four numbers that can be summed over ranks; a `Bundle`
knows how they lie in memory, a `RangeCache` remembers it from step to step. `max_abs` and `scaled_power_sum` are for
the rare sum that fp64 cannot hold, `count_nonfinite` for naming the culprit afterwards. `measure_on_device` is the part
for accelerators.
"""

from distclip.measure.bundle import Bundle, as_bundle
from distclip.measure.device import measure_on_device
from distclip.measure.eager import max_abs, measure, scaled_power_sum
from distclip.measure.exact import count_nonfinite
from distclip.measure.layouts import RangeCache

__all__ = [
    "Bundle",
    "RangeCache",
    "as_bundle",
    "count_nonfinite",
    "max_abs",
    "measure",
    "measure_on_device",
    "scaled_power_sum",
]
