"""What other programs measure between two hosts of the same lab: iperf3 the rate, sockperf the latency."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hpcpace.lab.lab import Lab

_SECONDS = 3
_PORT = 23_456
_READY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Peers:
    """What other programs measured between n1 and n2.

    Attributes:
        iperf_mbit: rate of data, one stream for some seconds.
        sockperf_us: median half round trip of small messages, as sockperf sends them.
    """

    iperf_mbit: float
    sockperf_us: float


def measure_peers(lab: Lab) -> Peers:
    """Run the other programs in the lab."""
    first, second = lab.plan.hosts[:2]
    server = ["iperf3", "-s", "-1", "-p", str(_PORT)]
    client = ["iperf3", "-c", second.address, "-p", str(_PORT), "-t", str(_SECONDS), "-J"]
    rate = json.loads(_served(lab, second.name, server, first.name, client))["end"]["sum_received"]["bits_per_second"]
    place = ["--tcp", "-i", second.address, "-p", str(_PORT + 1)]
    client = ["sockperf", "ping-pong", *place, "-t", str(_SECONDS)]
    text = _served(lab, second.name, ["sockperf", "server", *place], first.name, client)
    found = re.search(r"percentile 50\.000 = +([0-9.]+)", text)
    return Peers(
        iperf_mbit=rate / 1e6,
        sockperf_us=float(found[1]) if found else float("nan"),
    )


def _served(lab: Lab, server_host: str, server: Sequence[str], client_host: str, client: Sequence[str]) -> str:
    """Return what a client prints whose server runs on another host meanwhile."""
    on = ["srun", "-n", "1", "-w"]
    command = lab.command([*on, server_host, *server])
    with subprocess.Popen(command, env=lab.environ(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as serving:
        time.sleep(_READY_S)
        try:
            done = lab.run(*on, client_host, *client)
            return done.stdout + done.stderr
        finally:
            serving.terminate()
