"""Bytes that ranks send to each other, and what a placement does to the step time by transfers on critical paths.

Messages are as recorded. Of a collective a trace has the size and the members but not the algorithm, so each one is
counted along the edges that gloo uses, and NCCL for large tensors: rings in the order of the ranks, trees for
broadcasts, and direct messages where each pair of ranks has data of its own.

An operation takes as long as its busiest link needs for its bytes: the link of a host, or the uplink of a switch.
Uplinks are as fast as the operations that cross them show, and hosts send at their line rate, or as fast as large
operations below one leaf show if that is less. A transfer gets shorter by as much as this time does, but by no more
than its rank was blocked. It is a first-order answer: where paths without transfers take over, steps shrink less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from hpcpace.core.errors import CannotTell
from hpcpace.core.records import dataclass
from hpcpace.diagnosis.clocks import ClockThresholds, are_exits_early
from hpcpace.diagnosis.close_up import CloseUp
from hpcpace.diagnosis.judged import JudgedAttempt
from hpcpace.frames.columns import Columns, Texts
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.critical_path import blocked_before_exit_ns, critical_path
from hpcpace.metrics.operations import MESSAGES, Operations, is_one_of, op_name
from hpcpace.metrics.phases import EXPOSED_TRANSFER, CoveredTime
from hpcpace.metrics.resampling import Estimate, moving_block_bootstrap
from hpcpace.placement.assign import PlacementThresholds
from hpcpace.trace.schema import Op

MAX_RANKS = 4096
"""memory: the search for a placement of as many ranks takes 1.2 GB, and 51 s on one core."""
_RING_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
_UNKNOWN = -1


@dataclass(frozen=True)
class _Sent:
    """What makes operations one sum: their name, group, the rank that recorded them, and its peer or root."""

    op: str
    group: int
    rank: int
    peer: int


def traffic_per_step(blocks: Iterable[Columns], num_ranks: int, num_steps: int) -> Floats:
    """Return the bytes that each rank (row) sends to each other one in a step, float64, (num_ranks, num_ranks).

    Args:
        blocks: the table `collectives` of a run, range by range of steps.
        num_ranks: ranks of the run, 0 to num_ranks - 1, all of which have rows.
        num_steps: steps in the blocks.

    Raises:
        CannotTell: there are no steps, more ranks than fit into memory, or no bytes between ranks.
    """
    if num_ranks > MAX_RANKS:
        raise CannotTell(f"the run has {num_ranks} ranks: placements are known of up to {MAX_RANKS}")
    if not num_steps:
        raise CannotTell("the run has no steps that can be used: trace more of it")
    sums: dict[_Sent, float] = defaultdict(float)
    for block in blocks:
        _add(sums, block)
    traffic = np.zeros((num_ranks, num_ranks))
    for sent, size_bytes in sums.items():
        if sent.op == "send" and 0 <= sent.peer < num_ranks:
            traffic[sent.rank, sent.peer] += size_bytes
    for op, members, root, size_bytes in _collectives(sums):
        source, destination, share = edges(op, members, root)
        np.add.at(traffic, (source, destination), share * size_bytes)
    np.fill_diagonal(traffic, 0.0)
    if not traffic.any():
        raise CannotTell("the run recorded no bytes between ranks: trace it with its collectives")
    return traffic / num_steps


def _add(sums: dict[_Sent, float], block: Columns) -> None:
    op, size_bytes = block["op"], block["size_bytes"]
    assert isinstance(op, Texts) and isinstance(size_bytes, np.ndarray)
    keys = np.column_stack([op.code, *(np.asarray(block[name]) for name in ("group_id", "rank", "peer"))])
    found, index = np.unique(keys, axis=0, return_inverse=True)
    total = np.bincount(index.ravel(), weights=size_bytes, minlength=len(found))
    for (code, group, rank, peer), size in zip(found.tolist(), total.tolist(), strict=True):
        sums[_Sent(op.names[code], group, rank, peer)] += size


def _collectives(sums: dict[_Sent, float]) -> Iterator[tuple[str, Ints, int, float]]:
    """Yield operation, members, root and bytes of all collectives of one kind; members record the same size."""
    members: dict[int, set[int]] = defaultdict(set)
    by_kind: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for sent, size_bytes in sums.items():
        if sent.op not in ("send", "recv", "barrier") and sent.group != _UNKNOWN:
            members[sent.group].add(sent.rank)
            by_kind[sent.op, sent.group, sent.peer].append(size_bytes)
    for (op, group, root), sizes in by_kind.items():
        yield op, np.array(sorted(members[group]), np.int64), root, sum(sizes) / len(sizes)


def edges(op: str, members: Ints, root: int) -> tuple[Ints, Ints, Floats]:
    """Return who sends to whom in a collective, and the share of its size that passes there.

    Args:
        op: name of the operation; of one that is not known here, nothing is sent.
        members: ranks of the group in its order, int64, (num_members,).
        root: the root; where none of the members is, the first one.

    Returns:
        Sender, receiver (int64) and share of the size (float64) of each edge, (num_edges,).
    """
    num = len(members)
    first = int(np.flatnonzero(members == root)[0]) if root in members else 0
    others = np.delete(members, first)
    if num < 2:
        return members[:0], members[:0], np.zeros(0)
    if op in _RING_ROUNDS:
        return members, np.roll(members, -1), np.full(num, _RING_ROUNDS[op] * (num - 1) / num)
    if op == "all_to_all":
        source, destination = np.nonzero(~np.eye(num, dtype=np.bool_))
        return members[source], members[destination], np.full(num * (num - 1), 1 / num)
    if op in ("broadcast", "reduce"):
        child = np.arange(1, num)
        parent = child - (1 << np.frexp(child)[1].astype(np.int64) - 1)
        order = np.roll(members, -first)
        down, up = order[parent], order[child]
        return (down, up, np.ones(num - 1)) if op == "broadcast" else (up, down, np.ones(num - 1))
    if op in ("gather", "scatter"):
        center, share = np.full(num - 1, members[first]), np.full(num - 1, 1 / num)
        return (others, center, share) if op == "gather" else (center, others, share)
    return members[:0], members[:0], np.zeros(0)


_MIN_BYTES = 1 << 16  # statistics: of an operation whose rate counts; smaller ones show latency
_BITS = 8  # format: of a byte


@dataclass(frozen=True, kw_only=True)
class StepGain:
    """By which share of its time the step gets shorter.

    Attributes:
        share: with its 95 % interval, whose ends are infinite where the run has too few steps for one.
        is_bound: whether it is the most that the step can gain, and no prediction.
    """

    share: Estimate
    is_bound: bool


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """Operations that send alike, and the edges along which they do, for each byte of their size.

    Attributes:
        family: kinds of one family do the same in several groups, int64, (num_kinds,).
        beside: part of the groups of its family that transfer at once, float64, (num_kinds,).
        kind, source, destination: of each edge, int64, (num_edges,).
        share: of the operation's size that passes the edge, float64, (num_edges,).
    """

    family: Ints
    beside: Floats
    kind: Ints
    source: Ints
    destination: Ints
    share: Floats

    def busiest(self, unit: Ints) -> Floats:
        """Return what the busiest link of each kind carries for a byte, float64, (num_kinds,).

        Args:
            unit: the host or switch of each rank, int64, (num_ranks,); edges within one pass no link.
        """
        found, num_units = np.zeros(len(self.family)), int(unit.max()) + 1
        sender, receiver = unit[self.source], unit[self.destination]
        apart = sender != receiver
        link = np.concatenate([sender[apart], num_units + receiver[apart]])
        cell, index = np.unique(np.tile(self.kind[apart], 2) * 2 * num_units + link, return_inverse=True)
        own = np.bincount(index, np.tile(self.share[apart], 2), len(cell))
        kind, link = np.divmod(cell, 2 * num_units)
        _, index = np.unique(self.family[kind] * 2 * num_units + link, return_inverse=True)
        together = np.bincount(index, own)[index] if len(index) else own
        np.maximum.at(found, kind, np.maximum(own, self.beside[kind] * together))
        return found


@dataclass(frozen=True, kw_only=True)
class Loads:
    """What the busiest links of each kind of operation carry for a byte of it, float64, (num_kinds,)."""

    host: Floats
    uplink: Floats

    @classmethod
    def of(cls, kinds: Kinds, host: Ints, switches: Sequence[Ints]) -> Loads:
        """Return the loads of a placement.

        Args:
            kinds: the operations.
            host: of each rank, int64, (num_ranks,).
            switches: number of the switch above each host on each level, from the leaves up, int64, (num_hosts,) each.
        """
        uplinks = [kinds.busiest(switch[host]) for switch in switches]
        return cls(host=kinds.busiest(host), uplink=np.max([np.zeros(len(kinds.family)), *uplinks], axis=0))

    def time_ns(self, host_ns: float, uplink_ns: float) -> Floats:
        """Return how long kinds take for a byte, (num_kinds,), if links take so long for one."""
        return np.maximum(self.host * host_ns, np.nan_to_num(self.uplink * uplink_ns))


def predicted_gain(judged: JudgedAttempt, after: Ints, switches: Sequence[Ints], shrunk: float) -> StepGain | None:
    """Return what a placement brings; a bound where its transfers cannot be predicted, None where they are not known.

    Args:
        judged: the run.
        after: host of each rank, int64, (num_ranks,).
        switches: as of `Loads.of`.
        shrunk: share by which the bytes shrink that the bound takes transfers to be proportional to.
    """
    measured = judged.measured
    if measured.host_timed or measured.unknown or measured.unknown_waits:
        return None
    exposed_ns = measured.spent_ns(EXPOSED_TRANSFER)
    if not np.isfinite(exposed_ns).all():
        return None
    close_up = measured.close_up
    is_clock_wrong = measured.clocks.num_wrong or are_exits_early(measured.clocks, judged.limits(ClockThresholds))
    if close_up is not None and measured.are_waits_known and not is_clock_wrong and not measured.timed.unknown_clocks:
        before = PathTransfers(close_up, measured.places.node)
        share = before.gain(after, switches, _line_rate(judged), judged.limits(PlacementThresholds))
        if share is not None:
            return StepGain(share=share, is_bound=False)
    if not shrunk:  # by how much a worse placement makes steps longer has no such bound
        return None
    return StepGain(share=_bound(exposed_ns, measured.lengths_ns, shrunk), is_bound=True)


def _line_rate(judged: JudgedAttempt) -> float | None:
    """Return bytes a second of the slowest host's interface that carries the job; None unless all are known."""
    loads = judged.network.loads
    if loads is None:
        return None
    rates = loads.line_rate_bps[loads.carries_job]
    is_known = len(np.unique(loads.node[loads.carries_job])) == judged.measured.places.num_nodes
    return float(rates.min()) / _BITS or None if is_known else None


