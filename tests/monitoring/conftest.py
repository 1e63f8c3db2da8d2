"""The real programs of Prometheus and Alertmanager, for the tests in this folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from distclip.cli.demo_prometheus import find_tool
from distclip.data import data_path

Run = Callable[..., str]


@pytest.fixture(scope="session")
def folder() -> Path:
    """The monitoring folder."""
    return data_path("monitoring")


@pytest.fixture(scope="session")
def program() -> Callable[[str], Path]:
    """`program(name)`: where it is. Without it the test is skipped, but under CI=true that is a failure."""

    def find(name: str) -> Path:
        path = find_tool(name)
        if path is None:
            assert os.environ.get("CI") != "true", f"{name} is missing: make tools"
            pytest.skip(f"{name} is not on this machine and `make tools` could not fetch it")
        return path

    return find


@pytest.fixture(scope="session")
def run(program: Callable[[str], Path]) -> Run:
    """`run(name, *arguments)`: run it, expect success, return what it printed."""

    def call(name: str, *arguments: str | Path) -> str:
        command = [str(program(name)), *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return call
