"""Networks and changes that plans are asked about."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpcpace.core.errors import CannotTell
from hpcpace.planning import CHANGES
from hpcpace.planning.answer import Plan, Question, answer
from hpcpace.planning.engine import Job
from hpcpace.planning.layouts import Layouts
from hpcpace.planning.machine import KnownMachine, Machine
from hpcpace.planning.model import MeasuredModel, preset
from hpcpace.planning.steps import steps_of

GPT2 = preset("gpt2-small")
assert GPT2 is not None
MACHINE = Machine(
    name="m", gpus_per_node=4, memory_bytes=80e9, flops=1e14, memory_rate=1e12, node_rate=1e13, network_rate=1e9,
    node_latency_s=0, network_latency_s=0,
)  # fmt: skip
JOB = Job(model=GPT2, machine=MACHINE, overlaps=False)


def network_s(machine: Machine, **layout: int) -> float:
    """Return what exchanges of a layout take longer than with a network without end."""
    steps = (
        steps_of(JOB.on(one), Layouts.of(**layout)).step_s[0] for one in (machine, machine.scaled(network_rate=1e6))
    )
    slow, fast = steps
    return float(slow - fast)


def with_nics(number: int) -> Machine:
    return replace(MACHINE, network_rate=number * MACHINE.network_rate, num_nics=number)


def test_adapters_help_as_many_ranks_as_send_beside_each_other() -> None:
    in_ring = {"dp": 8}
    assert network_s(MACHINE, **in_ring) / network_s(with_nics(2), **in_ring) == pytest.approx(2, rel=0.01)
    assert network_s(MACHINE, **in_ring) / network_s(with_nics(8), **in_ring) == pytest.approx(4, rel=0.01)


def test_a_message_takes_one_adapter() -> None:
    machine, other = (replace(one, gpus_per_node=1) for one in (MACHINE, with_nics(4)))
    messages = {"pp": 2, "num_micro": 4}
    assert network_s(other, **messages) == pytest.approx(network_s(machine, **messages), rel=0.01)


@pytest.mark.parametrize(
    ("leaf_nodes", "slower"),
    [
        (1, 4.0),  # every node sends over the uplinks
        (2, 2.0),  # one of two
        (8, 1.0),  # one of eight, and the uplink carries as much as two
        (16, 1.0),  # nobody
    ],
)
def test_uplinks_carry_what_crosses_leaves(leaf_nodes: int, slower: float) -> None:
    narrow = replace(MACHINE, oversubscription=4.0, leaf_nodes=leaf_nodes)
    assert network_s(narrow, dp=64) / network_s(MACHINE, dp=64) == pytest.approx(slower, rel=0.02)


def test_groups_of_distant_nodes_cross_uplinks_even_in_blocks() -> None:
    narrow = replace(MACHINE, oversubscription=4.0, leaf_nodes=4)
    layout = {"dp": 4, "pp": 16, "num_micro": 16}
    assert network_s(narrow, **layout) > 2 * network_s(MACHINE, **layout)


def question(**changed: object) -> Question:
    plain = Question(job=JOB, nodes=[2], batch=64, only={"element_bytes": (4,)}, error=0.1)
    return replace(plain, **changed)  # mypy: each field has its own type


def factors(plan: Plan) -> dict[str, float]:
    return {change.kind: change.factor for change in plan.changes}


def test_all_kinds_of_changes_are_tried() -> None:
    measured = Layouts.of(dp=4, pp=2, num_micro=16, element_bytes=4).row(0)
    found = factors(answer(question(measured=measured), top=1))
    assert set(found) == set(CHANGES)
    assert found["network"] > 1 and found["precision"] > 1 and found["layout"] >= 1
    assert found["checkpointing"] < 1


def test_only_changes_that_are_asked_for_are_tried() -> None:
    plan = answer(question(what=("nodes", "layout")), top=1)
    assert set(factors(plan)) == {"nodes"}
    assert plan.untried == ("layout not tried: there is no run with a layout of its own",)


def test_a_change_that_no_layout_fits_is_no_change() -> None:
    assert factors(answer(question(what=("nodes",), batch=8, only={"pp": (1,), "tp": (1,)}), top=1)) == {"nodes": 0.0}


def test_a_script_does_not_show_every_change() -> None:
    model = MeasuredModel(name="mine", gradient_bytes=1e9, forward_s=0.1, backward_s=0.2, update_s=0.05)
    plan = answer(question(job=replace(JOB, model=model)), top=1)
    assert set(factors(plan)) == {"nodes", "local-sgd", "network", "hierarchical"}
    assert "compression not tried: a traced script does not show it: name its model with --model" in plan.untried


def test_the_slowest_of_more_ranks_is_in_the_interval() -> None:
    asked = question(measured=Layouts.of(dp=8, element_bytes=4).row(0), nodes=[2, 16], only={"pp": (1,), "tp": (1,)})
    calm, noisy = (answer(replace(asked, spread=spread), top=1).choices for spread in (0.0, 0.1))
    widened = [(late.high_s or 0) - (one.high_s or 0) for one, late in zip(calm, noisy, strict=True)]
    compute_s = noisy[1].shares["compute"] * noisy[1].step_s
    # The mean largest of 64 normal values is 2.34, of 8 it is 1.42 (Harter 1961).
    assert widened == pytest.approx([0.0, 0.1 * (2.34 - 1.42) * compute_s], rel=0.03)
    assert [one.low_s for one in calm] == [one.low_s for one in noisy]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"error": None}, "nothing measured says how far off these predictions are"),
        ({"max_ranks": 4}, "more than 4 ranks, 16 times those of the measured steps"),
        (
            {"measured": Layouts.of(dp=4, pp=2).row(0), "only": {"pp": (1,), "tp": (2,)}},
            "a run with a pipeline does not show what tensor parallelism would exchange",
        ),
        (
            {"measured": Layouts.of(dp=4, pp=2).row(0), "only": {"pp": (1,), "tp": (1,)}},
            "a run with a pipeline does not show what replicas alone would exchange",
        ),
    ],
)
def test_why_there_is_no_interval_is_said(changed: dict[str, object], why: str) -> None:
    (choice,) = answer(question(**changed), top=1).choices
    assert (choice.why_unknown, choice.low_s, choice.high_s) == (why, None, None)


def test_twice_the_nodes_are_not_tried_beyond_what_a_run_carries() -> None:
    measured = Layouts.of(dp=1).row(0)
    plan = answer(question(measured=measured, nodes=[4], what=("nodes",)), top=1)
    assert plan.untried == ("nodes not tried: twice as many are more than 16 times those of the run",)


def test_what_rests_on_no_measurement_has_no_interval() -> None:
    known = KnownMachine(machine=MACHINE, error=0.1).unmeasured(with_nics(2), "what two adapters carry")
    assert known.error is None and known.remarks == ("what two adapters carry rests on no measurement",)
    assert np.isclose(known.machine.network_rate, 2e9)
    with pytest.raises(CannotTell):
        answer(question(job=JOB.on(replace(MACHINE, memory_bytes=1e6)), error=known.error), top=1)
