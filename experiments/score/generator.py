"""Traces of a scenario: its true times, written on each node's own clock into the tables of trace format 1.

`traces_of` keeps them in memory; `write_run` writes the same rows through the writer that training uses, and the truth
to a file outside of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import recfunctions
from numpy.typing import NDArray

from experiments.score.scenario import NUM_WARMUP, Scenario
from experiments.score.timeline import (
    COMPUTE_NS,
    DATA_GROUP,
    DEFAULT_GROUP,
    PIPELINE_GROUP,
    OperationTimes,
    Timeline,
    core_waits,
    noise_factors,
    simulate,
)
from hpcpace.core.rundir import RunDirectory
from hpcpace.trace.schema import TABLES, ExitKind, Op, Phase, StepFlag, TraceHeader, round_times
from hpcpace.trace.tables import RankTrace, Table
from hpcpace.trace.writer import TraceWriter

Rows = dict[str, NDArray[np.void]]
Int64s = NDArray[np.int64]

_LATENCY_NS = 10_000
_ISSUING = 0.2
"""What issuing takes of what the device takes."""
_STEPS_AHEAD = 1.5


def device_tables(scenario: Scenario) -> tuple[str, ...]:
    """Return the tables that have the columns of ranks with a device."""
    if scenario.device == "none":
        return ()
    return ("collectives",) if scenario.data == "host_times" else ("collectives", "steps", "phases")


def on_device(scenario: Scenario, rows: Rows, open_rows: NDArray[np.void]) -> tuple[Rows, NDArray[np.void]]:
    """Return the rows of a rank with a device: host times in the columns of the host, and those of the device.

    Args:
        scenario: says what the host does.
        rows: of all tables, with the times of the device.
        open_rows: of operations that never completed.
    """
    if scenario.device == "none":
        return rows, open_rows
    host = _Host(scenario, rows)
    changed = dict(rows)
    for name in ("steps", "phases"):
        changed[name] = _marks(host, name, rows[name], has_device="steps" in device_tables(scenario))
    changed["collectives"] = _operations(host, rows["collectives"], scenario)
    return changed, _operations(host, open_rows, scenario)


class _Host:
    """When the host of a rank passed a mark that its device passed at some time.

    Args:
        scenario: says what it does.
        rows: of the rank.
    """

    def __init__(self, scenario: Scenario, rows: Rows) -> None:
        steps, phases = rows["steps"], rows["phases"]
        self._kind = scenario.device
        self._begin_ns, self._end_ns = steps["begin_ns"], steps["end_ns"]
        self._ahead_ns = int(_STEPS_AHEAD * float(np.median(self._end_ns - self._begin_ns)))
        # The host waits for its data itself, and its device for it.
        self._data_ns = self._begin_ns.copy()
        data = phases[phases["phase"] == Phase.DATA]
        at = np.searchsorted(steps["step"], data["step"])
        known = at < len(steps)
        self._data_ns[at[known]] = data["end_ns"][known]

    def passed_ns(self, device_ns: Int64s) -> Int64s:
        """Return when the host passed marks, int64, (num_marks,)."""
        if self._kind == "ahead":
            return device_ns - self._ahead_ns
        if self._kind == "host_bound":
            return device_ns - _LATENCY_NS
        row = np.maximum(np.searchsorted(self._begin_ns, device_ns, side="right") - 1, 0)
        issued_ns = self._data_ns[row] + (_ISSUING * (device_ns - self._data_ns[row])).astype(np.int64)
        is_waiting = (device_ns <= self._data_ns[row]) | (device_ns == self._end_ns[row])
        return np.where(is_waiting, device_ns, issued_ns) - _LATENCY_NS


def _marks(host: _Host, name: str, rows: NDArray[np.void], *, has_device: bool) -> NDArray[np.void]:
    """Return steps or phases with the times of the host, and with those of the device if asked for."""
    made = rows.copy()
    made["begin_ns"], made["end_ns"] = (host.passed_ns(rows[column]) for column in ("begin_ns", "end_ns"))
    if not has_device:
        return made
    made = _with_columns(made, name)
    made["device_begin_ns"], made["device_end_ns"] = rows["begin_ns"], rows["end_ns"]
    round_times(name, made)
    return made


def _operations(host: _Host, rows: NDArray[np.void], scenario: Scenario) -> NDArray[np.void]:
    made = _with_columns(rows, "collectives")
    made["enqueue_ns"] = host.passed_ns(rows["enter_ns"])
    if scenario.data == "host_times":
        made["blocked_ns"] = 0
    round_times("collectives", made)
    return made


def _with_columns(rows: NDArray[np.void], name: str) -> NDArray[np.void]:
    columns = TABLES[name].device.names or ()
    zeros = [np.zeros(len(rows), np.int64) for _ in columns]
    return recfunctions.append_fields(rows, columns, zeros, usemask=False)


_HOUR_NS = 3_600_000_000_000
_UNKNOWN = 200
_TIMES = ("begin_ns", "end_ns", "enter_ns", "exit_ns", "local_ns", "time_ns", "blocked_ns")


def with_losses(
    scenario: Scenario, traces: Sequence[RankTrace], others: Callable[[], Sequence[RankTrace]]
) -> list[RankTrace]:
    """Return the traces of a scenario as its data fault leaves them.

    Args:
        scenario: names the fault, and the ranks that it is about.
        traces: of all ranks.
        others: returns the traces of another run of as many ranks.
    """
    lost = scenario.lost_ranks
    if scenario.data in ("sound", "host_times"):
        return list(traces)
    if scenario.data == "missing":
        return [trace for trace in traces if trace.header.rank not in lost]
    if scenario.data == "other_run":
        return [other if other.header.rank in lost else own for own, other in zip(traces, others(), strict=True)]
    change = _CHANGES[scenario.data]
    return [change(trace) if trace.header.rank in lost else trace for trace in traces]


def _changed(trace: RankTrace, **tables: dict[str, Any]) -> RankTrace:
    """Return a trace with other columns: a value for all rows, or an array."""
    made = dict(trace.tables)
    for name, columns in tables.items():
        table = made[name]
        new = {key: np.broadcast_to(value, len(table)).astype(table[key].dtype) for key, value in columns.items()}
        made[name] = Table({key: new.get(key, table[key]) for key in table})
    return replace(trace, tables=made)


def _other_start(trace: RankTrace) -> RankTrace:
    """Return a rank's trace of an earlier start under the same names: an hour before the others."""
    times = {
        name: {key: table[key] - _HOUR_NS for key in table if key in _TIMES and key != "blocked_ns"}
        for name, table in trace.tables.items()
        if name != "clock"
    }
    return _changed(trace, **times)


