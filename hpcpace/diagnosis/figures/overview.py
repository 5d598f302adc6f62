"""The figures at the head of a report: steps used, where their time went, and what tracing cost."""

from __future__ import annotations

from collections.abc import Sequence

from hpcpace.diagnosis.figures.step_counting import step_sources, step_warnings
from hpcpace.diagnosis.measure import Measured, Selection
from hpcpace.diagnosis.summary import Shares, Steps, Tracing
from hpcpace.metrics.operations.overlap import overlap_share
from hpcpace.metrics.phases import BUSY, EXPOSED_TRANSFER, EXPOSED_WAIT, share_of
from hpcpace.metrics.step_pattern import num_far_shorter
from hpcpace.metrics.steps import is_plain, is_unphased, is_warmup
from hpcpace.rundir import Attempt
from hpcpace.trace.reader import RankTrace, Table
from hpcpace.trace.schema import StepFlag

_LEAST_COMMUNICATION = 0.001


def step_figures(measured: Measured, selection: Selection, traces: Sequence[RankTrace]) -> Steps:
    """Return which steps the figures use; `traces` are all readable ones of the attempt."""
    panel, used = measured.panel, measured.used
    flags = panel.flags[used]
    return Steps(
        num_used=int(used.sum()),
        first=int(panel.step[used][0]),
        last=int(panel.step[used][-1]),
        num_common=len(panel),
        num_seen=panel.num_seen,
        num_warmup=0 if selection.include_warmup else int(is_warmup(panel.flags).sum()),
        num_plain=int(is_plain(panel.flags).sum()),
        num_unphased=int(is_unphased(panel.flags).sum()),
        has_phases=not measured.is_unphased,
        kept_from=max(trace.first_step for trace in traces),
        num_checkpoint=int(((flags & StepFlag.CHECKPOINT) != 0).sum()),
        num_eval=int(((flags & StepFlag.EVAL) != 0).sum()),
        num_apart=len(measured.close_up.steps) if measured.close_up is not None else 0,
        sources=step_sources(traces),
        warnings=step_warnings(traces, measured.alternation, num_far_shorter(measured.lengths_ns), int(used.sum())),
    )


def share_figures(measured: Measured) -> Shares:
    """Return where the time of the steps went; nothing known where phases are not those of the device.

    Where waits are not known, what seems to be transfer has them in it.
    """
    if measured.host_timed:
        return Shares(busy=None, exposed_wait=None, transfer=None, other=None)
    busy, wait, transfer = (share_of(measured.parts, of) for of in (BUSY, EXPOSED_WAIT, EXPOSED_TRANSFER))
    other = max(1.0 - busy - wait - transfer, 0.0)
    overlap = _overlap(measured)
    if not measured.are_waits_known:
        return Shares(busy=busy, exposed_wait=None, transfer=wait + transfer, other=other, overlap=overlap)
    return Shares(busy=busy, exposed_wait=wait, transfer=transfer, other=other, overlap=overlap)


def _account_of_steps(trace: RankTrace) -> Table:
    """Return the account of a trace; where its first steps were dropped, that of the others."""
    account, begins_ns = trace.tables["account"], trace.tables["steps"]["begin_ns"]
    if not trace.first_step or not len(begins_ns):
        return account
    return account.select(account["time_ns"] >= begins_ns.min())


def tracing_figures(attempt: Attempt, traces: Sequence[RankTrace]) -> Tracing:
    """Return what recording these traces cost."""
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


def _overlap(measured: Measured) -> float | None:
    """Return the share of communication that is hidden behind computation."""
    under_way_ns = measured.operations.panels.under_way_ns.sum(axis=1)
    # One rank communicates with nobody, and what takes hardly any time has no share worth telling.
    if len(measured.timed.ranks) < 2 or under_way_ns.sum() < _LEAST_COMMUNICATION * measured.lengths_ns.sum():
        return None
    exposed_ns = measured.parts[:, :, [*EXPOSED_WAIT, *EXPOSED_TRANSFER]].sum(axis=(1, 2))
    return overlap_share(under_way_ns, exposed_ns)
