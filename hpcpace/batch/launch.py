"""The Slurm allocation of a batch job, how its ranks start, and the signals that end them.

At scancel and at the time limit Slurm sends SIGTERM to every task, to the batch script and to srun, and SIGKILL
KillWait seconds later (30 by default); the report must be done by then. `--signal=B:USR1@120` sends SIGUSR1 to the
script alone. Elements of a job array and the components of a heterogeneous job have variables of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hpcpace.core.environment import expand_tasks_per_node, process_redaction
from hpcpace.core.errors import UsageError, WorldError
from hpcpace.core.hostlist import expand, read_placement, short_list
from hpcpace.core.records import dataclass
from hpcpace.core.text import printable, shown

_WHOLE = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, kw_only=True)
class Component:
    """Nodes that were asked for with one set of options; a job that is not heterogeneous has one component.

    Attributes:
        num_nodes: number of nodes.
        num_tasks: number of tasks, which need not be equally many on each node.
        cpus_per_task: CPUs of a task.
        has_cpus_of_gpus: whether a task gets its CPUs with its GPUs (`--cpus-per-gpu`), which excludes srun's `-c`.
    """

    num_nodes: int
    num_tasks: int
    cpus_per_task: int
    has_cpus_of_gpus: bool = False


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes and tasks of a job.

    Attributes:
        job: the job as Slurm's commands take it. `SLURM_JOB_ID` of one element of an array is the id of the whole
            array, and what is sent there reaches all elements; an element alone is `15_3`.
        element: number of the element in its array; empty outside of one.
        components: components of the job, in the order of their ranks.
        num_restarts: how often the job was requeued.
    """

    job: str
    element: str = ""
    components: tuple[Component, ...]
    num_restarts: int = 0

    @property
    def num_tasks(self) -> int:
        """Number of tasks of all components."""
        return sum(component.num_tasks for component in self.components)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all components."""
        return sum(component.num_nodes for component in self.components)


def read_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that this process runs in; None outside of Slurm.

    Raises:
        UsageError: a variable of Slurm is not what Slurm sets.
    """
    if not environ.get("SLURM_JOB_ID"):
        return None
    # These name folders, and go to commands of Slurm as they are.
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        whole_number(environ, name, 0)
    size = whole_number(environ, "SLURM_HET_SIZE", 1)
    suffixes = [f"_HET_GROUP_{number}" for number in range(size)] if size > 1 else [""]
    array, element = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return Allocation(
        job=f"{array}_{element}" if array and element else environ["SLURM_JOB_ID"],
        element=element if array else "",
        components=tuple(_component(environ, suffix) for suffix in suffixes),
        num_restarts=whole_number(environ, "SLURM_RESTART_COUNT", 0),
    )


