"""Traces of ByteDance's what-if analysis as runs."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from cases import each_case
from interleaved import NUM_MICROBATCHES, NUM_PLACES, NUM_REPLICAS, NUM_STEPS, interleaved
from varying_data import gpipe

from hpcpace.core.config import Config
from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import open_run
from hpcpace.diagnosis.analyze import analyze
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import Summary
from hpcpace.runs.imports.imported_run import Import, write_run
from hpcpace.runs.imports.wia import COLUMNS, import_wia
from hpcpace.trace.schema import Op, Phase

DATA = Path(__file__).parents[2] / "data" / "imports"


def report(found: Import, path: Path) -> Summary:
    write_run(path, found)
    run = open_run(path)
    analysis = analyze(run, run.last_attempt(), Selection(), Config(), begin_stage=lambda _: lambda *_: None)
    assert analysis is not None
    return analysis.summary


def test_the_published_trace_of_uneven_stages_names_the_last_stage_and_blames_no_rank(tmp_path: Path) -> None:
    summary = report(import_wia(DATA / "trace-ST.parquet"), tmp_path / "run")
    assert summary.verdict.mode == "pipeline imbalance"
    assert [culprit.id for culprit in summary.verdict.findings[0].culprits] == ["pp3"]
    assert all(finding.mode != "persistent straggler" for finding in summary.verdict.findings)
    assert "StragglerAnalysis" in summary.world.imported and "samples" in summary.world.imported


def test_what_if_of_even_work_agrees_with_the_published_slowdown(tmp_path: Path) -> None:
    """1.179 in result-ST.json and in the paper's artifact."""
    summary = report(import_wia(DATA / "trace-ST.parquet"), tmp_path / "run")
    assert summary.causes is not None and summary.causes.rebuild_error is not None
    (even,) = [row for row in summary.causes.gains if row.name == "all work, if it were even"]
    assert 1 / (1 - even.gain_share) == pytest.approx(1.179, rel=0.02)
    assert summary.causes.rebuild_error < 0.001


def test_workers_become_ranks_with_their_place_in_the_mesh() -> None:
    found = import_wia(DATA / "trace-ST.parquet")
    assert [(one.header.dp, one.header.pp) for one in found.ranks][:3] == [(0, 0), (1, 0), (0, 1)]
    assert {one.header.world_size for one in found.ranks} == {8} and found.ranks[0].header.mesh == "dp=2,pp=4,tp=1"
    assert found.num_steps == 32 and "8 GPUs" in found.source.notes[0]


def _sides(found: Import) -> dict[Op, set[tuple[Any, ...]]]:
    """Return group, sender, receiver and number of each send and of each receive."""
    sides: dict[Op, set[tuple[Any, ...]]] = {Op.SEND: set(), Op.RECV: set()}
    for one in found.ranks:
        rows = one.tables["collectives"]
        names = dict(zip(one.tables["groups"]["id"], one.tables["groups"]["name"], strict=True))
        rows = rows[np.isin(rows["group"], list(names))]
        for op, peers in ((Op.SEND, (one.header.rank, None)), (Op.RECV, (None, one.header.rank))):
            for row in rows[rows["op"] == op]:
                source, target = (int(row["peer"]) if end is None else end for end in peers)
                sides[op].add((names[row["group"]], source, target, int(row["seq"])))
    return sides


def test_both_sides_of_each_message_have_the_same_number() -> None:
    sides = _sides(import_wia(DATA / "trace-ST.parquet"))
    assert sides[Op.SEND] == sides[Op.RECV] and len(sides[Op.SEND]) == 2 * 768


def test_messages_match_where_chunks_are_not_named(tmp_path: Path) -> None:
    table = pd.read_parquet(DATA / "trace-ST.parquet").assign(mc=-1)
    assert _sides(import_wia(_written(tmp_path / "trace.parquet", table))) == _sides(
        import_wia(DATA / "trace-ST.parquet")
    )


def test_a_trace_without_communication_has_work_alone(tmp_path: Path) -> None:
    table = pd.read_parquet(DATA / "trace-ST.parquet")
    work = table[table.optype.astype(str).isin(["forward-compute", "backward-compute"])]
    ranks = import_wia(_written(tmp_path / "trace.parquet", work)).ranks
    assert all(len(one.tables["phases"]) and not len(one.tables["collectives"]) for one in ranks)


