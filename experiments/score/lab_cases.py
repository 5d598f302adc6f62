"""Training jobs with one fault each for the lab, and the correct findings.

Each rank's computation is mostly a sleep of known length: as on a GPU, it takes time and no cores, of which the lab's
hosts have fewer than ranks. The truth is what was injected, or what the lab's log of truth says; never what a run
holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.pages import read_toml
from experiments.score.scenario import Scenario
from experiments.score.timeline import same_traffic
from experiments.score.truth import Truth, same_names
from hpcpace.diagnosis.summary import Mode
from hpcpace.train.inject import parse_fault

NUM_RANKS = 4
HOSTS = tuple(f"n{number + 1}" for number in range(NUM_RANKS))
"""Of one rank each, in this order; two on a leaf switch."""
COMPUTE_MS = 150
"""What every rank sleeps in a step."""
JOB = "JOB"
"""Stands for the job's number in the words of a fault."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job, healthy or with one fault.

    Attributes:
        name: for the command line.
        title: what happens in it.
        modes: those that are right, the expected one first.
        stages: of the pipeline; 1 is data parallelism alone.
        inject: faults of `hpcpace train --inject`.
        fault: words of `hpcpace lab fault`, where the fault is the lab's.
        is_early: whether the lab's fault begins before the job does, and not with its ranks in the middle of it.
        is_cancelled: whether the job never ends, and is cancelled a while after the fault.
        is_real: whether the computation is only the model's own, not a sleep.
        num_steps: to train.
        num_before: steps before a fault that is not early; at least as many as show that the job runs.
    """

    name: str
    title: str
    modes: tuple[Mode, ...]
    stages: int = 1
    inject: tuple[str, ...] = ()
    fault: tuple[str, ...] = ()
    is_early: bool = False
    is_cancelled: bool = False
    is_real: bool = False
    num_steps: int = 120
    num_before: int = 10

    @property
    def training(self) -> tuple[str, ...]:
        """Options of the training."""
        sleeps = () if self.is_real else tuple(f"host={host},phase=forward,size={COMPUTE_MS}ms" for host in HOSTS)
        mesh = f"dp={NUM_RANKS // self.stages},pp={self.stages}"
        return ("--mesh", mesh, *(word for spec in (*sleeps, *self.inject) for word in ("--inject", spec)))

    @property
    def scenario(self) -> Scenario:
        """Where the ranks are, for the judge."""
        return Scenario(
            seed=0,
            num_ranks=NUM_RANKS,
            ranks_per_node=1,
            nodes_per_leaf=2,
            num_stages=self.stages,
            num_steps=self.num_steps,
        )


def truth_of_case(case: Case, events: Sequence[Mapping[str, Any]]) -> Truth:
    """Return what is right to say about a run of a case.

    Args:
        case: what was run.
        events: the log of truth, from before the job until after it.

    Raises:
        ValueError: the case has a fault of the lab, and the log does not say that it happened.
    """
    ranks = _injected_ranks(case)
    links: tuple[str, ...] = ()
    if case.fault:
        begun = [event for event in events if event["event"] == "fault-begin" and event["kind"] == case.fault[0]]
        if not begun:
            raise ValueError(f"the log of truth has no {case.fault[0]}")
        settings = begun[-1]["settings"]
        if "rank" in settings:
            ranks = (settings["rank"],)
        elif "host" in settings:
            ranks = (HOSTS.index(settings["host"]),)
        elif case.stages == 1:
            links = (settings["link"],)  # of the connections of one ring, those between other hosts are fast
        else:
            links = same_traffic(case.scenario, settings["link"])
    tolerated = ("phase data",) if Mode.INPUT in case.modes else ()
    culprits = tuple(f"link {link}" for link in links) or (same_names(case.scenario, ranks) if ranks else ())
    return Truth(
        modes=tuple(map(str, case.modes)),
        varieties=(),
        culprits=culprits,
        ranks=ranks,
        tolerated=tolerated,
        is_identifiable=len(links) <= 1,
        effect=None,
        fault_share=0.0,
        noise_share=0.0,
    )


def _injected_ranks(case: Case) -> tuple[int, ...]:
    """Return the ranks that were slowed, unless all were, by faults that recur always or at fixed steps."""
    faults = [parse_fault(spec) for spec in case.inject]
    slowed = {fault.rank if fault.host is None else HOSTS.index(fault.host) for fault in faults}
    return () if len(slowed) == NUM_RANKS else tuple(sorted(rank for rank in slowed if rank is not None))


def _case(row: dict[str, Any]) -> Case:
    """Return the case of a row of lab_cases.toml."""
    specs = row.pop("inject", ())
    inject = [spec.replace("*", host) for spec in specs for host in (HOSTS if "host=*" in spec else ("",))]
    modes = tuple(map(Mode, row.pop("modes")))
    return Case(modes=modes, inject=tuple(inject), fault=tuple(row.pop("fault", ())), **row)


CASES = tuple(map(_case, read_toml(__file__)["case"]))
