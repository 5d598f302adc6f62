"""A probe: rates, times with their laws, changes, links between pairs of hosts, noise of cores, copies in hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hpcpace.core.change import whole_interval
from hpcpace.core.rundir import json_text
from hpcpace.core.text import NS_PER_US, format_bytes, format_duration, format_rate, percent, plural
from hpcpace.probe.changes import ProbeChange
from hpcpace.probe.pair_network import best_rates, late_pairs, least_latencies
from hpcpace.probe.record import (
    BisectionRow,
    CopiesRecord,
    CoreNoise,
    LatencyLaw,
    NoiseRecord,
    PairRow,
    PairsRecord,
    ProbeRecord,
    SweepRow,
)
from hpcpace.report.document import (
    NONE,
    PAGE,
    TERMINAL,
    Block,
    Document,
    Facts,
    Notes,
    Plot,
    Row,
    Section,
    SideBySide,
    Table,
    Verdict,
)
from hpcpace.report.drawing import COLOURS, axis, host_map, line, plot_text
from hpcpace.report.sections.communication import size_words

_MAX_NETWORK_HOSTS = 6
_MAX_CHANGES = 256
_MAX_SKEWS = (3, 64)
_HEIGHT_PX = 300
_Groups = list[list[SweepRow]]


def probe_document(
    record: ProbeRecord, changes: Sequence[ProbeChange] = (), remarks: Sequence[str] = (), outcome: str = ""
) -> Document:
    """Return all that there is to say of a probe.

    Args:
        record: what was probed.
        changes: since another probe.
        remarks: what could not be compared with that, a sentence each.
        outcome: of the comparison with that, one sentence; empty without one.
    """
    groups = _grouped(record.sweep)
    lost = f"{', '.join(record.lost_hosts)} stopped answering" if record.lost_hosts else ""
    changed = any(change.is_slower for change in changes)
    return Document(
        heading="hpcpace probe of",
        subject=title_words(record),
        title=f"Probe of {plural(len(record.hosts), 'host')}",
        verdict=Verdict(label="Change", headline=outcome, tag="change", kind="" if changed else "healthy")
        if outcome
        else None,
        warnings=[*([("warning", lost)] if lost else []), *(("problem", problem) for problem in record.problems)],
        sections=(
            _probe_section(record),
            changes_section(changes, remarks),
            Section("Rates", (_rates_table(groups, record), Notes(_allowed(groups, record)), *_rate_plots(groups))),
            _times_section(groups, record),
            _sizes_section(groups),
            _skew_section(record),
            pairs_section(record.pairs),
            noise_section(record.noise),
            copies_section(record.copies),
        ),
        data=json_text(record.to_json()),
        data_name="probe.json",
        rest="--json",
        has_glossary=False,
    )


def title_words(record: ProbeRecord) -> str:
    """Return who was probed, over what, and how long it took."""
    devices = record.device_name or {"cpu": "CPUs"}.get(record.device, record.device)
    who = f"{plural(len(record.hosts), 'host')}, {plural(record.num_ranks, 'rank')}"
    return f"{who}: {record.backend} on {devices}, {record.took_s:.0f} s"


def rate_words(bytes_per_s: float) -> str:
    """Return a rate as nccl-tests count it, in bytes: `1.23 GB/s`."""
    return f"{format_bytes(bytes_per_s)}/s"


def _share(row: SweepRow) -> str:
    """Return which share of what the hosts' networks allow an operation reached; empty if that is unknown."""
    return "" if row.limit is None else f"{100 * row.busbw / row.limit:.0f} %"


def _grouped(rows: Sequence[SweepRow]) -> _Groups:
    """Return rows by operation and number of hosts, in their order."""
    found: dict[tuple[str, int], list[SweepRow]] = {}
    for row in rows:
        found.setdefault((row.op, row.num_nodes), []).append(row)
    return list(found.values())


