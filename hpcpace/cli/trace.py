"""`hpcpace trace`: run somebody's own training script inside a session, with no line added to it."""

from __future__ import annotations

from pathlib import Path

import click

from hpcpace.pace.settings import POLICIES


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--run-dir", type=click.Path(path_type=Path), help="Run directory; runs/JOB-NAME or runs/TIME-NAME.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file with settings.")
@click.option(
    "--warmup-steps",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="First steps, left out of the report.",
)
@click.option("--samples-unit", default="samples", show_default=True, help="What session.step(samples=...) counts.")
@click.option("--pace", type=click.Choice(POLICIES), help="Hold early ranks back: the policy.")
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
    """Run the Python SCRIPT with its ARGUMENTS, traced.

    Inside any launcher: `srun hpcpace trace -- train.py ARGS`, `torchrun --nproc-per-node 8 -m hpcpace trace --
    train.py ARGS`. The trace begins when the script calls torch.distributed.init_process_group (at once in a world of
    one), and a step ends with each step of an optimizer. Where settings are wrong, the script runs untraced.
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
