"""Whether hosts pace their devices, and how long these are idle then, by leads at the operations that hosts issue.

The lead at a mark is what a device has to do there. So it is idle until the next mark for at most the time that its
host takes to it, less that lead and the time for which operations hold it; the rest is work. Pieces between the same
two operations work alike in all steps, so that the shortest bounds the work of all, and so does the one with the most
work that is certain.

A device that sets the pace has a longer lead at the next mark, by as much as its host is faster there. One that follows
its host has left what was issued last, whatever the host took.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.host_waits import HostPaceThresholds, Stretches
from hpcpace.metrics.phases import CoveredTime
from hpcpace.trace.schema import RESOLUTION_NS

_LOWER, _UPPER = 0.25, 0.75  # statistics: quantiles in place of extremes, which noise moves
_SURE_SHARE = 0.01  # statistics: of a piece; a device that may be idle for less is ahead
_MIN_SURE, _MIN_SURE_SHARE = 5, 0.05  # statistics: pieces of those, all and of their kind, that show the work
_NOTABLE_SHARE = 0.01  # statistics: of a stretch; shorter pieces are those between two marks at once
_OPEN_SHARE = 0.1  # statistics: of a piece; one that may be idle for longer shows who sets the pace
_MIN_OPEN = 8  # statistics: of those, from which both halves have a median
_OF_MEDIAN = 0.93  # statistics: standard error of a median by quartiles, 1.2533 / 1.349, for normal values
_MAX_ERROR = 0.2  # statistics: standard error of a slope that distinguishes 0 from 1
_MIN_SPREAD_NS = 2_000  # format: marks of a device are wrong by as much
_ROUNDING_NS = RESOLUTION_NS["collectives"]["enqueue_ns"]
MAX_BEHIND = 8  # speed: steps that a device may be behind its host for what holds it to show what holds the host up
_NUM_REPEATED = 20  # statistics: steps after which a host or its device sets the pace


@dataclass(frozen=True, kw_only=True)
class Issued:
    """Operations that a host issued to its device, in the order of issuing, each int64, (num_operations,).

    Attributes:
        issue_ns: when, on the host.
        enter_ns: when the stream came to it, on the device.
        exit_ns: when it had ended.
        blocked_ns: how long it held the stream before that.
    """

    issue_ns: Ints
    enter_ns: Ints
    exit_ns: Ints
    blocked_ns: Ints


@dataclass(frozen=True, kw_only=True)
class IssuedPieces:
    """Stretches of one kind on ranks that work alike, cut where their hosts issued operations.

    Each float64, (num_stretches, num_pieces).

    Attributes:
        own_ns: length on the device without the time for which operations held it.
        held_ns: that time.
        idle_ns: how much of `own_ns` the device may have been idle at most.
        behind_ns: the lead before it and `held_ns`, less what the host took.
        lead_ns: the lead after it.
    """

    own_ns: Floats
    held_ns: Floats
    idle_ns: Floats
    behind_ns: Floats
    lead_ns: Floats

    @classmethod
    def of(cls, of_role: Sequence[tuple[Stretches, Issued]], kind: int) -> IssuedPieces:
        """Return the pieces of the stretches that have as many operations as most.

        Args:
            of_role: stretches of some ranks that work alike, and what their hosts issued in these steps.
            kind: of `Stretches.kind`; some stretches are of it.
        """
        found = [
            cut_at_operations(stretches.select(rows), issued)[1]
            for stretches, issued in of_role
            for rows in [np.flatnonzero(stretches.kind == kind)]
            if len(rows)
        ]
        widths = [table.shape[2] for table in found]
        usual = max(sorted(set(widths)), key=widths.count)
        columns = np.concatenate([table for table in found if table.shape[2] == usual], axis=1).astype(np.float64)
        own_ns, held_ns, idle_ns, behind_ns, lead_ns = columns[2:]
        return cls(own_ns=own_ns, held_ns=held_ns, idle_ns=idle_ns, behind_ns=behind_ns, lead_ns=lead_ns)

    def is_following(self) -> bool | None:
        """Return whether devices follow their hosts where these are not ahead; None where leads do not show it.

        The slope of the lead after a piece over what it would be without work: 1 where devices set the pace, else 0. It
        is that between the medians of both halves, as pieces in which the host was ahead lie far from the others. The
        half in which the host was slowest decides where it can: a host may be slow in some steps and ahead in others.
        """
        is_open = self.idle_ns > np.maximum(_OPEN_SHARE * self.own_ns, _MIN_SPREAD_NS)
        slower = np.where(is_open, self.behind_ns, np.inf)
        slowest = is_open & (slower <= np.quantile(slower, is_open.mean(axis=0).max() / 2, axis=0, method="lower"))
        follows = self._follows(slowest)
        return self._follows(is_open) if follows is None else follows

    def _follows(self, is_open: Bools) -> bool | None:
        run, rise, variance = 0.0, 0.0, 0.0
        for piece in np.flatnonzero(is_open.sum(axis=0) >= _MIN_OPEN).tolist():
            behind_ns, lead_ns = (of[is_open[:, piece], piece] for of in (self.behind_ns, self.lead_ns))
            order = np.argsort(behind_ns, kind="stable")
            low, high = order[: len(order) // 2], order[-(len(order) // 2) :]
            run += float(np.median(behind_ns[high]) - np.median(behind_ns[low]))
            rise += float(np.median(lead_ns[high]) - np.median(lead_ns[low]))
            for half in (low, high):
                spread_ns = float(np.subtract(*np.quantile(lead_ns[half], (_UPPER, _LOWER))))
                variance += (_OF_MEDIAN * spread_ns) ** 2 / len(half)
            variance += _MIN_SPREAD_NS**2 / len(half)
        if not run or np.sqrt(variance) > _MAX_ERROR * run:
            return None
        return rise < run / 2

    def work_bounds(self) -> tuple[Floats, Floats]:
        """Return how long devices work in each piece at least, and at most, nanoseconds, each (num_pieces,).

        Both are the median where the host was ahead often enough.
        """
        most_ns = np.quantile(self.own_ns, _LOWER, axis=0)
        least_ns = np.minimum(np.quantile(self.own_ns - self.idle_ns, _UPPER, axis=0), most_ns)
        is_sure = self.idle_ns <= _SURE_SHARE * self.own_ns
        is_known = is_sure.sum(axis=0) >= max(_MIN_SURE, _MIN_SURE_SHARE * len(is_sure))
        for piece in np.flatnonzero(is_known).tolist():
            least_ns[piece] = most_ns[piece] = np.median(self.own_ns[is_sure[:, piece], piece])
        return least_ns, most_ns


def sure_work(own_ns: Ints, idle_ns: Ints, bounds_ns: tuple[Floats, Floats]) -> tuple[float, float]:
    """Return how long a rank's device works in pieces with its host ahead, and how long those of its role do there.

    Args:
        own_ns, idle_ns: as of `IssuedPieces`, of one rank.
        bounds_ns: from `IssuedPieces.work_bounds`; pieces count whose work is known and notable.
    """
    low_ns, high_ns = bounds_ns
    is_used = (low_ns >= high_ns) & (high_ns > _NOTABLE_SHARE * high_ns.sum())
    is_sure = (idle_ns <= _SURE_SHARE * own_ns) & is_used
    return float(own_ns[is_sure].sum()), float(np.broadcast_to(high_ns, own_ns.shape)[is_sure].sum())


def cut_at_operations(stretches: Stretches, issued: Issued, num_pieces: int | None = None) -> tuple[Ints, Ints]:
    """Return stretches cut where the host issued operations, those with as many pieces as most.

    Args:
        stretches: some of one rank; at least one.
        issued: what its host issued in these steps.
        num_pieces: how many pieces are wanted instead.

    Returns:
        Indices of the stretches, int64, (num_cut,), and begin and end of each piece on the device, and the columns of
        `IssuedPieces` in their order, int64, (7, num_cut, num_pieces).
    """
    host_begin = stretches.begin_ns - stretches.lead_before_ns
    host_end = stretches.end_ns - stretches.lead_after_ns
    # What was issued at a mark counts before it, to whichever side its time was rounded.
    edges = host_begin + _ROUNDING_NS, host_end + _ROUNDING_NS
    first, stop = (np.searchsorted(issued.issue_ns, edge, side="right") for edge in edges)
    count = np.maximum(stop - first, 0)
    usual = int(np.bincount(count).argmax()) if num_pieces is None else num_pieces - 1
    rows = np.flatnonzero(count == usual)
    at = first[rows][:, None] + np.arange(usual)
    host = np.column_stack([host_begin[rows], issued.issue_ns[at], host_end[rows]])
    device = np.column_stack([stretches.begin_ns[rows], issued.enter_ns[at], stretches.end_ns[rows]])
    device = np.minimum(np.maximum.accumulate(device, axis=1), device[:, -1:])
    is_held = issued.blocked_ns > 0
    held = CoveredTime.of((issued.exit_ns - issued.blocked_ns)[is_held], issued.exit_ns[is_held])
    until_ns, done_ns = (
        held.until_ns(times.ravel()).reshape(device.shape) for times in (device, np.minimum(host, device))
    )
    held_ns, lead_ns, host_ns = np.diff(until_ns, axis=1), np.maximum(device - host, 0), np.diff(host, axis=1)
    own_ns = np.maximum(np.diff(device, axis=1) - held_ns, 0)
    # Of the holds, those that are over when the host makes the next mark are no work that it had issued.
    over_ns = np.maximum(done_ns[:, 1:] - until_ns[:, :-1], 0)
    idle_ns = np.clip(host_ns - lead_ns[:, :-1] - over_ns, 0, own_ns)
    behind_ns = lead_ns[:, :-1] + held_ns - host_ns
    return rows, np.stack([device[:, :-1], device[:, 1:], own_ns, held_ns, idle_ns, behind_ns, lead_ns[:, 1:]])


@dataclass(frozen=True, kw_only=True)
class StepPace:
    """What a host and its device show of their pace in steps that are alike, nanoseconds of a step.

    Attributes:
        least_ns: how long a step takes at least with this host, if nothing holds its device; 0 where not known.
        possible_ns: that, if nothing held the host up but what held its device, and it was as slow there as elsewhere.
        issue_ns: how long the host takes to issue it, at most.
        sure_ns: how long the device surely works.
        most_ns: how long it works at most.
        waiting_ns: for how long of `issue_ns` the host waits for its device, as to read the loss.
    """

    least_ns: float
    possible_ns: float
    issue_ns: float
    sure_ns: float
    most_ns: float
    waiting_ns: float


def step_pace(
    host_ns: Ints, device_ns: Ints, held: CoveredTime, since_ns: Ints, limits: HostPaceThresholds
) -> StepPace:
    """Return what a host and its device show of their pace.

    For the least time, steps of median pieces are repeated without what holds the device. The host takes as long as it
    did, without the time for which its full launch queue may have held it up; its device comes to no mark before the
    host has made it, and a host that had waited for its device does so again.

    A host that is far ahead and takes as long as the step may be held up: where an operation holds its device, until
    that is over, and where it waits for what it had issued steps ago, from the mark before. It is as fast there as
    elsewhere, relative to the work of its device, as far as the marks allow. One that is hardly slower elsewhere than
    its device may be held up at that pace all the time: how fast it is by itself is not known.

    Args:
        host_ns: when the host made the marks of some steps that are alike, ascending, int64, (num_steps, num_marks).
        device_ns: when its device came to them, likewise.
        held: when operations held it.
        since_ns: how long before each mark of the host its device had last come to one, int64, (num_steps, num_marks).
        limits: when a device has run dry, and a host may be held up.
    """
    held_ns = held.until_ns(device_ns.ravel()).reshape(device_ns.shape)
    lead = np.maximum(device_ns - host_ns, 0)
    host, passed = np.diff(host_ns, axis=1), np.diff(device_ns, axis=1) - np.diff(held_ns, axis=1)
    work = np.maximum(passed - np.maximum(host - lead[:, :-1], 0), 0)
    issue, sure, most, left = (np.median(of, axis=0) for of in (host, work, passed, lead))
    has_waited = (left[1:] <= limits.lead_ns) & (left[:-1] > limits.lead_ns)
    whole_ns = float(np.median(device_ns[:, -1] - device_ns[:, 0]))
    is_ahead = left > limits.held_lead_share * whole_ns
    # Noise moves single steps, and a trend moves all of them.
    is_at_pace = max(issue.sum() / max(whole_ns, 1.0), _pace_of_device(host_ns, device_ns)) > limits.held_pace_share
    held_up, waited = (np.median(of, axis=0) for of in _stuck_ns(host_ns, held, since_ns, limits))
    is_stuck = is_at_pace & is_ahead[1:] & (np.maximum(held_up, waited) > limits.lead_ns)
    shortest = np.where(is_stuck, np.maximum(issue - np.maximum(held_up, waited), 0), issue)
    is_free = ~(is_stuck | has_waited)
    usual = issue[is_free].sum() / max(float(sure[is_free].sum()), 1.0)
    own = np.where(is_stuck, np.clip(usual * sure, shortest, issue), issue)
    longest = np.where(is_stuck, np.maximum(issue - held_up, own), issue)
    is_slower = shortest.sum() > (1 + limits.slower_part) * sure.sum()
    is_slower &= left.max() <= MAX_BEHIND * whole_ns
    is_known = not (is_ahead.all() and is_at_pace) or bool(has_waited.any()) or (is_stuck.any() and is_slower)
    left_ns = np.where(has_waited, most, sure)
    return StepPace(
        least_ns=_repeated_ns(own, left_ns, has_waited) if is_known else 0.0,
        possible_ns=_repeated_ns(longest, left_ns, has_waited),
        issue_ns=float(issue.sum()),
        sure_ns=float(sure.sum()),
        most_ns=float(most.sum()),
        waiting_ns=float(issue[has_waited].sum()),
    )


def _pace_of_device(host_ns: Ints, device_ns: Ints) -> float:
    """Return how long a host takes to issue a step, as a share of what the device's step takes meanwhile.

    A host that is ahead issues steps of later on, which may be longer.
    """
    meanwhile = np.maximum(np.searchsorted(device_ns[:, 0], host_ns[:, 0], side="right") - 1, 0)
    issue_ns, passed_ns = (of[:, -1] - of[:, 0] for of in (host_ns, device_ns))
    return float(np.median(issue_ns / np.maximum(passed_ns[meanwhile], 1)))


def _stuck_ns(host_ns: Ints, held: CoveredTime, since_ns: Ints, limits: HostPaceThresholds) -> tuple[Ints, Ints]:
    """Return for how long holds of its device, and waits for it, may have held a host up before each of its marks.

    Nothing leaves a full launch queue while an operation holds its device, so that the host makes no mark until that is
    over. A host that waits for what it issued before goes on as its device comes to that.

    Returns:
        Both int64, (num_steps, num_marks - 1).
    """
    over = np.append(0, np.cumsum(held.end_ns - held.begin_ns))[np.searchsorted(held.end_ns, host_ns, side="right")]
    passed = held.until_ns(host_ns.ravel()).reshape(host_ns.shape)
    host = np.diff(host_ns, axis=1)
    follows = since_ns[:, 1:] <= np.minimum(np.maximum(limits.lead_ns, limits.lead_share * host), host)
    return np.maximum(over[:, 1:] - passed[:, :-1], 0), np.where(follows, host, 0)


def _repeated_ns(issue_ns: Floats, work_ns: Floats, has_waited: Bools) -> float:
    """Return how long a step takes on the device when it is repeated, from its pieces, each (num_pieces,)."""
    pieces = list(zip(issue_ns.tolist(), work_ns.tolist(), has_waited.tolist(), strict=True))
    issued, done, ends = 0.0, 0.0, []
    for _ in range(2 * _NUM_REPEATED):
        for own_ns, piece_ns, is_waiting in pieces:
            issued += 0.0 if is_waiting else own_ns
            done = max(done + piece_ns, issued)
            issued = done if is_waiting else issued
        ends.append(done)
    return (ends[-1] - ends[_NUM_REPEATED - 1]) / _NUM_REPEATED
