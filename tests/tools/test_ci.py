"""What `.ci/run` does with good and bad steps, with a `make` that only writes down what it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
MAKE = """\
#!/bin/sh
echo "$1 CI=$CI" >>said
[ "$1" != "$BAD" ]
"""


@pytest.mark.parametrize("bad", ["", "check", "test", "soak"])
def test_every_step_runs_and_one_bad_one_is_enough(bad, tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "make").write_text(MAKE)
    (tmp_path / "bin" / "make").chmod(0o755)
    result = subprocess.run(
        ["bash", str(tmp_path / ".ci" / "run")],
        cwd="/",
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "BAD": bad},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (tmp_path / "said").read_text().splitlines() == ["check CI=true", "test CI=true", "soak CI=true"]
    assert result.returncode == (1 if bad else 0)
    assert (f"failed: {bad}" in result.stdout) == bool(bad)
