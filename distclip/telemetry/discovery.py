"""Tells Prometheus where a node's endpoint is: one `file_sd` file per run and node.

    scrape_configs:
      - job_name: distclip
        file_sd_configs:
          - files: ["/shared/distclip-targets/*.json"]
            refresh_interval: 15s      # disk watches do not fire on network file systems

The file is written aside and renamed, so that a half-written one is never read, and removed when the endpoint closes.
That of an agent that was killed stays: Prometheus then sees the target as down, which is the truth. The run is given as
`__meta_distclip_run`; a plain label `run` would rename the metrics' own one to `exported_run`.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from distclip.telemetry.folder import file_name_of


def publish_target(folder: Path, run: str, bind: str, port: int) -> Path:
    """Write the file for an endpoint that listens on `bind`:`port`, and return its path.

    An endpoint on all addresses is announced under this machine's name. Raises `OSError` where it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    host = socket.getfqdn() if bind in ("", "0.0.0.0", "::") else bind
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    path = folder / f"distclip-{file_name_of(run)}-{file_name_of(socket.gethostname())}-{port}.json"
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(json.dumps([{"targets": [target], "labels": {"__meta_distclip_run": run}}]) + "\n")
    os.replace(aside, path)
    return path
