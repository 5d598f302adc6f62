"""The jobs of the scaling study and of the pacing study.

The scaling study runs one workload over nodes, oversubscription and placement, plus one run for each failure mode.
Every run is a separate job, traced and reported. A failure mode is injected into the training, or by the lab into its
network. The plan includes the mode that the report should find. The pacing study has no plan on disk: the name of a
run says what it is, and a run with a result is done.

All runs of one layout may be done one after the other, in the ranks of one job: loading Python and torch takes longer
than a short run, so they are loaded once. Each run is what `hpcpace train` would have left: its own process group,
traces, result and peak memory.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcpace.core.codec import decoder, json_object, read_json
from hpcpace.core.config import NO_POLICY, Config
from hpcpace.core.environment import RankInfo, host_identity, process_environ, rank_info, set_environ_default
from hpcpace.core.errors import UsageError, WorldError
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import RunDirectory
from hpcpace.core.settings import REQUESTED, load_config
from hpcpace.core.text import format_count, format_duration
from hpcpace.diagnosis.summary import Mode
from hpcpace.pace.settings import POLICIES
from hpcpace.studies.setups import Layout, PlanFolder, StudyFolder, StudyRun, planned
from hpcpace.train.data import TrainingData, open_data
from hpcpace.train.plan import TrainPlan, threads_of_rank
from hpcpace.train.settings import TrainConfig
from hpcpace.world.mpi import abort_guard, locate_ranks, mpi_world
from hpcpace.world.settings import WorldConfig

SCHEMA = "hpcpace-scaling-study/1"
_MAX_SUMMARY_BYTES = 1 << 26
PLACEMENTS = ("block", "cyclic")
HEALTHY = "none"
FAULTS: Mapping[str, tuple[Mode, ...]] = {
    "straggler": (Mode.STRAGGLER,),
    "slow-stage": (Mode.IMBALANCE,),
    "jitter": (Mode.AMPLIFICATION,),
    "periodic": (Mode.RUNTIME,),
    "slow-data": (Mode.INPUT,),
    "slow-link": (Mode.CONTENTION, Mode.COMMUNICATION),
    "traffic": (Mode.CONTENTION, Mode.COMMUNICATION),
}
"""Each fault with the modes that are correct findings."""
OF_LAB = ("slow-link", "traffic")
"""Faults of the network, which only a lab can inject."""
_LINK_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class ScalingRun:
    """One job.

    Attributes:
        nodes, ranks_per_node: of the job.
        oversubscription: capacity of a leaf's hosts over that of its uplink.
        placement: block or cyclic, of ranks over nodes, as srun's --distribution has it.
        fault: one of `FAULTS`, or none.
        step_ms: about what a rank computes in a step; faults are shares of it.
        is_emulated: whether ranks sleep for that long in each step, because their cores are not theirs.
        steps: to train.
    """

    nodes: int
    ranks_per_node: int
    oversubscription: float = 1.0
    placement: str = "block"
    fault: str = HEALTHY
    step_ms: int = 150
    is_emulated: bool = False
    steps: int = 120

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise UsageError(f"placement {self.placement!r}: choose one of {', '.join(PLACEMENTS)}")
        if self.fault not in (HEALTHY, *FAULTS):
            raise UsageError(f"fault {self.fault!r}: choose one of {', '.join(FAULTS)}")
        if self.oversubscription < 1:
            raise UsageError(f"oversubscription {self.oversubscription}: give at least 1")

    @property
    def name(self) -> str:
        """The name of its run directory, like `n4x2-o4-cyclic` or `n4x2-o1-block-jitter`."""
        fault = "" if self.fault == HEALTHY else f"-{self.fault}"
        return f"n{self.nodes}x{self.ranks_per_node}-o{self.oversubscription:g}-{self.placement}{fault}"

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def needs_two_stages(self) -> bool:
        """Whether its fault shows only in a pipeline, or only by comparison with groups that it does not affect."""
        return self.fault in ("slow-stage", "slow-link") and self.num_ranks % 2 == 0 and self.num_ranks > 2

    def training(self) -> list[str]:
        """Return the options of `hpcpace train gpt2`."""
        mesh = f"dp={self.num_ranks // 2},pp=2" if self.needs_two_stages else f"dp={self.num_ranks}"
        ranks = range(self.num_ranks)
        specs = [f"rank={rank},phase=forward,size={self.step_ms}ms" for rank in ranks if self.is_emulated]
        match self.fault:
            case "straggler":
                specs.append(f"rank={self.num_ranks - 1},phase=forward,size={self.step_ms // 3}ms")
            case "slow-stage":
                # The rank's place in a pipeline is its number modulo the stages: tp is 1, and pp inside dp.
                specs += [f"rank={rank},phase=forward,size={4 * self.step_ms // 5}ms" for rank in ranks if rank % 2]
            case "jitter":
                size = f"size={2 * self.step_ms // 3}ms"
                specs += [f"rank={rank},phase=forward,{size},kind=random,p=0.1" for rank in ranks]
            case "periodic":
                size = f"size={2 * self.step_ms // 3}ms"
                specs.append(f"rank={self.num_ranks - 1},phase=forward,{size},kind=periodic,period=10")
            case "slow-data":
                specs += [f"rank={rank},phase=data,size={self.step_ms // 4}ms" for rank in ranks]
        injected = [word for spec in specs for word in ("--inject", spec)]
        return ["--mesh", mesh, "--steps", str(self.steps), *injected]

    def lab_faults(self, status: Mapping[str, Any]) -> list[list[str]]:
        """Return the words of `hpcpace lab fault` that give a lab the network of this run.

        Args:
            status: of the lab, as `hpcpace lab status --json` prints it.

        Raises:
            UsageError: the lab's uplinks are already more oversubscribed than that, or it has too few hosts.
        """
        hosts = [host["name"] for host in status["hosts"]]
        if len(hosts) < self.nodes:
            raise UsageError(f"{self.name}: the lab has {len(hosts)} hosts: boot it with --hosts {self.nodes}")
        rates = {link["name"]: link["rate_bps"] for link in status["links"]}
        words = []
        for leaf in dict.fromkeys(host["leaf"] for host in status["hosts"]):
            capacity = sum(rates[host["name"]] for host in status["hosts"] if host["leaf"] == leaf)
            wanted = round(capacity / self.oversubscription)
            if wanted > rates[leaf]:
                raise UsageError(
                    f"{self.name}: the uplink of {leaf} has {rates[leaf] / 1e6:g} Mb/s, but the run needs "
                    f"{wanted / 1e6:g}: boot the lab with a higher --uplink"
                )
            if wanted < rates[leaf]:
                words.append(["slow-link", leaf, "--rate", f"{wanted}bit"])
        last = hosts[self.nodes - 1]
        if self.fault == "slow-link":
            words.append(["slow-link", last, "--rate", f"{round(rates[last] * _LINK_SHARE)}bit"])
        if self.fault == "traffic":
            words.append(["traffic", hosts[0], last, "--streams", "4"])
        return words


def scaling_runs(
    *,
    nodes: Sequence[int],
    ranks_per_node: int,
    oversubscriptions: Sequence[float] = (1.0,),
    placements: Sequence[str] = PLACEMENTS,
    faults: Sequence[str] = (),
    step_ms: int = 150,
    is_emulated: bool = False,
    steps: int = 120,
) -> list[ScalingRun]:
    """Return the runs of a study: the sweep, then each fault on the most nodes.

    With one node, or one rank per node, there is nothing to place: these run once, as block.
    """
    largest = ScalingRun(
        nodes=max(nodes),
        ranks_per_node=ranks_per_node,
        oversubscription=oversubscriptions[0],
        placement=placements[0],
        step_ms=step_ms,
        is_emulated=is_emulated,
        steps=steps,
    )
    sweep = [
        dataclasses.replace(largest, nodes=count, oversubscription=over, placement=placement)
        for count in nodes
        for over in (oversubscriptions if count > 1 else oversubscriptions[:1])
        for placement in (placements if count > 1 and ranks_per_node > 1 else placements[:1])
    ]
    return sweep + [dataclasses.replace(largest, fault=fault) for fault in faults]


class ScalingFolder(PlanFolder):
    """A scaling study."""

    schema, kind, script = SCHEMA, "a scaling study", ": plan one with sbatch/scaling_study.sh"

    def write_plan(self, runs: Sequence[ScalingRun]) -> bool:
        """Write the plan and keep the runs of an earlier one; return whether it has changed.

        Raises:
            UsageError: the folder cannot be written.
        """
        known = self.runs() if self.plan_json.exists() else []
        merged = list({run.name: run for run in (*known, *runs)}.values())
        if merged == known:
            return False
        self._write({"study": "scaling", "runs": [{"name": run.name, **dataclasses.asdict(run)} for run in merged]})
        return True

    def runs(self) -> list[ScalingRun]:
        """Return the runs of the plan.

        Raises:
            UsageError: there is no plan, or it cannot be read.
        """
        return self._planned(decoder(list[ScalingRun]))

    def run_named(self, name: str) -> ScalingRun:
        """Return a run of the plan.

        Raises:
            UsageError: it has no such run.
        """
        for run in self.runs():
            if run.name == name:
                return run
        raise UsageError(f"{self.plan_json} has no run {name!r}: name one of its runs")

    def summary(self, run: ScalingRun) -> dict[str, Any] | None:
        """Return the summary of a run's report, None if the run is not done."""
        folder = self.run_dir(run)
        return read_json(folder, folder.summary_json.name, json_object, [], most_bytes=_MAX_SUMMARY_BYTES)

    def open_runs(self) -> list[ScalingRun]:
        """Return the runs without a report."""
        return [run for run in self.runs() if self.summary(run) is None]


