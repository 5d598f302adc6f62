"""Before and after: what changed beyond noise, and how that is said."""

from __future__ import annotations

from math import log

from hpcpace.core.change import FactChange, Outcome, TimeChange, fact_changes, signed, signed_interval, whole_interval


def _change(value: float, low: float, high: float) -> TimeChange:
    return TimeChange(value=log(1 + value), low=log(1 + low), high=log(1 + high))


def test_a_time_changed_where_its_interval_leaves_out_zero_and_it_is_large_enough() -> None:
    cases = [
        (_change(0.1, 0.02, 0.2), 0.0, Outcome.SLOWER),
        (_change(0.1, 0.02, 0.2), 0.15, Outcome.SAME),
        (_change(0.1, -0.02, 0.2), 0.0, Outcome.SAME),
        (_change(-0.1, -0.2, -0.02), 0.05, Outcome.FASTER),
        (_change(1 / 1.15 - 1, -0.2, -0.02), 0.16, Outcome.SAME),  # a share of added time, also on the way back
        (_change(1 / 1.15 - 1, -0.2, -0.02), 0.14, Outcome.FASTER),
    ]
    assert [one for one in cases if one[0].outcome(one[1]) is not one[2]] == []


def test_changes_are_said_in_percent_and_nothing_has_no_sign() -> None:
    change = _change(0.05, -0.0004, 0.1)
    assert [signed(-0.0004), signed(0.0006), signed(-0.02)] == ["0.0 %", "+0.1 %", "-2.0 %"]
    assert (signed_interval(change), whole_interval(change)) == ("95 %: 0.0 % to +10.0 %", "-0 to +10 %")


def test_facts_differ_by_more_than_the_tolerance_or_where_one_side_lacks_them() -> None:
    before, after = {"a": 100, "b": 1.0, "c": "x", "d": None}, {"a": 101, "b": 1.5, "c": "y", "e": 0}
    found = list(fact_changes("facts", before, after, tolerance=0.02))
    assert [str(one) for one in found] == ["b: 1.0 -> 1.5", "c: x -> y", "d: None -> -", "e: - -> 0"]
    assert found[0] == FactChange(kind="facts", name="b", before="1.0", after="1.5")
