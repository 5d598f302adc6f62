"""Operations of runs whose groups of ranks have other sizes are compared with those that do the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from cases import each_case
from sample_runs import MS, sample_run

from hpcpace.report.sections.comparison import reason_sentence
from hpcpace.runs.compare import compare, operation_names, operation_of
from hpcpace.runs.measured import MeasuredRun, Transfers


def _run(path: str, sizes: Sequence[int], world_size: int) -> MeasuredRun:
    transfers = tuple(Transfers(op="all_reduce", group_size=size, transfer_ns=MS, size_bytes=8.0) for size in sizes)
    return sample_run(path, transfers=transfers, world_size=world_size)


@each_case(
    ("before", "after", "names"),
    [
        pytest.param((4, [4]), (4, [4]), ["4 ranks"], id="the same"),
        pytest.param((4, [4]), (8, [8]), ["4 (A) and 8 (B) ranks"], id="all ranks"),
        pytest.param((4, [4, 2]), (8, [8, 2]), ["2 ranks", "4 (A) and 8 (B) ranks"], id="all ranks, and pairs"),
        pytest.param((4, [4, 2]), (8, [8, 4]), ["2 (A) and 4 (B) ranks", "4 (A) and 8 (B) ranks"], id="four of eight"),
        pytest.param((4, [4]), (8, [4, 2]), ["2 ranks", "4 ranks"], id="all ranks of A alone"),
        pytest.param((8, [8]), (8, [4, 2]), ["8 (A) and 2, 4 (B) ranks"], id="another mesh"),
        pytest.param((8, [8]), (8, []), ["8 ranks"], id="none in B"),
    ],
)
def test_operations_of_other_group_sizes_have_one_name(
    before: tuple[int, list[int]], after: tuple[int, list[int]], names: list[str]
) -> None:
    sides = [[_run(path, sizes, world)] for path, (world, sizes) in (("a", before), ("b", after))]
    found = operation_names(*sides)
    assert sorted(set(found.values())) == [f"all_reduce of {name}" for name in names]
    for (run,) in sides:
        assert all(operation_of(kind, run) in found for kind in run.transfers)


def test_more_ranks_are_no_reason_where_the_transfer_is_as_long_as_before() -> None:
    hosts = [f"n{number}" for number in range(8)]
    before = sample_run("a")
    after = sample_run("b", work=(100.0,) * 5 + (110.0,) + (100.0,) * 2, hosts=hosts)
    found = compare([before], [after])
    (row,) = [row for row in found.parts if row.kind == "transfer"]
    assert row.name == "all_reduce of 4 (A) and 8 (B) ranks" and row.change_ns == pytest.approx(0.0)
    assert reason_sentence(found) == "of A's mean step: exposed wait for n5 +8.3 %, own work computation +1.2 %"
    assert not [change.name for change in found.changes if change.name.startswith("bytes of")]


def test_the_reasons_add_up_to_the_change_of_the_mean_step() -> None:
    before = sample_run("a", mean_ns=110 * MS)
    found = compare([before], [sample_run("b", work=(100.0, 100.0, 100.0, 110.0), mean_ns=117 * MS)])
    assert reason_sentence(found) == (
        "of A's mean step: exposed wait for n3 +6.8 %, own work computation +2.3 %, all else -2.7 %"
    )
    assert found.parts and sum(row.change_ns for row in found.parts) / before.mean_ns == pytest.approx(0.064, abs=5e-4)
