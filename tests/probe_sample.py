"""A probe that was never measured, for tests of what is made of one: four hosts with links of 10 Gb/s."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np

from hpcpace.probe.record import (
    BisectionRow,
    CopiesRecord,
    CoreFigures,
    CoreNoise,
    DeviceRate,
    LatencyLaw,
    LawPiece,
    LinkFinding,
    MemoryRate,
    NoiseRecord,
    PairRow,
    PairsRecord,
    ProbedHost,
    ProbeRecord,
    RankSkew,
    SweepRow,
)

SIZES = [4**power for power in range(3, 12)]
OPERATIONS = ("all_reduce", "all_gather", "broadcast")


def made_probe(
    *,
    hosts: tuple[str, ...] = ("n1", "n2", "n3", "n4"),
    slowdown: float = 1.0,
    rounds: int = 5,
    spread: float = 0.005,
    seed: int = 0,
    **values: object,
) -> ProbeRecord:
    """Return a probe of hosts with a link of 10 Gb/s and one rank each, of which all_reduce takes longer."""
    rng = np.random.default_rng(seed)
    rows = []
    for op in OPERATIONS:
        for num_nodes in (2, len(hosts)):
            for size in SIZES:
                time_ns = (30e3 * num_nodes + 0.9 * size) * (slowdown if op == "all_reduce" else 1.0)
                medians = time_ns * np.exp(spread * rng.standard_normal(rounds))
                p50 = float(np.median(medians))
                algbw = size / p50 * 1e9
                rows.append(
                    SweepRow(
                        op=op,
                        num_nodes=num_nodes,
                        num_ranks=num_nodes,
                        size_bytes=size,
                        num_repetitions=10 * rounds,
                        p50_ns=p50,
                        p95_ns=1.1 * p50,
                        p99_ns=1.2 * p50,
                        rounds_ns=tuple(float(one) for one in medians),
                        algbw=algbw,
                        busbw=algbw,
                        limit=1.25e9,
                    )
                )
    record = {
        "versions": {"hpcpace": "1", "torch": "2"},
        "cluster": "lab",
        "job_id": "7",
        "started_unix_ns": 1,
        "device": "cpu",
        "device_name": "",
        "backend": "gloo",
        "time_s": 60.0,
        "took_s": 59.0,
        "part_s": {"sweep": 59.0},
        "hosts": tuple(
            ProbedHost(
                name=name,
                topology_addr="",
                ranks=(rank,),
                interfaces=("eth0",),
                line_rate=1.25e9,
                pcie_rate=None,
                rate_words="10 Gb/s",
            )
            for rank, name in enumerate(hosts)
        ),
        "sweep": tuple(rows),
        "laws": tuple(made_law(op, num_nodes) for op in OPERATIONS for num_nodes in (2, len(hosts))),
        "skews": tuple(
            RankSkew(rank=rank, host=name, mean_ns=100.0 * rank, p99_ns=1e4) for rank, name in enumerate(hosts)
        ),
    }
    return ProbeRecord(**{**record, **values})


def made_law(op: str, num_nodes: int) -> LatencyLaw:
    """Return the law of a probe that was never measured."""
    piece = LawPiece(
        from_bytes=0.0,
        from_low_bytes=0.0,
        from_high_bytes=0.0,
        latency_ns=30e3 * num_nodes,
        latency_low_ns=29e3 * num_nodes,
        latency_high_ns=31e3 * num_nodes,
        ns_per_byte=0.9,
        ns_per_byte_low=0.89,
        ns_per_byte_high=0.91,
    )
    return LatencyLaw(
        op=op,
        num_nodes=num_nodes,
        num_ranks=num_nodes,
        pieces=(piece,),
        least_bytes=SIZES[0],
        most_bytes=SIZES[-1],
        least_error=-0.01,
        most_error=0.01,
        single_least_error=-0.01,
        single_most_error=0.01,
    )


def made_pairs(
    *,
    hosts: tuple[str, ...] = ("n1", "n2", "n3", "n4"),
    slow: Mapping[tuple[str, str], float] | None = None,
    late: Mapping[tuple[str, str], float] | None = None,
    noise: float = 0.01,
    seed: int = 0,
    **values: object,
) -> PairsRecord:
    """Return pairs over links of 10 Gb/s.

    Args:
        hosts: all pairs of which were measured, in three rounds each.
        slow: (from, to) whose rate is so many times the usual one.
        late: pairs whose latency is so many times the usual one.
        noise: standard deviation of ln rate and ln latency.
        seed: of that.
        values: other attributes of the record.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for first, second in combinations(hosts, 2):
        for _ in range(3):
            forward, backward, least = np.exp(noise * rng.standard_normal(3))
            latency_ns = 2e4 * least * (late or {}).get((first, second), 1.0)
            rows.append(
                PairRow(
                    first=first,
                    second=second,
                    is_apart=True,
                    forward=1.18e9 * forward * (slow or {}).get((first, second), 1.0),
                    backward=1.18e9 * backward * (slow or {}).get((second, first), 1.0),
                    least_ns=latency_ns,
                    p50_ns=1.2 * latency_ns,
                    p99_ns=3 * latency_ns,
                )
            )
    record = {
        "carrier": "TCP over eth0",
        "usual": 1.18e9,
        "usual_of_limit": 0.944,
        "usual_latency_ns": 2e4,
        "rows": tuple(rows),
        "bisections": tuple(
            BisectionRow(source=source, target=target, num_pairs=2, rate=rate, possible=2.36e9)
            for source, target, rate in (("leaf1", "leaf2", 1.2e9), ("leaf2", "leaf1", 2.3e9))
        ),
    }
    return PairsRecord(**{**record, **values})


