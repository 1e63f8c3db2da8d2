"""Listens to torchrun's agent, through what torch publishes, and tells the node what happened.

torch gives three streams, and none of them is enough alone:

- its events logger: a START event for each worker with its pid; at the end one event for each worker and one for the
  agent. The agent's own event says SUCCEEDED even when workers failed, so the verdict comes from the workers' events.
- the logger of its process module: "failed (exitcode: ...)" for the first worker that failed, also where a restart
  follows; the events say nothing about those.
- its metrics: `_stop_workers` is reported as soon as the workers of an attempt are stopped, so that a long new
  rendezvous shows as `restarting` and not as `running`.

    listener = AgentListener(exporter, destinations=("null",))
    listener.attach()
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch.distributed.elastic import events
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.metrics.api import MetricData, MetricHandler, configure
from torch.distributed.elastic.multiprocessing.api import SignalException

from distclip.telemetry.exporter import Exporter

logger = logging.getLogger("distclip.telemetry")

_PROCESSES: Final = "torch.distributed.elastic.multiprocessing.api"
_FAILED: Final = "failed (exitcode: %s) local_rank: %s"
_METRIC_GROUP: Final = "torchelastic"


class AgentListener:
    """Feeds an exporter's node from torchrun's agent in the same process."""

    def __init__(self, exporter: Exporter, destinations: Iterable[str]) -> None:
        self._exporter = exporter
        self._destinations = tuple(dict.fromkeys(destinations))
        self._error_files: Mapping[int, str] = {}
        self._verdicts: list[str] = []
        self._event_handler = _Handler(lambda record: self._on_event(json.loads(record.getMessage())))
        self._failure_handler = _Handler(self._on_process_log)

    def attach(self) -> None:
        """Start listening."""
        for destination in self._destinations:
            if destination == "null":
                # torch sets the level of this logger from LOGLEVEL when it is first used, and with LOGLEVEL=ERROR no
                # event would come. Nothing but this listener reads the null logger, so its level is free to choose.
                events.record(Event("distclip.listening", EventSource.AGENT), destination)
                logging.getLogger("torchelastic-events-null").setLevel(logging.INFO)
            logging.getLogger(f"torchelastic-events-{destination}").addHandler(self._event_handler)
        logging.getLogger(_PROCESSES).addHandler(self._failure_handler)
        configure(_Metrics(self._exporter.node.workers_stopped), _METRIC_GROUP)

    def detach(self) -> None:
        """Stop listening to the loggers; another run in this process has a listener of its own."""
        for destination in self._destinations:
            logging.getLogger(f"torchelastic-events-{destination}").removeHandler(self._event_handler)
        logging.getLogger(_PROCESSES).removeHandler(self._failure_handler)

    def expect_errors_in(self, error_files: Mapping[int, str]) -> None:
        """Where each local rank of the attempt that starts now will write the exception that ended it."""
        self._error_files = dict(error_files)

    def _on_event(self, event: Mapping[str, Any]) -> None:
        metadata = event["metadata"]
        state = metadata.get("state")
        if event["source"] == "WORKER":
            if state == "START":
                self._exporter.node.worker_started(int(metadata["global_rank"]), int(metadata["worker_id"]))
            else:
                self._verdicts.append(state)
                if state == "FAILED":
                    details = json.loads(metadata["metadata"])
                    self._on_failure(_only(details["exit_code"]), _only(details["local_rank"]))
        elif state in ("SUCCEEDED", "FAILED"):
            self._exporter.finish(self._outcome(agent_failed=state == "FAILED"))
            self.detach()

    def _outcome(self, agent_failed: bool) -> str:
        if agent_failed:
            # The agent's own trouble; torch records this event while it handles the exception.
            return "stopped" if isinstance(sys.exc_info()[1], (SignalException, KeyboardInterrupt)) else "failed"
        if not self._verdicts:
            return "stopped"  # the node left the run, which may go on without it
        return "succeeded" if set(self._verdicts) == {"SUCCEEDED"} else "failed"

    def _on_process_log(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith(_FAILED) and isinstance(record.args, tuple):
            self._on_failure(record.args[0], record.args[1])

    def _on_failure(self, exit_code: Any, local_rank: Any) -> None:
        if isinstance(exit_code, int) and exit_code < 0:
            kind = "signal"
        elif os.path.isfile(self._error_files.get(local_rank, "")):
            kind = "exception"
        else:
            kind = "exit"
        self._exporter.node.worker_failed(kind)


class _Handler(logging.Handler):
    def __init__(self, react: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(logging.INFO)
        self._react = react

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._react(record)
        except Exception:
            # Another version of torch may word its events differently; the agent that logs must not die of it.
            logger.debug("distclip: cannot read what torchrun says", exc_info=True)


class _Metrics(MetricHandler):
    def __init__(self, workers_stopped: Callable[[], None]) -> None:
        self._workers_stopped = workers_stopped

    def emit(self, metric_data: MetricData) -> None:
        if metric_data.name.endswith("._stop_workers.success"):
            self._workers_stopped()


def _only(value: Any) -> Any:
    """torch wraps some numbers of an event into a tuple of one."""
    return value[0] if isinstance(value, list) else value
