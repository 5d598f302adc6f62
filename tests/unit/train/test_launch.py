from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.errors import ConfigError, WorldError
from hpcpace.train import plan


def test_ranks_run_this_python_with_the_same_arguments(monkeypatch, tmp_path):
    (tmp_path / "mpiexec").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert plan.mpiexec_command(4, ["train", "gpt2", "--ranks", "4"]) == [
        *(str(tmp_path / "mpiexec"), "-launcher", "fork", "-hosts", "localhost", "-n", "4"),
        *(str(tmp_path / "python"), "-P", "-m", "hpcpace", "train", "gpt2", "--ranks", "4"),
    ]


def test_without_mpiexec_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda _: False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(WorldError, match="pip install mpich"):
        plan.mpiexec_command(4, [])


def test_ranks_without_mpi_run_under_torchrun(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    assert plan.torchrun_command(2, ["train", "gpt2"]) == [
        *("/venv/bin/python", "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--no-python", "/venv/bin/python", "-P", "-m", "hpcpace", "train", "gpt2"),
    ]


@each_case(("coordination", "lacks"), [("torch", True), ("mpi", False), ("auto", True)])
def test_mpi_is_lacking_by_the_setting_or_without_mpi4py(monkeypatch, coordination, lacks):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert plan.lacks_mpi(coordination) is lacks


@each_case(
    ("num_cores", "num_allowed", "local_size", "num_threads"),
    [
        (8, 8, 1, 8),
        (8, 8, 4, 2),
        (2, 2, 4, 1),
        (64, 8, 8, 8),  # bound to eight cores each by the launcher
        (64, 1, 2, 1),
    ],
)
def test_ranks_of_a_host_share_its_cores(monkeypatch, num_cores, num_allowed, local_size, num_threads):
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_allowed)))
    assert plan.threads_of_rank(local_size) == num_threads


def test_a_compiler_is_looked_for_where_it_is_named(tmp_path):
    (tmp_path / "my-c++").touch(mode=0o755)
    plan.check_compiler({"CXX": "my-c++", "PATH": str(tmp_path)})


def test_compilation_without_a_compiler_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no g\+\+: install one"):
        plan.check_compiler({"PATH": str(tmp_path)})
