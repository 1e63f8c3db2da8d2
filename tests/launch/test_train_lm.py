"""The example job in one process, and its command line."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
import train_lm

SMALL = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch", "8", "--bytes", "300000"]


@pytest.fixture(autouse=True)
def one_thread() -> object:
    """Tiny matrices are slower on several threads, and test machines share their cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_loss_really_falls(capsys: pytest.CaptureFixture[str]) -> None:
    losses = train_lm.main([*SMALL, "--steps", "150", "--lr", "3e-3"])
    assert len(losses) == 150
    assert losses[0] > 5.0
    assert sum(losses[-10:]) / 10 < 3.3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "starts at step 1 of 150: none, fp32, 1 x cpu, 300,000 bytes of text"
    assert sum(line.startswith("step ") for line in lines) == 16  # the first, and every tenth
    assert lines[-1].startswith("done: 150 steps")


def test_the_same_seed_gives_the_same_losses_and_another_one_others() -> None:
    first, again, other = (train_lm.main([*SMALL, "--steps", "5", "--seed", seed]) for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_accumulated_micro_batches_count_like_one_batch_of_their_mean() -> None:
    losses = train_lm.main([*SMALL, "--steps", "3", "--accumulate", "2"])
    assert all(4.5 < loss < 5.7 for loss in losses)  # a sum over the two would be near 11


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_number_formats_learn_the_same(precision: str) -> None:
    half, full = (train_lm.main([*SMALL, "--steps", "8", "--precision", each]) for each in (precision, "fp32"))
    assert half == pytest.approx(full, abs=0.05)
    assert half != full


def test_faults_are_seen_in_the_printed_lines(capsys: pytest.CaptureFixture[str]) -> None:
    faults = ["nan@3", "inf@5", "zero@7", "tiny@9", "spike@11"]
    inject = [part for fault in faults for part in ("--inject", fault)]
    losses = train_lm.main([*SMALL, "--steps", "12", "--log-every", "1", *inject])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    fields = {int(line.split()[1]): line.split() for line in lines}
    outcome = {step: " ".join(words[8:]) for step, words in fields.items()}
    norm = {step: float(words[5]) for step, words in fields.items()}
    assert math.isnan(losses[2])
    assert {step for step, words in outcome.items() if words == "skipped (nonfinite)"} == {3, 5}
    assert {step for step, words in outcome.items() if words == "stepped"} == set(range(1, 13)) - {3, 5}
    assert norm[7] == 0.0
    assert 0.0 < norm[9] < 1e-6
    assert norm[11] > 1000.0
    assert norm[11] * float(fields[11][7]) == pytest.approx(1.0, rel=1e-2)


def test_a_skipped_step_leaves_the_model_as_it_was() -> None:
    # After a skip the run continues as if that step had not been: only the batches differ, so compare the next loss.
    skipped = train_lm.main([*SMALL, "--steps", "3", "--inject", "nan@1-2"])
    fresh = train_lm.main([*SMALL, "--steps", "3", "--inject", "nan@2"])
    assert skipped[2] > 5.3  # untrained
    assert fresh[2] < skipped[2]  # one step learned


def test_a_run_that_stopped_goes_on_as_if_it_had_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    straight = train_lm.main([*SMALL, "--steps", "8"])
    keep = ["--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "2"]
    first = train_lm.main([*SMALL, *keep, "--steps", "5"])
    rest = train_lm.main([*SMALL, *keep, "--steps", "8"])
    assert first[:4] + rest == straight
    assert "resumes at step 5 of 8" in capsys.readouterr().out
    assert (tmp_path / "kept" / "latest").read_text() == "step-000008"
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["latest", "step-000006", "step-000008"]


def test_a_checkpoint_that_was_not_finished_is_not_taken(tmp_path: Path) -> None:
    keep = ["--checkpoint", str(tmp_path), "--checkpoint-every", "2"]
    train_lm.main([*SMALL, *keep, "--steps", "2"])
    (tmp_path / "step-000004").mkdir()
    (tmp_path / "step-000004" / "__0_0.distcp").write_bytes(b"half of it")
    assert len(train_lm.main([*SMALL, *keep, "--steps", "4"])) == 2


def test_a_checkpoint_that_cannot_be_taken_up_is_one_line(tmp_path: Path) -> None:
    keep = ["--checkpoint", str(tmp_path), "--checkpoint-every", "2"]
    train_lm.main([*SMALL, *keep, "--steps", "2"])
    said = r"^train_lm: --checkpoint: cannot go on from \S+/step-000002 \(.+\): give the sizes that it was saved with"
    with pytest.raises(SystemExit, match=said) as ended:
        train_lm.main([*SMALL, *keep, "--steps", "4", "--width", "64"])
    assert "Size mismatch" in str(ended.value)
    shutil.rmtree(tmp_path / "step-000002")
    with pytest.raises(SystemExit, match=said):
        train_lm.main([*SMALL, *keep, "--steps", "4"])
