"""Which numbers of samples per step are the same batch, and what that means for comparisons."""

from __future__ import annotations

import pytest
from cases import each_case
from sample_runs import sample_run

from hpcpace.core.change import Outcome
from hpcpace.core.errors import UsageError
from hpcpace.runs.compare import compare, is_same_batch, usual_batches


@each_case(
    ("given", "usual"),
    [
        pytest.param([64.0, 64.0, 128.0], [64.0, 64.0, 128.0], id="batches that were set"),
        pytest.param([40000.0, 40004.0, 40008.0], [40004.0] * 3, id="means of samples of different lengths"),
        pytest.param([100.0, 101.9, 102.0, 102.5], [100.0, 102.0, 102.0, 102.0], id="most of them first"),
        pytest.param([98.5, 100.0, 100.5, 101.0, 102.3], [98.5, 100.5, 100.5, 100.5, 102.3], id="rare ones stay apart"),
        pytest.param([0.0, 0.0, 64.0], [0.0, 0.0, 64.0], id="unknown ones"),
        pytest.param([], [], id="none"),
    ],
)
def test_batches_count_as_the_usual_one_near_them(given: list[float], usual: list[float]) -> None:
    found = usual_batches(given)
    assert [found[batch] for batch in given] == usual


def test_batches_that_count_as_one_are_all_the_same() -> None:
    given = [1000.0 + 3 * number for number in range(100)]
    found = usual_batches(given)
    for usual in set(found.values()):
        alike = [batch for batch in given if found[batch] == usual]
        assert is_same_batch(min(alike), max(alike))


def test_runs_of_the_same_batch_are_compared_by_the_time_for_that_of_a() -> None:
    after = sample_run("b", work=(101.05,) * 4, samples_per_step=64.64)
    found = compare([sample_run("a")], [after])
    assert found.other_work == () and found.per_batch == 64.0
    assert found.share == pytest.approx(0.0, abs=0.001) and found.outcome is Outcome.SAME
    with pytest.raises(UsageError, match=r"a step has 64 and 65\.4 tokens"):
        compare([sample_run("a")], [sample_run("b", samples_per_step=65.4)])
