"""DeepSpeed, ZeRO stages 0 to 3: measured, decided and reported like every other layout.

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    clipper = distclip.GradientClipper(engine, max_norm=1.0)
    for batch in loader:
        engine.backward(loss_of(engine, batch))
        report = clipper.step()           # calls engine.step()

`GradientClipper(engine)` makes an `EngineClipper`, which is here. It measures the gradients that DeepSpeed has averaged
and partitioned, each element once, in the moment before DeepSpeed's optimizer runs, with the same packet as elsewhere.
Who clips is a matter of the mode: DeepSpeed (distclip checks and reports), or distclip (DeepSpeed only steps).

    clipper.py        EngineClipper
    configuration.py  what in DeepSpeed's configuration is worth a warning
    internals/        the only place that knows names of DeepSpeed that are not public
"""

from __future__ import annotations

from distclip.integrations.deepspeed.clipper import EngineClipper

__all__ = ["EngineClipper"]
