"""What a probe found of single hosts: links between pairs of them, noise of their cores, and copies within them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hpcpace.core.text import format_bytes, format_duration, format_rate, percent, plural
from hpcpace.probe.pair_network import best_rates, late_pairs, least_latencies
from hpcpace.probe.record import BisectionRow, CopiesRecord, CoreNoise, NoiseRecord, PairRow, PairsRecord
from hpcpace.report.document import NONE, PAGE, TERMINAL, Notes, Plot, Row, Section, Table
from hpcpace.report.drawing import host_map

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
