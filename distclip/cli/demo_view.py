"""What the demo shows: a live page in a terminal, plain lines elsewhere, and the same table at the end of both.

A view only looks at a `Scene`; the demo's loop (`distclip.cli.demo`) fills it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distclip.cli.demo_story import FAULTS, MAX_NORM, STEPS, Fault, Step, judge

_PLAIN_EVERY = 20  # steps between plain lines
_LOWEST, _HIGHEST = -10.0, 5.0  # powers of ten that the chart in the terminal spans
_OTHER_ROWS = 23  # of the page in a narrow terminal, without the chart's
_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass
class Firing:
    """When the demo first and last saw an alert firing, in Unix seconds."""

    first: float
    last: float


@dataclass
class Scene:
    """All that is known so far."""

    doing: str = "starting"
    steps: list[Step] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    """Of alerts now: "pending" or "firing"."""
    firings: dict[str, Firing] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    """Addresses that a person can open."""
    has_prometheus: bool = True


class View(Protocol):
    """Shows a scene while it changes; a context manager."""

    def __enter__(self) -> View:
        """Start showing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""

    def show(self, scene: Scene) -> None:
        """The scene may have changed."""


def make_view(console: Console) -> View:
    """The live page in a terminal, else lines."""
    return LiveView(console) if console.is_terminal else PlainView(console)


class LiveView:
    """A page that is drawn again in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, scene: Scene) -> None:
        """Draw the page."""
        width = max(20, min(self._console.width - 4, 100))
        rows = max(2, min(self._console.height - _OTHER_ROWS, 8))
        parts: list[RenderableType] = [_progress(scene, width), Text(), chart(scene.steps, width, rows), table(scene)]
        places = Text("\n".join([*scene.places, "Ctrl-C ends everything."]), style="dim")
        page = Panel(Group(*parts, places), title="distclip demo", title_align="left", border_style="cyan")
        self._live.update(page)


class PlainView:
    """A line for every so many steps, every event and every alert."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._doing = ""
        self._steps = 0
        self._alerts: set[str] = set()

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, scene: Scene) -> None:
        """Print what is new."""
        if scene.doing != self._doing:
            self._doing = scene.doing
            self._line(scene.doing)
        for step in scene.steps[self._steps :]:
            special = step.event or next((fault.kind for fault in FAULTS if fault.first == step.number), None)
            if special or step.number % _PLAIN_EVERY == 0 or step.number == 1:
                self._line(_line_of(step, special))
        self._steps = len(scene.steps)
        for name in scene.firings.keys() - self._alerts:
            self._line(f"alert firing: {name}")
        self._alerts.update(scene.firings)

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def table(scene: Scene) -> Table:
    """The faults, what distclip decided, and the alerts."""
    grid = Table(box=SIMPLE_HEAD, padding=(0, 1), header_style="bold", pad_edge=False)
    for column, whole in (("injected", False), ("steps", True), ("decision", False), ("alert", True)):
        grid.add_column(column, no_wrap=whole)
    newest = scene.steps[-1].number if scene.steps else 0
    for fault in FAULTS:
        grid.add_row(f"{fault.kind}: {fault.cause}", fault.steps, _decision(fault, scene, newest), _alert(fault, scene))
    return grid


def chart(steps: Sequence[Step], width: int, rows: int) -> Text:
    """The norm of each step as bars on a log scale, a column for a few steps; nan and 0 have marks of their own."""
    columns: list[Step | None] = [None] * width
    for step in steps:
        place = min(width - 1, (step.number - 1) * width // STEPS)
        shown = columns[place]
        # One column stands for several steps: what was special among them must not be lost.
        if shown is None or step.event is not None or (shown.event is None and step.norm > shown.norm):
            columns[place] = step
    text = Text(no_wrap=True)
    for row in reversed(range(rows)):
        for column in columns:
            text.append(*_cell(column, row, rows))
        text.append("\n")
    text.append("norm, log scale from 1e-10 to 1e5: ", style="dim")
    for sample, style in (("as it was ", "green"), ("clipped ", "cyan"), ("nan ", "red"), ("0 or tiny", "yellow")):
        text.append("█ ", style=style)
        text.append(sample, style="dim")
    return text


def _cell(step: Step | None, row: int, rows: int) -> tuple[str, str]:
    """One character of the chart and its style; row 0 is the lowest."""
    if step is None:
        return " ", ""
    if not math.isfinite(step.norm):
        return "×" if row == rows - 1 else "┆", "red"
    if step.norm == 0.0:
        return ("0" if row == 0 else " "), "yellow"
    height = (math.log10(step.norm) - _LOWEST) / (_HIGHEST - _LOWEST) * rows
    eighths = round(min(1.0, max(0.0, height - row)) * 8)
    style = "yellow" if step.event == "tiny" else "cyan" if step.coefficient < 1.0 else "green"
    return _BLOCKS[eighths], style


def _progress(scene: Scene, width: int) -> RenderableType:
    done = scene.steps[-1].number if scene.steps else 0
    grid = Table.grid(padding=(0, 2))
    grid.add_row(Text(scene.doing, style="bold"), ProgressBar(STEPS, done, width=width // 3), f"step {done} of {STEPS}")
    if not scene.steps:
        return grid
    step = scene.steps[-1]
    numbers = Table.grid(padding=(0, 3))
    numbers.add_row(
        f"loss {_short(step.loss)}",
        f"norm {_short(step.norm)}",
        f"limit {MAX_NORM:g}",
        f"coefficient {_short(step.coefficient)}",
        "stepped" if step.stepped else "skipped",
    )
    return Group(grid, numbers)


def _decision(fault: Fault, scene: Scene, newest: int) -> Text:
    if newest < fault.first:
        return Text("to come", style="dim")
    if newest < fault.last:
        return Text("going on", style="yellow")
    finding = judge(fault, scene.steps)
    return Text(("✓ " if finding.caught else "✗ ") + finding.decision, style="green" if finding.caught else "red")


def _alert(fault: Fault, scene: Scene) -> Text:
    if fault.alert is None:
        return Text("none due", style="dim")
    name = fault.alert.removeprefix("Distclip")
    if not scene.has_prometheus:
        return Text(f"{name}: no Prometheus", style="dim")
    state = scene.states.get(fault.alert)
    if fault.alert in scene.firings:
        return Text(f"✓ {name}" + (" fires" if state == "firing" else ""), style="green")
    return Text(f"{name} {state or ''}", style="yellow" if state else "dim")


def _line_of(step: Step, special: str | None) -> str:
    outcome = "stepped" if step.stepped else "skipped"
    line = (
        f"step {step.number:>4}  loss {_short(step.loss):>9}  norm {_short(step.norm):>9}  "
        f"coefficient {_short(step.coefficient):>9}  {outcome}"
    )
    return line + (f"  <- {special}" if special else "")


def _short(number: float) -> str:
    return f"{number:.4g}"