@dataclass(frozen=True, kw_only=True)
class ScalingResult:
    """What the report of a run says, compared with what was injected.

    Attributes:
        run: the job.
        samples_per_s, step_ms, cv: of its steps; None if the report does not have them.
        efficiency: throughput per node relative to the smallest healthy run.
        mode, headline: of the report.
        is_found: whether a correct mode is among its findings; None for runs without a fault.
    """

    run: ScalingRun
    samples_per_s: float | None
    step_ms: float | None
    cv: float | None
    efficiency: float | None
    mode: str
    headline: str
    is_found: bool | None


def results(study: ScalingFolder) -> list[ScalingResult]:
    """Return the results of all runs that are done, in the order of the plan."""
    done = [(run, summary) for run in study.runs() if (summary := study.summary(run)) is not None]
    healthy = sorted((run.nodes, _rate(summary) or 0.0) for run, summary in done if run.fault == HEALTHY)
    base = healthy[0][1] / healthy[0][0] if healthy else 0.0
    return [_result(run, summary, base) for run, summary in done]


def _result(run: ScalingRun, summary: Mapping[str, Any], base: float) -> ScalingResult:
    throughput, verdict, rate = summary["throughput"], summary["verdict"], _rate(summary)
    modes = {verdict["mode"], *(finding["mode"] for finding in verdict["findings"])}
    return ScalingResult(
        run=run,
        samples_per_s=rate,
        step_ms=throughput["p50_ns"] / 1e6,
        cv=throughput["cv"],
        efficiency=rate / run.nodes / base if rate and base else None,
        mode=verdict["mode"],
        headline=verdict["headline"],
        is_found=None if run.fault == HEALTHY else bool(modes & set(FAULTS[run.fault])),
    )


