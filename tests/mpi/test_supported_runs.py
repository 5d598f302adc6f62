"""Every combination of features is refused with its reason, or trained: each pair of features in one at least."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases import only_nightly

from hpcpace.core.errors import ConfigError
from hpcpace.core.rundir import open_run
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import Op
from hpcpace.train.plan import TrainPlan, plan_training
from hpcpace.train.settings import COMPRESSIONS, SCHEDULES, ZERO_STAGES, TrainConfig
from library.volume import averaging_operations, step_operations

PROGRAM = Path(__file__).with_name("support_program.py")
NUM_RANKS = {
    "dp=2": 2, "tp=2": 2, "pp=2": 2, "dp=2,tp=2": 4, "dp=2,pp=2": 4, "pp=2,tp=2": 4, "dp=2,pp=2,tp=2": 8,
}  # fmt: skip
SYNC_EVERY = 2
STEPS = 4
AXES = {
    "mesh": tuple(NUM_RANKS),
    "zero": ZERO_STAGES,
    "schedule": SCHEDULES,
    "compress": COMPRESSIONS,
    "sync_every": (1, SYNC_EVERY),
    "hierarchical": (False, True),
    "compile": (False, True),
    "dtype": ("float32", "bfloat16"),
}
CASES = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
TOLERANCES = {"none": 1e-4, "fp16": 1e-3, "bf16": 1e-3, "int8": 2e-3, "powersgd": 1e-2}
MIXED_TOLERANCE = 1e-3
"""How far the losses of bfloat16 may be from those of float32; 3e-4 was seen."""
SETTINGS = {"steps": STEPS, "warmup_steps": 0, "seq_len": 32, "learning_rate": 1e-3, "log_every": STEPS + 1}

Case = dict[str, Any]


def is_possible(case: Case) -> bool:
    """Say in other words than the program what goes together."""
    is_averaged_otherwise = case["compress"] != "none" or case["hierarchical"]
    between_replicas = [case["zero"] > 0, is_averaged_otherwise, case["sync_every"] > 1]
    if case["compress"] != "none" and case["hierarchical"]:
        return False
    if sum(between_replicas) > 1 and not (case["zero"] == 1 and case["sync_every"] == 1):
        return False
    if any(between_replicas) and "dp" not in case["mesh"]:
        return False
    return case["schedule"] == "1f1b" or "pp" in case["mesh"]


def planned(case: Case) -> TrainPlan:
    num_ranks = NUM_RANKS[case["mesh"]]
    return replace(plan_training(TrainConfig(**case, **SETTINGS), num_ranks), ranks_per_host=num_ranks)


def pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(case.items(), 2))


def covering(cases: list[Case]) -> Iterator[Case]:
    """Yield cases in which each pair of values that occurs in any of them occurs at least once."""
    missing = set().union(*map(pairs, cases))
    while missing:
        # Few ranks first, where a case says as much.
        best = max(cases, key=lambda case: (len(pairs(case) & missing), -NUM_RANKS[case["mesh"]]))
        missing -= pairs(best)
        yield best


TRAINED = list(covering([case for case in CASES if is_possible(case)]))


def name(case: Case) -> str:
    return "-".join(str(value) for value in case.values())


def wrongly_planned(case: Case) -> str:
    """Return how the plan of a case differs from what is expected of it; nothing if it does not."""
    try:
        plan = planned(case)
    except ConfigError as error:
        reason = re.search(r"use a mesh with (dp|pp)=2 or more|cannot be combined: .+; drop one", str(error))
        return f"{name(case)} is refused: {error}" if is_possible(case) or not reason else ""
    if not is_possible(case):
        return f"{name(case)} is not refused"
    return "" if plan.settings.zero == case["zero"] else f"{name(case)} has zero={plan.settings.zero}"


def test_each_combination_is_planned_or_refused_with_a_reason() -> None:
    assert [wrong for case in CASES if (wrong := wrongly_planned(case))] == []


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Losses of a single process in float32, made once."""
    return {}


@pytest.mark.parametrize("num_ranks", only_nightly([2], [4, 8]))
def test_each_pair_of_features_trains_as_planned(mpiexec, python, reference, tmp_path, num_ranks):
    if not reference:
        reference["losses"] = losses_of(trained([{"mesh": ""}], python, tmp_path / "alone")[0])
    cases = [case for case in TRAINED if NUM_RANKS[case["mesh"]] == num_ranks]
    runs = trained(cases, partial(mpiexec, num_ranks), tmp_path / "together")
    found = {name(case): losses_of(run) for case, run in zip(cases, runs, strict=True)}
    assert found == {name(case): pytest.approx(reference["losses"], rel=tolerance(case)) for case in cases}
    recorded = {name(case): operations_of(run) for case, run in zip(cases, runs, strict=True)}
    expected = {name(case): expected_operations(planned(case)) for case in cases}
    # The gradients of a compiled block are ready in another order, so that DDP's buckets end elsewhere.
    for case in (name(case) for case in cases if case["compile"]):
        recorded[case], expected[case] = sums(recorded[case]), sums(expected[case])
    assert recorded == expected


@pytest.mark.nightly
def test_a_compiled_model_has_the_same_losses(python, tmp_path):
    arguments = ("-m", "hpcpace", "train", "gpt2", "--ranks", 2, "--mesh", "tp=2", "--steps", 2, "--warmup-steps", 0)
    for option in ("--compile", "--no-compile"):
        result = python(*arguments, "--seq-len", 32, option, "--run-dir", tmp_path / option)
        assert result.returncode == 0, result.stderr
    assert losses_of(tmp_path / "--compile") == pytest.approx(losses_of(tmp_path / "--no-compile"), rel=1e-5)


def trained(cases, start, folder):
    """Train each case; return the folders of the runs."""
    folder.mkdir()
    for number, case in enumerate(cases):
        (folder / f"{number:02}.json").write_text(json.dumps({**case, **SETTINGS}))
    result = start(PROGRAM, folder)
    assert result.returncode == 0, result.stderr
    return [folder / f"{number:02}" for number in range(len(cases))]


def losses_of(run):
    (attempt,) = open_run(run).attempts()
    return json.loads(attempt.result_json.read_text())["losses"]


def tolerance(case):
    if case["sync_every"] > 1:
        return 2e-2
    return max(TOLERANCES[case["compress"]], MIXED_TOLERANCE if case["dtype"] == "bfloat16" else 0.0)


def operations_of(run):
    """Return what each rank recorded of the last step."""
    (attempt,) = open_run(run).attempts()
    found = []
    for _, path in sorted(attempt.trace_files().items()):
        table = read_trace(path).tables["collectives"]
        rows = table["step"] == STEPS - 1
        sizes = zip(table["op"][rows], table["bytes"][rows], strict=True)
        found.append(Counter((Op(int(op)).name, int(size)) for op, size in sizes))
    return found


def sums(ranks):
    """Return the bytes of each kind of operation on each rank."""
    return [{op: sum(size * n for (o, size), n in rank.items() if o == op) for op, _ in rank} for rank in ranks]


def expected_operations(plan):
    """Return what each rank does in the last step by the formula; a send is a receive at its other end."""
    ranks = [Counter() for _ in range(plan.mesh.size)]
    for operation in [*step_operations(plan), *averaging_operations(plan)]:
        kind = operation.kind.upper()
        kinds = ("SEND", "RECV") if kind == "SEND" else (kind,) * len(operation.ranks)
        for rank, op in zip(operation.ranks, kinds, strict=True):
            ranks[rank][op, operation.size_bytes] += operation.count
    return ranks
