from __future__ import annotations

import sys
from types import SimpleNamespace

from cases import each_case

from hpcpace.world import team


@each_case(
    ("environ", "is_terminal", "is_launched"),
    [
        ({}, False, False),
        ({"SLURM_STEP_NUM_TASKS": "1"}, False, False),
        ({"SLURM_STEP_NUM_TASKS": "4"}, False, True),
        ({"SLURM_STEP_NUM_TASKS": "4"}, True, False),
        ({"PMI_SIZE": "2"}, False, True),
        ({"OMPI_COMM_WORLD_SIZE": "x"}, False, False),
        ({"SLURM_NTASKS": "64", "SLURM_PROCID": "0"}, False, False),
    ],
)
def test_a_team_is_what_a_launcher_started_without_a_terminal(monkeypatch, environ, is_terminal, is_launched):
    monkeypatch.setattr(team, "process_environ", lambda: environ)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: is_terminal))
    assert team._is_launched() is is_launched


def test_one_process_is_no_team(monkeypatch):
    monkeypatch.setattr(team, "process_environ", dict)
    with team.team() as found:
        assert found is None
