"""Observation changes nothing that a training program can notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from cases import only_nightly

from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import ExitKind, Phase
from hpcpace.trace.tables import RankTrace

PROGRAM = Path(__file__).with_name("transparency_program.py")


@pytest.mark.parametrize("num_ranks", only_nightly([2], [1, 4]))
def test_a_program_behaves_the_same_with_and_without_observation(
    mpiexec: Callable[..., CompletedProcess[str]], tmp_path: Path, num_ranks: int
) -> None:
    findings = {}
    for mode in ("plain", "observed", "device"):
        result = mpiexec(num_ranks, PROGRAM, mode, tmp_path / mode)
        assert result.returncode == 0, result.stderr
        assert "cannot record" not in result.stderr and "times on the device end" not in result.stderr
        findings[mode] = json.loads(result.stdout)
    assert len(findings["plain"]) == num_ranks
    assert findings["observed"] == findings["device"] == findings["plain"]
    for path in sorted((tmp_path / "device").glob("attempt-0/trace/*.h5")):
        _assert_device_times(read_trace(path))


def _assert_device_times(trace: RankTrace) -> None:
    """Everything that was marked has its time on the device that the program pretended to have."""
    assert trace.problems == ()
    steps, phases, collectives = (trace.tables[name] for name in ("steps", "phases", "collectives"))
    marked = phases.select(~np.isin(phases["phase"], [Phase.GC, Phase.PACE]))
    for rows in (steps, marked):
        assert len(rows) > 0
        for name in ("begin_ns", "end_ns"):
            assert (np.abs(rows[f"device_{name}"] - rows[name]) < 1_000_000_000).all()
    assert ExitKind.NEVER not in collectives["exit_kind"]
    assert (collectives["enqueue_ns"] > 0).all()
