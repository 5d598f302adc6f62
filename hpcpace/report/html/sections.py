"""The sections of the HTML report that are text and tables: speed, shares, communication, clocks, what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpcpace import __version__
from hpcpace.core.text import (
    NS_PER_MS,
    alias_name,
    folded,
    format_bytes,
    format_count,
    format_duration,
    milliseconds,
    named_ranks,
    percent,
    place_name,
    plural,
    rank_list,
)
from hpcpace.diagnosis.plot_data import HotspotRow, PlotData
from hpcpace.diagnosis.sentences import incomplete_rank_line, open_line
from hpcpace.diagnosis.summary import WAIT_OR_TRANSFER, HostPair, Shares, Summary
from hpcpace.report.html.text import escape, facts, notes, stacked_bar, table
from hpcpace.report.words.attempts import ATTEMPT_HEAD, attempt_cells, attempts_differ
from hpcpace.report.words.audit import AUDIT_HEAD, NO_MATCH, audit_cells
from hpcpace.report.words.causes import skew_reading
from hpcpace.report.words.cores import CORE_HEAD, core_cells
from hpcpace.report.words.glossary import GLOSSARY
from hpcpace.report.words.probed import HEAD, probed_cells, probed_lead, probed_remarks
from hpcpace.report.words.run import UNKNOWN_WAITS, message_size, outcome_line, switches_line

_REST = "summary.json"
_MOST_HOTSPOTS = 20
_MOST_HOSTS = 64
_MOST_RANKS = 1024
_NONE = "\N{EN DASH}"
_LEAST_SHOWN = 0.0005
_COLORS = {
    "busy": "@busy",
    "exposed wait": "@wait",
    "transfer": "@transfer",
    WAIT_OR_TRANSFER: "@transfer",
    "other": "@other",
}


def speed_tiles(summary: Summary) -> str:
    """Return the figures that people compare runs by."""
    speed, unit = summary.throughput, summary.world.samples_unit
    size = f"{summary.world.world_size} on {plural(len(summary.world.hosts), 'host')}"
    return facts(
        (
            ("Throughput", f"{format_count(speed.samples_per_s)} {unit}/s" if speed.samples_per_s else ""),
            ("Step time, median", format_duration(speed.p50_ns)),
            ("Step time, 95th percentile", format_duration(speed.p95_ns)),
            ("Variation (CV)", f"{speed.cv:.3f}" if speed.cv is not None else ""),
            ("Ranks", size),
        ),
        kind="tiles",
    )


def shares_bar(shares: Shares, *, has_missing: bool, unknown: str = "") -> str:
    """Return where the average step went as one bar, with its figures, or why that is not known.

    Args:
        shares: of the step.
        has_missing: whether ranks have no trace.
        unknown: why the shares are not known.
    """
    if shares.whole is None:
        return notes([unknown])
    entries = [(name, _COLORS[name], "") for name, _ in shares.whole]
    hidden = shares.overlap or 0.0
    sentences = [f"{percent(hidden)} of communication is hidden behind computation"] if hidden >= _LEAST_SHOWN else []
    if shares.exposed_wait is None:
        sentences.append(UNKNOWN_WAITS)
    if has_missing:
        sentences.append("waits for ranks without a trace count as transfer")
    bar = stacked_bar(entries, [share for _, share in shares.whole])
    return bar + notes(sentences)


def kinds_table(summary: Summary) -> str:
    """Return the communication by kind of operation."""
    num_steps = max(summary.steps.num_used, 1)
    rows = []
    for kind in summary.kinds:
        rows.append(
            (
                kind.op,
                str(kind.group_size or "?"),
                f"{kind.num_rows / num_steps:.3g}",
                message_size(kind.size_bytes / num_steps, kind.op),
                format_duration(kind.median_ns),
                format_duration(kind.p95_ns),
                _duration(kind.mean_wait_ns),
                _duration(kind.mean_transfer_ns),
                str(kind.num_unmatched or _NONE),
            )
        )
    head = (
        "operation",
        "group size",
        "calls/step",
        "bytes/step",
        "median",
        "p95",
        "mean wait",
        "mean transfer",
        "unmatched",
    )
    return table("All ranks together", head, rows)


def sensitivity_table(summary: Summary) -> str:
    """Return what skew does to transfers; empty where it is not known."""
    rows = []
    for row in summary.sensitivity:
        slope, low, high = (format_duration(value * NS_PER_MS) for value in (row.slope, *row.interval))
        size = message_size(row.size_bytes, row.op)
        rows.append((row.op, str(row.group_size), size, slope, f"{low} to {high}", skew_reading(row)))
    head = ("operation", "group size", "bytes", "per ms of skew", "95 % interval", "reading")
    caption = "Transfer against skew: transfer added per ms between the first and the last arrival"
    return table(caption, head, rows, text=(0, 5))


def attempts_table(summary: Summary) -> str:
    """Return all attempts of a run in one table, and how they differ; empty if there is only one."""
    if not summary.history:
        return ""
    rows = [attempt_cells(row) for row in summary.history]
    made = table("All attempts", ATTEMPT_HEAD, rows, text=(6,))
    return made + notes([attempts_differ(summary.history, summary.attempt)])


def audit_table(summary: Summary) -> str:
    """Return the audit's findings on the culprits, and what it could not read; empty without snapshots."""
    audit = summary.audit
    if audit is None:
        return ""
    rows = [audit_cells(match) for match in audit.matches]
    made = table(
        "Findings of the audit on the culprits",
        AUDIT_HEAD,
        rows,
        text=range(len(AUDIT_HEAD)),
        commands=len(AUDIT_HEAD) - 1,
    )
    nothing = [] if rows else [NO_MATCH]
    return made + notes([*nothing, *folded(audit.problems, rest=_REST)])


