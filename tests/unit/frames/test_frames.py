"""Frames of runs whose truth is known: they are what the report prints, whatever range of the run they are of."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from known_traffic import GIGABIT, MB, flows, interface_use

import hpcpace
from experiments.synthetic_run import SyntheticRun, header_of
from hpcpace.core.errors import CannotTell, TraceError, UsageError
from hpcpace.core.rundir import RunDirectory
from hpcpace.frames import tables
from hpcpace.frames.columns import FRAMES, TABLES
from hpcpace.frames.run import Run, RunWarning
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import ExitKind, Op, Phase
from tests.device_run import DeviceRun

pd = pytest.importorskip("pandas")

HOSTS = ("n1", "n2")


@pytest.fixture(scope="module")
def slow_rank(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "slow-rank"
    run = SyntheticRun(num_ranks=8, num_steps=60, hosts=HOSTS, slow={3: 1.3}, noise=0.02, offsets_ns={5: 10**9})
    return hpcpace.load(run.write(path).path)


def test_steps_have_the_times_of_the_report(slow_rank: Run) -> None:
    speed, times_ns = slow_rank.summary.throughput, slow_rank.steps.drop_duplicates("step").step_time_ns
    assert (times_ns.median(), times_ns.sum(), len(times_ns)) == (speed.p50_ns, speed.wall_ns, 58)
    assert slow_rank.steps.begin_ns.min() == 0


def test_parts_are_those_of_each_rank_in_the_report_and_add_up_to_its_steps(slow_rank: Run) -> None:
    names = list(slow_rank.summary.ranks[0].parts_ns or ())
    mean = slow_rank.parts.groupby("rank")[[f"{name}_ns" for name in names]].mean()
    for row in slow_rank.summary.ranks:
        assert mean.loc[row.rank].tolist() == pytest.approx(list((row.parts_ns or {}).values()))
        assert mean.loc[row.rank].sum() == pytest.approx(row.step_ns)
    parts = slow_rank.parts.eval("work_ns + exposed_wait_ns + exposed_transfer_ns")
    assert (parts - slow_rank.steps.duration_ns).abs().max() < 2


def test_collectives_have_the_waits_and_transfers_of_the_report(slow_rank: Run) -> None:
    (kind,), rows = slow_rank.summary.kinds, slow_rank.collectives
    assert (len(rows), rows.size_bytes.sum()) == (kind.num_rows, kind.size_bytes)
    assert rows.wait_ns.mean() == pytest.approx(kind.mean_wait_ns)
    assert rows.duration_ns.median() == pytest.approx(kind.median_ns, rel=1e-3)
    each = rows.groupby("seq").operation_transfer_ns
    assert each.first().mean() == pytest.approx(kind.mean_transfer_ns)
    assert (each.first() == rows.groupby("seq").transfer_ns.max()).all()
    for row in slow_rank.summary.ranks:
        own = rows[rows["rank"] == row.rank]
        assert own.transfer_ns.sum() / 58 == pytest.approx(row.transfer_ns)
        assert own.exposed_wait_ns.sum() / 58 == pytest.approx(row.exposed_wait_ns)


def test_the_late_rank_is_the_slow_one_and_bandwidths_are_those_of_nccl_tests(slow_rank: Run) -> None:
    rows = slow_rank.collectives
    assert set(rows[rows["rank"] != 3].late_rank) == {3}
    assert set(rows[rows["rank"] == 3].late_rank) == {-1}
    one = rows.iloc[0]
    assert one.algorithm_bytes_per_s == pytest.approx(4096 / one.operation_transfer_ns * 1e9)
    assert one.bus_bytes_per_s == pytest.approx(one.algorithm_bytes_per_s * 2 * 7 / 8)


def test_clocks_have_the_bounds_of_the_report(slow_rank: Run) -> None:
    clocks, rows = slow_rank.summary.clocks, slow_rank.clocks.query("is_known and not is_reference")
    assert rows.max_halfwidth_ns.max() == clocks.max_halfwidth_ns
    assert rows.drift_ppm.abs().max() == clocks.drift_ppm
    assert slow_rank.clocks.num_samples.min() == clocks.num_samples


def test_phases_lie_within_their_steps_on_the_common_clock(slow_rank: Run) -> None:
    rows = slow_rank.phases.merge(slow_rank.steps, on=["step", "rank"], suffixes=("", "_step"))
    assert len(rows) == 58 * 8 * 4
    assert (rows.begin_ns >= rows.begin_ns_step).all() and (rows.end_ns <= rows.end_ns_step).all()
    assert set(rows.phase) == {"data", "forward", "backward", "optimizer"}


def test_a_part_of_a_run_has_the_rows_of_the_whole(slow_rank: Run) -> None:
    part = slow_rank.between(20, 30).between(ranks=[3, 4])
    for table in ("steps", "parts", "phases", "collectives"):
        whole = getattr(slow_rank, table)
        chosen = whole[whole.step.between(20, 29) & whole["rank"].isin([3, 4])]
        pd.testing.assert_frame_equal(getattr(part, table), chosen.reset_index(drop=True), check_categorical=False)
    assert part.ranks["rank"].tolist() == part.clocks["rank"].tolist() == [3, 4]
    assert part.verdict is slow_rank.verdict
    for none in (slow_rank.between(500), slow_rank.between(ranks=[]), slow_rank.between(30, 20)):
        assert {len(getattr(none, table)) for table in ("steps", "parts", "phases", "collectives", "hosts")} == {0}


def _many_chunks(path: Path) -> Path:
    """Write a run of 2 ranks with 40 all_reduces and a message in each of 1,000 steps, whose clocks disagree."""
    attempt = RunDirectory(path).new_attempt()
    for rank in range(2):
        offset, header = rank * 10**9, header_of(rank, 2)
        recorder = Recorder(attempt.trace_file(rank), header, warn=lambda message: None, clock=lambda: 10**13)
        for member in range(2):
            recorder.add_group(0, member, b"default", b"gloo")
        for local_ns in (0, 10**13):
            recorder.add_clock(0, local_ns + offset, offset, 2000 * rank, 1000 * rank, 20)
        for step in range(1000):
            begin = 10**9 + step * 10**8 + offset
            recorder.add_phase(step, Phase.FORWARD, begin, begin + 10**8, -1)
            for number in range(40):
                enter = begin + number * 10**6 + rank * (number + 1) * 2500
                leave = begin + number * 10**6 + 400_000
                seq, kind = step * 40 + number, ExitKind.COMPLETION
                recorder.add_collective(step, 0, seq, Op.ALL_REDUCE, 4096, -1, enter, leave, leave - enter, kind)
            op, peer, enter = (Op.SEND, 1, begin + 10**8 - 1000) if rank == 0 else (Op.RECV, 0, begin + 9 * 10**7)
            # The receiver counts it to the step after.
            recorder.add_collective(
                step + rank, 0, step, op, 100, peer, enter, begin + 10**8, 1000, ExitKind.COMPLETION
            )
            recorder.add_step(step, begin, begin + 10**8, 8, 0)
        recorder.close()
    return path


def test_ranges_of_steps_change_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _many_chunks(tmp_path / "run")
    whole = hpcpace.load(path).collectives
    assert len(whole) == 1000 * 2 * 41 - 1  # the last message is received in a step that never ends
    assert whole.is_matched.mean() > 0.9999
    monkeypatch.setattr(tables, "MAX_ROWS", 1000)
    monkeypatch.setattr(tables, "_CELLS", 100)
    order = ["step", "rank", "op", "seq"]
    run = hpcpace.load(path)
    blocks, middle = list(run.blocks("collectives")), run.between(700, 710).collectives
    found = pd.concat([block.astype({"op": "str", "group": "str", "end": "str"}) for block in blocks])
    assert len(blocks) > 20
    for file in (path / "attempt-0" / "trace").iterdir():
        file.write_bytes(b"another file")
    with pytest.raises(TraceError, match="has changed since it was opened: open it anew"):
        list(run.blocks("collectives"))
    pd.testing.assert_frame_equal(_sorted(found, order), _sorted(whole, order))
    is_middle = whole.step.between(700, 709)
    pd.testing.assert_frame_equal(_sorted(middle, order), _sorted(whole[is_middle], order))


def _sorted(frame: pd.DataFrame, order: list[str]) -> pd.DataFrame:
    texts = frame.select_dtypes("category").columns
    return frame.astype(dict.fromkeys(texts, "str")).sort_values(order).reset_index(drop=True)


def test_frames_have_the_columns_and_types_of_the_document(slow_rank: Run, tmp_path: Path) -> None:
    alone = hpcpace.load(SyntheticRun(num_ranks=1).write(tmp_path / "alone").path)
    wrong = [
        (table, str(run))
        for run in (slow_rank, alone, slow_rank.between(500))
        for table in TABLES
        if [(name, str(kind)) for name, kind in getattr(run, table).dtypes.items()]
        != [(column.name, str(column.kind)) for column in FRAMES[table]]
    ]
    assert wrong == []


def test_what_cannot_be_known_is_nan_and_said_once(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=4, hosts=HOSTS, missing=(1,), lost_steps={2: 3}).write(tmp_path / "run")
    loaded = hpcpace.load(run.path)
    with pytest.warns(RunWarning, match="see Run.problems"):
        rows = loaded.collectives
    assert not rows.is_matched.any()
    assert rows[["wait_ns", "transfer_ns", "bus_bytes_per_s", "exposed_wait_ns"]].isna().all(axis=None)
    assert loaded.parts.exposed_wait_ns.isna().all() and (loaded.parts.exposed_transfer_ns > 0).all()
    assert loaded.parts["step"].max() == 36
    assert any("rank 1 left no trace" in problem for problem in loaded.problems)
    assert any("rank 2 was not closed" in problem for problem in loaded.problems)


def test_an_unknown_clock_has_no_times_but_durations(tmp_path: Path) -> None:
    loaded = hpcpace.load(SyntheticRun(num_ranks=4, hosts=HOSTS, has_clock=False).write(tmp_path / "run").path)
    with pytest.warns(RunWarning, match="clock of ranks 2-3 is unknown"):
        steps = loaded.steps
    unknown = steps["rank"].isin([2, 3])
    assert steps.begin_ns.isna().equals(unknown) and (steps.duration_ns > 0).all()
    assert loaded.phases.begin_ns.isna().equals(loaded.phases["rank"].isin([2, 3]))
    assert loaded.collectives.enter_ns.isna().equals(loaded.collectives["rank"].isin([2, 3]))
    assert loaded.clocks.halfwidth_ns.isna().tolist() == [False, False, True, True]


def test_transfers_that_a_clock_may_make_have_no_bandwidth(tmp_path: Path) -> None:
    job = SyntheticRun(num_ranks=4, num_steps=12, hosts=HOSTS, clock_error_ns={2: 5 * 10**7, 3: 5 * 10**7})
    loaded = hpcpace.load(job.write(tmp_path / "wrong").path)
    with pytest.warns(RunWarning, match="clocks? of") as warned:
        rows = loaded.collectives
    assert warned[0].filename == __file__
    assert rows.is_matched.all() and rows.bus_bytes_per_s.isna().all()
    vague = SyntheticRun(num_ranks=4, num_steps=12, hosts=HOSTS, halfwidth_ns=10**7).write(tmp_path / "vague")
    assert hpcpace.load(vague.path).collectives.bus_bytes_per_s.isna().all()


def test_host_times_of_ranks_with_a_device_are_no_parts(tmp_path: Path) -> None:
    loaded = hpcpace.load(DeviceRun().write(tmp_path / "run").path)
    with pytest.warns(RunWarning, match="host times"):
        parts = loaded.parts
    assert len(parts) and parts.work_ns.isna().all()


def test_warm_up_and_earlier_attempts_are_there_on_request(tmp_path: Path) -> None:
    SyntheticRun(num_ranks=2, num_steps=20).write(tmp_path / "run")
    SyntheticRun(num_ranks=2, num_steps=30).write(tmp_path / "run")
    assert hpcpace.load(tmp_path / "run").steps["step"].agg(["min", "max"]).tolist() == [2, 29]
    first = hpcpace.load(tmp_path / "run", attempt=0, include_warmup=True)
    assert (first.attempt, first.steps["step"].min(), first.steps.is_warmup.sum()) == (0, 0, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"path": "none"}, TraceError, "no run directory at none"),
        ({"path": "run", "attempt": 4}, TraceError, "no attempt 4"),
        ({"path": "run/attempt-0", "attempt": 4}, UsageError, "give one of them"),
        ({"path": "run", "memory": "much"}, UsageError, "much"),
    ],
)
def test_what_is_no_run_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object], error: type[Exception], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    SyntheticRun(num_ranks=2, num_steps=4).write(Path("run"))
    with pytest.raises(error, match=says):
        hpcpace.load(**arguments)


def test_a_run_without_a_trace_or_a_step_says_so_when_it_is_read(tmp_path: Path) -> None:
    empty = SyntheticRun(num_ranks=2, num_steps=2, num_warmup=2).write(tmp_path / "empty")
    with pytest.raises(CannotTell, match="none of the 2 common steps"):
        _ = hpcpace.load(empty.path).steps
    for file in (tmp_path / "empty" / "attempt-0" / "trace").iterdir():
        file.unlink()
    with pytest.raises(TraceError, match="no trace can be read"):
        _ = hpcpace.load(empty.path).summary
    with pytest.raises(UsageError, match="there is no frame 'flops': there are ranks, steps"):
        hpcpace.load(empty.path).blocks("flops")


def test_connections_and_interfaces_are_those_that_were_measured(slow_rank: Run) -> None:
    sides = [((0, 0), (1, 1), [3 * MB, 5 * MB]), ((1, 1), (0, 0), [2 * MB, MB])]
    use = {("n1", "eth0"): [4 * MB, 6 * MB], ("n2", "eth0"): [3 * MB, 0]}
    run = hpcpace.load(slow_rank.path)
    first_ns, _ = run._extent.window_ns  # the steps take more than two seconds
    carried, used = flows(sides), interface_use(use, nodes=[0, 1], rates=[GIGABIT, 0])
    shifted = [replace(one, begin_ns=one.begin_ns + first_ns, end_ns=one.end_ns + first_ns) for one in (carried, used)]
    vars(run.judged.measured).update(flows=shifted[0], interfaces=shifted[1])
    assert run.connections.sent_bytes.tolist() == [value for *_, values in sides for value in values]
    assert run.network.sent_bytes.tolist() == [value for values in use.values() for value in values]
    ends = run.connections[["rank", "peer_rank", "host", "peer_host"]].drop_duplicates()
    assert ends.to_numpy().tolist() == [
        [0, 1, "n1", "n2"],
        [1, 0, "n2", "n1"],
    ]
    assert run.between(ranks=[1]).connections["rank"].unique().tolist() == [1]
    assert run.network.line_rate_bps.isna().tolist() == [False, False, True, True]


def test_ranks_that_a_run_lacks_are_refused_and_steps_are_not(slow_rank: Run) -> None:
    with pytest.raises(UsageError, match="names ranks 8-9, and the figures of this run have ranks 0-7"):
        _ = slow_rank.between(ranks=[7, 8, 9]).steps
    assert slow_rank.between(10_000, 10_010).steps.empty


def test_without_pandas_nothing_is_read(slow_rank: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"pandas is not installed: pip install 'hpcpace\[frames\]'"):
        _ = hpcpace.load(slow_rank.path).steps
    with pytest.raises(UsageError, match=r"hpcpace\[frames\]"):
        hpcpace.load_many([slow_rank.path])


def test_neither_the_package_nor_a_loaded_run_loads_more_than_is_used(slow_rank: Run) -> None:
    code = f"""
