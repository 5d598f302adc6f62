"""Which steps are recorded in which detail, as settings and orders say it."""

from __future__ import annotations

from typing import Any

import pytest
from cases import each_case

from hpcpace.core.detail import ALL_STEPS, MAX_STEPS, Detail, DetailPlan, Order, parse_order, parse_steps
from hpcpace.core.errors import ConfigError
from hpcpace.observe.settings import TraceConfig

FULL, COLLECTIVES, STEPS = Detail.FULL, Detail.COLLECTIVES, Detail.STEPS


@each_case(
    ("text", "ranges"),
    [
        ("", (ALL_STEPS,)),
        ("100:200", ((100, 200),)),
        ("5:10,10:12, 20:", ((5, 10), (10, 12), (20, MAX_STEPS))),
        ("0:9999999999", (ALL_STEPS,)),
    ],
)
def test_ranges_of_steps_are_read(text: str, ranges: tuple[tuple[int, int], ...]) -> None:
    assert parse_steps(text) == ranges


@each_case(
    ("text", "problem"),
    [
        ("5", "not a range"),
        ("-5:3", "not a range"),
        ("5:3", "empty"),
        ("5:5", "empty"),
        (":5", "not a range"),
        ("9999999999:", "empty"),
        ("1:5,3:8", "out of order or twice"),
        ("10:20,1:5", "out of order or twice"),
        ("10:,20:30", "out of order or twice"),
        ("1:5,", "not a range"),
        ("one:two", "not a range"),
        ("\u0663:\u0665", "not a range"),
    ],
)
def test_what_is_no_list_of_ranges_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_steps(text)
    with pytest.raises(ConfigError, match=f"trace.detail_steps: .*({problem})"):
        TraceConfig(detail_steps=text)


@pytest.mark.parametrize("settings", [{"detail": "low"}, {"switch_signal": "KILL"}])
def test_a_level_or_signal_that_is_none_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="choose one of"):
        TraceConfig(**settings)


@each_case(
    ("text", "order"),
    [
        ("off", Order(STEPS)),
        (" on\n", Order(FULL)),
        ("on collectives", Order(COLLECTIVES)),
        ("steps 1000:1100", Order(FULL, (1000, 1100))),
        ("steps 7: collectives", Order(COLLECTIVES, (7, MAX_STEPS))),
    ],
)
def test_an_order_is_a_line_and_reads_as_itself(text: str, order: Order) -> None:
    assert parse_order(text) == order
    assert parse_order(order.text) == order


@each_case(
    "text",
    ["", "\0\0", "up", "off now", "on low", "on full full", "steps", "steps 5:3", "steps 1:2,3:4", "steps 1:2 full x"],
)
def test_a_line_that_is_no_order_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no order|no level|empty|an order takes one"):
        parse_order(text)


def test_a_plan_has_detail_in_its_steps_alone() -> None:
    plan = DetailPlan.of(parse_steps("5:8,8:10,12:"), COLLECTIVES)
    found = [plan.at(step) for step in range(-1, 14)]
    assert found == [STEPS] * 6 + [COLLECTIVES] * 5 + [STEPS] * 2 + [COLLECTIVES] * 2
    assert not plan.is_always_full and DetailPlan.of([ALL_STEPS], FULL).is_always_full


@each_case(
    ("order", "expected"),
    [
        ("off", "ffff......"),
        ("on collectives", "ffffcccccc"),
        ("steps 6:8", "ffff..ff.."),
        ("steps 2:6 collectives", "ffffcc...."),
        ("steps 1:3", "ffff......"),
    ],
)
def test_an_order_changes_the_steps_from_where_it_takes_effect(order: str, expected: str) -> None:
    plan = DetailPlan.of([ALL_STEPS], FULL).follow(parse_order(order), 4)
    assert "".join(".cf"[plan.at(step)] for step in range(10)) == expected
