"""The six drills: the fault of each, what must hold afterwards and within which time, and how one is repeated in a lab.

A drill takes a lab and returns the result of one repetition. Limits follow from the settings of Slurm and of the job
that stand here or in the lab's slurm.conf.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from experiments.drills import evidence
from experiments.labs import START_TIMEOUT_S, DrillJob, DrillSite, MisreadStart, RankEnds
from hpcpace.core.errors import HpcpaceError
from hpcpace.core.text import NS_PER_S
from hpcpace.lab.lab import Lab
from hpcpace.lab.plan import KILL_WAIT_S, NODE_TIMEOUT_S
from hpcpace.lab.settings import LabConfig
from hpcpace.trace.tables import RankTrace

WORLD_TIMEOUT_S = 20
"""Seconds after which a collective that does not complete ends the job."""
REPORT_S = 10
"""Seconds that the report may take on a machine with fewer cores than processes."""
TIME_LIMIT_S = 60
"""The shortest that Slurm knows."""
TIME_LIMIT_CHECK_S = 30
"""Slurm compares running jobs with their time limits every 30 s (PERIODIC_TIMEOUT in slurmctld)."""
_PAST_LIMIT_S = 30.0
MAX_MISREAD = 3
"""Starts that may go wrong before a drill fails."""
# A step sleeps this long, such that a fault of some seconds ends before the training does on a fast machine, too.
_PACED = ("--inject", "rank=0,phase=data,size=100ms")
_PACED_STEPS = 240
ENVIRON = {
    "HPCPACE_WORLD_TIMEOUT_S": str(WORLD_TIMEOUT_S),
    "HPCPACE_TRACE_FLUSH_INTERVAL_S": str(evidence.FLUSH_INTERVAL_S),
    "HPCPACE_CLOCK_INTERVAL_S": "5",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one repetition.

    Attributes:
        time_s: what the drill times; None where it did not get so far.
        num_lost: records that the report counts as lost.
        said: what report or log said about it.
        problems: what did not hold; none where the drill is passed.
        num_misread: jobs before it that did not get through MPI_Init, and were started anew.
    """

    time_s: float | None
    num_lost: int | None
    said: str
    problems: tuple[str, ...]
    num_misread: int = 0

    @property
    def passed(self) -> bool:
        """Whether everything held."""
        return not self.problems


@dataclass(frozen=True, kw_only=True)
class Drill:
    """One kind of drill.

    Attributes:
        name: for the command line.
        title: for the document.
        run: does one repetition, without what follows every one of them.
        timed: what `Outcome.time_s` is.
        limit_s: the most that it may be.
        limit: how that follows from settings.
        at_once: repetitions that may run at one time in one lab.
        is_quick: whether it fits into a test tier.
    """

    name: str
    title: str
    run: Callable[[DrillSite, Drill], Outcome]
    timed: str
    limit_s: float
    limit: str
    at_once: int = 1
    is_quick: bool = True


def repetition(site: DrillSite, drill: Drill) -> Outcome:
    """Do one repetition; where it cannot be done or judged, that is its problem."""
    num_misread = 0
    try:
        while True:
            try:
                return dataclasses.replace(drill.run(site, drill), num_misread=num_misread)
            except MisreadStart:
                if (num_misread := num_misread + 1) == MAX_MISREAD:
                    raise
    except (HpcpaceError, OSError) as error:  # the boundary: the other repetitions go on
        site.end_jobs()
        return Outcome(time_s=None, num_lost=None, said="", problems=(str(error),), num_misread=num_misread)


def kill_rank(site: DrillSite, drill: Drill) -> Outcome:
    """End rank 2 by SIGKILL."""
    job = site.submit(environ=ENVIRON)
    ends = job.wait_for_steps()
    (begin_ns,) = site.times_ns(site.fault("kill-rank", str(job.job_id), "2"), "fault-begin")
    return _cut_off(site, drill, job, ends, begin_ns=begin_ns, state="FAILED", victims=[2])


