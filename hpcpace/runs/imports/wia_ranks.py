"""Operations of the what-if analysis as ranks of a run.

A worker of the file stands for all GPUs that share its data-parallel rank and stage. Work becomes phases. Collectives
are of the workers that the published dependency model synchronises, and the n-th send of a stage is the n-th receive
of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hpcpace.core.errors import TraceError
from hpcpace.core.text import plural, printable
from hpcpace.runs.imports.imported_run import (
    UNKNOWN_GROUP,
    UNKNOWN_HOST,
    Import,
    ImportedRank,
    Rows,
    Source,
    group_rows,
    headers_of,
    rows_of,
)
from hpcpace.runs.imports.wia import WiaTrace, read_wia, real_messages
from hpcpace.trace.schema import Op, Phase

TOOL = "what-if analysis of ByteDance-Seed/StragglerAnalysis"
_PHASES = {
    "forward-compute": Phase.FORWARD,
    "backward-compute": Phase.BACKWARD,
    "optimizer": Phase.OPTIMIZER,
    "gc": Phase.GC,
    "layernorm-grads-all-reduce": Phase.OTHER,  # among the GPUs of one worker, of which one was recorded
}
# Of a collective the members: "stage" those of one stage, "ends" first and last stage of one replica, "all" everybody.
_COLLECTIVES = {
    "params-all-gather": (Op.ALL_GATHER, "stage"),
    "grads-reduce-scatter": (Op.REDUCE_SCATTER, "stage"),
    "separate-grads-all-reduce": (Op.ALL_REDUCE, "stage"),
    "embedding-grads-all-reduce": (Op.ALL_REDUCE, "ends"),
    "optimizer-clip-main-grad": (Op.ALL_REDUCE, "all"),
}
_MESSAGES = {"forward-send": Op.SEND, "forward-recv": Op.RECV, "backward-send": Op.SEND, "backward-recv": Op.RECV}
_WAITS = {"wait-stage": Op.BARRIER, "wait-replica": Op.BARRIER}
_OPS = {name: op for name, (op, _) in _COLLECTIVES.items()} | _MESSAGES | _WAITS
_COMPUTE = ("forward-compute", "backward-compute")
_AFTER_WORK = (
    "layernorm-grads-all-reduce",
    *(name for name in _COLLECTIVES if name != "params-all-gather"),
    "optimizer",
)
_ALWAYS, _TOGETHER = 0.95, 0.05
_NO_GROUP = ""
_MAX_NAMES = 400
_MAX_GROUP_ROWS = 1 << 21
# An operation that still runs so shortly after work began held that work: in the published traces what overlaps at all
# does so for at most 131 us, or for as long as it takes.
_GRAIN_NS = 200_000
Int64Array = NDArray[np.int64]


def import_wia(path: Path, *, progress: Callable[[int, int], None] = lambda *_: None) -> Import:
    """Read a trace as ranks of a run; arguments and errors as of `read_wia`."""
    trace = read_wia(path, progress=progress)
    if not trace.rows.optype.isin([*_PHASES, *_OPS]).any():
        raise TraceError(f"{path} has none of the operations of the what-if analysis, such as forward-compute")
    messages = real_messages(trace.rows)
    return Import(source=source_of(trace, messages), ranks=tuple(ranks_of(trace, messages)))


def source_of(trace: WiaTrace, messages: pd.DataFrame) -> Source:
    """Return what run.json says about the source of a trace; `messages` as of `real_messages`."""
    num_workers = len(trace.source_ranks)
    gpus = f", which stand for {trace.num_gpus} GPUs" if trace.num_gpus else ""
    steps = ", ".join(map(str, trace.steps[:50])) + (", ..." if len(trace.steps) > 50 else "")
    notes = [
        f"ranks are the {num_workers} workers (data-parallel rank and stage) of the file{gpus}; "
        f"their ranks there: {', '.join(map(str, trace.source_ranks[:64]))}",
        f"the file has single steps ({steps}); here they are numbered from 0 and follow each other",
        "times are 32-bit seconds, exact to some microseconds",
        "the half-width of clocks is the largest difference between the two ends of a message",
    ]
    if other := sorted(set(trace.rows.optype) - set(_PHASES) - set(_OPS)):
        names = printable(", ".join(other)[:_MAX_NAMES])
        notes.append(f"operations of other kinds count as time outside all phases: {names}")
    if not trace.has_waits:
        notes.append(
            "the timeline leaves waits out: an operation begins once the worker's last work before it has ended"
        )
    return Source(
        tool=TOOL,
        files=trace.files,
        unknown=(
            "hosts and network",
            "bytes of operations",
            "samples",
            "what runs between the ranks of a worker (tensor parallelism)",
            "time between steps",
            "waits for data",
            *([] if messages.is_known.all() else [f"the other end of {_unknown_part(messages)} between stages"]),
        ),
        notes=notes,
    )


def _unknown_part(messages: pd.DataFrame) -> str:
    num_unknown = int((~messages.is_known).sum())
    return f"{num_unknown} of {plural(len(messages), 'message')}" if num_unknown < len(messages) else "messages"


def ranks_of(trace: WiaTrace, messages: pd.DataFrame) -> Iterator[ImportedRank]:
    """Yield the ranks of a trace; `messages` as of `real_messages`."""
    rows = _after_each_other(trace.rows)
    places = rows.groupby("worker")[["dp", "stage"]].first()
    worker_at = {(dp, stage): worker for worker, (dp, stage) in enumerate(places.itertuples(index=False))}
    operations = _operations(rows, messages, worker_at, has_waits=trace.has_waits)
    members = {name: np.sort(found) for name, found in operations.groupby("group").worker.unique().items()}
    # The trace of each member lists all members.
    if (num_rows := sum(len(found) ** 2 for found in members.values())) > _MAX_GROUP_ROWS:
        raise TraceError(f"the trace has {num_rows} members of groups over all ranks, more than {_MAX_GROUP_ROWS}")
    halfwidth_ns = _halfwidth_ns(operations)
    num_dp, num_pp = len(places.dp.unique()), len(places.stage.unique())
    begin_ns = rows.groupby("step").begin_ns.min()
    clocks = {worker: (UNKNOWN_HOST, f"imported-{worker}") for worker in range(len(places))}
    headers = headers_of(clocks, len(places))
    for worker, (dp, stage) in enumerate(places.itertuples(index=False)):
        own = rows[rows.worker == worker]
        yield ImportedRank(
            header=replace(headers[worker], mesh=f"dp={num_dp},pp={num_pp},tp=1", dp=int(dp), pp=int(stage), tp=0),
            tables={
                "steps": _step_rows(own, begin_ns),
                "phases": _phase_rows(own),
                **_operation_rows(operations[operations.worker == worker], own, members),
                "clock": _clock_rows(own, halfwidth_ns),
            },
        )


def _after_each_other(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows that begin when another one of the worker ended, where they seemed to begin shortly before that."""
    begin_ns = rows.begin_ns.to_numpy().copy()
    for at in rows.groupby("worker").indices.values():
        own, own_end_ns = begin_ns[at], rows.end_ns.to_numpy()[at]
        ends = np.sort(own_end_ns)
        found = ends[np.maximum(np.searchsorted(ends, own + _GRAIN_NS, side="right") - 1, 0)]
        begin_ns[at] = np.where((found > own) & (found < own_end_ns), found, own)
    return rows.assign(begin_ns=begin_ns)


