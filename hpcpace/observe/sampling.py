"""The thread that reads network and host counters, and those of connections, once a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hpcpace.observe.flows import FlowSampler
from hpcpace.observe.host import HostCounters
from hpcpace.observe.network import NetworkCounters
from hpcpace.trace.recorder import Recorder


class CounterThread:
    """Samples until stopped; a counter that fails ends the sampling with one warning, never the job.

    Args:
        network: counters of the host, None on ranks that do not record them.
        flows: records the connections of this process, None if they are not recorded.
    """

    def __init__(
        self,
        recorder: Recorder,
        host: HostCounters,
        network: NetworkCounters | None,
        flows: FlowSampler | None = None,
        *,
        warn: Callable[[str], None],
        interval_s: float = 1.0,
    ) -> None:
        self._recorder = recorder
        self._host = host
        self._network = network
        self._flows = flows
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
        """Record one row of each table, and of each connection that is due."""
        now_ns = time.monotonic_ns()
        self._recorder.add_host(now_ns, *self._host.read())
        if self._network is not None:
            for row in self._network.read():
                self._recorder.add_network(now_ns, *row)
        self._sample_flows()

    def _sample_flows(self) -> None:
        """Record connections; where that fails, everything else goes on."""
        if self._flows is None:
            return
        try:
            self._flows.sample(is_last=self._stopped.is_set())
        except OSError as error:
            self._flows = None
            self._warn(f"connections are not recorded from here on: {error}")

    def _run(self) -> None:
        try:
            self._sample_flows()
            while not self._stopped.wait(self._interval_s):
                self.sample()
            self.sample()
        except Exception as error:  # the boundary of this thread: the job does not depend on counters
            self._warn(f"network and host counters stop: {type(error).__name__}: {error}")
