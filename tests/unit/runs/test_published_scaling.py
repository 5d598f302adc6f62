"""The law against MLPerf results that nobody here made: sizes held out, and batches that do not agree."""

from __future__ import annotations

from functools import cache

from experiments.scale_lab.published import Family, families


@cache
def _families() -> list[Family]:
    return families()


def test_the_largest_size_is_inside_but_for_a_system_whose_last_doubling_gained_more_than_the_one_before() -> None:
    judged = [family for family in _families() if family.outcome in ("inside", "outside")]
    outside = [family.name.split()[2:4] for family in judged if family.outcome == "outside"]
    assert len(judged) == 13
    assert outside == [["XE8545x4A100-SXM-80GB", "bert"]]


def test_a_law_is_refused_where_batches_do_not_agree() -> None:
    refused = {family.name: family.words for family in _families() if family.outcome == "refused"}
    assert "768 at 1, 4608 at 8, 13888 at 434" in refused["v4.0 NVIDIA eos_pytorch bert"]
    assert all("neither stays the same nor grows with the size" in words for words in refused.values())


def test_no_system_of_round_4_0_has_three_sizes_of_equal_batches() -> None:
    outcomes = {family.outcome for family in _families() if family.name.startswith("v4.0 ")}
    assert outcomes == {"refused", "too few"}
