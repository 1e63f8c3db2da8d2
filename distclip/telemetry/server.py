"""The HTTP side of the endpoint: a port, two pages, and a memory of who scrapes how often.

    server = serve(registry, health, clock, bind="127.0.0.1", port=9519)    # EndpointServer, already listening
    server.url                                                              # http://127.0.0.1:9519
    server.stop()

`/metrics` is prometheus_client's page of the given registry, `/healthz` says that the agent is alive. Threads are
daemons, so a slow scraper never keeps the agent from ending; and there are few, so that clients which connect and say
nothing cannot use up the file descriptors and threads that the agent needs for its workers. A forked child closes its
copy of the listening socket: the port must not stay taken because a child outlives the agent.
"""

from __future__ import annotations

import errno
import gzip
import json
import logging
import os
import socket
import socketserver
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted

logger = logging.getLogger("distclip.telemetry")

_NEXT_PORTS: Final = 32
_FORGET_SECONDS: Final = 300.0
"""A client that comes less often is a person, not a scraper; Prometheus forgets samples after this time too."""
_MOST_CLIENTS: Final = 64
"""Clients that are remembered, and that are served at one time. A node has one or two scrapers."""
_PATIENCE_SECONDS: Final = 10.0
"""For a client to send its request and take the answer; Prometheus itself waits no longer, by default."""


class ScrapeClock:
    """Remembers how often the endpoint is scraped, to know how long its end must stay visible."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._interval: dict[str, float] = {}
        self._unpaired: set[str] = set()

    def note(self, client: str, is_scraper: bool) -> None:
        """A client has read the metrics; `is_scraper` where its request says that it will come again."""
        now = self._now()
        with self._lock:
            if client in self._last:
                self._interval[client] = now - self._last[client]
                self._unpaired.discard(client)
            elif is_scraper:
                self._unpaired.add(client)
            self._last[client] = now
            if len(self._last) > _MOST_CLIENTS:
                self._forget(min(self._last, key=self._last.__getitem__))

    def _forget(self, client: str) -> None:
        del self._last[client]
        self._interval.pop(client, None)
        self._unpaired.discard(client)

    def linger_seconds(self, limit: float) -> float:
        """Two intervals of the slowest scraper that still comes, at most `limit`; 0 where nobody scrapes.

        A scraper that came only once, so that its interval is not known, is waited for until `limit`.
        """
        now = self._now()
        wait = 0.0
        with self._lock:
            for client, last in self._last.items():
                interval = self._interval.get(client)
                if interval is None:
                    still_comes = client in self._unpaired and now - last < _FORGET_SECONDS
                    wait = max(wait, limit if still_comes else 0.0)
                elif interval < _FORGET_SECONDS and now - last < 2 * interval + 1:
                    wait = max(wait, 2 * interval)
        return min(wait, limit)


class EndpointServer(ThreadingHTTPServer):
    """Listens on one address; made by `serve`."""

    daemon_threads = True
    request_queue_size = _MOST_CLIENTS  # with http.server's 5 a scrape can have to wait for a second in a crowd

    def __init__(self, address: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__(found[0][4][:2], handler)  # type: ignore[arg-type]
        self._free = threading.BoundedSemaphore(_MOST_CLIENTS)
        self.bind_address = address
        self.port: int = self.server_address[1]
        mine = weakref.ref(self)

        def forget_in_child() -> None:
            server = mine()
            if server is not None:
                server.socket.close()

        os.register_at_fork(after_in_child=forget_in_child)

    @property
    def url(self) -> str:
        """Where it can be reached, without a path."""
        host = f"[{self.bind_address}]" if ":" in self.bind_address else self.bind_address
        return f"http://{host}:{self.port}"

    def server_bind(self) -> None:
        """Bind without the look-up of this machine's name in DNS that http.server does: it can take minutes."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the client in a thread of its own, or hang up where too many are being served."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started, which nobody will then end
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The client's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that hangs up is no reason for a traceback among the training's output."""
        logger.debug("distclip: a request from %s failed", client_address, exc_info=True)

    def start(self) -> None:
        """Answer requests in a thread of its own."""
        threading.Thread(target=self.serve_forever, args=(0.1,), name="distclip-endpoint", daemon=True).start()

    def stop(self) -> None:
        """Stop answering and free the port."""
        self.shutdown()
        self.server_close()


def serve(
    registry: CollectorRegistry,
    health: Callable[[], Mapping[str, object]],
    clock: ScrapeClock,
    bind: str,
    port: int,
) -> tuple[EndpointServer, str | None]:
    """A listening server, and a sentence where it is not on `port` because that is taken.

    Then the 32 ports after it are tried, then any free one. Raises `OSError` where `bind` is not an address of this
    machine.
    """
    handler = _handler(registry, health, clock)
    for candidate in [port, *range(port + 1, min(port + _NEXT_PORTS, 65535) + 1), 0] if port else [0]:
        try:
            server = EndpointServer(bind, candidate, handler)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES) and candidate:
                continue
            raise
        server.start()
        if port and server.port != port:
            return server, f"port {port} on {bind} is taken; the metrics are on port {server.port}"
        return server, None
    raise AssertionError("port 0 is the last candidate and either works or raises")


def _handler(
    registry: CollectorRegistry, health: Callable[[], Mapping[str, object]], clock: ScrapeClock
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """One request."""

        timeout = _PATIENCE_SECONDS

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if path == "/metrics":
                self._metrics(query)
            elif path == "/healthz":
                self._answer(200, "application/json", json.dumps(health()).encode() + b"\n")
            else:
                self._answer(404, "text/plain; charset=utf-8", b"distclip: see /metrics and /healthz\n")

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: what a scraper does is no news among the training's output."""

        def _metrics(self, query: str) -> None:
            if self.command == "GET":
                agent = self.headers.get("User-Agent", "")
                clock.note(f"{self.client_address[0]} {agent}", "X-Prometheus-Scrape-Timeout-Seconds" in self.headers)
            try:
                encode, kind = choose_encoder(self.headers.get("Accept", ""))
            except (TypeError, ValueError):  # prometheus_client stumbles over a version that is none
                encode, kind = choose_encoder("")
            names = parse_qs(query).get("name[]")
            page = encode(registry.restricted_registry(names) if names else registry)
            if gzip_accepted(self.headers.get("Accept-Encoding", "")):
                self._answer(200, kind, gzip.compress(page), ("Content-Encoding", "gzip"))
            else:
                self._answer(200, kind, page)

        def _answer(self, status: int, kind: str, body: bytes, *more: tuple[str, str]) -> None:
            self.send_response(status)
            # The length too: a page that ends early because the agent dies must not pass for a whole one.
            for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *more):
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler
