"""A batch job, a training or the runs of a study: settings, srun's options, audit, run, collect, report, requeue.

Settings come from environment variables, in addition to those of `hpcpace config`. Where nobody chose srun's
`--mpi`, it is made to match the MPI library of the ranks: with a type that the library does not speak, each would be a
world of its own. A failed start is repeated once. A study goes on with its next run after one that ended its ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcpace.audit.settings import AuditConfig
from hpcpace.batch.launch import (
    TIMED_OUT,
    Allocation,
    JobControl,
    Launch,
    gpu_options,
    placement_options,
    read_allocation,
    succeeds,
    whole_number,
)
from hpcpace.core.errors import (
    EXIT_CANNOT_TELL,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    EXIT_WARNING,
    ConfigError,
    HpcpaceError,
    UsageError,
)
from hpcpace.core.hostlist import compress
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import RunDirectory
from hpcpace.core.settings import load_config
from hpcpace.core.text import printable, shown
from hpcpace.observe.settings import SUMMARY_VARIABLE, TraceConfig
from hpcpace.train.settings import parse_mesh

AUDITS = ("off", "warn", "strict")
BINDS = ("off", "auto")
LAYOUTS = ("data", "pipeline", "tensor", "zero")
"""How `training_options` lays out ranks if the user gives no mesh."""
_SECONDS = re.compile(r"(0|[1-9][0-9]{0,8})(\.[0-9]+)?")


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How a batch job runs; docs/slurm.md lists the variables.

    Attributes:
        audit: `warn`, `strict` or `off`, from HPCPACE_AUDIT.
        bind: `auto` binds ranks as the audit proposes, from HPCPACE_BIND.
        mpi: srun's `--mpi`, from HPCPACE_MPI; empty: chosen to match the MPI library.
        srun_args: further options of srun, from HPCPACE_SRUN_ARGS.
        placement: file with the host of each rank, from HPCPACE_PLACEMENT; empty: as srun distributes ranks.
        python: words that run a Python with hpcpace, from HPCPACE_PYTHON; empty: this one.
        num_ranks: ranks without Slurm, from HPCPACE_RANKS.
        run_dir: folder of the run, from HPCPACE_RUN_DIR; empty: runs/JOB-NAME.
        requeue_after_s: seconds that a job must have trained to be requeued, from HPCPACE_REQUEUE_AFTER_S.
        start_timeout_s: seconds that ranks may take to start, from HPCPACE_WORLD_START_TIMEOUT_S.
    """

    audit: str
    bind: str
    mpi: str
    srun_args: tuple[str, ...]
    placement: str
    python: tuple[str, ...]
    num_ranks: int
    run_dir: str
    requeue_after_s: int
    start_timeout_s: float

    @property
    def program(self) -> tuple[str, ...]:
        """The words that run hpcpace; `-P` keeps Python from looking for modules in the working folder."""
        if self.python:
            return (*self.python, "-P", "-m", "hpcpace")
        return (sys.executable, "-P", "-m", "hpcpace") if sys.argv[0].endswith(".py") else (sys.argv[0],)


def read_settings(environ: Mapping[str, str]) -> BatchSettings:
    """Return the settings of a batch job.

    Raises:
        UsageError: a variable has a value that it cannot have.
    """
    start_timeout_s = environ.get("HPCPACE_WORLD_START_TIMEOUT_S") or "120"
    if not _SECONDS.fullmatch(start_timeout_s):
        raise UsageError(f"HPCPACE_WORLD_START_TIMEOUT_S is {shown(start_timeout_s)}: it must be a number of seconds")
    settings = BatchSettings(
        audit=_choice(environ, "HPCPACE_AUDIT", AUDITS, "warn"),
        bind=_choice(environ, "HPCPACE_BIND", BINDS, "off"),
        mpi=environ.get("HPCPACE_MPI", ""),
        srun_args=_words(environ, "HPCPACE_SRUN_ARGS"),
        placement=environ.get("HPCPACE_PLACEMENT", ""),
        python=_words(environ, "HPCPACE_PYTHON"),
        num_ranks=whole_number(environ, "HPCPACE_RANKS", 4),
        run_dir=environ.get("HPCPACE_RUN_DIR", ""),
        requeue_after_s=whole_number(environ, "HPCPACE_REQUEUE_AFTER_S", 300),
        start_timeout_s=float(start_timeout_s),
    )
    if settings.bind == "auto" and settings.audit == "off":
        raise UsageError("HPCPACE_BIND=auto takes its masks from the audit, but HPCPACE_AUDIT is off: set it to warn")
    return settings


