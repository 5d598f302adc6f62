"""The report on a terminal or in a Slurm log: at most 100 columns, without colour in a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from hpcpace.core.text import format_bytes, format_count, format_duration, named_ranks, percent, plural, printable
from hpcpace.diagnosis.sentences import incomplete_rank_line, open_line, suspect_line
from hpcpace.diagnosis.summary import EXCESS_FLOOR, HostPair, IncompleteRank, Shares, Summary
from hpcpace.report.terminal.layout import line, note, notes, title
from hpcpace.report.terminal.losses import (
    print_attempts,
    print_causes,
    print_hotspots,
    print_jitter,
    print_sensitivity,
    print_verdict,
)
from hpcpace.report.terminal.network import print_network
from hpcpace.report.terminal.probed import print_probed
from hpcpace.report.terminal.ranks import (
    print_cores,
    print_devices,
    print_kinds,
    print_rank_communication,
    print_steps,
    rows_shown,
)
from hpcpace.report.words.audit import audit_lines, audit_subtitle
from hpcpace.report.words.pacing import pacing_lines
from hpcpace.report.words.run import MAY_CHANGE, UNKNOWN_WAITS, changed_thresholds, outcome_line, switches_line

MIN_WIDTH, MAX_WIDTH = 80, 100
_REST = "--verbose or summary.json"
_MOST_HOSTS = 4
_MOST_EXCESS = 2
_BAR_WIDTH = 60
_LEAST_SHOWN = 0.0005


def print_report(
    console: Console,
    summary: Summary,
    *,
    ranks: Sequence[int] | None = None,
    progress: str = "",
    is_verbose: bool = False,
) -> None:
    """Print a summary.

    Args:
        console: where to.
        summary: what.
        ranks: the ranks to show; with more than 16 of them, and none asked for, roles and extreme ranks.
        progress: how far a run is that still runs; empty of one that has ended.
        is_verbose: whether to print every problem, also many of one kind.
    """
    shown = rows_shown(summary, ranks)
    _print_head(console, summary, progress)
    print_attempts(console, summary)
    print_jitter(console, summary)
    print_hotspots(console, summary)
    print_causes(console, summary)
    _print_audit(console, summary, is_verbose=is_verbose)
    _print_pacing(console, summary)
    print_steps(console, summary, shown)
    print_devices(console, summary)
    print_cores(console, summary)
    print_probed(console, summary)
    if summary.kinds:
        print_kinds(console, summary)
        print_sensitivity(console, summary)
        print_rank_communication(console, shown, summary.kinds)
    print_network(console, summary)
    _print_clocks(console, summary, is_verbose=is_verbose)
    _print_incomplete(console, summary, is_verbose=is_verbose)


def _print_head(console: Console, summary: Summary, progress: str) -> None:
    title(console, f"hpcpace report {summary.run}")
    if progress:
        line(console, "State", f"{progress}: {MAY_CHANGE}", style="bold")
    print_verdict(console, summary)
    _print_shares(console, summary)
    line(console, "Tracing", _tracing(summary))
    title(console, "The run")
    num_attempts = f" ({len(summary.attempts)} in all)" if len(summary.attempts) > 1 else ""
    line(console, "run", f"{summary.run_id}, attempt {summary.attempt}{num_attempts}")
    line(console, "world", _world(summary))
    if summary.world.emulation:
        line(console, "lab", summary.world.emulation)
    if summary.world.imported:
        line(console, "imported", summary.world.imported)
    line(console, "steps", _steps(summary))
    for source in summary.steps.sources:
        line(console, "", f"found: {source}")
    for sentence in summary.steps.warnings:
        line(console, "warning", sentence)
    line(console, "speed", _speed(summary))
    if outcome := outcome_line(summary):
        line(console, "training", outcome)
    line(console, "excess", _excess(summary))
    if changed := changed_thresholds(summary):
        line(console, "thresholds", f"changed from the defaults: {', '.join(changed)}")
    if switches := switches_line(summary.switches):
        line(console, "switches", switches)
    for sentence in summary.switches.problems:
        line(console, "warning", sentence)
    if warning := suspect_line(summary.clocks):
        line(console, "warning", warning)


def _print_shares(console: Console, summary: Summary) -> None:
    shares = summary.shares.whole
    if shares is None:
        line(console, "Shares", summary.unknown)
        return
    parts = ", ".join(f"{name} {percent(share)}" for name, share in shares)
    line(console, "Shares", f"{parts}{_hidden(summary.shares)}")
    if summary.shares.exposed_wait is None:
        line(console, "", UNKNOWN_WAITS)
    if summary.world.missing:
        line(console, "", "waits for ranks without a trace count as transfer")
    line(console, "", _bar(console, dict(shares)))


def _world(summary: Summary) -> str:
    world = summary.world
    missing = f" ({len(world.missing)} without a trace)" if world.missing else ""
    hosts = ", ".join(world.hosts[:_MOST_HOSTS]) + (", ..." if len(world.hosts) > _MOST_HOSTS else "")
    mesh = f", mesh {world.mesh}" if world.mesh else ""
    return f"{plural(world.world_size, 'rank')}{missing} on {plural(len(world.hosts), 'host')} ({hosts}){mesh}"


def _steps(summary: Summary) -> str:
    steps = summary.steps
    remarks = (
        (steps.num_warmup, "warm-up left out"),
        (steps.num_plain, "without detail left out"),
        (steps.num_unphased, f"without phases {'left out' if steps.has_phases else 'used'}"),
        (steps.num_seen - steps.num_common, "not on all ranks"),
        (steps.num_checkpoint, "with a checkpoint"),
        (steps.num_eval, "with an evaluation"),
        (steps.num_apart if steps.num_apart < steps.num_used else 0, "taken apart"),
    )
    kept = [f"only those from {steps.kept_from} on were kept"] if steps.kept_from else []
    span = f"{steps.first} to {steps.last}" if steps.num_used > 1 else f"{steps.first}"
    return "; ".join(
        [
            f"{steps.num_used} used ({span}) of {steps.num_seen}",
            *kept,
            *(f"{count} {what}" for count, what in remarks if count),
        ]
    )


def _speed(summary: Summary) -> str:
    speed, unit = summary.throughput, summary.world.samples_unit
    rate = f"{format_count(speed.samples_per_s)} {unit}/s" if speed.samples_per_s else f"no {unit} credited"
    cv = f", CV {speed.cv:.3f}" if speed.cv is not None else ""
    if summary.world.missing:  # what the missing ranks were credited with is not known
        rate += f" by the {plural(len(summary.world.ranks), 'rank')} with a trace"
    p50, p95, p99 = (format_duration(value_ns) for value_ns in (speed.p50_ns, speed.p95_ns, speed.p99_ns))
    return f"{rate}; step p50 {p50}, p95 {p95}, p99 {p99}{cv}"


def _hidden(shares: Shares) -> str:
    overlap = shares.overlap or 0.0
    return f"; {percent(overlap)} of communication hidden" if overlap >= _LEAST_SHOWN else ""


def _bar(console: Console, shares: Mapping[str, float]) -> str:
    symbols = "█▓▒░" if console.encoding.startswith("utf") else "#=-."
    busy, wait, other = shares["busy"], shares.get("exposed wait", 0.0), shares["other"]
    ends = [0.0, busy, busy + wait, 1.0 - other, 1.0]
    cells = [round(_BAR_WIDTH * end) for end in ends]
    return "".join(s * (stop - start) for s, start, stop in zip(symbols, cells[:-1], cells[1:], strict=True))


def _excess(summary: Summary) -> str:
    if summary.unknown:
        return summary.unknown
    compared = [(row.rank, row.excess) for row in summary.ranks if row.excess is not None]
    if not compared:
        return "not compared: no two ranks are known to do the same work for enough steps"
    compared.sort(key=lambda pair: -pair[1].share)
    named = [pair for pair in compared if pair[1].is_marked]
    found = named or [pair for pair in compared if pair[1].share > max(pair[1].noise, EXCESS_FLOOR)]
    if not found:
        return "no rank has more own work than the others of its role beyond noise"
    words = [
        f"rank {rank} {100 * excess.share:+.1f} % own work against its role (noise {percent(excess.noise)})"
        for rank, excess in found[:_MOST_EXCESS]
    ]
    more = [f"{len(found) - _MOST_EXCESS} more"] if found[_MOST_EXCESS:] else []
    no_culprit = "" if named else "; not named as late: in few steps only, or within what ranks differ by here"
    return "; ".join([*words, *more]) + no_culprit


def _tracing(summary: Summary) -> str:
    tracing = summary.tracing
    share = tracing.overhead_share
    return (
        f"{'unknown share' if share is None else f'{100 * share:.2g} %'} of the time, "
        f"{format_bytes(tracing.size_bytes)} on disk, {plural(tracing.num_events, 'event')}, "
        f"{tracing.num_dropped} dropped"
    )


def _print_audit(console: Console, summary: Summary, *, is_verbose: bool) -> None:
    if summary.audit is None:
        return
    title(console, "Audit", audit_subtitle(summary.audit))
    for sentence, fix in audit_lines(summary.audit):
        note(console, sentence)
        if fix:  # in one piece, since it is to be pasted
            console.print(f"  fix: {printable(fix)}", soft_wrap=True, markup=False)
    notes(console, summary.audit.problems, rest=_REST, is_verbose=is_verbose)


def _print_pacing(console: Console, summary: Summary) -> None:
    if summary.pacing is None:
        return
    title(console, "Pacing", f"policy {summary.pacing.policy}")
    for name, value in pacing_lines(summary.pacing):
        line(console, name, value)


def _print_clocks(console: Console, summary: Summary, *, is_verbose: bool) -> None:
    clocks = summary.clocks
    if len(summary.world.ranks) < 2:
        return
    title(console, "Clock error")
    if clocks.num_unknown:
        note(
            console,
            f"{plural(clocks.num_unknown, 'rank')} without a usable clock comparison: not compared with other ranks",
        )
    if clocks.median_halfwidth_ns is not None and clocks.max_halfwidth_ns is not None:
        median, largest = format_duration(clocks.median_halfwidth_ns), format_duration(clocks.max_halfwidth_ns)
        line(
            console,
            "bound",
            f"half-width median {median}, max {largest}; {plural(clocks.num_samples, 'sample')} per rank",
        )
        residual = "unknown" if clocks.residual_ns is None else format_duration(clocks.residual_ns)
        drift = "unknown" if clocks.drift_ppm is None else f"{clocks.drift_ppm:.3g} ppm"
        outside = (
            f", {percent(clocks.extrapolated_share)} extrapolated" if clocks.extrapolated_share is not None else ""
        )
        line(console, "measured", f"leave-one-out residual {residual}, drift {drift}{outside}")
    exits, checked = plural(clocks.num_negative, "exit"), plural(clocks.num_checked, "synchronising operation")
    messages = clocks.num_negative_messages
    early = f"; {plural(messages, 'message')} received before being sent" if messages else ""
    line(console, "causality", f"{exits} before the last enter in {checked}{early}")
    notes(
        console,
        (
            f"{_early_exits(pair)}: {pair.num_violations} times, median "
            f"{format_duration(pair.median_ns)}, max {format_duration(pair.max_ns)}, "
            f"{pair.num_unexplained} beyond the half-widths"
            for pair in clocks.pairs
        ),
        rest=_REST,
        is_ranked=True,
        is_verbose=is_verbose,
    )


def _early_exits(pair: HostPair) -> str:
    exit_host, enter_host = printable(pair.exit_host), printable(pair.enter_host)
    if pair.exit_node == pair.enter_node:
        return f"ranks of {exit_host} left before others of {exit_host} entered"
    return f"{exit_host} left before {enter_host} entered"


def _print_incomplete(console: Console, summary: Summary, *, is_verbose: bool) -> None:
    incomplete, dropped = summary.cut_off, summary.tracing.num_dropped
    if not (incomplete.problems or incomplete.not_closed or incomplete.num_open or incomplete.ranks or dropped):
        return
    hosts = {row.rank: row.host for row in summary.ranks} | {rank.rank: rank.host for rank in incomplete.ranks}
    title(console, "Missing or cut off")
    if incomplete.not_closed:
        who = named_ranks(incomplete.not_closed, hosts)
        note(console, f"not closed: the trace of {who} (killed, crashed, or still running)")
    if dropped:
        note(console, f"{plural(dropped, 'record')} dropped by the recorder")
    opened = (open_line(operation, hosts) for operation in incomplete.open)
    lost = (incomplete_rank_line(rank, hosts) for rank in incomplete.ranks if _is_listed(rank))
    for lines in (opened, lost):
        notes(console, lines, rest=_REST, is_ranked=True, is_verbose=is_verbose)
    notes(console, incomplete.problems, rest=_REST, is_verbose=is_verbose)


def _is_listed(rank: IncompleteRank) -> bool:
    # Ranks without a trace are listed among the problems, those that were not closed in one line.
    return bool(rank.num_lost_operations or rank.num_dropped or (rank.host and not rank.has_trace))