def _probe_section(record: ProbeRecord) -> Section:
    networks: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for host in record.hosts:
        networks.setdefault((host.rate_words, tuple(host.interfaces)), []).append(host.name)
    facts = []
    for (words, interfaces), names in networks.items():
        shown = ", ".join(names[:_MAX_NETWORK_HOSTS]) + (" ..." if len(names) > _MAX_NETWORK_HOSTS else "")
        facts.append(("network", f"{shown}: {', '.join(filter(None, (','.join(interfaces), words)))}"))
    versions = ", ".join(f"{name} {number}" for name, number in sorted(record.versions.items()))
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in record.part_s.items())
    facts += [("cluster", record.cluster), ("job", record.job_id), ("versions", versions), ("time", parts)]
    return Section("This probe", (Facts(facts),), is_reference=True)


def changes_section(changes: Sequence[ProbeChange], remarks: Sequence[str]) -> Section:
    """Return what changed since another probe: all operations, and of all else what changed or cannot tell."""
    sweep = [one for one in changes if one.part == "sweep"]
    others = [one for one in changes if one.part != "sweep" and (one.is_slower or one.is_faster or not one.is_decided)]
    others.sort(key=lambda one: (not one.is_slower, not one.is_faster, -one.value))
    return Section(
        "Since the other probe",
        (
            Table(
                ("what", "hosts", "", "change"),
                [_change_cells(change) for change in [*sweep, *others]],
                text=(0, 2, 3),
                limits=(len(sweep) + 16, len(sweep) + _MAX_CHANGES),
            ),
            Notes([*_counts(changes), *remarks], has_terms=False),
        ),
        lead="time of each operation, and of pairs, cores and copies that changed, with intervals" if changes else "",
    )


def _change_cells(change: ProbeChange) -> tuple[str, str, str, str]:
    states = (
        (change.is_slower, "slower"),
        (change.is_faster, "faster"),
        (change.is_decided, "unchanged"),
        (True, "cannot tell"),
    )
    state = next(word for is_it, word in states if is_it)
    hosts = str(change.num_nodes) if change.num_nodes else ""
    return (
        change.name,
        hosts,
        change.kind,
        f"{state}: time {100 * change.share:+.1f} % ({whole_interval(change)})",
    )


def _counts(changes: Sequence[ProbeChange]) -> Iterator[str]:
    """Yield for each part besides the sweep how many comparisons there were, and what they say."""
    for part in dict.fromkeys(one.part for one in changes if one.part != "sweep"):
        own = [one for one in changes if one.part == part]
        numbers = {
            "slower": sum(one.is_slower for one in own),
            "faster": sum(one.is_faster for one in own),
            "unclear": sum(not one.is_decided for one in own),
        }
        said = [f"{number} {word}" for word, number in numbers.items() if number] or ["nothing changed"]
        yield f"{part}: {plural(len(own), 'comparison')}, {', '.join(said)}"


def _rates_table(groups: _Groups, record: ProbeRecord) -> Table:
    laws = {(law.op, law.num_nodes): law for law in record.laws}
    rows = []
    for of in groups:
        law = laws.get((of[0].op, of[0].num_nodes))
        rows.append(
            (
                of[0].op,
                str(of[0].num_nodes),
                str(of[0].num_ranks),
                format_duration(of[0].p50_ns),
                size_words(of[-1].size_bytes),
                rate_words(of[-1].busbw),
                _share(of[-1]),
                ", ".join(size_words(piece.from_bytes) for piece in law.pieces[1:]) if law is not None else "",
            )
        )
    head = ("operation", "hosts", "ranks", "latency", "largest size", "busbw", "of limit", "switches at")
    return Table(head, rows, "latency of the smallest size, busbw of the largest", text=(0, 7))


