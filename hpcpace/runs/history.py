"""Changes over weeks of runs: the speed of each job, and the hosts that got slow.

Runs are compared within one job that does the same work in one layout. Hosts are compared within their runs, whatever
the job: how much longer a host's ranks take for their own work than the others of their role. So a host that got slow
shows in all jobs that use it, and a job that got slow on all hosts does not accuse any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from math import expm1, log, log1p
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hpcpace import __version__
from hpcpace.core.errors import UsageError
from hpcpace.core.hostlist import node_name, node_names
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, plural, printable
from hpcpace.metrics import Floats
from hpcpace.metrics.run_difference import (
    NO_SPREAD,
    Duration,
    LevelChange,
    RunSpread,
    SeriesThresholds,
    level_changes,
    run_spread,
)
from hpcpace.runs.history_row import Group, HistoryRow, IndexedRuns, ReadRuns, grouped, without_a_place
from hpcpace.runs.load import CsvRun, read_csv


def rows_of_csv(path: Path) -> list[HistoryRow]:
    """Return the lines of the runs of a CSV file, the oldest first; without dates, in the order of the file.

    Raises:
        UsageError: as of `read_csv`; or only some runs of a series have a date.
    """
    rows = [row_of_csv(run) for run in read_csv(path)]
    for row in without_a_place(rows):
        raise UsageError(
            f"{path}: {printable(row.run)} has no date, and others of job {printable(row.job)!r} have one: "
            "its place among them is not known; give all of them a date, or none"
        )
    return sorted(rows, key=lambda row: row.begun_unix_ns)


def row_of_csv(run: CsvRun) -> HistoryRow:
    """Return the line of a run of a CSV file.

    With a throughput alone, its step is that of one batch, or of one sample where there is no batch, either: such runs
    are a series of their own.
    """
    parts = (
        f"{run.num_ranks} ranks" if run.num_ranks else "",
        plural(run.num_nodes, "node") if run.num_nodes else "",
        "time of a sample" if run.is_per_sample else "",
    )
    return HistoryRow(
        run=run.run if run.run == f"line {run.line}" else f"{run.run} (line {run.line})",
        begun_unix_ns=run.begun_unix_ns,
        job=run.job or "all",
        kind=", ".join(filter(None, parts)),
        samples_per_step=run.batch,
        p50_ns=run.time_ns,
        mean_ns=run.time_ns,
        samples_per_s=run.throughput,
        num_ranks=run.num_ranks,
        num_nodes=len(run.nodes) or run.num_nodes,
        hosts=run.nodes,
    )


SCHEMA = "hpcpace-history/1"
MIN_CHANGE = 0.02
"""Change of speed or own work below which nothing is reported, however certain it is."""
_MIN_ERRORS = 4.0
LASTS_NS = 7 * 86_400 * NS_PER_S
"""Two runs at a new level, this far apart, show that it stays; of fewer runs than a level needs nothing else does."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that changed.

    Attributes:
        kind: `job` of its median step; `long steps` of what its mean step has beyond that, shown only where it lasts;
            or `host`.
        name: of the job, with its layout and work where it has several, or of the host.
        duration: lasting, recent, one-off; `drift` of a series that changed gradually, from its first run to its last;
            of a host, also `chronic` where it was slow from its first runs on. Two runs at the end that agree are
            lasting, too, where they began `LASTS_NS` apart.
        begun_unix_ns, last_unix_ns: first and last run at the new level, or of a drift; 0 where dates are not known.
        run: the first one of these.
        share: change of step time or own work, relative; of a chronic host, against the others.
        mean_share: of the median step of a job, by how much its mean step changed with it; None elsewhere, and
            of a drift.
        before, after: the levels, or those at the begin and the end of a drift: seconds of a median step; mean over
            median step; own work of a host, 1 is usual.
        num_runs, num_before: runs at the new level and before it; of a chronic host, those in which it was slow and
            those in which it was not.
        deviations: size in standard deviations of a run.
        jobs: names of the jobs in which it shows.
        num_jobs: jobs that ran at the new level, or in the later half of a drift, whether it shows in them or not.
        has_enough_runs: whether as many runs show it as a level needs, whenever they began.
        rank_0: of a host whether rank 0, which may have more to do than others, explains it, too: `always` there of a
            chronic one, `gained` or `lost` at the change; else empty.
    """

    kind: str
    name: str
    duration: str
    begun_unix_ns: int
    last_unix_ns: int
    run: str
    share: float
    mean_share: float | None = None
    before: float
    after: float
    num_runs: int
    num_before: int
    deviations: float
    jobs: tuple[str, ...]
    num_jobs: int
    rank_0: str = ""
    has_enough_runs: bool = True


@dataclass(frozen=True, kw_only=True)
class JobRuns(Group):
    """The runs of one job that can be compared, the oldest first; `name` has the kind where the job has several."""

    name: str
    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class History(ReadRuns):
    """What `hpcpace history` found.

    Attributes:
        folder: of the runs, or the CSV file.
        series: by job, layout and work, those with most runs first.
        events: of all jobs and hosts: lasting and recent ones first, the latest first.
        num_hosts: hosts that were compared.
    """

    folder: str
    series: tuple[JobRuns, ...]
    events: tuple[Event, ...]
    num_hosts: int

    @property
    def num_runs(self) -> int:
        """Runs that were used."""
        return sum(len(series.rows) for series in self.series)

    def newest_first(self) -> list[tuple[HistoryRow, JobRuns]]:
        """Return all runs with their series, the newest first."""
        runs = [(row, series) for series in self.series for row in reversed(series.rows)]
        return sorted(runs, key=lambda run: -run[0].begun_unix_ns)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"schema": SCHEMA, "hpcpace_version": __version__, **asdict(self)}


def history(
    folder: str, runs: IndexedRuns, *, job: str = "", host: str = "", limits: SeriesThresholds | None = None
) -> History:
    """Return what changed.

    Args:
        folder: what it is called.
        runs: the runs.
        job: the only job to look at; all if empty.
        host: the only host to look at: its runs alone; all if empty.
        limits: when a series has changed; the defaults if None.
    """
    limits = limits or SeriesThresholds()
    named = _with_node_names(runs.rows)
    if host and not any(host in row.hosts for row in named):
        host = node_name(host)
    rows = [row for row in named if (not job or row.job == job) and (not host or host in row.hosts)]
    series = sorted(_series(rows, limits), key=lambda one: (-len(one.rows), one.name))
    # The series of a host has runs of all jobs, also of those in which no run has a date.
    of_hosts, num_hosts = _host_events([row for row in rows if row.begun_unix_ns] or rows, host, limits)
    events = [*_with_enough(of_hosts, limits), *(event for one in series for event in one.events)]
    return History(
        folder=folder,
        series=tuple(series),
        events=tuple(sorted(events, key=_weight)),
        num_hosts=num_hosts,
        **{one.name: getattr(runs, one.name) for one in fields(ReadRuns)},
    )


def _weight(event: Event) -> tuple[bool, int, str]:
    return event.duration == Duration.ONE_OFF, -event.begun_unix_ns, event.name


def _series(rows: Iterable[HistoryRow], limits: SeriesThresholds) -> list[JobRuns]:
    groups = grouped(rows)
    num_kinds = Counter(group.job for group in groups)
    found = []
    for group in groups:
        name = f"{group.job} ({group.kind})" if group.kind and num_kinds[group.job] > 1 else group.job
        found.append(
            JobRuns(
                **vars(group),
                name=name,
                events=_with_enough(_job_events(name, group.rows, len(groups), limits), limits),
            )
        )
    return found


def _with_enough(events: Iterable[Event], limits: SeriesThresholds) -> tuple[Event, ...]:
    return tuple(replace(event, has_enough_runs=event.num_runs >= limits.min_runs) for event in events)


def _with_node_names(rows: Sequence[HistoryRow]) -> list[HistoryRow]:
    """Return runs with names of hosts without their domains, which hosts may get or lose, where these are unique."""
    names = node_names({host for row in rows for host in row.hosts})
    return [_renamed(row, names) for row in rows]


def _renamed(row: HistoryRow, names: Mapping[str, str]) -> HistoryRow:
    hosts = tuple(sorted(names[host] for host in row.hosts))
    if hosts == row.hosts or len(set(hosts)) < len(hosts):
        return row
    return replace(
        row,
        hosts=hosts,
        slowness={names.get(host, host): value for host, value in row.slowness.items()},
        own_work={names.get(host, host): value for host, value in row.own_work.items()},
        first_host=names.get(row.first_host, row.first_host),
    )


def _job_events(name: str, rows: Sequence[HistoryRow], num_series: int, limits: SeriesThresholds) -> list[Event]:
    """Return the changes of the median step, and those of what a few long steps add to it."""
    changes = _changes(np.array([log(row.p50_ns) for row in rows]), rows, num_series, limits)
    values = np.array([log(row.mean_ns / row.p50_ns) for row in rows])
    long = [change for change in _changes(values, rows, num_series, limits) if change.duration is Duration.LASTING]
    starts = [0, *(change.first for change in long[:-1])]
    return [
        *(
            replace(_event("job", name, change, rows, scale=1e-9), mean_share=_mean_share(values, change, changes))
            for change in changes
        ),
        # A run has more or fewer long steps by chance, hence lasting changes alone.
        *(
            _event("long steps", name, change, rows)
            for start, change in zip(starts, long, strict=False)
            if _means_differ(values[start : change.first], values[change.first : change.last + 1])
        ),
    ]


def _mean_share(over_median: Floats, change: LevelChange, changes: Sequence[LevelChange]) -> float | None:
    """Return by how much mean steps changed with the median ones; None of a drift, which has no runs before it.

    Args:
        over_median: logarithm of mean over median step of each run, float64, (num_runs,).
        change: of the median step.
        changes: all of that series.
    """
    if change.duration is Duration.DRIFT:
        return None
    starts = [one.first for one in changes if one.duration is Duration.LASTING and one.first < change.first]
    before = over_median[max(starts, default=0) : change.first]
    there = over_median[change.first : change.last + 1]
    return expm1(change.size + float(np.median(there) - np.median(before)))


def _means_differ(before: Floats, after: Floats) -> bool:
    """Return whether means of two levels differ by enough, and by four standard errors of their own runs.

    Most short runs have no long step and few have many, so that the levels, which are medians, and the spread differ
    between short and long runs with the same share of long steps.
    """
    error = sum((float(level.std(ddof=1)) if len(level) > 1 else 0.0) ** 2 / len(level) for level in (before, after))
    apart = abs(float(after.mean() - before.mean()))
    return bool(apart >= max(log1p(MIN_CHANGE), _MIN_ERRORS * error**0.5))


def _changes(
    values: Floats,
    rows: Sequence[HistoryRow],
    num_series: int,
    limits: SeriesThresholds,
    common: RunSpread = NO_SPREAD,
) -> list[LevelChange]:
    """Return the changes of a series that are large enough, with what the dates of its runs say of them."""
    found = [
        change for change in level_changes(values, num_series, common, limits) if abs(expm1(change.size)) >= MIN_CHANGE
    ]
    return [
        replace(change, duration=Duration.LASTING) if _has_stayed(change, values, rows, limits) else change
        for change in found
    ]


def _has_stayed(change: LevelChange, values: Floats, rows: Sequence[HistoryRow], limits: SeriesThresholds) -> bool:
    """Return whether the runs at the end of a series are too far apart in time for something that was off for once."""
    if change.duration is not Duration.RECENT or change.num_runs < 2 or change.first < limits.min_runs:
        return False
    if change.num_alike:  # it has been there before, and went back
        return False
    there, begun_ns = values[change.first : change.last + 1], rows[change.first].begun_unix_ns
    agree = float(np.ptp(there)) <= limits.min_deviations * run_spread(values, limits)
    return agree and begun_ns > 0 and rows[change.last].begun_unix_ns - begun_ns >= LASTS_NS


def _host_events(rows: Sequence[HistoryRow], only: str, limits: SeriesThresholds) -> tuple[list[Event], int]:
    by_host: dict[str, list[HistoryRow]] = {}
    for row in rows:
        for host in row.slowness:
            by_host.setdefault(host, []).append(row)
    hosts = [only] if only else sorted(by_host)
    common = _common_spread(
        [np.array([row.slowness[host] for row in of_host]) for host, of_host in by_host.items()], limits
    )
    found: list[Event] = []
    for host in hosts:
        of_host = by_host.get(host, [])
        values = np.array([row.slowness[host] for row in of_host])
        changes = [
            change
            for change in _changes(values, of_host, len(hosts), limits, common)
            if _is_of_host(host, change, of_host)
        ]
        found += [
            replace(_event("host", host, change, of_host), rank_0=_moved_rank_0(host, change, of_host))
            for change in changes
        ]
        if not any(change.duration in (Duration.LASTING, Duration.DRIFT) for change in changes):
            found += _chronic(host, values, of_host, limits)
    return found, len(by_host)


def _common_spread(series: Sequence[Floats], limits: SeriesThresholds) -> RunSpread:
    """Return the spread of a run on most hosts; not known from fewer hosts than a level needs runs."""
    long = [values for values in series if len(values) > limits.min_runs]
    if len(long) < limits.min_runs:
        return NO_SPREAD
    # A median of spreads, each from a median, uses about half of what the runs say.
    freedom = sum(len(values) - 2 for values in long) / 2
    return RunSpread(value=median(run_spread(values, limits) for values in long), freedom=freedom)


def _is_of_host(host: str, change: LevelChange, rows: Sequence[HistoryRow]) -> bool:
    """Return False for a host that is faster than the others only because those got slower.

    Its own work is compared within each series that has runs before and after; without any, the others decide.
    """
    if change.size > 0:
        return True
    begin = len(rows) // 2 if change.duration is Duration.DRIFT else change.first
    before, there = ({row.run for row in part} for part in (rows[:begin], rows[begin : change.last + 1]))
    own = []
    for group in grouped(rows):
        levels = [
            [row.own_work[host] for row in group.rows if row.run in runs and host in row.own_work]
            for runs in (before, there)
        ]
        if all(levels):
            own.append(median(levels[1]) - median(levels[0]))
    return not own or median(own) < change.size / 2


def _chronic(host: str, values: Floats, rows: Sequence[HistoryRow], limits: SeriesThresholds) -> list[Event]:
    """Return the event of a host that was slow from its first runs on, and in more than half of them, if it was."""
    if len(values) < limits.min_runs:
        return []
    least = float(np.quantile(values, 0.5, method="lower"))  # more than half of the runs are as slow at least
    spread = run_spread(values, limits)
    if expm1(least) < MIN_CHANGE or least < limits.min_deviations * spread:
        return []
    is_slow = values > least / 2
    num_slow, level = int(np.count_nonzero(is_slow)), float(np.median(values[is_slow]))
    change = LevelChange(
        first=0, last=len(rows) - 1, before=0.0, after=level, duration=Duration.LASTING, deviations=level / spread
    )
    event = _event("host", host, change, rows, duration="chronic")
    rank_0 = "always" if all(row.first_host == host for row in rows) else ""
    return [replace(event, num_runs=num_slow, num_before=len(rows) - num_slow, rank_0=rank_0)]


def _moved_rank_0(host: str, change: LevelChange, rows: Sequence[HistoryRow]) -> str:
    """Return whether a host that got slower got rank 0 then, or one that got faster lost it."""
    before = {row.first_host == host for row in rows[: change.first]}
    there = {row.first_host == host for row in rows[change.first : change.last + 1]}
    if change.size > 0:
        return "gained" if (before, there) == ({False}, {True}) else ""
    return "lost" if (before, there) == ({True}, {False}) else ""


def _event(
    kind: str, name: str, change: LevelChange, rows: Sequence[HistoryRow], *, scale: float = 1.0, duration: str = ""
) -> Event:
    there = rows[change.first : change.last + 1]
    at_new_level = there[len(there) // 2 :] if change.duration is Duration.DRIFT else there
    jobs = _jobs_that_show(name, change, at_new_level) if kind == "host" else {rows[0].job: True}
    return Event(
        kind=kind,
        name=name,
        duration=duration or str(change.duration),
        begun_unix_ns=there[0].begun_unix_ns,
        last_unix_ns=there[-1].begun_unix_ns,
        run=there[0].run,
        share=expm1(change.size),
        before=float(np.exp(change.before)) * scale,
        after=float(np.exp(change.after)) * scale,
        num_runs=len(there),
        num_before=change.first,
        deviations=change.deviations,
        jobs=tuple(sorted(job for job, shows in jobs.items() if shows)),
        num_jobs=len(jobs),
    )


def _jobs_that_show(host: str, change: LevelChange, rows: Sequence[HistoryRow]) -> dict[str, bool]:
    """Return for each job with runs at the new level of a host whether that is nearer to it than to the old one."""
    middle = (change.before + change.after) / 2
    by_job: dict[str, list[float]] = {}
    for row in rows:
        by_job.setdefault(row.job, []).append(row.slowness[host])
    return {job: bool((median(values) > middle) == (change.size > 0)) for job, values in by_job.items()}
