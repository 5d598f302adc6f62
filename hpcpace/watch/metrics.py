"""The state of a run as metrics for a centre: docs/monitoring.md lists them."""

from __future__ import annotations

from collections.abc import Iterable

from hpcpace.core.exposition import Family, Kind
from hpcpace.core.text import NS_PER_S
from hpcpace.watch.state import Doing, JobState
from hpcpace.watch.view import Sort, ordered

TOP_RANKS = 8
"""Ranks that have metrics of their own: the slowest ones, so that a job of any size has few series."""

_UNDER_WAY = frozenset({Doing.RUNNING, Doing.HANGS, Doing.SILENT})


def families(state: JobState) -> list[Family]:
    """Return the metrics of a run."""
    job = job_labels(state.jobid, state.step_id, state.name or state.path)
    found = [*_of_job(state, job), *_of_ranks(state, job), *_of_hosts(state, job)]
    info = Family(name="hpcpace_run", kind=Kind.INFO, help="What the run is.")
    info.add(1, {**job, **_info(state)})
    return [*found, info]


def job_labels(jobid: str, step: str, name: str) -> dict[str, str]:
    """Return the labels of a job: its Slurm job and step; without Slurm, its name takes the place of the job."""
    return {"jobid": jobid or name, "step": step}


def _of_job(state: JobState, job: dict[str, str]) -> Iterable[Family]:
    def seconds(time_ns: float | None) -> float | None:
        return None if time_ns is None else time_ns / NS_PER_S

    gauges: list[tuple[str, str, str, float | None]] = [
        ("hpcpace_running", "", "Whether the run is under way (1), or has ended or not begun (0).",
         float(state.doing in _UNDER_WAY)),
        ("hpcpace_step_seconds", "seconds", "Median time of the last steps.", seconds(state.step_ns)),
        ("hpcpace_past_step_seconds", "seconds", "Median time of all earlier steps of this attempt.",
         seconds(state.past_ns)),
        ("hpcpace_current_step_age_seconds", "seconds", "How long the present step had lasted at the last flush.",
         state.step_age_s),
        ("hpcpace_exposed_wait_ratio", "ratio", "Share of a step that a rank waits for others, mean of ranks.",
         state.wait_share),
        ("hpcpace_blocked_ratio", "ratio", "Share of a step blocked in communication, mean of ranks.",
         state.blocked_share),
        ("hpcpace_last_step_timestamp_seconds", "seconds", "Unix time of the end of the last step.",
         state.last_step_unix_s),
        ("hpcpace_hang_ranks", "", "Ranks that hold up the others, or of which one does.", _hang_ranks(state)),
        ("hpcpace_hanging", "", "Whether the run hangs, with or without a rank that can be named.",
         float(state.hang is not None)),
        ("hpcpace_clock_error_seconds", "seconds", "Largest uncertainty of the clock of a rank.",
         seconds(state.halfwidth_ns)),
        ("hpcpace_ranks", "", "Ranks of the run.", state.world_size or None),
        ("hpcpace_live_ranks", "", "Ranks that write.", state.num_live),
        ("hpcpace_silent_ranks", "", "Ranks that have stopped writing without an end.", len(state.silent)),
        ("hpcpace_planned_steps", "", "Steps that the run is to have.", state.planned_steps),
        ("hpcpace_attempt", "", "Number of the attempt, counted from 0.",
         state.attempt if state.attempt >= 0 else None),
        ("hpcpace_oldest_figure_seconds", "seconds", "Time since the rank was looked at that waits longest for it.",
         state.looked_s),
    ]  # fmt: skip
    for name, unit, text, value in gauges:
        family = Family(name=name, kind=Kind.GAUGE, help=text, unit=unit)
        family.add(value, job)
        yield family
    counters: list[tuple[str, str, float | None]] = [
        ("hpcpace_steps", "Steps that all ranks have ended, counted from the start of the run.", state.num_steps),
        ("hpcpace_samples", "Samples of the steps that were seen.", state.num_samples),
        ("hpcpace_dropped_rows", "Rows that ranks gave up while they were watched.", state.num_dropped),
    ]
    for name, text, value in counters:
        family = Family(name=name, kind=Kind.COUNTER, help=text)
        family.add(value, job)
        yield family


def _hang_ranks(state: JobState) -> float:
    return float(len(state.hang.ranks)) if state.hang is not None else 0.0


def _of_ranks(state: JobState, job: dict[str, str]) -> Iterable[Family]:
    own = Family(
        name="hpcpace_rank_own_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help=f"Time of a step in which a rank is not blocked, of the {TOP_RANKS} slowest.",
    )
    excess = Family(
        name="hpcpace_rank_excess_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        help=f"The same against the median of the rank's role, of the {TOP_RANKS} slowest.",
    )
    for one in [one for one in ordered(state, Sort.SLOWEST) if one.own_ns is not None][:TOP_RANKS]:
        labels = {**job, "node": one.host, "rank": str(one.rank)}
        own.add(None if one.own_ns is None else one.own_ns / NS_PER_S, labels)
        excess.add(one.excess, labels)
    return own, excess


def _of_hosts(state: JobState, job: dict[str, str]) -> Iterable[Family]:
    sent, received, line = (
        Family(name=f"hpcpace_network_{what}_bytes_per_second", kind=Kind.GAUGE, help=text)
        for what, text in (
            ("transmit", "Bytes sent on the busiest interface of a node."),
            ("receive", "Bytes received there."),
            ("line", "Line rate of that interface."),
        )
    )
    for one in state.hosts:
        labels = {**job, "node": one.host}
        sent.add(one.sent_bps / 8, labels)
        received.add(one.received_bps / 8, labels)
        line.add(None if one.line_bps is None else one.line_bps / 8, labels)
    return sent, received, line


def _info(state: JobState) -> dict[str, str]:
    return {
        "run": state.path,
        "name": state.name,
        "mesh": state.mesh,
        "samples_unit": state.samples_unit,
        **{f"{name}_version": version for name, version in state.versions.items()},
    }
