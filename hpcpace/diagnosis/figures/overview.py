"""The head of a report, and its tables of ranks and roles: steps, shares of their time, tracing, attempts, a hang."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypedDict, TypeVar

import numpy as np

from hpcpace.core.errors import TraceError
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.core.text import format_duration, listed, percent, plural, rank_list
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.credible import ranks_with_common_steps
from hpcpace.diagnosis.evidence import timed_traces
from hpcpace.diagnosis.judged import JudgedAttempt, JudgedRun
from hpcpace.diagnosis.measure import Measured, Selection
from hpcpace.diagnosis.network_summary import Comparable, ComparedRank
from hpcpace.diagnosis.summary import (
    AttemptRow,
    HangFigures,
    PacingFigures,
    RankRow,
    RankStack,
    RoleRow,
    Shares,
    Steps,
    Switches,
    Tracing,
    World,
)
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.communication import Overlap, overlap_of, overlap_share
from hpcpace.metrics.hotspots import Hotspot
from hpcpace.metrics.phases import BUSY, EXPOSED_TRANSFER, EXPOSED_WAIT, OWN_WORK, Part, share_of, without_waits
from hpcpace.metrics.plausibility import Alternation, CountThresholds, num_far_shorter
from hpcpace.metrics.resampling import Estimate, block_means, log_error
from hpcpace.metrics.roles import WorkExcess
from hpcpace.metrics.steps import common_steps, is_plain, is_unphased, is_warmup, step_times
from hpcpace.metrics.topology import Topology
from hpcpace.metrics.waits import blocks_of
from hpcpace.trace.attempt_reader import read_attempt, world_size_of
from hpcpace.trace.reader import RankTrace, Table
from hpcpace.trace.schema import StepFlag

_Key = TypeVar("_Key", str, int)


def rank_rows(run: JudgedRun) -> tuple[RankRow, ...]:
    """Return a row per rank; only the excess of ranks that the verdict names as late is marked."""
    measured, excess, totals = run.measured, run.excess, run.measured.operations.totals
    mean, num_steps = measured.parts.mean(axis=1), measured.parts.shape[1]
    found = []
    for index, trace in enumerate(measured.timed.traces):
        rank = trace.header.rank
        own, is_late = excess.of_rank(index) if excess is not None else None, rank in run.diagnosis.late_ranks
        is_known = rank not in measured.unknown_waits
        found.append(
            RankRow(
                rank=rank,
                host=trace.header.host,
                role=_role(trace),
                step_ns=float(mean[index].sum()),
                **_parts(mean[index], {rank}, measured),
                excess=replace(own, is_marked=is_late) if own is not None else None,
                num_operations=float(totals.num_operations[index] / num_steps),
                size_bytes=float(totals.size_bytes[index] / num_steps),
                wait_ns=float(totals.wait_ns[index] / num_steps) if is_known else None,
                transfer_ns=float(totals.transfer_ns[index] / num_steps) if is_known else None,
            )
        )
    return tuple(found)


def role_rows(run: JudgedRun) -> tuple[RoleRow, ...]:
    """Return a row per role."""
    measured, mean = run.measured, run.measured.parts.mean(axis=1)
    found = []
    for role, indices in _grouped((_role(trace), index) for index, trace in enumerate(measured.timed.traces)).items():
        mean_ns = mean[indices].mean(axis=0)
        ranks = tuple(measured.timed.ranks[index] for index in indices)
        known = _parts(mean_ns, set(ranks), measured)
        found.append(RoleRow(role=role, ranks=ranks, step_ns=float(mean_ns.sum()), **known))
    return tuple(found)


def _grouped(pairs: Iterable[tuple[_Key, int]]) -> dict[_Key, list[int]]:
    """Return the numbers of each key."""
    found: dict[_Key, list[int]] = {}
    for key, number_of_it in pairs:
        found.setdefault(key, []).append(number_of_it)
    return found


def _role(trace: RankTrace) -> str:
    slots = [f"{name}{value}" for name, value in (("pp", trace.header.pp), ("tp", trace.header.tp)) if value >= 0]
    return " ".join(slots) or "all"


class _Parts(TypedDict):
    parts_ns: dict[str, float | None] | None
    shares: dict[str, float | None] | None
    busy_share: float | None


def _parts(mean_ns: Floats, ranks: set[int], measured: Measured) -> _Parts:
    if not ranks.isdisjoint(measured.host_timed):
        return {"parts_ns": None, "shares": None, "busy_share": None}
    shares = mean_ns / max(float(mean_ns.sum()), 1.0)
    busy = float(shares[list(BUSY)].sum())
    if not ranks.isdisjoint(measured.unknown_waits):
        mean_ns, shares = without_waits(mean_ns), without_waits(shares)
    return {"parts_ns": _named(mean_ns), "shares": _named(shares), "busy_share": busy}


def _named(values: Floats) -> dict[str, float | None]:
    return {part.name.lower(): None if np.isnan(values[part]) else float(values[part]) for part in Part}


def place_excess(excess: WorkExcess, places: Topology, spot: Hotspot) -> tuple[float, tuple[float, float]]:
    """Return the mean excess of a place's ranks over their roles, with its 95 % interval; `excess` by `work_excess`."""
    found = excess.of(places.rows_of(spot.kind, spot.id).tolist()) or Estimate.around(0.0, 0.0)
    return found.value, found.interval


