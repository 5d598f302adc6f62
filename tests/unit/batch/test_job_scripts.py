"""`hpcpace sbatch`: the job scripts, wherever they are needed."""

from __future__ import annotations

import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
from cases import each_case
from click.testing import CliRunner

from hpcpace.cli import cli
from hpcpace.cli.batch import filled_in, job_script, job_scripts
from hpcpace.core.errors import UsageError

REPOSITORY = Path(__file__).parents[3]
NAMES = ["audit", "gpt2_dp", "gpt2_pp", "gpt2_tp", "gpt2_zero", "resnet18_dp"]


def test_lists_every_script_that_needs_no_repository() -> None:
    shown = CliRunner().invoke(cli, ["sbatch"]).output.splitlines()
    assert [line.split()[0] for line in shown] == NAMES
    assert all(line.endswith(".") for line in shown)


@pytest.mark.parametrize("name", ["gpt2_pp", "gpt2_pp.sh"])
def test_a_script_is_the_one_of_the_repository(name: str) -> None:
    assert job_script(name) == (REPOSITORY / "sbatch" / "gpt2_pp.sh").read_text()


@each_case("name", ["gpt2", "", "study", "../sbatch/gpt2_pp", "nano_cluster"])
def test_an_unknown_name_gets_the_list(name: str) -> None:
    with pytest.raises(UsageError, match="choose from audit, gpt2_dp, gpt2_pp"):
        job_script(name)


def _directives(text: str) -> list[str]:
    """Return the options that sbatch takes from a script: it reads on until the first command."""
    comments = takewhile(lambda line: not line or line.startswith("#"), text.splitlines())
    return [line for line in comments if line.startswith("#SBATCH")]


@each_case("name", NAMES)
def test_a_script_calls_the_hpcpace_that_wrote_it(name: str, tmp_path: Path) -> None:
    program = (
        tmp_path / 'it\'s a "venv" $(touch ran) `touch ran`; touch ran\n#SBATCH --wrap=ran\ntouch ran #ü' / "hpcpace"
    )
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    program.chmod(0o755)
    text = filled_in(job_script(name), str(program))
    # As `hpcpace sbatch NAME | sbatch` would: the script has no path.
    done = subprocess.run(
        ["bash", "-s", "--", "--note", "two words", ""],
        input=text,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
    assert _directives(text) == _directives(job_script(name))
    assert done.stdout.startswith(f"batch|--name|{name}|") and done.stdout.endswith("|--note|two words||")


def test_the_package_carries_the_scripts(tmp_path: Path) -> None:
    build = "from setuptools import setup; setup(ext_modules=[])"
    command = [sys.executable, "-c", build, "-q", "build_py", "--build-lib", str(tmp_path / "lib")]
    done = subprocess.run(
        [*command, "egg_info", "--egg-base", str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    packed = tmp_path / "lib" / "hpcpace" / "batch" / "scripts"
    assert {path.stem for path in packed.glob("*.sh")} >= set(job_scripts())
    assert not any(path.is_symlink() for path in packed.iterdir())
    assert "would be ignored" not in done.stdout + done.stderr