def _allowed(groups: _Groups, record: ProbeRecord) -> list[str]:
    """Return what the largest size of each operation reached: `all_reduce: busbw 41 % of what 2 x 200 Gb/s allow`."""
    slowest = min(record.hosts, key=lambda host: host.limit or 0.0, default=None)
    return [
        f"{of[-1].op}: busbw {_share(of[-1])} of what {slowest.rate_words} allow"
        for of in groups
        if slowest is not None and of[-1].limit is not None and of[0].num_nodes == len(record.hosts)
    ]


def _rate_plots(groups: _Groups) -> list[Plot]:
    """Return busbw over sizes of all operations over all hosts."""
    most = max((rows[0].num_nodes for rows in groups), default=0)
    shown = [rows for rows in groups if rows[0].num_nodes == most]
    if not shown:
        return []
    traces, legend = [], []
    for rows, color in zip(shown, COLOURS, strict=False):
        curve = line(
            [row.size_bytes for row in rows],
            np.array([row.busbw / 1e9 for row in rows]),
            color,
            hover=f"{plot_text(rows[0].op)}: %{{y:.4~g}} GB/s at %{{text}}",
        )
        text = [size_words(row.size_bytes) + f", {_share(row)} of limit" * (row.limit is not None) for row in rows]
        traces.append({**curve, "mode": "lines+markers", "text": text})
        legend.append((rows[0].op, color, ""))
    limit = max((row.limit for rows in shown for row in rows if row.limit is not None), default=None)
    caption = f"busbw over {plural(most, 'host')} as nccl-tests define it."
    every = [row for rows in shown for row in rows]
    if limit is not None:
        ends = [min(row.size_bytes for row in every), max(row.size_bytes for row in every)]
        hover = "limit: %{y:.4~g} GB/s"
        traces.append(line(ends, np.array([limit, limit]) / 1e9, "@muted", dash="dash", hover=hover))
        caption += f" Dashed: what the hosts' networks allow at most, {rate_words(limit)}."
    return [
        Plot(
            name="probe-rates",
            label="busbw of each operation over sizes",
            caption=caption,
            height_px=_HEIGHT_PX + 40,
            traces=traces,
            layout={"xaxis": _size_axis(every), "yaxis": axis("GB/s", type="log", exponentformat="none")},
            legend=legend,
        )
    ]


def _size_axis(rows: Sequence[SweepRow]) -> dict[str, object]:
    least, most = min(row.size_bytes for row in rows), max(row.size_bytes for row in rows)
    powers = [1 << power for power in range(0, 64, 4) if least <= 1 << power <= most]
    return axis("size", type="log", tickvals=powers, ticktext=[size_words(size) for size in powers])


def _times_section(groups: _Groups, record: ProbeRecord) -> Section:
    plots = _time_plots(groups, record.laws)
    content: list[Block | None] = [SideBySide(plots[at : at + 2], is_even=True) for at in range(0, len(plots), 2)]
    return Section(
        "Times and laws",
        [*content, _laws_table(record)],
        lead="dots are medians, lines the law: latency and rate in pieces; where it jumps or bends, the library "
        "switches algorithm or protocol",
    )


def _time_plots(groups: _Groups, laws: Sequence[LatencyLaw]) -> list[Plot]:
    """Return time over sizes of each operation, with a curve for each number of hosts."""
    known = {(law.op, law.num_nodes): law for law in laws}
    plots: list[Plot] = []
    for op in dict.fromkeys(rows[0].op for rows in groups):
        shown = [rows for rows in groups if rows[0].op == op]
        traces, legend = [], []
        for rows, color in zip(shown, COLOURS, strict=False):
            hosts = plural(rows[0].num_nodes, "host")
            sizes = [row.size_bytes for row in rows]
            times_us = np.array([row.p50_ns / NS_PER_US for row in rows])
            dots = line(sizes, times_us, color, hover=f"{hosts}: %{{y:.4~g}} us at %{{text}}")
            traces.append({**dots, "mode": "markers", "text": [size_words(size) for size in sizes]})
            law = known.get((op, rows[0].num_nodes))
            if law is not None:
                dense = np.geomspace(law.least_bytes, law.most_bytes, 80)
                fitted_us = np.array([max(law.time_ns(size), 1.0) / NS_PER_US for size in dense])
                traces.append(line([float(f"{size:.6g}") for size in dense], fitted_us, color, hover=f"law, {hosts}"))
            legend.append((hosts, color, ""))
        every = [row for rows in shown for row in rows]
        plots.append(
            Plot(
                name=f"probe-time-{len(plots)}",
                label=f"Time of {op} over sizes",
                caption=f"Time of {op}.",
                height_px=_HEIGHT_PX,
                traces=traces,
                layout={"xaxis": _size_axis(every), "yaxis": axis("us", type="log", exponentformat="none")},
                legend=legend,
            )
        )
    return plots


