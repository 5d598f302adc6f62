"""Running inside modules, conda, a venv and containers: stand-ins note how they are called (docs/site.md)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
FAKES = REPOSITORY / "tests" / "data" / "fake_slurm"
SCRIPT = REPOSITORY / "sbatch" / "gpt2_dp.sh"
JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "8", "HPCPACE_AUDIT": "off"}


def _program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def _run(folder: Path, path: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {"HOME": str(folder), "PATH": f"{path}:/usr/bin:/bin", "FAKE_CALLS": str(folder / "calls.jsonl")}
    clean |= {"FAKE_PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), **JOB}
    # A copy, because the checkout of a developer has hpcpace in .venv.
    script = folder / "bin" / SCRIPT.name
    script.parent.mkdir(exist_ok=True)
    shutil.copy(SCRIPT, script)
    command = ["bash", str(script), "--data", "my data"]
    return subprocess.run(command, cwd=folder, env={**clean, **environ}, capture_output=True, text=True, timeout=60)


def _without_hpcpace(folder: Path) -> Path:
    (folder / "slurm").mkdir()
    for name in ("srun", "scancel", "scontrol", "squeue"):
        (folder / "slurm" / name).symlink_to(FAKES / name)
    return folder / "slurm"


def test_a_module_brings_hpcpace(tmp_path: Path) -> None:
    slurm = _without_hpcpace(tmp_path)
    # As Lmod does: a function of the shell that evaluates what its program prints.
    init = tmp_path / "init"
    init.write_text(f"module() {{ [[ $* == 'load mpich hpcpace' ]] && PATH={FAKES}:$PATH && export LOADED=yes; }}\n")
    done = _run(tmp_path, str(slurm), HPCPACE_PRELUDE=f"source {init}; module load mpich hpcpace")
    assert done.returncode == 0, done.stderr
    assert _run(tmp_path, str(slurm), HPCPACE_PRELUDE=f"source {init}; module load other").returncode == 2


def test_conda_activates_its_environment(tmp_path: Path) -> None:
    slurm = _without_hpcpace(tmp_path)
    conda = tmp_path / "conda.sh"
    # conda's functions read variables that are not set, and end with status 1 on the way.
    conda.write_text(f"conda() {{ : $CONDA_SHLVL; false; [[ $* == 'activate train' ]] && PATH={FAKES}:$PATH; }}\n")
    done = _run(tmp_path, str(slurm), HPCPACE_PRELUDE=f"source {conda} && conda activate train")
    assert done.returncode == 0, done.stderr


def test_a_venv_is_activated_by_its_file(tmp_path: Path) -> None:
    slurm = _without_hpcpace(tmp_path)
    activate = tmp_path / "venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f'PATH="{FAKES}:$PATH"; export PATH; [ -n "$PS1" ] || true\n')
    done = _run(tmp_path, str(slurm), HPCPACE_PRELUDE=str(activate))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line",
    ["apptainer exec --nv train.sif python", "enroot start --mount .:/mnt train python"],
    ids=["apptainer", "enroot"],
)
def test_ranks_and_report_run_in_a_container_and_the_job_control_outside(line: str, tmp_path: Path) -> None:
    container = _program(
        tmp_path / "bin" / line.split()[0], f'printf "%s|" "{line.split()[0]}" "$@" >> {tmp_path}/told'
    )
    done = _run(tmp_path, f"{container.parent}:{FAKES}", HPCPACE_PYTHON=line)
    assert done.returncode == 0, done.stderr
    told = (tmp_path / "told").read_text()
    start = "|".join([*line.split(), "-P", "-m", "hpcpace"])
    assert told.startswith(f"{start}|train|gpt2|--run-dir|runs/17-gpt2_dp|")
    assert "|--data|my data|" in told
    assert told.endswith(f"{start}|report|runs/17-gpt2_dp|")


def test_pyxis_gets_its_options_and_its_image_is_not_asked_for_an_mpi(tmp_path: Path) -> None:
    options = "--container-image=train.sqsh"
    done = _run(tmp_path, str(FAKES), HPCPACE_SRUN_ARGS=options, FAKE_MPI_TYPES="pmi2 pmix")
    assert (done.returncode, done.stderr) == (0, "")
    assert f'"{options}", "hpcpace", "train"' in (tmp_path / "calls.jsonl").read_text()


def test_without_hpcpace_on_the_host_the_container_does_it_all(tmp_path: Path) -> None:
    slurm = _without_hpcpace(tmp_path)
    text = f'printf "%s|" "$@" >> {tmp_path}/told; [[ $7 != batch ]] || exec {sys.executable} "${{@:4}}"'
    _program(slurm / "apptainer", text)
    done = _run(tmp_path, str(slurm), HPCPACE_PYTHON="apptainer exec train.sif python")
    assert done.returncode == 0, done.stderr
    told = (tmp_path / "told").read_text()
    assert told.startswith("exec|train.sif|python|-P|-m|hpcpace|batch|--name|gpt2_dp|")
    assert "|hpcpace|train|gpt2|" in told


def test_a_container_without_slurm_says_what_is_missing(tmp_path: Path) -> None:
    _program(tmp_path / "bin" / "apptainer", f'PATH={tmp_path}/none exec {sys.executable} "${{@:4}}"')
    done = _run(tmp_path, str(tmp_path / "bin"), HPCPACE_PYTHON="apptainer exec train.sif python")
    assert done.returncode == 2
    assert "but there is no srun on PATH" in done.stderr and "hpcpace help site" in done.stderr
    assert os.listdir(tmp_path) == ["bin"]
