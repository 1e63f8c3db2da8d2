"""`torchrun --logs-specs distclip ... train.py`: one flag gives a run an endpoint that outlives its workers.

torchrun loads the class of that name, constructs it in the agent before the rendezvous, and calls `reify` at each start
of the workers. So this is torch's own `DefaultLogsSpecs`, with all log options working as ever, which also

- serves http://127.0.0.1:9519/metrics from before the rendezvous until after the end (see `telemetry.settings` for the
  `DISTCLIP_*` variables),
- makes a spool folder and hands it to the workers as `DISTCLIP_SPOOL`: `GradientClipper` needs nothing else,
- follows the run: state, restarts and why, failures, which workers live,
- sets `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` unless it is set. In torch 2.13 workers reuse the agent's store without a
  prefix per attempt, so that about half of all restarts read addresses of dead workers and fail or hang. It helps the
  c10d rendezvous, the default on one node; the static one (`--master-port`) has the trouble and no such switch.

After the end the endpoint stays for two observed scrape intervals, at most 30 s (20 s after a signal); not at all if
nobody scraped. No process and no spool folder is left behind; what an agent that was killed left is removed by the next
one on the machine.

The run id comes from `DISTCLIP_RUN_ID`, `TORCHX_TRACKING_RUN_NAME`, `SLURM_JOB_ID` or `--rdzv-id`; a run on one node
without any gets a fresh uuid, one on several nodes is an error before anything starts. Used through
`torch.distributed.launcher.api.elastic_launch` the arguments are not known to the constructor, so there the endpoint
starts with the workers, under the id of the launch configuration.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException, Std
from torch.distributed.run import get_args_parser, parse_min_max_nnodes

from distclip.launcher.agent_events import AgentListener
from distclip.telemetry.exporter import Exporter
from distclip.telemetry.node import Attempt
from distclip.telemetry.settings import named_run_id, read_settings, run_id

logger = logging.getLogger("distclip.telemetry")


class DistclipLogsSpecs(DefaultLogsSpecs):
    """torch's `DefaultLogsSpecs` with an endpoint; the entry point `distclip` of the group `torchrun.logs_specs`.

    Args:
        log_dir: Base folder of the workers' logs, as in torch.
        redirects: Streams that go to files only, as in torch.
        tee: Streams that go to files and to the console, as in torch.
        local_ranks_filter: Local ranks whose output reaches the console, as in torch.

    Raises `ConfigError` for a run on several nodes without a run id.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        self._arguments = torchrun_arguments(sys.argv)
        self._exporter: Exporter | None = None
        self._listener: AgentListener | None = None
        self._restarts = 0
        self._started = False
        if self._arguments is not None:
            several = _max_nodes(self._arguments) > 1
            self._start(run_id(os.environ, self._arguments.rdzv_id, several))
        elif (given := named_run_id(os.environ)) is not None:
            self._start(given)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """As in torch; also starts an attempt and adds `DISTCLIP_SPOOL` and `DISTCLIP_RUN_ID` to `envs`."""
        destinations = super().reify(envs)
        first = envs.get(0, {})
        if self._exporter is None:
            several = first.get("GROUP_WORLD_SIZE", "1") != "1"
            self._start(run_id(os.environ, first.get("TORCHELASTIC_RUN_ID"), several))
        assert self._exporter is not None
        assert self._listener is not None
        restarts = int(first.get("TORCHELASTIC_RESTART_COUNT", "0"))
        reason = "initial" if not self._started else "failure" if restarts > self._restarts else "membership"
        self._started, self._restarts = True, restarts
        self._listener.expect_errors_in(destinations.error_files)
        handed = self._exporter.start_attempt(reason, len(envs), self._attempt(first))
        for environment in envs.values():
            environment.update(handed)
        return destinations

    def _start(self, run: str) -> None:
        settings, complaints = read_settings(os.environ)
        for complaint in complaints:
            logger.warning("distclip: %s", complaint)
        self._exporter = Exporter(run, settings)
        self._exporter.start()
        if self._exporter.url is not None:
            _say(f"metrics of run {run} on {self._exporter.url}/metrics")
        destination = getattr(self._arguments, "event_log_handler", "null")  # an option of newer versions of torch
        self._listener = AgentListener(self._exporter, (destination, "null"))
        self._listener.attach()
        self._exporter.node.wait_for_others()
        atexit.register(self._end, os.getpid())

    def _attempt(self, environment: Mapping[str, str]) -> Attempt:
        restarts_max = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        size_max = None
        if self._arguments is not None:
            size_max = _max_nodes(self._arguments) * int(environment.get("LOCAL_WORLD_SIZE", "1"))
        return Attempt(
            world_size=int(environment.get("WORLD_SIZE", "1")),
            world_size_max=size_max,
            restarts_remaining=restarts_max - self._restarts,
            restarts_max=restarts_max,
        )

    def _end(self, pid: int) -> None:
        if os.getpid() != pid or self._exporter is None:
            return  # a forked child leaves through here too; the endpoint is not its
        try:
            self._exporter.finish("stopped")
            seconds = self._exporter.linger_seconds()
            if seconds >= 1:
                _say(f"the endpoint stays for {seconds:.0f} s, so that Prometheus sees the end (Ctrl-C: at once)")
            self._exporter.linger(seconds)
        except (SignalException, KeyboardInterrupt):
            pass  # somebody is in a hurry
        finally:
            self._exporter.close()


def torchrun_arguments(argv: list[str]) -> argparse.Namespace | None:
    """What torchrun was called with (and its `PET_*` variables), or None where this process is not torchrun.

    The constructor is handed log options only, but the run id and the number of nodes must be known before the
    rendezvous.
    """
    program = Path(argv[0])
    if program.name != "torchrun" and program.parts[-3:] != ("torch", "distributed", "run.py"):
        return None
    arguments, _ = get_args_parser().parse_known_args(argv[1:])
    return arguments


def _max_nodes(arguments: argparse.Namespace) -> int:
    return 1 if arguments.standalone else int(parse_min_max_nnodes(arguments.nnodes)[1])


def _say(text: str) -> None:
    print(f"distclip: {text}", file=sys.stderr, flush=True)
