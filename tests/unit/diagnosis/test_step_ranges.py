"""Evidence of ranges of steps, read chunk by chunk, is that of the whole run in pieces."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import each_case

from hpcpace.core.errors import TraceError
from hpcpace.diagnosis.evidence import by_clocks, divide_steps, evidence_of, iter_share, timed_traces
from hpcpace.metrics.common_clock import CommonClock, rank_clocks, reference_times
from hpcpace.trace.reader import read_trace, stream_trace
from hpcpace.trace.schema import CHUNK_ROWS, NO_STEP, Op, TraceHeader, row_dtypes
from hpcpace.trace.writer import TraceWriter

_RANKS = 3
_STEPS = 2000
_OPS_PER_STEP = 10


def write(folder: Path, rank: int, *, close: bool, misses: int | None = None, step_shift: int = 0) -> Path:
    rng = np.random.default_rng(rank)
    dtypes = row_dtypes()
    num_rows = _STEPS * _OPS_PER_STEP
    rows = np.zeros(num_rows, dtypes["collectives"])
    rows["step"] = np.arange(num_rows) // _OPS_PER_STEP
    # Ranks need not agree in which step an operation was.
    rows["step"][_OPS_PER_STEP - 1 :: _OPS_PER_STEP] += step_shift
    rows["seq"], rows["op"], rows["peer"], rows["bytes"] = np.arange(num_rows), Op.ALL_REDUCE, -1, 8
    rows["enter_ns"] = 1000 * np.arange(num_rows) * 256 + rng.integers(0, 400, num_rows) * 256
    rows["exit_ns"] = rows["enter_ns"] + rng.integers(400, 3000, num_rows) * 256
    rows = rows[np.argsort(rows["exit_ns"], kind="stable")]
    if misses is not None:
        rows = np.delete(rows, misses)
    steps = np.zeros(_STEPS, dtypes["steps"])
    steps["step"] = np.arange(_STEPS)
    steps["begin_ns"] = 1000 * 256 * _OPS_PER_STEP * np.arange(_STEPS)
    steps["end_ns"] = steps["begin_ns"] + 1000 * 256 * _OPS_PER_STEP
    header = TraceHeader(
        run_id="w", attempt=0, rank=rank, world_size=_RANKS, local_rank=rank, local_size=_RANKS, node=0, host="n"
    )
    path = folder / f"rank-{rank:05d}.h5"
    writer = TraceWriter(path, header)
    for name, values in (("collectives", rows), ("steps", steps)):
        writer.add(name, values)
    writer.add("groups", np.array([(0, member, b"world", b"gloo") for member in range(_RANKS)], dtypes["groups"]))
    if close:
        writer.close()
    else:
        writer.flush()
        writer.abandon()
    return path


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Traces of a closed rank, one that was killed, and one that misses a row and counts some to the next step."""
    return [
        write(tmp_path, 0, close=True),
        write(tmp_path, 1, close=False),
        write(tmp_path, 2, close=True, misses=777, step_shift=1),
    ]


def iter_evidence(streams, max_rows):
    """Yield the evidence of consecutive ranges of steps."""
    (share,) = divide_steps(streams, max_rows=max_rows)
    timed = timed_traces([stream.trace for stream in streams])
    return (evidence for _, evidence in iter_share(streams, timed, share))


def rows_of(evidence):
    done = evidence.operations
    columns = (done.rank, done.seq, done.enter_ns, evidence.matching.is_matched, evidence.waits.wait_ns)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("max_rows", [3_000, 20_000, 10_000_000])
