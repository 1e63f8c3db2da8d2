"""Trainers and engines that have their own idea of clipping: what distclip needs to know to work with each of them.

Nothing here imports a framework before it is used; a framework that is not installed costs nothing.
"""

from __future__ import annotations


def is_deepspeed_engine(source: object) -> bool:
    """Whether `source` is a DeepSpeed engine, found out without importing DeepSpeed.

    Example:
        >>> is_deepspeed_engine(torch.nn.Linear(1, 1))
        False
    """
    return any(
        kind.__name__ == "DeepSpeedEngine" and kind.__module__.startswith("deepspeed.") for kind in type(source).__mro__
    )
