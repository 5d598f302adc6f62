"""The pairs of a probe as text: what links usually reach, which are slow, and a matrix of rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcpace.core.text import percent, printable
from hpcpace.probe.pair_network import best_rates
from hpcpace.probe.record import PairRow, PairsRecord
from hpcpace.report.words.probe_pairs import (
    SwitchLoad,
    bit_rate,
    bit_unit,
    hosts_in_order,
    pairs_heading,
    switch_loads,
    usual_words,
    verdicts,
)

_MOST_IN_MATRIX = 10
_MOST_SWITCHES = 8
_WIDTH = 7


def pairs_lines(pairs: PairsRecord) -> list[str]:
    """Return the pairs in lines: the usual figures, findings, sums over uplinks, and the matrix of a few hosts."""
    sentences = [*filter(None, [usual_words(pairs)]), *verdicts(pairs)]
    lines = [pairs_heading(pairs), *(f"  {words}" for words in sentences)]
    lines += _loads(switch_loads(pairs.bisections))
    hosts = hosts_in_order(pairs.rows)
    if 2 < len(hosts) <= _MOST_IN_MATRIX:
        lines += ["", *_matrix(hosts, pairs.rows)]
    return lines


def _loads(loads: Sequence[SwitchLoad]) -> Iterator[str]:
    if loads:
        yield ""
        yield "all hosts of a switch at once, with another switch:"
    for load in loads[:_MOST_SWITCHES]:
        yield (
            f"  {printable(load.switch)}: sends {bit_rate(load.sent.rate)}, "
            f"{percent(load.sent.rate / load.sent.possible)} of what its hosts can, "
            f"receives {bit_rate(load.received.rate)}"
        )
    if len(loads) > _MOST_SWITCHES:
        yield f"  and {len(loads) - _MOST_SWITCHES} more"


def _matrix(hosts: Sequence[str], rows: Sequence[PairRow]) -> Iterator[str]:
    """Yield the best rate from each host (rows) to each other one (columns), Mb/s or Gb/s."""
    best = best_rates(rows)
    scale, unit = bit_unit(list(best.values()))
    yield f"from (rows) to (columns), {unit}:"
    names = [printable(name)[: _WIDTH - 1] for name in hosts]
    yield "".join([f"{'':{_WIDTH}}", *(f"{name:>{_WIDTH}}" for name in names)])
    for name, source in zip(names, hosts, strict=True):
        cells = [f"{best[source, target] / scale:.0f}" if (source, target) in best else "-" for target in hosts]
        yield f"{name:{_WIDTH}}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells)
