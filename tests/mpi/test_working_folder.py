"""Modules in the working folder, which may be a stranger's, are imported by the user's own script alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cases import only_nightly

from experiments.synthetic_run import SyntheticRun

COMMAND = (str(Path(sys.executable).with_name("hpcpace")),)
MODULE = (sys.executable, "-m", "hpcpace")
SAFE_MODULE = (sys.executable, "-P", "-m", "hpcpace")
IN_ITS_PLACE = ("click", "numpy", "torch", "h5py", "psutil", "mpi4py", "rich", "scipy", "csv", "email", "secrets")

Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, in which every module leaves its name in a file `ran`."""
    folder = tmp_path / "evil"
    folder.mkdir()
    for name in IN_ITS_PLACE:
        (folder / f"{name}.py").write_text(
            f"open({str(folder / 'ran')!r}, 'a').write('{name} ')\nraise SystemExit(99)\n"
        )
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    # Else this very process would hand its own working folder on.
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    return folder


@pytest.fixture
def run(python: Run) -> Run:
    def call(command: tuple[str, ...], *arguments: object, **variables: str) -> CompletedProcess[str]:
        # `python` puts the interpreter first; a command of its own is started by it just as well.
        first = command[1:] if command[0] == sys.executable else command
        return python(*first, *arguments, **variables)

    return call


@pytest.mark.parametrize("command", only_nightly([MODULE], [COMMAND, SAFE_MODULE]), ids=" ".join)
def test_a_report_imports_nothing_from_the_working_folder(
    command: tuple[str, ...], evil: Path, run: Run, tmp_path: Path
) -> None:
    trace = SyntheticRun(num_ranks=2, num_steps=20).write(tmp_path / "run").path
    result = run(command, "report", trace)
    assert not (evil / "ran").exists(), (evil / "ran").read_text()
    assert result.returncode in (0, 1, 3), result.stderr


@pytest.mark.parametrize("command", only_nightly([MODULE], [SAFE_MODULE]), ids=" ".join)
def test_a_study_imports_nothing_from_the_working_folder(command: tuple[str, ...], evil: Path, run: Run) -> None:
    result = run(command, "study", "--help")
    assert (result.returncode, (evil / "ran").exists()) == (0, False), result.stderr


@pytest.mark.parametrize("command", only_nightly([COMMAND], [MODULE]), ids=" ".join)
def test_ranks_import_nothing_from_the_working_folder(
    command: tuple[str, ...], evil: Path, run: Run, tmp_path: Path
) -> None:
    options = ("--ranks", 2, "--steps", 4, "--warmup-steps", 1, "--report", "--run-dir", tmp_path / "run")
    result = run(command, "train", "gpt2", *options)
    assert not (evil / "ran").exists(), (evil / "ran").read_text()
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("command", "is_link", "variables"),
    only_nightly(
        [(COMMAND, True, {}), (MODULE, False, {"PYTHONSAFEPATH": "1"})],
        [(COMMAND, False, {}), (MODULE, False, {}), (SAFE_MODULE, False, {})],
    ),
    ids=str,
)
def test_a_traced_script_finds_modules_where_it_does_without_hpcpace(
    command: tuple[str, ...], is_link: bool, variables: dict[str, str], evil: Path, run: Run, tmp_path: Path
) -> None:
    script = tmp_path / "mine" / "train.py"
    script.parent.mkdir()
    script.write_text("import json, sys\nprint(json.dumps([sys.path, sys.argv]))\n")
    named = Path("train.py") if is_link else script
    if is_link:
        named.symlink_to(script)
    plain = run((sys.executable,), named, "--epochs", 3, **variables)
    traced = run(command, "trace", "--run-dir", tmp_path / "run", "--", named, "--epochs", 3, **variables)
    assert not (evil / "ran").exists(), (evil / "ran").read_text()
    assert json.loads(traced.stdout) == json.loads(plain.stdout), traced.stderr


def test_a_script_in_the_working_folder_imports_what_lies_beside_it(evil: Path, run: Run, tmp_path: Path) -> None:
    """As `python train.py` does."""
    (evil / "mine.py").write_text("print('mine')\n")
    (evil / "train.py").write_text("import os\nos.chdir('/')\nimport mine\n")
    result = run(COMMAND, "trace", "--run-dir", tmp_path / "run", "--", "train.py")
    assert result.stdout == "mine\n", result.stderr
    assert not (evil / "ran").exists(), (evil / "ran").read_text()
