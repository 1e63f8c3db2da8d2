"""The example job's command line: whatever is wrong ends every rank with one line, before the ranks meet."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lm_options import LARGEST_SEED, parse_options

from distclip.data import data_path

WHOLE = "must be a whole number from 1 on, not"


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line that says what was wrong with these arguments."""
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: train_lm.py [OPTIONS]")
    assert error.startswith("train_lm: error: argument --")
    return error.removeprefix("train_lm: error: argument ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--inject", "nam@3"], "--inject: unknown kind 'nam'"),
        (["--inject", "nan"], "--inject: cannot read 'nan'. Forms: "),
        (["--inject", "nan@9", "--steps", "8"], "--inject: nan@9: the run has only 8 steps"),
        (["--inject", "nan@3:rank=1"], "--inject: nan@3:rank=1: the run has only the ranks 0 to 0"),
        (["--wrap", "fsdp3"], "--wrap: invalid choice"),
        (["--steps", "0"], f"--steps: {WHOLE} '0'"),
        (["--steps", "many"], f"--steps: {WHOLE} 'many'"),
        (["--steps", "1.5"], f"--steps: {WHOLE} '1.5'"),
        *(([f"--{flag}", value], f"--{flag}: {WHOLE} '{value}'") for flag in ("layers", "batch") for value in "0x"),
        *(([f"--{flag}", "-8"], f"--{flag}: {WHOLE} '-8'") for flag in ("width", "heads", "context", "bytes")),
        *(([f"--{flag}", "0"], f"--{flag}: {WHOLE} '0'") for flag in ("replicate", "accumulate", "log-every")),
        (["--max-norm", "0"], "--max-norm: must be a number above 0, or inf to measure only, not '0'"),
        *(([f"--max-norm={value}"], "--max-norm: must be a number above 0") for value in ("nan", "-1", "-inf", "much")),
        *(([f"--lr={value}"], "--lr: must be a finite number from 0 on, not") for value in ("nan", "-1e-3", "inf", "")),
        *((["--seed", value], f"--seed: must be a whole number from 0 to {LARGEST_SEED}") for value in ("-1", "1e3")),
        (["--seed", str(LARGEST_SEED + 1)], f"--seed: must be a whole number from 0 to {LARGEST_SEED}"),
        (["--seed", "9" * 5000], "--seed: invalid"),
        (["--width", "10", "--heads", "3"], "--heads: 3 does not divide --width 10"),
        (["--bytes", "10", "--context", "10"], "--bytes: 10 is not more than --context 10"),
        (["--wrap", "fsdp2"], "--wrap: fsdp2 needs ranks: start with torchrun --nproc-per-node 2 train_lm.py --wrap f"),
        (["--checkpoint", "/proc/nowhere"], "--checkpoint: cannot write to /proc/nowhere (No such file or directory)"),
        (["--checkpoint", __file__], f"--checkpoint: cannot write to {__file__} (File exists): name a folder"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(arguments, capsys).startswith(message)


def test_the_ends_of_the_ranges_are_taken(tmp_path: Path) -> None:
    options = parse_options(["--max-norm", "inf", "--lr", "0", "--seed", str(LARGEST_SEED), "--steps", "1"])
    assert (options.max_norm, options.lr, options.seed, options.steps) == (math.inf, 0.0, LARGEST_SEED, 1)
    parse_options(["--checkpoint", str(tmp_path / "a" / "b")])
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        ("2", ["--wrap", "none"], "--wrap: none is for a single process, not for 2 ranks; use ddp, fsdp1, fsdp2, hsdp"),
        ("2", ["--wrap", "hsdp", "--replicate", "3"], "--replicate: 3 does not divide the 2 ranks"),
        ("6", ["--wrap", "hsdp", "--replicate", "4"], "--replicate: 4 does not divide the 6 ranks"),
        ("2", ["--wrap", "ddp", "--inject", "kill@3:rank=2"], "--inject: kill@3:rank=2: the run has only the ranks 0"),
        ("1.5", ["--wrap", "hsdp"], "--wrap: RANK is set but WORLD_SIZE is no whole number"),
    ],
)
def test_what_does_not_fit_the_ranks_is_named(
    ranks: str,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert refused(arguments, capsys).startswith(message)


def test_every_rank_ends_with_the_same_line_and_none_waits_for_another(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = [str(data_path("launch") / "train_lm.py"), "--wrap", "hsdp", "--replicate", "3"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    logs = ["--log-dir", str(tmp_path / "logs"), "--redirects", "3"]
    ended = subprocess.run([*torchrun, *logs, *job], env=env, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode != 0
    said = [path.read_text().splitlines() for path in (tmp_path / "logs").rglob("stderr.log")]
    whole = [lines for lines in said if lines]  # torchrun ends the other rank when one has ended, maybe before it spoke
    assert whole
    assert all(lines[-1] == "train_lm: error: argument --replicate: 3 does not divide the 2 ranks" for lines in whole)
    assert "exitcode  : 2" in ended.stderr
