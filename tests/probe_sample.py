"""A probe that was never measured, for tests of what is made of one: four hosts with links of 10 Gb/s."""

from __future__ import annotations

import numpy as np

from hpcpace.probe.record import LatencyLaw, LawPiece, ProbedHost, ProbeRecord, RankSkew, SweepRow

SIZES = [4**power for power in range(3, 12)]
OPERATIONS = ("all_reduce", "all_gather", "broadcast")


def made_probe(
    *,
    hosts: tuple[str, ...] = ("n1", "n2", "n3", "n4"),
    slowdown: float = 1.0,
    rounds: int = 5,
    noise: float = 0.005,
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
                medians = time_ns * np.exp(noise * rng.standard_normal(rounds))
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
