"""The command line of `train_lm.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from lm_faults import FORMS, parse_fault
from lm_parallel import DTYPES, WRAPS


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; bad values end the program with a line that says which and why."""
    parser = argparse.ArgumentParser(
        prog="train_lm",
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
    run.add_argument("--max-norm", type=float, default=1.0, help="clip the gradient norm to this")
    run.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    run.add_argument("--seed", type=int, default=0, help="of weights and batches")
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
    if options.width % options.heads:
        parser.error(f"argument --heads: {options.heads} does not divide --width {options.width}")
    if options.bytes <= options.context:
        parser.error(f"argument --bytes: {options.bytes} is not more than --context {options.context}")
    return options


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `least` on."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, not {text!r}")
        return int(text)

    return whole_number