def _rate(summary: Mapping[str, Any]) -> float | None:
    rate: float | None = summary["throughput"]["samples_per_s"]
    return rate


DEFAULT_POLICIES = (NO_POLICY, "published-window", "published-spread", "slack", "auto")
_ALWAYS_ON_TRIAL = ("auto", "coschedule")


@dataclass(frozen=True, kw_only=True)
class PacingJob:
    """One job.

    Attributes:
        nodes, ranks_per_node: of the job.
        policy: of `hpcpace train --pace`, or none for a baseline.
        repetition: from 0.
        steps: to train.
        has_trial: whether the policy has to prove itself inside the job; otherwise it is on from the start.
    """

    nodes: int
    ranks_per_node: int
    policy: str
    repetition: int
    steps: int
    has_trial: bool

    @property
    def name(self) -> str:
        """The name of its run directory, like `n4x2-slack-0`."""
        return f"n{self.nodes}x{self.ranks_per_node}-{self.policy}-{self.repetition}"

    def is_done(self, study: Path) -> bool:
        """Return whether one of its attempts has left a result."""
        return any(attempt.result_json.exists() for attempt in RunDirectory(study / "runs" / self.name).attempts())


def pacing_jobs(
    *,
    nodes: Sequence[int],
    ranks_per_node: int,
    policies: Sequence[str] = DEFAULT_POLICIES,
    repetitions: int,
    steps: int,
    with_trial: bool = False,
) -> list[PacingJob]:
    """Return the jobs of a study in the order in which they run.

    Each repetition runs every policy, and starts with another one: drift over hours then affects all policies alike.

    Raises:
        UsageError: there is no such policy.
    """
    unknown = [policy for policy in policies if policy not in (NO_POLICY, *POLICIES)]
    if unknown:
        raise UsageError(f"policy {unknown[0]!r}: choose from {NO_POLICY}, {', '.join(POLICIES)}")
    return [
        PacingJob(
            nodes=count,
            ranks_per_node=ranks_per_node,
            policy=policy,
            repetition=repetition,
            steps=steps,
            has_trial=with_trial or policy in _ALWAYS_ON_TRIAL,
        )
        for repetition in range(repetitions)
        for count in nodes
        for policy in (*policies[repetition % len(policies) :], *policies[: repetition % len(policies)])
    ]