def _all_zero(trace: RankTrace) -> RankTrace:
    return _changed(trace, **{name: {key: 0 for key in table if key in _TIMES} for name, table in trace.tables.items()})


def _without_collectives(trace: RankTrace) -> RankTrace:
    return replace(trace, tables={**trace.tables, "collectives": trace.tables["collectives"].select(slice(0))})


_UNKNOWN_ENUMS = {"collectives": {"op": _UNKNOWN, "exit_kind": _UNKNOWN}, "phases": {"phase": _UNKNOWN}}
_CHANGES: dict[str, Callable[[RankTrace], RankTrace]] = {
    "other_start": _other_start,
    "zero_times": _all_zero,
    "unknown_enums": lambda trace: _changed(trace, **_UNKNOWN_ENUMS),
    "exits_before_enters": lambda trace: _moved(trace, "collectives", "exit_ns", "enter_ns", -_HOUR_NS),
    "overlapping_steps": lambda trace: _moved(trace, "steps", "end_ns", "end_ns", _half_of(trace.tables["steps"])),
    "wrong_clock": lambda trace: _moved(trace, "clock", "offset_ns", "offset_ns", _HOUR_NS),
    "no_collectives": _without_collectives,
}


def _moved(trace: RankTrace, table: str, column: str, source: str, by_ns: Any) -> RankTrace:
    """Return a trace with a column that is another one, moved."""
    return _changed(trace, **{table: {column: trace.tables[table][source] + by_ns}})


def _half_of(steps: Table) -> Int64s:
    half_ns: Int64s = (steps["end_ns"] - steps["begin_ns"]) // 2
    return half_ns


START_NS = 5_000_000_000_000
SECOND_NS = 1_000_000_000
HALFWIDTH_NS = 5_000
TOKENS_PER_STEP = 65_536
_HANG_NS = 120 * SECOND_NS
_ROW_COST_NS = 700
_USUAL_WAIT = 0.005


