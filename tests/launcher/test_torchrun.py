from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import Std

from distclip.launcher.torchrun import torchrun_arguments

RUN_PY = "/somewhere/torch/distributed/run.py"

LIBRARY_USE = """
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from distclip.launcher.torchrun import DistclipLogsSpecs

for _ in range(2):
    specs = DistclipLogsSpecs(log_dir=sys.argv[1])
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="library", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, logs_specs=specs,
    )
    elastic_launch(config, "sh")("-c", 'test -d "$DISTCLIP_SPOOL" && test "$DISTCLIP_RUN_ID" = library')
    print(specs._exporter.node.state, specs._exporter.node.run, flush=True)
"""

CONSTRUCTED = """
import os, sys
sys.argv = ["torchrun", "--nproc-per-node=2", "train.py"]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from distclip.launcher.torchrun import DistclipLogsSpecs
specs = DistclipLogsSpecs(sys.argv[0], Std.ALL, {0: Std.OUT}, {0})
assert specs == DefaultLogsSpecs(sys.argv[0], Std.ALL, {0: Std.OUT}, {0})
assert specs.root_log_dir == "torchrun"
print(os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"], specs._exporter.node.state)
"""


def python(code, *arguments, folder, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DISTCLIP_", "SLURM_"))}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**clean, "DISTCLIP_PORT": "0", "DISTCLIP_SPOOL": str(folder / "spool"), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("program", ["/usr/bin/torchrun", "torchrun", RUN_PY])
def test_torchruns_own_arguments_are_known(program, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "2:4")
    arguments = torchrun_arguments([program, "--logs-specs=distclip", "--rdzv-id", "x", "train.py", "--rdzv-id=no"])
    assert arguments.rdzv_id == "x"
    assert arguments.nnodes == "2:4"
    assert arguments.training_script == "train.py"


@pytest.mark.parametrize("program", ["train.py", "/usr/bin/pytest", "/home/me/run.py", ""])
def test_other_programs_are_not_torchrun(program):
    assert torchrun_arguments([program, "--nnodes=2"]) is None


def test_constructed_as_torchrun_does_it(tmp_path):
    done = python(CONSTRUCTED, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "rendezvous"]
    assert "distclip: metrics of run" in done.stderr
    kept = python(CONSTRUCTED, folder=tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0")
    assert kept.stdout.split() == ["0", "rendezvous"]  # what the user sets stays


def test_used_as_a_library_it_takes_the_id_of_the_launch_and_runs_do_not_mix(tmp_path):
    done = python(LIBRARY_USE, str(tmp_path / "logs"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["succeeded", "library"] * 2
    assert done.stderr.count("distclip: metrics of run library on http://127.0.0.1:") == 2
    assert not list((tmp_path / "spool").iterdir())


def test_the_entry_point_is_installed():
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="torchrun.logs_specs", name="distclip")
    assert entry.load().__name__ == "DistclipLogsSpecs"
    assert Path(sys.modules[entry.module].__file__).name == "torchrun.py"
    assert Std.ALL  # torch's own names are what the class is called with
