"""The published table with real ranks: coordination on 4 to 64 hosts of a lab, one coupling at a time.

The paper (Gopalan and Ali, Table 1) says what coordinating ranks gains, and names what may couple them: shared cores,
bursts that meet in a switch, oversubscribed uplinks, services of the hosts. Each of them is made here by itself. A step
is the same in all of them: work, then a collective over sockets.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from experiments.jobs import Rows, Tell, teller
from experiments.pacing import experiment
from experiments.pacing.on_cores import NUM_CORES, YIELDING
from experiments.pacing.paced_job import JobSpec
from experiments.pages import ROOT, counted
from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.hosts import weigh_hosts
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig
from hpcpace.metrics.resampling import Estimate, mean_of

MAX_RANKS_PER_CORE = 8
"""More ranks wait for cores in each collective, although their work is a sleep."""
NUM_HOSTS = tuple(number for number in (4, 8, 16, 32, 64) if number <= MAX_RANKS_PER_CORE * NUM_CORES)
MAX_POLLING = 16
TRIED_HOSTS = (4,)
JOBS, FEWER_JOBS = 5, 2
LINK_MBIT, OVERSUBSCRIPTION, HOSTS_PER_LEAF = 100, 4, 8
QUEUE_KB, BURST_KB = 32, 16
"""Of the shallow switch: what it holds for a host, and what passes at once."""
PACE = {"block_steps": 10, "window_steps": 5, "dropped_steps": 2, "aa_pairs": 2, "max_pairs": 6, "max_delay_share": 0.3}
STEPS = {experiment.Effort.FULL: 210, experiment.Effort.TRY: 60}
SLEEPING = JobSpec(pace=PACE, work_ms=80.0, is_emulated=True, transport="gloo")
POLLING = JobSpec(pace=PACE, work_ms=3.0, straggle_ms=6.0)
_WEIGHT_OF_HOSTS = 256
_TIMEOUT_S = 900
_KEPT = Path("/var/tmp/hpcpace-pacing/hosts.jsonl")
PUBLISHED = ROOT / "tests" / "data" / "published" / "pacing_table.csv"


@dataclass(frozen=True, kw_only=True)
class Coupling:
    """What couples the ranks of a job.

    Attributes:
        name: in the table.
        spec: what ranks do, without a policy.
        policies: each with its number of jobs.
        instead: what else could be done, its name, and what it changes in a job without a policy.
        environ_instead: environment variables of that.
        is_shallow: whether the switch's queue to the first host is shallow.
        is_spread: whether neighbouring ranks are on different leaves.
    """

    name: str
    spec: JobSpec
    policies: Mapping[str, int]
    instead: tuple[str, Mapping[str, Any]] | None = None
    environ_instead: Mapping[str, str] = field(default_factory=dict)
    is_shallow: bool = False
    is_spread: bool = False


COUPLINGS = (
    Coupling(
        name="none: rare events",
        spec=replace(SLEEPING, event_share=0.004, event_ms=40.0),
        policies={"slack": JOBS, "published-window": FEWER_JOBS},
    ),
    Coupling(
        name="services of the hosts",
        spec=replace(SLEEPING, tick_period_ms=4000.0, tick_ms=30.0),
        policies={"slack": JOBS},
    ),
    Coupling(
        name="incast at a shallow queue",
        spec=replace(SLEEPING, collective="gather", message_kb=20.0),
        policies={"stagger": JOBS},
        instead=("a fifth of the message at a time", {"parts": 5}),
        is_shallow=True,
    ),
    Coupling(
        name="bursts on uplinks",
        spec=replace(SLEEPING, message_kb=200.0, event_share=0.004, event_ms=40.0),
        policies={"slack": JOBS},
        instead=("a quarter of the message at a time", {"parts": 4}),
        is_spread=True,
    ),
)
POLLED = Coupling(
    name="polling on shared cores",
    spec=POLLING,
    policies={"slack": JOBS, "published-window": FEWER_JOBS},
    instead=("MPI yields", {}),
    environ_instead=YIELDING,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The jobs of one policy with one coupling on some hosts.

    Attributes:
        coupling: its name.
        num_hosts: with a rank each.
        policy: or what was done instead.
        ran: the jobs.
    """

    coupling: str
    num_hosts: int
    policy: str
    ran: tuple[experiment.Ran, ...]

    @property
    def unpaced_ms(self) -> float:
        """Mean step without coordination, in milliseconds."""
        off_ns = [(ran.trial.get("trial") or {}).get("step_off_ns") or 1e6 * ran.mean_ms() for ran in self.ran]
        return float(np.mean(off_ns)) / 1e6

    @property
    def gain(self) -> Estimate | None:
        """Change of the throughput in paced blocks, over the jobs that had any."""
        found = [1 / (1 + ran.change) - 1 for ran in self.ran if ran.change is not None]
        return mean_of(found) if found else None

    @property
    def variations(self) -> str:
        """Coefficient of variation of the step, means over the jobs: unpaced to paced."""
        found = [ran.variations for ran in self.ran if ran.variations is not None]
        return "{:.2f} to {:.2f}".format(*np.mean(found, axis=0)) if found else ""

    @property
    def outcomes(self) -> str:
        """How many trials ended in which way."""
        names = [ran.outcome for ran in self.ran]
        return ", ".join(f"{name} {names.count(name)}" for name in dict.fromkeys(names))