def test_messages_of_interleaved_chunks_match_and_show_the_slow_worker(tmp_path: Path) -> None:
    interleaved(slow=(1, 0), factor=1.5).to_parquet(tmp_path / "trace.parquet")
    found = import_wia(tmp_path / "trace.parquet")
    sides = _sides(found)
    assert sides[Op.SEND] == sides[Op.RECV]
    assert len(sides[Op.SEND]) == 2 * NUM_REPLICAS * NUM_STEPS * NUM_MICROBATCHES * (NUM_PLACES - 1)
    assert {name for name, *_ in sides[Op.SEND] if name.endswith(b"replica 0")} == {
        *(b"forward 0 to 1 of replica 0", b"forward 1 to 0 of replica 0"),
        *(b"backward 0 to 1 of replica 0", b"backward 1 to 0 of replica 0"),
    }
    summary = report(found, tmp_path / "run")
    assert summary.verdict.mode == "persistent straggler"
    assert [culprit.id for culprit in summary.verdict.findings[0].culprits] == ["1"]
    # Without it, the step is as long as one of a job in which no worker is slow.
    assert summary.causes is not None and summary.causes.rebuild_error == pytest.approx(0.0, abs=0.001)
    (gain,) = [row for row in summary.causes.gains if row.name == "work of rank 1"]
    slow_s, even_s = (step_s(interleaved(slow=(1, 0), factor=factor)) for factor in (1.5, 1.0))
    assert gain.gain_share == pytest.approx(1 - even_s / slow_s, rel=0.01)


def step_s(table: pd.DataFrame) -> float:
    """Return how long the first step of a table takes, seconds."""
    first = table[table.step == 0]
    return float((first.start_ts + first.duration).max())


def test_messages_that_do_not_fit_the_work_match_none_and_blame_nobody(tmp_path: Path) -> None:
    table = interleaved(slow=(1, 0), factor=1.5)
    is_lost = (table.optype == "forward-recv") & (table["rank"] == 4) & table.seq_id.isin([2, 3]) & (table.step == 7)
    table[~is_lost].to_parquet(tmp_path / "trace.parquet")
    found = import_wia(tmp_path / "trace.parquet")
    # Of step 7 in replica 1, forward from stage 0 to 1: six calls that were sent to six of eight places.
    sides, whole = _sides(found), _sides(import_wia(_written(tmp_path / "whole.parquet", table)))
    lost = whole[Op.SEND] - sides[Op.SEND]
    assert {(group, source) for group, source, *_ in lost} == {(b"forward 0 to 1 of replica 1", 1)}
    assert len(lost) == 2 * NUM_MICROBATCHES and sides[Op.RECV] == whole[Op.RECV] - lost
    assert any(what.startswith("the other end of ") for what in found.source.unknown)
    summary = report(found, tmp_path / "run")
    assert [culprit.id for culprit in summary.verdict.findings[0].culprits] == ["1"]


def test_all_messages_of_unknown_ends_are_waits_of_their_callers_nonetheless(tmp_path: Path) -> None:
    table = interleaved(slow=(1, 0), factor=1.5)
    is_lost = table.optype.isin(["forward-send", "backward-send"]) & table.seq_id.isin([2, 3])
    found = import_wia(_written(tmp_path / "trace.parquet", table[~is_lost]))
    assert "the other end of messages between stages" in found.source.unknown
    summary = report(found, tmp_path / "run")
    assert [culprit.id for culprit in summary.verdict.findings[0].culprits] == ["1"]


def test_operations_of_other_kinds_are_named(tmp_path: Path) -> None:
    table = pd.read_parquet(DATA / "trace-ST.parquet").astype({"optype": str})
    table["optype"] = table.optype.replace({"gc": "data-load"})
    notes = import_wia(_written(tmp_path / "trace.parquet", table)).source.notes
    assert "operations of other kinds count as time outside all phases: data-load" in notes


def test_a_lost_receive_shifts_no_message_of_its_step(tmp_path: Path) -> None:
    table = pd.read_parquet(DATA / "trace-ST.parquet").astype({"optype": str})
    first = table[(table.optype == "forward-recv") & (table["rank"] == 4)].iloc[0]
    is_lost = (table.optype == "forward-recv") & (table["rank"] == 4) & (table.step == first.step)
    is_lost &= table.seq_id == 0
    sides = _sides(import_wia(_written(tmp_path / "trace.parquet", table[~is_lost])))
    whole = _sides(import_wia(DATA / "trace-ST.parquet"))
    assert sides[Op.SEND] == sides[Op.RECV]
    assert {(group, source) for group, source, *_ in whole[Op.SEND] - sides[Op.SEND]} == {
        (b"forward 1 to 2 of replica 0", 2)
    }


def _written(path: Path, table: pd.DataFrame) -> Path:
    table.to_parquet(path)
    return path


