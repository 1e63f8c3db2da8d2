"""Random meshes, placements, dtypes, missing and bad gradients and norms: every rank's result against the oracle.

An example is a few `Case`s, run in one job by `_run`. What hypothesis prints is the whole of it: put it into a call of
`check(ranks, [Case(...)])`, after `from math import inf, nan`, to see it again.

The oracle knows nothing of distclip. `Identity` says from the case alone which elements lie on a rank; ranks return
their local gradients before and after clipping; what has the same identity must be equal on all ranks, what has another
counts by itself.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import distclip
from distclip.testing import oracle

DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64")
SHAPES = ((2, 2), (2,), (4,), (3,), (1, 2), (2, 1, 2), (2, 1), (4, 1), (1, 3), (2, 2, 1), (3, 1), (1, 1, 2), (1,))
STEPS = 2
BAD = (math.nan, math.inf, -math.inf)


@dataclass(frozen=True)
class Spec:
    """One parameter."""

    kind: str
    """ "plain": the same on all ranks. "dtensor": on the mesh axes `axes`. "own": another one on every rank of `held`.
    "expert": a DTensor over the one axis in `axes`, another one for all other coordinates. "copied": a plain tensor,
    the same along the one axis in `axes`, another one for all other coordinates. "tied": the same on the stages of
    `held`."""
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[int, ...] = ()
    placements: tuple[str, ...] = ()
    """Per axis: R, or S and a dimension."""
    gradients: tuple[tuple[str, ...], ...] = ((),) * STEPS
    """Per step and axis the placement of the gradient: R, S.., P (addends of a sum) or A (of an average)."""
    missing: tuple[int, ...] = (0,) * STEPS
    """Per step a bit mask: parts without a gradient."""
    held: int = -1


@dataclass(frozen=True)
class Case:
    """One model and what is done with it."""

    mesh: tuple[int, ...]
    world_size: int
    """At least the size of the mesh; ranks beyond it are outside."""
    pipeline: bool
    """Whether axis 0 of the mesh is a pipeline: everything but "own" and "tied" differs along it."""
    parameters: tuple[Spec, ...]
    exponent: int
    """Gradients are whole numbers times 2^exponent."""
    norm_type: float
    max_norm: float
    clipper: bool
    bad: tuple[int, float] | None
    """In the last step rank `bad[0]` has the value `bad[1]` somewhere, if it has any gradient with elements."""


@dataclass(frozen=True)
class Identity:
    """Which elements of which tensor lie on a rank, worked out from the case."""

    unit: tuple[int, ...]
    """Which tensor: empty where there is one, else a stage, a rank, or the coordinates of an expert."""
    part: tuple[int, ...]
    """Which of its parts: coordinates on sharded axes."""
    addend: tuple[int, ...]
    """Which of the addends of the part: coordinates on partial axes."""


def identify(case: Case, spec: Spec, placements: tuple[str, ...], rank: int) -> Identity | None:
    """None where the rank does not hold the parameter or lies outside its mesh."""
    inside = rank < math.prod(case.mesh)
    at = [int(index) for index in np.unravel_index(rank, case.mesh)] if inside else []
    stage = (at[0],) if case.pipeline else ()
    if spec.kind == "own":
        return Identity((rank,), (), ()) if spec.held >> rank & 1 else None
    if spec.kind == "tied":
        return Identity((), (), ()) if spec.held >> at[0] & 1 else None
    if spec.kind == "plain":
        return Identity(stage, (), ())
    if not inside:
        return None
    others = tuple(index for axis, index in enumerate(at) if axis not in spec.axes)
    return Identity(
        others if spec.kind in ("expert", "copied") else stage,
        tuple(at[axis] for axis, placement in zip(spec.axes, placements, strict=True) if placement[0] == "S"),
        tuple(at[axis] for axis, placement in zip(spec.axes, placements, strict=True) if placement[0] in "PA"),
    )


def whole_numbers(shape: tuple[int, ...], dtype: str, *seed: Any) -> Tensor:
    """A tensor of small whole numbers, which every dtype has exactly; the same on every rank for the same seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    parts = [torch.randint(-8, 9, shape, generator=generator).double() for _ in range(2)]
    return (torch.complex(*parts) if dtype.startswith("complex") else parts[0]).to(getattr(torch, dtype))