def _bound(exposed_ns: Floats, lengths_ns: Floats, shrunk: float) -> Estimate:
    """Return the largest share over ranks of step time in exposed transfers, as far as they shrink."""
    num_ranks = len(exposed_ns)

    def largest(means: Floats) -> Floats:
        return np.asarray(shrunk * (means[..., :num_ranks] / means[..., num_ranks:]).max(axis=-1))

    return _estimate(np.concatenate([exposed_ns, lengths_ns]).T, largest)


def _estimate(by_step: Floats, statistic: Callable[[Floats], Floats]) -> Estimate:
    """Return a statistic of means over steps, (num_steps, num_columns), with its interval."""
    value = float(statistic(by_step.mean(axis=0)[np.newaxis])[0])
    found = moving_block_bootstrap(by_step, statistic)
    low, high = (-np.inf, np.inf) if found is None else map(float, found)
    return Estimate(value=value, low=min(low, value), high=max(high, value))


class PathTransfers:
    """The transfers that the steps of a run hang on, and what links need for them."""

    def __init__(self, close_up: CloseUp, host: Ints) -> None:
        """Read them from some steps of a run with the host of each rank, int64, (num_ranks,)."""
        self._close_up, self._host = close_up, host
        evidence = close_up.evidence
        self._kinds, self._kind = kinds_of(evidence.operations, evidence.waits.transfer_ns)

    def gain(
        self, after: Ints, switches: Sequence[Ints], line_rate: float | None, limits: PlacementThresholds
    ) -> Estimate | None:
        """Return by which share of their time steps get shorter; None where the rates of links are not known.

        Args:
            after: host of each rank, int64, (num_ranks,).
            switches: as of `Loads.of`.
            line_rate: bytes a second of a host's link; None where it is not known.
            limits: how wrong rates may be.
        """
        old, new = (Loads.of(self._kinds, host, switches) for host in (self._host, after))
        crosses = old.uplink > 0
        uplink_ns = self._byte_ns(old.uplink, crosses)
        host_ns = self._byte_ns(old.host, ~crosses & (old.host > 0))
        if line_rate is not None:
            host_ns = max(1e9 / line_rate, 0.0 if np.isnan(host_ns) else host_ns)
        if np.isnan(host_ns) or (np.isnan(uplink_ns) and (old.uplink + new.uplink).any()):
            return None
        before_ns, after_ns = (loads.time_ns(host_ns, uplink_ns) for loads in (old, new))
        wrong = 1 + limits.rate_error
        saved = [self._saved(before_ns, after_ns * factor) for factor in (1, wrong, 1 / wrong)]
        found = _estimate(saved[0], _ratio)
        low, high = (float(_ratio(one.mean(axis=0)[np.newaxis])[0]) for one in saved[1:])
        value = found.value
        return Estimate(
            value=value,
            low=value - float(np.hypot(value - found.low, value - low)),
            high=value + float(np.hypot(found.high - value, high - value)),
        )

    def _byte_ns(self, load: Floats, chosen: Bools) -> float:
        """Return how long the busiest link takes for a byte, from the large operations of some kinds; NaN without."""
        done, transfer_ns = self._close_up.evidence.operations, self._close_up.evidence.waits.transfer_ns
        is_meant = (done.size_bytes >= _MIN_BYTES) & (done.op != Op.SEND) & (self._kind >= 0)
        rows = np.flatnonzero(is_meant & np.append(chosen, False)[self._kind] & (transfer_ns > 0))
        carried = float((load[self._kind[rows]] * done.size_bytes[rows]).sum())
        return float(transfer_ns[rows].sum()) / carried if carried else float("nan")

    @cached_property
    def _pieces(self) -> tuple[Ints, Ints, Ints, Floats]:
        """Step, row, length and blocked time of each piece of the critical paths; row -1 and 0 for work."""
        close_up, evidence = self._close_up, self._close_up.evidence
        done, blocks = evidence.operations, close_up.blocks.select(pauses=False)
        path = critical_path(
            done, evidence.matching, close_up.work, close_up.steps, ranks=evidence.ranks, blocks=close_up.blocks
        )
        blocked_ns = np.append(np.maximum(done.blocked_ns, blocked_before_exit_ns(done, blocks, evidence.ranks)), 0)
        return path.step, path.row, path.end_ns - path.begin_ns, blocked_ns[path.row].astype(np.float64)

    def _saved(self, before_ns: Floats, after_ns: Floats) -> Floats:
        """Return what each step saves, and its length, nanoseconds, float64, (num_steps, 2)."""
        step, row, length_ns, blocked_ns = self._pieces
        kind = np.append(self._kind, -1)[row]
        # An operation that no link has carried so far takes what the new links need for it.
        before, after = np.append(before_ns, 0.0)[kind], np.append(after_ns, 0.0)[kind]
        size_bytes = np.append(self._close_up.evidence.operations.size_bytes, 0)[row]
        with np.errstate(divide="ignore", invalid="ignore"):
            saved_ns = np.where(before > 0, length_ns * (1 - after / before), -after * size_bytes)
        saved_ns = np.minimum(saved_ns, blocked_ns)
        num_steps = len(self._close_up.steps)
        return np.column_stack([np.bincount(step, values, num_steps) for values in (saved_ns, length_ns)])