_SEE = "see --step-from"
_MAX_COUNTS = 3  # display: numbers of steps in a warning
_MAX_BLOCKS, _MIN_BLOCK_STEPS = 20, 8  # statistics: blocks of a comparison, and steps that give each rank an error
_MAX_STACKS, _MAX_FRAMES, _MAX_LINKS = 8, 32, 16  # display: of a hang
_MAX_ATTEMPTS = 16  # display: rows of the history


@dataclass(frozen=True, kw_only=True)
class StepThresholds(Thresholds, topic="steps"):
    """When steps are implausible, and shares of their time are worth reporting."""

    irregular_share: float = number(0.05, "share")
    """Share of the steps with updates out of order from which a report warns: a few are skipped updates."""
    least_communication_share: float = number(0.001, "share")
    """Share of the step that communication must take to have an overlap with computation."""


def world_figures(run: JudgedAttempt) -> World:
    """Return who took part."""
    credible, record = run.credible, run.records.run
    headers = [trace.header for trace in credible.traces]
    return World(
        world_size=credible.world_size,
        ranks=tuple(header.rank for header in headers),
        missing=credible.missing,
        hosts=tuple(dict.fromkeys(header.host for header in headers)),
        mesh=headers[0].mesh,
        samples_unit=headers[0].samples_unit,
        emulation=record.emulation,
        imported=record.imported,
    )


def switch_figures(run: JudgedAttempt) -> Switches:
    """Return where the places of hosts come from."""
    placed, num_leaves = run.placed, run.measured.places.num_leaves
    return Switches(source=placed.source if num_leaves else "", num_leaves=num_leaves, problems=placed.problems)


def step_figures(run: JudgedAttempt) -> Steps:
    """Return which steps the figures use."""
    measured, traces, counted = run.measured, run.placed.traces, run.limits(CountThresholds)
    panel, used = measured.panel, measured.used
    flags = panel.flags[used]
    return Steps(
        num_used=int(used.sum()),
        first=int(panel.step[used][0]),
        last=int(panel.step[used][-1]),
        num_common=len(panel),
        num_seen=panel.num_seen,
        num_warmup=0 if run.selection.include_warmup else int(is_warmup(panel.flags).sum()),
        num_plain=int(is_plain(panel.flags).sum()),
        num_unphased=int(is_unphased(panel.flags).sum()),
        has_phases=not measured.is_unphased,
        kept_from=max(trace.first_step for trace in traces),
        num_checkpoint=int(((flags & StepFlag.CHECKPOINT) != 0).sum()),
        num_eval=int(((flags & StepFlag.EVAL) != 0).sum()),
        num_apart=len(measured.close_up.steps) if measured.close_up is not None else 0,
        sources=step_sources(traces),
        warnings=step_warnings(
            traces,
            measured.alternation,
            num_far_shorter(measured.lengths_ns, counted),
            int(used.sum()),
            run.limits(StepThresholds),
            counted.short_share,
        ),
    )


