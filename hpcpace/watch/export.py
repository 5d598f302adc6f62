"""Export the state of a run as metrics: into a file, or at /metrics over HTTP.

docs/site.md lists the metrics.
"""

from __future__ import annotations

import contextlib
import io
import re
import socket
import threading
import time
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from hpcpace.core.errors import UsageError
from hpcpace.core.exposition import OPENMETRICS_TYPE, TEXT_TYPE, Family, MetricType, exposition
from hpcpace.core.files import target_folder, write_file
from hpcpace.core.text import NS_PER_S
from hpcpace.watch.state import Doing, JobState
from hpcpace.watch.view import Sort, ordered

TOP_RANKS = 8
"""Ranks that have metrics of their own: the slowest ones, so that a job of any size has few series."""

_UNDER_WAY = frozenset({Doing.RUNNING, Doing.HANGS, Doing.SILENT})


def families(state: JobState) -> list[Family]:
    """Return the metrics of a run."""
    # Without Slurm, the name of the run takes the place of the job.
    job = {"jobid": state.jobid or state.name or state.path, "step": state.step_id}
    info = Family(name="hpcpace_run", kind=MetricType.INFO, help="What the run is.")
    facts = {"run": state.path, "name": state.name, "mesh": state.mesh, "samples_unit": state.samples_unit}
    info.add(1, {**job, **facts, **{f"{name}_version": version for name, version in state.versions.items()}})
    return [*_of_job(state, job), *_of_ranks(state, job), *_of_hosts(state, job), info]


def _of_job(state: JobState, job: dict[str, str]) -> Iterable[Family]:
    def seconds(time_ns: float | None) -> float | None:
        return None if time_ns is None else time_ns / NS_PER_S

    gauges: list[tuple[str, str, str, float | None]] = [
        ("hpcpace_running", "", "Whether the run is under way (1), or has ended or not begun (0).",
         float(state.doing in _UNDER_WAY)),
        ("hpcpace_step_seconds", "seconds", "Median time of the last steps.", seconds(state.step_ns)),
        ("hpcpace_past_step_seconds", "seconds", "Median time of all earlier steps of this attempt.",
         seconds(state.past_ns)),
        ("hpcpace_current_step_age_seconds", "seconds", "How long the present step had lasted at the last flush.",
         state.step_age_s),
        ("hpcpace_exposed_wait_ratio", "ratio", "Share of a step that a rank waits for others, mean of ranks.",
         state.wait_share),
        ("hpcpace_blocked_ratio", "ratio", "Share of a step blocked in communication, mean of ranks.",
         state.blocked_share),
        ("hpcpace_last_step_timestamp_seconds", "seconds", "Unix time of the end of the last step.",
         state.last_step_unix_s),
        ("hpcpace_hang_ranks", "", "Ranks that hold up the others, or of which one does.",
         float(len(state.hang.ranks)) if state.hang is not None else 0.0),
        ("hpcpace_hanging", "", "Whether the run hangs, with or without a rank that can be named.",
         float(state.hang is not None)),
        ("hpcpace_clock_error_seconds", "seconds", "Largest uncertainty of the clock of a rank.",
         seconds(state.halfwidth_ns)),
        ("hpcpace_ranks", "", "Ranks of the run.", state.world_size or None),
        ("hpcpace_live_ranks", "", "Ranks that write.", state.num_live),
        ("hpcpace_silent_ranks", "", "Ranks that have stopped writing without an end.", len(state.silent)),
        ("hpcpace_planned_steps", "", "Steps that the run is to have.", state.planned_steps),
        ("hpcpace_attempt", "", "Number of the attempt, counted from 0.",
         state.attempt if state.attempt >= 0 else None),
        ("hpcpace_oldest_figure_seconds", "seconds", "Time since the rank was looked at that waits longest for it.",
         state.looked_s),
    ]  # fmt: skip
    for name, unit, text, value in gauges:
        family = Family(name=name, kind=MetricType.GAUGE, help=text, unit=unit)
        family.add(value, job)
        yield family
    counters: list[tuple[str, str, float | None]] = [
        ("hpcpace_steps", "Steps that all ranks have ended, counted from the start of the run.", state.num_steps),
        ("hpcpace_samples", "Samples of the steps that were seen.", state.num_samples),
        ("hpcpace_dropped_rows", "Rows that ranks gave up while they were watched.", state.num_dropped),
    ]
    for name, text, value in counters:
        family = Family(name=name, kind=MetricType.COUNTER, help=text)
        family.add(value, job)
        yield family


def _of_ranks(state: JobState, job: dict[str, str]) -> Iterable[Family]:
    own = Family(
        name="hpcpace_rank_own_seconds",
        kind=MetricType.GAUGE,
        unit="seconds",
        help=f"Time of a step in which a rank is not blocked, of the {TOP_RANKS} slowest.",
    )
    excess = Family(
        name="hpcpace_rank_excess_ratio",
        kind=MetricType.GAUGE,
        unit="ratio",
        help=f"The same against the median of the rank's role, of the {TOP_RANKS} slowest.",
    )
    for one in [one for one in ordered(state, Sort.SLOWEST) if one.own_ns is not None][:TOP_RANKS]:
        labels = {**job, "node": one.host, "rank": str(one.rank)}
        own.add(None if one.own_ns is None else one.own_ns / NS_PER_S, labels)
        excess.add(one.excess, labels)
    return own, excess


def _of_hosts(state: JobState, job: dict[str, str]) -> Iterable[Family]:
    sent, received, line = (
        Family(name=f"hpcpace_network_{what}_bytes_per_second", kind=MetricType.GAUGE, help=text)
        for what, text in (
            ("transmit", "Bytes sent on the busiest interface of a node."),
            ("receive", "Bytes received there."),
            ("line", "Line rate of that interface."),
        )
    )
    for one in state.hosts:
        labels = {**job, "node": one.host}
        sent.add(one.sent_bps / 8, labels)
        received.add(one.received_bps / 8, labels)
        line.add(None if one.line_bps is None else one.line_bps / 8, labels)
    return sent, received, line


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