def hosts_of(num_hosts: int, *, is_spread: bool) -> tuple[str, ...]:
    """Return the hosts in the order of ranks: leaf by leaf, or each rank on another leaf than its neighbours."""
    names = [f"n{number}" for number in range(1, num_hosts + 1)]
    leaves = num_leaves(num_hosts)
    per_leaf = num_hosts // leaves
    return (
        tuple(names[leaf * per_leaf + at] for at in range(per_leaf) for leaf in range(leaves))
        if is_spread
        else tuple(names)
    )


def num_leaves(num_hosts: int) -> int:
    return max(2, num_hosts // HOSTS_PER_LEAF)


@contextmanager
def lab_of(num_hosts: int) -> Iterator[Lab]:
    """Boot a lab with oversubscribed uplinks; it has so much weight that other work takes only what its ranks leave."""
    leaves = num_leaves(num_hosts)
    uplink = LINK_MBIT * num_hosts // leaves // OVERSUBSCRIPTION
    config = LabConfig(
        name=f"pacing{num_hosts}",
        hosts=num_hosts,
        leaves=leaves,
        link=f"{LINK_MBIT}mbit",
        uplink=f"{uplink}mbit",
        cpus_per_host=1,
        clock_step_s=0,
    )
    with Lab.up(config) as lab:
        weigh_hosts(config.name, _WEIGHT_OF_HOSTS)
        yield lab


@contextmanager
def shallow_queue(lab: Lab, *, is_shallow: bool) -> Iterator[None]:
    """Let the switch hold little for the first host, for a while."""
    shape = f"tbf rate {LINK_MBIT}mbit burst {{}}kb limit {{}}kb"
    try:
        _queue(lab, shape.format(BURST_KB, QUEUE_KB) if is_shallow else shape.format(128, 700))
        yield
    finally:
        _queue(lab, shape.format(128, 700))


def _queue(lab: Lab, shape: str) -> None:
    done = lab.run("tc", "qdisc", "change", "dev", "n1", "root", *shape.split())
    if done.returncode:
        raise HpcpaceError(f"the queue of n1 cannot be changed: {done.stderr}")


def run_hosts(effort: experiment.Effort, tell: Tell) -> experiment.Finding:
    is_full = effort == experiment.Effort.FULL
    # Each has a lab of its own: ranks that sleep leave the cores idle.
    lanes = (NUM_HOSTS[-1:], NUM_HOSTS[:-1]) if is_full else (TRIED_HOSTS,)
    with ProcessPoolExecutor(len(lanes), mp_context=get_context("spawn")) as pool:
        sleeping = list(pool.map(run_sleeping, lanes, itertools.repeat(effort)))
    polling = [number for number in NUM_HOSTS if number <= MAX_POLLING] if is_full else TRIED_HOSTS
    found = [*itertools.chain(*sleeping), *run_each(polling, [POLLED], effort)]
    tell(f"{len(found)} rows")
    return finding(found)


def run_sleeping(all_hosts: Sequence[int], effort: experiment.Effort) -> list[Case]:
    """Run the jobs whose work is a sleep."""
    return run_each(all_hosts, COUPLINGS, effort)


def run_each(all_hosts: Sequence[int], couplings: Sequence[Coupling], effort: experiment.Effort) -> list[Case]:
    """Run the jobs of some couplings, in a lab for each number of hosts, but for those that are kept."""
    tell = teller(name=f"{couplings[0].name}, {all_hosts}", file=sys.stderr)
    kept = Rows(_KEPT if effort == experiment.Effort.FULL else _KEPT.with_name("tried.jsonl"))
    cases = []
    for num_hosts in all_hosts:
        done = {row["coupling"] for row in kept.read() if row["num_hosts"] == num_hosts}
        is_done = done.issuperset(coupling.name for coupling in couplings)
        with nullcontext() if is_done else lab_of(num_hosts) as lab:
            for coupling in couplings:
                cases += run_coupling(lab, coupling, num_hosts, kept, effort, tell)
    return cases


def run_coupling(
    lab: Lab | None, coupling: Coupling, num_hosts: int, kept: Rows, effort: experiment.Effort, tell: Tell
) -> list[Case]:
    """Run all jobs of a coupling on some hosts, or take what an interrupted experiment has kept of them."""
    rows = [row for row in kept.read() if (row["coupling"], row["num_hosts"]) == (coupling.name, num_hosts)]
    if lab is not None and not rows:
        rows = _measured(lab, coupling, num_hosts, effort)
        for row in rows:
            kept.add(row)
    cases = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        of_policy = [row for row in rows if row["policy"] == policy]
        ran = tuple(experiment.Ran(step_ns=np.array(row["step_ns"], np.int64), trial=row["trial"]) for row in of_policy)
        cases.append(Case(coupling=coupling.name, num_hosts=num_hosts, policy=policy, ran=ran))
        tell(f"{num_hosts} hosts, {coupling.name}, {policy}: {cases[-1].unpaced_ms:.1f} ms; {ran[0].sentence}")
    return cases


def _measured(lab: Lab, coupling: Coupling, num_hosts: int, effort: experiment.Effort) -> list[dict[str, Any]]:
    is_full = effort == experiment.Effort.FULL
    spec = replace(coupling.spec, steps=STEPS[effort])
    planned = [
        (policy, replace(spec, policy=policy, seed=seed))
        for policy, num_jobs in coupling.policies.items()
        for seed in range(num_jobs if is_full else 1)
    ]
    instead = []
    if coupling.instead is not None:
        name, changes = coupling.instead
        seeds = range(FEWER_JOBS if is_full else 1)
        instead = [(name, replace(spec, **changes, steps=spec.steps // 2, seed=seed)) for seed in seeds]
    if not coupling.environ_instead:
        planned, instead = [*planned, *instead], []
    hosts = hosts_of(num_hosts, is_spread=coupling.is_spread)
    found = []
    with shallow_queue(lab, is_shallow=coupling.is_shallow):
        for jobs, environ in ((planned, {}), (instead, coupling.environ_instead)):
            if jobs:
                job = experiment.LabJob(specs=tuple(spec for _, spec in jobs), hosts=hosts, environ=environ)
                ran = experiment.run_together(lab, [job], timeout_s=_TIMEOUT_S)
                found += [(name, spec, one) for (name, spec), one in zip(jobs, ran, strict=True)]
    of_all = {"coupling": coupling.name, "num_hosts": num_hosts}
    return [
        {**of_all, "policy": name, "spec": asdict(spec), "step_ns": ran.step_ns.tolist(), "trial": ran.trial}
        for name, spec, ran in found
    ]


def published() -> dict[int, tuple[float, str]]:
    """Return the published gain of throughput and the change of the CV, by the number of nodes."""
    with PUBLISHED.open(newline="") as file:
        rows = {(int(row["nodes"]), row["metric"]): row for row in csv.DictReader(file)}
    nodes = sorted({nodes for nodes, _ in rows})
    speeds = {at: rows[at, "throughput_samples_per_s"] for at in nodes}
    spreads = {at: rows[at, "cv_iteration_time"] for at in nodes}
    return {
        at: (
            float(speeds[at]["coordination"]) / float(speeds[at]["baseline"]) - 1,
            f"{spreads[at]['baseline']} to {spreads[at]['coordination']}",
        )
        for at in nodes
    }


NAMES = [coupling.name for coupling in (*COUPLINGS, POLLED)]
OURS = ("slack", "stagger")
HEAD = ("coupling", "nodes", "policy", "jobs", "step, unpaced", "throughput", "CV", "published", "trial")


def finding(cases: Sequence[Case]) -> experiment.Finding:
    """Return the table of all cases beside the published one, and what it shows."""
    known = published()
    table = [HEAD]
    for case in sorted(cases, key=lambda case: (NAMES.index(case.coupling), case.num_hosts)):
        gain, spread = known[case.num_hosts]
        is_trial = case.policy in (*OURS, "published-window")
        table.append(
            (
                case.coupling,
                str(case.num_hosts),
                case.policy,
                str(len(case.ran)),
                f"{case.unpaced_ms:.1f} ms",
                experiment.spelled(case.gain) if is_trial else "",
                case.variations,
                f"{experiment.percent(gain)}, {spread}" if is_trial else "",
                case.outcomes if is_trial else "",
            )
        )
    return experiment.Finding(table=table, claims=claims_of(cases), notes=experiment.notes("hosts", **_values()))


def claims_of(cases: Sequence[Case]) -> list[experiment.Claim]:
    """Return what the paper lets expect of each coupling, and of the trial where coordination gains nothing."""
    claims = []
    for coupling in (*COUPLINGS, POLLED):
        of_it = sorted((case for case in cases if case.coupling == coupling.name), key=lambda case: case.num_hosts)
        paced = [case for case in of_it if case.policy in OURS]
        if not paced:
            continue
        gains = ", ".join(f"{case.num_hosts}: {experiment.spelled(case.gain)}" for case in paced)
        text = f"{coupling.name}: the published gain of throughput is reached on all numbers of nodes: {gains}"
        claims.append(experiment.Claim(text, all(_reaches(case) for case in paced)))
        in_vain = [ran for case in paced if case.gain is None or case.gain.low <= 0 for ran in case.ran]
        off = counted(not ran.trial.get("is_on") for ran in in_vain)
        text = f"{coupling.name}: where the interval has no gain, trials end with coordination off: {off}"
        if in_vain:
            claims.append(experiment.Claim(text, not any(ran.trial.get("is_on") for ran in in_vain)))
        if coupling.instead is not None:
            claims.append(_instead(coupling, of_it, paced))
    return claims


def _reaches(case: Case) -> bool:
    return case.gain is not None and case.gain.high >= published()[case.num_hosts][0]


def _instead(coupling: Coupling, of_it: Sequence[Case], paced: Sequence[Case]) -> experiment.Claim:
    assert coupling.instead is not None
    name = coupling.instead[0]
    usual_ms = {case.num_hosts: case.unpaced_ms for case in paced}
    pairs = [(case.num_hosts, case.unpaced_ms, usual_ms[case.num_hosts]) for case in of_it if case.policy == name]
    shown = ", ".join(f"{num_hosts}: {ms:.0f} instead of {usual:.0f} ms" for num_hosts, ms, usual in pairs)
    return experiment.Claim(
        f"{coupling.name}: {name} makes steps shorter: {shown}", all(ms < of for _, ms, of in pairs)
    )


def _values() -> dict[str, Any]:
    return {
        "sleeping": SLEEPING,
        "polling": POLLING,
        "event": COUPLINGS[0].spec,
        "tick": COUPLINGS[1].spec,
        "incast": COUPLINGS[2].spec,
        "burst": COUPLINGS[3].spec,
        "most": NUM_HOSTS[-1],
        "per_core": MAX_RANKS_PER_CORE,
        "link": LINK_MBIT,
        "queue": QUEUE_KB,
        "oversubscription": OVERSUBSCRIPTION,
    }


HOSTS = experiment.Experiment(name="hosts", title="The published table with real ranks", run=run_hosts, needs_lab=True)
