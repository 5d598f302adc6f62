"""The kind of all commands: headings and examples in the help, mistakes in one error, and limits of memory.

Libraries (HDF5, OpenBLAS) crash or wait for ever where they get no memory. So a command does not start without room for
itself and its libraries, and it runs in a child process: its death is reported as a lack of memory. Without a
limit, Linux grants addresses that it does not have, and nothing here applies.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import click

from hpcpace.core.environment import process_environ, process_redaction, rank_info, set_environ_default
from hpcpace.core.errors import EXIT_USAGE, HpcpaceError, NotEnoughMemory

_OTHER = "Other"


class Command(click.Command):
    """A command whose options stand under headings, and that reports every wrong option and argument at once."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, one list below each heading."""
        by_heading: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                by_heading.setdefault(getattr(param, "heading", ""), []).append(record)
        for heading, records in by_heading.items():
            with formatter.section(heading or (_OTHER if len(by_heading) > 1 else "Options")):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write two examples, each in a line, to be copied."""
        with formatter.section("Examples"):
            for example in EXAMPLES[ctx.command_path.partition(" ")[2]]:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line.

        Raises:
            click.UsageError: with all mistakes in it.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            mistakes = self._mistakes(ctx, given)
            if len(mistakes) < 2:
                raise click.UsageError(_without_secrets(error.format_message()), error.ctx) from None
            lines = "".join(f"\n  {_without_secrets(mistake.format_message())}" for mistake in mistakes)
            raise click.UsageError(f"{len(mistakes)} mistakes:{lines}", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of hpcpace learns how much of it the user wants to see."""
        try:
            return super().invoke(ctx)
        except HpcpaceError as error:
            if error.is_verbose is None:
                error.is_verbose = ctx.params.get("is_verbose")
            raise

    def _mistakes(self, ctx: click.Context, args: list[str]) -> list[click.UsageError]:
        """Return what is wrong with a command line: unknown options first, then values."""
        mistakes: list[click.UsageError] = []
        values: Mapping[str, Any] | None = None
        rest: list[str] = []
        while values is None:
            try:
                values, rest, _ = self.make_parser(ctx).parse_args(list(args))
            except (click.NoSuchOption, click.BadOptionUsage) as error:
                mistakes.append(error)
                others = [word for word in args if word.partition("=")[0] != error.option_name]
                if len(others) == len(args):
                    return mistakes
                args = others
        is_shifted = bool(mistakes)  # the value of an unknown option now passes for an argument
        for param in self.get_params(ctx):
            if param.is_eager or (is_shifted and isinstance(param, click.Argument)):
                continue
            try:
                param.handle_parse_result(ctx, values, [])
            except click.UsageError as error:
                mistakes.append(error)
        if rest and not is_shifted and not ctx.allow_extra_args:
            mistakes.append(click.UsageError(f"Got unexpected extra arguments ({' '.join(rest)})", ctx))
        return mistakes


class Group(Command, click.Group):
    """A group that lists its commands in the order in which they are used."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names as they were added."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, and the others."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(_without_secrets(error.format_message()), ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options and the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


def _without_secrets(message: str) -> str:
    return process_redaction().text(message)


class RankZeroCommand(Command):
    """A command of which only rank 0 reports wrong options, because every rank has the same ones."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse options; ranks other than 0 exit without a message."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            try:
                info = rank_info(process_environ())
            except HpcpaceError:
                raise error from None
            if info.rank > 0:
                from hpcpace.world.mpi import let_rank_zero_speak

                let_rank_zero_speak(info)
                ctx.exit(error.exit_code)
            raise


