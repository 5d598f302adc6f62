"""Exports the state of a run: into a file for node_exporter, or at /metrics over HTTP."""

from __future__ import annotations

import contextlib
import io
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from hpcpace.core.errors import UsageError
from hpcpace.core.exposition import OPENMETRICS_TYPE, TEXT_TYPE, exposition
from hpcpace.core.files import target_folder, write_file
from hpcpace.watch.metrics import families
from hpcpace.watch.state import JobState

_LOOPBACK = "127.0.0.1"
_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:]+)\]|(?P<host>[\w.-]*)):(?P<port>\d{1,5})")
_REQUEST_TIMEOUT_S = 10.0
MAX_CLIENTS = 32
"""At a time: a few servers ask for metrics, and each request takes milliseconds."""
# Prometheus sends some hundred bytes; the most are those of a proxy's cookies.
_MAX_REQUEST_BYTES = 1 << 14
_BACKLOG = 128


class Exporter:
    """Exports states until it is closed; the file goes with it, so that no stale figure stays.

    Args:
        file: replaced at each export; None: no file.
        address: HOST:PORT or :PORT, which is on this host alone; None: no server.

    Raises:
        UsageError: the file cannot be written, or the address is wrong or taken.
    """

    def __init__(self, *, file: Path | None, address: str | None) -> None:
        self._file = file
        self._state: JobState | None = None
        self._server = None if address is None else _server(address, self)
        if file is not None and not file.parent.is_dir():
            self.close()
            raise UsageError(f"cannot write metrics to {file}: {file.parent} is no folder; make it, or name another")

    @property
    def port(self) -> int:
        """The port of the server; 0 without one."""
        return 0 if self._server is None else int(self._server.server_address[1])

    def export(self, state: JobState) -> None:
        """Take a new state.

        Raises:
            UsageError: the file cannot be written.
        """
        self._state = state
        if self._file is None:
            return
        try:
            write_file(self._file, self.text(is_openmetrics=False))
        except OSError as error:
            raise UsageError(f"cannot write metrics to {self._file} ({error.strerror}): name another file") from error

    def text(self, *, is_openmetrics: bool) -> str:
        """Return the metrics of the last state; none before the first."""
        state = self._state
        return exposition([] if state is None else families(state), is_openmetrics=is_openmetrics)

    def close(self) -> None:
        """End the server and remove the file."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._file is not None and self._state is not None:
            with contextlib.suppress(OSError), target_folder(self._file) as folder:
                folder.remove(self._file.name)
        self._state = None

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Clients:
    """The connections that are being answered; a new one ends the oldest if there are too many."""

    def __init__(self) -> None:
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> None:
        """Take a new connection."""
        with self._lock:
            self._open[connection] = None
            if len(self._open) > MAX_CLIENTS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):  # its thread finds that it has ended, and closes it
                    oldest.shutdown(socket.SHUT_RDWR)

    def remove(self, connection: socket.socket) -> None:
        """Let go of a connection before it is closed."""
        with self._lock:
            self._open.pop(connection, None)


def _request(connection: socket.socket) -> bytes:
    """Return what a client asks for, up to the empty line at its end, or what it has sent before it ended.

    Raises:
        TimeoutError: it takes too long, however often it sends something.
        ValueError: it sends too much.
    """
    said, end_s = b"", time.monotonic() + _REQUEST_TIMEOUT_S
    while b"\n\r\n" not in said and b"\n\n" not in said:
        connection.settimeout(max(end_s - time.monotonic(), 0.001))
        part = connection.recv(_MAX_REQUEST_BYTES)
        said += part
        if not part:
            break
        if len(said) > _MAX_REQUEST_BYTES:
            raise ValueError(f"a request of more than {_MAX_REQUEST_BYTES} bytes")
    connection.settimeout(_REQUEST_TIMEOUT_S)
    return said


def _server(address: str, exporter: Exporter) -> ThreadingHTTPServer:
    """Return a server that runs in a thread of its own."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        raise UsageError(f"--listen {address!r} is no address: give HOST:PORT, or :PORT for this host alone")
    host = found["six"] or found["host"] or _LOOPBACK

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_TIMEOUT_S
        server_version = "hpcpace"
        sys_version = ""

        def setup(self) -> None:
            super().setup()
            self.rfile = io.BytesIO(_request(self.connection))

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "only /metrics is here")
                return
            is_openmetrics = "application/openmetrics-text" in self.headers.get("Accept", "")
            content = exporter.text(is_openmetrics=is_openmetrics).encode()
            self.send_response(200)
            self.send_header("Content-Type", OPENMETRICS_TYPE if is_openmetrics else TEXT_TYPE)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing of requests."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True
        block_on_close = False
        request_queue_size = _BACKLOG
        clients = _Clients()

        def process_request(self, request: Any, client_address: Any) -> None:
            self.clients.add(request)
            super().process_request(request, client_address)

        def shutdown_request(self, request: Any) -> None:
            self.clients.remove(request)
            super().shutdown_request(request)

        def handle_error(self, request: object, client_address: object) -> None:
            """Say nothing of clients that went away."""

    try:
        server = Server((host, int(found["port"])), Handler)
    except OSError as error:
        raise UsageError(f"cannot listen at {address} ({error.strerror}): choose another address or port") from error
    threading.Thread(target=server.serve_forever, name="hpcpace-metrics", daemon=True).start()
    return server
