"""The settings of a session: what it records, what it compares and measures, and what it does about a hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from hpcpace.core.config import Section, choice, number
from hpcpace.core.detail import DETAILS, parse_steps
from hpcpace.core.errors import ConfigError
from hpcpace.core.records import dataclass

SWITCH_SIGNALS = ("none", "USR1", "USR2")
PROBE_TIMES = ("none", "start", "end")
ON_HANG = ("report", "stop", "off")
ON_HANG_VARIABLE = "HPCPACE_HANG_ON_HANG"
"""By this variable, `hpcpace trace` hands on what to do about a hang."""
SUMMARY_VARIABLE = "HPCPACE_TRACE_SUMMARY"
"""By this variable, a batch job leaves out the summary at the end of a run: its report follows."""
METRICS_RANKS = ("first", "node")
_LEAVES_WITHIN_S = 1.0
"""timing: ranks that end torch's group after the same last operation do so within less."""
_LEAVES_TOGETHER_WITHIN_S = 10.0
"""timing: ranks whose script says that all of them leave; where one has died, a job is to wait no longer at its end."""


@dataclass(frozen=True, kw_only=True)
class TraceConfig(Section, section="trace"):
    """What is recorded, and how often it reaches the disk."""

    enabled: bool = True
    """Whether anything is recorded."""
    trace_dir: Path | None = None
    """Folder for traces while the job runs, such as a node-local disk; auto: the first usable disk of the node; they
    move into the run at the end."""
    flush_interval_s: float = number(1.0, 0.01)
    """Seconds between two flushes; a killed rank loses at most the rows since its last one."""
    max_rows: int = number(1_000_000, 100_000)
    """Rows kept in memory while the disk takes none; further rows are dropped and counted."""
    detail_steps: str = ""
    """Steps to record in detail, like 100:200 or 100:200,5000:5100; of all others only their times, and the counters.
    By default all."""
    detail: str = choice("full", DETAILS)
    """What is recorded of these steps: full, collectives (no phases), or steps (no collectives either)."""
    keep_last: int = number(0, 0)
    """Last steps to keep at least; those before them are dropped from the trace while the job runs. 0: all are kept."""
    switch_signal: str = choice("none", SWITCH_SIGNALS)
    """none, USR1 or USR2: the signal that switches detail off and on again, if the program does not handle it."""
    counters: bool = True
    """Whether network and host counters, and those of connections, are read once a second."""
    flows: int = number(64, 0, 1024)
    """TCP connections to other hosts that are recorded one by one, those with the most bytes; the others are summed up.
    0: nothing is recorded of connections."""
    compiled: bool = True
    """Whether the compiled layer observes collectives, where it was built; if false, the layer in Python does."""
    error_text: bool = True
    """Whether the message of an exception that ends a rank is recorded, without secrets, the files, functions and lines
    that it came through, and what the rank wrote to stderr last, if that is a file; if false, only its type's name."""
    snapshot: bool = True
    """Whether a session saves the audit's snapshot of each host and its ranks when it starts."""
    start_timeout_s: float = number(20.0, 0.1)
    """Seconds that a rank waits for the others to enter a session, and again for them to agree on its settings; after
    that, nothing is recorded."""
    copy_timeout_s: float = number(300.0, 1)
    """Seconds that copying a trace from trace_dir into the run may take at the end; then it stays where it is."""
    summary: bool = True
    """Whether rank 0 prints the head of the report on stderr when the job ends in order."""
    summary_timeout_s: float = number(10.0, 1, 600)
    """Seconds that this may take from the end of the recording on; rank 0 ends that much later at most."""

    def checks(self) -> Iterator[Callable[[], None]]:
        """Yield the checks of choices and bounds, and that of the ranges of steps."""
        yield from super().checks()
        yield self._check_steps

    def _check_steps(self) -> None:
        try:
            parse_steps(self.detail_steps)
        except ValueError as error:
            raise ConfigError(f"trace.detail_steps: {error}") from error


@dataclass(frozen=True, kw_only=True)
class HangConfig(Section, section="hang"):
    """When a step lasts too long, and what a session does then."""

    on_hang: str = choice("report", ON_HANG)
    """report: write what each rank does and where its threads are, and say so; stop: also end the job with exit code 4
    if nothing has moved after twice the time; off: do not watch."""
    factor: float = number(30.0, 2)
    """How many times the usual step (the median of recent ones) a step may last."""
    least_s: float = number(60.0, 1)
    """Seconds that any step may last, however short steps usually are."""
    first_step_s: float = number(120.0, 1)
    """Seconds that torch's process group and each of the first steps may take; stop waits ten times as long there, and
    in the first checkpoint or evaluation."""


@dataclass(frozen=True, kw_only=True)
class ClockConfig(Section, section="clock"):
    """How the clocks of the hosts are compared."""

    enabled: bool = True
    """Whether clocks are compared; without it, times of different hosts cannot be compared either."""
    interval_s: float = number(30.0, 0.1)
    """Seconds between two comparisons."""
    num_pings: int = number(20, 1)
    """Round trips per measurement; the shortest counts."""
    timeout_s: float = number(30.0, 0.1)
    """Seconds after which a comparison is given up; the job goes on."""

    def leave_timeout_s(self, *, is_meant: bool) -> float:
        """Return for how long a rank that leaves waits for the others.

        Args:
            is_meant: whether a script says that all leave there. Where it only ends torch's group, another rank may
                wait for what this one does next.
        """
        return min(self.timeout_s, _LEAVES_TOGETHER_WITHIN_S if is_meant else _LEAVES_WITHIN_S)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section, section="metrics"):
    """What a job reports to the centre."""

    prometheus: str | None = None
    """File into which a rank writes metrics while the job runs, like /var/lib/node_exporter/hpcpace-{jobid}.prom;
    {jobid}, {step}, {node} and {rank} are replaced. By default none."""
    ranks: str = choice("first", METRICS_RANKS)
    """first or node: whether rank 0 alone writes metrics, or the first rank of each node."""
    interval_s: float = number(15.0, 1)
    """Seconds between two writes of the metrics."""
    job_comment: bool = False
    """Whether rank 0 adds a line on the run to the comment of the Slurm job at its end."""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(Section, section="probe"):
    """A probe inside a job; docs/probe.md explains it."""

    when: str = choice("none", PROBE_TIMES)
    """none, start or end: whether a session probes the job's hosts before its first step, or after its last one. The
    variable HPCPACE_PROBE sets it, too."""
    time_s: float = number(10.0, 1, 3600)
    """Seconds that the probe measures."""
    timeout_s: float = number(5.0, 1, 600)
    """Seconds after which it gives up on a host that does not answer."""