def _choice(environ: Mapping[str, str], name: str, choices: tuple[str, ...], default: str) -> str:
    value = environ.get(name) or default
    if value not in choices:
        raise UsageError(f"{name} is {shown(value)}: it must be {', '.join(choices[:-1])} or {choices[-1]}")
    return value


def _words(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the words of a variable; quotes keep blanks, as in a shell, and nothing is run or expanded."""
    try:
        return tuple(shlex.split(environ.get(name, "")))
    except ValueError as error:
        raise UsageError(f"{name} has a quote that is not closed ({error}): close it, or leave it out") from None


_PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_PROBE_TIMEOUT_S = 30.0
# The first words that occur in a library's version decide; each has the types that it speaks, the best one first.
_TYPES = {
    "open mpi": ("pmix",),
    "cray": ("cray_shasta", "pmi2"),
    "mpich": ("pmi2", "cray_shasta"),
    "mvapich": ("pmi2",),
    "intel": ("pmi2",),
}


def mpi_option(environ: Mapping[str, str], python: Sequence[str]) -> tuple[str, str]:
    """Return srun's option for the MPI library of the ranks, and the library; the option is empty if nothing is wrong.

    Args:
        environ: environment of the job.
        python: words that run the Python of the ranks.
    """
    offered = _output(["srun", "--mpi=list"], environ).split()
    if not offered:
        return "", ""
    library = _output([*python, "-P", "-c", _PROBE], environ)
    spoken = spoken_types(library)
    default = environ.get("SLURM_MPI_TYPE") or _default_type(_output(["scontrol", "show", "config"], environ))
    # pmix_v4 is a version of pmix.
    if not spoken or default.partition("_v")[0] in spoken:
        return "", library
    return next((f"--mpi={name}" for name in spoken if name in offered), ""), library


def spoken_types(library: str) -> tuple[str, ...]:
    """Return the types that a library speaks, the best one first; empty for a library that is not known."""
    lowered = library.lower()
    return next((types for word, types in _TYPES.items() if word in lowered), ())


def _default_type(config: str) -> str:
    lines = (line.partition("=") for line in config.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "MpiDefault"), "")


def _output(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return what a command prints to stdout; nothing if it fails."""
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def choose_binding(launch: Launch, snapshots: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return srun's option that binds the ranks of a launch as their audit proposes, and a line on what was chosen.

    The option is empty if ranks stay as they are.

    Args:
        launch: starts the ranks.
        snapshots: what their audit has saved.
        environ: environment of the job.
    """
    option, reason = _proposed_binding(launch, snapshots, environ)
    line = f"{option} for {reason}" if option else f"ranks are not bound: {reason}"
    return option, f"HPCPACE_BIND=auto: {line}"


def _proposed_binding(launch: Launch, snapshots: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return srun's option and the ranks that it binds; or an empty option, and why ranks are not bound."""
    # The rules of the audit take longer to load than all of the job control.
    from hpcpace.audit.job import AuditedJob
    from hpcpace.audit.rulebook import BINDING_RULES, audit
    from hpcpace.audit.snapshot_files import load_snapshots
    from hpcpace.core.settings import load_config

    if launch.allocation is None:
        return "", "ranks are bound by srun, and this is no Slurm job"
    if any(option.startswith("--cpu-bind") for option in launch.options):
        return "", "HPCPACE_SRUN_ARGS has a --cpu-bind, which stays"
    if len(launch.allocation.components) > 1:
        return "", "srun takes one list of masks, and the components of a heterogeneous job need their own"
    try:
        found, _ = load_snapshots(snapshots)
        bindings = audit(AuditedJob(found, load_config(environ=environ).of(AuditConfig)), ids=BINDING_RULES).bindings
    except HpcpaceError as error:
        return "", str(error)
    if not bindings:
        return "", "a node has one rank, which may use all CPUs of the job there"
    if len(found) < launch.allocation.num_nodes:
        return "", f"the audit has seen {len(found)} of {launch.allocation.num_nodes} nodes"
    binding = bindings[0]
    if binding.option and (len(bindings) > 1 or len(binding.hosts) < len(found)):
        return "", "srun takes one list of masks, and the audit proposes different ones for different nodes"
    ranks = f"the {binding.num_tasks} ranks on each of {compress(binding.hosts)}"
    return binding.option, ranks if binding.option else binding.reason


# An audit takes seconds; one that hangs, as on a dead node, must not hold up the job.
_AUDIT_TIMEOUT_S = 120.0
# Linux takes 255 bytes; the audit is in the folder NAME-audit.
_MAX_NAME_BYTES = 249


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What every command of a batch job needs.

    Attributes:
        settings: settings of the job.
        allocation: the job in Slurm; None without Slurm.
        control: runs commands, and knows which signals have come.
        launch: starts ranks.
        environ: environment of the job.
    """

    settings: BatchSettings
    allocation: Allocation | None
    control: JobControl
    launch: Launch
    environ: Mapping[str, str]

    @property
    def num_tasks(self) -> int:
        """Number of ranks."""
        return self.settings.num_ranks if self.allocation is None else self.allocation.num_tasks

    @property
    def num_restarts(self) -> int:
        """How often Slurm has requeued the job."""
        return 0 if self.allocation is None else self.allocation.num_restarts

    def run_dir(self) -> Path:
        """Return the folder of the run: an array's elements have one each, and a requeued job keeps its own."""
        if self.settings.run_dir:
            element = "" if self.allocation is None else self.allocation.element
            return Path(f"{self.settings.run_dir}-{element}" if element else self.settings.run_dir)
        job = time.strftime("%Y%m%d-%H%M%S") if self.allocation is None else self.allocation.job
        return Path("runs", f"{job}-{self.control.name}")

    def rebound(self, snapshots: Path) -> BatchJob:
        """Return the job with the binding that HPCPACE_BIND asks for, and say which one that is."""
        if self.settings.bind == "off":
            return self
        option, line = choose_binding(self.launch, snapshots, self.environ)
        self.control.say(line)
        options = (*self.launch.options, *([option] if option else []))
        return dataclasses.replace(self, launch=dataclasses.replace(self.launch, options=options))


def prepare_job(name: str, environ: Mapping[str, str]) -> BatchJob:
    """Return the job that this process controls, and say what was chosen for it.

    Raises:
        UsageError: a variable is wrong, srun is missing, or this process is itself one of several tasks.
    """
    settings = read_settings(environ)
    allocation = read_allocation(environ)
    if allocation is not None:
        _check_place(allocation, environ)
    control = JobControl(name, None if allocation is None else allocation.job)
    options: tuple[str, ...] = ()
    if allocation is not None:
        gpu = gpu_options(environ, settings.srun_args)
        for option in gpu:
            control.say(f"srun {option}: each rank gets its own slice of a GPU (MIG)")
        options = (*_mpi_options(settings, environ, control), *settings.srun_args, *gpu)
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    placement = placement_options(settings.placement, allocation, nodes, settings.srun_args)
    launch = Launch(program=settings.program, allocation=allocation, options=options, placement=placement)
    return BatchJob(settings=settings, allocation=allocation, control=control, launch=launch, environ=environ)


def audit_ranks(job: BatchJob, snapshots: Path, options: Sequence[str] = ()) -> int:
    """Audit the ranks of a job with the training's options of srun, and return the status of the audit.

    Args:
        job: the job.
        snapshots: folder to save snapshots in.
        options: further options of `hpcpace audit`.
    """
    # Rank 0 exits with the code of the findings, which must not end the other ranks.
    command = job.launch.command(["audit", "--save", str(snapshots), *options], "--kill-on-bad-exit=0")
    return job.control.run_ranks(command, job.launch.environ(job.environ), timeout_s=_AUDIT_TIMEOUT_S)


def audit_only(job: BatchJob, options: Sequence[str]) -> int:
    """Audit the ranks of a job, with nothing behind it, and return the exit status of the job."""
    check_length(job.run_dir())
    status = audit_ranks(job, snapshot_folder(job, job.run_dir()), options)
    if status == TIMED_OUT:
        job.control.say(f"not finished after {_AUDIT_TIMEOUT_S:g} s: a node may be dead")
    return job.control.ended_by or status


def audit_first(job: BatchJob, folder: Path) -> int | None:
    """Audit a job before its training, as HPCPACE_AUDIT says.

    Args:
        job: the job.
        folder: where to keep snapshots, by attempts.

    Returns:
        The exit status of the job if it ends here: a signal came, or the audit has found a failure under `strict`.
    """
    if job.settings.audit == "off":
        return None
    status = audit_ranks(job, snapshot_folder(job, folder))
    if job.control.ended_by:
        return job.control.ended_by
    if job.control.is_early:
        job.control.say("not trained: the time limit came near before training began; request a longer one (-t)")
        return EXIT_WARNING
    if status == EXIT_FAILED and job.settings.audit == "strict":
        job.control.say("not trained: the audit has found a failure (F), see above; HPCPACE_AUDIT=warn trains anyway")
        return EXIT_FAILED
    if status not in (EXIT_OK, EXIT_WARNING, EXIT_CANNOT_TELL, EXIT_FAILED):
        job.control.say(f"no audit: 'hpcpace audit' ended with status {status}")
    return None


def check_length(run_dir: Path) -> None:
    """Refuse a run directory that no file system takes, before the job waits for nodes, audits, and fails.

    Raises:
        UsageError: a name in it is too long.
    """
    longest = max(run_dir.parts, key=lambda part: len(os.fsencode(part)), default="")
    if len(os.fsencode(longest)) > _MAX_NAME_BYTES:
        raise UsageError(
            f"a folder of the run is called {shown(longest)}: a name has at most {_MAX_NAME_BYTES} bytes; choose "
            "another with HPCPACE_RUN_DIR or --name"
        )


def snapshot_folder(job: BatchJob, folder: Path) -> Path:
    """Return where the audit of this attempt keeps its snapshots."""
    return folder / f"attempt-{job.num_restarts}" / "snapshot"


def _check_place(allocation: Allocation, environ: Mapping[str, str]) -> None:
    if environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise UsageError(
            f"hpcpace batch starts the ranks by itself, but srun has started it as {environ['SLURM_STEP_NUM_TASKS']} "
            "tasks: leave srun out"
        )
    if shutil.which("srun", path=environ.get("PATH")) is None:
        raise UsageError(
            f"this is Slurm job {allocation.job}, but there is no srun on PATH: load the site's module of Slurm in "
            "HPCPACE_PRELUDE; with containers install hpcpace on the host as well (hpcpace help site)"
        )


def _mpi_options(settings: BatchSettings, environ: Mapping[str, str], control: JobControl) -> tuple[str, ...]:
    if settings.mpi:
        return (f"--mpi={settings.mpi}",)
    # The image of a container that srun enters has a library of its own.
    if any(option.startswith(("--mpi", "--container-image")) for option in settings.srun_args):
        return ()
    option, library = mpi_option(environ, settings.python or (sys.executable,))
    if not option:
        return ()
    control.say(f"srun {option}: it matches the MPI of the ranks, {library.split(',')[0].strip()}")
    return (option,)


# Sequences or images of a task in each step; four sequences divide into four microbatches on every mesh.
_SAMPLES_PER_TASK = {"gpt2": 4, "resnet18": 32}


def training_options(layout: str, workload: str, num_tasks: int, environ: Mapping[str, str]) -> list[str]:
    """Return the options of `hpcpace train WORKLOAD` for a layout; those of the user, behind them, win.

    Args:
        layout: `data`, `pipeline` (two stages; as many as tasks if their number is odd), `tensor` (four slices, or two,
            or none, whichever divides the number of tasks) or `zero` (data, with everything sharded).
        workload: `gpt2` or `resnet18`.
        num_tasks: number of ranks.
        environ: environment; HPCPACE_TRAIN_MESH, _BATCH_SIZE and _ZERO replace what is chosen here.
    """
    stages = (num_tasks if num_tasks % 2 else 2) if layout == "pipeline" else 1
    slices = next(n for n in (4, 2, 1) if num_tasks % n == 0) if layout == "tensor" else 1
    mesh = f"dp={num_tasks // (stages * slices)},pp={stages},tp={slices}"
    batch_size = _SAMPLES_PER_TASK.get(workload, 1) * num_tasks
    options = ["--mesh", environ.get("HPCPACE_TRAIN_MESH") or mesh]
    options += ["--batch-size", environ.get("HPCPACE_TRAIN_BATCH_SIZE") or str(batch_size)]
    if layout == "zero":
        # A single task has nothing to shard.
        options += ["--zero", environ.get("HPCPACE_TRAIN_ZERO") or ("3" if num_tasks > 1 else "0")]
    return options


_MAX_FAILURES = 2


def run_series(job: BatchJob, words: Sequence[str]) -> int:
    """Do all open runs of this job's layout, and return the exit status of the job.

    A run that ends the ranks, for example out of memory, costs one start; the study then continues with the next run.

    Args:
        job: the job.
        words: folder of the study.

    Raises:
        UsageError: tasks are not equally many on each node, or new starts make no progress.
    """
    from hpcpace.studies.setups import (
        StudyFolder,  # only studies need it
        parse_layout,
    )

    if job.allocation is None or len(words) != 1:
        raise UsageError("hpcpace batch -- study series STUDY runs in a Slurm job: sbatch/nano_cluster.sh submits it")
    study, num_nodes = StudyFolder(Path(words[0])), job.allocation.num_nodes
    if job.num_tasks % num_nodes:
        raise UsageError(f"{job.num_tasks} tasks on {num_nodes} nodes: ask for as many on each (--ntasks-per-node)")
    name = f"{num_nodes}x{job.num_tasks // num_nodes}"
    layout = parse_layout(name)
    command = job.launch.command(["study", "series", words[0], "--layout", name], "--kill-on-bad-exit=1")
    before = len(study.open_runs(layout))
    if before and (ended := audit_first(job, study.path / "audit" / name)) is not None:
        return ended
    failures = 0
    while before:
        status = job.control.run_ranks(command, job.launch.environ(job.environ))
        # Another start does not help after a wrong launch or a signal that ends the job.
        if job.control.ended_by or status in (EXIT_WARNING, EXIT_USAGE):
            return job.control.ended_by or status
        after = len(study.open_runs(layout))
        failures = 0 if after < before else failures + 1
        if failures > _MAX_FAILURES:
            raise UsageError(f"layout {name}: {after} runs are left, but new starts make no progress (status {status})")
        before = after
    job.control.run_untold([*job.launch.program, "study", "status", words[0]], job.environ)
    return EXIT_OK


_TERMINATED = 143
# A node that has died must not hold up the report.
_COLLECT_STARTS_IN_S = 60.0
_FIRST_OF_SHELL, _LAST_OF_SHELL = 126, 128


def train(job: BatchJob, layout: str, words: Sequence[str]) -> int:
    """Train, report, and return the exit status of the job.

    That is the status of the training, or 128 plus the number of the signal that ended the job.

    Args:
        job: the job.
        layout: how ranks are laid out if the user gives no mesh; one of `hpcpace.batch.job.LAYOUTS`.
        words: the workload, and options of `hpcpace train WORKLOAD`.

    Raises:
        UsageError: the folder of the run belongs to another one, or its name is too long.
        MeshError: the mesh of the user does not fit the tasks of the job.
    """
    run_dir = Path(option_of(words, "--run-dir") or job.run_dir())
    check_length(run_dir)
    # Before the audit, which takes longer, and in one line instead of one of each rank.
    mesh = option_of(words, "--mesh") or job.environ.get("HPCPACE_TRAIN_MESH")
    if mesh:
        parse_mesh(mesh, _num_ranks(job, words))
    # A requeued job continues in its folder with another attempt; other jobs must not use it.
    if run_dir.exists() and not job.num_restarts:
        raise UsageError(f"{printable(str(run_dir))} exists already: name another folder with HPCPACE_RUN_DIR")
    audits = Path(f"{_no_option(run_dir)}-audit")
    ended = audit_first(job, audits)
    if ended is not None:
        return ended
    unbound, job = job, job.rebound(snapshot_folder(job, audits))
    started_s = time.monotonic()
    status = _train_ranks(job, run_dir, _train_words(job, layout, run_dir, words))
    if status not in (EXIT_OK, EXIT_WARNING):
        _collect(unbound, run_dir, words)
    _report(job, run_dir)
    if job.control.is_early and not job.control.ended_by and status == EXIT_WARNING and job.allocation is not None:
        _requeue(job, job.allocation.job, time.monotonic() - started_s)
    return job.control.ended_by or status


def option_of(words: Sequence[str], name: str) -> str | None:
    """Return the value of an option in a command line, the last one if it is given several times."""
    value = None
    for word, following in zip(words, (*words[1:], None), strict=True):
        if word == name:
            value = following
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def _train_words(job: BatchJob, layout: str, run_dir: Path, words: Sequence[str]) -> list[str]:
    num_ranks = _num_ranks(job, words)
    line = ["train", words[0], "--run-dir", _no_option(run_dir)]
    if job.allocation is None:
        line += ["--ranks", str(num_ranks)]
    return [*line, *training_options(layout, words[0], num_ranks, job.environ), *words[1:]]


def _num_ranks(job: BatchJob, words: Sequence[str]) -> int:
    """Return the number of ranks: the tasks of a Slurm job, elsewhere also from `--ranks`."""
    given = option_of(words, "--ranks")
    return int(given) if job.allocation is None and given and given.isdecimal() else job.num_tasks


def _no_option(run_dir: Path) -> str:
    """Return a folder as an argument; its name may begin with a dash and must not be taken for an option."""
    return f"./{run_dir}" if str(run_dir).startswith("-") else str(run_dir)


def _train_ranks(job: BatchJob, run_dir: Path, words: Sequence[str]) -> int:
    """Run the training, once more if its ranks did not start, and return its status."""
    control, run = job.control, RunDirectory(run_dir)
    command = job.launch.command(words, "--label", "--kill-on-bad-exit=1")
    timeout_s = job.settings.start_timeout_s
    environ = {
        **job.launch.environ(job.environ),
        "HPCPACE_WORLD_START_TIMEOUT_S": f"{timeout_s:g}",
        SUMMARY_VARIABLE: "false",
    }
    num_before = len(run.attempts())
    started_s = time.monotonic()
    status = control.run_ranks(command, environ)
    # Ranks that fail in MPI startup have lost nothing. Slurm's pmi2 takes the first 1,024 bytes that it reads for a
    # whole line, but MPICH may send a longer line: then ranks hang or abort.
    is_failed_start = _may_have_failed_to_start(status, time.monotonic() - started_s, timeout_s)
    if is_failed_start and not control.ended_by and not control.is_early and len(run.attempts()) == num_before:
        control.say("the ranks did not get through the start of MPI; starting them again")
        status = control.run_ranks(command, environ)
    # Status 1 is a training that stopped with a checkpoint. When its first rank exited, srun may have ended others
    # that were about to exit.
    if status == _TERMINATED and len(run.attempts()) > num_before and _has_stopped(run):
        return EXIT_WARNING
    return status


def _may_have_failed_to_start(status: int, seconds: float, timeout_s: float) -> bool:
    """Return whether ranks that ended so after some seconds, and created no folder, may have failed in MPI startup.

    hpcpace exits with 0 to 4, or with 143 if srun ended ranks before they had refused as well; 126 and 127 mean that
    the command cannot run; MPI aborts with others. Ranks that a signal ended after the startup timeout have hung.
    """
    return EXIT_FAILED < status < _FIRST_OF_SHELL or (status > _LAST_OF_SHELL and seconds >= int(timeout_s))


def _has_stopped(run: RunDirectory) -> bool:
    """Return whether the last attempt of a run stopped early, with a checkpoint: ranks record that before they exit."""
    try:
        return bool(json.loads(run.last_attempt().result_json.read_text())["outcome"] == "stopped")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _collect(job: BatchJob, run_dir: Path, words: Sequence[str]) -> None:
    """Bring home what killed ranks have left on disks of the nodes, where traces are kept there while the job runs."""
    file, given = option_of(words, "--config"), {"trace": {"trace_dir": option_of(words, "--trace-dir")}}
    try:
        trace = load_config(file=None if file is None else Path(file), environ=job.environ, options=given).of(
            TraceConfig
        )
    except ConfigError:  # the training has said so
        return
    if trace.trace_dir is None or not RunDirectory(run_dir).attempts():
        return
    command = job.launch.command(["collect", "--quiet", _no_option(run_dir)], "--kill-on-bad-exit=0", per_node=True)
    timeout_s = trace.copy_timeout_s + _COLLECT_STARTS_IN_S
    status = job.control.run_ranks(command, job.launch.environ(job.environ), timeout_s=timeout_s)
    if status and not job.control.ended_by:
        job.control.say(f"traces may be left on disks of nodes: 'hpcpace collect' ended with status {status}")


def _report(job: BatchJob, run_dir: Path) -> None:
    status = job.control.run_untold([*job.launch.program, "report", _no_option(run_dir)], job.environ)
    # Status 1 is a report that found something, 3 one that is not sure.
    if status not in (EXIT_OK, EXIT_WARNING, EXIT_CANNOT_TELL):
        job.control.say(f"no report, 'hpcpace report' ended with status {status}")


def _requeue(job: BatchJob, name: str, trained_s: float) -> None:
    """Requeue the job, which then resumes from its checkpoint."""
    if trained_s < job.settings.requeue_after_s:
        job.control.say(f"not requeued: trained for only {int(trained_s)} s; request a longer time limit (-t)")
        return
    # Slurm ends the batch script along with the job that it requeues.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if succeeds(["scontrol", "requeue", name]):
        job.control.say("requeued, resumes from its checkpoint")
    else:
        job.control.say("not requeued: submit a job with --resume and the folder of this run")
