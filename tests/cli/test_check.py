from __future__ import annotations

import contextlib
import io
import math
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from distclip.cli import main
from distclip.cli.check_step import StepCheck
from distclip.plan import collectives
from tests.distributed.block import Block

AGREE = "verdict: distclip and the reference agree"

# --- the command, in one process -----------------------------------------------------------------------------------

JOB = """
import pathlib, sys
import torch
import neighbour

model = torch.nn.Linear(2, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
print("arguments", sys.argv[1:], __name__)
try:
    for factor in (1.0, 2.0, 3.0):
        optimizer.zero_grad()
        (factor * model(torch.tensor([[3.0, 4.0]])).sum()).backward()
        before = model.weight.detach().clone()
        optimizer.step()
finally:
    pathlib.Path("untouched").write_text(str(torch.equal(before, model.weight)))
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Write a script beside a module that it imports; the folder becomes the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "neighbour.py").touch()
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)

    def write(text: str) -> str:
        (tmp_path / "train.py").write_text(text)
        return "train.py"

    return write


@pytest.mark.parametrize(("step", "norm"), [(1, 5), (3, 15)])
def test_a_job_is_run_to_the_step_and_no_further(job, step, norm, tmp_path, capsys):
    before = list(sys.argv), list(sys.path)
    assert main(["check", "--step", str(step), "--", job(JOB), "--lr", "1", "--"]) == 0
    told = capsys.readouterr()
    assert "arguments ['--lr', '1', '--'] __main__" in told.out
    assert f"optimizer step {step} on 1 rank: 1 parameter of Linear" in told.out
    assert f"distclip's norm   {norm}\n" in told.out
    assert f"reference         {norm} (1 gradient gathered, in float64)" in told.out
    assert f"torch's norm      {norm}, the same" in told.out
    assert told.out.endswith(AGREE + "\n")
    assert (tmp_path / "untouched").read_text() == "True"
    assert (sys.argv, sys.path) == before
    assert not told.err


def test_hooks_are_gone_afterwards(job):
    assert main(["check", "--", job(JOB)]) == 0
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=1.0).step()
    assert weight.item() == -1.0


def test_a_module_is_a_job_too(job, capsys):
    job(JOB)
    assert main(["check", "--", "-m", "train", "--lr", "1"]) == 0
    assert "arguments ['--lr', '1'] __main__" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the job ended on rank 0 before optimizer step 1"),
        ("raise SystemExit(3)", "the job ended with 3 on rank 0 before optimizer step 1"),
        ("1 / 0", "the job failed on rank 0 before optimizer step 1"),
    ],
)
def test_a_job_that_does_not_get_there(job, text, told, capsys):
    assert main(["check", "--", job(text)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert ("ZeroDivisionError" in error) == ("/" in text)


def test_a_job_that_catches_everything_is_stopped_at_its_next_step(job, capsys):
    text = JOB.replace("        optimizer.step()", "        try: optimizer.step()\n        except: print('caught')")
    assert main(["check", "--", job(text)]) == 0
    assert capsys.readouterr().out.count("caught") == 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "give the job behind --"),
        (["--"], "give the job behind --"),
        (["--", "-m"], "give the job behind --"),
        (["--step", "0", "--", "train.py"], "must be a whole number from 1 on"),
        (["--norm-type", "nan", "--", "train.py"], "must be above 0, or inf"),
    ],
)
def test_wrong_usage(options, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", *options])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_what_cannot_be_started(job, monkeypatch, capsys):
    assert main(["check", "--", "nowhere.py"]) == 2
    assert "no script 'nowhere.py' here" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert main(["check", "--nproc-per-node", "2", "--", job(JOB)]) == 2
    assert "leave it out" in capsys.readouterr().err


# --- the step, in one process --------------------------------------------------------------------------------------


def _checked(optimizer: torch.optim.Optimizer, check: StepCheck) -> tuple[int | None, str, str]:
    """Step under the check: verdict, what was printed, what was complained of."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        optimizer.step()
    assert end.value.code == (2 if check.verdict is None else check.verdict)
    return check.verdict, out.getvalue(), err.getvalue()


def test_parameters_without_modules():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with StepCheck(norm_type=math.inf) as check:
        (weight * torch.tensor([3.0, -4.0])).sum().backward()
        verdict, told, _ = _checked(optimizer, check)
    assert verdict == 0
    assert "1 parameter of the optimizer" in told
    assert "reference         4 " in told


