from __future__ import annotations

import gzip
import http.client
import json
import os
import signal
import socket

import pytest
from prometheus_client import CollectorRegistry, Counter

from distclip.telemetry.server import ScrapeClock, serve


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(3)
    return registry


@pytest.fixture
def start(registry):
    servers = []

    def start(bind="127.0.0.1", port=0, clock=None):
        server, complaint = serve(registry, lambda: {"status": "ok", "n": 1}, clock or ScrapeClock(), bind, port)
        servers.append(server)
        return server, complaint

    yield start
    for server in servers:
        server.stop()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(server.bind_address, server.port, timeout=10)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_pages(start):
    server, complaint = start()
    assert complaint is None
    assert server.url == f"http://127.0.0.1:{server.port}"
    answer, body = ask(server, "/metrics")
    assert answer.status == 200
    assert answer.getheader("Content-Type").startswith("text/plain; version=0.0.4")
    assert b"things_total 3.0" in body
    answer, body = ask(server, "/healthz")
    assert answer.status == 200
    assert json.loads(body) == {"status": "ok", "n": 1}
    assert ask(server, "/healthz", "HEAD")[0].status == 200
    answer, body = ask(server, "/")
    assert answer.status == 404
    assert b"/metrics" in body


def test_openmetrics_and_gzip_for_who_asks(start):
    server, _ = start()
    answer, body = ask(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0", Accept_Encoding="gzip")
    assert answer.getheader("Content-Type").startswith("application/openmetrics-text")
    assert gzip.decompress(body).rstrip().endswith(b"# EOF")


def test_a_taken_port_gives_the_next_free_one_and_says_so(start):
    first, _ = start()
    second, complaint = start(port=first.port)
    assert first.port < second.port <= first.port + 32
    assert complaint == f"port {first.port} on 127.0.0.1 is taken; the metrics are on port {second.port}"
    assert ask(second, "/metrics")[0].status == 200


def test_an_address_of_another_machine_is_an_error(start):
    with pytest.raises(OSError):  # noqa: PT011 (the text is the system's)
        start(bind="192.0.2.1")


def test_an_ipv6_address(start):
    if not socket.has_ipv6:
        pytest.skip("this Python was built without IPv6")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    server, _ = start(bind="::1")
    assert server.url == f"http://[::1]:{server.port}"
    assert ask(server, "/healthz")[0].status == 200


def test_a_scraper_that_hangs_up_leaves_no_traceback(start, capfd):
    server, _ = start()
    for request in (b"", b"GET /met", b"nonsense\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as rude:
            rude.sendall(request)
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset instead of a goodbye
    assert ask(server, "/metrics")[0].status == 200
    assert capfd.readouterr().err == ""


def test_a_child_that_outlives_the_agent_does_not_keep_the_port(start):
    server, _ = start()
    port = server.port
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        server.stop()
        server, complaint = start(port=port)
        assert complaint is None
        assert server.port == port
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class Clock:
    def __init__(self):
        self.now = 1000.0
        self.scrapes = ScrapeClock(lambda: self.now)

    def note(self, client, *pauses, is_scraper=False):
        self.scrapes.note(client, is_scraper)
        for pause in pauses:
            self.now += pause
            self.scrapes.note(client, is_scraper)


def test_never_scraped_is_no_wait():
    assert Clock().scrapes.linger_seconds(30) == 0


def test_two_intervals_at_most_the_limit():
    clock = Clock()
    clock.note("prometheus", 5, 5)
    assert clock.scrapes.linger_seconds(30) == 10
    assert clock.scrapes.linger_seconds(8) == 8
    clock.note("prometheus", 60)
    assert clock.scrapes.linger_seconds(30) == 30


def test_the_slowest_of_several_scrapers_counts_not_the_time_between_them():
    clock = Clock()
    for _ in range(3):
        clock.note("fast")
        clock.now += 2
        clock.note("slow")
        clock.now += 8
    assert clock.scrapes.linger_seconds(30) == 20


def test_a_person_who_looked_once_or_twice_is_not_waited_for():
    clock = Clock()
    clock.note("curl")
    assert clock.scrapes.linger_seconds(30) == 0
    clock.note("curl", 3600)
    assert clock.scrapes.linger_seconds(30) == 0


def test_a_scraper_that_came_once_is_waited_for():
    clock = Clock()
    clock.note("prometheus", is_scraper=True)
    clock.now += 20
    assert clock.scrapes.linger_seconds(30) == 30


def test_a_scraper_that_no_longer_comes_is_not_waited_for():
    clock = Clock()
    clock.note("prometheus", 5)
    clock.now += 12
    assert clock.scrapes.linger_seconds(30) == 0


def test_prometheus_is_known_by_its_header(start):
    clock = ScrapeClock()
    server, _ = start(clock=clock)
    ask(server, "/healthz", X_Prometheus_Scrape_Timeout_Seconds="10")
    assert clock.linger_seconds(30) == 0
    ask(server, "/metrics", X_Prometheus_Scrape_Timeout_Seconds="10")
    assert clock.linger_seconds(30) == 30
