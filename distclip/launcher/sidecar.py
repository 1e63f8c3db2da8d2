"""`distclip sidecar -- COMMAND`: the endpoint of `torchrun --logs-specs distclip` beside any other launcher.

The command (`deepspeed train.py`, `accelerate launch`, a script of Slurm's) runs as a child with a spool folder in its
environment, which launchers hand on to their workers; `GradientClipper` there needs nothing else. The endpoint is there
before the command and a little after it. Signals are passed on, the exit code is the command's.

What only a launcher knows is not told: restarts, and which worker failed how. One sidecar per node; on several nodes
give all of them the same `DISTCLIP_RUN_ID`.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Final

from distclip.errors import ConfigError
from distclip.telemetry.exporter import Exporter
from distclip.telemetry.node import Attempt
from distclip.telemetry.settings import read_settings, run_id

logger = logging.getLogger("distclip.telemetry")

_RANKS: Final = 16
"""For how many ranks on a node room must be found; how many the command starts is not known."""


def run_beside(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run `command` with an endpoint; returns its exit code, 128 + n where signal n ended it.

    Raises:
        ConfigError: the command cannot be started, or there are several nodes and no run id.
    """
    settings, complaints = read_settings(environ)
    for complaint in complaints:
        logger.warning("distclip: %s", complaint)
    several = any(environ.get(name, "1") != "1" for name in ("SLURM_NNODES", "NNODES"))
    exporter = Exporter(run_id(environ, None, several), settings)
    exporter.start()
    try:
        if exporter.url is not None:
            _say(f"metrics of run {exporter.node.run} on {exporter.url}/metrics")
        handed = exporter.start_attempt("initial", _RANKS, Attempt())
        code, asked = _run(command, {**environ, **handed})
        if code and not asked:
            exporter.node.worker_failed("signal" if code > 128 else "exit")
        exporter.finish("stopped" if asked else "failed" if code else "succeeded")
        seconds = exporter.linger_seconds()
        if seconds >= 1:
            _say(f"the endpoint stays for {seconds:.0f} s, so that Prometheus sees the end (Ctrl-C: at once)")
        with contextlib.suppress(KeyboardInterrupt):  # somebody is in a hurry
            exporter.linger(seconds)
    finally:
        exporter.close()
    return code


def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, bool]:
    """The command's exit code, and whether somebody asked it to end."""
    asked = False
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        # A terminal sends Ctrl-C to the child by itself.
        if child is not None and number != signal.SIGINT:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        try:
            child = subprocess.Popen(command, env=dict(environment))
        except OSError as error:
            raise ConfigError(f"cannot start {command[0]!r}: {error.strerror or error}") from None
        if asked:
            child.terminate()  # the signal came before there was anybody to pass it on to
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return (128 - code if code < 0 else code), asked


def _say(text: str) -> None:
    print(f"distclip: {text}", file=sys.stderr, flush=True)