def placed(name: str) -> Placement:
    if name[0] == "S":
        return Shard(int(name[1:]))
    return {"R": Replicate(), "P": Partial("sum"), "A": Partial("avg")}[name]


# --- on the ranks --------------------------------------------------------------------------------------------------


def _mesh_of(case: Case, spec: Spec, meshes: dict[tuple[int, ...], DeviceMesh]) -> DeviceMesh:
    mesh = meshes[case.mesh]
    return mesh if len(spec.axes) == len(case.mesh) else mesh[tuple("abc"[axis] for axis in spec.axes)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Model:
    """The parameters of a case on this rank."""

    def __init__(self, case: Case, meshes: dict[tuple[int, ...], DeviceMesh]) -> None:
        self.case = case
        self.parameters: dict[int, nn.Parameter] = {}
        self.meshes: dict[int, DeviceMesh] = {}
        self.owned: list[str] = []
        self.tied: list[str] = []
        self.copies: dict[str, dist.ProcessGroup] = {}
        if case.mesh not in meshes:
            inside = torch.arange(math.prod(case.mesh)).view(case.mesh)
            meshes[case.mesh] = DeviceMesh("cpu", inside, mesh_dim_names=tuple("abc"[: len(case.mesh)]))
        for index, spec in enumerate(case.parameters):
            identity = identify(case, spec, spec.placements, dist.get_rank())
            mesh = _mesh_of(case, spec, meshes) if spec.axes else None
            if identity is None and mesh is None:
                continue
            value = whole_numbers(spec.shape, spec.dtype, index, identity and identity.unit)
            if spec.kind == "own":
                self.owned.append(f"p{index}")
            if spec.kind == "tied":
                self.tied.append(f"p{index}")
            if mesh is not None:
                self.meshes[index] = mesh
                if spec.kind in ("expert", "copied"):
                    self.copies[f"p{index}"] = mesh.get_group()
                if spec.kind != "copied":
                    placements = [placed(name) for name in spec.placements]
                    value = distribute_tensor(value, mesh, placements, src_data_rank=None)
            self.parameters[index] = nn.Parameter(value)
        stages = meshes[case.mesh].get_group("a") if case.pipeline else None
        owned = self.copies or self.owned
        self.declared: dict[str, Any] = {"owned": owned, "tied": self.tied, "pipeline_group": stages}
        self.pairs = [(f"p{index}", parameter) for index, parameter in self.parameters.items()]

    def set_gradients(self, step: int) -> None:
        for index, parameter in self.parameters.items():
            spec = self.case.parameters[index]
            placements = spec.gradients[step]
            identity = identify(self.case, spec, placements, dist.get_rank())
            if identity is None or missing(spec, identity, step):
                parameter.grad = None  # outside of its mesh a parameter never gets one
            else:
                parameter.grad = self._gradient(index, spec, placements, identity, step)

    def _gradient(self, index: int, spec: Spec, placements: tuple[str, ...], identity: Identity, step: int) -> Tensor:
        """The gradient, or where it is Partial an addend: noise that the first addend takes back."""
        seed = ("gradient", step, index, identity.unit)
        total = whole_numbers(spec.shape, spec.dtype, *seed)
        mesh = self.meshes.get(index)
        if identity.addend:
            assert mesh is not None
            sizes = [mesh.size(axis) for axis, name in enumerate(placements) if name in "PA"]
            noise = {at: whole_numbers(spec.shape, spec.dtype, *seed, at) for at in np.ndindex(*sizes)}
            first = (0,) * len(sizes)
            noise[first] = total - sum(value for at, value in noise.items() if at != first)
            averaged = math.prod(mesh.size(axis) for axis, name in enumerate(placements) if name == "A")
            total = noise[identity.addend] * averaged
        total *= 2.0**self.case.exponent
        if mesh is None or spec.kind == "copied":
            return total
        whole = [placed(name) if name[0] == "S" else Replicate() for name in placements]
        local = distribute_tensor(total, mesh, whole, src_data_rank=None).to_local()
        how = [placed(name) for name in placements]
        return DTensor.from_local(local.clone(), mesh, how, run_check=False, shape=total.shape, stride=total.stride())

    def poison(self) -> bool:
        if self.case.bad is None or dist.get_rank() != self.case.bad[0]:
            return False
        for parameter in self.parameters.values():
            if parameter.grad is not None and _local(parameter.grad).numel():
                _local(parameter.grad)[(-1,) * parameter.ndim] = self.case.bad[1]
                return True
        return False

    def locals(self) -> dict[int, Any]:
        gradients = {index: p.grad for index, p in self.parameters.items() if p.grad is not None}
        wide = {"complex64": torch.complex128}
        return {
            index: _local(gradient).to(wide.get(self.case.parameters[index].dtype, torch.float64), copy=True).numpy()
            for index, gradient in gradients.items()
        }


def missing(spec: Spec, identity: Identity, step: int) -> bool:
    return bool(spec.missing[step] >> (sum(identity.part) + 2 * sum(identity.unit)) % 5 & 1)


def _run(cases: list[Case]) -> list[list[tuple[float, dict[int, Any], dict[int, Any], bool]]]:
    """Per case and step: norm, local gradients before and after, and whether this rank had a bad value."""
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    said = []
    with torch.no_grad():
        for case in cases:
            model = _Model(case, meshes)
            clipper = None
            steps = []
            for step in range(STEPS):
                model.set_gradients(step)
                bad = step == STEPS - 1 and model.poison()
                before = model.locals()
                if case.clipper and clipper is None:
                    clipper = distclip.GradientClipper(
                        model.pairs, max_norm=case.max_norm, norm_type=case.norm_type, **model.declared
                    )
                if clipper is not None:
                    norm = clipper.clip_().total_norm
                else:
                    norm = distclip.clip_grad_norm_(model.pairs, case.max_norm, case.norm_type, **model.declared)
                steps.append((norm.item(), before, model.locals(), bad))
            said.append(steps)
    return said


# --- against the oracle --------------------------------------------------------------------------------------------


def check(ranks: Any, cases: list[Case]) -> None:
    """Run cases of one world size in one job and compare."""
    said = ranks(_run, cases[0].world_size, cases)
    for number, case in enumerate(cases):
        for step in range(STEPS):
            _compare(case, step, [results[number][step] for results in said])


def _compare(case: Case, step: int, said: list[Any]) -> None:
    norms = {float(norm).hex() for norm, _, _, _ in said}
    assert len(norms) == 1, f"step {step}: ranks have different norms {[norm for norm, _, _, _ in said]} in {case}"
    bad = any(flag for _, _, _, flag in said)
    addends: dict[Any, dict[Any, tuple[Any, Any]]] = defaultdict(dict)
    for rank, (_, before, after, _) in enumerate(said):
        assert before.keys() == after.keys()
        for index in before:
            spec = case.parameters[index]
            identity = identify(case, spec, spec.gradients[step], rank)
            assert identity is not None
            key = index, identity.unit, identity.part
            pair = before[index], after[index]
            if not bad:
                known = addends[key].setdefault(identity.addend, pair)
                for mine, other in zip(pair, known, strict=True):
                    assert np.array_equal(mine, other), f"step {step}: copies of {key} differ in {case}"
            elif not np.array_equal(*pair, equal_nan=True):
                raise AssertionError(f"step {step}: a gradient was written although one is nonfinite in {case}")
    norm = said[0][0]
    if bad:
        assert case.bad is not None
        assert str(norm) == str(abs(case.bad[1])), f"step {step}: norm is {norm} in {case}"
        return
    totals = [sum(pair[0] for pair in parts.values()) / _divisor(case, key[0], step) for key, parts in addends.items()]
    _assert_complete(case, step, addends)
    wanted = oracle.norm(totals, case.norm_type)
    assert norm == pytest.approx(wanted, rel=1e-6, abs=0.0), f"step {step} of {case}"
    factor = oracle.coefficient(wanted, case.max_norm)
    for (index, _, _), parts in addends.items():
        dtype = getattr(torch, case.parameters[index].dtype)
        for before, after in parts.values():
            # one unit in the last place of the dtype, and what the norm is good for
            allowed = np.abs(before) * factor * max(torch.finfo(dtype).eps, 2e-6) + torch.finfo(dtype).tiny
            assert (np.abs(after - before * factor) <= allowed).all(), f"step {step}: p{index} in {case}"
            assert factor < 1.0 or np.array_equal(before, after)


def _divisor(case: Case, index: int, step: int) -> int:
    spec = case.parameters[index]
    return math.prod(case.mesh[axis] for axis, name in zip(spec.axes, spec.gradients[step], strict=True) if name == "A")


def _assert_complete(case: Case, step: int, addends: dict[Any, dict[Any, tuple[Any, Any]]]) -> None:
    """That the parts of every tensor without missing ones are all of it: a check of this test itself."""
    found: dict[Any, int] = defaultdict(int)
    for (index, unit, _), parts in addends.items():
        found[index, unit] += next(iter(parts.values()))[0].size
    for (index, _), size in found.items():
        if not case.parameters[index].missing[step]:
            assert size == math.prod(case.parameters[index].shape)


# --- drawing cases -------------------------------------------------------------------------------------------------


@st.composite
def specs(draw: Any, mesh: tuple[int, ...], world_size: int, kinds: list[str], pipeline: bool) -> Spec:
    kind = draw(st.sampled_from(kinds))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 0]), max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    missing = tuple(draw(st.sampled_from([0, 0, 0, 0, 31, 1, 2, 6])) for _ in range(STEPS))
    if kind == "plain":
        return Spec(kind, shape, dtype, missing=missing)
    if kind in ("own", "tied"):
        places = world_size if kind == "own" else mesh[0]
        return Spec(kind, shape, dtype, missing=missing, held=draw(st.integers(1, 2**places - 1)))
    free = range(1 if pipeline else 0, len(mesh))
    size = draw(st.integers(1, 1 if kind in ("expert", "copied") else len(free)))
    if math.prod(mesh) < world_size:
        size = len(free)  # ranks outside cannot take a part of the mesh
    axes = tuple(sorted(draw(st.permutations(free))[:size]))
    split = [f"S{dimension}" for dimension in range(len(shape))]
    placements = tuple("R" if kind == "copied" else draw(st.sampled_from(["R", *split])) for _ in axes)
    gradients = tuple(
        tuple(
            name if kind == "copied" else draw(st.sampled_from([name, name, name, "R", "P", "A", *split]))
            for name in placements
        )
        for _ in range(STEPS)
    )
    return Spec(kind, shape, dtype, axes, placements, gradients, missing)


