"""Parts of the demo's end that a good run does not show: what fails, and what is missing. The rest is tests/e2e."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from distclip.cli import demo
from distclip.cli.demo_story import STEPS, Step
from distclip.cli.demo_view import Firing, Scene


def console() -> Console:
    return demo.make_console(io.StringIO())


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def scene_without_faults() -> Scene:
    steps = [Step(number, float(number), 5.0, 0.5, 1.0, 1.0, None, True, 0) for number in range(1, STEPS + 1)]
    return Scene(steps=steps, firings={"DistclipRunStalled": Firing(1.0, 2.0)})


def test_a_run_in_which_nothing_was_caught_is_not_good() -> None:
    screen = console()
    assert not demo._summarise(screen, scene_without_faults())
    text = printed(screen)
    assert "✗ 0 of 4 faults caught; missed: nan, zero, tiny, spike" in text
    assert "✗ 0 of 3 expected alerts fired; silent: DistclipNonfiniteGradient" in text
    assert "✗ loss of good steps went from 5.00 to 5.00 in 200 steps" in text
    assert "Other alerts fired too: DistclipRunStalled" in text


def test_a_run_that_made_no_step_is_not_good() -> None:
    assert not demo._summarise(console(), Scene())


def test_without_matplotlib_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "distclip.cli.demo_picture", raising=False)
    screen = console()
    demo._draw(screen, scene_without_faults(), tmp_path)
    assert printed(screen) == "No picture: matplotlib is not installed (pip install 'distclip[report]').\n"


def test_a_screen_that_cannot_show_a_tick_gets_another_mark() -> None:
    file = io.BytesIO()
    screen = demo.make_console(io.TextIOWrapper(file, encoding="ascii", write_through=True))
    assert not demo._summarise(screen, scene_without_faults())
    assert b"? 0 of 4 faults caught" in file.getvalue()
