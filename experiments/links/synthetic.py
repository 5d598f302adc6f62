"""Counts right names and false alarms over many simulated jobs: `python -m experiments.links.synthetic`."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace

import numpy as np

from experiments.links.simulated import SimulatedLinks, simulate
from hpcpace.core.text import NS_PER_S
from hpcpace.metrics.network.flow_figures import flow_figures, foreign_on_links
from hpcpace.metrics.network.flow_links import locate_by_flows
from hpcpace.metrics.network.interface_use import interface_loads
from hpcpace.metrics.network.link_faults import FlowFindings, LinkCause

CAUSES = {
    "slow": (LinkCause.SLOW, LinkCause.UPLINK),
    "foreign": (LinkCause.FOREIGN,),
    "flapping": (LinkCause.FLAPPING,),
    "lossy": (LinkCause.LOSSY,),
    "small_mtu": (LinkCause.SMALL_MTU,),
}
SIZES = {"slow": (0.1, 0.5), "foreign": (0.4, 0.6), "flapping": (0.0, 0.0), "lossy": (0.01, 0.03), "small_mtu": (0, 0)}


def located(job: SimulatedLinks) -> FlowFindings:
    """Return what is found in a simulated job."""
    run = simulate(job)
    window = {"begin_ns": 2 * NS_PER_S, "end_ns": job.num_seconds * NS_PER_S}
    figures = flow_figures(run.flows, run.topology, **window)
    loads = interface_loads(run.use, run.flows, **window, is_recorded=np.ones(job.num_hosts, np.bool_))
    return locate_by_flows(figures, run.topology, foreign_bytes_per_s=foreign_on_links(loads, run.topology))


def random_job(seed: int, fault: str, *, is_uplink: bool) -> SimulatedLinks:
    """Return a job of random size and place with a fault of random size on a random link."""
    random = np.random.default_rng([seed, 7])
    num_leaves = int(random.choice([1, 2, 3, 4]))
    if is_uplink:
        num_leaves = max(num_leaves, 2)
    num_hosts = num_leaves * int(random.integers(2, 5))
    low, high = SIZES.get(fault, (0.0, 0.0))
    name = f"leaf{random.integers(num_leaves) + 1} uplink" if is_uplink else f"n{random.integers(num_hosts) + 1}"
    size = float(random.uniform(low, high))
    return SimulatedLinks(
        seed=seed,
        num_hosts=num_hosts,
        num_leaves=num_leaves,
        is_shuffled=bool(random.random() < 0.3),
        uplink_bps=1e9 if is_uplink else float(random.choice([1e9, 2e9, 4e9])),
        fault=fault,
        links=(name,),
        # Two leaves: all connections between them are slow then, which is told from a design by a factor of 3.
        size=size / 2 if is_uplink and fault == "slow" else size,
        compute_s=float(random.uniform(0.05, 0.6)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.links.synthetic", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="simulate this many jobs of each kind")
    args = parser.parse_args()
    for noise in (0.03, 0.1):
        healthy = [
            located(replace(random_job(seed, "none", is_uplink=False), noise=noise)) for seed in range(args.seeds)
        ]
        print(f"noise {noise}: healthy: {sum(bool(found.faults) for found in healthy)} named of {args.seeds}")
        for fault, causes in CAUSES.items():
            for is_uplink in (False, True):
                counts: Counter[str] = Counter()
                for seed in range(args.seeds):
                    job = replace(random_job(seed, fault, is_uplink=is_uplink), noise=noise)
                    counts[judged(job, located(job), causes)] += 1
                print(f"noise {noise}: {fault:9s} {'uplink' if is_uplink else 'host':6s}: {dict(counts)}", flush=True)


def judged(job: SimulatedLinks, found: FlowFindings, causes: tuple[LinkCause, ...]) -> str:
    """Return in a word how right the findings are."""
    if not found.faults:
        return "nothing"
    is_named = [bool(set(job.right_links) & set(fault.ids)) for fault in found.faults]
    if not all(is_named):
        return "wrong" if not any(is_named) else "more"
    if found.faults[0].cause not in causes:
        return f"right, but {found.faults[0].cause}"
    return "right" if len(found.faults[0].ids) == 1 else "right set"


if __name__ == "__main__":
    main()