def kill_host(site: DrillSite, drill: Drill) -> Outcome:
    """End host n3 while it runs rank 2, and boot it again afterwards."""
    job = site.submit(environ=ENVIRON)
    ends = job.wait_for_steps()
    fault_id = site.fault("kill-host", "n3")
    (begin_ns,) = site.times_ns(fault_id, "fault-begin")
    try:
        return _cut_off(site, drill, job, ends, begin_ns=begin_ns, state="NODE_FAIL|FAILED", victims=[2])
    finally:
        site.fault("undo", fault_id)


def cancel(site: DrillSite, drill: Drill) -> Outcome:
    """Cancel the job."""
    job = site.submit(environ=ENVIRON)
    ends = job.wait_for_steps()
    begin_ns = time.monotonic_ns()
    site.queue.run("scancel", str(job.job_id))
    return _cut_off(site, drill, job, ends, begin_ns=begin_ns, state="CANCELLED", victims=range(job.num_ranks))


def time_limit(site: DrillSite, drill: Drill) -> Outcome:
    """Let the job run out of its time."""
    job = site.submit(f"--time={TIME_LIMIT_S // 60}", hosts=2, environ=ENVIRON)
    ends = job.wait_for_steps()
    shown = site.queue.run("scontrol", "--oneliner", "show", "job", str(job.job_id)).stdout
    found = re.search(r" EndTime=(\S+)", shown)
    if found is None:
        raise HpcpaceError(f"Slurm names no end of job {job.job_id}: {shown}")
    left_s = datetime.fromisoformat(found[1]).timestamp() - time.time()
    begin_ns = time.monotonic_ns() + round(left_s * NS_PER_S)
    return _cut_off(site, drill, job, ends, begin_ns=begin_ns, state="TIMEOUT", victims=range(job.num_ranks))


def fill_disk(site: DrillSite, drill: Drill) -> Outcome:
    """Fill the disk that rank 1 writes its trace to, and free it while the training goes on."""
    environ = {**ENVIRON, "HPCPACE_TRACE_TRACE_DIR": "/tmp/traces"}
    return _goes_on(site, drill, environ, "fill-disk", "n2", "--duration", "6", warning="No space left on device")


def flap_uplink(site: DrillSite, drill: Drill) -> Outcome:
    """Take the uplink of leaf1 down for 2 s, three times."""
    return _goes_on(site, drill, ENVIRON, "flap-link", "leaf1", "--period", "5", "--down", "2", "--duration", "12")


def _cut_off(
    site: DrillSite, drill: Drill, job: DrillJob, ends: RankEnds, *, begin_ns: int, state: str, victims: Sequence[int]
) -> Outcome:
    """Wait for the end of a job that was cut off at a moment, and judge what it has left."""
    wait_s = max(begin_ns - time.monotonic_ns(), 0) / NS_PER_S + drill.limit_s + _PAST_LIMIT_S
    ended, end_ns = job.wait(wait_s)
    time_s = (end_ns - begin_ns) / NS_PER_S
    traces, summary, log = evidence.read_all(job.run.attempt(0), job.num_ranks), job.summary(), job.log()
    problems = [] if ended.state in state.split("|") else [f"the job is {ended.state}, and should be {state}"]
    if time_s > drill.limit_s:
        problems.append(f"{drill.timed}: {time_s:.1f} s, more than {drill.limit_s:g} s")
    problems += evidence.check_readable(traces, ends.times_ns(), site.clock_offsets_ns(), begin_ns=begin_ns)
    problems += evidence.check_named(log, traces, victims)
    problems += evidence.check_counted(traces, summary)
    if (status := job.report_status()) != 1:
        problems.append(f"hpcpace report ends with status {status}, not with 1")
    lines = evidence.missing_lines(log)
    said = next((line for line in lines if "lost at least" in line), lines[0] if lines else "")
    return Outcome(time_s=time_s, num_lost=evidence.num_counted(summary), said=said, problems=tuple(problems))


