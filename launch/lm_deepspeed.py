"""`train_lm.py --wrap zero0` to `zero3`: the model in a DeepSpeed engine.

The configuration is `deepspeed/config.json` beside this file, with what the command line says put in. In it, for a
training loop of your own:

- `gradient_clipping` is written down and is what `GradientClipper` is given: left out it means 1 today and meant none
  in earlier versions of DeepSpeed.
- `managed_gradient_accumulation` is off: the loop steps once after its last micro-batch. With it on, call
  `clipper.step()` after every micro-batch, as one would call `engine.step()`.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lm_parallel import Place
from torch import nn

import distclip

CONFIGURATION = Path(__file__).with_name("deepspeed") / "config.json"


def load_deepspeed() -> Any:
    """Import DeepSpeed so that it also runs on a machine without an accelerator and without a compiler.

    Raises:
        SystemExit: it is not installed.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch.compile would want a compiler
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
    except ImportError:
        deepspeed = None
    # The folder `deepspeed` beside this file looks like an empty package where the real one is not installed.
    if not hasattr(deepspeed, "initialize"):
        raise SystemExit("train_lm: --wrap zero0 to zero3 need DeepSpeed: pip install 'distclip[deepspeed]'")
    if not torch.cuda.is_available():
        # Only a faster way to reduce between processes of one machine; it is built with a compiler when first used.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def make_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    kind: str,
    precision: str,
    batch: int,
    max_norm: float,
    place: Place,
) -> Any:
    """An engine of the ZeRO stage that ends `kind` around the model and its optimizer; every rank comes here.

    Raises:
        SystemExit: DeepSpeed is not installed.
    """
    deepspeed = load_deepspeed()
    settings = json.loads(CONFIGURATION.read_text())
    settings["train_micro_batch_size_per_gpu"] = batch
    settings["gradient_clipping"] = max_norm
    settings["zero_optimization"]["stage"] = int(kind[-1])
    if precision != "fp32":
        settings[precision]["enabled"] = True
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    engine, *_ = deepspeed.initialize(model=model.to(place.device), optimizer=optimizer, config=settings)
    return engine


class EngineCheckpoints:
    """Saves and resumes one training run in `folder`, in DeepSpeed's own format: for the same number of ranks."""

    def __init__(self, folder: Path, engine: Any, clipper: distclip.GradientClipper) -> None:
        self.folder, self.engine, self.clipper = str(folder), engine, clipper

    def save(self, step: int) -> None:
        """Write one checkpoint; every rank calls this."""
        with distclip.phase("checkpoint"):
            state = {"clipper": self.clipper.state_dict(), "step": step}
            self.engine.save_checkpoint(self.folder, tag=f"step-{step:06d}", client_state=state)

    def resume(self) -> int:
        """Load the newest complete checkpoint; returns its step, or 0 where there is none."""
        if not (Path(self.folder) / "latest").exists():
            return 0
        _, state = self.engine.load_checkpoint(self.folder)
        self.clipper.load_state_dict(state["clipper"])
        return int(state["step"])
