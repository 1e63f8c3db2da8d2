"""The demo's Prometheus: where it is looked for, and the real one started with the repository's rules."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

import pytest

from distclip.cli.demo_children import Children
from distclip.cli.demo_prometheus import Prometheus, find_tool
from distclip.cli.demo_story import FAULTS


def tool(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\necho no, thanks\nexit 3\n")
    (folder / name).chmod(0o755)
    return folder / name


def test_a_tool_is_looked_for_where_the_user_says_and_then_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, on_path = tool(tmp_path / "given", "wizard"), tool(tmp_path / "path", "wizard")
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.delenv("DISTCLIP_TOOLS", raising=False)
    assert find_tool("wizard") == on_path
    monkeypatch.setenv("DISTCLIP_TOOLS", str(given.parent))
    assert find_tool("wizard") == given
    given.unlink()
    assert find_tool("wizard") == on_path
    assert find_tool("no-such-program") is None


def test_a_server_that_does_not_start_is_none_at_once(tmp_path: Path) -> None:
    with Children() as children:
        assert Prometheus.start(tool(tmp_path, "prometheus"), tmp_path / "server", children) is None
    assert (tmp_path / "server" / "prometheus.log").read_text() == "no, thanks\n"


def test_the_real_server_starts_with_the_rules_that_the_demo_waits_for(tmp_path: Path) -> None:
    program = find_tool("prometheus")
    if program is None:
        assert os.environ.get("CI") != "true", "prometheus is missing: make tools"
        pytest.skip("prometheus is not on this machine and `make tools` could not fetch it")
    with Children() as children:
        server = Prometheus.start(program, tmp_path / "server", children)
        assert server is not None
        assert server.alerts() == []
        with urllib.request.urlopen(f"{server.url}/api/v1/rules", timeout=10) as answer:
            groups = json.load(answer)["data"]["groups"]
        loaded = {rule["name"] for group in groups for rule in group["rules"]}
        assert {fault.alert for fault in FAULTS if fault.alert} <= loaded
        address = server.url
    assert server.alerts() == [], "the server is gone and the question is no error"
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=10)