def _goes_on(site: DrillSite, drill: Drill, environ: dict[str, str], *fault: str, warning: str = "") -> Outcome:
    """Let a fault come and go while a job trains, wait for its end, and judge that nothing is missing."""
    job = site.submit("--", *_PACED, steps=_PACED_STEPS, environ=environ)
    ends = job.wait_for_steps()
    fault_id = site.fault(*fault)
    ended, _ = job.wait(_PACED_STEPS * 0.5 + WORLD_TIMEOUT_S + REPORT_S)
    (begin_ns,), fault_end_ns = site.times_ns(fault_id, "fault-begin"), site.times_ns(fault_id, "fault-end")
    traces, summary, log = evidence.read_all(job.run.attempt(0), job.num_ranks), job.summary(), job.log()
    problems = [] if ended.state == "COMPLETED" else [f"the job is {ended.state}, and should be COMPLETED"]
    longest_s = evidence.longest_step_ns(traces, begin_ns, site.clock_offsets_ns()) / NS_PER_S
    if longest_s > drill.limit_s:
        problems.append(f"{drill.timed}: {longest_s:.1f} s, more than {drill.limit_s:g} s")
    problems += _outside(traces, begin_ns, fault_end_ns, site)
    problems += evidence.check_readable(traces, ends.times_ns(), site.clock_offsets_ns(), begin_ns=begin_ns)
    problems += evidence.check_whole(traces, _PACED_STEPS)
    problems += evidence.check_counted(traces, summary)
    # 1 and 3 are verdicts on the fault, or that there is no fault; the log would name what is missing.
    if (status := job.report_status()) not in (0, 1, 3) or evidence.REPORT_TITLE in log:
        problems.append(
            f"hpcpace report ends with status {status} and says {evidence.missing_lines(log)}; nothing is missing"
        )
    said = next((line.strip() for line in log.splitlines() if (warning or "Tracing ") in line), "")
    if not said:
        problems.append(f"the log does not say {warning!r}")
    return Outcome(time_s=longest_s, num_lost=evidence.num_counted(summary), said=said, problems=tuple(problems))


def _outside(traces: Sequence[RankTrace], begin_ns: int, end_ns: Sequence[int], site: DrillSite) -> list[str]:
    """Return a problem where a fault was not within the training, or no step ended during it."""
    if not end_ns:
        return ["the fault was not over when the job was"]
    for trace in traces:
        steps_ns = trace.tables["steps"]["end_ns"] - site.clock_offsets_ns()[trace.header.host]
        if not (steps_ns[0] < begin_ns and end_ns[0] < steps_ns[-1]):
            return ["the fault was not within the training; it shows nothing"]
        if not ((steps_ns > begin_ns) & (steps_ns < end_ns[0])).any():
            return [f"rank {trace.header.rank} ended no step during the fault"]
    return []


_TO_THE_END = "to the end of the job"
_ENDS = (KILL_WAIT_S + REPORT_S, f"KillWait {KILL_WAIT_S} s + report {REPORT_S} s")
_GOES_ON = ("longest step from the fault on", WORLD_TIMEOUT_S, f"world.timeout_s {WORLD_TIMEOUT_S} s")


def _drill(name: str, title: str, run: Callable[[DrillSite, Drill], Outcome], *timed: Any, **more: Any) -> Drill:
    what, limit_s, limit = timed
    return Drill(name=name, title=title, run=run, timed=what, limit_s=limit_s, limit=limit, **more)


