"""`hpcpace trace`: run a user's training script inside a session, without changing its code."""

from __future__ import annotations

from pathlib import Path

import click

from hpcpace.pace.settings import POLICIES


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Write the run to this folder.", show_default="runs/JOB-SCRIPT"
)
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="Read settings from this TOML file.")
@click.option(
    "--warmup-steps",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Leave this many first steps out of the report.",
)
@click.option(
    "--samples-unit", default="samples", show_default=True, help="Name what session.step(samples=...) counts."
)
@click.option(
    "--pace",
    type=click.Choice(POLICIES),
    help="Hold early ranks back by this policy, if a trial in the job shows a gain; see docs/pacing.md.",
)
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    run_dir: Path | None,
    config_file: Path | None,
    warmup_steps: int,
    samples_unit: str,
    pace: str | None,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Run the Python SCRIPT with its ARGUMENTS and trace it.

    Works inside any launcher: `srun hpcpace trace -- train.py ARGS` or `torchrun --nproc-per-node 8 -m hpcpace trace
    -- train.py ARGS`. Tracing starts when the script calls torch.distributed.init_process_group (at once if there is
    one rank), and each optimizer.step() ends a step. If a setting is wrong, the script runs untraced.
    """
    from hpcpace.observe.script import run_script

    # Settings are read where they can be wrong on one rank alone and the script still runs.
    run_script(
        script,
        arguments,
        config_file=config_file,
        pace=pace,
        run_dir=run_dir,
        warmup_steps=warmup_steps,
        samples_unit=samples_unit,
    )
