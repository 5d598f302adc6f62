"""The placement for the next run of a job, from the traffic and the hosts of a recorded one, as launchers take it.

Messages are as recorded. Of a collective a trace has the size and the members but not the algorithm, so each one is
counted along the edges that gloo uses, and NCCL for large tensors: rings in the order of the ranks, trees for
broadcasts, and direct messages where each pair of ranks has data of its own.

A file for a launcher has one line for each rank:

- `slurm`: the host of each rank, for SLURM_HOSTFILE and `srun --distribution=arbitrary`.
- `openmpi`: the same as a hostfile for `mpirun --map-by seq`. A rankfile would have to name cores, and so undo the
  binding that the job asks for.
- `torchrun`: torchrun numbers ranks by host, so that its line i is the started rank that does the work of rank i.
  `init_device_mesh` has no order of ranks; DeviceMesh("cuda", torch.tensor(order).reshape(dp, pp)) takes one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpcpace.core.errors import CannotTell
from hpcpace.core.text import shell_word
from hpcpace.diagnosis.judged import JudgedAttempt
from hpcpace.frames.columns import Columns, Texts
from hpcpace.frames.run import Run
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.phases import EXPOSED_TRANSFER
from hpcpace.metrics.topology import split_address
from hpcpace.placement.assign import PlacementThresholds, Volumes, better_host, levels_between, volumes

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


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the ranks of a run were, and where they would send less.

    Attributes:
        names: of the hosts, as Slurm knows them.
        before, after: host of each rank, index into `names`, int64, (num_ranks,); equal where the run's is good.
        volumes_before, volumes_after: bytes of a step.
        exposed_share: part of step time in which the most affected rank waits for data on their way, in all
            operations; None where the traces do not show it.
    """

    names: tuple[str, ...]
    before: Ints
    after: Ints
    volumes_before: Volumes
    volumes_after: Volumes
    exposed_share: float | None

    @property
    def num_moved(self) -> int:
        """Ranks that change their host."""
        return int((self.before != self.after).sum())

    @cached_property
    def max_gain_share(self) -> float | None:
        """Upper bound on what step time shrinks by, a share; None where the traces do not show it.

        The model: exposed transfers shrink by the share by which bytes over uplinks do, or bytes between hosts where
        none cross uplinks. It is a bound, since some of these transfers stay below a leaf or a host.
        """
        if self.exposed_share is None:
            return None
        is_below_leaves = self.volumes_before.uplink_bytes == self.volumes_after.uplink_bytes
        before, after = (
            one.host_bytes if is_below_leaves else one.uplink_bytes for one in (self.volumes_before, self.volumes_after)
        )
        return self.exposed_share * max(1 - after / before, 0.0) if before else 0.0


def place_run(run: Run) -> Placement:
    """Return the better placement of a run, or that which it had.

    Raises:
        CannotTell: the run hung, lacks ranks, ran on one host, or the switches of its hosts are not known.
    """
    judged = run.judged
    _check(judged)
    places = judged.measured.places
    headers = [trace.header for trace in judged.credible.traces]
    path_of = {
        node: split_address(header.topology_addr, header.host)[0]
        for node, header in zip(places.node.tolist(), headers, strict=True)
    }
    levels = levels_between([path_of[node] for node in range(places.num_nodes)])
    traffic = traffic_per_step(run.columns("collectives"), len(headers), run.num_steps)
    after = better_host(traffic, places.node, levels, judged.limits(PlacementThresholds))
    return Placement(
        names=places.slurm_names,
        before=places.node,
        after=after,
        volumes_before=volumes(traffic, places.node, levels),
        volumes_after=volumes(traffic, after, levels),
        exposed_share=_exposed_share(judged),
    )


def _check(judged: JudgedAttempt) -> None:
    """Refuse a run from which no placement follows.

    Raises:
        CannotTell: see `place_run`.
    """
    judged.check_whole()
    places = judged.measured.places
    if places.num_nodes < 2:
        raise CannotTell(f"the run had one host ({places.node_names[0]}): there is nothing to place")
    if len(set(places.slurm_names)) < places.num_nodes:
        raise CannotTell("several hosts of the run have one name: a placement cannot tell them apart")
    if not places.num_leaves:
        why = "".join(f"; {problem}" for problem in judged.placed.problems)
        raise CannotTell(f"the leaf switches of its hosts are not known{why}: name a file with --topology")


def _exposed_share(judged: JudgedAttempt) -> float | None:
    """Return the largest share over ranks of step time in exposed transfers; None where parts are not known."""
    measured = judged.measured
    exposed_ns = measured.spent_ns(EXPOSED_TRANSFER)
    if measured.host_timed or measured.unknown or measured.unknown_waits or not np.isfinite(exposed_ns).all():
        return None
    return float((exposed_ns.sum(axis=1) / measured.lengths_ns.sum(axis=1)).max())


def placement_text(kind: str, host: Ints, names: Sequence[str]) -> str:
    """Return the content of a file.

    Args:
        kind: `slurm`, `openmpi` or `torchrun`.
        host: of each rank, index into `names`, int64, (num_ranks,).
        names: of the hosts, in the order in which torchrun numbers them.
    """
    if kind == "torchrun":
        return "".join(f"{rank}\n" for rank in started_ranks(host).tolist())
    return "".join(f"{names[at]}\n" for at in host.tolist())


def started_ranks(host: Ints) -> Ints:
    """Return which rank of those numbered host by host does the work of each rank, int64, (num_ranks,)."""
    return np.argsort(np.argsort(host, kind="stable")).astype(np.int64)


def local_ranks(host: Ints) -> Ints:
    """Return the number of each rank on its host, int64, (num_ranks,), ascending by rank."""
    order = np.argsort(host, kind="stable")
    first = np.searchsorted(host[order], host[order])
    local = np.empty(len(host), np.int64)
    local[order] = np.arange(len(host)) - first
    return local


def usage_line(kind: str, file: str) -> str:
    """Return how a job takes a file, safe to paste."""
    name = shell_word(file)
    return {
        "slurm": f"SLURM_HOSTFILE={name} srun --distribution=arbitrary ...",
        "openmpi": f"mpirun --hostfile {name} --map-by seq ...",
        "torchrun": f"DeviceMesh with the ranks of {name}, reshaped to the mesh",
    }[kind]
