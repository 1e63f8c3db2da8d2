"""The `DISTCLIP_*` environment: every telemetry setting, its default, and what happens with a bad value.

| variable | default | meaning |
|---|---|---|
| `DISTCLIP_RUN_ID` | see `run_id` | name of the run, the label `run` of every series; the same on all nodes |
| `DISTCLIP_BIND` | `127.0.0.1` | address of the endpoint; `0.0.0.0` or `::` lets other machines scrape |
| `DISTCLIP_PORT` | `9519` | port of the endpoint; where it is taken, the next free one; `0`: any free one |
| `DISTCLIP_SPOOL` | `/dev/shm`, else the temporary folder | where the agent makes a folder; in a worker: that folder |
| `DISTCLIP_SD_DIR` | none | folder for a Prometheus `file_sd` file, one per run and node |
| `DISTCLIP_LEVEL` | `node` | `node`, `rank` or `param_group`; each adds series to the one before |
| `DISTCLIP_EVENTS` | none | file to which rank 0 appends a JSON line for every step that was not ordinary |
| `DISTCLIP_STEP_LOG` | none | file to which rank 0 appends a JSON line for every step |

The default address is the loopback one: nobody's training becomes visible to a network because a flag was set. With
the fixed default port a scrape configuration can be written once; several runs on a node use `DISTCLIP_SD_DIR`.

A bad value costs one warning and gives the default, never a training that does not start. A relative path is taken from
the folder in which the process that reads it is.

    settings, complaints = read_settings(os.environ)
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from distclip.errors import ConfigError

DEFAULT_BIND: Final = "127.0.0.1"
DEFAULT_PORT: Final = 9519


class Level(IntEnum):
    """How much detail the endpoint shows; each level includes the one before.

    Steps carry no figures per param group yet, so `PARAM_GROUP` shows what `RANK` does.
    """

    NODE = 0
    RANK = 1
    PARAM_GROUP = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for; see the table at the top of this module."""

    bind: str = DEFAULT_BIND
    port: int = DEFAULT_PORT
    spool: Path | None = None
    sd_dir: Path | None = None
    level: Level = Level.NODE
    events: Path | None = None
    step_log: Path | None = None


def read_settings(environ: Mapping[str, str]) -> tuple[Settings, list[str]]:
    """The settings in `environ`, and a sentence for each value that cannot be used (its default is taken).

    An empty variable counts as not set.
    """
    complaints: list[str] = []
    return (
        Settings(
            bind=environ.get("DISTCLIP_BIND") or DEFAULT_BIND,
            port=_port(environ.get("DISTCLIP_PORT"), complaints),
            spool=_path(environ, "DISTCLIP_SPOOL", complaints),
            sd_dir=_path(environ, "DISTCLIP_SD_DIR", complaints),
            level=_level(environ.get("DISTCLIP_LEVEL"), complaints),
            events=_path(environ, "DISTCLIP_EVENTS", complaints),
            step_log=_path(environ, "DISTCLIP_STEP_LOG", complaints),
        ),
        complaints,
    )


def named_run_id(environ: Mapping[str, str], rendezvous_id: str | None = None) -> str | None:
    """The run id that somebody has given, or None.

    In this order: `DISTCLIP_RUN_ID`, `TORCHX_TRACKING_RUN_NAME`, `SLURM_JOB_ID`, the rendezvous id unless it is "none"
    (torchrun's word for not given).
    """
    given = [environ.get(name, "") for name in ("DISTCLIP_RUN_ID", "TORCHX_TRACKING_RUN_NAME", "SLURM_JOB_ID")]
    if rendezvous_id != "none":
        given.append(rendezvous_id or "")
    value = next((text.strip() for text in given if text.strip()), None)
    # Bytes that are no UTF-8 cannot be in a label.
    return None if value is None else value.encode(errors="replace").decode()


def run_id(environ: Mapping[str, str], rendezvous_id: str | None, several_nodes: bool) -> str:
    """The run id (`named_run_id`), or a fresh uuid on a single node.

    Raises `ConfigError` on several nodes without an id: an id made up by each node would make one run look like many.
    """
    given = named_run_id(environ, rendezvous_id)
    if given is not None:
        return given
    if several_nodes:
        raise ConfigError(
            "a run on several nodes needs one run id for all of them: set DISTCLIP_RUN_ID to the same text on every "
            "node, or give torchrun --rdzv-id"
        )
    return str(uuid.uuid4())


def _path(environ: Mapping[str, str], name: str, complaints: list[str]) -> Path | None:
    value = environ.get(name)
    if not value:
        return None
    try:
        return Path(value).expanduser().absolute()  # workers are handed the spool's and may be in another folder
    except (RuntimeError, OSError) as error:  # an unknown user after "~"; a current folder that is gone
        complaints.append(f"{name}={value!r} is not a path: {error}; doing without")
        return None


def _port(value: str | None, complaints: list[str]) -> int:
    if not value:
        return DEFAULT_PORT
    try:
        port = int(value)
    except ValueError:
        port = -1
    if 0 <= port <= 65535:
        return port
    complaints.append(f"DISTCLIP_PORT={value!r} is not a port (0 to 65535); using {DEFAULT_PORT}")
    return DEFAULT_PORT


def _level(value: str | None, complaints: list[str]) -> Level:
    if not value:
        return Level.NODE
    try:
        return Level[value.strip().upper()]
    except KeyError:
        complaints.append(f"DISTCLIP_LEVEL={value!r} is not one of node, rank, param_group; using node")
        return Level.NODE
