"""Comparisons of runs whose truth is known."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import each_case
from sample_runs import MS, sample_run

from hpcpace.core.change import FactChange, Outcome
from hpcpace.core.errors import CannotTell, UsageError
from hpcpace.core.rundir import Attempt, json_text
from hpcpace.report.sections.comparison import change_cells, headline, main_parts, other_work_sentences, place_sentences
from hpcpace.runs.compare import Judged, compare
from hpcpace.runs.measured import Conditions, read_conditions

SLOW = (100.0, 100.0, 100.0, 108.0)


def test_a_slower_host_makes_b_slower_and_is_named() -> None:
    found = compare([sample_run("a")], [sample_run("b", work=SLOW)])
    assert found.outcome is Outcome.SLOWER and found.share == pytest.approx(8 / 105)
    assert found.places is not None
    (named,) = found.places.named
    assert (named.kind, named.name) == ("host", "n3") and named.change_share == pytest.approx(0.08)


def test_the_parts_add_up_to_the_difference_of_the_means() -> None:
    before, after = sample_run("a"), sample_run("b", work=SLOW, mean_ns=120 * MS)
    found = compare([before], [after])
    assert sum(row.change_ns for row in found.parts) == pytest.approx(after.mean_ns - before.mean_ns)
    assert sum(row.before_ns for row in found.parts) == pytest.approx(before.mean_ns)
    by_name = {(row.kind, row.name): row.change_ns for row in found.parts}
    assert by_name["own work", "computation"] == pytest.approx(2 * MS)
    assert by_name["exposed wait", "for n3"] == pytest.approx(6 * MS)


def test_on_one_host_waits_are_for_ranks() -> None:
    sides = [sample_run("a"), sample_run("b", work=SLOW)]
    sides = [replace(run, ranks=tuple(replace(rank, host="n0") for rank in run.ranks)) for run in sides]
    by_name = {(row.kind, row.name): row.change_ns for row in compare(sides[:1], sides[1:]).parts}
    assert by_name["exposed wait", "for rank 3"] == pytest.approx(6 * MS)


def test_what_rounding_leaves_is_no_part() -> None:
    sides = [sample_run(name, mean_ns=(105 + rest) * MS) for name, rest in (("a", 1e-12), ("b", 0.0))]
    assert "gaps" not in [row.name for row in compare(sides[:1], sides[1:]).parts]


def test_the_parts_of_groups_add_up_too() -> None:
    before = [sample_run(f"a{number}", work=(100.0 + number,) * 4) for number in range(3)]
    after = [sample_run(f"b{number}", work=(110.0 + number, 100.0, 100.0, 100.0)) for number in range(3)]
    found = compare(before, after)
    assert sum(row.change_ns for row in found.parts) == pytest.approx(10.1 * MS)
    assert found.difference.from_repeats and found.outcome is Outcome.SLOWER


@each_case(
    ("changes", "outcome", "judged_by"),
    [
        pytest.param({"mean_ns": 116 * MS}, Outcome.SLOWER, Judged.MEAN, id="long steps"),
        pytest.param({"mean_ns": 116 * MS, "log_mean_error": 0.05}, Outcome.SAME, Judged.MEDIAN, id="by chance"),
        pytest.param({"mean_ns": 116 * MS, "log_mean_error": None}, Outcome.SAME, Judged.MEDIAN, id="of unknown error"),
        pytest.param({"work": SLOW}, Outcome.SLOWER, Judged.MEDIAN, id="all steps"),
        pytest.param({"p50_ns": 170 * MS}, Outcome.SAME, Judged.MEAN, id="steps of two kinds, the long ones now most"),
        pytest.param({"work": SLOW, "mean_ns": 130 * MS}, Outcome.SLOWER, Judged.MEAN, id="all steps, some far more"),
        pytest.param({"work": SLOW, "mean_ns": 98 * MS}, Outcome.FASTER, Judged.MEAN, id="but fewer long ones"),
    ],
)
def test_long_steps_count_though_the_median_does_not_see_them(
    changes: Mapping[str, Any], outcome: Outcome, judged_by: Judged
) -> None:
    found = compare([sample_run("a")], [sample_run("b", **changes)])
    assert (found.outcome, found.judged_by) == (outcome, judged_by)
    said = "by its mean step, which throughput follows; the median step changed by" in headline(found)
    assert said == (judged_by is Judged.MEAN)
    if judged_by is Judged.MEAN:
        assert found.share == pytest.approx(sample_run("b", **changes).mean_ns / sample_run("a").mean_ns - 1)


def test_equal_runs_do_not_differ_and_no_place_is_named() -> None:
    found = compare([sample_run("a")], [sample_run("b", work=(101.0, 100.5, 100.0, 99.5))])
    assert found.outcome is Outcome.SAME and found.places is not None and found.places.named == ()


def test_b_may_be_faster() -> None:
    assert compare([sample_run("a", work=SLOW)], [sample_run("b")]).outcome is Outcome.FASTER


def test_what_all_hosts_share_is_no_hosts_fault() -> None:
    found = compare([sample_run("a")], [sample_run("b", work=(110.0, 110.0, 110.0, 110.5))])
    assert found.outcome is Outcome.SLOWER and found.places is not None
    assert found.places.is_common and found.places.common == pytest.approx(0.0953, abs=1e-3)
    assert found.places.named == ()


def test_a_host_that_only_b_has_is_compared_with_the_others_of_its_run() -> None:
    after = sample_run("b", work=SLOW, hosts=("n0", "n1", "n2", "n9"))
    found = compare([sample_run("a")], [after])
    assert found.places is not None
    (named,) = found.places.named
    assert (named.name, named.against, named.before_ns) == ("n9", "others", None)
    assert place_sentences(found)[0].startswith("n9 is 8.0 % slower by its own work than the ranks of its role in B (")
    assert FactChange(kind="hosts", name="hosts", before="n[0-3]", after="n[0-2,9]") in found.changes


def test_a_slow_host_that_b_does_not_have_is_not_called_faster() -> None:
    found = compare([sample_run("a", work=SLOW)], [sample_run("b", hosts=("n0", "n1", "n2", "n9"))])
    (sentence,) = place_sentences(found)
    assert sentence.startswith("n3 is 8.0 % slower by its own work than the ranks of its role in A (95 %: +")
    assert sentence.endswith("not all runs of B have it")
    assert found.places is not None and change_cells(found.places.hosts[0]) == ("-", "-")


def test_one_rank_of_a_host_is_named_by_itself() -> None:
    hosts = [f"n{number // 4}" for number in range(8)]
    work = [100.0] * 8
    before = sample_run("a", work=work, hosts=hosts)
    work[5] = 110.0
    found = compare([before], [sample_run("b", work=work, hosts=hosts)])
    assert found.places is not None
    assert [(row.kind, row.name) for row in found.places.named] == [("rank", "5 on n1")]


def test_roles_are_compared_with_themselves() -> None:
    roles = ("pp0", "pp0", "pp1", "pp1")
    before = sample_run("a", work=(100.0, 100.0, 50.0, 50.0), roles=roles)
    found = compare([before], [sample_run("b", work=(100.0, 100.0, 60.0, 60.0), roles=roles)])
    assert found.places is not None
    assert {role: after / before for role, before, after in found.places.roles} == pytest.approx(
        {"pp0": 1.0, "pp1": 1.2}
    )


@each_case(
    ("changes", "words"),
    [
        ({"samples_per_step": 128.0}, "a step has 64 and 128 tokens"),
        ({"samples_unit": "images"}, "samples are tokens and images"),
        ({"emulation": "sleeps"}, "computation was emulated"),
        ({"conditions": Conditions(work={"model.width": "256"})}, "model.width is 128 and 256"),
    ],
)
def test_different_work_is_refused_unless_asked_for(changes: Mapping[str, Any], words: str) -> None:
    before = sample_run("a", conditions=Conditions(work={"model.width": "128"}))
    after = sample_run("b", **changes)
    with pytest.raises(UsageError, match="the runs do different work") as caught:
        compare([before], [after])
    assert words in str(caught.value) and "--anyway" in str(caught.value)
    assert compare([before], [after], takes_other_work=True).other_work


def test_copies_of_a_run_are_not_compared_with_it() -> None:
    conditions = Conditions(name="x", begun_unix_ns=10**18)
    run = sample_run("a", conditions=conditions)
    with pytest.raises(UsageError, match="backup/a is a copy of a: a run does not differ from itself"):
        compare([run], [replace(run, path="backup/a")])
    assert compare([run], [sample_run("b", conditions=replace(conditions, begun_unix_ns=10**18 + 1))])


def test_other_batches_are_compared_by_the_time_for_a_batch_of_a() -> None:
    after = sample_run("b", work=(180.0,) * 4, samples_per_step=128.0)
    found = compare([sample_run("a")], [after], takes_other_work=True)
    assert found.per_batch == 64.0 and found.outcome is Outcome.FASTER
    assert found.share == pytest.approx(185 / 2 / 105 - 1)
    assert sum(row.after_ns for row in found.parts) == pytest.approx(after.mean_ns / 2)


def test_other_samples_are_said_besides_another_batch() -> None:
    sides = [sample_run("a", conditions=Conditions(work={"model.width": "128"}))]
    sides.append(sample_run("b", samples_per_step=128.0, conditions=Conditions(work={"model.width": "128"})))
    batch = list(other_work_sentences(compare(sides[:1], sides[1:], takes_other_work=True)))
    sides[1] = sample_run("b", samples_per_step=128.0, conditions=Conditions(work={"model.width": "256"}))
    both = list(other_work_sentences(compare(sides[:1], sides[1:], takes_other_work=True)))
    assert len(batch) == 2 and batch[1].startswith("times are scaled to the batch of A")
    assert both[1:2] == batch[1:] and both[2].startswith("a longer step is then no slower run")


def test_the_same_work_in_another_precision_or_layout_is_a_change_and_not_refused() -> None:
    after = sample_run(
        "b", work=(60.0,) * 8, hosts=[f"n{number}" for number in range(8)], conditions=Conditions(dtype="bfloat16")
    )
    found = compare([sample_run("a", conditions=Conditions(dtype="float32"))], [after])
    assert {(change.name, change.before, change.after) for change in found.changes} >= {
        ("ranks", "4", "8"),
        ("mesh", "dp=4", "dp=8"),
        ("dtype", "float32", "bfloat16"),
    }


def test_what_else_changed_is_listed() -> None:
    before = sample_run("a", conditions=Conditions(versions={"torch": "2.12"}, environment={"NCCL_ALGO": "Ring"}))
    after = sample_run(
        "b",
        hosts=("n1", "n0", "n2", "n3"),
        conditions=Conditions(versions={"torch": "2.13"}, environment={"NCCL_ALGO": "Tree"}),
        audit=("G01 on n3 GPU 0: x8",),
        mode="persistent straggler",
    )
    found = {(change.kind, change.name): (change.before, change.after) for change in compare([before], [after]).changes}
    assert found == {
        ("placement", "2 of 4 ranks, as rank 0"): ("n0", "n1"),
        ("version", "torch"): ("2.12", "2.13"),
        ("environment", "NCCL_ALGO"): ("Ring", "Tree"),
        ("audit", "G01 on n3 GPU 0: x8"): ("not found", "found"),
        ("verdict", "mode"): ("healthy", "persistent straggler"),
    }


def test_a_part_that_went_the_other_way_is_no_reason() -> None:
    before = sample_run("a", mean_ns=130 * MS, log_mean_error=0.05)
    found = compare([before], [sample_run("b", work=(105.0,) * 4, mean_ns=126 * MS, log_mean_error=0.05)])
    assert found.outcome is Outcome.SLOWER and found.judged_by is Judged.MEDIAN
    assert main_parts(found) == ["own work computation +3.8 %"]


def test_a_mean_step_of_unknown_error_is_remarked() -> None:
    found = compare([sample_run("a")], [sample_run("b", log_mean_error=None)])
    assert found.mean_difference is None
    (remark,) = found.remarks
    assert remark.startswith("b: its summary is of an older version") and "median steps alone" in remark


def test_what_the_probes_of_the_hosts_measured_differently_is_listed() -> None:
    name, other = "all_reduce of 4.19 MB over 4 ranks on 4 hosts", "broadcast of 1.00 kB over 4 ranks on 4 hosts"
    before = sample_run("a", probed={name: 2 * MS, other: 1 * MS, "only in A": 1 * MS})
    found = compare([before], [sample_run("b", probed={name: 3 * MS, other: 1.05 * MS})])
    assert found.changes == (FactChange(kind="probe", name=name, before="2.00 ms", after="3.00 ms"),)
    assert compare([before], [sample_run("b")]).changes == ()


def test_one_host_is_not_most_hosts() -> None:
    hosts = ("vm",) * 4
    found = compare([sample_run("a", hosts=hosts)], [sample_run("b", work=(110.0,) * 4, hosts=hosts)])
    assert place_sentences(found) == ["own work takes 10.0 % more time on vm"]


def test_what_does_not_differ_has_no_reason() -> None:
    same = compare([sample_run("a")], [sample_run("b", work=(100.1,) * 4)])
    slower = compare([sample_run("a")], [sample_run("b", work=SLOW)])
    assert main_parts(same) == [] and main_parts(slower)


@each_case("words", [["--run-dir", "{}"], ["--run-dir={}"], ["--trace-dir", "{}", "--run-dir", "{}"]])
def test_where_a_run_is_written_is_no_change(tmp_path: Path, words: Sequence[str]) -> None:
    commands = []
    for name in ("a", "b"):
        attempt = Attempt(tmp_path / name / "attempt-0")
        attempt.path.mkdir(parents=True)
        command = ["hpcpace", "train", *(word.format(name) for word in words), "--steps", "3"]
        attempt.run_json.write_text(json.dumps({"schema": "hpcpace-run/1", "command": command}))
        commands.append(read_conditions(attempt, []).command)
    assert commands == ["hpcpace train --steps 3"] * 2


def test_the_same_run_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="named twice"):
        compare([sample_run("a")], [sample_run("a")])


def test_two_attempts_of_a_run_may_be_compared() -> None:
    assert compare([sample_run("a")], [sample_run("a", attempt=1)]).outcome is Outcome.SAME


def test_a_run_of_few_steps_cannot_be_told() -> None:
    with pytest.raises(CannotTell, match="8 are needed"):
        compare([sample_run("a", log_p50_error=None, num_steps=5)], [sample_run("b")])


def test_unknown_parts_leave_the_difference() -> None:
    unknown = sample_run("b", work=SLOW)
    unknown = replace(
        unknown, ranks=tuple(replace(rank, parts_ns=None, work_ns=None, work_error=None) for rank in unknown.ranks)
    )
    found = compare([sample_run("a")], [unknown])
    assert found.outcome is Outcome.SLOWER and found.parts == () and found.places is None


def test_of_a_run_that_lacks_ranks_waits_are_not_told_from_transfers_nor_its_hosts_from_those_of_others() -> None:
    before = sample_run("a")
    after = replace(sample_run("b", mean_ns=120 * MS, num_missing=1), hosts=("n0", "n1", "n2"))
    found = compare([before], [after])
    kinds = {row.kind for row in found.parts}
    assert not kinds & {"exposed wait", "transfer"}
    assert sum(row.change_ns for row in found.parts) == pytest.approx(after.mean_ns - before.mean_ns)
    assert not [change for change in found.changes if change.kind == "hosts"]
    assert place_sentences(found)[-1] == "of ranks without a trace this is not known"


def test_waits_that_match_nothing_are_not_told_from_transfers() -> None:
    before, after = sample_run("a"), sample_run("b", work=SLOW)
    ranks = []
    for rank in after.ranks:
        parts_ns = dict(rank.parts_ns or {})
        parts_ns["transfer"] += parts_ns.pop("wait")
        ranks.append(replace(rank, parts_ns=parts_ns))
    found = compare([before], [replace(after, ranks=tuple(ranks))])
    assert not {row.kind for row in found.parts} & {"exposed wait", "transfer"}
    assert "waits and transfers, not told apart where they match nothing" in {row.name for row in found.parts}
    assert sum(row.change_ns for row in found.parts) == pytest.approx(after.mean_ns - before.mean_ns)


def test_missing_ranks_and_unknown_samples_are_remarked() -> None:
    found = compare([sample_run("a", samples_per_step=0.0)], [sample_run("b", num_missing=2, is_final=False)])
    assert len(found.remarks) == 3


def test_runs_of_different_tools_are_remarked() -> None:
    ours, *theirs = (
        sample_run(path, conditions=Conditions(tool=tool)) for path, tool in (("a", ""), ("b", "wia"), ("c", "wia"))
    )
    (remark,) = compare([ours], theirs[:1]).remarks
    assert remark.startswith("recorded by hpcpace and wia: ")
    assert compare(theirs[:1], theirs[1:]).remarks == ()


def test_what_an_import_ran_on_is_not_what_the_job_ran_on(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "attempt-0")
    attempt.path.mkdir()
    attempt.run_json.write_text(json.dumps({"versions": {"python": "3.12"}, "imported": {"tool": "wia"}}))
    found = read_conditions(attempt, [])
    assert (found.tool, found.versions) == ("wia", {})


@pytest.mark.parametrize("days", [2, 173_000])
def test_a_run_that_began_on_a_day_to_come_has_no_date_and_a_problem(tmp_path: Path, days: int) -> None:
    attempt = Attempt(tmp_path / "attempt-0")
    attempt.path.mkdir()
    attempt.run_json.write_text(json.dumps({"name": "gpt", "created_unix_ns": time.time_ns() + days * 86_400 * 10**9}))
    problems: list[str] = []
    found = read_conditions(attempt, problems)
    assert (found.name, found.begun_unix_ns) == ("gpt", 0)
    assert len(problems) == 1 and "the date at which it began is to come" in problems[0]


def test_a_comparison_is_json() -> None:
    content = json.loads(json_text(compare([sample_run("a")], [sample_run("b", work=SLOW)]).to_json()))
    assert content["schema"] == "hpcpace-compare/1" and content["outcome"] == "slower"
    assert content["share"] == pytest.approx(8 / 105)


def test_the_headline_of_no_difference_has_the_interval_alone() -> None:
    words = headline(compare([sample_run("a")], [sample_run("b", work=(100.0, 100.0, 100.0, 101.0))]))
    assert words.startswith("no difference beyond noise (95 %: ") and words.count("%") == 3