def step_sources(traces: Sequence[RankTrace]) -> tuple[str, ...]:
    """Return how the traces say that steps were found, the way of most ranks first; empty where they do not say it.

    The number of steps in it is left out: it is that of the time when the way was found.
    """
    ranks = _grouped((text, trace.header.rank) for trace in traces if (text := trace.step_source[1]))
    ways = sorted(ranks, key=lambda text: -len(ranks[text]))
    return tuple(ways) if len(ways) < 2 else tuple(f"{text} ({rank_list(ranks[text])})" for text in ways)


def step_warnings(
    traces: Sequence[RankTrace],
    pattern: Alternation | None,
    num_short: int,
    num_used: int,
    limits: StepThresholds,
    short_share: float = CountThresholds.short_share,
) -> tuple[str, ...]:
    """Return what is implausible about how steps were counted, one sentence each.

    Args:
        traces: all readable traces of the attempt.
        pattern: how steps alternate.
        num_short: steps that are far shorter than the others on all ranks.
        num_used: steps used.
        limits: the thresholds.
        short_share: part of the usual time that short steps take at most.
    """
    found = [_alternating(pattern)] if pattern is not None else []
    if num_short and pattern is None:
        found.append(
            f"{num_short} of {num_used} steps take less than {percent(short_share)} of the usual time on all ranks: "
            f"what is counted as a step may be part of one; {_SEE}"
        )
    if (uneven := _uneven_counts(traces)) is not None:
        found.append(f"ranks recorded different numbers of steps ({uneven}): they may not count the same; {_SEE}")
    irregular = max((trace.step_source[0] / max(len(trace.tables["steps"]), 1) for trace in traces), default=0.0)
    if irregular >= limits.irregular_share:
        found.append(f"updates out of order, {percent(irregular)} of the steps: some may be miscounted; {_SEE}")
    return tuple(found)


def _alternating(pattern: Alternation) -> str:
    lengths = f"between {format_duration(pattern.short_ns)} and {format_duration(pattern.long_ns)} on all ranks"
    if pattern.period == 2:
        return f"steps alternate {lengths}: what is counted as a step may be half of one; {_SEE}"
    which = f"{pattern.num_short} of every {pattern.period} are short"
    return f"steps alternate {lengths}, {which}: what is counted as a step may be part of one; {_SEE}"


def _uneven_counts(traces: Sequence[RankTrace]) -> str | None:
    """Return the numbers of steps of ranks whose traces are complete, in words; None if they are alike."""
    whole = [trace for trace in traces if trace.closed_cleanly and not trace.tables["account"]["dropped"].any()]
    counts = {trace.header.rank: len(np.unique(trace.tables["steps"]["step"])) for trace in whole}
    if not counts or max(counts.values()) - min(counts.values()) <= 1:
        return None
    ways = sorted(_grouped((count, rank) for rank, count in counts.items()).items(), key=lambda item: -len(item[1]))
    more = [plural(len(ways) - _MAX_COUNTS, "further number")] if ways[_MAX_COUNTS:] else []
    return listed([*(f"{count} on {rank_list(of)}" for count, of in ways[:_MAX_COUNTS]), *more])


def share_figures(run: JudgedAttempt) -> Shares:
    """Return where the time of the steps went; nothing known where phases are not those of the device.

    Where waits are not known, what seems to be transfer has them in it.
    """
    measured = run.measured
    if measured.host_timed:
        return Shares(busy=None, exposed_wait=None, transfer=None, other=None)
    busy, wait, transfer = (share_of(measured.parts, of) for of in (BUSY, EXPOSED_WAIT, EXPOSED_TRANSFER))
    other = max(1.0 - busy - wait - transfer, 0.0)
    overlap = _overlap(measured, run.limits(StepThresholds).least_communication_share)
    exposed_wait, transfer = (wait, transfer) if measured.are_waits_known else (None, wait + transfer)
    return Shares(busy=busy, exposed_wait=exposed_wait, transfer=transfer, other=other, overlap=overlap)


