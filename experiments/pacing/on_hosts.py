"""The published table with real ranks: coordination on 4 to 64 hosts of a lab, one coupling at a time.

The paper (Gopalan and Ali, Table 1) says what coordinating ranks gains, and names what may couple them: shared cores,
bursts that meet in a switch, oversubscribed uplinks, services of the hosts. Each of them is made here by itself. A step
is the same in all of them: work, then a collective over sockets.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from analysis.library.estimates import mean_of
from analysis.library.paced_jobs import Target
from analysis.library.pacing import read_published_pacing
from experiments.jobs import Rows, Tell, commit, teller
from experiments.labs import heavy_lab
from experiments.pacing import experiment
from experiments.pacing.on_cores import NUM_CORES, YIELDING
from experiments.pacing.paced_job import JobSpec
from experiments.pages import ROOT, counted, percent, read_toml
from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.fabric import shape
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig
from hpcpace.metrics.resampling import Estimate

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


COUPLINGS = tuple(
    Coupling(**{**row, "spec": replace(SLEEPING, **row["spec"])}) for row in read_toml(__file__)["coupling"]
)
POLLED = Coupling(
    name="polling on shared cores",
    spec=POLLING,
    policies={"slack": JOBS, "published-window": FEWER_JOBS},
    instead=("MPI yields", {}),
    environ_instead=YIELDING,
)


def hosts_of(num_hosts: int, *, is_spread: bool) -> tuple[str, ...]:
    """Return the hosts in the order of ranks: leaf by leaf, or each rank on another leaf than its neighbours."""
    names = [f"n{number}" for number in range(1, num_hosts + 1)]
    leaves = num_leaves(num_hosts)
    per_leaf = num_hosts // leaves
    if is_spread:
        names = [names[leaf * per_leaf + at] for at in range(per_leaf) for leaf in range(leaves)]
    return tuple(names)


def num_leaves(num_hosts: int) -> int:
    return max(2, num_hosts // HOSTS_PER_LEAF)


def lab_of(num_hosts: int) -> AbstractContextManager[Lab]:
    """Boot a lab with oversubscribed uplinks."""
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
    return heavy_lab(config)


@contextmanager
def shallow_queue(lab: Lab) -> Iterator[None]:
    """Let the switch hold little for the first host, for a while."""
    _shape(lab, f"tbf rate {LINK_MBIT}mbit burst {BURST_KB}kb limit {QUEUE_KB}kb")
    try:
        yield
    finally:
        _shape(lab, shape(LINK_MBIT * 1_000_000))


def _shape(lab: Lab, words: str) -> None:
    done = lab.run("tc", "qdisc", "change", "dev", "n1", "root", *words.split())
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


def run_sleeping(all_hosts: Sequence[int], effort: experiment.Effort) -> list[experiment.Series]:
    """Run the jobs whose work is a sleep."""
    return run_each(all_hosts, COUPLINGS, effort)


def run_each(
    all_hosts: Sequence[int], couplings: Sequence[Coupling], effort: experiment.Effort
) -> list[experiment.Series]:
    """Run the jobs of some couplings in a lab for each number of hosts, but for those that this commit has run."""
    tell = teller(name=f"{couplings[0].name}, {all_hosts}", file=sys.stderr)
    kept = Rows(_KEPT if effort == experiment.Effort.FULL else Path(os.devnull))
    found = []
    for num_hosts in all_hosts:
        rows = [row for row in kept.read() if (row["num_hosts"], row["commit"]) == (num_hosts, commit(ROOT))]
        done = {row["coupling"] for row in rows}
        left = [coupling for coupling in couplings if coupling.name not in done]
        if left:
            with lab_of(num_hosts) as lab:
                for coupling in left:
                    new = _measured(lab, coupling, num_hosts, effort)
                    for row in new:
                        kept.add(row)
                    rows += new
                    tell(f"{num_hosts} hosts, {coupling.name}: {new[0]['trial'].get('sentence', '')}")
        found += [series for coupling in couplings for series in _series_of(coupling, num_hosts, rows)]
    return found


def _series_of(coupling: Coupling, num_hosts: int, rows: Sequence[Mapping[str, Any]]) -> Iterator[experiment.Series]:
    """Yield the jobs of a coupling for each policy, and for what was done instead."""
    scene = experiment.Scene(name=coupling.name, spec=coupling.spec, num_ranks=num_hosts, policies=coupling.policies)
    own = [row for row in rows if row["coupling"] == coupling.name]
    for policy in dict.fromkeys(row["policy"] for row in own):
        ran = tuple(
            experiment.Ran(step_ns=np.array(row["step_ns"], np.int64), trial=row["trial"])
            for row in own
            if row["policy"] == policy
        )
        yield experiment.Series(scene=scene, policy=policy, ran=ran)


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
    with shallow_queue(lab) if coupling.is_shallow else nullcontext():
        for jobs, environ in ((planned, {}), (instead, coupling.environ_instead)):
            if jobs:
                job = experiment.LabJob(specs=tuple(spec for _, spec in jobs), hosts=hosts, environ=environ)
                ran = experiment.run_together(lab, [job], timeout_s=_TIMEOUT_S)
                found += [(name, spec, one) for (name, spec), one in zip(jobs, ran, strict=True)]
    of_all = {"commit": commit(ROOT), "coupling": coupling.name, "num_hosts": num_hosts}
    return [
        {**of_all, "policy": name, "spec": asdict(spec), "step_ns": ran.step_ns.tolist(), "trial": ran.trial}
        for name, spec, ran in found
    ]


NAMES = [coupling.name for coupling in (*COUPLINGS, POLLED)]
OURS = ("slack", "stagger")
HEAD = ("coupling", "nodes", "policy", "jobs", "step, unpaced", "throughput", "CV", "published", "trial")


def gain_of(series: experiment.Series) -> Estimate | None:
    """Return the change of the throughput in paced blocks, over the jobs that had any."""
    found = [1 / (1 + ran.change) - 1 for ran in series.ran if ran.change is not None]
    return mean_of(found) if found else None


def finding(found: Sequence[experiment.Series]) -> experiment.Finding:
    """Return the table of all jobs beside the published one, and what it shows."""
    published = {target.nodes: target for target in read_published_pacing(PUBLISHED)}
    table = [HEAD]
    for series in sorted(found, key=lambda one: (NAMES.index(one.scene.name), one.scene.num_ranks)):
        target, is_trial = published[series.scene.num_ranks], series.policy in (*OURS, "published-window")
        gain = f"{percent(target.gain)}, {target.variation:.2f} to {target.paced_variation:.2f}"
        of_trial = (experiment.spelled(gain_of(series)), series.variations, gain, series.ends)
        name, _, num_jobs, unpaced, *_ = series.row()
        policy = (series.policy, num_jobs, unpaced)
        table.append((name, str(series.scene.num_ranks), *policy, *(of_trial if is_trial else [""] * len(of_trial))))
    claims = [claim for coupling in (*COUPLINGS, POLLED) for claim in _claims_of(coupling, found, published)]
    return experiment.Finding(table=table, claims=claims, notes=experiment.notes("hosts", **_values()))


def _claims_of(
    coupling: Coupling, found: Sequence[experiment.Series], published: Mapping[int, Target]
) -> Iterator[experiment.Claim]:
    """Yield what the paper lets expect of a coupling, and of the trial where coordination gains nothing."""
    of_it = sorted((one for one in found if one.scene.name == coupling.name), key=lambda one: one.scene.num_ranks)
    paced = {one.scene.num_ranks: (one, gain_of(one)) for one in of_it if one.policy in OURS}
    if not paced:
        return
    gains = ", ".join(f"{num_hosts}: {experiment.spelled(gain)}" for num_hosts, (_, gain) in paced.items())
    is_shown = all(gain and gain.low > 0 for num_hosts, (_, gain) in paced.items() if published[num_hosts].gain > 0)
    text = f"{coupling.name}: wherever the paper has a gain of throughput, the interval is above zero: {gains}"
    yield experiment.Claim(text, is_shown)
    in_vain = [ran for series, gain in paced.values() if gain is None or gain.low <= 0 for ran in series.ran]
    if in_vain:
        off = [not ran.trial.get("is_on") for ran in in_vain]
        text = f"{coupling.name}: where the interval has no gain, trials end with coordination off: {counted(off)}"
        yield experiment.Claim(text, all(off))
    if coupling.instead is not None:
        name = coupling.instead[0]
        pairs = [
            (one.scene.num_ranks, one.unpaced_ms, paced[one.scene.num_ranks][0].unpaced_ms)
            for one in of_it
            if one.policy == name
        ]
        shown = ", ".join(f"{num_hosts}: {ms:.0f} instead of {usual:.0f} ms" for num_hosts, ms, usual in pairs)
        text = f"{coupling.name}: {name} makes steps shorter: {shown}"
        yield experiment.Claim(text, all(ms < usual for _, ms, usual in pairs))


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
