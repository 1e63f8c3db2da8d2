"""Make a plan: from the parameters of all ranks to who owns which elements.

Collective over the run's group: every rank must come here, with whatever it has, even nothing.
"""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from distclip.errors import LayoutError, for_all_ranks
from distclip.plan import ddp, groups
from distclip.plan.collectives import GroupReference, packet_device, wait_for_all
from distclip.plan.declaration import Declaration
from distclip.plan.dtensor import dtensor_layout, fsdp2_units, local_of, spec_of
from distclip.plan.fingerprint import structure_of
from distclip.plan.fsdp1 import fsdp1_layout
from distclip.plan.handshake import LayoutClass, Member, holders_of, introduce
from distclip.plan.layout import Layout
from distclip.plan.marked import holders_by_content, is_marked, marked_of
from distclip.plan.partial import agree_placements, placements_differ, reductions_of
from distclip.plan.plan import Bucket, Entry, Plan
from distclip.plan.sources import Found, modules_of, walk


def build_plan(
    items: list[Any],
    group: dist.ProcessGroup | None,
    *,
    declaration: Declaration | None = None,
    problem: Exception | None = None,
    arguments: dict[str, str] | None = None,
) -> Plan:
    """Agree with all ranks of `group` on who holds which gradient of a source, given as `sources.items_of(source)`.

    `problem` is an error that this rank met before (a bad argument); it is raised by every rank. `arguments` are
    those that must be alike on all ranks, as text. Raises what the handshake raises.

    Example (a single process):
        >>> layer = torch.nn.Linear(2, 2)
        >>> [entry.name for entry in build_plan([layer], None).entries]
        ['weight', 'bias']
    """
    declaration = declaration or Declaration()
    wait_for_all(group, "distclip's plan")
    found: list[Found] = []
    keys: list[str] = []
    words: dict[str, bool] = {}
    marked: list[int] = []
    if problem is None:
        try:
            declaration.problem()
            found = walk(items)
            words = declaration.words(items)
            declared = [declaration.declares(item.name) for item in found]
            known = [said or is_marked(item.parameter) for said, item in zip(declared, found, strict=True)]
            ddp.check_ignored(found, known, 1 if group is None else dist.get_world_size(group))
            marked = [index for index in marked_of(found) if not declared[index]]
            keys = groups.assign(declaration.param_groups, [item.name for item in found])
        except Exception as error:  # also what a function for param_groups raises: other ranks are waiting
            problem = for_all_ranks(error)
    parameters = [item.parameter for item in found]
    placements = [parameter.placements if isinstance(parameter, DTensor) else None for parameter in parameters]
    other_placements, most_marked = introduce(
        problem,
        arguments or {},
        [item.name for item in found],
        words,
        group,
        other_placements=any(map(placements_differ, parameters)),
        marked=len(marked),
    )
    experts = holders_by_content(found, marked, most_marked, group) if most_marked else {}
    if other_placements:
        # Names ranks with other models first: what follows needs the same parameters on all ranks of a mesh.
        holders_of(_classes(found, placements, declaration, experts)[0], problem, group)
        try:
            placements = agree_placements(parameters, [item.name for item in found])
        except LayoutError as error:
            problem = error
    classes, members = _classes(found, placements, declaration, experts)
    holders, table = holders_of(classes, problem, group)

    rank = dist.get_rank(group) if group is not None else 0
    names = groups.agree(declaration.param_groups, keys, group)
    holders_by_entry: dict[int, tuple[int, ...]] = {}
    layout_by_entry: dict[int, Layout] = {}
    weights: dict[int, float] = {}
    for item, indices, ranks in zip(classes, members, holders, strict=True):
        for index, member in zip(indices, item.members, strict=True):
            holders_by_entry[index] = ranks
            layout_by_entry[index] = item.layout
            weights[index] = 1.0 + (structure_of(member.name) & 0xFFFFF) / 2.0**20
    entries = [
        Entry(
            name=item.name,
            layout=layout_by_entry[index],
            param_group=names.index(keys[index]),
            holders=holders_by_entry[index],
            local_numel=_local_numel(item.parameter),
            placements=placements[index],
            weight=weights[index],
        )
        for index, item in enumerate(found)
    ]
    by_bucket: dict[tuple[int, bool, int], list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        by_bucket[entry.param_group, entry.owned_by(rank), len(entry.holders)].append(index)
    wrappers = {id(item.ddp): item.ddp for item in found if item.ddp is not None}
    for wrapper in wrappers.values():
        # A pipeline's schedule runs every forward under no_sync() and has the last backward reduce all the same.
        if declaration.pipeline_group is None:
            ddp.watch(wrapper)
    return Plan(
        entries=tuple(entries),
        parameters=tuple(parameters),
        buckets=tuple(Bucket(*key, entries=tuple(indices)) for key, indices in sorted(by_bucket.items())),
        param_groups=names,
        group_reference=GroupReference(group),
        rank=rank,
        world_size=table.shape[0],
        device=packet_device(group, parameters),
        classes=tuple(tuple(indices) for indices in members),
        class_table=table,
        other_placements=other_placements,
        reductions=tuple(reductions_of(parameters, placements)),
        ddp=tuple(weakref.ref(wrapper) for wrapper in wrappers.values()),
        fsdp2=tuple(weakref.ref(unit) for unit in fsdp2_units(modules_of(items))),
        frozen=tuple(index for index, parameter in enumerate(parameters) if not parameter.requires_grad),
    )


def _classes(
    found: Sequence[Found],
    placements: Sequence[tuple[Placement, ...] | None],
    declaration: Declaration,
    experts: dict[int, tuple[int, ...]],
) -> tuple[list[LayoutClass], list[list[int]]]:
    """Group parameters by layout; return the classes and for each the indices of its parameters.

    `experts` are the holders of marked parameters.
    """
    stage = None if declaration.pipeline_group is None else dist.get_rank(declaration.pipeline_group)
    aliases = declaration.aliases()
    by_layout: dict[Layout, list[int]] = defaultdict(list)
    names = []
    for index, item in enumerate(found):
        layout = _layout_of(item, placements[index])
        owners = declaration.owners_of(item.name)
        if item.name in aliases:
            # One parameter on several stages: its copies find each other by name and content, not by stage. A class
            # of its own, because another tied parameter can be on other stages.
            family: tuple[object, ...] = ("tied", aliases[item.name], *layout.family)
            layout = replace(layout, where=f"{layout.where}, tied", family=family, everywhere=False)
        elif owners is not None:
            family = ("owned", owners, *layout.family)
            layout = replace(layout, kind="owned", family=family, everywhere=False)
        elif index in experts:
            family = ("marked", experts[index], *layout.family)
            layout = replace(layout, kind="owned", family=family, everywhere=False)
        elif is_marked(item.parameter):
            # Laid out by a mesh or FSDP unit, of which there can be one for each expert. By names without numbers,
            # because a shared expert has other holders than the routed ones.
            family = ("marked", re.sub(r"\d+", "#", item.name), *layout.family)
            layout = replace(layout, kind="owned", family=family, everywhere=False, by_content=True)
        elif stage is not None:
            family = ("stage", stage, *layout.family)
            layout = replace(layout, where=f"{layout.where}, stage {stage}", family=family, everywhere=False)
        names.append(aliases.get(item.name, item.name))
        by_layout[layout].append(index)
    classes = [
        LayoutClass(
            layout,
            tuple(
                Member(
                    names[index],
                    tuple(found[index].parameter.shape),
                    str(found[index].parameter.dtype).removeprefix("torch."),
                    _compared(found[index].parameter, placements[index]),
                )
                for index in indices
            ),
        )
        for layout, indices in by_layout.items()
    ]
    return classes, list(by_layout.values())


def _layout_of(item: Found, placements: tuple[Placement, ...] | None) -> Layout:
    if isinstance(item.parameter, DTensor):
        assert placements is not None
        return dtensor_layout(item.parameter.device_mesh, placements)
    spec = spec_of(item.parameter)
    if spec is not None:
        return dtensor_layout(spec.mesh, spec.placements)
    if item.fsdp1 is not None:
        return fsdp1_layout(item.fsdp1)
    scheme = "ddp" if item.ddp is not None else "plain"
    return Layout("replicated", scheme, "whole tensor", everywhere=True)


def _local_numel(parameter: Tensor) -> int:
    """Elements of the gradient on this rank; where it is placed unlike its parameter, those of the gradient."""
    return _local(parameter.grad if parameter.grad is not None and placements_differ(parameter) else parameter).numel()


def _compared(parameter: Tensor, placed: tuple[Placement, ...] | None) -> Tensor:
    """What holders of a gradient must have alike; nothing where it is placed unlike its parameter, compared before."""
    same = not isinstance(parameter, DTensor) or placed == parameter.placements
    return _local(parameter) if same else torch.empty(0)


def _local(parameter: Tensor) -> Tensor:
    with torch.no_grad():
        return local_of(parameter)