THEMES = {
    "mesh": ["dtensor"],
    "mixed": ["plain", "dtensor", "own"],
    "experts": ["copied", "copied", "expert", "plain"],
    "pipeline": ["plain", "dtensor", "tied", "tied", "own"],
}
"""The kinds of parameters that models are made of. The last two need the whole of a mesh of several dimensions."""


@st.composite
def models(draw: Any, world_size: int, theme: str) -> Case:
    whole = theme in ("experts", "pipeline")
    fitting = [shape for shape in SHAPES if math.prod(shape) <= world_size]
    if whole:
        fitting = [shape for shape in fitting if math.prod(shape) == world_size and len(shape) > 1]
    mesh = draw(st.sampled_from(fitting))
    pipeline = theme == "pipeline"
    return Case(
        mesh=mesh,
        world_size=world_size,
        pipeline=pipeline,
        parameters=tuple(draw(st.lists(specs(mesh, world_size, THEMES[theme], pipeline), min_size=2, max_size=4))),
        exponent=draw(st.sampled_from([0, -10, 6])),
        norm_type=draw(st.sampled_from([2.0, 1.0, math.inf, 3.0, 0.5, 5.0])),
        max_norm=draw(st.sampled_from([1.0, 1e-3, 1e9, math.inf])),
        clipper=draw(st.booleans()),
        bad=draw(st.none() | st.none() | st.tuples(st.integers(0, world_size - 1), st.sampled_from(BAD))),
    )


@pytest.mark.timeout(600)  # a failing example is made small before it is shown
@pytest.mark.parametrize(
    ("world_size", "theme", "jobs"),
    [
        (1, "mixed", 4),
        (2, "mixed", 10),
        (2, "pipeline", 6),
        (3, "mixed", 10),
        (4, "mesh", 25),
        (4, "mixed", 15),
        (4, "experts", 15),
        (4, "pipeline", 15),
    ],
)
def test_norm_and_clipped_gradients_of_random_layouts(ranks: Any, world_size: int, theme: str, jobs: int) -> None:
    """300 cases, three in a job."""

    @settings(max_examples=jobs, deadline=None, print_blob=True)
    @given(cases=st.lists(models(world_size, theme), min_size=3, max_size=3))
    def run(cases: list[Case]) -> None:
        check(ranks, cases)

    run()