def test_ranges_together_have_every_row_once_with_its_match_and_wait(paths, max_rows):
    traces = [read_trace(path) for path in paths]
    whole = evidence_of(traces, *rank_clocks(traces))
    ranges = list(iter_evidence([stream_trace(path) for path in paths], max_rows=max_rows))
    assert len(ranges) == -(-len(whole.operations) // max_rows)
    assert sorted(row for evidence in ranges for row in rows_of(evidence)) == sorted(rows_of(whole))
    assert max(len(evidence.operations) for evidence in ranges) < max(1.2 * max_rows, 1) + 1000


def test_ranges_of_ranks_without_a_clock_are_gathered_once(tmp_path, monkeypatch):
    # Without samples and without the key of a host, only the first rank's clock is known.
    traces = [stream_trace(write(tmp_path, rank, close=True)) for rank in range(_RANKS)]
    gathered = []
    monkeypatch.setattr("hpcpace.diagnosis.evidence.evidence_of", lambda *of: gathered.append(of) or evidence_of(*of))
    ranges = list(iter_evidence(traces, max_rows=20_000))
    assert len(gathered) == len(ranges) > 2 and all(evidence.unknown_clocks == (1, 2) for evidence in ranges)
    assert not any(evidence.matching.is_matched.any() for evidence in ranges)
    assert sum(len(evidence.operations) for evidence in ranges) == _RANKS * _STEPS * _OPS_PER_STEP


def test_ranges_follow_each_other_by_step(paths):
    ranges = list(iter_evidence([stream_trace(path) for path in paths], max_rows=20_000))
    firsts = [int(evidence.operations.step.min()) for evidence in ranges]
    assert firsts == sorted(firsts) and len(set(firsts)) == len(ranges)


@pytest.mark.parametrize("index", [0, 1])
def test_a_stream_has_the_rows_of_the_trace(paths, index):
    stream, trace = stream_trace(paths[index]), read_trace(paths[index])
    blocks = list(stream.collectives())
    assert stream.num_collectives == len(trace.tables["collectives"]) > 2 * CHUNK_ROWS
    assert np.concatenate([block["seq"] for block in blocks]).tolist() == trace.tables["collectives"]["seq"].tolist()
    assert stream.trace.problems == trace.problems


def damage(path: Path, column: str) -> None:
    """Overwrite a part of the first chunk of a column of collectives."""
    with h5py.File(path, "r") as file:
        place = file[f"collectives/{column}"].id.get_chunk_info(0)
    with open(path, "r+b") as file:
        file.seek(place.byte_offset + min(100, place.size // 2))
        file.write(bytes(50))


def test_a_stream_knows_the_step_that_each_chunk_ends_with(paths):
    for path in paths:
        *chunks, _ = (stream := stream_trace(path)).collectives(["step"])
        assert chunks and stream.last_steps.tolist() == [int(rows["step"][-1]) for rows in chunks]


def test_a_stream_knows_of_no_step_where_a_chunk_is_damaged(paths):
    sound = stream_trace(paths[0]).last_steps.tolist()
    damage(paths[0], "step")
    assert stream_trace(paths[0]).last_steps.tolist() == [NO_STEP, *sound[1:]]


def test_rows_to_lead_stand_before_those_of_the_blocks(paths):
    stream = stream_trace(paths[0])
    lead = stream.blocks(0, 1).select(slice(5))
    for first, stop in ((1, 2), (1, stream.num_blocks), (stream.num_blocks - 1, stream.num_blocks)):
        rows, led = stream.blocks(first, stop), stream.blocks(first, stop, lead=lead)
        assert all(led[name].tolist() == [*lead[name].tolist(), *rows[name].tolist()] for name in rows)


def test_a_damaged_chunk_ends_a_stream_with_the_name_of_the_file(paths):
    damage(paths[0], "enter_ns")
    with pytest.raises(TraceError, match=r"rank-00000\.h5: chunk 0"):
        list(stream_trace(paths[0]).collectives())
    assert [problem for problem in read_trace(paths[0]).problems if "table collectives is damaged" in problem]


@each_case("seed", range(20))
def test_times_without_half_widths_are_the_same_times(seed):
    rng = np.random.default_rng(seed)
    local_ns = np.unique(rng.integers(0, 1 << 45, seed % 6))
    clock = CommonClock(
        local_ns=local_ns,
        offset_ns=rng.integers(-(1 << 40), 1 << 40, len(local_ns)),
        halfwidth_ns=np.full(len(local_ns), 5),
    )
    times = rng.integers(-(1 << 44), 1 << 46, 500)
    times[: len(local_ns)] = local_ns
    assert reference_times(clock, times).tolist() == clock.to_reference(times).time_ns.tolist()


def test_evidence_by_other_clocks_is_that_of_these_clocks(paths):
    traces = [read_trace(path) for path in paths]
    clocks, unknown = rank_clocks(traces)
    local_ns, offset_ns, halfwidth_ns = (np.array([value]) for value in (0, 700 * 256, 50))
    moved = CommonClock(local_ns=local_ns, offset_ns=offset_ns, halfwidth_ns=halfwidth_ns)
    other = [clocks[0], moved, clocks[2]]
    expected, found = evidence_of(traces, other, unknown), by_clocks(evidence_of(traces, clocks, unknown), other)
    assert rows_of(found) == rows_of(expected)
    assert found.waits.negative_ns.tolist() == expected.waits.negative_ns.tolist()
    assert rows_of(found) != rows_of(evidence_of(traces, clocks, unknown))
