"""The command line of `train_lm.py`, and everything that can be wrong with it.

All of it is looked at here, before the ranks meet: a mistake then ends every rank with the same line, where later it
could leave some of them waiting for the others.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lm_faults import FORMS, fault_problem, parse_fault
from lm_parallel import DTYPES, WRAPS, expected_ranks, wrap_problem

LARGEST_SEED = 2**64 - 1  # that torch takes


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; bad values end the program with a line that says which and why, and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="train_lm",
        usage="train_lm.py [OPTIONS]    (--help lists them)",  # the whole list would be a page, from every rank
        description="Train a small language model on the Python standard library's source, clipped by distclip.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--steps", type=at_least(1), default=200, help="train until this step")
    run.add_argument("--wrap", choices=WRAPS, default="none", help="how the model is spread over ranks")
    run.add_argument("--replicate", type=at_least(1), default=2, help="hsdp: copies of the model")
    run.add_argument("--precision", choices=DTYPES, default="fp32", help="number format of the forward")
    run.add_argument("--accumulate", type=at_least(1), default=1, metavar="N", help="micro-batches per step")
    run.add_argument("--max-norm", type=limit, default=1.0, help="clip the gradient norm to this; inf: never")
    run.add_argument("--lr", type=learning_rate, default=1e-3, help="learning rate of AdamW")
    run.add_argument("--seed", type=at_least(0, LARGEST_SEED), default=0, help="of weights and batches")
    run.add_argument("--log-every", type=at_least(1), default=10, metavar="N", help="print each Nth step")
    run.add_argument("--inject", type=parse_fault, action="append", default=[], metavar="FAULT", help=FORMS)
    size = parser.add_argument_group("sizes")
    size.add_argument("--layers", type=at_least(1), default=4, help="transformer blocks")
    size.add_argument("--width", type=at_least(1), default=128, help="of the residual stream")
    size.add_argument("--heads", type=at_least(1), default=4, help="of attention")
    size.add_argument("--context", type=at_least(1), default=128, help="bytes that the model looks at")
    size.add_argument("--batch", type=at_least(1), default=8, help="pieces of text per rank and micro-batch")
    size.add_argument("--bytes", type=at_least(1), default=4_000_000, help="how much source to read")
    keep = parser.add_argument_group("checkpoints")
    keep.add_argument("--checkpoint", type=Path, metavar="DIR", help="save here, and go on from what is here")
    keep.add_argument("--checkpoint-every", type=at_least(1), default=100, metavar="N", help="save each Nth step")
    options = parser.parse_args(argv)
    problem = find_problem(options)
    if problem is not None:
        parser.error(f"argument {problem}")
    return options


def find_problem(options: argparse.Namespace) -> str | None:
    """What cannot be although each value by itself could, as "--flag: why"; None where all is well."""
    if options.width % options.heads:
        return f"--heads: {options.heads} does not divide --width {options.width}"
    if options.bytes <= options.context:
        return f"--bytes: {options.bytes} is not more than --context {options.context}"
    try:
        ranks = expected_ranks()
    except (KeyError, ValueError):
        return "--wrap: RANK is set but WORLD_SIZE is no whole number: start with torchrun, or unset both"
    return (
        wrap_problem(options.wrap, options.replicate, ranks)
        or fault_problem(options.inject, options.steps, ranks or 1)
        or (folder_problem(options.checkpoint) if options.checkpoint else None)
    )


def folder_problem(folder: Path) -> str | None:
    """Why no checkpoint can be written there; makes the folder. Tried by writing, since rights alone do not tell."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"--checkpoint: cannot write to {folder} ({error.strerror}): name a folder that you may write to"


def at_least(least: int, most: float = math.inf) -> Callable[[str], int]:
    """An argparse type: a whole number from `least` on, and to `most` where that is given."""
    span = f"from {least} on" if most == math.inf else f"from {least} to {most}"

    def whole_number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number {span}, not {text!r}")
        return int(text)

    return whole_number


def limit(text: str) -> float:
    """An argparse type: a limit of a norm."""
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, or inf to measure only, not {text!r}")
    return value


def learning_rate(text: str) -> float:
    """An argparse type: a learning rate; 0 learns nothing but runs."""
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number from 0 on, not {text!r}")
    return value


def number(text: str) -> float:
    """The number in a text, nan where there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
