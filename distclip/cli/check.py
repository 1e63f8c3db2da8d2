"""`distclip check -- train.py ARGS`: is the norm of this job right? Answered on the job itself, in one of its steps.

The script runs unmodified and need not know of distclip. At its first optimizer step (`--step` chooses another) the
check makes distclip's plan for the modules that ran, measures, gathers the same gradients in full and measures those,
prints the plan and both figures, and stops the job on all ranks before the optimizer writes anything.

    distclip check -- train.py ARGS                                                  one process
    distclip check --nproc-per-node 2 -- train.py ARGS                               starts torchrun itself
    torchrun --nproc-per-node 2 -m distclip.cli check -- train.py ARGS               under a launcher of yours

Exit codes: 0, both figures agree; 1, they do not; 2, there was nothing to compare (wrong usage, a layout that distclip
refuses, a job that failed or ended before that step). torchrun itself makes every code but 0 a 1.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distclip.cli.demo_children import Stopped, stopped_by_signals
from distclip.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from distclip.cli.check_step import StepCheck

AGREE, DISAGREE, NOT_COMPARED = 0, 1, 2
"""Exit codes."""
_USAGE = "distclip check [options] -- SCRIPT [ARGS ...]   (or: -- -m MODULE [ARGS ...])"


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the `distclip` command."""
    parser = subparsers.add_parser(
        "check",
        help="run a training job to its first step and compare its norm with a gathered reference",
        description="Run a training job, unmodified, to its first optimizer step; compare distclip's norm of its "
        "gradients with that of the same gradients gathered in full; stop it. "
        "Exit code 0: they agree; 1: they do not; 2: nothing could be compared.",
        usage=_USAGE,
    )
    parser.add_argument(
        "--nproc-per-node", metavar="N", help="start the job with torchrun on N ranks; not under a torchrun of yours"
    )
    parser.add_argument("--step", type=_count, default=1, metavar="N", help="which optimizer step (default: the first)")
    parser.add_argument(
        "--owned", action="append", default=[], metavar="PATTERN", help="parameters that one rank alone has; repeatable"
    )
    parser.add_argument("--norm-type", type=_order, default=2.0, metavar="P", help="of the p-norm, or inf (default: 2)")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # where ranks leave their verdict for us
    parser.add_argument("job", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the job's script and its arguments")
    parser.set_defaults(func=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the subcommand, as one rank or as the one that starts them, and return the exit code.

    Raises:
        ConfigError: no job is given, its script is not there, or it is to be started by two torchruns.
    """
    job: list[str] = arguments.job[1:] if arguments.job[:1] == ["--"] else arguments.job
    if not job or job == ["-m"]:
        arguments.parser.error("give the job behind --, as in: distclip check -- train.py --lr 0.1")
    if job[0] != "-m" and not Path(job[0]).is_file():
        raise ConfigError(f"no script {job[0]!r} here to check")
    if arguments.nproc_per_node is None:
        return _run_rank(arguments, job)
    if "RANK" in os.environ:
        raise ConfigError("--nproc-per-node starts torchrun, but this is a rank of one already: leave it out")
    return _run_torchrun(arguments, job)


def _run_torchrun(arguments: argparse.Namespace, job: Sequence[str]) -> int:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    torchrun += ["--nproc-per-node", arguments.nproc_per_node]
    options = ["--step", str(arguments.step), "--norm-type", str(arguments.norm_type)]
    options += [f"--owned={pattern}" for pattern in arguments.owned]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as torchrun sets it, without its warning
    with tempfile.TemporaryDirectory(prefix="distclip-check-") as folder, stopped_by_signals():
        result = Path(folder, "verdict")
        torchrun += ["--log-dir", folder]  # else it makes a folder of its own, and leaves it
        command = [*torchrun, "-m", "distclip.cli", "check", "--result", str(result), *options, "--", *job]
        with subprocess.Popen(command, env=environment) as process:
            try:
                process.wait()
            except Stopped as stop:
                process.terminate()  # torchrun ends its ranks
                process.wait()
                return 128 + stop.signum
        return int(result.read_text()) if result.is_file() else NOT_COMPARED


def _run_rank(arguments: argparse.Namespace, job: Sequence[str]) -> int:
    from distclip.cli.check_step import StepCheck

    check = StepCheck(step=arguments.step, owned=arguments.owned, norm_type=arguments.norm_type)
    with check:
        _run_job(job, check)
    if check.verdict is None:
        return NOT_COMPARED
    if arguments.result is None:
        return check.verdict
    # To torchrun this rank has succeeded; the verdict goes past it, which would make every failure a 1.
    if check.rank == 0:
        arguments.result.write_text(str(check.verdict))
    return 0


def _run_job(job: Sequence[str], check: StepCheck) -> None:
    """Run the script or module as `__main__` until it ends or the check ends it; failures are told, not raised."""
    before = sys.argv, list(sys.path)
    try:
        if job[0] == "-m":
            sys.argv = [*job[1:]]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(job[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(job)
            sys.path.insert(0, str(Path(job[0]).resolve().parent))
            runpy.run_path(job[0], run_name="__main__")
        how = "ended"
    except SystemExit as end:
        how = "ended" if end.code is None else f"ended with {end.code!r}"
    except Exception:
        # Whatever a job may raise, also while it cleans up after the check.
        traceback.print_exc()
        how = "failed"
    finally:
        sys.argv, sys.path[:] = before
    if not check.reached:
        print(
            f"distclip check: the job {how} on rank {check.rank} before optimizer step {check.step}: nothing to "
            f"compare (optimizer steps so far: {check.steps})",
            file=sys.stderr,
        )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text!r}")
    return int(text)


def _order(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, or inf, not {text!r}")
    return value
