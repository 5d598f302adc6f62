from __future__ import annotations

import dataclasses
import subprocess
import sys
from functools import partial

import click
import pytest
from cases import each_case

from hpcpace.cli import train as train_command
from hpcpace.core.config import section_class
from hpcpace.train.settings import TrainConfig

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "PMI", "SLURM", "OMPI", "MPI_", "HPCPACE_")


@pytest.fixture
def train(hpcpace, monkeypatch):
    """Run `hpcpace train gpt2` up to where torch would be loaded; return exit code, stdout and stderr."""
    import os

    for name in [name for name in os.environ if name.startswith(_LAUNCHER_VARIABLES)]:
        monkeypatch.delenv(name)

    return partial(hpcpace, "train", "gpt2")


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["--mesh", "dp=2"], "mesh dp=2,pp=1,tp=1 needs 2 ranks, but the job has 1"),
        (["--ranks", "4", "--mesh", "dp=3"], "needs 3 ranks, but the job has 4"),
        (["--ranks", "2", "--batch-size", "3"], "use --batch-size 4"),
        (["--ranks", "2", "--data", "/no/such/file"], "no file at /no/such/file"),
        (["--data", "/no/such/file"], "no file at /no/such/file"),
        (["--config", "/no/such/file"], "/no/such/file"),
        (["--inject", "rank=1,size=30%"], "no rank 1"),
        (["--steps", "3", "--warmup-steps", "3"], "train.warmup_steps is 3"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_2(train, arguments, seen):
    code, out, err = train(*arguments)
    assert (code, out) == (2, "")
    assert seen in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--preset", "huge"], ["--steps", "x"], ["--steps", "0"], ["--ranks", "0"], ["--speed", "1"]]
)
def test_wrong_options_exit_2(train, arguments):
    code, _, err = train(*arguments)
    assert code == 2
    assert arguments[0] in err


def test_settings_are_refused_before_torch_is_loaded():
    program = "import sys; from hpcpace.cli import main; sys.argv[1:] = ['train', 'gpt2', '--mesh', 'dp=9']\n"
    program += "try: main()\nexcept SystemExit as e: print(e.code, 'torch' in sys.modules, 'mpi4py' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["2", "False", "False"]


def test_options_come_before_the_environment_and_the_file(train, tmp_path, monkeypatch):
    file = tmp_path / "settings.toml"
    file.write_text("[train]\nmesh = 'dp=5'\nbatch_size = 10\n")
    assert "dp=5" in train("--config", file)[2]
    monkeypatch.setenv("HPCPACE_TRAIN_MESH", "dp=6")
    assert "dp=6" in train("--config", file)[2]
    assert "dp=7" in train("--config", file, "--mesh", "dp=7")[2]


def test_ranks_replace_the_process_by_mpiexec_with_the_same_arguments(train, monkeypatch):
    started = []
    monkeypatch.setattr(train_command, "become_mpiexec", lambda *args: started.append(args) or sys.exit(0))
    code, _, _ = train("--ranks", "4", "--mesh", "dp=2,pp=2")
    assert code == 0
    assert started[0][:2] == (4, ["train", "gpt2", "--ranks", "4", "--mesh", "dp=2,pp=2"])


def test_every_option_is_a_setting_or_says_how_to_run():
    options = {p.name for p in train_command.gpt2.params if isinstance(p, click.Option)}
    settings = {key for keys in train_command._SETTINGS.values() for key in keys.split()}
    # The subcommand says the model.
    assert options == (settings - {"model"}) | {"ranks", "run_dir", "config_file", "progress", "is_reported"}


@each_case("section", train_command._SETTINGS)
def test_every_setting_exists(section):
    fields = {field.name for field in dataclasses.fields(section_class(section))}
    assert set(train_command._SETTINGS[section].split()) <= fields


def test_every_setting_of_a_workload_has_an_option():
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    assert set(train_command._SETTINGS["train"].split()) == fields
