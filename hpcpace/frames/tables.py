"""The columns of all frames but that of the operations, from what a report has measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hpcpace.audit.settings import AuditConfig
from hpcpace.core.ranges import format_ranges
from hpcpace.diagnosis.clocks import rank_clock_figures
from hpcpace.frames.columns import GAUGES, GROWN, Columns, Texts, Values, nothing, texts_of
from hpcpace.frames.extent import Extent
from hpcpace.metrics import Ints
from hpcpace.metrics.common_clock import CommonClock, reference_times
from hpcpace.metrics.flows import Flows, InterfaceUse, counter_steps, in_window
from hpcpace.metrics.phases import EXPOSED_TRANSFER, EXPOSED_WAIT, OWN_WORK, Part, without_waits
from hpcpace.metrics.steps import columns_of, is_warmup
from hpcpace.trace.schema import Phase, StepFlag
from hpcpace.trace.tables import RankTrace

_CELLS = 200_000
"""Memory: rows of steps, about, of one block of a frame."""


def ranks(extent: Extent) -> Columns:
    """Return who took part."""
    headers = [trace.header for trace, _ in extent.traces()]
    numbers = ("rank", "node", "local_rank", "dp", "pp", "tp")
    return {
        **{name: np.array([getattr(header, name) for header in headers], np.int64) for name in numbers},
        "host": texts_of([header.host for header in headers]),
        "role": extent.measured.role[extent.rows],
        "is_clock_known": extent.is_clock_known,
    }


def steps(extent: Extent) -> Columns:
    """Return when each rank did each step."""
    measured, common = extent.measured, extent.common
    chosen, num_ranks = measured.chosen.select(extent.columns), len(extent.rows)
    begin_ns, end_ns = (
        np.where(extent.is_clock_known[:, None], times_ns[extent.rows] - extent.origin_ns, np.nan).T.ravel()
        for times_ns in (common.begin_ns, common.end_ns)
    )
    return {
        **_step_and_rank(extent),
        "begin_ns": begin_ns,
        "end_ns": end_ns,
        "duration_ns": (chosen.end_ns - chosen.begin_ns)[extent.rows].T.ravel(),
        "step_time_ns": np.repeat(measured.times_ns[extent.columns], num_ranks),
        "samples": np.repeat(chosen.samples, num_ranks),
        "is_warmup": np.repeat(is_warmup(chosen.flags), num_ranks),
        "is_checkpoint": np.repeat((chosen.flags & StepFlag.CHECKPOINT) != 0, num_ranks),
        "is_eval": np.repeat((chosen.flags & StepFlag.EVAL) != 0, num_ranks),
    }


def parts(extent: Extent) -> Columns:
    """Return what each rank spent each step on; NaN where that is not known.

    Where waits cannot be distinguished from transfers, they are NaN, and in the transfers.
    """
    measured = extent.measured
    found = measured.parts[np.ix_(extent.rows, extent.columns)]
    for row, rank in enumerate(extent.ranks.tolist()):
        if rank in measured.host_timed:
            found[row] = np.nan
        elif rank in measured.unknown_waits:
            found[row] = without_waits(found[row])
    by_step = np.swapaxes(found, 0, 1).reshape(-1, len(Part))
    excess_ns = measured.excess_ns
    excess = np.full(found.shape[:2], np.nan) if excess_ns is None else excess_ns[np.ix_(extent.rows, extent.columns)]
    sums = {"work_ns": OWN_WORK, "exposed_wait_ns": EXPOSED_WAIT, "exposed_transfer_ns": EXPOSED_TRANSFER}
    return {
        **_step_and_rank(extent),
        **{f"{part.name.lower()}_ns": by_step[:, part] for part in Part},
        **{name: by_step[:, list(of)].sum(axis=1) for name, of in sums.items()},
        "excess_ns": excess.T.ravel(),
    }


def phases(extent: Extent) -> Columns:
    """Return the phases of each rank, rank after rank in the order in which they ended."""
    step, found = extent.step, []
    for trace, clock in extent.traces():
        table = trace.tables["phases"]
        rows = table.select(columns_of(step, np.asarray(table["step"], np.int64)) >= 0)
        found.append(
            {
                "step": rows["step"].astype(np.int64),
                "rank": np.full(len(rows), trace.header.rank),
                "phase": rows["phase"].astype(np.int64),
                "microbatch": rows["microbatch"].astype(np.int64),
                "begin_ns": extent.times_ns(trace, clock, rows["begin_ns"]),
                "end_ns": extent.times_ns(trace, clock, rows["end_ns"]),
                "duration_ns": rows["end_ns"] - rows["begin_ns"],
            }
        )
    if not found:
        return nothing("phases")
    columns = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    names, known = tuple(phase.name.lower() for phase in Phase), columns["phase"]
    return {**columns, "phase": Texts(names, np.where(known < len(names), known, -1))}


def connections(extent: Extent) -> Columns:
    """Return what each TCP connection of the ranks carried, interval by interval."""
    flows, places = extent.measured.flows, extent.measured.places
    if flows is None:
        return nothing("connections")
    ends, of = flows.connections, flows.connection
    numbers = np.append(ends.rank, -1)[of]
    rows = _during(extent, flows)
    rows = rows[np.isin(numbers[rows], extent.ranks)]
    of = of[rows]
    texts = {
        "host": [places.node_names[node] for node in ends.node.tolist()],
        "peer_host": [places.node_names[node] if node >= 0 else "" for node in ends.peer_node.tolist()],
        "interface": list(ends.interface or ("",) * len(ends.rank)),
        "local": list(ends.local),
        "remote": list(ends.remote),
    }
    counted = ("sent_bytes", "acked_bytes", "received_bytes", "retransmitted_bytes", "busy_ns", "receiver_limited_ns")
    others = ("sender_limited_ns", "rtt_ns", "least_rtt_ns", "unsent_bytes")
    return {
        "rank": numbers[rows],
        "peer_rank": np.append(ends.peer_rank, -1)[of],
        **{name: _of_rows(values, of) for name, values in texts.items()},
        **_interval(extent, flows, rows),
        **{name: getattr(flows, name)[rows] for name in (*counted, *others)},
    }


def network(extent: Extent) -> Columns:
    """Return what each network interface carried, interval by interval; that of all hosts of the run."""
    use = extent.measured.interfaces
    if use is None:
        return nothing("network")
    rows = _during(extent, use)
    of = use.interface[rows]
    rate = np.where(use.line_rate_bps > 0, use.line_rate_bps, np.nan)
    counted = ("sent_bytes", "received_bytes", "errors", "drops", "pauses", "marks")
    return {
        "host": _of_rows([host for host, _ in use.names], of),
        "interface": _of_rows([interface for _, interface in use.names], of),
        "line_rate_bps": rate[of],
        **_interval(extent, use, rows),
        **{name: getattr(use, name)[rows] for name in counted},
    }


def hosts(extent: Extent) -> Columns:
    """Return what the host did to each rank, interval by interval; ranks whose clock is unknown are left out."""
    of_ranks = [_host_rows(extent, trace, clock) for trace, clock in extent.traces()]
    found = [part for part in of_ranks if part is not None]
    if not found:
        return nothing("hosts")
    columns: dict[str, Values] = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    host = {trace.header.rank: trace.header.host for trace, _ in extent.traces()}
    return {**columns, "host": texts_of([host[rank] for rank in np.asarray(columns["rank"]).tolist()])}


def _host_rows(extent: Extent, trace: RankTrace, clock: CommonClock) -> dict[str, Any] | None:
    table = trace.tables["host"]
    if not len(table) or trace.header.rank in extent.measured.timed.unknown_clocks:
        return None
    steps_of = counter_steps(np.zeros(len(table), np.int64), table, (), tuple(GROWN))
    begin_ns, end_ns = (reference_times(clock, times_ns) for times_ns in (steps_of.begin_ns, steps_of.end_ns))
    first_ns, last_ns = extent.window_ns
    middle_ns = begin_ns + (end_ns - begin_ns) // 2
    rows = np.flatnonzero((middle_ns >= first_ns) & (middle_ns < last_ns))
    nan = np.full(len(rows), np.nan)
    # A counter that is 0 in all rows of a trace is one that the host does not have.
    grown = {name: steps_of.grown[name][rows].astype(np.float64) if table[name].any() else nan for name in GROWN}
    gauges = {name: table[name][steps_of.last_row[rows]].astype(np.float64) for name in GAUGES}
    return {
        "rank": np.full(len(rows), trace.header.rank),
        "begin_ns": begin_ns[rows] - extent.origin_ns,
        "end_ns": end_ns[rows] - extent.origin_ns,
        **grown,
        **{name: np.where(values != 0, values, np.nan) for name, values in gauges.items()},
    }


def clocks(extent: Extent) -> Columns:
    """Return how well the times of each rank compare with those of others."""
    measured = extent.measured
    figures = rank_clock_figures(measured.timed, measured.chosen.select(extent.columns))
    chosen = [figures[row] for row in extent.rows.tolist()]
    headers = [trace.header for trace, _ in extent.traces()]
    times = [one.times if one.times is not None and len(one.times.time_ns) else None for one in chosen]

    def floats(values: list[Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([np.nan if value is None else value for value in values], np.float64)

    return {
        "rank": extent.ranks,
        "host": texts_of([header.host for header in headers]),
        "is_known": extent.is_clock_known,
        "is_reference": np.array([one.is_reference for one in chosen], np.bool_),
        "num_samples": np.array([one.num_samples for one in chosen], np.int64),
        "halfwidth_ns": floats([one and np.median(one.halfwidth_ns) for one in times]),
        "max_halfwidth_ns": floats([one and one.halfwidth_ns.max() for one in times]),
        "extrapolated_share": floats([one and one.extrapolated.mean() for one in times]),
        "residual_ns": floats([one.residual_ns for one in chosen]),
        "drift_ppm": floats([one.drift_ppm for one in chosen]),
    }


def audit(extent: Extent) -> Columns:
    """Return the findings of the audit on the snapshots of the run; none without snapshots."""
    if not extent.judged.snapshots:
        return nothing("audit")
    # All rules take longer to load than the frames of a run without snapshots.
    from hpcpace.audit.job import AuditedJob
    from hpcpace.audit.rulebook import run_rules

    found = run_rules(AuditedJob(extent.judged.snapshots, extent.judged.config.of(AuditConfig))).findings
    names = ("rule", "severity", "host", "place", "seen", "cost", "fix")
    return {
        **{name: texts_of([str(getattr(finding, name)) for finding in found]) for name in names},
        "ranks": texts_of([format_ranges(sorted(finding.ranks)) for finding in found]),
    }


_OF_STEPS: Mapping[str, Callable[[Extent], Columns]] = {"steps": steps, "parts": parts, "phases": phases}
_WHOLE: Mapping[str, Callable[[Extent], Columns]] = {
    "ranks": ranks,
    "connections": connections,
    "network": network,
    "hosts": hosts,
    "clocks": clocks,
    "audit": audit,
}


def blocks(extent: Extent, table: str) -> Iterator[Columns]:
    """Yield the columns of a frame in blocks of steps, at least one block; those without steps are one block."""
    if table in _WHOLE:
        yield _WHOLE[table](extent)
        return
    for part in extent.blocks(max(_CELLS // max(len(extent.rows), 1), 1)):
        yield _OF_STEPS[table](part)


def _step_and_rank(extent: Extent) -> dict[str, Values]:
    return {
        "step": np.repeat(extent.step, len(extent.rows)),
        "rank": np.tile(extent.ranks, len(extent.columns)),
    }


def _during(extent: Extent, rows: Flows | InterfaceUse) -> Ints:
    """Return the rows in the time of the steps."""
    begin_ns, end_ns = extent.window_ns
    return np.flatnonzero(in_window(rows, begin_ns, end_ns))


def _interval(extent: Extent, of: Flows | InterfaceUse, rows: Ints) -> dict[str, Values]:
    return {"begin_ns": of.begin_ns[rows] - extent.origin_ns, "end_ns": of.end_ns[rows] - extent.origin_ns}


def _of_rows(values: list[str], index: Ints) -> Texts:
    """Return the text that each row has by its index, an empty one for -1."""
    texts = texts_of([*values, ""])
    return Texts(texts.names, texts.code[index])
