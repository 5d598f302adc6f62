"""Loops of kinds that no framework writes have their steps, phases and losses under `hpcpace trace`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from cases import only_nightly

from hpcpace.core.rundir import open_run
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import Phase

Run = Callable[..., CompletedProcess[str]]
SCRIPT = Path(__file__).with_name("unusual_loops.py")
STEPS = 6
USUAL = {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}


def _losses(result: CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stderr
    return sorted(line for line in result.stdout.splitlines() if line.startswith("loss"))


@pytest.mark.parametrize(
    ("kind", "phases", "num_forward"),
    only_nightly(
        [pytest.param("accumulating", USUAL, 3 * STEPS, id="microbatches without synchronisation")],
        [
            pytest.param("gan", {*USUAL, Phase.DATA}, 2 * STEPS, id="two models in turn"),
            # The thread is known from its first backward pass on.
            pytest.param("in_a_thread", USUAL, STEPS - 1, id="in a thread"),
        ],
    ),
)
def test_an_unusual_loop_has_its_steps_phases_and_losses(
    torchrun: Run, tmp_path: Path, kind: str, phases: set[Phase], num_forward: int
) -> None:
    plain = torchrun(2, SCRIPT, kind)
    traced = torchrun(2, "-m", "hpcpace", "trace", "--run-dir", tmp_path / "run", "--", SCRIPT, kind)
    assert _losses(traced) == _losses(plain)
    assert "warning" not in traced.stderr
    files = open_run(tmp_path / "run").attempt(0).trace_files()
    assert sorted(files) == [0, 1]
    for path in files.values():
        tables = read_trace(path).tables
        assert len(tables["steps"]) == STEPS
        seen = tables["phases"]["phase"]
        assert {Phase(phase) for phase in np.unique(seen)} >= phases
        assert int((seen == Phase.FORWARD).sum()) == num_forward


@pytest.mark.parametrize(
    ("kind", "num_steps"),
    only_nightly(
        # From the middle on, the optimizer's step is the one from before torch's hooks.
        [pytest.param("patched", [STEPS, STEPS], id="functions of torch that the script replaces")],
        [
            pytest.param("parameter_server", [STEPS, STEPS], id="a parameter server"),
            pytest.param("evaluating_beside", [STEPS, 0], id="a rank that only evaluates"),
        ],
    ),
)
def test_ranks_that_do_something_else_are_unharmed_and_nobody_is_blamed(
    torchrun: Run, python: Run, tmp_path: Path, kind: str, num_steps: list[int]
) -> None:
    run = tmp_path / "run"
    plain = torchrun(2, SCRIPT, kind)
    traced = torchrun(2, "-m", "hpcpace", "trace", "--run-dir", run, "--", SCRIPT, kind)
    assert _losses(traced) == _losses(plain)
    assert "warning" not in traced.stderr
    files = open_run(run).attempt(0).trace_files()
    assert [len(read_trace(files[rank]).tables["steps"]) for rank in (0, 1)] == num_steps
    python("-m", "hpcpace", "report", run)
    culprits = json.loads((run / "summary.json").read_text())["verdict"]["culprits"]
    assert not [culprit for culprit in culprits if culprit["kind"] == "rank"]