def made_finding(words: str) -> LinkFinding:
    """Return a slow link with some words."""
    return LinkFinding(kind="link", names=("n3",), way="sends", measure="rate", value=5e8, usual=1.18e9, words=words)


def made_noise(
    *, hosts: tuple[str, ...] = ("n1", "n2"), robbed: Mapping[tuple[str, int], float] | None = None, seed: int = 0
) -> NoiseRecord:
    """Return four cores of each host that lose some 0.1 % of the time; those robbed, every 10 ms, so much more."""
    rng = np.random.default_rng(seed)
    cores = []
    for host in hosts:
        for cpu in range(4):
            more = (robbed or {}).get((host, cpu), 0.0)
            share = 0.001 * float(np.exp(0.2 * rng.standard_normal())) + more
            figures = CoreFigures(
                share=share,
                longest_ns=6e5 if more else 4e4,
                num_detours=int(5e9 * share / 2e4),
                quantum_ns=5e4,
                resolution_ns=5e3,
                span_ns=5 * 10**9,
                period_ns=1e7 if more else None,
                period_share=more or None,
            )
            cores.append(CoreNoise(host=host, cpu=cpu, figures=figures))
    return NoiseRecord(cores=tuple(cores))


def made_copies(*, hosts: tuple[str, ...] = ("n1", "n2"), slow: float = 1.0, seed: int = 0) -> CopiesRecord:
    """Return copies on hosts with two NUMA nodes and a GPU; of the first, one node and the GPU `slow` times as fast."""
    rng = np.random.default_rng(seed)
    memory, devices = [], []
    for place, host in enumerate(hosts):
        factor = slow if place == 0 else 1.0
        for node in (0, 1):
            rate = 8e10 * float(np.exp(0.02 * rng.standard_normal())) * (factor if node == 1 else 1.0)
            memory.append(MemoryRate(host=host, numa_node=node, num_threads=16, rate=rate))
        for is_pinned, rate in ((True, 2.6e10), (False, 9e9)):
            devices.append(
                DeviceRate(
                    host=host,
                    device=0,
                    bus_id="0000:17:00.0",
                    numa_node=0,
                    is_pinned=is_pinned,
                    to_device=rate * factor,
                    from_device=0.96 * rate,
                    limit=3.15e10,
                )
            )
    return CopiesRecord(memory=tuple(memory), devices=tuple(devices))