def whole_number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable that is a whole number.

    Raises:
        UsageError: it is something else.
    """
    text = environ.get(name) or str(default)
    if not _WHOLE.fullmatch(text):
        raise UsageError(f"{name} is {shown(text)}: it must be a whole number")
    return int(text)


def _component(environ: Mapping[str, str], suffix: str) -> Component:
    num_nodes = whole_number(environ, f"SLURM_JOB_NUM_NODES{suffix}", 1)
    per_node = whole_number(environ, f"SLURM_NTASKS_PER_NODE{suffix}", 0)
    num_tasks = whole_number(environ, f"SLURM_NTASKS{suffix}", 0) or num_nodes * per_node
    of_gpus = whole_number(environ, f"SLURM_CPUS_PER_GPU{suffix}", 0)
    of_task = whole_number(environ, f"SLURM_CPUS_PER_TASK{suffix}", 0)
    return Component(
        num_nodes=num_nodes,
        num_tasks=num_tasks or _tasks_of_nodes(environ, suffix) or num_nodes,
        cpus_per_task=of_task or of_gpus or 1,
        has_cpus_of_gpus=of_gpus > 0 and not of_task,
    )


def _tasks_of_nodes(environ: Mapping[str, str], suffix: str) -> int:
    """Return the sum of `2(x3),1`, which Slurm reckons where nobody asked for a number of tasks (`salloc -N4`)."""
    name = f"SLURM_TASKS_PER_NODE{suffix}"
    try:
        return sum(expand_tasks_per_node(environ.get(name, "")))
    except WorldError:
        raise UsageError(f"{name} is {shown(environ[name])}: it must be counts like 2(x3),1") from None


TIMED_OUT = 124
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_KILL_AFTER_S = 10.0
_ENDS = {signal.SIGTERM: "cancelled, out of time, or a node has failed", signal.SIGINT: "interrupted"}


class JobControl:
    """Runs the commands of a job one after the other, and passes signals on to the one that runs.

    Attributes:
        name: name of the job, in front of all that it says.
        job: the job as scancel takes it; None without Slurm.
        ended_by: 128 plus the number of the signal that ends the job; 0 without one.
        is_early: whether SIGUSR1 has warned the job that its time limit is near.
    """

    def __init__(self, name: str, job: str | None) -> None:
        self.name = name
        self.job = job
        self.ended_by = 0
        self.is_early = False
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> JobControl:
        for number in (*_ENDS, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def say(self, text: str) -> None:
        """Print one line about the job to stderr."""
        text = process_redaction().text(text)
        # A signal may interrupt any write, and its handler must not write to the same buffer.
        with suppress(OSError):
            os.write(2, f"{printable(self.name)}: {printable(text)}\n".encode(errors="backslashreplace"))

    def run_ranks(self, command: Sequence[str], environ: Mapping[str, str], *, timeout_s: float | None = None) -> int:
        """Run a command that gets the signals of the job, and return its exit status, as a shell would give it.

        A job that a signal has ended starts nothing more, and the status is that of the signal. After `timeout_s`
        seconds the command is ended, and the status is 124.
        """
        if self.ended_by:
            return self.ended_by
        sys.stdout.flush()
        try:
            # Ctrl-C reaches all processes of a terminal, and srun would ask for another one: this process handles it.
            self._process = _start(command, environ, ignored=signal.SIGINT)
        except OSError as error:
            self.say(f"cannot run {command[0]}: {error.strerror}")
            return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        try:
            # Signals that arrived while it started.
            self._pass_on()
            return _status(self._process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(_KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            return TIMED_OUT
        finally:
            self._process = None

    def run_untold(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run a command to its end whatever signals say, and return its exit status, as a shell would give it.

        Slurm repeats SIGTERM, and srun may have ended before this process received the first one.
        """
        sys.stdout.flush()
        try:
            return _status(_start(command, environ, ignored=signal.SIGTERM).wait())
        except OSError as error:
            self.say(f"cannot run {command[0]}: {error.strerror}")
            return _NOT_FOUND

    def _note(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number)
        if name == signal.SIGUSR1:
            if not self.is_early:
                self.say("the time limit is near (SIGUSR1): writing a checkpoint and stopping")
            self.is_early = True
        else:
            if not self.ended_by:
                self.say(f"{_ENDS[name]} ({name.name})")
            self.ended_by = 128 + number
            name = signal.SIGTERM
        self._unsent = name
        self._pass_on()

    def _pass_on(self) -> None:
        """Send a signal that is not sent yet to the ranks, if they run."""
        if self._process is None or self._unsent is None:
            return
        name, self._unsent = self._unsent, None
        # srun would answer SIGTERM with SIGKILL to the ranks.
        scancel = ["scancel", f"--signal={name.name.removeprefix('SIG')}"]
        if self.job is None or not succeeds([*scancel, self.job], is_quiet=True):
            self._process.send_signal(name)


def succeeds(command: Sequence[str], *, is_quiet: bool = False) -> bool:
    """Run one of Slurm's commands, and return whether it ended with status 0."""
    errors = subprocess.DEVNULL if is_quiet else None
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, stderr=errors).returncode == 0
    except OSError:
        return False


def _start(command: Sequence[str], environ: Mapping[str, str], *, ignored: signal.Signals) -> subprocess.Popen[bytes]:
    def ignore() -> None:
        signal.signal(ignored, signal.SIG_IGN)

    return subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, preexec_fn=ignore)