def _overlap(measured: Measured, least_share: float) -> float | None:
    """Return the share of communication that is hidden behind computation."""
    under_way_ns = measured.operations.panels.under_way_ns.sum(axis=1)
    # One rank communicates with nobody, and what takes hardly any time has no share worth reporting.
    if len(measured.timed.ranks) < 2 or under_way_ns.sum() < least_share * measured.lengths_ns.sum():
        return None
    exposed_ns = measured.parts[:, :, [*EXPOSED_WAIT, *EXPOSED_TRANSFER]].sum(axis=(1, 2))
    return overlap_share(under_way_ns, exposed_ns)


def tracing_figures(run: JudgedAttempt) -> Tracing:
    """Return what recording the traces of the credible ranks cost."""
    attempt, traces = run.attempt, run.credible.traces
    accounts = [_account_of_steps(trace) for trace in traces]
    cost_ns = sum(int(account["cost_ns"].sum()) for account in accounts)
    span_ns = sum(
        int(account["time_ns"].max()) - int(trace.tables["steps"]["begin_ns"].min(initial=account["time_ns"].max()))
        for trace, account in zip(traces, accounts, strict=True)
        if len(account)
    )
    return Tracing(
        overhead_share=cost_ns / span_ns if span_ns > 0 and cost_ns else None,
        size_bytes=attempt.trace_bytes(),
        num_events=sum(int(account["events"].sum()) for account in accounts),
        num_dropped=sum(int(account["dropped"].sum()) for account in accounts),
        files=attempt.trace_digest(),
    )


def _account_of_steps(trace: RankTrace) -> Table:
    """Return the account of a trace; where its first steps were dropped, that of the others."""
    account, begins_ns = trace.tables["account"], trace.tables["steps"]["begin_ns"]
    if not trace.first_step or not len(begins_ns):
        return account
    return account.select(account["time_ns"] >= begins_ns.min())


def comparable_figures(run: JudgedRun) -> Comparable:
    """Return what a comparison takes from a run besides its other figures."""
    measured = run.measured
    times_ns = measured.times_ns.astype(np.float64)
    has_times = bool((times_ns > 0).all())
    blocks = np.array_split(times_ns, min(_MAX_BLOCKS, len(times_ns)))
    return Comparable(
        is_all=run.selection == Selection(),
        samples_per_step=float(measured.chosen.samples.mean()),
        log_p50_error=log_error(times_ns, np.median) if has_times else None,
        log_mean_error=log_error(times_ns, np.mean) if has_times else None,
        block_p50_ns=tuple(float(np.median(block)) for block in blocks),
        ranks=_ranks(measured),
        overlap=_hidden_transfers(measured),
    )


def _hidden_transfers(measured: Measured) -> tuple[Overlap, ...] | None:
    if measured.host_timed or not measured.are_waits_known:
        return None
    close_up, ranks = measured.close_up, measured.timed.ranks
    if close_up is None:
        return ()
    found = overlap_of(
        close_up.evidence.operations,
        close_up.evidence.waits.transfer_ns,
        close_up.passes,
        blocks_of(close_up.blocks.select(pauses=False), ranks),
        ranks=ranks,
        step=close_up.steps.step,
        node=np.array([trace.header.node for trace in measured.timed.traces], np.int64),
    )
    return tuple(found)


def _ranks(measured: Measured) -> tuple[ComparedRank, ...]:
    work_ns = measured.spent_ns(OWN_WORK)
    mean_ns, error = work_ns.mean(axis=1), np.full(len(work_ns), np.nan)
    if work_ns.shape[1] >= _MIN_BLOCK_STEPS:
        means = block_means(work_ns)
        error = means.std(axis=1, ddof=1) / means.shape[1] ** 0.5 / np.where(mean_ns, mean_ns, np.nan)
    caused_ns = measured.operations.origins.caused_ns / work_ns.size
    return tuple(
        ComparedRank(
            rank=rank,
            work_ns=float(mean_ns[row]) if (is_known := rank not in measured.host_timed) else None,
            work_error=float(error[row]) if is_known and np.isfinite(error[row]) else None,
            caused_wait_ns=float(caused_ns[row]) if is_known else 0.0,
        )
        for row, rank in enumerate(measured.timed.ranks)
    )