def hotspots_table(rows: Sequence[HotspotRow]) -> str:
    """Return the places with the largest effects."""
    cells = [
        (
            place_name(row.kind, row.name),
            f"{row.effect_ms:.3g} ms",
            f"{row.low_ms:.3g} to {row.high_ms:.3g} ms",
            percent(row.loss_share) if row.loss_share is not None else _NONE,
            ", ".join(alias_name(alias) for alias in row.aliases[:8]) + (", …" if len(row.aliases) > 8 else "")
            or _NONE,
        )
        for row in rows[:_MOST_HOTSPOTS]
    ]
    some = f", the first {_MOST_HOTSPOTS} of {len(rows)}" if len(rows) > _MOST_HOTSPOTS else ""
    head = ("place", "adds per step", "95 % interval", "of lateness", "could also be")
    about = [
        (row.name if row.kind == "rank" else "", row.name if row.kind == "node" else "")
        for row in rows[:_MOST_HOTSPOTS]
    ]
    return table(f"Places by effect{some}", head, cells, text=(0, 4), about=about)


def clock_notes(summary: Summary) -> str:
    """Return what is known about the clocks, in sentences."""
    clocks = summary.clocks
    if len(summary.world.ranks) < 2:
        return ""
    lines = []
    if clocks.num_unknown:
        lines.append(
            f"{plural(clocks.num_unknown, 'rank')} without a usable clock comparison: not compared with other ranks"
        )
    if clocks.median_halfwidth_ns is not None and clocks.max_halfwidth_ns is not None:
        median, largest = format_duration(clocks.median_halfwidth_ns), format_duration(clocks.max_halfwidth_ns)
        residual = "unknown" if clocks.residual_ns is None else format_duration(clocks.residual_ns)
        drift = "unknown" if clocks.drift_ppm is None else f"{clocks.drift_ppm:.3g} ppm"
        lines.append(
            f"bound: half-width median {median}, largest {largest}; {plural(clocks.num_samples, 'sample')} per rank"
        )
        lines.append(f"measured: largest leave-one-out residual {residual}, largest drift {drift}")
    if clocks.extrapolated_share:
        lines.append(f"{percent(clocks.extrapolated_share)} of the step ends are outside the synchronised time")
    exits = plural(clocks.num_negative, "exit")
    lines.append(f"causality: {exits} before the last enter in {plural(clocks.num_checked, 'synchronising operation')}")
    if clocks.num_negative_messages:
        lines.append(f"{plural(clocks.num_negative_messages, 'message')} received before being sent")
    return notes([*lines, *folded((_violation(pair) for pair in clocks.pairs), rest=_REST, is_ranked=True)])


