"""Experts that carry a mark but no group: `parameter.allreduce = False`, as Megatron-LM and DeepSpeed set it.

The mark says that a parameter is not reduced like the rest, not over which ranks it is. Copies are known by what they
hold: ranks compare one hash per expert module, of names and values. Not per parameter, because biases of zeros are
alike in all experts; and not per rank, because the experts of one layer can have other holders than those of the next.

Copies whose values drifted apart before the plan are different experts here: nothing says that they are not. With
`owned={pattern: group}` they would be an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distclip.plan.collectives import gather_integers
from distclip.plan.fingerprint import combine, content_of, structure_of
from distclip.plan.sources import Found


def is_marked(parameter: Tensor) -> bool:
    """Whether it has the mark: reduced over another group than the rest."""
    return getattr(parameter, "allreduce", True) is False


def marked_of(found: Sequence[Found]) -> list[int]:
    """Indices of the marked parameters that no mesh or FSDP unit lays out."""
    return [
        index
        for index, item in enumerate(found)
        if is_marked(item.parameter) and item.fsdp1 is None and not isinstance(item.parameter, DTensor)
    ]


def holders_by_content(
    found: Sequence[Found], indices: Sequence[int], most: int, group: dist.ProcessGroup | None
) -> dict[int, tuple[int, ...]]:
    """For each of these marked parameters the ranks that hold its expert; collective.

    `most` is the number of marked parameters of the rank that has most. Eight bytes per rank and expert module.
    """
    units = _units(found, indices)
    hashes = [_hash(found, unit) for unit in units]
    table = gather_integers(hashes + [0] * (most - len(hashes)), group)
    ranks: dict[int, list[int]] = defaultdict(list)
    # most of the table are experts of others
    for rank, column in torch.isin(table, torch.tensor(hashes, dtype=torch.int64)).nonzero().tolist():
        ranks[int(table[rank, column])].append(rank)
    return {
        index: tuple(dict.fromkeys(ranks[number])) for number, unit in zip(hashes, units, strict=True) for index in unit
    }


def _units(found: Sequence[Found], indices: Sequence[int]) -> list[list[int]]:
    """Parameters that lie on the same ranks: those of one module.

    A module that holds constants only (a norm layer of ones) looks alike in every expert; it goes with the nearest
    module of the same expert: of those with the same name up to its last number, if it has numbers.
    """
    modules: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index in indices:
        modules[tuple(found[index].name.split(".")[:-1])].append(index)
    telling = [path for path, unit in modules.items() if not all(_constant(found[at].parameter) for at in unit)]
    units = {path: list(modules[path]) for path in telling}
    for path, unit in modules.items():
        if path in units:
            continue
        expert = max((at + 1 for at, part in enumerate(path) if part.isdecimal()), default=0)
        nearest = max(telling, key=lambda other: _common(path, other), default=())
        if telling and _common(path, nearest) >= expert:
            units[nearest] += unit
        else:
            units[path] = unit
    return list(units.values())


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many parts of two paths are the same from the start."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _constant(parameter: Tensor) -> bool:
    if parameter.is_meta or parameter.numel() == 0 or parameter.is_sparse or parameter.is_quantized:
        return True
    # by bytes, because not every dtype can be compared
    elements = parameter.detach().resolve_conj().reshape(-1, 1).contiguous().view(torch.uint8)
    return bool((elements == elements[0]).all())


def _hash(found: Sequence[Found], unit: Sequence[int]) -> int:
    """Names and values of a unit, whatever the order in which this rank has them."""
    items = sorted((found[index] for index in unit), key=lambda item: item.name)
    what = [(item.name, tuple(item.parameter.shape), str(item.parameter.dtype)) for item in items]
    return combine([structure_of(what), *(content_of(item.parameter) for item in items)])
