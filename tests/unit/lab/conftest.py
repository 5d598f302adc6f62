from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcpace.lab.fault_kinds import InsideLab
from hpcpace.lab.plan import LabFiles, LabPlan
from hpcpace.lab.settings import LabConfig


@pytest.fixture
def files(tmp_path: Path) -> LabFiles:
    """The folder of a lab that is not up, with the folders that a boot makes and the tests need."""
    files = LabFiles(tmp_path / "test")
    for folder in (files.faults_dir, files.pids_dir):
        folder.mkdir(parents=True)
    return files


@pytest.fixture
def lab(files: LabFiles) -> InsideLab:
    """Four hosts on two leaves."""
    return InsideLab(LabPlan(LabConfig(name="test")), files)


@pytest.fixture
def waiting_process() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a process with the given words in its command line; it ends with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-S", "-c", "import sys; print(flush=True); sys.stdin.read()", *words]
        process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.communicate()