def test_a_frozen_teacher_and_a_stray_parameter():
    teacher, student, stray = nn.Linear(2, 2), nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    teacher.requires_grad_(False)
    optimizer = torch.optim.SGD([*student.parameters(), stray], lr=1.0)
    with StepCheck() as check:
        (student(teacher(torch.ones(1, 2))) * stray).sum().backward()
        verdict, told, _ = _checked(optimizer, check)
    assert verdict == 0
    assert "2 parameters of Linear" in told
    assert "note: 1 tensor of the optimizer lie in no module that ran: not measured" in told


@pytest.mark.parametrize("fused", [True, False])
def test_grad_scaler(fused):
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with StepCheck() as check:
        scaler.scale(model(torch.tensor([[3.0, 4.0]])).sum()).backward()
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
            scaler.step(optimizer)
    assert check.verdict == 0
    assert f"distclip's norm   {40 if fused else 5}\n" in out.getvalue()
    assert ("divide these gradients by 8 (the loss scale), to a norm of 5" in out.getvalue()) == fused


@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_compiled_model(how):
    model: Any = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if how == "in place":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with StepCheck() as check:
        model(torch.ones(1, 2)).sum().backward()
        verdict, told, _ = _checked(optimizer, check)
    assert verdict == 0
    assert "4 parameters of" in told


def test_no_gradient_anywhere():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with StepCheck() as check:
        verdict, told, _ = _checked(optimizer, check)
    assert verdict == 2
    assert "no rank has a gradient in optimizer step 1" in told


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_norm_that_proves_little(value):
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), value)
    with StepCheck() as check:
        verdict, told, _ = _checked(torch.optim.SGD([weight]), check)
    assert verdict == 0
    assert f"note: a norm of {value:g} proves little" in told


# --- layouts, on ranks ---------------------------------------------------------------------------------------------


