"""The columns of the frame of operations, range by range of steps, so that a run of any length takes little memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hpcpace.core.errors import TraceError, with_reasons
from hpcpace.diagnosis.bandwidths import clock_errors_ns
from hpcpace.diagnosis.evidence import Evidence, iter_share, share_of_steps
from hpcpace.diagnosis.incomplete import SoundStream, sound_stream
from hpcpace.diagnosis.operation_figures import operation_transfers
from hpcpace.diagnosis.within_steps import held_up_by_rank
from hpcpace.frames.columns import Columns, Texts, Values
from hpcpace.frames.extent import Extent
from hpcpace.metrics import Bools, Bytes, Floats, Ints
from hpcpace.metrics.bandwidth import bus_factors, bytes_per_s
from hpcpace.metrics.operations import MESSAGES, is_one_of, op_name
from hpcpace.metrics.propagation import last_partner
from hpcpace.metrics.steps import columns_of
from hpcpace.metrics.waits import HeldUp, exposed_waits_ns
from hpcpace.trace.schema import ExitKind

MAX_ROWS = 250_000
"""Memory: rows of a range of steps of all ranks, about; a frame takes some 250 bytes for each."""


def operations(extent: Extent) -> Iterator[Columns]:
    """Yield the completed operations of some steps and ranks, rank after rank within ranges of steps.

    Waits are known from all ranks, whatever ranks are asked for.

    Raises:
        TraceError: a file has changed since the run was measured.
    """
    if not len(extent.columns):
        return
    timed, step = extent.measured.timed, extent.step
    streams = [sound_stream(stream.original) for stream in extent.measured.operations.streams]
    share = share_of_steps(streams, step, extent.measured.panel.num_seen, max_rows=MAX_ROWS)
    held_up = held_up_by_rank(timed)
    numbers: dict[object, int] = {}
    for _, evidence in iter_share(streams, timed, share):
        done = evidence.operations
        chosen = np.flatnonzero((columns_of(step, done.step) >= 0) & np.isin(done.rank, extent.ranks))
        ids = np.array([numbers.setdefault(group, len(numbers)) for group in done.groups] + [-1], np.int64)
        if len(chosen):
            yield _columns(extent, evidence, held_up, chosen, ids)
        del evidence, done  # before the next range is read
    _check_unchanged(extent, streams)


def _check_unchanged(extent: Extent, streams: Sequence[SoundStream]) -> None:
    """Refuse rows that could be read when the run was measured, and no longer.

    Raises:
        TraceError: there are some.
    """
    pairs = zip(streams, extent.measured.operations.streams, strict=True)
    lost = [now.damaged[block] for now, before in pairs for block in now.damaged if block not in before.damaged]
    if lost:
        raise TraceError(
            with_reasons(f"{extent.judged.attempt.path} has changed since it was opened: open it anew", lost)
        )


def _columns(
    extent: Extent, evidence: Evidence, held_up: dict[int, HeldUp | None], rows: Ints, ids: Ints
) -> dict[str, Values]:
    done, matching, waits = evidence.operations, evidence.matching, evidence.waits
    held = [held_up[rank] for rank in np.unique(done.rank).tolist()]
    exposed_ns = exposed_waits_ns(done, waits.wait_ns, held)[rows]
    partner, is_matched = last_partner(done, matching)[rows], matching.is_matched[rows]
    longest_ns, is_seen = operation_transfers(evidence)
    instance, is_message = matching.instance[rows], is_one_of(done.op[rows], MESSAGES)
    whole_ns = _known(longest_ns[instance], is_matched & (is_seen[instance] | ~is_message))
    is_sound = (whole_ns > _clock_error_ns(extent, evidence)[instance]) & ~waits.may_contradict[instance]
    algorithm = bytes_per_s(done.size_bytes[rows], np.where(is_sound, whole_ns, np.nan))
    group_size = done.group_size[rows]
    is_clock_known = ~np.isin(done.rank[rows], list(evidence.unknown_clocks))
    return {
        **{name: getattr(done, name)[rows] for name in ("step", "rank", "seq", "size_bytes", "peer", "blocked_ns")},
        "op": _op_names(done.op[rows].astype(np.int64)),
        "group": Texts(*_group_names(evidence, done.group[rows])),
        "group_id": ids[done.group[rows]],
        "group_size": group_size,
        "end": Texts(tuple(kind.name.lower() for kind in ExitKind), _codes(done.exit_kind[rows], len(ExitKind))),
        "enter_ns": _known(done.enter_ns[rows] - extent.origin_ns, is_clock_known),
        "exit_ns": _known(done.exit_ns[rows] - extent.origin_ns, is_clock_known),
        "duration_ns": done.exit_ns[rows] - done.enter_ns[rows],
        "is_matched": is_matched,
        "wait_ns": _known(waits.wait_ns[rows], is_matched),
        "exposed_wait_ns": _known(exposed_ns, is_matched),
        "transfer_ns": _known(waits.transfer_ns[rows], is_matched),
        "operation_transfer_ns": whole_ns,
        "late_rank": np.where(partner >= 0, done.rank[partner], -1),
        "algorithm_bytes_per_s": algorithm,
        "bus_bytes_per_s": algorithm * bus_factors(done.op[rows], group_size),
    }


def _clock_error_ns(extent: Extent, evidence: Evidence) -> Floats:
    """Return the error of the transfer of each operation, float64, (num_instances,).

    It is two half-widths between hosts, and none on one host. It is not known where a clock may be wrong.
    """
    done, instance, num_instances = evidence.operations, evidence.matching.instance, len(evidence.matching.num_rows)
    of_row = np.searchsorted(evidence.ranks, done.rank)
    node = np.array([trace.header.node for trace in evidence.traces], np.int64)[of_row]
    lowest, highest = np.full(num_instances, np.iinfo(np.int64).max), np.full(num_instances, -1)
    np.minimum.at(lowest, instance, node)
    np.maximum.at(highest, instance, node)
    widest_ns = np.zeros(num_instances)
    np.maximum.at(widest_ns, instance, clock_errors_ns(extent.measured)[of_row])
    return np.where(lowest == highest, 0.0, 2 * widest_ns)


def _known(values: Ints, is_known: Bools) -> Floats:
    return np.where(is_known, values, np.nan)


def _codes(values: Bytes, num_names: int) -> Ints:
    return np.where(values < num_names, values, -1).astype(np.int64)


def _op_names(op: Ints) -> Texts:
    found, code = np.unique(op, return_inverse=True)
    return Texts(tuple(op_name(one) for one in found.tolist()), code.astype(np.int64))


def _group_names(evidence: Evidence, group: Ints) -> tuple[tuple[str, ...], Ints]:
    """Return the names of groups, each once, and the index of that of each row, -1 where it is unknown."""
    number: dict[str, int] = {}
    code = [number.setdefault(one.name, len(number)) for one in evidence.operations.groups]
    return tuple(number), np.array([*code, -1], np.int64)[group]
