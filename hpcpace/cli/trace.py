"""`hpcpace trace`: run a user's program and trace the training in it, without changing its code."""

from __future__ import annotations

from pathlib import Path

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, Whole, checked_steps, headed, option
from hpcpace.config import ON_HANG, ON_HANG_VARIABLE
from hpcpace.core.detail import DETAILS
from hpcpace.observe.steps import StepFrom
from hpcpace.pace.settings import POLICIES


@click.command(cls=Command, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@headed(
    "Where to write",
    option("--run-dir", type=PATH, help="Write the run to this folder.", show_default="runs/JOB-SCRIPT"),
    option(
        "--trace-dir",
        type=PATH,
        help="Keep traces in this node-local folder (auto: a disk of the node) while the program runs, and move them "
        "into the run at the end.",
        show_default="the run",
    ),
)
@headed(
    "Steps",
    option(
        "--steps",
        metavar="A:B[,C:D]",
        callback=checked_steps,
        help="Record only the steps from A to B - 1 in detail, and of all others their times.",
        show_default="all",
    ),
    option(
        "--detail",
        type=click.Choice(DETAILS),
        metavar="LEVEL",
        help="Record this of them: full, collectives (no phases), or steps (no collectives either).",
        show_default="full",
    ),
    option(
        "--keep-last",
        type=Whole(0),
        help="Keep at least this many of the last steps, and drop what is older while the program runs; 0: keep all.",
        show_default="0",
    ),
    option(
        "--step-from",
        default="auto",
        show_default=True,
        callback=lambda _context, _option, text: StepFrom.parse(text) and text,
        metavar="WHAT",
        help="End a step after every 'optimizer' step or 'backward' pass, or every second one: 'optimizer:2'; 'auto' "
        "finds out what repeats.",
    ),
    option(
        "--warmup-steps",
        type=Whole(0),
        default=2,
        show_default=True,
        help="Leave this many first steps out of the report.",
    ),
    option(
        "--samples-unit",
        metavar="WORD",
        default="samples",
        show_default=True,
        help="Name what session.step(samples=...) counts.",
    ),
)
@headed(
    "Pacing, hangs and settings",
    option(
        "--pace",
        type=click.Choice(POLICIES),
        metavar="POLICY",
        help=f"Hold early ranks back by this policy, if a trial in the job shows a gain: {', '.join(POLICIES)}; see "
        "docs/pacing.md.",
        show_default="none",
    ),
    option(
        "--on-hang",
        type=click.Choice(ON_HANG),
        metavar="WHAT",
        help="Write down what holds a step up that lasts too long and say so (report), also end the job with exit code "
        "4 (stop), or do not watch (off); see docs/hang.md.",
        show_default="report",
    ),
    option("--config", "config_file", type=PATH, help="Read settings from this TOML file.", show_default="none"),
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True, metavar="PROGRAM [ARGUMENTS]...")
def command(
    run_dir: Path | None,
    trace_dir: Path | None,
    config_file: Path | None,
    warmup_steps: int,
    samples_unit: str,
    step_from: str,
    pace: str | None,
    steps: str | None,
    detail: str | None,
    on_hang: str | None,
    keep_last: int | None,
    program: tuple[str, ...],
) -> None:
    """Run a program and trace the training in it.

    PROGRAM is a Python script, `-m` and a module, or any command, such as a launcher: `srun hpcpace trace -- train.py
    ARGS`, `hpcpace trace -- torchrun --nproc-per-node 8 train.py ARGS`, `hpcpace trace -- bash run.sh`. Tracing starts
    where a process makes torch's process group, or trains without one; the last line says what was recorded. If a
    setting is wrong, the program runs untraced.
    """
    from hpcpace.core.environment import change_environ
    from hpcpace.observe.launch.launch import Wishes
    from hpcpace.observe.launch.traced_program import become_traced

    if on_hang is not None:
        change_environ({ON_HANG_VARIABLE: on_hang})

    # Settings are read where they can be wrong on one rank alone and the script still runs.
    wishes = Wishes(
        config_file=None if config_file is None else str(config_file.absolute()),
        pace=pace,
        trace_dir=None if trace_dir is None else str(trace_dir),
        steps=steps,
        detail=detail,
        keep_last=keep_last,
        warmup_steps=warmup_steps,
        samples_unit=samples_unit,
        step_from=step_from,
    )
    become_traced(program, wishes, run_dir=run_dir)
