"""`distclip demo` as a user runs it: once to its end, and ended early in the ways that leave processes behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from distclip.cli.demo_prometheus import find_tool
from distclip.cli.demo_story import MAX_NORM, STEPS

COMMAND = [sys.executable, "-m", "distclip.cli", "demo", "--output"]


def environment(folder: Path) -> dict[str, str]:
    """The demo's temporary files go into a folder of the test, by which its processes are known."""
    (folder / "tmp").mkdir()
    return {**os.environ, "TMPDIR": str(folder / "tmp")}


@pytest.mark.timeout(400)  # half a minute on two free cores; the demo itself gives up after five
def test_the_demo_catches_every_fault_and_every_alert_fires(tmp_path: Path) -> None:
    output = tmp_path / "out put"
    ended = subprocess.run(
        [*COMMAND, str(output)], env=environment(tmp_path), capture_output=True, text=True, timeout=380
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    text = ended.stdout
    assert "✓ 4 of 4 faults caught" in text
    assert "✓ no good step flagged or skipped" in text
    assert "✓ loss of good steps went from" in text
    assert re.search(r"✓ norm [\d,]+ clipped to 1 ", text)
    if find_tool("prometheus") is None:
        assert os.environ.get("CI") != "true", "CI must have Prometheus"
        assert "No Prometheus here" in text
    else:
        assert "✓ 3 of 3 expected alerts fired" in text
        assert "Other alerts fired too" not in text
    assert text.endswith("All as it should be.\n")

    steps = [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["event"]) for event in events] == [
        (40, "nonfinite"),
        *((step, "zero") for step in range(75, 83)),
        *((step, "tiny") for step in range(115, 123)),
    ]
    assert {culprit["rank"] for culprit in events[0]["culprits"]} <= {0, 1}
    assert steps[154]["clip_coefficient"] * steps[154]["total_norm"] == pytest.approx(MAX_NORM, rel=1e-3)
    with Image.open(output / "demo.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 20  # not an empty page
    assert list((tmp_path / "tmp").iterdir()) == []
    assert processes_of(tmp_path) == {}


@contextlib.contextmanager
def demo_in_a_terminal(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[bytes]]]:
    """The demo with a terminal of its own, so that it shows its live page; and what it has written to it."""
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the terminal is closed
            while data := os.read(ours, 65536):
                written.append(data)

    env = {**environment(folder), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    demo = subprocess.Popen(
        [*COMMAND, str(folder / "out")], env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield demo, written
    finally:
        demo.kill()
        demo.wait(30)
        reader.join(30)
        os.close(ours)
        for pid in processes_of(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes_of(folder: Path) -> dict[int, str]:
    """All processes with the test's folder in their command or environment: the demo and everything that it started."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            command = (entry / "cmdline").read_bytes()
            known = str(folder).encode() in command + (entry / "environ").read_bytes()
            if known and int(entry.name) != os.getpid():
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def wait_until(condition: object, what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.05)


def ranks(folder: Path) -> int:
    return sum(
        "train_lm.py" in command and "torch.distributed.run" not in command for command in processes_of(folder).values()
    )


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    with demo_in_a_terminal(tmp_path) as (demo, written):
        wait_until(lambda: b"training" in b"".join(written) or demo.poll() is not None, "no first step on the page")
        assert demo.poll() is None, b"".join(written).decode()
        assert ranks(tmp_path) == 2
        demo.send_signal(signal.SIGINT)
        assert demo.wait(30) == 128 + signal.SIGINT
        assert processes_of(tmp_path) == {}
        assert list((tmp_path / "tmp").iterdir()) == []
    screen = b"".join(written).decode()
    assert "Stopped by SIGINT. No process is left behind." in screen
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")  # the cursor is visible again


def test_a_killed_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    with demo_in_a_terminal(tmp_path) as (demo, _):
        wait_until(lambda: ranks(tmp_path) == 2, "the ranks did not start")
        demo.kill()
        demo.wait(30)
        wait_until(lambda: processes_of(tmp_path) == {}, "processes are left", seconds=40.0)


def test_sigterm_before_the_ranks_are_there_ends_everything(tmp_path: Path) -> None:
    with demo_in_a_terminal(tmp_path) as (demo, _):
        wait_until(lambda: any("torch.distributed.run" in each for each in processes_of(tmp_path).values()), "no agent")
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(30) == 128 + signal.SIGTERM
        assert processes_of(tmp_path) == {}


def test_an_output_folder_that_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = subprocess.run(
        [*COMMAND, str(tmp_path / "file" / "out")], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("distclip: error: cannot write to ")
    assert len(ended.stderr.splitlines()) == 1