def _operations(
    rows: pd.DataFrame, messages: pd.DataFrame, worker_at: dict[tuple[int, int], int], *, has_waits: bool
) -> pd.DataFrame:
    """Return the communication of all workers: the rows with `op`, `peer`, `group` (a name), `number`."""
    found = rows[rows.optype.isin(_OPS)].copy()
    found["op"] = found.optype.map(_OPS).astype(np.int64)
    found["peer"] = -1
    replica = found.dp.astype(str)
    scope = found.optype.map({name: members for name, (_, members) in _COLLECTIVES.items()})
    found["group"] = "all"
    found.loc[scope == "stage", "group"] = "stage " + found.stage.astype(str)
    found.loc[scope == "ends", "group"] = "ends of replica " + replica
    is_message = found.optype.isin(_MESSAGES)
    found.loc[messages.index, "group"] = _NO_GROUP
    ends = messages[messages.is_known]
    found.loc[ends.index, "group"] = (
        ends.direction + " " + ends.source.astype(str) + " to " + ends.target.astype(str)
    ) + (" of replica " + ends.dp.astype(str))
    other = ends.target.where(ends.is_send, ends.source)
    found.loc[ends.index, "peer"] = [worker_at.get(pair, -1) for pair in zip(ends.dp, other, strict=True)]
    found = found[~is_message | found.index.isin(messages.index)]
    found = _matched(pd.concat([found, *_unrecorded(rows)], ignore_index=True))
    return found if has_waits else _with_enters(found, rows)


