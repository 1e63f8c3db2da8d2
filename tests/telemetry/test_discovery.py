from __future__ import annotations

import json
import socket

import pytest

from distclip.telemetry.discovery import publish_target


@pytest.mark.parametrize(
    ("bind", "target"),
    [("127.0.0.1", "127.0.0.1:9519"), ("::1", "[::1]:9519"), ("0.0.0.0", f"{socket.getfqdn()}:9519")],
)
def test_one_complete_file(tmp_path, bind, target):
    path = publish_target(tmp_path / "sd", "team/r1", bind, 9519)
    assert list((tmp_path / "sd").iterdir()) == [path]
    assert path.name.startswith("distclip-team_r1-")
    assert path.suffix == ".json"
    assert json.loads(path.read_text()) == [{"targets": [target], "labels": {"__meta_distclip_run": "team/r1"}}]


def test_two_agents_on_one_machine_have_two_files(tmp_path):
    assert publish_target(tmp_path, "r", "127.0.0.1", 1) != publish_target(tmp_path, "r", "127.0.0.1", 2)
    assert publish_target(tmp_path, "r", "127.0.0.1", 1) == publish_target(tmp_path, "r", "127.0.0.1", 1)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_made_is_an_error():
    with pytest.raises(OSError):  # noqa: PT011 (which one depends on the kernel)
        publish_target(__import__("pathlib").Path("/proc/nowhere"), "r", "127.0.0.1", 1)
