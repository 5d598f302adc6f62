"""The pages of comparisons and histories: what is in them, and that names from files stay names."""

from __future__ import annotations

import time
from io import StringIO

import pytest
from rich.console import Console
from sample_runs import sample_run

from hpcpace.report.html import compressed, html_page
from hpcpace.report.sections.comparison import comparison_document
from hpcpace.report.sections.history import history_document
from hpcpace.report.terminal import print_document
from hpcpace.runs.compare import compare
from hpcpace.runs.history import History, history
from hpcpace.runs.history_row import HistoryRow, IndexedRuns
from hpcpace.runs.measured import Conditions

NASTY = "<script>alert(1)</script>"


@pytest.fixture(autouse=True)
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpace.report.html.plot_library", lambda: compressed(""))


def _history(host: str, job: str, run: str) -> History:
    rows = [
        HistoryRow(
            run=f"{run}{number}",
            begun_unix_ns=(20_000 + number) * 86_400 * 10**9,
            job=job,
            kind="",
            p50_ns=1e8 * (1 + 0.2 * (number > 5)),
            mean_ns=1.01e8 * (1 + 0.2 * (number > 5)),
            hosts=(host,),
            slowness={host: 0.1 * (number > 5)},
        )
        for number in range(12)
    ]
    return history("runs", IndexedRuns(rows=tuple(rows), broken={run: run}, num_running=0, num_read=0, index=""))


def test_a_comparison_shows_both_sides_and_its_plots() -> None:
    made = html_page(
        comparison_document(compare([sample_run("a")], [sample_run("b", work=(100.0, 100.0, 100.0, 108.0))]))
    )
    assert "<h3>A</h3>" in made and "<h3>B</h3>" in made
    assert all(f'id="{name}"' in made for name in ("blocks", "parts", "hosts"))
    assert "B is 7.6 % slower than A" in made


def test_hosts_whose_long_names_differ_at_the_end_stay_apart_on_a_terminal() -> None:
    hosts = [f"compute-node-of-the-large-cluster-{number}.example.org" for number in range(4)]
    console = Console(file=StringIO(), width=80)
    print_document(
        console, comparison_document(compare([sample_run("a", hosts=hosts)], [sample_run("b", hosts=hosts)]))
    )
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    shown = "".join(line.split(" ")[0] for line in lines[lines.index(next(x for x in lines if x[:4] == "host")) :])
    assert all(host in shown for host in hosts) and max(map(len, lines)) <= 80


def test_a_host_that_one_side_lacks_has_no_change() -> None:
    work = (100.0, 100.0, 100.0, 108.0)
    found = compare([sample_run("a", work=work)], [sample_run("b", hosts=("n0", "n1", "n2", "n9"))])
    made = html_page(comparison_document(found))
    assert "n3 is 8.0 % slower by its own work than the ranks of its role in A" in made
    assert "-7.4 %" not in made


def test_a_change_against_the_others_is_marked_on_terminal_and_page() -> None:
    after = sample_run("b", work=(180.0,) * 4, samples_per_step=128.0)
    found = compare([sample_run("a")], [after], takes_other_work=True)
    console = Console(file=StringIO(), width=80)
    print_document(console, comparison_document(found))
    assert isinstance(console.file, StringIO)
    for made in (console.file.getvalue(), html_page(comparison_document(found))):
        assert "0.0 %*" in made and "* against the ranks of its " in made


def test_the_kind_of_a_change_stays_apart_from_its_name() -> None:
    sides = [sample_run(name, conditions=Conditions(environment={"NCCL_ALGO": name})) for name in ("Ring", "Tree")]
    console = Console(file=StringIO(), width=80)
    print_document(console, comparison_document(compare(sides[:1], sides[1:])))
    assert isinstance(console.file, StringIO)
    assert "environment NCCL_ALGO: Ring -> Tree" in console.file.getvalue()


def test_a_comparison_without_parts_has_no_plots_of_them() -> None:
    runs = [sample_run(name, ranks=(), block_p50_ns=()) for name in "ab"]
    made = html_page(comparison_document(compare(runs[:1], runs[1:])))
    assert 'class="plot"' not in made and "No difference beyond noise" in made


def test_a_history_shows_jobs_and_the_hosts_that_changed() -> None:
    made = html_page(history_document(_history("n3", "train", "run-")))
    assert 'id="job-0"' in made and 'id="hosts"' in made
    assert "n3 is 10.5 % slower than the others of its runs since" in made


def test_plots_and_tables_of_a_history_have_the_same_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        made = html_page(history_document(_history("n3", "train", "run-")))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "2024-10-10 09:00:00" in made and "Thu 2024-10-10 09:00" in made


def test_names_from_files_are_never_more_than_names() -> None:
    pages = (
        html_page(
            comparison_document(
                compare([sample_run(f"{NASTY}/a")], [sample_run(f"{NASTY}/b", hosts=[f"{NASTY}{n}" for n in range(4)])])
            )
        ),
        html_page(history_document(_history(NASTY, NASTY, NASTY))),
    )
    for made in pages:
        assert NASTY not in made and "&lt;script&gt;" in made


def test_on_one_host_each_rank_has_its_row() -> None:
    sides = [sample_run(name, hosts=("n0",) * 4) for name in "ab"]
    console = Console(file=StringIO(), width=80)
    print_document(console, comparison_document(compare(sides[:1], sides[1:])))
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "Own work by rank" in shown and all(f"rank {rank} on n0 " in shown for rank in range(4))
