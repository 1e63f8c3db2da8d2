from __future__ import annotations

import gzip
import http.client
import json
import os
import select
import signal
import socket
import threading
import time

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


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text;version=abc", "text/plain;version=" + "1" * 5000, ",;;=", "image/png", ""]
)
def test_whatever_a_client_accepts_it_gets_a_whole_page(start, accept):
    server, _ = start()
    answer, body = ask(server, "/metrics", Accept=accept)
    assert answer.status == 200
    assert answer.getheader("Content-Type").startswith("text/plain; version=0.0.4")
    assert int(answer.getheader("Content-Length")) == len(body) > 0


def raw(server, request):
    """The answer to a request as it is, to the end of the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize("path", [b"/metrics", b"/healthz", b"/nowhere"])
def test_head_is_answered_without_a_body_and_is_no_scrape(start, path):
    clock = ScrapeClock()
    server, _ = start(clock=clock)
    answer = raw(server, b"HEAD " + path + b" HTTP/1.1\r\nX-Prometheus-Scrape-Timeout-Seconds: 10\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 404 " if path == b"/nowhere" else b"HTTP/1.0 200 ")
    assert answer.endswith(b"\r\n\r\n")
    assert answer.count(b"Content-Length: ") == 1
    assert clock.linger_seconds(30) == 0


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /metrics/ HTTP/1.1", b"404"),
        (b"GET /metrics/../etc/passwd HTTP/1.1", b"404"),
        (b"GET /%00 HTTP/1.1", b"404"),
        (b"GET * HTTP/1.1", b"404"),
        (b"GET /" + b"x" * 70000 + b" HTTP/1.1", b"414"),
        (b"GET /metrics?name[]=none HTTP/1.1", b"200"),
        (b"POST /metrics HTTP/1.1", b"501"),
        (b"DELETE / HTTP/1.1", b"501"),
        (b"GET /metrics of you HTTP/1.1", b"400"),
    ],
)
def test_odd_requests_have_their_status(start, capfd, request_line, status):
    server, _ = start()
    assert raw(server, request_line + b"\r\n\r\n").split(b"\r\n")[0].split(b" ")[1:2] == [status]
    assert ask(server, "/metrics")[0].status == 200
    assert capfd.readouterr().err == ""


def test_clients_that_say_nothing_cannot_use_up_the_agent(start):
    server, _ = start()
    threads = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(200)]
    try:
        deadline = time.monotonic() + 10
        while not (hung_up := [client for client in idle if select.select([client], [], [], 0)[0]]):
            assert time.monotonic() < deadline
        assert hung_up[0].recv(1) == b""
        assert threading.active_count() - threads <= 64
    finally:
        for client in idle:
            client.close()
    deadline = time.monotonic() + 10
    while True:  # those that were served are let go
        try:
            assert ask(server, "/metrics")[0].status == 200
            break
        except (OSError, http.client.HTTPException):
            assert time.monotonic() < deadline


def test_a_client_that_writes_and_reads_slowly_keeps_nobody_waiting(start):
    server, _ = start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as slow:
        for byte in b"GET /metr":
            slow.sendall(bytes([byte]))
            assert ask(server, "/metrics")[0].status == 200
        slow.sendall(b"ics HTTP/1.0\r\n\r\n")
        assert b"".join(iter(lambda: slow.recv(1), b"")).count(b"\nthings_total 3.0\n") == 1


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


def test_clients_with_ever_new_names_do_not_fill_the_memory():
    clock = Clock()
    clock.note("prometheus", 5)
    for number in range(1000):
        clock.note(f"scanner {number}", is_scraper=True)
        clock.note("prometheus", 0.001)
    assert len(clock.scrapes._last) == len(clock.scrapes._unpaired) + 1 == 64
    clock.now += 400  # the last of the scanners count as gone
    clock.note("prometheus", 5)
    assert clock.scrapes.linger_seconds(30) == 10


def test_prometheus_is_known_by_its_header(start):
    clock = ScrapeClock()
    server, _ = start(clock=clock)
    ask(server, "/healthz", X_Prometheus_Scrape_Timeout_Seconds="10")
    assert clock.linger_seconds(30) == 0
    ask(server, "/metrics", X_Prometheus_Scrape_Timeout_Seconds="10")
    assert clock.linger_seconds(30) == 30
