"""`distclip demo`: a real training job that is broken on purpose, watched by a real Prometheus, judged at the end.

What happens, in order:

1. Prometheus is started, where there is one, with the alert rules that ship with distclip (`demo_prometheus`).
2. `launch/train_lm.py` is started with torchrun and distclip's plug-in on two ranks with FSDP2. It trains a small
   language model and is given four faults (`demo_story`).
3. While it runs, the page shows steps, events and alerts (`demo_watch`, `demo_view`).
4. Every fault is judged from distclip's step log, every expected alert from Prometheus; the picture is drawn
   (`demo_picture`). The exit code is 0 only if all faults were caught, nothing else was flagged, all expected alerts
   fired and the loss fell.

Whatever happens, no process is left behind (`demo_children`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from distclip.cli.demo_children import Children, Stopped, stopped_by_signals
from distclip.cli.demo_prometheus import Prometheus, find_tool
from distclip.cli.demo_story import FAULTS, MAX_NORM, STEPS, false_alarms, judge, loss_fell
from distclip.cli.demo_view import Scene, make_view, table
from distclip.cli.demo_watch import Watch
from distclip.data import data_path
from distclip.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_RANKS = 2
_LAYERS = 2  # of the model: about half a minute of training on two cores
_PLAIN_WIDTH = 110  # of the table in a log file


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the `distclip` command."""
    what = "train a small model, break it on purpose and watch distclip and Prometheus notice"
    parser = subparsers.add_parser("demo", help=what, description=what.capitalize() + ".")
    parser.add_argument(
        "--output", metavar="DIR", type=Path, default=Path("demo-output"), help="for the picture and logs (%(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="leave Prometheus running at the end, until Ctrl-C")
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; returns 0 when all went as it should, 1 when not, 128 + n when signal n ended it.

    Raises:
        ConfigError: the output folder cannot be written.
    """
    console = make_console(sys.stdout)
    output: Path = arguments.output
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in ("steps.jsonl", "events.jsonl", "train.log"):  # distclip appends to the first two
            (output / name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {output}: {error}") from error
    try:
        # The folder is outside of the children, so that it goes after them.
        with (
            stopped_by_signals(),
            tempfile.TemporaryDirectory(prefix="distclip-demo-") as scratch,
            Children() as children,
        ):
            return _demo(console, output, Path(scratch), children, keep=arguments.keep)
    except Stopped as stop:
        _say(console, f"Stopped by {stop}. No process is left behind.")
        return 128 + stop.signum


def make_console(file: TextIO) -> Console:
    """A console that prints text as it is: no markup in brackets, no coloured numbers."""
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="replace")  # a terminal without ✓ shows ? instead
    width = None if file.isatty() else _PLAIN_WIDTH
    return Console(file=file, markup=False, highlight=False, emoji=False, width=width)


def _say(console: Console, text: str, style: str = "") -> None:
    """Print lines that the terminal may wrap, so that paths and addresses in them stay whole."""
    console.print(text, style=style, soft_wrap=True)


def _demo(console: Console, output: Path, scratch: Path, children: Children, *, keep: bool) -> int:
    scene = Scene()
    program = find_tool("prometheus")
    prometheus = Prometheus.start(program, scratch / "prometheus", children) if program else None
    if prometheus is None:
        why = "it did not start" if program else "make tools fetches it on Debian, or put it on the path"
        _say(console, f"No Prometheus here ({why}): the demo is judged on the faults alone.")
        scene.has_prometheus = False
    else:
        scene.places.append(f"Prometheus {prometheus.url}")
    targets = prometheus.targets if prometheus else scratch / "targets"
    job = children.start(_command(), output / "train.log", env=_environment(output, scratch, targets))
    with make_view(console) as view:
        code = Watch(scene, output / "steps.jsonl", targets, prometheus).follow(job, view)
    if code != 0:
        _say(console, f"The job {_ending(code)}. The end of {output / 'train.log'}:", "red")
        _say(console, _tail(output / "train.log", lines=25))
    good = _summarise(console, scene) and code == 0
    _draw(console, scene, output)
    _say(console, f"Logs: {output / 'steps.jsonl'} (every step), {output / 'events.jsonl'}, {output / 'train.log'}")
    _say(console, *(("All as it should be.", "bold green") if good else ("Not as it should be.", "bold red")))
    if keep and prometheus is not None:
        _say(console, f"Prometheus stays at {prometheus.url} until Ctrl-C.")
        with contextlib.suppress(Stopped):
            while True:
                time.sleep(3600)
    return 0 if good else 1


def _command() -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--logs-specs", "distclip", "--standalone"]
    torchrun += ["--nproc-per-node", str(_RANKS), "--local-addr", "127.0.0.1"]
    job = [str(data_path("launch") / "train_lm.py"), "--wrap", "fsdp2", "--layers", str(_LAYERS)]
    job += ["--steps", str(STEPS), "--max-norm", str(MAX_NORM)]
    return torchrun + job + [part for fault in FAULTS for part in ("--inject", fault.flag)]


def _environment(output: Path, scratch: Path, targets: Path) -> dict[str, str]:
    """The user's own environment, but for settings that would make this another run than the demo."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("DISTCLIP_")}
    ours["DISTCLIP_RUN_ID"] = "demo"
    ours["DISTCLIP_BIND"] = "127.0.0.1"
    ours["DISTCLIP_PORT"] = "0"
    ours["DISTCLIP_SPOOL"] = str(scratch)
    ours["TMPDIR"] = str(scratch)  # torchrun leaves folders behind
    ours["DISTCLIP_SD_DIR"] = str(targets)
    ours["DISTCLIP_EVENTS"] = str(output.resolve() / "events.jsonl")
    ours["DISTCLIP_STEP_LOG"] = str(output.resolve() / "steps.jsonl")
    ours["CUDA_VISIBLE_DEVICES"] = ""  # two ranks need two GPUs or none
    ours["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // _RANKS))
    if sys.platform == "linux":
        ours["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that resolves to nowhere must not stop a demo
    return ours


def _summarise(console: Console, scene: Scene) -> bool:
    """Print the table and every verdict; whether all are good."""
    console.print(table(scene))
    if not scene.steps:
        return False
    verdicts: list[tuple[bool, str]] = []
    missed = [fault.kind for fault in FAULTS if not judge(fault, scene.steps).caught]
    caught = f"{len(FAULTS) - len(missed)} of {len(FAULTS)} faults caught"
    verdicts.append((not missed, caught + (f"; missed: {', '.join(missed)}" if missed else "")))
    alarms = false_alarms(scene.steps)
    flagged = f"{len(alarms)} good steps flagged: {', '.join(str(step.number) for step in alarms)}"
    verdicts.append((not alarms, flagged if alarms else "no good step flagged or skipped"))
    if scene.has_prometheus:
        expected = [fault.alert for fault in FAULTS if fault.alert]
        silent = [name for name in expected if name not in scene.firings]
        fired = f"{len(expected) - len(silent)} of {len(expected)} expected alerts fired"
        verdicts.append((not silent, fired + (f"; silent: {', '.join(silent)}" if silent else "")))
    fell, first, last = loss_fell(scene.steps)
    verdicts.append((fell, f"loss of good steps went from {first:.2f} to {last:.2f} in {len(scene.steps)} steps"))
    for good, text in verdicts:
        _say(console, ("✓ " if good else "✗ ") + text, "green" if good else "red")
    others = sorted(scene.firings.keys() - {fault.alert for fault in FAULTS})
    if others:
        _say(console, f"Other alerts fired too: {', '.join(others)}", "yellow")
    return all(good for good, _ in verdicts)


def _draw(console: Console, scene: Scene, output: Path) -> None:
    """Draw the picture, or say why there is none."""
    if not scene.steps:
        return
    try:
        from distclip.cli.demo_picture import draw
    except ImportError:
        _say(console, "No picture: matplotlib is not installed (pip install 'distclip[report]').")
        return
    _say(console, f"Picture: {draw(scene, output / 'demo.png')}")


def _ending(code: int | None) -> str:
    if code is None:
        return "took too long and was stopped"
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _tail(path: Path, lines: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