def _laws_table(record: ProbeRecord) -> Table:
    rows = []
    for law in record.laws:
        errors = f"{100 * law.least_error:+.0f} to {100 * law.most_error:+.0f} %"
        alone = f"{100 * law.single_least_error:+.0f} to {100 * law.single_most_error:+.0f} %"
        for number, piece in enumerate(law.pieces):
            begins = f"{size_words(piece.from_low_bytes)} to {size_words(piece.from_high_bytes)}" if number else ""
            rows.append(
                (
                    *(("", "") if number else (law.op, str(law.num_nodes))),
                    size_words(piece.from_bytes),
                    begins,
                    format_duration(piece.latency_ns),
                    f"{format_duration(piece.latency_low_ns)} to {format_duration(piece.latency_high_ns)}",
                    rate_words(1e9 / piece.ns_per_byte) if piece.ns_per_byte > 0 else "",
                    *(("", "") if number else (errors, alone)),
                )
            )
    head = ("operation", "hosts", "from", "95 %", "latency", "95 %", "rate", "errors", "errors of one piece")
    return Table(head, rows, "Laws: time = latency + size / rate, in pieces", on=PAGE)


def _sizes_section(groups: _Groups) -> Section:
    """Return a table of sizes for each operation, as nccl-tests print them; a terminal has those over all hosts."""
    most = max((rows[0].num_nodes for rows in groups), default=0)
    head = ("size", "time", "algbw", "busbw", "of limit", "p95", "p99", "times")
    tables = []
    for rows in groups:
        cells = [
            (
                size_words(row.size_bytes),
                format_duration(row.p50_ns),
                rate_words(row.algbw),
                rate_words(row.busbw),
                _share(row),
                format_duration(row.p95_ns),
                format_duration(row.p99_ns),
                str(row.num_repetitions),
            )
            for row in rows
        ]
        where = f"{rows[0].op}, {plural(rows[0].num_nodes, 'host')}, {plural(rows[0].num_ranks, 'rank')}"
        on = None if rows[0].num_nodes == most else PAGE
        tables.append(Table(head, cells, where, text=(), details=where, on=on))
    return Section("Every size", tables)


def _skew_section(record: ProbeRecord) -> Section:
    latest = sorted(record.skews, key=lambda skew: -skew.mean_ns)
    rows = [(str(one.rank), one.host, format_duration(one.mean_ns), format_duration(one.p99_ns)) for one in latest]
    return Section(
        "Own skew",
        (Table(("rank", "host", "mean", "p99"), rows, text=(1,), limits=_MAX_SKEWS, which="latest"),),
        lead="what a rank adds by itself between two operations, over the median of all ranks: time in which it did "
        "not run, or ran slowly",
    )


_MAX_ON_PAGE, _MAX_OPEN = 256, 16
_MAX_CORES, _MAX_ROWS, _MAX_SWITCHES = 8, 16, 8
"""On a terminal."""
_MAX_IN_MATRIX, _MIN_IN_MAP = 10, 3