_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Linux, Documentation/filesystems/proc.rst: resets VmHWM of the process to its present size."""


def run_series(study: StudyFolder, layout: Layout) -> int:
    """Run all open runs of a layout and return 0, or 1 if a signal ended it early.

    Collective: every rank of the job calls this, in its main thread, before torch is loaded.

    Args:
        study: with a plan.
        layout: that of the job.

    Raises:
        SystemExit: a run failed, or the job has another layout; the study goes on with the next job.
    """
    environ = process_environ()
    info = rank_info(environ)
    with abort_guard(None, info, errors_alike=True):
        config = load_config(environ=environ, requested=REQUESTED)
        comm = mpi_world(info, timeout_s=config.of(WorldConfig).start_timeout_s)
    with abort_guard(comm, info):
        if comm is not None:
            info, _ = locate_ranks(info, comm, host_identity())
        _check_layout(info, layout)
        set_environ_default("OMP_NUM_THREADS", str(threads_of_rank(max(info.local_size, 1))))
        return _Series(study, config, info, comm).run(layout)


def _check_layout(info: RankInfo, layout: Layout) -> None:
    """Refuse a job whose servers or ranks differ from the layout."""
    if info.world_size == 1 and layout.num_ranks == 1:
        return
    found = Layout(servers=info.num_nodes, ranks_per_server=info.local_size)
    if found != layout or info.world_size != layout.num_ranks:
        raise WorldError(
            f"{info.world_size} ranks on {info.num_nodes} hosts are not layout {layout}: give "
            f"--nodes {layout.servers} --ntasks-per-node {layout.ranks_per_server}"
        )


class _Series:
    """The runs of one job and their progress."""

    def __init__(self, study: StudyFolder, config: Config, info: RankInfo, comm: Any) -> None:
        self._study, self._config, self._info, self._comm = study, config, info, comm
        self._data: dict[tuple[str, int, int], TrainingData] = {}
        self._begin_ns = time.monotonic_ns()
        self._can_reset = True

    def run(self, layout: Layout) -> int:
        """Run what is open when this begins; rank 0 decides which runs."""
        from hpcpace.train.loop import train

        todo = self._study.open_runs(layout) if self._info.rank == 0 else None
        total = len(self._study.runs()) if self._info.rank == 0 else 0
        if self._comm is not None:
            todo = self._comm.bcast(todo)
        assert todo is not None
        for number, run in enumerate(todo, start=1):
            self._reset_peak_memory()
            result = train(self._job(run))
            if result.stopped_by:
                return 1
            num_open = len(self._study.open_runs()) if self._info.rank == 0 else 0
            rate = f"{format_count(result.samples_per_s)} {result.samples_unit}/s"
            self._tell(f"[{total - num_open}/{total}] {run.name}: {rate}; {self._left(number, len(todo), layout)}")
        return 0

    def _job(self, run: StudyRun) -> Any:
        from hpcpace.train.loop import TrainJob

        plan = planned(run.setup, self._config.of(TrainConfig))
        return TrainJob(
            plan=plan,
            config=self._config.updated(train=vars(plan.settings), trace={"summary": False}),
            info=self._info,
            comm=self._comm,
            data=self._data_of(plan),
            run_dir=self._study.run_dir(run).path,
            progress="off",
        )

    def _data_of(self, plan: TrainPlan) -> TrainingData:
        """Return the data of a plan, opened once for all runs that read the same."""
        key = (plan.settings.model, plan.seq_len, plan.settings.eval_every and plan.settings.batch_size)
        if key not in self._data:
            self._data[key] = open_data(plan)
        return self._data[key]

    def _reset_peak_memory(self) -> None:
        """Reset peak memory, so that the next run measures only its own."""
        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError as error:
            if self._can_reset:
                self._tell(f"warning: peak memory of a process is that of all runs so far: {_CLEAR_REFS}: {error}")
            self._can_reset = False

    def _left(self, number: int, total: int, layout: Layout) -> str:
        elapsed_ns = time.monotonic_ns() - self._begin_ns
        left_ns = elapsed_ns * (total - number) // number
        left = f"about {format_duration(left_ns)} left" if left_ns else "done"
        return f"layout {layout}: {number} of {total}, {left}"

    def _tell(self, line: str) -> None:
        if self._info.rank == 0:
            print(line, file=sys.stderr, flush=True)
