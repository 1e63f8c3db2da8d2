"""No process outlives the demo: children are real ones here, some of them stubborn."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distclip.cli import demo_children
from distclip.cli.demo_children import Children, Stopped, stopped_by_signals

FAMILY = """
import os, subprocess, sys, time
inner = "import os, time; print('inner', os.getpid(), flush=True); time.sleep(600)"
if "deaf" in sys.argv:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
print("outer", os.getpid(), flush=True)
time.sleep(600)
"""


def pids(log: Path) -> dict[str, int]:
    """Process ids that the family has printed, once both have."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        words = log.read_text().split() if log.exists() else []
        if len(words) == 4:
            return {words[0]: int(words[1]), words[2]: int(words[3])}
        time.sleep(0.02)
    raise AssertionError(f"the processes did not come up: {log.read_text()}")


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":  # ended; whoever inherited it has not looked yet
            return
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"process {pid} is still there")


@pytest.mark.parametrize("manner", ["polite", "deaf"])
def test_the_end_takes_a_child_and_what_it_started(
    manner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_children, "GRACE", 0.5)
    log = tmp_path / "log"
    with Children() as children:
        children.start([sys.executable, "-c", FAMILY, manner], log)
        family = pids(log)
    for pid in family.values():
        wait_until_gone(pid)


def test_an_error_inside_ends_the_children_too(tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def fail() -> None:
        with Children() as children:
            started.append(children.start(["sleep", "600"], tmp_path / "log"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert started[0].returncode == -signal.SIGTERM


def test_a_child_that_ended_by_itself_is_no_trouble(tmp_path: Path) -> None:
    with Children() as children:
        process = children.start(["true"], tmp_path / "log")
        process.wait(30)
    assert process.returncode == 0


PARENT = f"""
import sys, time
from pathlib import Path
from distclip.cli.demo_children import Children
with Children() as children:
    children.start([sys.executable, "-c", {FAMILY!r}], Path(sys.argv[1]))
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent was killed")
def test_a_killed_parent_takes_its_children_along(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(log)])
    family = pids(log)
    parent.kill()
    parent.wait(30)
    wait_until_gone(family["outer"])
    os.kill(family["inner"], signal.SIGKILL)  # nobody asked for this one: torchrun's agent ends its own on SIGTERM


def test_the_first_signal_stops_and_later_ones_do_not_disturb_cleaning_up() -> None:
    before = signal.getsignal(signal.SIGTERM)
    done: list[str] = []

    def work() -> None:
        with stopped_by_signals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(30)
                done.append("work")
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("cleaning up")

    with pytest.raises(Stopped) as stop:
        work()
    assert done == ["cleaning up"]
    assert stop.value.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