def timeline(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a table as the tool's timeline for Chrome, waits and all."""
    tracks = rows[["dp_rank", "stage", "rank"]].drop_duplicates()
    named = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": int(dp),
            "tid": int(rank),
            "args": {"name": f"PP rank {stage}, TP rank 0, x"},
        }
        for dp, stage, rank in tracks.itertuples(index=False)
    ]
    events = [
        {
            **{"ph": "X", "name": row.optype, "cat": row.optype, "pid": int(row.dp_rank), "tid": int(row.rank)},
            **{"ts": float(row.start_ts) * 1e6, "dur": float(row.duration) * 1e6},
            "args": {"step": int(row.step), "mb_id": int(row.mb_id), "seq_id": int(row.seq_id), "model_chunk": 0},
        }
        for row in rows.itertuples()
    ]
    return [*events, *named]


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_timeline_for_chrome_has_the_same_work_as_the_table(tmp_path: Path, is_packed: bool) -> None:
    table = pd.read_parquet(DATA / "trace-ST.parquet")
    text = json.dumps(timeline(table[table.step < 40])).encode()
    path = tmp_path / "timeline.json"
    path.write_bytes(gzip.compress(text) if is_packed else text)
    ours, theirs = import_wia(path).ranks[2], import_wia(DATA / "trace-ST.parquet").ranks[2]
    assert (ours.header.dp, ours.header.pp) == (theirs.header.dp, theirs.header.pp)
    phases = [one.tables["phases"][one.tables["phases"]["step"] < 5] for one in (ours, theirs)]
    lengths = [(rows["end_ns"] - rows["begin_ns"])[rows["phase"] == Phase.BACKWARD] for rows in phases]
    np.testing.assert_allclose(lengths[0], lengths[1], atol=300_000)


def test_a_transfer_of_some_negative_microseconds_is_none(tmp_path: Path) -> None:
    """The published timeline of SE has eight, down to -75.1 us, as 32-bit seconds are no more exact."""
    events = timeline(pd.read_parquet(DATA / "trace-ST.parquet"))
    clip = next(one for one in events if one["name"] == "optimizer-clip-main-grad")
    end_us = clip["ts"] + clip["dur"]
    clip |= {"ts": end_us + 75.1, "dur": -75.1}
    (tmp_path / "timeline.json").write_text(json.dumps(events))
    assert import_wia(tmp_path / "timeline.json").num_steps == 32
    clip["dur"] = -300.0
    (tmp_path / "timeline.json").write_text(json.dumps(events))
    with pytest.raises(TraceError, match="values that no trace has"):
        import_wia(tmp_path / "timeline.json")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20_000])


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _changed(**columns: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        table = pd.read_parquet(path).astype({"optype": str})
        for name, value in columns.items():
            table.loc[5, name] = value
        table.to_parquet(path)

    return change


def _without(path: Path) -> None:
    pd.read_parquet(path).drop(columns=["stage", "mc"]).to_parquet(path)


def _renamed(path: Path) -> None:
    pd.read_parquet(path).assign(optype="work").to_parquet(path)


def _no_rows(path: Path) -> None:
    pd.read_parquet(path).iloc[:0].to_parquet(path)


@each_case(
    ("damage", "message"),
    [
        (_cut, "cannot read"),
        (_emptied, "cannot read"),
        (_without, "lacks the columns stage, mc"),
        (_no_rows, "nothing to import"),
        (_changed(duration=-1.0), "row 5 has values that no trace has"),
        (_changed(start_ts=float("nan")), "row 5 has values"),
        (_changed(start_ts=1e30), "row 5 has values"),
        (_changed(step=-4), "row 5 has values"),
        (_changed(optype=None), "row 5 has values"),
        (_renamed, "none of the operations"),
        (_changed(stage=3), "a worker"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "trace.parquet"
    shutil.copy(DATA / "trace-ST.parquet", path)
    damage(path)
    with pytest.raises(TraceError, match=message):
        import_wia(path)


def test_a_folder_with_several_tables_is_refused_by_their_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copy(DATA / "trace-ST.parquet", tmp_path / f"{name}.parquet")
    with pytest.raises(TraceError, match=r"2 parquet files \(a.parquet, b.parquet\)"):
        import_wia(tmp_path)


def test_a_timeline_in_part_is_refused(tmp_path: Path) -> None:
    table = pd.read_parquet(DATA / "trace-ST.parquet")
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(timeline(table[table.step < 30])[:-200])[:-90])
    with pytest.raises(TraceError, match="cut off"):
        import_wia(path)


def test_the_columns_are_those_of_the_published_format() -> None:
    assert set(COLUMNS) == set(pd.read_parquet(DATA / "trace-ST.parquet").columns)


@pytest.mark.parametrize(
    ("is_data", "mode"), [(True, "work varies with the data"), (False, "synchronisation amplification")]
)
def test_work_that_comes_with_the_microbatch_is_told_from_noise(tmp_path: Path, is_data: bool, mode: str) -> None:
    path = tmp_path / "trace.parquet"
    gpipe(0.3, is_data=is_data).to_parquet(path)
    summary = report(import_wia(path), tmp_path / "run")
    assert mode in {finding.mode for finding in summary.verdict.findings}
    others = {"work varies with the data", "synchronisation amplification"} - {mode}
    assert others.isdisjoint(finding.mode for finding in summary.verdict.findings)