@dataclass(frozen=True, kw_only=True)
class NodeClocks:
    """The clocks of the nodes against that of node 0, which is the true one.

    Attributes:
        offset_ns, drift: at the true time 0, and relative, each (num_nodes,).
    """

    offset_ns: NDArray[np.int64]
    drift: NDArray[np.float64]

    def local_ns(self, true_ns: NDArray[np.float64], nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return true times on the clocks of `nodes`, which broadcasts to the times."""
        return START_NS + self.offset_ns[nodes] + np.rint(true_ns * (1.0 + self.drift[nodes])).astype(np.int64)


def clocks_of(scenario: Scenario) -> NodeClocks:
    random = scenario.random("clock")
    bound = scenario.max_offset_ns
    offset_ns = random.integers(-bound, bound + 1, scenario.num_nodes)
    drift = random.uniform(-1, 1, scenario.num_nodes) * scenario.max_drift_ppm * 1e-6
    offset_ns[0], drift[0] = 0, 0.0
    return NodeClocks(offset_ns=offset_ns, drift=drift)


def traces_of(scenario: Scenario) -> list[RankTrace]:
    """Return the traces of all ranks as the reader would return them."""
    return [
        RankTrace(
            path=Path(f"trace/rank-{header.rank:05d}.h5"),
            header=header,
            tables={name: Table.from_rows(rows[name]) for name in TABLES},
            problems=(),
            closed_cleanly=scenario.fault != "hang",
            open_collectives=Table.from_rows(open_rows),
        )
        for header, rows, open_rows in _ranks(scenario)
    ]


def write_run(scenario: Scenario, folder: Path, *, truth: Mapping[str, Any] | None = None) -> RunDirectory:
    """Write a run of this scenario, and its truth to `folder` with the suffix .truth.json; return the run.

    Ranks of a hanging run are left as a kill leaves them, with a journal.
    """
    run = RunDirectory(folder)
    attempt = run.new_attempt()
    for header, rows, open_rows in _ranks(scenario):
        writer = TraceWriter(attempt.trace_file(header.rank), header, device_tables=device_tables(scenario))
        for name, table in rows.items():
            writer.add(name, table)
        writer.set_open(open_rows)
        if scenario.fault == "hang":
            writer.flush()
            writer.abandon()
        else:
            writer.close()
    if truth is not None:
        folder.with_suffix(".truth.json").write_text(json.dumps(truth, indent=2, sort_keys=True) + "\n")
    return run


def _ranks(scenario: Scenario) -> Iterator[tuple[TraceHeader, Rows, NDArray[np.void]]]:
    """Yield header, rows of all tables, and rows of open operations of each rank, ascending."""
    timeline = simulate(scenario)
    clocks = clocks_of(scenario)
    end_ns = float(timeline.end.max()) + (_HANG_NS if scenario.fault == "hang" else 0.0)
    seconds = np.arange(0.0, end_ns, SECOND_NS)
    flushes = np.append(seconds[1:], end_ns)
    steps, phases = _steps(scenario, timeline, clocks), _phases(scenario, timeline, clocks)
    collectives = _collectives(scenario, timeline, clocks)
    clock = _clock(scenario, clocks, end_ns)
    for rank in range(scenario.num_ranks):
        node = int(scenario.node_of_rank[rank])
        rows = {name: np.zeros(0, table.dtype) for name, table in TABLES.items()}
        rows |= {"steps": steps[rank], "phases": phases[rank], "collectives": collectives[rank]}
        rows |= {"groups": _groups(scenario, rank), "clock": clock[node]}
        rows["host"] = _host(scenario, timeline, rank, seconds, clocks.local_ns(seconds, np.array(node)))
        open_rows = collectives[rank][:0]
        if scenario.fault == "hang":
            open_rows = _hang(scenario, rank, rows)
        num_rows = sum(len(table) for table in rows.values())
        rows["account"] = _account(clocks.local_ns(flushes, np.array(node)), num_rows)
        yield _header(scenario, rank), *on_device(scenario, rows, open_rows)


def _header(scenario: Scenario, rank: int) -> TraceHeader:
    node, leaf = int(scenario.node_of_rank[rank]), int(scenario.leaf_of_rank[rank])
    replica, stage = divmod(rank, scenario.num_stages)
    return TraceHeader(
        run_id=f"score-{scenario.seed}",
        attempt=0,
        rank=rank,
        world_size=scenario.num_ranks,
        local_rank=rank % scenario.ranks_per_node,
        local_size=scenario.ranks_per_node,
        node=node,
        host=f"n{node + 1}",
        host_key=f"key-{node + 1}",
        cpus=f"0-{_num_cpus(scenario) - 1}",
        topology_addr=f"spine.leaf{leaf + 1}.n{node + 1}",
        mesh=f"dp={scenario.num_replicas},pp={scenario.num_stages},tp=1",
        dp=replica,
        pp=stage,
        tp=0,
        samples_unit="tokens",
    )


def _num_cpus(scenario: Scenario) -> int:
    """Return how many CPUs the ranks of a node may use."""
    return max(scenario.ranks_per_node // (2 if scenario.fault == "shared_cores" else 1), 1)


def _steps(scenario: Scenario, timeline: Timeline, clocks: NodeClocks) -> NDArray[np.void]:
    rows = np.zeros((scenario.num_ranks, scenario.total_steps), TABLES["steps"].dtype)
    nodes = scenario.node_of_rank
    rows["step"] = np.arange(scenario.total_steps)
    rows["begin_ns"], rows["end_ns"] = (clocks.local_ns(t, nodes).T for t in (timeline.begin, timeline.end))
    rows["samples"] = TOKENS_PER_STEP // scenario.num_ranks
    rows["flags"][:, :NUM_WARMUP] = StepFlag.WARMUP
    return rows


def _phases(scenario: Scenario, timeline: Timeline, clocks: NodeClocks) -> NDArray[np.void]:
    parts = [
        (Phase.DATA, timeline.begin[:, None], timeline.data_end[:, None]),
        (Phase.FORWARD, timeline.forward_begin, timeline.forward_end),
        (Phase.BACKWARD, timeline.backward_begin, timeline.backward_end),
        (Phase.OPTIMIZER, timeline.optimizer_begin[:, None], timeline.end[:, None]),
    ]
    num_rows = sum(begin.shape[1] for _, begin, _ in parts)
    rows = np.zeros((scenario.num_ranks, scenario.total_steps, num_rows), TABLES["phases"].dtype)
    rows["step"] = np.arange(scenario.total_steps)[:, None]
    first = 0
    for phase, begin, end in parts:
        count = begin.shape[1]
        chosen = rows[:, :, first : first + count]
        chosen["phase"] = phase
        is_piece = scenario.num_stages > 1 and phase in (Phase.FORWARD, Phase.BACKWARD)
        chosen["microbatch"] = np.arange(count) if is_piece else -1
        for column, times in (("begin_ns", begin), ("end_ns", end)):
            chosen[column] = clocks.local_ns(times, scenario.node_of_rank).transpose(2, 0, 1)
        first += count
    return rows.reshape(scenario.num_ranks, -1)


def _collectives(scenario: Scenario, timeline: Timeline, clocks: NodeClocks) -> list[NDArray[np.void]]:
    """Return the rows of each rank in the order in which its operations ended."""
    found: list[NDArray[np.void]] = [np.zeros(0, TABLES["collectives"].dtype)] * scenario.num_ranks
    for stage in range(scenario.num_stages):
        ranks = np.arange(stage, scenario.num_ranks, scenario.num_stages)
        mine = [of for of in timeline.operations if of.stages[0] <= stage < of.stages[1]]
        joined = np.concatenate([_operation_rows(of, ranks) for of in mine], axis=1)
        enter, exit_ = (
            clocks.local_ns(
                np.concatenate([times[:, :, ranks].reshape(-1, len(ranks)) for times in of_all]),
                scenario.node_of_rank[ranks],
            ).T
            for of_all in ([of.enter for of in mine], [of.exit for of in mine])
        )
        joined["enter_ns"], joined["exit_ns"], joined["blocked_ns"] = enter, exit_, exit_ - enter
        for rank, rows, order in zip(ranks.tolist(), joined, np.argsort(exit_, axis=1, kind="stable"), strict=True):
            found[rank] = rows[order]
            round_times("collectives", found[rank])
    return found


def _operation_rows(times: OperationTimes, ranks: NDArray[np.int64]) -> NDArray[np.void]:
    """Return rows without times, (len(ranks), total_steps * num_operations)."""
    steps, count = times.enter.shape[:2]
    rows = np.zeros((len(ranks), steps * count), TABLES["collectives"].dtype)
    rows["step"] = np.repeat(np.arange(steps), count)
    rows["seq"] = np.arange(steps * count)
    rows["group"], rows["op"], rows["bytes"] = times.group, times.op, times.size_bytes
    rows["peer"] = ranks[:, None] + times.peer_distance if times.peer_distance else -1
    rows["exit_kind"] = ExitKind.WAIT if times.op == Op.SEND else ExitKind.COMPLETION
    return rows


def _hang(scenario: Scenario, rank: int, rows: Rows) -> NDArray[np.void]:
    """Take out of a rank's rows what comes after the hang, and return its row of the operation in which it hangs.

    The target never enters the first all_reduce of its group in the last step. The others of the group stay in that
    one, and all other groups in the one of all ranks that comes after their own.
    """
    last, target, stages = scenario.total_steps - 1, scenario.resolved_target, scenario.num_stages
    in_group = rank % stages == target % stages
    rows["steps"] = rows["steps"][rows["steps"]["step"] != last]
    phases = rows["phases"]
    unfinished = (Phase.OPTIMIZER, Phase.BACKWARD) if stages == 1 else (Phase.OPTIMIZER,)
    rows["phases"] = phases[(phases["step"] != last) | ~np.isin(phases["phase"], unfinished)]
    collectives = rows["collectives"]
    is_late = (collectives["step"] == last) & (collectives["op"] == Op.ALL_REDUCE)
    if not in_group:
        is_late &= collectives["group"] == DEFAULT_GROUP
    rows["collectives"] = collectives[~is_late]
    if rank == target:
        return collectives[:0]
    row: NDArray[np.void] = collectives[is_late][:1].copy()
    row["exit_ns"] = row["blocked_ns"] = 0
    row["exit_kind"] = ExitKind.NEVER
    return row


def _groups(scenario: Scenario, rank: int) -> NDArray[np.void]:
    replica, stage = divmod(rank, scenario.num_stages)
    everyone = np.arange(scenario.num_ranks)
    groups = [(DEFAULT_GROUP, "default", everyone)]
    if scenario.layout == "dp x pp":
        groups.append((DATA_GROUP, f"dp-{stage}", everyone[stage :: scenario.num_stages]))
        begin = replica * scenario.num_stages
        groups.append((PIPELINE_GROUP, f"pp-{replica}", everyone[begin : begin + scenario.num_stages]))
    rows = np.zeros(sum(len(ranks) for *_, ranks in groups), TABLES["groups"].dtype)
    first = 0
    for number, name, ranks in groups:
        chosen = rows[first : first + len(ranks)]
        chosen["id"], chosen["rank"], chosen["name"], chosen["backend"] = number, ranks, name.encode(), b"gloo"
        first += len(ranks)
    return rows


def _clock(scenario: Scenario, clocks: NodeClocks, end_ns: float) -> list[NDArray[np.void]]:
    """Return the synchronisations of each node."""
    random = scenario.random("synchronisation")
    interval_ns = scenario.clock_interval_s * SECOND_NS
    inner = np.arange(interval_ns, end_ns, interval_ns) if interval_ns else np.zeros(0)
    times = np.concatenate([[0.0], inner, [end_ns]])
    found = []
    for node in range(scenario.num_nodes):
        rows = np.zeros(len(times), TABLES["clock"].dtype)
        local_ns = clocks.local_ns(times, np.full(len(times), node))
        rows["local_ns"] = local_ns
        if node:
            error_ns = random.uniform(-0.8 * HALFWIDTH_NS, 0.8 * HALFWIDTH_NS, len(times))
            wrong_ns = scenario.clock_error_ns if node == scenario.clock_error_node else 0
            rows["offset_ns"] = local_ns - START_NS - np.rint(times + error_ns).astype(np.int64) + wrong_ns
            rows["halfwidth_ns"], rows["rtt_ns"], rows["count"] = HALFWIDTH_NS, 2 * HALFWIDTH_NS, 20
        found.append(rows)
    return found


def _host(
    scenario: Scenario, timeline: Timeline, rank: int, seconds: NDArray[np.float64], seconds_ns: NDArray[np.int64]
) -> NDArray[np.void]:
    random = np.random.default_rng([scenario.seed, rank, 1])
    rows = np.zeros(len(seconds), TABLES["host"].dtype)
    rows["time_ns"] = seconds_ns
    disturbed_ns = timeline.end[timeline.service[:, rank], rank]
    rows["involuntary_switches"] = np.cumsum(random.poisson(2, len(seconds))) + 50 * np.searchsorted(
        disturbed_ns, seconds, side="right"
    )
    # A healthy rank waits now and then, too.
    waited_ns = _USUAL_WAIT * timeline.end[:, rank] + COMPUTE_NS * np.cumsum(core_waits(scenario)[:, rank])
    ran_ns = np.cumsum(COMPUTE_NS * noise_factors(scenario)[:, rank])
    rows["run_wait_ns"], rows["cpu_time_ns"] = (
        np.interp(seconds, timeline.end[:, rank], ns) for ns in (waited_ns, ran_ns)
    )
    rows["rss_bytes"], rows["gpu_memory_bytes"], rows["gpu_clock_mhz"] = 3 << 30, 40 << 30, 1980
    return rows


def _account(flushes_ns: NDArray[np.int64], num_rows: int) -> NDArray[np.void]:
    rows = np.zeros(len(flushes_ns), TABLES["account"].dtype)
    rows["time_ns"] = flushes_ns
    rows["events"] = np.diff(np.linspace(0, num_rows, len(flushes_ns) + 1).astype(np.int64))
    rows["cost_ns"] = rows["events"] * _ROW_COST_NS + 1_000_000
    return rows
