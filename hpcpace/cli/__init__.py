"""The `hpcpace` command: its subcommands' modules load when called, so that `--help` is quick."""

from __future__ import annotations

import importlib
import re
import sys

import click

from hpcpace.cli.commands import Group, go_on_in_child, leave_child, limit_bytes
from hpcpace.core.environment import process_environ, process_redaction, rank_info
from hpcpace.core.errors import EXIT_USAGE, HpcpaceError, NotEnoughMemory, UsageError, WorldError
from hpcpace.core.settings import unknown_sentence, unknown_variables
from hpcpace.core.text import folded_message

HEADINGS = {
    "Record": {
        "trace": "Run your own program and trace its training.",
        "switch": "Change what a running job records.",
        "collect": "Bring traces of killed ranks home from node-local disk.",
        "pack": "Put the trace files of all ranks into a few.",
    },
    "Explain a run": {
        "report": "Say why a run is slow and where its steps went.",
        "watch": "Show what a run does now.",
        "hang": "Say which ranks hold up a job that no longer moves.",
        "timeline": "Write some steps of a run as a file for Perfetto.",
        "export": "Write the data of a run as tables, Parquet or CSV.",
        "dump": "Show what is in a trace file.",
    },
    "Plan the next run": {
        "plan": "Predict what other layouts, nodes and machines would cost.",
        "place": "Find a better host for each rank of the next run.",
    },
    "Several runs": {
        "list": "List runs with their state, verdict and speed.",
        "compare": "Say whether one run is slower than another, and where that comes from.",
        "scale": "Say how a job scales over nodes, and what stops it.",
        "history": "Say what changed over weeks of runs, by job and by host.",
    },
    "Nodes": {
        "probe": "Measure what the network, cores and memory of a job can do.",
        "audit": "Check nodes and bindings, and print the fix for each fault.",
    },
    "Other tools' data": {
        "import": "Read what other tools recorded of a job.",
    },
    "Sites": {
        "batch": "Run a training or an audit as a batch job.",
        "sbatch": "Write a job script.",
        "task-prolog": "Trace the jobs of a site's roll-out, from Slurm's TaskProlog.",
        "config": "Show the settings that hold, and where each comes from.",
    },
    "Try and study": {
        "train": "Train a reference workload and trace it.",
        "lab": "Boot a Slurm cluster on this machine to try things out.",
        "study": "Plan and run a study of how training scales.",
    },
    "Shell": {
        "help": "Show a page of the guide, or what a term means.",
        "completion": "Print the completion script of bash, zsh or fish.",
    },
}
COMMANDS = {name: words for commands in HEADINGS.values() for name, words in commands.items()}

# Commands of one family share a module, and `list` would hide what Python calls so.
_MODULES = {
    "list": "runs",
    "import": "export",
    "switch": "trace",
    "task-prolog": "trace",
    "scale": "compare",
    "history": "compare",
    "timeline": "report",
    "dump": "trace_files",
    "collect": "trace_files",
    "pack": "trace_files",
    "sbatch": "batch",
    "completion": "config",
    "help": "config",
}

# They read traces by libraries that crash for want of memory.
_READERS = ("report", "compare", "scale", "history", "timeline", "export", "plan", "place", "dump", "pack")


class LazyGroup(Group):
    """A group whose subcommands are in modules of hpcpace.cli: `command`, or NAME_command of several in one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of their headings."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load and return one command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"hpcpace.cli.{_MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command", None) or module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names; a mistyped one is refused with the nearest name."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            advice = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(process_redaction().text(f"No such command {name!r}.{advice}"))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without loading any of them."""
        width = max(map(len, COMMANDS))
        for heading, commands in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), words) for name, words in commands.items()])


def _print_version(ctx: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not ctx.resilient_parsing:
        from hpcpace import __version__  # looked up in metadata, by modules that no other option needs

        click.echo(f"hpcpace, version {__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Trace, explain and pace distributed training on Slurm clusters.

    Exit codes: 0 fine, 1 warnings or slower, 2 usage or bad input, 3 cannot tell, 4 failed.
    """
    # The programs of others go on, with a warning of their session; a prolog that fails would drain its node.
    if ctx.invoked_subcommand not in ("trace", "task-prolog", "completion", "help") and "--prolog" not in sys.argv:
        _check_variables()


def _check_variables() -> None:
    """Refuse variables that are mistyped, and warn of others that hpcpace does not know; of all ranks the first speaks.

    Raises:
        UsageError: a variable can only be meant for hpcpace, and is unknown.
    """
    environ = process_environ()
    unknown = unknown_variables(environ)
    if not unknown:
        return
    try:
        info = rank_info(environ)
    except WorldError:  # the command says what is wrong
        info = None
    mistaken = [one for one in unknown if one.is_mistaken]
    if info is not None and info.rank > 0:
        if mistaken:
            from hpcpace.world.mpi import let_rank_zero_speak

            let_rank_zero_speak(info)
            raise SystemExit(EXIT_USAGE)
        return
    if mistaken:
        raise UsageError(f"{unknown_sentence(mistaken)}; `hpcpace config` shows the settings; correct or unset it")
    click.echo(f"hpcpace: warning: {folded_message(unknown_sentence(unknown))}; ignored", err=True)


def main() -> None:
    """Run the command line; an error of hpcpace becomes a few lines on stderr and its exit code."""
    # torch.distributed.launch gives this to the module that it starts; it is for the script that `trace` runs.
    local_rank = [sys.argv.pop(1)] if re.match(r"--local[-_]rank=", "".join(sys.argv[1:2])) else []
    is_limited = any(name in _READERS for name in sys.argv[1:2]) and limit_bytes() is not None
    try:
        if is_limited:
            go_on_in_child()
        cli.main(prog_name="hpcpace", obj=local_rank)
    except HpcpaceError as error:
        message = process_redaction().text(str(error))
        rest = "" if error.is_verbose is None else "--verbose"
        print(f"hpcpace: {folded_message(message, rest=rest, is_verbose=bool(error.is_verbose))}", file=sys.stderr)
        if is_limited and isinstance(error, NotEnoughMemory):
            leave_child()
        sys.exit(error.exit_code)
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        print(
            f"hpcpace: not enough memory{folded_message(reason)}: allow more (ulimit -v, --mem of the job)",
            file=sys.stderr,
        )
        if is_limited:
            leave_child()
        sys.exit(EXIT_USAGE)
