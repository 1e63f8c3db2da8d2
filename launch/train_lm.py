"""Train a small language model on this machine's own Python source, with its gradients clipped and watched by distclip.

    python train_lm.py                                                               # one process
    torchrun --logs-specs distclip --nproc-per-node 2 train_lm.py --wrap fsdp2       # two ranks, seen by Prometheus
    torchrun --logs-specs distclip --nproc-per-node 2 train_lm.py --wrap zero2       # the same with DeepSpeed

A real training job to read, copy and break. What distclip adds to a training loop are two calls in `train` below, each
marked. The neighbours of this file have the rest: `lm_model.py` (model, data), `lm_parallel.py` (DDP, FSDP, precision),
`lm_deepspeed.py` (ZeRO), `lm_checkpoint.py` (save, resume) and `lm_faults.py` (`--inject`: nan, zero and tiny
gradients, spikes, deaths).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from lm_checkpoint import Checkpoints
from lm_deepspeed import EngineCheckpoints, make_engine
from lm_faults import batch_weight, die_if_due
from lm_model import Block, LanguageModel, draw_batch, loss_of, read_source
from lm_options import parse_options
from lm_parallel import Place, computing, is_zero, make_scaler, started, synchronising, wrap
from torch import Tensor, nn

import distclip


def train(args: argparse.Namespace, place: Place) -> list[float]:
    """Train from the newest checkpoint, or from nothing, to step `args.steps`; returns the loss of each step here."""
    torch.manual_seed(args.seed)
    text = read_source(args.bytes)
    plain = LanguageModel(args.layers, args.width, args.heads, args.context)
    scaler = make_scaler(args.wrap, args.precision, place)
    checkpoints: Checkpoints | EngineCheckpoints | None = None

    # distclip, 1 of 2: on every rank, after wrapping.
    if is_zero(args.wrap):
        optimizer = make_optimizer(plain, args.lr)
        model = make_engine(plain, optimizer, args.wrap, args.precision, args.batch, args.max_norm, place)
        backward = model.backward
        clipper = distclip.GradientClipper(model, max_norm=args.max_norm)
        if args.checkpoint:
            checkpoints = EngineCheckpoints(args.checkpoint, model, clipper)
    else:
        model = wrap(plain, Block, args.wrap, args.precision, args.replicate, place)
        optimizer = make_optimizer(model, args.lr)
        backward = Tensor.backward
        clipper = distclip.GradientClipper(model, optimizer, max_norm=args.max_norm, scaler=scaler)
        if args.checkpoint:
            checkpoints = Checkpoints(args.checkpoint, model, optimizer, scaler, clipper)

    first = 1 + (checkpoints.resume() if checkpoints else 0)
    begins = f"{'resumes' if first > 1 else 'starts'} at step {first} of {args.steps}"
    ranks = f"{place.world_size} x {place.device.type}"
    say(place, f"{begins}: {args.wrap}, {args.precision}, {ranks}, {len(text):,} bytes of text")

    losses: list[Tensor] = []
    began = time.monotonic()
    for step in range(first, args.steps + 1):
        die_if_due(args.inject, step, place.rank)
        optimizer.zero_grad()
        loss = torch.zeros((), device=place.device)
        for micro in range(args.accumulate):
            tokens = draw_batch(text, args.batch, args.context, key=(args.seed, step, micro, place.rank))
            weight = batch_weight(args.inject, step, place.rank)  # 1.0, unless a fault is due
            with synchronising(model, last=micro == args.accumulate - 1):
                with computing(args.wrap, args.precision, place):
                    part = loss_of(model, tokens.to(place.device)) * weight / args.accumulate
                backward(scaler.scale(part) if scaler else part)
            loss += part.detach()

        # distclip, 2 of 2: once per step, after the last backward. Instead of scaler.unscale_, clip_grad_norm_,
        # optimizer.step and scaler.update. All ranks clip by the same amount, and step or skip together.
        report = clipper.step(loss=loss)

        losses.append(loss)
        if step % args.log_every == 0 or report.skip_reason or step in (first, args.steps):
            say(place, line_of(step, loss, report))
        if checkpoints and step % args.checkpoint_every == 0:
            checkpoints.save(step)
    seconds = time.monotonic() - began
    say(place, f"done: {len(losses)} steps in {seconds:.1f} s")
    return [float(loss) for loss in losses]


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW with the betas that language models are trained with."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))


def line_of(step: int, loss: Tensor, report: distclip.StepReport) -> str:
    """One step as a line for people; reads the report's numbers from the device."""
    outcome = "stepped" if report.stepped else f"skipped ({report.skip_reason})"
    norm, coefficient = float(report.total_norm), float(report.clip_coefficient)
    scale = "" if report.loss_scale is None else f"  loss scale {float(report.loss_scale):g}"
    return (
        f"step {step:>5}  loss {float(loss):9.4f}  norm {norm:10.4g}  coefficient {coefficient:8.4g}{scale}  {outcome}"
    )


def say(place: Place, line: str) -> None:
    """Print from rank 0 only, at once even into a pipe."""
    if place.rank == 0:
        print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """What the command does; also for callers with a process group of their own. Returns this rank's losses."""
    args = parse_options(argv)
    with started() as place:
        return train(args, place)


if __name__ == "__main__":
    main()