def _layout(kind: str) -> tuple[int | None, str, str]:
    torch.manual_seed(0)
    model: Any = Block()
    batch = torch.randn(2, 4, 4)
    if kind == "ddp":
        model = DistributedDataParallel(model)
        batch = batch * (1 + dist.get_rank())
    elif kind.startswith("fsdp1"):
        model = FullyShardedDataParallel(model, use_orig_params=kind == "fsdp1", device_id=torch.device("cpu"))
    elif kind == "fsdp2":
        model = fully_shard(model)
    elif kind == "hsdp":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "sp":
        mesh = init_device_mesh("cpu", (2,))
        columns, rows = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(model, mesh, {"norm": SequenceParallel(), "up": columns, "down": rows})
        batch = batch.chunk(2, dim=1)[dist.get_rank()]
    elif kind == "tp in ddp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model = DistributedDataParallel(model, device_mesh=mesh["dp"])
        batch = batch * (1 + dist.get_rank() // 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with StepCheck() as check:
        out = model(batch)
        (out.to_local() if isinstance(out, DTensor) else out).square().sum().backward()
        return _checked(optimizer, check)


@pytest.mark.parametrize(
    ("kind", "size", "others", "torchs"),
    [
        ("ddp", 2, "rank 1: as rank 0", ", the same"),
        ("fsdp1", 2, "rank 1: 6 parameters held by other ranks, ", "wrong: not the same on every rank ("),
        ("fsdp1 flat", 2, "rank 1: 1 parameter held by other ranks", "wrong: not the same on every rank ("),
        ("fsdp2", 2, "rank 1: 6 parameters held by other ranks", ", the same"),
        ("hsdp", 4, "ranks 1, 3: 6 parameters held by other ranks\nrank 2: as rank 0", ", the same"),
        ("tp in ddp", 4, "ranks 1, 3: 3 parameters held by other ranks\nrank 2: as rank 0", "wrong: not the same on"),
        ("sp", 2, "rank 1: 3 parameters held by other ranks", ", the same"),
    ],
)
def test_layouts(ranks, kind, size, others, torchs):
    told = ranks(_layout, size, kind)
    assert [verdict for verdict, _, _ in told] == [0] * size
    out = told[0][1]
    assert AGREE in out
    assert f" on all {size} ranks" in out
    assert others in out
    line = next(line for line in out.splitlines() if line.startswith("torch's norm"))
    assert torchs in line
    assert all(not out for _, out, _ in told[1:])


def _parameters(kind: str, norm_type: float) -> tuple[int | None, str, str]:
    """Bare parameters of odd layouts."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    owned: list[str] = []

    def sharded(gradient: torch.Tensor, *placements: Any) -> nn.Parameter:
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
        parameter.grad = distribute_tensor(gradient, mesh, placements)
        return parameter

    def plain(gradient: torch.Tensor) -> nn.Parameter:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        return parameter

    if kind == "mixed":
        parameters = [sharded(torch.tensor([3.0, 4.0]), Shard(0)), plain(torch.tensor([12.0, 0.0]))]
    elif kind == "none here":
        parameters = [sharded(torch.tensor([3.0, 0.0]), Shard(0)), sharded(torch.tensor([4.0]), Replicate())]
        if rank:
            parameters[0].grad = None
    elif kind == "empty shard":
        parameters = [sharded(torch.tensor([[3.0, -4.0]]), Shard(0))]
    elif kind == "owned":
        parameters, owned = [plain(torch.tensor([3.0 + rank]))], ["*"]
    else:  # copies of an expert that have drifted apart look like two experts to distclip, or like one by gradients
        parameters = [plain(torch.tensor([5.0 if kind == "drifted" else 3.0 + rank]))]
        parameters[0].allreduce = False  # type: ignore[attr-defined]
        parameters[0].data.fill_(float(rank))
    with StepCheck(owned=owned, norm_type=norm_type) as check:
        return _checked(torch.optim.SGD(parameters), check)


@pytest.mark.parametrize(
    ("kind", "norm_type", "code", "norm", "torchs"),
    [
        ("mixed", 2.0, 0, "13", "raises RuntimeError: "),
        ("none here", 2.0, 0, "5", "not asked: ranks of one mesh have different gradients"),
        ("empty shard", 1.0, 0, "7", "7, the same"),
        ("empty shard", math.inf, 0, "4", "not asked: a shard is empty somewhere"),
        ("owned", 2.0, 0, "5", "wrong: not the same on every rank (3 on rank 0, 4 on rank 1)"),
        ("drifted", 2.0, 1, "5", "5, the same"),
        ("marked", 2.0, 0, "5", "wrong: not the same on every rank (3 on rank 0, 4 on rank 1)"),
    ],
)
def test_parameters_of_odd_layouts(ranks, kind, norm_type, code, norm, torchs):
    told = ranks(_parameters, 2, kind, norm_type)
    assert [verdict for verdict, _, _ in told] == [code, code]
    assert f"reference         {norm} (" in told[0][1]
    assert f"torch's norm      {torchs}" in told[0][1]
    assert (AGREE in told[0][1]) == (code == 0)
    assert ("DISAGREE (7.07106781 on all 2 ranks against 5)" in told[0][1]) == (code == 1)


def _out_of_step(kind: str) -> tuple[int | None, str, str]:
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if kind == "weights":
        with torch.no_grad():
            model.module[1].weight += dist.get_rank()
    with StepCheck() as check, model.no_sync() if kind == "gradients" else contextlib.nullcontext():
        model(torch.ones(1, 2)).sum().backward()
        if kind == "absent" and dist.get_rank() == 1:
            dist.barrier()  # until rank 0 has given up
            return None, "", ""
        collectives.ARRIVAL_SECONDS = 1.0
        try:
            return _checked(optimizer, check)
        finally:
            collectives.ARRIVAL_SECONDS = 300.0
            if kind == "absent":
                dist.barrier()


@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        ("weights", 2, "LayoutError: the ranks do not hold the same parameters: '1.weight' (ddp) holds different"),
        ("gradients", 2, "LayoutError: gradients are not synchronised: the last backward ran under"),
        ("absent", None, "AgreementError: distclip's plan: rank 1 of 2 did not come within 1 s"),
    ],
)
def test_what_distclip_refuses_is_told_once(ranks, kind, code, text):
    told = ranks(_out_of_step, 2, kind)
    assert [verdict for verdict, _, _ in told] == [code, code]
    assert f"distclip check: {text}" in told[0][2]
    assert not told[0][1]
    assert told[1][1:] == ("", "")
