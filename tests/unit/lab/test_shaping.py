"""How links are shaped, and how their counters are read."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cases import each_case

from hpcpace.lab import fabric
from hpcpace.lab.fabric import LinkCounters, read_counters, shape
from hpcpace.lab.plan import LabPlan
from hpcpace.lab.settings import LabConfig


@each_case(
    ("rate_bps", "arguments"),
    [
        (100_000_000, "tbf rate 100000000bit burst 131072b latency 50ms"),
        (1_000_000_000, "tbf rate 1000000000bit burst 131072b latency 50ms"),
        (10_000_000_000, "tbf rate 10000000000bit burst 1250000b latency 50ms"),
    ],
)
def test_a_rate_is_kept_by_a_token_bucket(rate_bps, arguments):
    assert shape(rate_bps) == arguments


@each_case("rate_bps", [8_000, 10**9, 1_048_576_000, 1_048_576_001, 25 * 10**9, 400 * 10**9])
def test_a_burst_is_a_millisecond_of_the_rate_and_two_large_packets_at_least(rate_bps):
    burst = re.search(r"burst (\d+)b", shape(rate_bps))
    assert burst is not None
    assert int(burst[1]) >= rate_bps // 8 // 1000
    assert int(burst[1]) >= 2 * 65536


def _queue(device: str, rate_bps: int, sent_bytes: int, drops: int) -> dict[str, Any]:
    options = {"rate": rate_bps // 8, "burst": 131072, "lat": 50000}
    return {"kind": "tbf", "dev": device, "options": options, "bytes": sent_bytes, "drops": drops}


@pytest.fixture
def counters(monkeypatch):
    """Read the counters of a lab of two hosts, of which n2 is dead, from what ip and tc say."""
    in_lab = [
        {"kind": "noqueue", "dev": "lo", "options": {}},
        _queue("n1", 10**9, 700, 1),
        _queue("leaf1-up", 5 * 10**8, 30, 2),
        _queue("spine-leaf1", 5 * 10**8, 40, 5),
    ]
    on_host = [_queue("eth0", 10**8, 900, 10)]
    devices = [{"ifname": "n1", "operstate": "UP"}, {"ifname": "spine-leaf1", "operstate": "LOWERLAYERDOWN"}]

    def answer(tool: str, *_: str, host_pid: int | None = None) -> Any:
        if tool == "ip":
            return devices
        return {None: in_lab, 17: on_host}[host_pid]

    monkeypatch.setattr(fabric, "_json", answer)
    return read_counters(LabPlan(LabConfig(hosts=2, leaves=1)), {"n1": 17})


def test_what_a_host_sends_is_counted_at_the_host_and_what_it_gets_at_the_leaf(counters):
    assert counters["n1"] == LinkCounters(name="n1", rate_bps=10**8, is_up=True, tx_bytes=900, rx_bytes=700, dropped=11)


def test_what_a_leaf_sends_is_counted_at_the_leaf_and_what_it_gets_at_the_spine(counters):
    assert counters["leaf1"] == LinkCounters(
        name="leaf1", rate_bps=5 * 10**8, is_up=False, tx_bytes=30, rx_bytes=40, dropped=7
    )


def test_the_link_of_a_dead_host_is_down_and_has_no_rate(counters):
    assert counters["n2"] == LinkCounters(name="n2", rate_bps=0, is_up=False, tx_bytes=0, rx_bytes=0, dropped=0)
    assert list(counters) == ["n1", "n2", "leaf1"]
