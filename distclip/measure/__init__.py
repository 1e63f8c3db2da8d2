"""Measure gradients: how large they are, and whether any of them is not finite, in about one read of memory.

`measure` looks at the local gradients of one bucket and returns four numbers that can be summed over ranks;
`RangeCache` lets it remember how they lie in memory. `max_abs` and `scaled_power_sum` are for the rare sum that fp64
cannot hold, `count_nonfinite` for naming the culprit afterwards. `measure_on_device` is the part for accelerators.
"""

from distclip.measure.device import measure_on_device
from distclip.measure.eager import max_abs, measure, scaled_power_sum
from distclip.measure.exact import count_nonfinite
from distclip.measure.ranges import RangeCache

__all__ = [
    "RangeCache",
    "count_nonfinite",
    "max_abs",
    "measure",
    "measure_on_device",
    "scaled_power_sum",
]
