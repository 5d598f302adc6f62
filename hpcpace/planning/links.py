"""Rates and latencies of a machine's links from a probe."""

from __future__ import annotations

from dataclasses import replace

from hpcpace.planning.files import KnownMachine
from hpcpace.probe.record import LatencyLaw, ProbeRecord

_LARGE_BYTES = 64e6  # statistics: of an all-reduce whose rate counts, unless the probe ended below


def with_links(known: KnownMachine, probe: ProbeRecord) -> KnownMachine:
    """Return a machine with the links of a probe: from the all-reduce over most nodes, and within one node.

    A remark names what the probe does not show.
    """
    laws = {law.num_nodes: law for law in probe.laws if law.op == "all_reduce" and law.num_ranks > 1}
    machine, remarks = known.machine, list(known.remarks)
    over_nodes = [num for num in laws if num > 1]
    if over_nodes:
        law = laws[max(over_nodes)]
        rate, latency_s = _link(law, law.num_nodes)
        machine = replace(machine, network_rate=rate, network_latency_s=latency_s)
    else:
        remarks.append("the probe has no all-reduce between nodes: that rate is that of a known machine")
    if 1 in laws:
        rate, latency_s = _link(laws[1], laws[1].num_ranks)
        machine = replace(machine, node_rate=rate, node_latency_s=latency_s)
    return replace(known, machine=machine, remarks=tuple(remarks))


def _link(law: LatencyLaw, num_parts: int) -> tuple[float, float]:
    """Return bytes per second of a link, and its latency in seconds, from an all-reduce: 2 (n - 1) / n of its bytes.

    Args:
        law: of the all-reduce.
        num_parts: what the links join: nodes, each of which sends what all of its ranks have in one ring, or ranks.
    """
    size_bytes = min(_LARGE_BYTES, float(law.most_bytes))
    ranks = law.num_ranks
    sent = 2 * (ranks - 1) / ranks * size_bytes
    small_ns = law.time_ns(float(law.least_bytes))
    moved_ns = max(law.time_ns(size_bytes) - small_ns, 1.0)
    return sent / moved_ns * 1e9, small_ns / 1e9 / (2 * (num_parts - 1))
