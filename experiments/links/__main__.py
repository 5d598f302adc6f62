"""Runs jobs with faults of links in the lab, and counts which links their reports name. Needs root and Slurm's lab.

    flock /tmp/lab.lock python -m experiments.links run --minutes 10 --hosts 4 --layouts dp
    python -m experiments.links judge --page diagnosis-links --write

`run` goes on where it stopped: what has run is kept in the folder and reported again by `judge`, with today's rules.

Options:
  command run|judge  run jobs that have not run yet, or report all runs again and count what they name
  --folder PATH      keep runs in this folder [/var/tmp/hpcpace-links]
  --minutes X        begin no job after this time [10]
  --hosts N          size of the lab [4]
  --layouts NAME...  run only these layouts
  --cases NAME...    run only these cases
  --repetitions N    of each case, layout and size [10]
  --page NAME        judge the cases of this page [diagnosis-links]
  --write            write it in docs/results
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.library.estimates import share_of
from experiments.jobs import busy
from experiments.labs import WEIGHT_OF_HOSTS, inject
from experiments.links.hosts import TrainingHosts
from experiments.options import command_line
from experiments.pages import counted, read_toml, table, write_page
from hpcpace.core.config import Config
from hpcpace.core.errors import HpcpaceError
from hpcpace.core.rundir import RunDirectory, write_json
from hpcpace.core.text import NS_PER_S
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.evidence import TABLES_USED
from hpcpace.diagnosis.measure import Selection
from hpcpace.lab.hosts import weigh_hosts
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig
from hpcpace.trace.attempt_reader import read_attempt

RATE = "200mbit"
"""Of links and uplinks: a ring passes an uplink once in each direction, so uplinks are not its bottleneck."""
COMPUTE_MS = 60
LAYOUTS = {
    "dp": ("--mesh", "dp={ranks}", "--seq-len", "32", "--batch-size", "{two_each}"),
    "zero": ("--mesh", "dp={ranks}", "--zero", "3", "--seq-len", "32", "--batch-size", "{two_each}"),
    "dp x pp": ("--mesh", "dp={half},pp=2", "--seq-len", "32", "--batch-size", "{two_each}"),
    # Messages of 1 MiB take 40 ms, as long as an acknowledgement may be delayed: shorter ones show nothing.
    "pp": ("--mesh", "pp={ranks}", "--seq-len", "128", "--batch-size", "64"),
}
SIZES = ((4, 2), (8, 4), (2, 1))
"""Hosts and leaves; of two hosts every connection passes both links, so no fault can be told there."""
MAX_STAGES = 4
"""The preset has as many layers."""
_CASES: dict[str, dict[str, Any]] = {row["name"]: row for row in read_toml(__file__, "cases")["case"]}
CASES = tuple(_CASES)
NOTHING = ("healthy", "busy machine", "full", "clock step")
HEALTHY = ("healthy", "busy machine")
"""Run three times as often."""
_OF_LINKS = ("healthy", "full", "slow host", "slow uplink", "traffic", "loss", "flapping", "mtu")
_FURTHER = ("two slow", "slow third", "one way", "neighbour", "little loss", "latency", "reorder")
OF_HOSTS = ("stopped", "stopped briefly", "quota", "busy core", "memory thief", "slow loader", "clock step")
MAY_BE_SILENT = ("neighbour", "busy core", "memory thief")
"""It is right to name nobody, because it may cost a job nothing."""
_STEP_ERROR_S = 0.01
_OF_PAGE = {"diagnosis-links": _OF_LINKS, "diagnosis-healthy": HEALTHY, "diagnosis-faults": (*_FURTHER, *OF_HOSTS)}
"""The cases of each page in docs/results."""
_MAX_REPETITIONS = 40
_START_TIMEOUT_S = 120.0
_SETTINGS = {"HPCPACE_AUDIT": "off", "HPCPACE_CLOCK_INTERVAL_S": "5"}


@dataclass(frozen=True, kw_only=True)
class LinkJob:
    """One job: a case in a layout on a lab of some size; repetitions count jobs that are alike but for the link."""

    case: str
    layout: str
    num_hosts: int
    num_leaves: int
    repetition: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.case} {self.layout} {self.num_hosts} {self.repetition}".replace(" ", "-")

    @property
    def host(self) -> str:
        """The host whose link the fault hits."""
        return f"n{random.Random(self.name).randint(1, self.num_hosts)}"

    @property
    def leaf(self) -> str:
        """The leaf whose uplink it hits."""
        return f"leaf{random.Random(self.name).randint(1, self.num_leaves)}"

    @property
    def peer(self) -> str:
        """The host to which foreign traffic goes, on the next leaf."""
        return f"n{(int(self.host[1:]) - 1 + self.num_hosts // self.num_leaves) % self.num_hosts + 1}"

    @property
    def second(self) -> str:
        """Another host, on another leaf, the link of which is slow as well."""
        return f"n{(int(self.host[1:]) + self.num_hosts // 2 - 1) % self.num_hosts + 1}"

    @property
    def way(self) -> str:
        """The direction that is slow."""
        return random.Random(self.name + "way").choice(("up", "down"))

    @property
    def step(self) -> str:
        """Seconds by which the clock of the host is stepped."""
        return random.Random(self.name + "step").choice(("0.05", "-0.05"))

    @property
    def leaf_of_host(self) -> str:
        """The leaf of the host whose link the fault hits."""
        return self._leaf_of(self.host)

    @property
    def leaf_of_peer(self) -> str:
        """The leaf of the host to which foreign traffic goes."""
        return self._leaf_of(self.peer)

    def _leaf_of(self, host: str) -> str:
        return f"leaf{(int(host[1:]) - 1) * self.num_leaves // self.num_hosts + 1}"

    def _texts(self, name: str) -> tuple[str, ...]:
        return tuple(text.format(job=self) for text in _CASES[self.case].get(name, ()))

    @property
    def faults(self) -> tuple[tuple[str, ...], ...]:
        """Words of `hpcpace lab fault`, one tuple a fault; none without one."""
        return tuple(tuple(text.split()) for text in self._texts("faults"))

    @property
    def is_late(self) -> bool:
        """Whether its fault begins with the first steps: ranks do not find each other while a link is down."""
        return bool(_CASES[self.case].get("is_late"))

    @property
    def num_busy(self) -> int:
        """How many other processes keep the machine's cores busy while it runs."""
        return int(_CASES[self.case].get("num_busy", 0))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that it runs on: all, but for every second one if there is a neighbour."""
        return tuple(f"n{number}" for number in range(1, self.num_hosts + 1, 2 if self.case == "neighbour" else 1))

    @property
    def right(self) -> tuple[str, ...]:
        """What it is right to name, as `Culprit.aliases` does."""
        if self.case == "neighbour":
            return tuple(f"link leaf{number} uplink" for number in range(1, self.num_leaves + 1))
        if self.case in OF_HOSTS and self.case not in NOTHING:
            return (f"rank {int(self.host[1:]) - 1}", f"node {self.host}")
        return tuple(f"link {name}" for name in self._texts("links"))

    @property
    def wanted(self) -> tuple[str, ...]:
        """Words that the headline of its report has to have, for faults of hosts it or another finding."""
        return self._texts("wanted")

    def training(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Return the words of `hpcpace train` on some hosts."""
        ranks = len(hosts)
        numbers = {"ranks": ranks, "half": ranks // 2, "two_each": 2 * ranks}
        row = _CASES[self.case]
        model = row.get("model", "gpt2")
        layout = [word.format(**numbers) for word in LAYOUTS[self.layout]]
        layout = layout if model == "gpt2" else ["--mesh", f"dp={ranks}", "--batch-size", f"{2 * ranks}"]
        layout += row.get("options", ())
        sleeps = (f"host={host},phase=forward,size={COMPUTE_MS}ms" for host in hosts)
        work = [word for spec in sleeps for word in ("--inject", spec)] if self.case != "full" else []
        work += [word for spec in self._texts("inject") for word in ("--inject", spec)]
        steps = row.get(f"steps_of_{self.layout}", row.get("steps", 45))
        steps = min(steps, 30) if self.layout == "pp" else steps  # they take twice as long
        return (model, *layout, "--steps", str(steps), *work)


def jobs(num_repetitions: int) -> Iterator[LinkJob]:
    """Yield all jobs, every case and layout once before any a second time; `HEALTHY` ones three times as often."""
    for repetition in range(num_repetitions):
        for num_hosts, num_leaves in SIZES:
            for layout in LAYOUTS:
                if (layout == "pp" and num_hosts > MAX_STAGES) or (layout == "dp x pp" and num_leaves == 1):
                    continue
                for case in CASES if num_leaves > 1 else HEALTHY:
                    times = 3 if case in HEALTHY else 1
                    for number in range(repetition * times, (repetition + 1) * times):
                        place = {"num_hosts": num_hosts, "num_leaves": num_leaves}
                        yield LinkJob(case=case, layout=layout, repetition=number, **place)


def main() -> None:
    sizes = [size for size, _ in SIZES]
    args = command_line(__doc__, hosts=sizes, layouts=LAYOUTS, cases=CASES, page=_OF_PAGE)
    if args.command == "judge":
        judge_all(args.folder, _OF_PAGE[args.page], page=args.page if args.write else "")
        return
    chosen = [job for job in jobs(args.repetitions) if job.num_hosts == args.hosts]
    chosen = [job for job in chosen if job.layout in (args.layouts or LAYOUTS) and job.case in (args.cases or CASES)]
    run_jobs(chosen, args.folder, minutes=args.minutes)


def run_jobs(chosen: Sequence[LinkJob], folder: Path, *, minutes: float) -> None:
    """Run the jobs that have not run yet, one after the other in one lab."""
    deadline_s = time.monotonic() + 60 * minutes
    todo = [job for job in chosen if not (folder / job.name / "job.json").exists()]
    if not todo:
        return
    size = {"hosts": todo[0].num_hosts, "leaves": todo[0].num_leaves}
    config = LabConfig(name=f"links{size['hosts']}", link=RATE, uplink=RATE, tmp_size="32MiB", **size)
    with Lab.up(config) as lab, TrainingHosts(lab) as hosts:
        for job in todo:
            if time.monotonic() > deadline_s:
                break
            run_job(lab, hosts, job, folder / job.name)


def run_job(lab: Lab, hosts: TrainingHosts, job: LinkJob, folder: Path) -> None:
    """Run one job with its fault, and write down what was true.

    Its hosts outweigh all other work of the machine, or share it as hosts do where that is the case.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weigh_hosts(lab.files.name, len(lab.plan.hosts) if job.num_busy else WEIGHT_OF_HOSTS)
    begin_s = time.monotonic()
    fault_ids = [] if job.is_late else [inject(lab, *words) for words in job.faults]
    others = tuple(host.name for host in lab.plan.hosts if host.name not in job.hosts)
    try:
        with busy(job.num_busy):
            hosts.start(folder, job.training(job.hosts), _SETTINGS, job.hosts)
            if others:
                hosts.start(folder / "neighbour", job.training(others), _SETTINGS, others)
            if job.is_late and _is_traced(folder, job.num_hosts):
                fault_ids = [inject(lab, *words) for words in job.faults]
            codes = hosts.wait()
    finally:
        for fault_id in fault_ids:
            with suppress(HpcpaceError):  # those with a duration may be over
                inject(lab, "undo", fault_id)
    took_s = time.monotonic() - begin_s
    truth = {"codes": codes, "seconds": round(took_s, 1), "load": os.getloadavg()[0], "time": time.time()}
    write_json(folder / "job.json", truth)
    print(f"{job.name}: {json.dumps(truth)}", flush=True)


def _is_traced(folder: Path, num_ranks: int) -> bool:
    """Wait until all ranks have begun to write their traces, and return whether they have in time."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if len(list((folder / "run").glob("attempt-0/trace/rank-*.h5"))) == num_ranks:
            return True
        time.sleep(0.2)
    return False


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a report said of a job.

    Attributes:
        is_right: it names what is right, or a set with it, and no other: of faults of links among links, else among
            ranks and hosts as well; where nothing is right it names nobody.
        is_alone: one link alone, or one rank or host.
        named: varieties and what they name, and clocks that jumped.
        headline: of its verdict.
    """

    job: LinkJob
    load: float
    is_right: bool = False
    is_alone: bool = False
    named: tuple[str, ...] = ()
    headline: str


def judge_all(folder: Path, cases: Sequence[str], *, page: str) -> None:
    """Judge all jobs of some cases that have run, print those that went wrong, and write the page, if it has a name."""
    judged = []
    for job in jobs(_MAX_REPETITIONS):
        truth = folder / job.name / "job.json"
        if job.case not in cases or not truth.exists():
            continue
        facts = json.loads(truth.read_text())
        if any(facts["codes"]):
            print(f"left out: {job.name} ended with {facts['codes']}")
            continue
        judged.append(judged_job(job, folder / job.name, float(facts["load"])))
        if not judged[-1].is_right:
            print(f"wrong: {job.name} ({', '.join(job.right)}): {judged[-1].named} {judged[-1].headline}", flush=True)
    counts = counts_table(judged, cases)
    print(counts)
    if page:
        loads = sorted(one.load for one in judged) or [0.0]
        num_named = sum(bool(one.named) for one in judged if one.job.case in ("busy core", "memory thief"))
        write_page(page, judged=judged, loads=loads, loads_of=_loads_of, counts=counts, num_named=num_named)


def _loads_of(judged: Sequence[Judged], case: str) -> str:
    """Return the loads of the machine at the end of the jobs of a case."""
    loads = sorted(one.load for one in judged if one.job.case == case) or [0.0]
    return f"{loads[0]:.0f} to {loads[-1]:.0f}, median {loads[len(loads) // 2]:.0f}"


def judged_job(job: LinkJob, folder: Path, load: float) -> Judged:
    """Report a run and judge it."""
    run = RunDirectory(folder / "run")
    try:
        attempt = run.last_attempt()
        traces = read_attempt(attempt, tables=TABLES_USED)
        summary = analyze_traces(run, attempt, traces, Selection(), Config()).summary
    except HpcpaceError as error:
        return Judged(job=job, load=load, headline=f"error: {error}")
    verdict, is_of_host = summary.verdict, job.case in OF_HOSTS
    sets = [
        (finding.variety or finding.mode, culprit.aliases)
        for finding in verdict.findings
        for culprit in finding.culprits
        if culprit.kind == "link" or job.case in NOTHING or is_of_host
    ]
    is_right = all(set(ids) & set(job.right) for _, ids in sets)
    is_right &= job.case in MAY_BE_SILENT or bool(sets) == bool(job.right)
    is_right &= job.case != "two slow" or set(job.right) <= {name for _, ids in sets for name in ids}
    lines = "; ".join([verdict.headline, *(verdict.also if is_of_host else ())])
    is_right &= all(word in lines for word in job.wanted)
    jumps = [(jump.hosts, jump.size_ns / NS_PER_S) for jump in summary.clocks.jumps]
    if job.case == "clock step":
        step_s = float(job.step)
        is_right &= [hosts for hosts, _ in jumps] == [(job.host,)] and abs(jumps[0][1] - step_s) <= _STEP_ERROR_S
    else:
        is_right &= not jumps
    return Judged(
        job=job,
        load=load,
        is_right=is_right,
        is_alone=is_right and all(len(ids) == 1 or (is_of_host and set(ids) <= set(job.right)) for _, ids in sets),
        named=(
            *(f"{variety}: {', '.join(alias.removeprefix('link ') for alias in ids)}" for variety, ids in sets),
            *(f"clock of {' or '.join(hosts)}: {1000 * size_s:+.1f} ms" for hosts, size_s in jumps),
        ),
        headline=verdict.headline,
    )


def counts_table(judged: Sequence[Judged], cases: Sequence[str]) -> str:
    """Return how many jobs of each of some cases were right, by layout."""
    by_place: dict[tuple[str, str, int], list[Judged]] = defaultdict(list)
    for one in judged:
        by_place[one.job.case, one.job.layout, one.job.num_hosts].append(one)
    run = {place[1:] for place in by_place}
    columns = [(layout, size) for size, _ in SIZES for layout in LAYOUTS if (layout, size) in run]
    rows = []
    for case in cases:
        cells = [by_place[case, layout, size] for layout, size in columns]
        every = [one for cell in cells for one in cell]
        right = share_of(sum(one.is_right for one in every), len(every)) if every else None
        alone = "" if case in NOTHING else f" ({sum(one.is_alone for one in every)} alone)"
        total = f"{counted(one.is_right for one in every)}{alone}" if every else "not run"
        interval = f"{right.low:.0%} to {right.high:.0%}" if right else ""
        rows.append([case, *(counted(one.is_right for one in cell) if cell else "" for cell in cells), total, interval])
    return table(("case", *(f"{layout}, {size} hosts" for layout, size in columns), "all", "95 %"), rows)


if __name__ == "__main__":
    main()
