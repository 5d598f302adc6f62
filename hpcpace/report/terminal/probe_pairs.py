"""The pairs of a probe as text: what links usually reach, which are slow, and a matrix of rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcpace.probe.pair_record import BisectionRow, PairRow, PairsRecord
from hpcpace.quoting import printable
from hpcpace.units import format_duration, format_rate
from hpcpace.wording import percent, plural

_MOST_IN_MATRIX = 10
_MOST_SWITCHES = 8
_WIDTH = 7


def pairs_lines(pairs: PairsRecord) -> list[str]:
    """Return the pairs in lines: the usual figures, findings, sums over uplinks, and the matrix of a few hosts."""
    lines = [*_heading(pairs)]
    lines += [f"  {printable(finding.words)}" for finding in pairs.findings]
    if pairs.rows and not pairs.findings:
        lines.append("  no link is slower than the others")
    lines += [f"  {pairs.note}"] if pairs.note else []
    lines += _bisections(pairs.bisections)
    hosts = sorted({name for row in pairs.rows for name in (row.first, row.second)}, key=_by_number)
    if 2 < len(hosts) <= _MOST_IN_MATRIX:
        lines += ["", *_matrix(hosts, pairs.rows)]
    return lines


def _heading(pairs: PairsRecord) -> Iterator[str]:
    if not pairs.rows:
        yield "pairs of hosts: not measured"
        return
    num_pairs = len({frozenset((row.first, row.second)) for row in pairs.rows})
    yield f"pairs of hosts: {plural(num_pairs, 'pair')} over {printable(pairs.carrier)}"
    if pairs.usual is not None:
        share = "" if pairs.usual_of_limit is None else f", {percent(pairs.usual_of_limit)} of the line rate"
        latency = "" if pairs.usual_latency_ns is None else f", latency {format_duration(pairs.usual_latency_ns)}"
        yield f"  a link usually carries {_rate(pairs.usual)}{share}{latency}"


def _bisections(bisections: Sequence[BisectionRow]) -> Iterator[str]:
    """Yield what the hosts of each switch sent and received at once, by its best partner."""
    sent: dict[str, BisectionRow] = {}
    received: dict[str, BisectionRow] = {}
    for row in sorted(bisections, key=lambda each: each.rate):
        sent[row.source] = received[row.target] = row
    if bisections:
        yield ""
        yield "all hosts of a switch at once, with another switch:"
    for leaf in sorted(sent, key=_by_number)[:_MOST_SWITCHES]:
        up, down = sent[leaf], received[leaf]
        yield (
            f"  {printable(leaf)}: sends {_rate(up.rate)}, {percent(up.rate / up.possible)} of what its hosts can, "
            f"receives {_rate(down.rate)}"
        )
    if len(sent) > _MOST_SWITCHES:
        yield f"  and {len(sent) - _MOST_SWITCHES} more"


def _matrix(hosts: Sequence[str], rows: Sequence[PairRow]) -> Iterator[str]:
    """Yield the best rate from each host (rows) to each other one (columns), Mb/s or Gb/s."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        for key, rate in (((row.first, row.second), row.forward), ((row.second, row.first), row.backward)):
            if rate is not None:
                best[key] = max(rate, best.get(key, 0.0))
    scale, unit = (1e9, "Gb/s") if max(best.values(), default=0.0) * 8 >= 1e10 else (1e6, "Mb/s")
    yield f"from (rows) to (columns), {unit}:"
    names = [printable(name)[: _WIDTH - 1] for name in hosts]
    yield "".join([f"{'':{_WIDTH}}", *(f"{name:>{_WIDTH}}" for name in names)])
    for name, source in zip(names, hosts, strict=True):
        cells = [f"{8 * best[source, target] / scale:.0f}" if (source, target) in best else "-" for target in hosts]
        yield f"{name:{_WIDTH}}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells)


def _by_number(name: str) -> tuple[str, int, str]:
    digits = name[len(name.rstrip("0123456789")) :]
    return name[: len(name) - len(digits)], int(digits or 0), name


def _rate(bytes_per_s: float) -> str:
    return format_rate(8 * bytes_per_s)