def _status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the ranks of a job are started, the same for its audit and its training.

    Attributes:
        program: words that run hpcpace.
        allocation: the job in Slurm; None without Slurm.
        options: options of srun for all ranks, such as `--mpi=pmi2`.
        placement: options of srun that give each rank its host, which do not hold for what runs once on each node.
    """

    program: tuple[str, ...]
    allocation: Allocation | None
    options: tuple[str, ...] = ()
    placement: tuple[str, ...] = ()

    def command(self, words: Sequence[str], *options: str, per_node: bool = False) -> list[str]:
        """Return the command line that runs `hpcpace WORDS` as every rank, or once on each node.

        Args:
            words: command of hpcpace and its arguments.
            options: options of srun for this start only.
            per_node: whether to run it once on each node.
        """
        ranks = [*self.program, *words]
        if self.allocation is None:
            return ranks
        components = self.allocation.components
        line = ["srun"]
        for number, component in enumerate(components):
            group = [f"--het-group={number}"] if len(components) > 1 else []
            line += [":"] if number else []
            # Since Slurm 22.05 srun no longer inherits the CPUs per task from the job, so -c is repeated. It excludes
            # the CPUs per GPU, which srun does inherit.
            cpus = [] if component.has_cpus_of_gpus else ["-c", str(component.cpus_per_task)]
            tasks = ["--ntasks", str(component.num_nodes if per_node else component.num_tasks), *cpus]
            tasks += ["--ntasks-per-node=1"] if per_node else self.placement
            line += [*tasks, *options, *self.options, *group, *ranks]
        return line

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the ranks: unbuffered output, and under Slurm the threads that their CPUs allow."""
        # Otherwise the last lines of a killed rank stay in Python's buffer.
        made = {**environ, "PYTHONUNBUFFERED": "1"}
        if self.allocation is not None:
            fewest = min(component.cpus_per_task for component in self.allocation.components)
            made["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS") or str(fewest)
        return made


def gpu_options(environ: Mapping[str, str], options: Sequence[str]) -> tuple[str, ...]:
    """Return what srun needs to give each rank its own slice where the GPUs of a node are slices (MIG).

    CUDA shows a process only the first slice in CUDA_VISIBLE_DEVICES, so all ranks of a node would share it.
    """
    slices = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.startswith("MIG-")]
    chosen = "--gpu-bind", "--gpus-per-task", "--gres"
    is_chosen = any(option.startswith(chosen) for option in options)
    is_bound = environ.get("SLURM_GPU_BIND") or environ.get("SLURM_GPUS_PER_TASK")
    return () if len(slices) < 2 or is_chosen or is_bound else ("--gpu-bind=per_task:1",)


def placement_options(
    file: str, allocation: Allocation | None, nodes: str, options: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return what srun needs to start each rank on the host that a file of `hpcpace place` has for it.

    Args:
        file: the host of each rank, one on a line; empty for none.
        allocation: the job; None outside of Slurm.
        nodes: of the job, as Slurm's list.
        options: of srun that the user gives.

    Raises:
        UsageError: the file cannot be read, or is of another number of ranks, or of other hosts, or the user's options
            distribute ranks, too.
    """
    if not file:
        return ()
    if others := [option for option in options if option.startswith(("-m", "-w", "--distribution", "--nodelist"))]:
        raise UsageError(f"HPCPACE_PLACEMENT and HPCPACE_SRUN_ARGS ({others[0]}) both place ranks: leave one out")
    named = f"HPCPACE_PLACEMENT={shown(file)}"
    if allocation is None or len(allocation.components) > 1:
        kind = "this is no Slurm job" if allocation is None else "the components of a heterogeneous job have one each"
        raise UsageError(f"{named} gives srun one list of hosts, and {kind}: leave it out")
    try:
        hosts = read_placement(Path(file))
        strangers = set(hosts) ^ set(expand(nodes))
    except (OSError, ValueError) as error:
        raise UsageError(f"{named} cannot be read: {printable(str(error))}") from None
    if len(hosts) != allocation.num_tasks:
        raise UsageError(f"{named} has hosts for {len(hosts)} ranks, and the job has {allocation.num_tasks}")
    if strangers:
        raise UsageError(f"{named} and the job have different hosts ({short_list(strangers)}): use sbatch --nodelist")
    return ("--distribution=arbitrary", f"--nodelist={Path(file).absolute()}")


def program_path() -> str:
    """Return the path of this hpcpace, for jobs that do not have it on PATH.

    Raises:
        UsageError: it was started as a module, and has no program beside its Python.
    """
    started_as = Path(sys.argv[0])
    found = shutil.which(started_as) if started_as.suffix != ".py" else None
    program = Path(found).absolute() if found else Path(sys.executable).with_name("hpcpace")
    if not program.exists():
        raise UsageError(f"no program {program}: install hpcpace with pip, so that a job script can call it")
    return str(program)