import sys, hpcpace
print(*({{"numpy", "h5py", "pandas", "scipy", "matplotlib", "hpcpace.frames", "hpcpace.diagnosis"}} & set(sys.modules)))
run = hpcpace.load({str(slow_rank.path)!r})
run.verdict
print(*({{"pandas", "matplotlib", "torch", "pyarrow"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n\n"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    for number, slow in enumerate(({}, {1: 1.5})):
        SyntheticRun(num_ranks=4, hosts=HOSTS, slow=slow, noise=0.01).write(tmp_path / f"run-{number}")
    SyntheticRun(num_ranks=2, num_steps=2, num_warmup=2).write(tmp_path / "broken")
    yield tmp_path


def test_many_runs_are_a_row_each_with_what_compare_knows(folder: Path) -> None:
    (folder / "others.csv").write_text("run,step_time_s,nodes\nold,0.5,n[1-4]\n")
    rows = hpcpace.load_many([folder, folder / "others.csv"]).set_index("name")
    assert list(rows.index) == ["broken", "run-0", "run-1", "old"]
    assert rows.loc["run-1", "p50_ns"] == hpcpace.load(folder / "run-1").summary.throughput.p50_ns
    assert (rows.loc["run-1", "mode"], rows.loc["run-1", "num_nodes"]) == ("persistent straggler", 2)
    assert rows.loc["run-1", "forward_ns"] > rows.loc["run-0", "forward_ns"] > 0
    assert "none of the 2 common steps" in rows.loc["broken", "problem"] and np.isnan(rows.loc["broken", "p50_ns"])
    assert (rows.loc["old", "p50_ns"], rows.loc["old", "num_nodes"], rows.loc["run-0", "problem"]) == (5e8, 4, "")


def test_no_runs_are_no_frame(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run to load"):
        hpcpace.load_many([])
    assert "no run directory" in hpcpace.load_many(tmp_path / "none").problem[0]
