"""The demo's picture: loss, gradient norm with its limit, and alerts over the steps of the run.

The norm is on a log axis, which has no place for two things that matter most here: a norm of exactly 0 and one that is
nan. Both get a row of their own, set apart from the scale.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from distclip.cli.demo_prometheus import RULES_SHORTENED
from distclip.cli.demo_story import FAULTS, MAX_NORM, STEPS, Step
from distclip.cli.demo_view import Scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOW, _HIGH = 1e-10, 1e5  # what the scale spans
_BOTTOM, _ZERO, _NAN, _TOP = 5e-13, 7e-12, 1.4e6, 2e7  # the rows below and above it
_BEFORE, _AFTER, _LIMIT = "#12507b", "#8cc3ec", "#c0392b"
_COLOURS = {"nan": "#c0392b", "zero": "#c77f00", "tiny": "#7d55a6", "spike": "#227a4b"}
_MARKS = {"nonfinite": ("X", "nan", _NAN), "zero": ("s", "zero", _ZERO), "tiny": ("v", "tiny", None)}
"""For each event: the marker, the kind of fault that has its colour, and the row; None where it is on the scale."""


def draw(scene: Scene, path: Path) -> Path:
    """Write the picture of a scene with at least one step as PNG; returns its path."""
    rows = 3 if scene.has_prometheus else 2
    with matplotlib.rc_context({"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11.0, 8.0 if scene.has_prometheus else 6.8), dpi=130, layout="constrained")
        axes = figure.subplots(rows, 1, sharex=True, height_ratios=(1.4, 4.0, 1.0)[:rows])
        _faults(axes)
        _loss(axes[0], scene.steps)
        _norm(axes[1], scene.steps)
        if scene.has_prometheus:
            _alerts(axes[2], scene)
        axes[0].set_xlim(0, STEPS + 1)
        axes[-1].set_xlabel("step")
        figure.align_ylabels(axes)
        figure.legend(handles=_legend(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
        figure.suptitle("distclip demo: four faults in one training run", x=0.01, ha="left", weight="bold")
        figure.savefig(path)
    return path


def _faults(axes: list[Axes]) -> None:
    """A band over all panels for each fault, named above the first."""
    for fault in FAULTS:
        for panel in axes:
            panel.axvspan(fault.first - 0.7, fault.last + 0.7, color=_COLOURS[fault.kind], alpha=0.16, lw=0)
        middle = (fault.first + fault.last) / 2
        label = f"{fault.kind}\n{fault.cause}"
        axes[0].annotate(
            label,
            (middle, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9,
            color=_COLOURS[fault.kind],
        )


def _loss(panel: Axes, steps: list[Step]) -> None:
    """The loss of rank 0, without faulty steps: 0 and 30000 are no losses that a model could have."""
    broken = {number for fault in FAULTS for number in range(fault.first, fault.last + 1)}
    shown = [math.nan if step.number in broken else step.loss for step in steps]
    panel.plot([step.number for step in steps], shown, color="#444444", lw=1.2)
    panel.set_ylabel("loss\n(nats per byte)")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.25)
    _note(panel, "faulty steps are left out: their loss was multiplied by 0/0, 0, 1e-9 or 10000", 0.08)


def _note(panel: Axes, text: str, height: float) -> None:
    """A remark in the lower part of a panel, at its left end, where nothing is drawn."""
    panel.text(0.008, height, text, transform=panel.transAxes, fontsize=9, color="#666666", va="bottom")


def _norm(panel: Axes, steps: list[Step]) -> None:
    """Norm before and after clipping, the limit, and the steps that a log axis cannot show in rows of their own."""
    numbers = [step.number for step in steps]
    before = [step.norm if math.isfinite(step.norm) and step.norm > 0 else math.nan for step in steps]
    after = [norm * step.coefficient for norm, step in zip(before, steps, strict=True)]
    panel.set_yscale("log")
    panel.set_ylim(_BOTTOM, _TOP)
    for low, high in ((_BOTTOM, _LOW), (_HIGH, _TOP)):
        panel.axhspan(low, high, color="black", alpha=0.05, lw=0)
    panel.plot(numbers, after, color=_AFTER, lw=3.0, solid_capstyle="round")
    panel.plot(numbers, before, color=_BEFORE, lw=1.2)
    panel.axhline(MAX_NORM, color=_LIMIT, lw=1.1, ls=(0, (5, 3)))
    for event, (marker, kind, row) in _MARKS.items():
        shown = [step for step in steps if step.event == event]
        heights = [row or step.norm for step in shown]
        panel.plot([step.number for step in shown], heights, marker, color=_COLOURS[kind], ms=6, mew=0)
    for step in steps:
        if step.event is None and step.norm > 100 * MAX_NORM:
            _clipped_spike(panel, step)
    powers = range(-9, 4, 3)
    panel.set_yticks(
        [_ZERO, *(10.0**power for power in powers), _NAN],
        ["exactly 0", *(f"$10^{{{power}}}$" for power in powers), "nan or inf"],
    )
    panel.set_yticks([], minor=True)
    panel.set_ylabel("gradient norm")
    panel.grid(alpha=0.25)


def _clipped_spike(panel: Axes, step: Step) -> None:
    """An arrow from what the norm was down to what the optimizer got."""
    arrow = {"arrowstyle": "-|>", "color": _COLOURS["spike"], "lw": 1.4}
    panel.annotate("", (step.number, step.norm * step.coefficient), (step.number, step.norm), arrowprops=arrow)
    text = f"{step.norm:,.0f}\nclipped to {step.norm * step.coefficient:.3g}"
    panel.annotate(
        text,
        (step.number, step.norm),
        (6, 0),
        textcoords="offset points",
        va="top",
        fontsize=9,
        color=_COLOURS["spike"],
    )


def _legend() -> list[Line2D]:
    marks = {"nonfinite": "not finite: skipped", "zero": "exactly zero: reported", "tiny": "tiny: reported"}
    return [
        Line2D([], [], color=_BEFORE, lw=1.2, label="norm before clipping"),
        Line2D([], [], color=_AFTER, lw=3.0, label="norm after clipping"),
        Line2D([], [], color=_LIMIT, lw=1.1, ls=(0, (5, 3)), label=f"limit: {MAX_NORM:g}"),
        *(
            Line2D([], [], color=_COLOURS[_MARKS[event][1]], marker=_MARKS[event][0], ls="", ms=6, mew=0, label=label)
            for event, label in marks.items()
        ),
    ]


def _alerts(panel: Axes, scene: Scene) -> None:
    """A bar for each alert, from the step at which it began to fire to the one at which it ended, or the last."""
    times = [step.time for step in scene.steps]
    numbers = [step.number for step in scene.steps]
    names = [fault.alert for fault in FAULTS if fault.alert]
    names += sorted(scene.firings.keys() - set(names))
    for row, name in enumerate(names):
        firing = scene.firings.get(name)
        if firing is not None:
            first, last = np.interp([firing.first, firing.last], times, numbers)
            # One that came in after the last step still shows, as a line at the right end.
            panel.barh(
                row, max(last - first, 0.5), left=min(first, numbers[-1] - 0.5), height=0.55, color=_alert_colour(name)
            )
    panel.set_yticks(range(len(names)), [name.removeprefix("Distclip") for name in names], fontsize=9)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_ylabel("alerts\nfiring")
    _note(panel, f"rules of monitoring/, {RULES_SHORTENED} times\nshorter in time", 0.08)
    panel.grid(axis="x", alpha=0.25)


def _alert_colour(name: str) -> str:
    return next((_COLOURS[fault.kind] for fault in FAULTS if fault.alert == name), "#555555")
