"""Observation changes nothing that a training program can notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

PROGRAM = Path(__file__).with_name("transparency_program.py")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_program_behaves_the_same_with_and_without_observation(
    mpiexec: Callable[..., CompletedProcess[str]], tmp_path: Path, num_ranks: int
) -> None:
    findings = {}
    for mode in ("plain", "observed"):
        result = mpiexec(num_ranks, PROGRAM, mode, tmp_path)
        assert result.returncode == 0, result.stderr
        findings[mode] = json.loads(result.stdout)
    assert len(findings["plain"]) == num_ranks
    assert findings["observed"] == findings["plain"]
