"""The least that any report has to do, which other benchmarks run in turns with reports.

One process reads the columns that it needs with h5py, puts all ranks on one clock, matches collectives by group and
sequence number and splits each into waiting and transfer, in plain numpy. It checks nothing and judges nothing, so a
report cannot be faster; how much slower one is shows what the rest of it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

_SEND, _RECV = 8, 9
_COLUMNS = ("group", "seq", "op", "enter_ns", "exit_ns")

Group = tuple[bytes, bytes]


@dataclass(frozen=True, kw_only=True)
class Split:
    """What each rank did in collectives, ranks in the order of their files.

    Attributes:
        num_records: operations of all ranks, send and receive among them.
        wait_ns: time until the last member of the group came, int64, (num_ranks,).
        transfer_ns: the rest of their duration, int64, (num_ranks,).
    """

    num_records: int
    wait_ns: np.ndarray
    transfer_ns: np.ndarray


@dataclass(frozen=True)
class _Rank:
    """The collectives of one rank on the common clock; `groups` are its groups by the numbers that it gave them."""

    num_records: int
    group: np.ndarray
    seq: np.ndarray
    enter_ns: np.ndarray
    exit_ns: np.ndarray
    groups: dict[int, Group]


def split(trace_dir: Path) -> Split:
    """Return waiting and transfer of all ranks.

    Args:
        trace_dir: with traces that were closed, all of one attempt.
    """
    ranks = [_read(path) for path in sorted(trace_dir.glob("rank-*.h5"))]
    lengths: dict[Group, int] = {}
    for rank in ranks:
        for number, group in rank.groups.items():
            seq = rank.seq[rank.group == number]
            lengths[group] = max(lengths.get(group, 0), int(seq.max(initial=-1)) + 1)
    ends = np.cumsum([0, *lengths.values()])
    begins = dict(zip(lengths, ends.tolist(), strict=False))
    # A rank has each place at most once, so that assignment by index does what np.maximum.at does, and faster.
    places = [_places(rank, begins) for rank in ranks]
    last_ns = np.full(ends[-1], np.iinfo(np.int64).min)
    for rank, place in zip(ranks, places, strict=True):
        last_ns[place] = np.maximum(last_ns[place], rank.enter_ns)
    wait_ns, transfer_ns = np.zeros((2, len(ranks)), np.int64)
    for index, (rank, place) in enumerate(zip(ranks, places, strict=True)):
        taken_ns = rank.exit_ns - rank.enter_ns
        waited_ns = np.minimum(last_ns[place] - rank.enter_ns, taken_ns)
        wait_ns[index], transfer_ns[index] = waited_ns.sum(), (taken_ns - waited_ns).sum()
    return Split(num_records=sum(rank.num_records for rank in ranks), wait_ns=wait_ns, transfer_ns=transfer_ns)


def _read(path: Path) -> _Rank:
    with h5py.File(path, "r", locking=False) as file:
        group, seq, op, enter_ns, exit_ns = (file["collectives"][name][:] for name in _COLUMNS)
        local_ns, offset_ns = (file["clock"][name][:] for name in ("local_ns", "offset_ns"))
        number, member, name = (file["groups"][column][:] for column in ("id", "rank", "name"))
    num_records = len(op)
    if len(local_ns):
        # Clocks drift by nanoseconds in the time that a collective takes: one offset does for both ends.
        shift_ns = np.interp(enter_ns, local_ns, offset_ns).astype(np.int64)
        enter_ns, exit_ns = enter_ns - shift_ns, exit_ns - shift_ns
    is_paired = (op == _SEND) | (op == _RECV)
    if is_paired.any():
        group, seq, enter_ns, exit_ns = (column[~is_paired] for column in (group, seq, enter_ns, exit_ns))
    groups = {int(each): (name[number == each][0], member[number == each].tobytes()) for each in np.unique(number)}
    return _Rank(num_records, group, seq, enter_ns, exit_ns, groups)


def _places(rank: _Rank, begins: dict[Group, int]) -> np.ndarray:
    """Return the number of each collective among those of all groups."""
    begin = np.zeros(max(rank.groups, default=0) + 1, np.int64)
    for number, group in rank.groups.items():
        begin[number] = begins[group]
    places: np.ndarray = begin[rank.group] + rank.seq
    return places