def pacing_figures(run: JudgedAttempt) -> PacingFigures | None:
    """Return the outcome of pacing; None where the run was not paced.

    Where pacing waits on devices and their times are known, it has the slack of the ranks: the exposed wait of a rank
    in a step less that of the rank that waits least there. To remove all waits gains the share of exposed wait at most.
    """
    pacing, panels = run.records.pacing, run.panels
    if pacing is None or not pacing.waits_on_device or panels.host_timed or panels.parts_ns is None:
        return pacing
    if not run.measured.are_waits_known:
        return pacing
    slack_ns = (panels.wait_ns - panels.wait_ns.min(axis=0)).mean(axis=1)
    most = int(np.argmax(slack_ns))
    return replace(
        pacing,
        slack_ns=float(slack_ns.mean()),
        most_slack_ns=float(slack_ns[most]),
        most_slack_rank=int(panels.rank[most]),
        most_gain=share_of(panels.parts_ns, EXPOSED_WAIT),
    )


def hang_figures(run: JudgedAttempt) -> HangFigures | None:
    """Return who held up whom; None without a hang."""
    found = run.hang
    if found is None:
        return None
    from hpcpace.hang.verdict import call_name

    hang, job, call = found.hang, found.job, found.hang.call
    views = [job.ranks[rank] for rank in hang.culprits or hang.could_be]
    return HangFigures(
        kind=str(hang.kind),
        culprits=hang.culprits,
        could_be=hang.could_be,
        waiting=hang.waiting,
        reason=hang.reason,
        operation="" if call is None else call_name(call, job),
        op="" if call is None else call.op,
        group="" if call is None else job.groups[call.channel.group].name,
        seq=-1 if call is None else call.seq,
        step=-1 if call is None else call.step,
        age_ns=None if hang.since_ns is None else job.now_ns - hang.since_ns,
        chain=tuple(call_name(each, job) for each in hang.chain[-_MAX_LINKS:]),
        stacks=tuple(RankStack(rank=view.rank, frames=view.stack[-_MAX_FRAMES:]) for view in views if view.stack)[
            :_MAX_STACKS
        ],
    )


def attempt_rows(
    run: RunDirectory, attempt: Attempt, traces: Sequence[RankTrace], selection: Selection
) -> tuple[AttemptRow, ...]:
    """Return a row for each attempt of a run, the last 16 at most; none if there is only one attempt.

    Args:
        run: the run.
        attempt: the attempt that is reported.
        traces: its readable traces, ascending by rank.
        selection: which steps count, of all attempts alike.
    """
    attempts = run.attempts()
    if len(attempts) < 2:
        return ()
    shown = [other for other in attempts[-_MAX_ATTEMPTS:] if other.number != attempt.number]
    rows = [_row(attempt, traces, selection), *(_row(other, _traces(other), selection) for other in shown)]
    return tuple(sorted(rows, key=lambda row: row.attempt))


def _row(attempt: Attempt, traces: Sequence[RankTrace], selection: Selection) -> AttemptRow:
    step, times_ns = _steps(traces, selection)
    return AttemptRow(
        attempt=attempt.number,
        world_size=world_size_of(traces) if traces else 0,
        num_ranks=len(traces),
        hosts=tuple(dict.fromkeys(trace.header.host for trace in traces)),
        mesh=traces[0].header.mesh if traces else "",
        num_steps=len(step),
        first=int(step[0]) if len(step) else None,
        last=int(step[-1]) if len(step) else None,
        p50_ns=float(np.median(times_ns)) if len(step) else None,
        num_not_closed=sum(not trace.closed_cleanly for trace in traces),
        num_inside=sum(len(trace.open_collectives) > 0 for trace in traces),
    )


def _steps(traces: Sequence[RankTrace], selection: Selection) -> tuple[Ints, Ints]:
    """Return the numbers of the steps that count, and their times."""
    traces, _ = ranks_with_common_steps(traces, selection)
    panel = common_steps([trace.tables["steps"] for trace in traces])
    used = selection.used(panel)
    if not used.any():
        return panel.step[:0], panel.step[:0]
    timed = timed_traces(traces)
    common = timed.on_common_clock(panel)
    times_ns = step_times(panel.step, common.begin_ns[timed.known], common.end_ns[timed.known])
    return panel.step[used], times_ns[used]


def _traces(attempt: Attempt) -> Sequence[RankTrace]:
    try:
        return read_attempt(attempt, most_rows=0).traces
    except TraceError:
        return ()