def pairs_section(pairs: PairsRecord | None) -> Section:
    """Return what links carry, which are slow, and the best rate and least latency of each pair."""
    title = "Pairs of hosts"
    if pairs is None:
        return Section(title, ())
    late = late_pairs(pairs.rows)
    found = [finding.words for finding in pairs.findings]
    if pairs.rows and not found:
        found = ["no link is slower than the others"]
    if least_latencies(pairs.rows) and not late:
        found.append("no pair's latency stands out")
    return Section(
        title,
        (
            Notes([_heading(pairs), _usual(pairs), *found, pairs.note], has_terms=False),
            pairs_map(pairs),
            _matrix(pairs),
            _late_table(late, pairs.usual_latency_ns),
            _switch_table(pairs),
            _pairs_table(pairs),
        ),
        lead="two hosts at a time, one way and then the other; of all rounds, the best of each pair",
    )


def _heading(pairs: PairsRecord) -> str:
    if not pairs.rows:
        return "pairs of hosts: not measured"
    num_pairs = len({frozenset((row.first, row.second)) for row in pairs.rows})
    return f"{plural(num_pairs, 'pair')} over {pairs.carrier}"


def _usual(pairs: PairsRecord) -> str:
    """Return what a link usually carries; empty if nothing was measured."""
    if pairs.usual is None:
        return ""
    share = "" if pairs.usual_of_limit is None else f", {percent(pairs.usual_of_limit)} of the line rate"
    latency = "" if pairs.usual_latency_ns is None else f", latency {format_duration(pairs.usual_latency_ns)}"
    return f"a link usually carries {_bit_rate(pairs.usual)}{share}{latency}"


def _bit_rate(bytes_per_s: float) -> str:
    """Return a rate of bytes as networks are named, in bits: `9.4 Gb/s`."""
    return format_rate(8 * bytes_per_s)


def _bit_unit(best: Mapping[tuple[str, str], float]) -> tuple[float, str]:
    """Return by what to divide rates of bytes so that they have three or four digits, and their unit in bits."""
    return (1e9 / 8, "Gb/s") if max(best.values(), default=0.0) * 8 >= 1e10 else (1e6 / 8, "Mb/s")


def _by_number(name: str) -> tuple[str, int, str]:
    """Order n10 after n9."""
    digits = name[len(name.rstrip("0123456789")) :]
    return name[: len(name) - len(digits)], int(digits or 0), name


def _hosts_of(pairs: PairsRecord) -> list[str]:
    return sorted({name for row in pairs.rows for name in (row.first, row.second)}, key=_by_number)


def pairs_map(pairs: PairsRecord) -> Plot | None:
    """Return the map of rates from host to host; None for fewer than three hosts."""
    hosts, best = _hosts_of(pairs), best_rates(pairs.rows)
    if len(hosts) < _MIN_IN_MAP or not best:
        return None
    per_unit, unit = _bit_unit(best)
    place = {name: number for number, name in enumerate(hosts)}
    rates = np.full((len(hosts), len(hosts)), np.nan)
    for (source, target), rate in best.items():
        rates[place[source], place[target]] = rate / per_unit
    usual = _bit_rate(float(np.nanmedian(rates)) * per_unit)
    return host_map(
        hosts,
        rates,
        name="probe-pairs",
        label="Rate from host to host",
        caption=f"Best rate from the host of a row to that of a column: blue is the median of {usual} or more, orange "
        "is slower; empty where it was not measured.",
        unit=unit,
        is_rate=True,
    )


def _matrix(pairs: PairsRecord) -> Table:
    """Return the best rates between a few hosts, for a terminal."""
    hosts, best = _hosts_of(pairs), best_rates(pairs.rows)
    per_unit, unit = _bit_unit(best)
    is_small = 2 < len(hosts) <= _MAX_IN_MATRIX
    rows = [
        (
            source,
            *(f"{best[source, to] / per_unit:.0f}" if (source, to) in best else NONE for to in hosts),
        )
        for source in hosts
        if is_small
    ]
    return Table(("", *hosts), rows, f"from (rows) to (columns), {unit}", on=TERMINAL)


