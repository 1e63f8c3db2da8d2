"""Checkpoints of `train_lm.py`: written by all ranks together, readable by any number of them.

    DIR/step-000100/    one checkpoint, by torch.distributed.checkpoint
    DIR/latest          the name of the newest one that is complete

`latest` is replaced in one move after a checkpoint is complete, so a run that dies while writing goes on from the one
before. What is saved is everything that a step depends on: model, optimizer, loss scale, distclip's own state and the
step. The data needs no state (see `lm_model.draw_batch`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import distclip

LATEST = "latest"
KEEP = 2


class Checkpoints:
    """Saves and resumes one training run in `folder`."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        clipper: distclip.GradientClipper,
    ) -> None:
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.clipper = clipper

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """Without what torch warns itself of in here: a hundred lines from FSDP1 on ShardedTensor, every time."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.distributed\.")
            yield

    def _state(self, step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        scaler = self.scaler.state_dict() if self.scaler else {}
        return {
            "model": model,
            "optimizer": optimizer,
            "scaler": scaler,
            "clipper": self.clipper.state_dict(),
            "step": step,
        }

    def save(self, step: int) -> None:
        """Write one checkpoint; every rank calls this."""
        with distclip.phase("checkpoint"):  # no steps are due meanwhile: nobody is to be woken for a slow disk
            name = f"step-{step:06d}"
            with self._quietly():
                state_dict_saver.save(self._state(step), checkpoint_id=self.folder / name)
            if not dist.is_initialized() or dist.get_rank() == 0:
                aside = self.folder / f"{LATEST}.new"
                aside.write_text(name)
                os.replace(aside, self.folder / LATEST)
                for old in sorted(self.folder.glob("step-*"))[:-KEEP]:
                    shutil.rmtree(old)

    def resume(self) -> int:
        """Load the newest complete checkpoint; returns its step, or 0 where there is none.

        Raises:
            SystemExit: it is damaged, or was saved by a run of other sizes; says so, the same on every rank.
        """
        marker = self.folder / LATEST
        newest: list[str | None] = [marker.read_text() if marker.exists() else None]
        if dist.is_initialized():  # one rank's word for all: on a network file system they may not see the same yet
            dist.broadcast_object_list(newest)
        if newest[0] is None:
            return 0
        with self._quietly():
            state = self._state(0)
            try:
                state_dict_loader.load(state, checkpoint_id=self.folder / newest[0])
            except CheckpointException as failed:
                cause, _ = failed.failures[min(failed.failures)]
                raise SystemExit(
                    f"train_lm: --checkpoint: cannot go on from {self.folder / newest[0]} ({cause}): "
                    "give the sizes that it was saved with, or another folder"
                ) from None
            saved = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(self.model, self.optimizer, **saved)
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"])
        self.clipper.load_state_dict(state["clipper"])
        return int(state["step"])
