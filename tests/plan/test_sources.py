"""Names are clean and parameters come once, however the model is wrapped."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from distclip.plan.sources import items_of, walk


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.module(self.embedding(tokens)))


NAMES = ["embedding.weight", "module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias"]


def _names(source: Any) -> list[str]:
    return [found.name for found in walk(items_of(source))]


def test_a_tied_parameter_comes_once_and_module_is_an_ordinary_name() -> None:
    model = Tied()
    assert _names(model) == NAMES
    assert _names(model.named_parameters()) == NAMES
    assert _names([model.embedding, model.module]) == ["weight", "0.weight", "0.bias", "1.weight", "1.bias"]


def test_compiled_models_keep_their_names() -> None:
    model = Tied()
    assert _names(torch.compile(model, backend="aot_eager")) == NAMES


def test_parameters_without_names_are_numbered() -> None:
    assert _names(Tied().parameters())[:2] == ["parameter[0]", "parameter[1]"]


def test_a_module_that_contains_itself_ends() -> None:
    model = nn.Linear(1, 1)
    model.loop = model
    assert _names(model) == ["weight", "bias"]


def _wrapped_names() -> dict[str, list[str]]:
    policy = ModuleWrapPolicy({nn.Linear})
    fsdp1 = FullyShardedDataParallel(
        Tied(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    compiled: Any = torch.compile(DistributedDataParallel(Tied()), backend="aot_eager")
    return {
        "ddp": _names(DistributedDataParallel(Tied())),
        "ddp pairs": _names(DistributedDataParallel(Tied()).named_parameters()),
        "compiled ddp": _names(compiled),
        "fsdp1": _names(fsdp1),
        "fsdp2": _names(fully_shard(Tied())),
    }


def test_wrappers_leave_no_trace_in_names(ranks: Any) -> None:
    for said in ranks(_wrapped_names, 2):
        for wrap, names in said.items():
            assert names == NAMES, wrap
