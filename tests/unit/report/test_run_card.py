"""The card at the end of a run says what the report says, in 12 lines of 80 letters, whatever the run."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_sample import print_report, sample_summary
from rich.console import Console

from hpcpace.diagnosis.summary import Summary
from hpcpace.report.run_report import card_text

RUNS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "straggler": {"slow": {2: 1.4}},
    "all slow but one": {"slow": {1: 1.4, 2: 1.4, 3: 1.4}},
    "short": {"num_steps": 3},
    "one rank": {"num_ranks": 1},
    "two ranks": {"num_ranks": 2, "slow": {1: 1.5}},
    "many": {"num_ranks": 16, "slow": {9: 1.5}},
}


def _card(summary: Summary, **changes: Any) -> list[str]:
    settings = {"run": "runs/demo", "width": 80, "encoding": "utf-8", "has_colors": False, **changes}
    return card_text(summary, **settings).splitlines()


def _report(summary: Summary) -> str:
    page = io.StringIO()
    print_report(Console(file=page, width=400), summary)
    return page.getvalue()


def test_the_card_of_any_run_fits_and_has_the_words_of_its_report(tmp_path: Path) -> None:
    wrong = []
    for name, settings in RUNS.items():
        summary = sample_summary(tmp_path / name, **settings)
        lines, verdict = _card(summary), summary.verdict
        joined = " ".join(" ".join(lines).split())
        if len(lines) > 12 or max(map(len, lines)) > 80:
            wrong.append(f"{name}: {len(lines)} lines, {max(map(len, lines))} letters")
        if verdict.headline not in joined or verdict.headline not in _report(summary):
            wrong.append(f"{name}: the headline is not that of the report")
        if verdict.next and verdict.next[0] not in joined:
            wrong.append(f"{name}: it does not say what to do")
        needed = ("hpcpace report runs/demo", " ms ", " 100 %")
        wrong += [f"{name}: no {words}" for words in needed if words not in joined]
    assert not wrong


def test_the_cause_is_marked_where_the_named_rank_is_late(tmp_path: Path) -> None:
    summary = sample_summary(tmp_path, slow={2: 1.4})
    (marked,) = [line for line in _card(summary) if "<-" in line]
    assert "rank 2" in marked and "ward" in marked and "usual" in marked
    assert not any("<-" in line for line in _card(sample_summary(tmp_path / "healthy")))
    finding = replace(summary.verdict.findings[0], loss_interval=(0.234, 0.261))
    verdict = replace(summary.verdict, findings=(finding,))
    assert "(cost 23.4 % to 26.1 %, confidence" in " ".join(" ".join(_card(replace(summary, verdict=verdict))).split())


def test_a_later_attempt_says_which_it_is_behind_the_command(tmp_path: Path) -> None:
    summary = sample_summary(tmp_path)
    first, second = (_card(replace(summary, attempt=number)) for number in (0, 1))
    assert not any("attempt" in line for line in first)
    assert "hpcpace report runs/demo  # attempt 1" in second


def test_parts_of_the_step_add_up(tmp_path: Path) -> None:
    lines = _card(sample_summary(tmp_path, slow={2: 1.4}))
    of_groups = [float(line.split("%")[0].split()[-1]) for line in lines if line.startswith(("├─", "└─"))]
    assert sum(of_groups) == pytest.approx(100, abs=0.5)


def test_long_sentences_and_hostile_names_leave_the_card_small(tmp_path: Path) -> None:
    summary = sample_summary(tmp_path, slow={2: 1.4})
    long = replace(summary.verdict, headline="x\x1b[2J\n" + "word " * 200, next=("do " * 300,))
    lines = _card(replace(summary, verdict=long), run="my run")
    assert lines[0] == "hpcpace report 'my run'"
    assert len(lines) <= 12 and max(map(len, lines)) <= 80 and not any("\x1b" in line for line in lines)


def test_it_is_plain_in_a_log_and_has_colours_on_a_terminal(tmp_path: Path) -> None:
    summary = sample_summary(tmp_path, slow={2: 1.4})
    assert all(line.isascii() for line in _card(summary, encoding="ascii"))
    assert not any("\x1b" in line for line in _card(summary))
    assert any("\x1b[1m" in line for line in _card(summary, has_colors=True))


def test_unknown_phases_are_said_to_be_unknown(tmp_path: Path) -> None:
    summary = sample_summary(tmp_path)
    ranks = tuple(replace(row, parts_ns=None) for row in summary.ranks)
    assert any("not known" in line for line in _card(replace(summary, ranks=ranks)))
