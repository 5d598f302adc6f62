"""The time of an operation as a law of its size, in pieces, and how the transfer of a step grows with nodes by it.

Libraries switch algorithm and protocol with the size, so that one latency and one rate fit no real curve. Each piece is
a straight line, fitted by least squares of relative errors; the number of pieces is that with the least Bayesian
information criterion (Schwarz 1978), and their limits come from dynamic programming over all partitions of the measured
sizes (Bellman & Roth 1969). Pieces need not meet: a switch of protocol is a jump.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import listed
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.growth import Algorithm, TransferTerm
from hpcpace.metrics.special import nonnegative_least_squares
from hpcpace.probe.record import MAX_PIECES, LatencyLaw, LawPiece

_MAX_NAMED = 16


def transfer_term(
    laws: Sequence[LatencyLaw], calls: Sequence[tuple[str, float, float]], *, num_nodes: int, transfer_ns: float
) -> TransferTerm | None:
    """Return how the transfer of a step grows with nodes, for `hpcpace.metrics.growth.extrapolate`.

    The operation with the most transfer decides between ring and tree: of both forms, the one that fits its laws over
    numbers of hosts with the smaller squared relative error; a ring where it has laws of fewer than three.

    Args:
        laws: of one probe.
        calls: of a step: operation, size in bytes, and how often.
        num_nodes: of the run.
        transfer_ns: exposed transfer per step on these nodes.

    Returns:
        None without a law of these operations on as many hosts.
    """
    of_op = {(law.op, law.num_nodes): law for law in laws if law.num_nodes > 1}
    known = [(of_op[op, num_nodes], size, count) for op, size, count in calls if (op, num_nodes) in of_op]
    if num_nodes < 2 or not known:
        return None
    largest, size_bytes, _ = max(known, key=lambda one: one[0].time_ns(one[1]) * one[2])
    points = sorted((num, law.time_ns(size_bytes)) for (op, num), law in of_op.items() if op == largest.op)
    counts, times_ns = np.array(points, np.float64).T
    if len(counts) >= 3 and _misfit([np.log2(counts)], times_ns) < _misfit(
        [(counts - 1) / counts, counts - 1], times_ns
    ):
        return TransferTerm(algorithm=Algorithm.TREE, transfer_ns=transfer_ns)
    latency_ns = sum(count * max(law.pieces[0].latency_ns, 0.0) for law, _, count in known) / (num_nodes - 1)
    return TransferTerm(algorithm=Algorithm.RING, transfer_ns=transfer_ns, latency_ns=latency_ns)


def no_law_of(laws: Sequence[LatencyLaw], operations: Sequence[str], num_nodes: int) -> str:
    """Return why `transfer_term` has no law of some operations on a number of nodes, in words."""
    names = listed(sorted(set(operations)))
    if not names:
        return "the operations of a step are not known"
    counts = sorted({law.num_nodes for law in laws if law.num_nodes > 1 and law.op in operations})
    if not counts:
        return f"it has no law of {names} between nodes"
    shown = [str(count) for count in counts[:_MAX_NAMED]]
    more = [f"{len(counts) - _MAX_NAMED} more numbers of"] if len(counts) > _MAX_NAMED else []
    return f"its laws of {names} are of {listed([*shown, *more])} nodes, and none of {num_nodes}"


def _misfit(terms: Sequence[Floats], times_ns: Floats) -> float:
    """Return the squared relative error of the best sum of terms with coefficients of at least 0, per free point."""
    matrix = np.stack(terms, axis=1) / times_ns[:, np.newaxis]
    _, residual = nonnegative_least_squares(matrix, np.ones(len(times_ns)))
    return float(residual**2 / (len(times_ns) - len(terms)))


MIN_SIZES = 4
"""Sizes that a law needs; fewer say nothing about its form."""
_MIN_IN_PIECE = 3
_NUM_PARAMETERS = 3  # of a piece: latency, rate and where it begins
_MIN_DEVIATION = 0.02
"""Relative errors below this do not count: they are within what repetitions differ by."""
_NUM_DRAWS = 200
_MAX_SAMPLES = 400


@dataclass(frozen=True, kw_only=True)
class PiecewiseFit:
    """Laws fitted to several curves at once, (num_curves,) each, with equally many pieces.

    Attributes:
        first: index of the first size of each piece, int64, (num_curves, num_pieces).
        latency_ns, ns_per_byte: of each piece, float64, (num_curves, num_pieces).
        error: sum of squared relative errors, float64, (num_curves,).
    """

    first: Ints
    latency_ns: Floats
    ns_per_byte: Floats
    error: Floats

    @property
    def num_pieces(self) -> int:
        """Pieces of each law."""
        return int(self.first.shape[1])

    def times_ns(self, size_bytes: Floats) -> Floats:
        """Return the fitted times of the measured sizes, (num_curves, num_sizes)."""
        number = (np.arange(len(size_bytes))[np.newaxis, :, np.newaxis] >= self.first[:, np.newaxis, :]).sum(2) - 1
        latency_ns = np.take_along_axis(self.latency_ns, number, 1)
        return np.asarray(latency_ns + np.take_along_axis(self.ns_per_byte, number, 1) * size_bytes)


def fit_pieces(size_bytes: Floats, time_ns: Floats, num_pieces: int) -> PiecewiseFit:
    """Fit laws of a given number of pieces to curves, by least squares of relative errors.

    Args:
        size_bytes: ascending, float64, (num_sizes,).
        time_ns: above 0, float64, (num_curves, num_sizes).
        num_pieces: of at least three sizes each, but for a law of one piece.
    """
    lines = _Lines(size_bytes, time_ns)
    num_curves, num_sizes = time_ns.shape
    least = _MIN_IN_PIECE if num_pieces > 1 else 1
    best = np.full((num_pieces + 1, num_curves, num_sizes + 1), np.inf)
    begin = np.zeros((num_pieces + 1, num_curves, num_sizes + 1), np.int64)
    best[0, :, 0] = 0.0
    for piece in range(1, num_pieces + 1):
        for end in range(piece * least, num_sizes + 1):
            starts = np.arange((piece - 1) * least, end - least + 1)
            errors = best[piece - 1][:, starts] + lines.error[:, starts, end - 1]
            chosen = errors.argmin(axis=1)
            begin[piece, :, end] = starts[chosen]
            best[piece, :, end] = np.take_along_axis(errors, chosen[:, np.newaxis], 1)[:, 0]
    first = np.zeros((num_curves, num_pieces), np.int64)
    last = np.zeros((num_curves, num_pieces), np.int64)
    end_of = np.full(num_curves, num_sizes)
    curves = np.arange(num_curves)
    for piece in range(num_pieces, 0, -1):
        last[:, piece - 1] = end_of - 1
        end_of = begin[piece, curves, end_of]
        first[:, piece - 1] = end_of
    pick = (curves[:, np.newaxis], first, last)
    return PiecewiseFit(
        first=first, latency_ns=lines.latency_ns[pick], ns_per_byte=lines.ns_per_byte[pick], error=best[-1, :, -1]
    )


def choose_pieces(size_bytes: Floats, time_ns: Floats) -> PiecewiseFit:
    """Fit the law to one curve whose number of pieces has the least Bayesian information criterion.

    Args:
        size_bytes: ascending, float64, (num_sizes,).
        time_ns: above 0, float64, (num_sizes,).
    """
    num_sizes = len(size_bytes)
    fits = [
        fit_pieces(size_bytes, time_ns[np.newaxis], number)
        for number in range(1, max(min(MAX_PIECES, num_sizes // _MIN_IN_PIECE), 1) + 1)
    ]
    variances = [max(float(fit.error[0]) / num_sizes, _MIN_DEVIATION**2) for fit in fits]
    criteria = [
        num_sizes * np.log(variance) + _NUM_PARAMETERS * fit.num_pieces * np.log(num_sizes)
        for fit, variance in zip(fits, variances, strict=True)
    ]
    return fits[int(np.argmin(criteria))]


def fit_law(
    size_bytes: Sequence[int],
    rounds_ns: Sequence[Sequence[Floats]],
    *,
    op: str,
    num_nodes: int,
    num_ranks: int,
    num_draws: int = _NUM_DRAWS,
) -> LatencyLaw | None:
    """Return the law of the median time of an operation; None below four sizes.

    Intervals are bootstrapped: rounds are drawn with replacement, then repetitions within them, and each draw is fitted
    anew with as many pieces. A switch point is never known better than to lie between two measured sizes.

    Args:
        size_bytes: ascending.
        rounds_ns: for each size, times of the repetitions of each round, float64, (num_repetitions,).
        op, num_nodes, num_ranks: of the law.
        num_draws: of the bootstrap.
    """
    if len(size_bytes) < MIN_SIZES:
        return None
    sizes = np.asarray(size_bytes, np.float64)
    time_ns = np.array([np.median(np.concatenate(list(rounds))) for rounds in rounds_ns])
    fit = choose_pieces(sizes, time_ns)
    single = fit_pieces(sizes, time_ns[np.newaxis], 1)
    rng = np.random.default_rng(0)
    drawn_ns = np.stack([_drawn_medians(rounds, num_draws, rng) for rounds in rounds_ns], axis=1)
    drawn = fit_pieces(sizes, drawn_ns, fit.num_pieces)
    errors = fit.times_ns(sizes)[0] / time_ns - 1
    single_errors = single.times_ns(sizes)[0] / time_ns - 1
    return LatencyLaw(
        op=op,
        num_nodes=num_nodes,
        num_ranks=num_ranks,
        pieces=tuple(_piece(sizes, fit, drawn, number) for number in range(fit.num_pieces)),
        least_bytes=int(size_bytes[0]),
        most_bytes=int(size_bytes[-1]),
        least_error=float(errors.min()),
        most_error=float(errors.max()),
        single_least_error=float(single_errors.min()),
        single_most_error=float(single_errors.max()),
    )


class _Lines:
    """Straight lines through the sizes i to j of every curve, (num_curves, num_sizes, num_sizes); i <= j.

    Attributes:
        error: sum of squared relative errors.
        latency_ns, ns_per_byte: of the line; no rate is negative, and neither is the latency of one that begins with
            the smallest size.
    """

    def __init__(self, size_bytes: Floats, time_ns: Floats) -> None:
        x, y = size_bytes / time_ns, 1 / time_ns  # the line a + b s has the relative error a y + b x - 1
        sums = [_range_sums(values) for values in (y * y, x * y, x * x, y, x, np.ones_like(x))]
        yy, xy, xx, s_y, s_x, count = sums
        with np.errstate(divide="ignore", invalid="ignore"):
            determinant = yy * xx - xy * xy
            is_line = determinant > 1e-9 * yy * xx
            latency = np.where(is_line, (s_y * xx - s_x * xy) / determinant, s_y / yy)
            rate = np.where(is_line, (s_x * yy - s_y * xy) / determinant, 0.0)
            is_falling = rate < 0
            latency, rate = np.where(is_falling, s_y / yy, latency), np.where(is_falling, 0.0, rate)
            is_first = (np.arange(len(size_bytes)) == 0)[np.newaxis, :, np.newaxis]
            is_negative = (latency < 0) & is_first
            latency, rate = np.where(is_negative, 0.0, latency), np.where(is_negative, s_x / xx, rate)
        residual = latency**2 * yy + rate**2 * xx + 2 * latency * rate * xy - 2 * (latency * s_y + rate * s_x) + count
        self.latency_ns, self.ns_per_byte = latency, rate
        self.error = np.where(count > 0, np.maximum(residual, 0.0), np.inf)


def _range_sums(values: Floats) -> Floats:
    """Return sums of values i to j of each row, (num_rows, num_values, num_values); 0 where i > j."""
    total = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
    sums = total[:, np.newaxis, 1:] - total[:, :-1, np.newaxis]
    return np.asarray(np.triu(np.ones(sums.shape[1:])) * sums)


def _piece(sizes: Floats, fit: PiecewiseFit, drawn: PiecewiseFit, number: int) -> LawPiece:
    begin, low, high = 0.0, 0.0, 0.0
    if number:
        switches = _switch_bytes(sizes, drawn, number)
        begin = float(_switch_bytes(sizes, fit, number)[0])
        place = int(fit.first[0, number])
        low = min(float(np.quantile(switches, 0.025)), float(sizes[place - 1]))
        high = max(float(np.quantile(switches, 0.975)), float(sizes[place]))
    latency, rate = float(fit.latency_ns[0, number]), float(fit.ns_per_byte[0, number])
    latency_low, latency_high = np.quantile(drawn.latency_ns[:, number], (0.025, 0.975))
    rate_low, rate_high = np.quantile(drawn.ns_per_byte[:, number], (0.025, 0.975))
    return LawPiece(
        from_bytes=begin,
        from_low_bytes=low,
        from_high_bytes=high,
        latency_ns=latency,
        latency_low_ns=min(float(latency_low), latency),
        latency_high_ns=max(float(latency_high), latency),
        ns_per_byte=rate,
        ns_per_byte_low=min(float(rate_low), rate),
        ns_per_byte_high=max(float(rate_high), rate),
    )


def _switch_bytes(sizes: Floats, fit: PiecewiseFit, number: int) -> Floats:
    """Return where a piece begins: where the lines cross if that is between two sizes, else their geometric mean."""
    place = fit.first[:, number]
    before, after = sizes[place - 1], sizes[place]
    latency = fit.latency_ns[:, number] - fit.latency_ns[:, number - 1]
    rate = fit.ns_per_byte[:, number - 1] - fit.ns_per_byte[:, number]
    crossing = np.divide(latency, rate, out=np.full_like(latency, -1.0), where=rate != 0)
    is_between = (crossing > before) & (crossing < after)
    return np.where(is_between, crossing, np.sqrt(before * after))


def _drawn_medians(rounds: Sequence[Floats], num_draws: int, rng: np.random.Generator) -> Floats:
    """Return medians of resamples of rounds and of the repetitions in them, (num_draws,)."""
    most = max(_MAX_SAMPLES // len(rounds), 2)
    kept = [one[np.linspace(0, len(one) - 1, min(len(one), most)).astype(np.int64)] for one in rounds]
    drawn = np.empty((num_draws, len(kept), max(len(one) for one in kept)))
    which = rng.integers(len(kept), size=(num_draws, len(kept)))
    for number, values in enumerate(kept):
        picks = rng.integers(len(values), size=(num_draws, len(kept), drawn.shape[2]))
        drawn = np.where((which == number)[:, :, np.newaxis], values[picks], drawn)
    return np.asarray(np.median(drawn.reshape(num_draws, -1), axis=1))