def _late_table(late: Sequence[PairRow], usual_ns: float | None) -> Table:
    rows = [
        Row(
            (
                row.first,
                row.second,
                _duration(row.least_ns),
                f"{row.least_ns / usual_ns:.1f} times" if row.least_ns and usual_ns else "",
                _duration(row.p50_ns),
                _duration(row.p99_ns),
            ),
            hosts=f"{row.first} {row.second}",
        )
        for row in late
    ]
    head = ("host", "other host", "latency", "of the usual", "median", "p99")
    caption = "latency that stands out: half a round trip of 8 bytes, the least"
    return Table(head, rows, caption, text=(0, 1), limits=(_MAX_SWITCHES, _MAX_ROWS))


def _switch_table(pairs: PairsRecord) -> Table:
    """Return what each switch that both sent and received did at its best."""
    sent: dict[str, BisectionRow] = {}
    received: dict[str, BisectionRow] = {}
    for row in sorted(pairs.bisections, key=lambda each: each.rate):
        sent[row.source] = received[row.target] = row
    rows = [
        (
            name,
            *(
                text
                for of in (sent[name], received[name])
                for text in (_bit_rate(of.rate), percent(of.rate / of.possible))
            ),
        )
        for name in sorted(sent.keys() & received.keys(), key=_by_number)
    ]
    head = ("switch", "sends", "of its hosts' links", "receives", "of its hosts' links")
    caption = "all hosts of a switch at once, with another switch: its best round"
    return Table(head, rows, caption, limits=(_MAX_SWITCHES, 0))


def _pairs_table(pairs: PairsRecord) -> Table:
    """Return every pair with its best rates and its least latency, the slowest first."""

    def key_of(row: PairRow) -> tuple[str, str]:
        return min(row.first, row.second), max(row.first, row.second)

    best, latency = best_rates(pairs.rows), least_latencies(pairs.rows)
    problems = {key_of(row): row.problem for row in pairs.rows if row.problem}
    keys = sorted(
        {key_of(row) for row in pairs.rows},
        key=lambda key: (min(best.get(key, 0.0), best.get(key[::-1], 0.0)), key),
    )
    rows = []
    for key in keys:
        rates = [_bit_rate(best[way]) if way in best else "" for way in (key, key[::-1])]
        row = latency.get(key)
        times = [_duration(one) for one in (row.least_ns, row.p50_ns, row.p99_ns)] if row is not None else [""] * 3
        shown = (*key, *rates, *times, *([problems.get(key, "")] if problems else []))
        rows.append(Row(shown, hosts=" ".join(key)))
    head = ["host", "other host", "rate to it", "rate from it", "latency", "median", "p99"]
    return Table(
        [*head, *(["not measured"] if problems else [])],
        rows,
        "Best rate and least latency (half a round trip of 8 bytes) of each pair, the slowest first",
        text=(0, 1, 7),
        limits=(0, _MAX_ON_PAGE),
        which="slowest",
        details=f"{len(keys)} pairs of hosts in figures" if len(keys) > _MAX_OPEN else "",
        on=PAGE,
    )


def _duration(time_ns: float | None) -> str:
    return "" if time_ns is None else format_duration(time_ns)


def noise_section(noise: NoiseRecord | None) -> Section:
    """Return what keeps cores from equal pieces of work; empty where noise was not part of the probe."""
    title = "Noise of cores"
    if noise is None:
        return Section(title, ())
    heading, usual = "noise of cores: not measured", ""
    if noise.cores:
        figures = [core.figures for core in noise.cores]
        span, resolution, share = (
            float(np.median([getattr(one, name) for one in figures])) for name in ("span_ns", "resolution_ns", "share")
        )
        heading = f"{plural(len(figures), 'core')}, {format_duration(span)} each, detours from "
        heading += f"{format_duration(resolution)} on"
        usual = f"a core usually loses {percent(share)} of the time"
    return Section(
        title,
        (
            Notes([heading, usual], has_terms=False),
            _noisy_hosts(noise.cores),
            _noisy_cores(noise.cores),
            Notes(noise.notes, has_terms=False),
        ),
        lead="what keeps a core from equal pieces of work; a detour is a piece 10 % longer than the shortest",
    )


