"""What the lab says to a machine that cannot run it, and the environment of what runs in it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.errors import UsageError
from hpcpace.lab.fabric import (
    EMULATION_VARIABLE,
    NAME_VARIABLE,
    check_programs,
    check_requirements,
    lab_environ,
)
from hpcpace.lab.plan import write_config


def _missing(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name, path: None if name in missing else f"/usr/bin/{name}")


def test_refuses_another_user_than_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError) as caught:
        check_requirements()
    assert str(caught.value) == "the lab needs root for namespaces and mounts, but this is user 1000: run it with sudo"


@each_case(
    ("missing", "packages"),
    [
        (("munged", "slurmd"), "munge slurm-wlm-basic-plugins slurmd"),
        (("ip", "tc"), "iproute2 slurm-wlm-basic-plugins"),
        (
            ("munged", "slurmctld", "slurmd", "sbatch"),
            "munge slurm-client slurm-wlm-basic-plugins slurmctld slurmd",
        ),
    ],
)
def test_names_the_packages_of_missing_programs(monkeypatch, missing, packages):
    _missing(monkeypatch, *missing)
    with pytest.raises(UsageError) as caught:
        check_requirements()
    assert str(caught.value) == (
        f"the lab needs {', '.join(missing)}: `apt-get install --no-install-recommends {packages}`"
    )


def test_names_the_package_of_a_program_that_one_fault_needs(monkeypatch):
    _missing(monkeypatch, "iperf3")
    with pytest.raises(UsageError) as caught:
        check_programs({"iperf3": "iperf3"})
    assert str(caught.value) == "the lab needs iperf3: `apt-get install --no-install-recommends iperf3`"


def test_accepts_a_machine_that_has_all(monkeypatch):
    _missing(monkeypatch)
    check_requirements()


def test_finds_daemons_that_are_not_on_the_path_of_everybody(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name, path: asked.append(path) or name)
    monkeypatch.setenv("PATH", "/bin")
    check_requirements()
    assert set(asked) == {"/bin:/usr/sbin:/sbin"}


def test_nothing_of_another_cluster_reaches_the_lab(monkeypatch, lab):
    write_config(lab.files, lab.plan.config)
    for name in ("SLURM_JOB_ID", "SLURM_CONF", "SRUN_DEBUG", "SBATCH_PARTITION", "PMI_RANK", "PMIX_RANK"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("MPI4PY_MPIABI", "openmpi")
    environ = lab_environ(lab.files)
    assert {key: value for key, value in environ.items() if value == "7"} == {}
    assert environ["SLURM_CONF"] == str(lab.files.slurm_conf)
    assert environ["MPI4PY_MPIABI"] == "openmpi"
    assert environ[NAME_VARIABLE] == "test"
    assert environ["PATH"].split(":")[0] == str(Path(sys.executable).parent)


@pytest.mark.parametrize("num_cores", [2, 64])
def test_what_runs_in_the_lab_is_told_where_computation_is_emulated(monkeypatch, lab, num_cores):
    write_config(lab.files, lab.plan.config)
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    assert lab_environ(lab.files)[EMULATION_VARIABLE] == lab.plan.emulation
    assert bool(lab.plan.emulation) == (num_cores == 2)
