from __future__ import annotations

import atexit
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from distclip.errors import ConfigError
from distclip.launcher.torchrun import DistclipLogsSpecs, torchrun_arguments
from distclip.telemetry.node import Attempt

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


@pytest.fixture
def construct(tmp_path, monkeypatch):
    """`construct("--nnodes=2", log_dir=...)`: the plug-in as torchrun constructs it when called with these options."""
    made = []

    def construct(*options, **logs):
        monkeypatch.setattr(sys, "argv", ["torchrun", *options, "train.py"])
        made.append(DistclipLogsSpecs(**{"log_dir": str(tmp_path / "logs"), **logs}))
        return made[-1]

    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DISTCLIP_", "SLURM_", "TORCH"))}
    mine = {"DISTCLIP_PORT": "0", "DISTCLIP_SPOOL": str(tmp_path / "spool")}
    with mock.patch.dict(os.environ, {**clean, **mine}, clear=True):
        yield construct
        for specs in made:
            specs._listener.detach()
            specs._end(os.getpid())
            atexit.unregister(specs._end)


def environments(restarts, nodes=1):
    """What torch hands to the plug-in for two workers of a node, as far as it is read."""
    shared = {
        "TORCHELASTIC_RUN_ID": "elastic",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "GROUP_WORLD_SIZE": str(nodes),
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": str(2 * nodes),
    }
    return {local_rank: dict(shared) for local_rank in (0, 1)}


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


def test_constructed_as_torchrun_does_it(construct, capfd):
    options = {"redirects": Std.ALL, "tee": {0: Std.OUT}, "local_ranks_filter": {0}}
    specs = construct("--nproc-per-node=2", **options)
    assert specs == DefaultLogsSpecs(specs.root_log_dir, **options)
    assert specs._exporter.node.state == "rendezvous"
    assert capfd.readouterr().err.startswith("distclip: metrics of run ")


@pytest.mark.parametrize(("given", "after"), [(None, "1"), ("0", "0")])
def test_restarts_are_made_safe_unless_the_user_decided(construct, given, after):
    if given is not None:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = given
    construct()
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == after


def test_several_nodes_need_a_run_id(construct):
    with pytest.raises(ConfigError, match="set DISTCLIP_RUN_ID to the same text on every node"):
        construct("--nnodes=2", "--rdzv-backend=c10d")
    assert construct("--nnodes=2", "--rdzv-id=shared")._exporter.node.run == "shared"


def test_workers_are_handed_the_run_and_a_folder(construct):
    specs = construct("--rdzv-id=shared")
    handed = environments(0)
    specs.reify(handed)
    for environment in handed.values():
        assert environment["DISTCLIP_RUN_ID"] == "shared"
        assert Path(environment["DISTCLIP_SPOOL"]).is_dir()
        assert environment["TORCHELASTIC_ERROR_FILE"]


def test_starts_of_the_workers_and_their_reasons(construct):
    specs = construct("--nnodes=1:2", "--rdzv-id=elastic", "--max-restarts=3")
    node = specs._exporter.node
    specs.reify(environments(restarts=0))
    assert node.view().attempt == Attempt(2, 4, restarts_remaining=3, restarts_max=3)
    specs.reify(environments(restarts=1))
    specs.reify(environments(restarts=1, nodes=2))  # another node has joined: no restart is spent
    assert node.view().attempt == Attempt(4, 4, restarts_remaining=2, restarts_max=3)
    assert node.view().starts == {"initial": 1, "failure": 1, "membership": 1}


def test_used_as_a_library_it_takes_the_id_of_the_launch_and_runs_do_not_mix(tmp_path):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DISTCLIP_", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY_USE, str(tmp_path / "logs")],
        env={**clean, "DISTCLIP_PORT": "0", "DISTCLIP_SPOOL": str(tmp_path / "spool")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["succeeded", "library"] * 2
    assert done.stderr.count("distclip: metrics of run library on http://127.0.0.1:") == 2
    assert not list((tmp_path / "spool").iterdir())


def test_the_entry_point_is_installed():
    (entry,) = entry_points(group="torchrun.logs_specs", name="distclip")
    assert entry.load() is DistclipLogsSpecs