EXAMPLES: dict[str, tuple[str, str]] = {
    "": ("hpcpace trace -- torchrun --nproc-per-node 8 train.py", "hpcpace report"),
    "train": ("hpcpace train gpt2 --ranks 4 --report", "srun hpcpace train resnet18 --batch-size 256"),
    "train gpt2": ("hpcpace train gpt2 --ranks 4 --mesh dp=2,pp=2 --report", "srun hpcpace train gpt2 --preset small"),
    "train resnet18": (
        "hpcpace train resnet18 --ranks 2 --report",
        "mpiexec -n 4 hpcpace train resnet18 --data cifar-10/ --eval-every 100",
    ),
    "trace": (
        "srun hpcpace trace -- train.py --epochs 3",
        "hpcpace trace -- torchrun --nproc-per-node 8 train.py --epochs 3",
    ),
    "switch": ("hpcpace switch runs/1234-train off", "hpcpace switch runs/1234-train --steps 500:520"),
    "watch": ("hpcpace watch runs/1234-train", "hpcpace watch runs/1234-train --once --json"),
    "report": ("hpcpace report runs/1234-train", "hpcpace report runs/1234-train --steps 100:500 --json"),
    "timeline": ("hpcpace timeline", "hpcpace timeline runs/1234-train --steps 100:105 --ranks 0-7"),
    "export": (
        "hpcpace export runs/1234-train -o data",
        "hpcpace export runs/1234-train -o data --format csv --only steps --only parts",
    ),
    "plan": ("hpcpace plan runs/1234-train --nodes 2,4,8", "hpcpace plan --model gpt2-xl --machine a100 --nodes 1,8"),
    "place": (
        "hpcpace place runs/1234-train --topology topology.conf",
        "hpcpace place runs/1234-train --output placement.txt",
    ),
    "hang": ("hpcpace hang runs/1234-train", "hpcpace hang dumps/ job.log --ras ncclras.txt"),
    "compare": ("hpcpace compare runs/before runs/after", "hpcpace compare runs/a1 runs/a2 -- runs/b1 runs/b2"),
    "scale": ("hpcpace scale runs/1-node runs/2-nodes runs/4-nodes", "hpcpace scale measured.csv"),
    "history": ("hpcpace history", "hpcpace history runs --job train --runs 50"),
    "list": ("hpcpace list", "hpcpace list /scratch/team/runs --json"),
    "import": ("hpcpace import kineto profiles/", "hpcpace import nsys job.sqlite"),
    "import kineto": ("hpcpace import kineto profiles/", "hpcpace import kineto rank0.json.gz rank1.json.gz"),
    "import wia": ("hpcpace import wia trace.parquet", "hpcpace import wia job/ --run-dir runs/job"),
    "import nsys": ("hpcpace import nsys job.sqlite", "hpcpace import nsys job.sqlite --run-dir runs/job"),
    "import flight-recorder": (
        "hpcpace import flight-recorder dumps/",
        "hpcpace import flight-recorder dumps/ --timeline last.json",
    ),
    "dump": (
        "hpcpace dump runs/1234-train/attempt-0/trace/rank-00003.h5",
        "hpcpace dump runs/1234-train/attempt-0/trace/rank-00003.h5 --limit 20",
    ),
    "collect": (
        "hpcpace collect runs/1234-train",
        "srun --ntasks-per-node=1 hpcpace collect runs/1234-train",
    ),
    "pack": ("hpcpace pack runs/1234-train", "hpcpace pack runs/1234-train --keep"),
    "probe": ("srun hpcpace probe --json before.json", "srun hpcpace probe --against before.json"),
    "audit": ("hpcpace audit", "srun hpcpace audit --ignore S04"),
    "audit explain": ("hpcpace audit explain N01", "hpcpace audit explain all"),
    "audit diff": ("hpcpace audit diff before/ after/", "hpcpace audit diff n1.json n2.json"),
    "config": ("hpcpace config --changed", "hpcpace config trace diagnosis"),
    "batch": ("hpcpace batch train gpt2 --steps 200", "hpcpace batch audit"),
    "sbatch": ("hpcpace sbatch", "hpcpace sbatch gpt2_pp > job.sh"),
    "task-prolog": ("hpcpace task-prolog", "hpcpace task-prolog --run-dir /scratch/traces"),
    "lab": ("sudo hpcpace lab up --hosts 4 --leaves 2", "sudo hpcpace lab down"),
    "lab up": ("sudo hpcpace lab up --hosts 4 --leaves 2", "sudo hpcpace lab up --link 1gbit --uplink 500mbit"),
    "lab status": ("sudo hpcpace lab status", "sudo hpcpace lab status --json"),
    "lab run": ("sudo hpcpace lab run -- sinfo", "sudo hpcpace lab run -- sbatch --wait -N 4 job.sh"),
    "lab shell": ("sudo hpcpace lab shell", "sudo hpcpace lab shell --on n1"),
    "lab down": ("sudo hpcpace lab down", "sudo hpcpace lab down --name other"),
    "lab truth": ("sudo hpcpace lab truth", "sudo hpcpace lab truth --name other"),
    "lab fault": ("sudo hpcpace lab fault slow-host n3 --cores 0.25", "sudo hpcpace lab fault undo f1"),
    "lab fault slow-host": (
        "sudo hpcpace lab fault slow-host n3",
        "sudo hpcpace lab fault slow-host n3 --cores 0.5 --duration 30",
    ),
    "lab fault slow-link": (
        "sudo hpcpace lab fault slow-link leaf1 --rate 100mbit",
        "sudo hpcpace lab fault slow-link n3 --rate 100mbit --way up",
    ),
    "lab fault flap-link": (
        "sudo hpcpace lab fault flap-link n2",
        "sudo hpcpace lab fault flap-link n2 --period 4 --down 1 --start 60",
    ),
    "lab fault loss": ("sudo hpcpace lab fault loss n3", "sudo hpcpace lab fault loss n3 --share 0.01"),
    "lab fault latency": ("sudo hpcpace lab fault latency n3", "sudo hpcpace lab fault latency n3 --delay 0.01"),
    "lab fault reorder": (
        "sudo hpcpace lab fault reorder n3",
        "sudo hpcpace lab fault reorder n3 --share 0.05 --delay 0.002",
    ),
    "lab fault traffic": (
        "sudo hpcpace lab fault traffic n1 n3",
        "sudo hpcpace lab fault traffic n1 n3 --rate 300mbit --streams 2",
    ),
    "lab fault neighbour": (
        "sudo hpcpace lab fault neighbour n2",
        "sudo hpcpace lab fault neighbour n2 --load memory --processes 2",
    ),
    "lab fault pause-host": (
        "sudo hpcpace lab fault pause-host n2",
        "sudo hpcpace lab fault pause-host n2 --duration 0.5",
    ),
    "lab fault kill-host": (
        "sudo hpcpace lab fault kill-host n4",
        "sudo hpcpace lab fault kill-host n4 --start 60 --duration 30",
    ),
    "lab fault kill-rank": (
        "sudo hpcpace lab fault kill-rank 1 2",
        "sudo hpcpace lab fault kill-rank 1 2 --signal TERM",
    ),
    "lab fault fill-disk": (
        "sudo hpcpace lab fault fill-disk n1",
        "sudo hpcpace lab fault fill-disk n1 --left 1000000",
    ),
    "lab fault mtu": (
        "sudo hpcpace lab fault mtu n4 --size 9000",
        "sudo hpcpace lab fault mtu n4 --size 1400 --duration 60",
    ),
    "lab fault list": ("sudo hpcpace lab fault list", "sudo hpcpace lab fault list --json"),
    "lab fault undo": ("sudo hpcpace lab fault undo f1", "sudo hpcpace lab fault undo f1 --name other"),
    "study": ("hpcpace study nano-cluster runs/study", "hpcpace study status runs/study"),
    "study nano-cluster": (
        "hpcpace study nano-cluster runs/study",
        "hpcpace study nano-cluster runs/study --layouts 1x1,1x2,2x2 --repetitions 3",
    ),
    "study model-size": (
        "hpcpace study model-size runs/study",
        "hpcpace study model-size runs/study --repetitions 3",
    ),
    "study layouts": ("hpcpace study layouts runs/study", "hpcpace study layouts runs/other"),
    "study left": ("hpcpace study left runs/study", "hpcpace study left runs/study --layout 2x2"),
    "study status": ("hpcpace study status runs/study", "hpcpace study status runs/other"),
    "study series": (
        "mpiexec -n 2 hpcpace study series runs/study --layout 1x2",
        "srun -N 2 -n 4 hpcpace study series runs/study --layout 2x2",
    ),
    "study scaling": (
        "hpcpace study scaling runs/study --nodes 1,2,4",
        "hpcpace study scaling runs/study --faults --ranks-per-node 4",
    ),
    "study scaling-jobs": ("hpcpace study scaling-jobs runs/study", "hpcpace study scaling-jobs runs/other"),
    "study scaling-network": (
        "hpcpace study scaling-network runs/study NAME < status.json",
        "hpcpace study scaling-network runs/other NAME < status.json",
    ),
    "study verdicts": ("hpcpace study verdicts runs/study", "hpcpace study verdicts runs/other"),
    "study pacing": (
        "hpcpace study pacing runs/study",
        "hpcpace study pacing runs/study --policies none,slack --repetitions 5",
    ),
    "completion": ('eval "$(hpcpace completion bash)"', "hpcpace completion fish | source"),
    "help": ("hpcpace help attach", "hpcpace help persistent straggler"),
}
"""By the words that name a command after `hpcpace`; each fits into a terminal of 80 columns."""


