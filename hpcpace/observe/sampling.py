"""The thread that reads network and host counters once a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hpcpace.observe.host import HostCounters
from hpcpace.observe.network import NetworkCounters
from hpcpace.trace.recorder import Recorder


class CounterThread:
    """Samples until stopped; a counter that fails ends the sampling with one warning, never the job.

    Args:
        network: counters of the host, None on ranks that do not record them.
    """

    def __init__(
        self,
        recorder: Recorder,
        host: HostCounters,
        network: NetworkCounters | None,
        *,
        warn: Callable[[str], None],
        interval_s: float = 1.0,
    ) -> None:
        self._recorder = recorder
        self._host = host
        self._network = network
        self._warn = warn
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcpace-counters", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end."""
        self._stopped.set()
        self._thread.join(timeout=2 * self._interval_s)

    def sample(self) -> None:
        """Record one row of each table."""
        now_ns = time.monotonic_ns()
        self._recorder.add_host(now_ns, *self._host.read())
        if self._network is not None:
            for interface, sent_bytes, received_bytes in self._network.read():
                self._recorder.add_network(now_ns, interface, sent_bytes, received_bytes)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._interval_s):
                self.sample()
            self.sample()
        except Exception as error:  # the boundary of this thread: the job does not depend on counters
            self._warn(f"network and host counters stop: {type(error).__name__}: {error}")
