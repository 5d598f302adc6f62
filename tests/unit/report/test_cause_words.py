from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from cases import each_case

from hpcpace.diagnosis.summary import Causes, GainRow, OriginRow, PathRow
from hpcpace.report.sections.causes import (
    gains_remark,
    origins_remark,
    significant_gains,
    significant_origins,
    significant_path,
)


def gain(name, share, low=None):
    return GainRow(name=name, gain_share=share, interval=(share - 0.001 if low is None else low, share + 0.001))


def origin(rank, share):
    return OriginRow(rank=rank, share_of_waits=share, propagated_share=0.0, step_share=share / 10)


CAUSES = Causes(
    gains=(
        gain("work of rank 2", 0.1),
        gain("work of stage 1", 0.08),
        gain("work of rank 3", 0.05, low=-0.01),
        gain("transfers of recv", 0.004),
    ),
    rebuild_error=0.01,
    origins=(origin(2, 0.9), origin(1, 0.1), origin(0, 0.0)),
    traced_share=0.1,
    path=(PathRow(name="work of rank 2", share=0.9), PathRow(name="work of rank 1", share=0.0001)),
    suspected_ranks=(),
    bubble=None,
)


def summary_of(mode="persistent straggler", causes=CAUSES, num_apart=40):
    steps = SimpleNamespace(num_used=40, num_apart=num_apart)
    shares = SimpleNamespace(exposed_wait=0.1)
    return SimpleNamespace(causes=causes, verdict=SimpleNamespace(mode=mode), steps=steps, shares=shares)


def test_a_gain_within_chance_or_the_error_of_rebuilding_is_none():
    assert [row.name for row in significant_gains(summary_of())] == ["work of rank 2", "work of stage 1"]


@each_case("mode", ["communication-bound", "fabric contention", "locality"])
def test_where_the_usual_is_slow_nothing_is_put_back_to_it(mode):
    assert significant_gains(summary_of(mode)) == ()


def test_gains_say_what_they_are_worth():
    remark = "steps rebuilt from their operations are wrong by 1.0 %: ignore smaller gains; gains are not additive"
    assert gains_remark(summary_of()) == remark


def test_gains_from_some_of_the_steps_say_from_how_many():
    assert "from their operations (8 of 40) are wrong" in gains_remark(summary_of(num_apart=8))


@each_case(
    ("mode", "changes", "remark"),
    [
        ("healthy", {"gains": ()}, "no single change would shorten the step"),
        ("communication-bound", {"gains": CAUSES.gains[:1]}, "here the usual time is slow (communication-bound)"),
        ("healthy", {"rebuild_error": None}, "no what-if: the steps could not be rebuilt"),
        ("healthy", {"rebuild_error": 1e-5}, "wrong by less than 0.1 %"),
    ],
)
def test_why_there_is_no_gain_is_said(mode, changes, remark):
    told = gains_remark(summary_of(mode, replace(CAUSES, **changes)))
    assert remark in told
    assert bool(remark) == bool(told)


def test_without_causes_nothing_is_said():
    assert significant_gains(summary_of(causes=None)) == ()
    assert gains_remark(summary_of(causes=None)) == ""


def test_what_is_hardly_any_is_left_out():
    assert [row.rank for row in significant_origins(summary_of(), 4)] == [2, 1]
    assert [row.rank for row in significant_origins(summary_of(), 1)] == [2]
    assert [row.name for row in significant_path(CAUSES, 4)] == ["work of rank 2"]


def test_where_waiting_began_is_not_shown_where_most_of_it_cannot_be_traced():
    summary = summary_of(causes=replace(CAUSES, traced_share=0.003))
    assert significant_origins(summary, 4) == ()
    remark = "where waiting began is not shown: only 0.3 of 10.0 % of the step could be traced to a rank"
    assert origins_remark(summary) == remark