def _ratio(means: Floats) -> Floats:
    return np.asarray(means[..., 0] / means[..., 1])


def kinds_of(done: Operations, transfer_ns: Ints) -> tuple[Kinds, Ints]:
    """Return the kinds of operations, and the kind of each row, int64, (num_operations,); -1 of unknown members.

    Args:
        done: the operations of all ranks.
        transfer_ns: of each, int64, (num_operations,).
    """
    rows = np.flatnonzero((done.group >= 0) & ~(is_one_of(done.op, MESSAGES) & (done.peer < 0)))
    is_message = is_one_of(done.op[rows], MESSAGES)
    keys = np.stack([done.op[rows], done.group[rows], np.where(is_message, done.rank[rows], -1), done.peer[rows]])
    found, first, index = np.unique(keys.astype(np.int64), axis=1, return_index=True, return_inverse=True)
    kind = np.full(len(done), -1)
    kind[rows] = index.ravel()
    parts = []
    for number, (op, group, rank, peer) in enumerate(found.T.tolist()):
        if op in MESSAGES:
            ends = (rank, peer) if op == Op.SEND else (peer, rank)
            parts.append((np.array([number]), *(np.array([end]) for end in ends), np.ones(1)))
        else:
            source, destination, share = edges(op_name(op), np.array(done.groups[group].ranks), peer)
            parts.append((np.full(len(source), number), source, destination, share))
    sizes = np.where(found[2] >= 0, 2, done.group_sizes[found[1]])
    family = np.unique(np.stack([found[0], sizes]), axis=1, return_inverse=True)[1].ravel()
    # The rows of one rank show when a group transfers.
    shown = rows[done.rank[rows] == done.rank[rows[first]][index.ravel()]]
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    names = ("kind", "source", "destination", "share")
    beside = _beside(family, kind[shown], done.exit_ns[shown], transfer_ns[shown])
    return Kinds(family=family, beside=beside, **dict(zip(names, columns, strict=True))), kind


def _beside(family: Ints, kind: Ints, exit_ns: Ints, transfer_ns: Ints) -> Floats:
    """Return which part of the kinds of its family transfers at once, of each kind, float64, (num_kinds,).

    Args:
        family: of each kind.
        kind, exit_ns, transfer_ns: of rows, one for each operation.
    """
    found = np.ones(len(family))
    for one in np.unique(family).tolist():
        rows = np.flatnonzero((family[kind] == one) & (transfer_ns > 0))
        covered = CoveredTime.of(exit_ns[rows] - transfer_ns[rows], exit_ns[rows])
        together_ns = float((covered.end_ns - covered.begin_ns).sum())
        if together_ns > 0:
            found[family == one] = transfer_ns[rows].sum() / together_ns / (family == one).sum()
    return found