def _violation(pair: HostPair) -> str:
    sizes = f"median {format_duration(pair.median_ns)}, largest {format_duration(pair.max_ns)}"
    return (
        f"{pair.exit_host} left before {pair.enter_host} entered {pair.num_violations} times ({sizes}), "
        f"{pair.num_unexplained} beyond the half-widths"
    )


def left_out(summary: Summary, missing_plots: Iterable[str]) -> str:
    """Return what the figures do not contain: steps, ranks, records, and plots without data."""
    steps, cut = summary.steps, summary.cut_off
    hosts = {row.rank: row.host for row in summary.ranks} | {rank.rank: rank.host for rank in cut.ranks}
    counts = (
        (steps.num_warmup, "left out as warm-up"),
        (steps.num_plain, "left out, because they were recorded without detail"),
        (steps.num_unphased if steps.has_phases else 0, "left out, because they were recorded without phases"),
        (steps.num_seen - steps.num_common, "left out, because not all ranks have them"),
    )
    lines = [f"{plural(count, 'step')} {why}" for count, why in counts if count]
    if steps.kept_from:
        lines.append(f"the traces keep only the steps from {steps.kept_from} on; what came before was dropped")
    if 0 < steps.num_apart < steps.num_used:
        lines.append(
            f"jitter, gains, suspected ranks and transfer against skew come from {steps.num_apart} of the "
            f"{steps.num_used} steps ({percent(steps.num_apart / steps.num_used)}), in stretches spread over the run; "
            "their intervals are those of so many steps"
        )
    if summary.world.missing:
        lines.append(f"no trace of {rank_list(summary.world.missing)}: waits for them count as transfer")
    if cut.not_closed:
        who = named_ranks(cut.not_closed, hosts)
        lines.append(f"not closed: the trace of {who} (killed, crashed, or still running)")
    if summary.tracing.num_dropped:
        lines.append(f"{plural(summary.tracing.num_dropped, 'record')} dropped by the recorder")
    lines += folded((open_line(operation, hosts) for operation in cut.open), rest=_REST, is_ranked=True)
    with_losses = [rank for rank in cut.ranks if rank.num_lost_operations or rank.num_dropped]
    lines += folded((incomplete_rank_line(rank, hosts) for rank in with_losses), rest=_REST, is_ranked=True)
    lines += folded(cut.problems, rest=_REST)
    lines += [
        f"{kind.num_unmatched} {kind.op} of {rank_list(kind.ranks_unmatched)} have no comparable "
        "counterpart on every member: their blocked time counts as transfer"
        for kind in summary.kinds
        if kind.num_unmatched
    ]
    return notes([*lines, *missing_plots]) or "<p>Nothing: every rank, step and record is in the figures.</p>"


def run_facts(summary: Summary, plots: PlotData) -> str:
    """Return what ran, which steps the figures use, and what tracing cost."""
    world, steps, tracing = summary.world, summary.steps, summary.tracing
    num_attempts = f" ({len(summary.attempts)} in all)" if len(summary.attempts) > 1 else ""
    span = f"{steps.first} to {steps.last}" if steps.num_used > 1 else str(steps.first)
    share = "unknown share" if tracing.overhead_share is None else f"{100 * tracing.overhead_share:.2g} %"
    extra = [
        f"{count} {what}"
        for count, what in (
            (steps.num_checkpoint, "with a checkpoint"),
            (steps.num_eval, "with an evaluation"),
            (steps.num_apart if steps.num_apart < steps.num_used else 0, "taken apart operation by operation"),
        )
        if count
    ]
    more = f" and {len(world.hosts) - _MOST_HOSTS} more" if len(world.hosts) > _MOST_HOSTS else ""
    return facts(
        (
            ("Run", summary.run),
            ("Id", summary.run_id),
            ("Attempt", f"{summary.attempt}{num_attempts}"),
            ("World", f"{plural(world.world_size, 'rank')} on {plural(len(world.hosts), 'host')}"),
            ("Hosts", ", ".join(world.hosts[:_MOST_HOSTS]) + more),
            ("Mesh", world.mesh),
            ("Switches", switches_line(summary.switches)),
            ("Lab", world.emulation),
            ("Imported", world.imported),
            ("Steps", "; ".join([f"{steps.num_used} used ({span}) of {steps.num_seen}", *extra])),
            ("Steps found", "; ".join(steps.sources)),
            ("Training", outcome_line(summary)),
            ("Tracing cost", f"{share} of the time, {format_bytes(tracing.size_bytes)} on disk"),
            ("Events", f"{format_count(tracing.num_events)} recorded, {tracing.num_dropped} dropped"),
            ("Report", f"hpcpace {__version__}"),
            ("Versions", ", ".join(f"{name} {version}" for name, version in plots.versions)),
        )
    )


