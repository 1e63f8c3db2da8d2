from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from distclip.telemetry.exporter import Exporter
from distclip.telemetry.settings import Settings

SCRIPT = Path(__file__).parents[2] / "tools" / "healthcheck.py"


def _check(port: int) -> int:
    environment = {"DISTCLIP_PORT": str(port), "http_proxy": "http://127.0.0.1:1"}
    return subprocess.run([sys.executable, str(SCRIPT)], env=environment, timeout=60).returncode


def test_an_endpoint_that_answers():
    exporter = Exporter("r", Settings(port=0))
    exporter.start()
    try:
        assert exporter.url is not None
        assert _check(int(exporter.url.rpartition(":")[2])) == 0
    finally:
        exporter.close()


def test_no_endpoint():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert _check(port) == 0


@pytest.mark.parametrize("answer", [b"HTTP/1.0 500 Oops\r\n\r\n", b"", None], ids=["error", "breaks off", "silence"])
def test_an_endpoint_that_is_ill(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, str(SCRIPT)]
        environment = {"DISTCLIP_PORT": str(listener.getsockname()[1])}
        with subprocess.Popen(command, env=environment) as process:
            connection, _ = listener.accept()
            with connection:
                if answer is not None:
                    connection.recv(4096)
                    connection.sendall(answer)
                    connection.close()
                assert process.wait(30) == 1
