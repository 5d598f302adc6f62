from __future__ import annotations

import numpy as np
from cases import each_case

from hpcpace.metrics.plausibility import DamageThresholds, collectives_contradict, contradictions
from hpcpace.trace.schema import DEVICE_TABLES, ExitKind, Op, Phase, row_dtypes

NUM_ROWS, STEP_NS = 100, 1_000_000


def sound():
    """Return the tables of a rank whose rows agree: a phase and an operation in each of 100 steps."""
    dtypes = row_dtypes(DEVICE_TABLES)
    tables = {name: np.zeros(NUM_ROWS, dtypes[name]) for name in ("steps", "phases", "collectives")}
    number = np.arange(NUM_ROWS)
    for table in tables.values():
        table["step"] = number
    tables["steps"]["begin_ns"] = tables["phases"]["begin_ns"] = number * STEP_NS
    tables["steps"]["end_ns"] = tables["phases"]["end_ns"] = (number + 1) * STEP_NS
    for name in ("steps", "phases"):
        tables[name]["device_begin_ns"] = tables[name]["begin_ns"] + 50
        tables[name]["device_end_ns"] = tables[name]["end_ns"] + 50
    tables["collectives"]["enter_ns"] = number * STEP_NS + 100
    tables["collectives"]["exit_ns"] = number * STEP_NS + 200
    return {name: {column: table[column] for column in table.dtype.names} for name, table in tables.items()}


def zero_times(tables, rows):
    tables["steps"]["begin_ns"][rows] = tables["steps"]["end_ns"][rows] = 0


def long_steps(tables, rows):
    tables["steps"]["end_ns"][rows] += STEP_NS // 2


def phase_ends_first(tables, rows):
    tables["phases"]["end_ns"][rows] -= 2 * STEP_NS


def phase_ends_first_on_the_device(tables, rows):
    tables["phases"]["device_end_ns"][rows] -= 2 * STEP_NS


def step_ends_first_on_the_device(tables, rows):
    tables["steps"]["device_begin_ns"][rows] += 2 * STEP_NS


def unknown_phase(tables, rows):
    tables["phases"]["phase"][rows] = max(Phase) + 1


def exit_first(tables, rows):
    tables["collectives"]["exit_ns"][rows] -= 3600 * 10**9


def unknown_op(tables, rows):
    tables["collectives"]["op"][rows] = max(Op) + 1


def unknown_exit(tables, rows):
    tables["collectives"]["exit_kind"][rows] = max(ExitKind) + 1


CASES = [
    (zero_times, "steps take no time"),
    (long_steps, "steps end after the next one has begun"),
    (phase_ends_first, "phases end before they begin"),
    (phase_ends_first_on_the_device, "phases end on the device before they begin there"),
    (step_ends_first_on_the_device, "steps end on the device before they begin there"),
    (unknown_phase, "phases are of phases that this version does not know"),
    (exit_first, "collectives exit before they enter"),
    (unknown_op, "collectives are of operations that this version does not know"),
    (unknown_exit, "collectives have ends that this version does not know"),
]


def test_nothing_is_found_in_rows_that_agree():
    assert contradictions(sound()) == []


@each_case(("change", "said"), CASES)
def test_a_contradiction_in_many_rows_is_grave_and_counted(change, said):
    tables = sound()
    change(tables, slice(10, 50))
    (found,) = contradictions(tables)
    assert found.is_grave(DamageThresholds())
    assert str(found) == f"40 of 100 rows of {said}"


@each_case(("change", "said"), CASES)
def test_a_few_damaged_rows_are_told_and_do_not_condemn_the_rank(change, said):
    tables = sound()
    change(tables, slice(10, 13))
    (found,) = contradictions(tables)
    assert not found.is_grave(DamageThresholds())
    assert str(found) == f"3 of 100 rows of {said}"


def test_an_operation_that_never_ended_has_no_exit_to_contradict_its_enter():
    tables = sound()
    tables["collectives"]["exit_ns"][50:] = 0
    tables["collectives"]["exit_kind"][50:] = ExitKind.NEVER
    assert contradictions(tables) == []


def test_times_that_are_not_known_on_the_device_contradict_nothing():
    tables = sound()
    tables["phases"]["device_end_ns"][20:40] = 0
    tables["phases"]["device_begin_ns"][30:60] = 0
    assert contradictions(tables) == []


def test_a_step_that_is_recorded_twice_does_not_overlap_itself():
    tables = sound()
    for column in tables["steps"]:
        tables["steps"][column][50:] = tables["steps"][column][:50]
    assert contradictions(tables) == []


def test_steps_that_touch_but_for_rounding_do_not_overlap():
    tables = sound()
    tables["steps"]["end_ns"] += STEP_NS // 200
    assert contradictions(tables) == []


def test_a_row_that_contradicts_itself_twice_counts_once():
    tables = sound()
    exit_first(tables, slice(0, 10))
    unknown_op(tables, slice(5, 15))
    found = {what: np.flatnonzero(rows).tolist() for what, rows in collectives_contradict(tables["collectives"])}
    assert found["exit before they enter"] == list(range(10))
    assert found["are of operations that this version does not know"] == list(range(5, 15))