# Python, its libraries and a small report take 0.6 GiB of addresses with two threads: `ulimit -v` in steps, by hand.
_MIN_FREE_BYTES = 1 << 30
# How a library dies of a call for memory that it did not check.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def limit_bytes() -> int | None:
    """Return the limit on this process's addresses in bytes, None for none."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)


def go_on_in_child() -> None:
    """Return in a child process, for which this one waits, and ends as it does; report a crash as a lack of memory.

    Raises:
        NotEnoughMemory: the limit leaves too little for any report.
    """
    limit = limit_bytes()
    own_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if limit is not None and limit - own_bytes < _MIN_FREE_BYTES:
        raise NotEnoughMemory(
            f"not enough memory: the limit of {limit >> 20} MiB on addresses leaves {max(limit - own_bytes, 0) >> 20} "
            f"MiB, and reading traces takes at least {_MIN_FREE_BYTES >> 20} MiB: allow more (ulimit -v)"
        )
    set_environ_default("OPENBLAS_NUM_THREADS", "1")  # each thread takes addresses of its own
    sys.stdout.flush()
    sys.stderr.flush()
    if (child := os.fork()) != 0:
        _end_like(child)
    sys.excepthook = _without_hdf5
    sys.unraisablehook = lambda _: None


def leave_child() -> NoReturn:
    """End this process with the exit code of bad input, without the libraries' own ends: they free what is damaged."""
    with contextlib.suppress(OSError, MemoryError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(EXIT_USAGE)


def _end_like(child: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to both
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: os.kill(child, received))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        os._exit(code)
    if -code in _CRASHES:
        os.write(2, _crash_line(signal.Signals(-code)).encode())
        os._exit(EXIT_USAGE)
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def _crash_line(number: signal.Signals) -> str:
    limit = limit_bytes()
    room = "" if limit is None else f" with a limit of {limit >> 20} MiB on addresses"
    return f"hpcpace: not enough memory ({number.name} in a library{room}): allow more (ulimit -v, --mem of the job)\n"


def _without_hdf5(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print a traceback, unless HDF5 could not close an object: that it has lost it is said once, as lack of memory."""
    last = traceback
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or Path(last.tb_frame.f_code.co_filename).parts[:1] != ("h5py",):
        sys.__excepthook__(kind, error, traceback)
