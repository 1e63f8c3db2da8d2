from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from distclip.cli.demo_picture import draw
from distclip.cli.demo_story import Step
from distclip.cli.demo_view import Firing, LiveView, PlainView, Scene, chart, make_view, table


def step(number: int, norm: float = 0.5, coefficient: float = 1.0, event: str | None = None) -> Step:
    return Step(number, 1000.0 + number, 3.0, norm, 1.0, coefficient, event, event != "nonfinite", 0)


SCENE = Scene(
    doing="training",
    steps=[*(step(number) for number in range(1, 40)), step(40, math.nan, event="nonfinite"), step(41, 5.0, 0.2)],
    states={"DistclipNonfiniteGradient": "firing"},
    firings={"DistclipNonfiniteGradient": Firing(1041.0, 1041.5)},
    places=["Prometheus http://127.0.0.1:9090"],
)


def console(terminal: bool, width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, height=40, highlight=False)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_the_page_and_anything_else_lines() -> None:
    assert isinstance(make_view(console(True)), LiveView)
    assert isinstance(make_view(console(False)), PlainView)


def test_lines_tell_what_is_new_once() -> None:
    screen = console(False)
    with PlainView(screen) as view:
        view.show(SCENE)
        view.show(SCENE)
    lines = printed(screen).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1", "20", "40"]
    assert lines[3].endswith("skipped  <- nonfinite")
    assert lines.count("alert firing: DistclipNonfiniteGradient") == 1
    assert lines.count("training") == 1
    assert "\x1b" not in printed(screen)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_page_shows_step_fault_and_alert_in_any_width(width: int) -> None:
    screen = console(True, width)
    with LiveView(screen) as view:
        view.show(Scene())
        view.show(SCENE)
    page = printed(screen)
    assert "step 41 of 200" in page
    assert "NonfiniteGradient" in page
    assert "×" in page


def test_the_table_says_what_is_to_come_and_what_was_missed() -> None:
    screen = console(False, 120)
    missed = [*SCENE.steps[:39], step(40), step(41)]
    screen.print(table(Scene(steps=missed, has_prometheus=False)))
    rows = {line.split(":")[0].strip(): line for line in printed(screen).splitlines() if ":" in line}
    assert "✗ step 40 was taken for a good one" in rows["nan"]
    assert "no Prometheus" in rows["nan"]
    assert all("to come" in rows[kind] for kind in ("zero", "tiny", "spike"))


def test_the_chart_has_marks_for_what_a_log_scale_cannot_show() -> None:
    steps = [step(1, math.inf, event="nonfinite"), step(50, 0.0, event="zero"), step(100, 1e-9), step(150, 1e4)]
    lines = chart(steps, width=40, rows=6).plain.splitlines()[:6]
    columns = ["".join(line[place] if place < len(line) else " " for line in lines).strip() for place in range(40)]
    assert columns[0] == "×┆┆┆┆┆"
    assert columns[9] == "0"
    assert len(columns[19]) == 1
    assert len(columns[29]) == 6
    assert [place for place, column in enumerate(columns) if column] == [0, 9, 19, 29]


def test_one_column_keeps_the_special_one_of_its_steps() -> None:
    steps = [step(1), step(2, math.nan, event="nonfinite"), step(3, 100.0)]
    assert chart(steps, width=10, rows=4).plain.startswith("×")


@pytest.mark.parametrize("has_prometheus", [True, False])
def test_the_picture_is_drawn_from_any_part_of_a_run(tmp_path: Path, has_prometheus: bool) -> None:
    scene = Scene(steps=SCENE.steps[:1], has_prometheus=has_prometheus)
    assert draw(scene, tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    scene = Scene(steps=SCENE.steps, firings=SCENE.firings, has_prometheus=has_prometheus)
    assert draw(scene, tmp_path / "part.png").stat().st_size > 20_000