def rank_table(summary: Summary) -> str:
    """Return the figures of each rank, so that no number is in a plot alone."""
    are_waits_known = all(row.wait_ns is not None for row in summary.ranks)
    rows = [
        (
            str(row.rank),
            row.host,
            row.role,
            f"{milliseconds(row.step_ns)} ms",
            _NONE if row.busy_share is None else percent(row.busy_share),
            f"{100 * row.excess.share:+.1f} %" if row.excess else _NONE,
            f"±{100 * row.excess.noise:.1f} %" if row.excess else _NONE,
            _duration(row.exposed_wait_ns),
            _duration(row.exposed_transfer_ns),
            *([] if are_waits_known else [_duration(row.exposed_ns)]),
        )
        for row in summary.ranks[:_MOST_RANKS]
    ]
    head = ["rank", "host", "role", "step", "busy", "excess over role", "noise", "exposed wait", "exposed transfer"]
    if not are_waits_known:
        head.append("exposed wait or transfer")
    num_ranks = len(summary.ranks)
    which = f"All {num_ranks}" if num_ranks <= _MOST_RANKS else f"The first {_MOST_RANKS} of {num_ranks}"
    about = [(str(row.rank), row.host) for row in summary.ranks[:_MOST_RANKS]]
    inside = table("Means per step", head, rows, text=(1, 2), about=about)
    return f"<details><summary>{which} ranks in figures</summary>{inside}</details>" if rows else ""


def devices_table(summary: Summary) -> str:
    """Return what hosts and devices did in each phase; nothing without device times."""
    rows = [
        (
            row.phase,
            format_duration(row.host_ns),
            format_duration(row.device_ns),
            format_duration(row.lead_ns),
            percent(row.dry_share),
        )
        for row in summary.devices
    ]
    head = ("phase", "on the host", "on the device", "host ahead at its begin", "ran dry")
    caption = "Host and device, per step. Ran dry: share of begins at which the device waited for the host"
    return table(caption, head, rows)


def cores_table(summary: Summary) -> str:
    """Return the hosts on which ranks wait for cores; nothing without any."""
    rows = [core_cells(row) for row in summary.cores[:_MOST_HOSTS]]
    about = [("", row.host) for row in summary.cores[:_MOST_HOSTS]]
    which = f", the worst {_MOST_HOSTS} of {len(summary.cores)}" if len(summary.cores) > _MOST_HOSTS else ""
    return table(f"By host, of the rank that waits longest{which}", CORE_HEAD, rows, about=about)


def terms() -> str:
    """Return the glossary, which the terms of the page link to."""
    entries = "\n".join(
        f'<dt id="{term.anchor}" tabindex="-1">{escape(term.name)}</dt><dd>{escape(term.meaning)}</dd>'
        for term in GLOSSARY
    )
    return f'<dl class="glossary">\n{entries}\n</dl>'


def _duration(length_ns: float | None) -> str:
    return "?" if length_ns is None else format_duration(length_ns)


def probed_table(summary: Summary) -> str:
    """Return the transfers next to a probe of the hosts; empty without one."""
    if summary.probe is None:
        return ""
    rows = [probed_cells(row) for row in summary.probe.rows]
    return table("Transfers, those with the most first", HEAD, rows) + notes(
        [probed_lead(summary.probe), *probed_remarks(summary.probe)]
    )
