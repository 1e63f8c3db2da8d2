"""FSDP1 (`FullyShardedDataParallel`): which elements of a flattened parameter lie on this rank.

FSDP1 parameters are plain tensors: a one-dimensional local shard (FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD) or the
whole tensor (NO_SHARD), and only the FSDP unit around them knows over which process group. With HYBRID_SHARD its
`process_group` is the group inside a node; copies on other nodes are found by the handshake, like all replicas.

Private names, all in this file: `_fsdp_flattened` (set on parameters in `_flat_param.py`, torch 2.0 to 2.13), which
marks parameters that FSDP1 manages, with `use_orig_params` both ways; ignored ones lack it.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from distclip.plan.layout import Layout


def is_flattened(parameter: Tensor) -> bool:
    """Whether FSDP1 manages this parameter."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def fsdp1_layout(unit: FullyShardedDataParallel) -> Layout:
    """Layout of every parameter that `unit` manages directly.

    Source: `torch/distributed/fsdp/fully_sharded_data_parallel.py`, ShardingStrategy.
    """
    group = unit.process_group
    peers = tuple(dist.get_process_group_ranks(group))
    where = f"{unit.sharding_strategy.name} over {len(peers)}"
    if unit.sharding_strategy == ShardingStrategy.NO_SHARD or len(peers) == 1:
        return Layout("replicated", "fsdp1", where, peers=peers)
    return Layout("sharded", "fsdp1", where, ("fsdp1", len(peers)), (dist.get_rank(group),), peers)


def is_unsynchronised(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether the last backward ran under `no_sync()`: the gradient then has the unsharded shape.

    Cannot tell for NO_SHARD, where both shapes are equal; replicas then differ and the packet shows it.
    """
    return gradient.shape != parameter.shape