def _unrecorded(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the waits between the last backward pass and what follows it, where all of a replica or stage wait there.

    The file has gaps in that place. That nobody goes on before the last one's work has ended, and all go on together,
    step after step, shows a synchronisation that was not recorded. The wait in a stage ends for all when the first one
    goes on; whoever is held by its replica, too, waits there from then on.
    """
    worked = rows[rows.optype.isin([*_COMPUTE, *_MESSAGES])].groupby(["worker", "step"], as_index=False).end_ns.max()
    worked = worked.set_axis(["worker", "step", "begin_ns"], axis=1)
    after = rows[rows.optype.isin(_AFTER_WORK)].merge(worked, on=["worker", "step"], suffixes=("_after", ""))
    after = after[after.begin_ns_after >= after.begin_ns - _GRAIN_NS]
    each = after.groupby(["worker", "dp", "stage", "step"], as_index=False).agg(
        begin_ns=("begin_ns", "first"), goes_on_ns=("begin_ns_after", "min")
    )
    replicas = _held_together(each, "dp", each.goes_on_ns)
    stages = _held_together(each, "stage", each.goes_on_ns.where(~each.dp.isin(replicas.dp.unique())))
    released_ns = stages.set_index(["worker", "step"]).end_ns
    since_ns = released_ns.reindex(pd.MultiIndex.from_frame(replicas[["worker", "step"]])).to_numpy()
    replicas["begin_ns"] = np.clip(np.nan_to_num(since_ns), replicas.begin_ns, replicas.end_ns).astype(np.int64)
    return [
        found.assign(group=f"{name} " + found[members].astype(str) + ", inferred", optype=optype, op=int(_OPS[optype]))
        for name, members, found, optype in (
            ("replica", "dp", replicas, "wait-replica"),
            ("stage", "stage", stages, "wait-stage"),
        )
        if len(found)
    ]


def _held_together(each: pd.DataFrame, members: str, goes_on_ns: pd.Series) -> pd.DataFrame:
    """Return the waits of those sets of workers that go on together once the last one's work has ended.

    Args:
        each: worker, step, end of its work and when it goes on.
        members: the column by which workers are of one set.
        goes_on_ns: when they go on, NaN for workers that are held by something else.
    """
    each = each.assign(known_ns=goes_on_ns)
    of_set = each.groupby([members, "step"])
    last_ns, first_ns = of_set.begin_ns.transform("max"), of_set.goes_on_ns.transform("min")
    spread_ns = of_set.known_ns.transform("max") - of_set.known_ns.transform("min")
    longest_ns = (each.goes_on_ns - each.begin_ns).groupby([each[members], each.step]).transform("max")
    each["is_held"] = (first_ns >= last_ns - _GRAIN_NS) & (spread_ns <= np.maximum(longest_ns * _TOGETHER, _GRAIN_NS))
    each["end_ns"] = np.maximum(first_ns, each.begin_ns).astype(np.int64)
    is_always = each.groupby(members).is_held.transform("mean") >= _ALWAYS
    num_members = each.groupby(members).worker.transform("nunique")
    held = each[each.is_held & is_always & (num_members > 1)]
    return held[["worker", "dp", "stage", "step", "begin_ns", "end_ns"]].assign(peer=-1, seq=0)


def _matched(found: pd.DataFrame) -> pd.DataFrame:
    """Return operations with three more columns.

    `number` is the same for the same operation of a group, `channel` is the sender of a message, and `is_batch` says
    whether a send was issued together with a receive.
    """
    keys = ["group", "step", "optype", "worker"]
    found = found.sort_values([*keys, "seq"], kind="stable", ignore_index=True)
    found["place"] = found.groupby(keys).cumcount()
    is_send, is_recv = found.op == Op.SEND, found.op == Op.RECV
    found["channel"] = found.peer.where(is_recv, found.worker.where(is_send, -1))
    # A number of its own for each step and kind of operation: members that lack one still agree on the others.
    kind = found.optype.map({name: place for place, name in enumerate(_OPS)}).where(~is_send & ~is_recv, 0)
    most = int(found.place.max()) + 1 if len(found) else 1
    found["number"] = (found.step * len(_OPS) + kind.astype(np.int64)) * most + found.place
    times = ["worker", "begin_ns", "end_ns"]
    received = pd.MultiIndex.from_frame(found.loc[is_recv, times])
    found["is_batch"] = is_send & pd.MultiIndex.from_frame(found[times]).isin(received)
    return found


def _with_enters(found: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return operations that begin when the worker's last work before them ended."""
    work = rows[rows.optype.isin(_PHASES) & (rows.end_ns > rows.begin_ns)]
    found = found.copy()
    for worker, own in found.groupby("worker"):
        ends = np.sort(work.end_ns[work.worker == worker])
        at = np.searchsorted(ends, own.begin_ns, side="right")
        before = np.where(at > 0, np.append(0, ends)[at], own.begin_ns)
        begins = rows[rows.worker == worker].groupby("step").begin_ns.min()
        found.loc[own.index, "begin_ns"] = np.maximum(before, own.step.map(begins).to_numpy())
    return found


def _halfwidth_ns(operations: pd.DataFrame) -> int:
    """Return by how much the two ends of a message differ at most, at least a microsecond."""
    messages = operations[operations.op.isin([Op.SEND, Op.RECV])]
    key = ["group", "step", "channel", "place"]
    both = messages[messages.op == Op.SEND].merge(messages[messages.op == Op.RECV], on=key, suffixes=("", "_of_recv"))
    return max(int((both.end_ns - both.end_ns_of_recv).abs().max()) if len(both) else 0, 1000)


def _step_rows(own: pd.DataFrame, begin_ns: pd.Series) -> Rows:
    end_ns = own.groupby("step").end_ns.max()
    index = end_ns.index
    return rows_of("steps", step=index.to_numpy(), begin_ns=begin_ns[index].to_numpy(), end_ns=end_ns.to_numpy())


def _phase_rows(own: pd.DataFrame) -> Rows:
    work = own[own.optype.isin(_PHASES) & (own.end_ns > own.begin_ns)]
    return rows_of(
        "phases",
        step=work.step.to_numpy(),
        phase=work.optype.map(_PHASES).to_numpy(np.uint8),
        begin_ns=work.begin_ns.to_numpy(),
        end_ns=work.end_ns.to_numpy(),
        microbatch=np.clip(work.microbatch.to_numpy(), -1, 32_767),
    )


def _operation_rows(found: pd.DataFrame, own: pd.DataFrame, members: dict[str, Int64Array]) -> dict[str, Rows]:
    """Return the tables `collectives` and `groups` of a worker."""
    names = sorted(name for name in found.group.unique().tolist() if name != _NO_GROUP)
    number = {_NO_GROUP: UNKNOWN_GROUP, **{name: place for place, name in enumerate(names)}}
    found = found.sort_values(["begin_ns", "end_ns"], kind="stable")
    return {
        "collectives": rows_of(
            "collectives",
            step=found.step.to_numpy(),
            group=found.group.map(number).to_numpy(np.int64),
            seq=found.number.to_numpy(),
            op=found.op.to_numpy(),
            peer=found.peer.to_numpy(),
            enter_ns=found.begin_ns.to_numpy(),
            exit_ns=found.end_ns.to_numpy(),
            blocked_ns=_blocked_ns(found, own),
        ),
        "groups": group_rows([(name, members[name]) for name in names], "unknown"),
    }


def _blocked_ns(found: pd.DataFrame, own: pd.DataFrame) -> Int64Array:
    """Return for how long a worker did nothing before each operation ended; 0 where it worked at that time.

    Of a batch of a send and a receive the receive has it.
    """
    work = own[own.optype.isin(_PHASES) & (own.end_ns > own.begin_ns)].sort_values("begin_ns")
    begins, ends = work.begin_ns.to_numpy(), np.maximum.accumulate(work.end_ns.to_numpy())
    exit_ns, enter_ns = found.end_ns.to_numpy(), found.begin_ns.to_numpy()
    worked_until = np.append(0, ends)[np.searchsorted(begins, exit_ns - _GRAIN_NS, side="left")]
    blocked_ns: Int64Array = np.maximum(exit_ns - np.maximum(enter_ns, worked_until), 0)
    blocked_ns[found.is_batch.to_numpy()] = 0
    return blocked_ns


def _clock_rows(own: pd.DataFrame, halfwidth_ns: int) -> Rows:
    local_ns = np.array([own.begin_ns.min(), own.end_ns.max()])
    return rows_of("clock", ref_rank=0, local_ns=local_ns, halfwidth_ns=halfwidth_ns, count=1)
