"""From the traces of one attempt to the summary that the report shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.errors import CannotTell
from hpcpace.metrics.collectives import gather_operations
from hpcpace.metrics.communication import kinds
from hpcpace.metrics.open_operations import open_operations
from hpcpace.metrics.phases import BUSY, EXPOSED_TRANSFER, EXPOSED_WAIT
from hpcpace.metrics.steps import StepPanel, common_steps, step_times, throughput, used_steps
from hpcpace.report.clock_figures import clock_figures
from hpcpace.report.evidence import Evidence, gather_evidence, rank_operations
from hpcpace.report.layout import open_line
from hpcpace.report.rank_figures import rank_figures, relative, step_parts
from hpcpace.report.summary import CutOff, Shares, Steps, Summary, Tracing, World
from hpcpace.rundir import Attempt, RunDirectory
from hpcpace.trace.reader import RankTrace
from hpcpace.trace.schema import ExitKind, StepFlag

_MOST_OPEN_SHOWN = 20
_MOST_MISSING = 1 << 20  # a damaged world size must not fill the memory


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which steps a report uses: not the warm-up unless asked for, and `first <= step < stop`."""

    include_warmup: bool = False
    first: int | None = None
    stop: int | None = None


def summarize(
    run: RunDirectory, attempt: Attempt, traces: Sequence[RankTrace], problems: Sequence[str], selection: Selection
) -> Summary:
    """Return the summary of one attempt.

    Args:
        run: the run.
        attempt: its attempt.
        traces: the readable traces, ascending by rank; at least one.
        problems: what could not be read.
        selection: which steps to use.

    Raises:
        CannotTell: no step that all ranks have is left.
    """
    panel = common_steps([trace.tables["steps"] for trace in traces])
    used = used_steps(panel, include_warmup=selection.include_warmup, first=selection.first, stop=selection.stop)
    evidence = gather_evidence(traces)
    cut_off = _cut_off(evidence, problems)
    if not used.any():
        raise CannotTell("\n- ".join([_why_no_steps(traces, panel), *map(open_line, cut_off.open), *cut_off.problems]))
    in_steps = np.isin(evidence.operations.step, panel.step[used])
    chosen = panel.select(used)
    parts = step_parts(evidence, chosen)
    rows, roles = rank_figures(evidence, parts, in_steps)
    world_size = max(trace.header.world_size for trace in traces)
    return Summary(
        run=str(run.path),
        run_id=traces[0].header.run_id,
        attempt=attempt.number,
        attempts=tuple(other.number for other in run.attempts()),
        world=World(
            world_size=world_size,
            ranks=evidence.ranks,
            missing=tuple(sorted(set(range(min(world_size, _MOST_MISSING))) - set(evidence.ranks))),
            hosts=tuple(dict.fromkeys(trace.header.host for trace in traces)),
            mesh=traces[0].header.mesh,
            samples_unit=traces[0].header.samples_unit,
        ),
        steps=_steps(panel, used, selection),
        throughput=throughput(_step_times_ns(evidence, panel)[used], chosen.samples),
        shares=_shares(parts),
        tracing=_tracing(attempt, traces),
        ranks=rows,
        roles=roles,
        kinds=tuple(kinds(evidence.operations, evidence.matching, evidence.waits, in_steps)),
        clocks=clock_figures(evidence, chosen),
        cut_off=cut_off,
    )


def _why_no_steps(traces: Sequence[RankTrace], panel: StepPanel) -> str:
    if len(panel):
        return (
            f"none of the {len(panel)} common steps ({panel.step[0]} to {panel.step[-1]}) is left: "
            "use --include-warmup, or another --steps A:B"
        )
    counts = ", ".join(f"rank {trace.header.rank}: {len(trace.tables['steps'])}" for trace in traces[:8])
    return (
        f"no step that all {len(traces)} ranks have ({counts}): the job ended before its first step, or files are mixed"
    )


def _step_times_ns(evidence: Evidence, panel: StepPanel) -> NDArray[np.int64]:
    # A rank whose clock is unknown cannot say when a step ended for the others. Where all are, the first one speaks.
    known = [index for index, rank in enumerate(evidence.ranks) if rank not in evidence.unknown_clocks] or [0]
    begin_ns = np.array([evidence.clocks[index].to_reference(panel.begin_ns[index]).time_ns for index in known])
    end_ns = np.array([evidence.clocks[index].to_reference(panel.end_ns[index]).time_ns for index in known])
    return step_times(panel.step, begin_ns, end_ns)


def _shares(parts: NDArray[np.float64]) -> Shares:
    share = relative(parts.sum(axis=(0, 1)))
    busy, wait, transfer = (float(share[list(of)].sum()) for of in (BUSY, EXPOSED_WAIT, EXPOSED_TRANSFER))
    return Shares(busy=busy, exposed_wait=wait, transfer=transfer, other=max(1.0 - busy - wait - transfer, 0.0))


def _steps(panel: StepPanel, used: NDArray[np.bool_], selection: Selection) -> Steps:
    flags = panel.flags[used]
    return Steps(
        num_used=int(used.sum()),
        first=int(panel.step[used][0]),
        last=int(panel.step[used][-1]),
        num_common=len(panel),
        num_seen=panel.num_seen,
        num_warmup=0 if selection.include_warmup else int(((panel.flags & StepFlag.WARMUP) != 0).sum()),
        num_checkpoint=int(((flags & StepFlag.CHECKPOINT) != 0).sum()),
        num_eval=int(((flags & StepFlag.EVAL) != 0).sum()),
    )


def _tracing(attempt: Attempt, traces: Sequence[RankTrace]) -> Tracing:
    accounts = [trace.tables["account"] for trace in traces]
    cost_ns = sum(int(account["cost_ns"].sum()) for account in accounts)
    span_ns = sum(
        int(account["time_ns"].max() - trace.tables["steps"]["begin_ns"].min())
        for trace, account in zip(traces, accounts, strict=True)
        if len(account)
    )
    files = [path for trace in attempt.trace_files().values() for path in (trace, trace.with_suffix(".journal"))]
    return Tracing(
        overhead_share=cost_ns / span_ns if span_ns > 0 else None,
        size_bytes=sum(path.stat().st_size for path in files if path.is_file()),
        num_events=sum(int(account["events"].sum()) for account in accounts),
        num_dropped=sum(int(account["dropped"].sum()) for account in accounts),
    )


def _cut_off(evidence: Evidence, problems: Sequence[str]) -> CutOff:
    traces, clocks, done = evidence.traces, evidence.clocks, evidence.operations
    never = [trace.tables["collectives"]["exit_kind"] == ExitKind.NEVER for trace in traces]
    parts = []
    for trace, clock, mask in zip(traces, clocks, never, strict=True):
        for table in (trace.open_collectives, trace.tables["collectives"].select(mask)):
            parts.append(rank_operations(trace, clock, table))
    opened = gather_operations(parts)
    last = [
        clock.to_reference(trace.tables["account"]["time_ns"]).time_ns.max()
        for trace, clock in zip(traces, clocks, strict=True)
        if len(trace.tables["account"])
    ]
    end_ns = int(max([*last, done.exit_ns.max(initial=0)]))
    return CutOff(
        problems=tuple(problems),
        not_closed=tuple(trace.header.rank for trace in traces if not trace.closed_cleanly),
        num_open=len(opened),
        open=tuple(open_operations(opened, done, end_ns=end_ns, limit=_MOST_OPEN_SHOWN)),
    )