DRILLS = (
    _drill("kill-rank", "kill -9 of a rank", kill_rank, f"from the signal {_TO_THE_END}", *_ENDS),
    _drill(
        *("kill-host", "death of a host", kill_host, f"from its death {_TO_THE_END}"),
        # slurmctld pings a node three times within SlurmdTimeout, and the count starts at the next ping.
        NODE_TIMEOUT_S * 4 / 3 + _ENDS[0],
        f"4/3 of SlurmdTimeout {NODE_TIMEOUT_S} s + {_ENDS[1]}",
        is_quick=False,
    ),
    _drill("scancel", "scancel", cancel, f"from scancel {_TO_THE_END}", *_ENDS),
    _drill(
        *("time-limit", "time limit", time_limit, f"from the limit {_TO_THE_END}"),
        TIME_LIMIT_CHECK_S + _ENDS[0],
        f"Slurm's check every {TIME_LIMIT_CHECK_S} s + {_ENDS[1]}",
        at_once=3,
        is_quick=False,
    ),
    _drill("fill-disk", "disk full on one host, and freed", fill_disk, *_GOES_ON),
    _drill("flap-uplink", "an uplink that flaps", flap_uplink, *_GOES_ON, is_quick=False),
)


FOLDER = Path("/var/tmp")
"""Each host has its own /tmp; all hosts share this folder."""


def run_drill(drill: Drill, *, repetitions: int, tell: Callable[[str], None]) -> list[Outcome]:
    """Boot a lab, do the repetitions of a drill, and see that a healthy job completes afterwards.

    Where the lab itself fails, that is the problem of all repetitions.
    """
    try:
        return _in_a_lab(drill, repetitions=repetitions, tell=tell)
    except HpcpaceError as error:
        tell(f"{drill.name}: FAILED: {error}")
        return [Outcome(time_s=None, num_lost=None, said="", problems=(str(error),))] * repetitions


def _in_a_lab(drill: Drill, *, repetitions: int, tell: Callable[[str], None]) -> list[Outcome]:
    with (
        tempfile.TemporaryDirectory(prefix="hpcpace-drill-", dir=FOLDER) as folder,
        Lab.up(LabConfig(name=f"drill-{drill.name}", tmp_size="32MiB")) as lab,
    ):
        site = DrillSite(lab, Path(folder))

        def one(number: int) -> Outcome:
            outcome = repetition(site, drill)
            if problem := site.wait_until_well():
                outcome = dataclasses.replace(outcome, problems=(*outcome.problems, problem))
            time_s = "unknown" if outcome.time_s is None else f"{outcome.time_s:.1f} s"
            tell(f"{drill.name} {number + 1}/{repetitions}: {drill.timed} {time_s}, lost {outcome.num_lost}")
            for problem in outcome.problems:
                tell(f"{drill.name} {number + 1}/{repetitions}: FAILED: {problem}")
            return outcome

        with ThreadPoolExecutor(drill.at_once) as pool:
            outcomes = list(pool.map(one, range(repetitions)))
        problem, num_misread = healthy_job(site)
        last = outcomes[-1]
        if problem:
            tell(f"{drill.name}: FAILED: {problem}")
            last = dataclasses.replace(last, problems=(*last.problems, problem))
        outcomes[-1] = dataclasses.replace(last, num_misread=last.num_misread + num_misread)
        return outcomes


def healthy_job(site: DrillSite) -> tuple[str, int]:
    """Run a short job on all hosts; return what is wrong with it, else nothing, and how many did not start before."""
    for num_misread in range(MAX_MISREAD):
        try:
            job = site.submit(steps=6, environ=ENVIRON)
            job.wait_for_start()
            ended, _ = job.wait(START_TIMEOUT_S)
        except MisreadStart:
            continue
        except HpcpaceError as error:
            return f"the job after the drill: {error}", num_misread
        # Six steps are too few for a verdict; what is missing would stand in the log.
        if ended.state == "COMPLETED" and job.report_status() in (0, 1, 3) and evidence.REPORT_TITLE not in job.log():
            return "", num_misread
        return f"the job after the drill is {ended.state}; its log:\n{job.log()}", num_misread
    return f"{MAX_MISREAD} jobs after the drill did not start", MAX_MISREAD