def _noisy_hosts(cores: Sequence[CoreNoise]) -> Table:
    by_host: dict[str, list[CoreNoise]] = {}
    for core in cores:
        by_host.setdefault(core.host, []).append(core)
    worst = {name: max(own, key=lambda core: core.figures.share) for name, own in by_host.items()}
    rows = [
        (
            name,
            str(len(by_host[name])),
            percent(float(np.median([core.figures.share for core in by_host[name]]))),
            percent(worst[name].figures.share),
            str(worst[name].cpu),
            format_duration(max(core.figures.longest_ns for core in by_host[name])),
            str(sum(core.figures.period_ns is not None for core in by_host[name])),
        )
        for name in sorted(by_host, key=lambda name: -worst[name].figures.share)
    ]
    head = ("host", "cores", "usually lost", "most lost", "by core", "longest", "cores with a period")
    return _of_hosts(head, rows, "time that detours cost on the cores of each host", which="noisiest")


def _noisy_cores(cores: Sequence[CoreNoise]) -> Table:
    rows = [
        (
            core.host,
            str(core.cpu),
            percent(core.figures.share),
            format_duration(core.figures.longest_ns),
            str(core.figures.num_detours),
            "no period" if core.figures.period_ns is None else format_duration(core.figures.period_ns),
            "" if core.figures.period_share is None else percent(core.figures.period_share),
        )
        for core in sorted(cores, key=lambda core: -core.figures.share)
    ]
    head = ("host", "core", "lost", "longest", "detours", "recurs every", "lost to that")
    return _of_hosts(head, rows, "cores, the noisiest first", which="noisiest")


def copies_section(copies: CopiesRecord | None) -> Section:
    """Return how fast hosts copy; empty where copies were not part of the probe."""
    if copies is None:
        return Section("Copies", ())
    memory = [
        (row.host, str(row.numa_node), str(row.num_threads), f"{format_bytes(row.rate)}/s")
        for row in sorted(copies.memory, key=lambda row: row.rate / max(row.num_threads, 1))
    ]
    devices = [
        (
            row.host,
            str(row.device),
            str(row.numa_node),
            "pinned" if row.is_pinned else "not pinned",
            f"{format_bytes(row.to_device)}/s",
            f"{format_bytes(row.from_device)}/s",
            "" if row.limit is None else percent(max(row.to_device, row.from_device) / row.limit),
        )
        for row in copies.devices
    ]
    of_devices = ("host", "GPU", "NUMA node", "memory", "to the GPU", "from the GPU", "of its link")
    return Section(
        "Copies",
        (
            _of_hosts(
                ("host", "NUMA node", "cores", "rate"),
                memory,
                "copies within memory, read and written together, the slowest first",
                which="slowest",
            ),
            _of_hosts(of_devices, devices, "copies between host and device", which="first", text=(0, 3)),
            Notes(copies.notes, has_terms=False),
        ),
    )


def _of_hosts(
    head: Sequence[str], rows: Sequence[Sequence[str]], caption: str, *, which: str, text: Sequence[int] = (0,)
) -> Table:
    """Return a table whose first column is a host; a page closes a long one, and both cut a very long one."""
    return Table(
        head,
        [Row(row, hosts=row[0]) for row in rows],
        caption,
        text=text,
        limits=(_MAX_CORES if which == "noisiest" else _MAX_ROWS, _MAX_ON_PAGE),
        which=which,
        details=f"{caption}: {len(rows)} rows" if len(rows) > _MAX_OPEN else "",
    )
