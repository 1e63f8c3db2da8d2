"""A few numbers on their way between host and device, without the host waiting.

A plain `tensor.tolist()` waits for all that was queued on the device before it, so reading the numbers of a step during
the next one would wait for the next one's backward. `HostCopy` copies into pinned memory at once, without waiting, and
remembers the place in the queue: reading waits for that place only, which by then has long been passed. The other way,
a copy from ordinary memory waits for all that was queued before it; one from pinned memory does not.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor


def to_device(values: list[float], device: torch.device) -> Tensor:
    """A float64 tensor of these numbers on a device.

    Example:
        >>> to_device([1.0, 2.0], torch.device("cpu"))
        tensor([1., 2.], dtype=torch.float64)
    """
    pinned = device.type != "cpu" and torch.accelerator.is_available()
    here = torch.tensor(values, dtype=torch.float64, device="cpu", pin_memory=pinned)
    return here.to(device, non_blocking=True)


class HostCopy:
    """The host's copy of a small tensor.

    Args:
        values: shape [n], any device. On the CPU it is read at once.

    Example:
        >>> HostCopy(torch.tensor([1.0, 2.0])).read()
        [1.0, 2.0]
    """

    def __init__(self, values: Tensor) -> None:
        self._read: list[float] | None = None
        if values.device.type == "cpu":
            self._read = values.tolist()
            return
        self._pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        self._pinned.copy_(values, non_blocking=True)
        self._copied = torch.Event(values.device)
        self._copied.record(torch.accelerator.current_stream(values.device))

    def arrives(self, seconds: float) -> bool:
        """Whether the numbers are here within this time; collectives before them may never end."""
        end = time.monotonic() + seconds
        while self._read is None and not self._copied.query():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def read(self) -> list[float]:
        """The numbers; waits for the copy, and for nothing that was queued after it."""
        if self._read is None:
            self._copied.synchronize()
            self._read = self._pinned.tolist()
        return self._read
