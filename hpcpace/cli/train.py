"""`hpcpace train`: the reference workloads, inside any launcher or by themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from hpcpace.config import BACKENDS, DEVICES, DTYPES, PRESETS, Config, load_config
from hpcpace.errors import HpcpaceError, WorldError
from hpcpace.train.data import open_text
from hpcpace.train.launch import become_mpiexec, threads_of_rank
from hpcpace.train.plan import TrainPlan, plan_training
from hpcpace.train.progress import STYLES
from hpcpace.units import format_count
from hpcpace.world.environment import RankInfo, host_identity, process_environ, rank_info, set_environ_default
from hpcpace.world.mpi import abort_guard, locate_ranks, mpi_world

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

# Which setting an option sets: section and key are those of hpcpace.config.
_SETTINGS = {
    "train": (
        "preset mesh batch_size microbatches seq_len dtype steps warmup_steps seed learning_rate data inject log_every"
    ),
    "world": "device backend interface timeout_s",
    "trace": "enabled trace_dir",
}


class RankZeroCommand(click.Command):
    """A command whose wrong options are reported by rank 0 alone, because every rank has the same ones."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse options; on other ranks than 0 an error is only an exit code."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            try:
                rank = rank_info(process_environ()).rank
            except HpcpaceError:
                raise error from None
            if rank > 0:
                ctx.exit(error.exit_code)
            raise


def workload_options(function: Decorated) -> Decorated:
    """Add the options that all workloads share."""
    path = click.Path(path_type=Path)
    for option in reversed(
        (
            click.option("--ranks", type=click.IntRange(1), help="Start this many ranks here, where no launcher did."),
            click.option("--mesh", metavar="MESH", help="Layout of the ranks, like dp=2,pp=2,tp=1; all dp by default."),
            click.option("--batch-size", type=int, help="Sequences per step over all ranks."),
            click.option("--microbatches", type=int, help="Pieces of a replica's batch, where there is a pipeline."),
            click.option("--dtype", type=click.Choice(DTYPES), help="Type of parameters and computation."),
            click.option("--steps", type=int, help="Steps to train."),
            click.option("--warmup-steps", type=int, help="First steps, which the report leaves out."),
            click.option("--seed", type=int, help="Seed of parameters and data."),
            click.option("--learning-rate", type=float, help="Step size of AdamW."),
            click.option("--data", type=path, help="Text file to train on; Python's own library by default."),
            click.option(
                "--inject", multiple=True, metavar="FAULT", help="Slow a rank, like rank=2,size=30%; see docs/cli.md."
            ),
            click.option("--device", type=click.Choice(DEVICES), help="Where to compute."),
            click.option("--backend", type=click.Choice(BACKENDS), help="What carries the collectives."),
            click.option("--interface", metavar="NAME", help="Network interface of the collectives."),
            click.option("--timeout-s", type=float, help="Seconds until a collective that hangs ends the job."),
            click.option("--trace/--no-trace", "enabled", default=None, help="Whether to record a trace."),
            click.option("--trace-dir", type=path, help="Node-local folder for traces while the job runs."),
            click.option("--run-dir", type=path, help="Folder of the run; runs/JOB-NAME by default."),
            click.option("--config", "config_file", type=path, help="TOML file with settings."),
            click.option("--log-every", type=int, help="Steps between two progress lines in a log."),
            click.option("--progress", type=click.Choice(STYLES), default="auto", help="How to show progress."),
            click.option("--report", "is_reported", is_flag=True, help="Print the report at the end."),
        )
    ):
        function = option(function)
    return function


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Train a reference workload, traced."""


@command.command(cls=RankZeroCommand)
@click.option("--preset", type=click.Choice(PRESETS), help="Size of the model.")
@click.option("--seq-len", type=int, help="Tokens of a sequence; the model's context by default.")
@workload_options
def gpt2(
    ranks: int | None, config_file: Path | None, run_dir: Path | None, progress: str, is_reported: bool, **values: Any
) -> None:
    """Train GPT-2 on text, in data, pipeline and tensor parallelism.

    Runs inside srun, mpiexec or torchrun, or starts its own ranks: hpcpace train gpt2 --ranks 4 --mesh dp=2,pp=2
    """
    environ = process_environ()
    info = rank_info(environ)
    with abort_guard(None, info, errors_alike=True):
        config = load_config(file=config_file, environ=environ, options=_by_section(values))
        num_ranks = _num_ranks(info, ranks)
        plan = plan_training(config.train, num_ranks)
        if num_ranks > info.world_size:
            open_text(config.train.data, plan.seq_len)
            become_mpiexec(num_ranks, _arguments(progress), environ)
        comm = mpi_world(info)
    with abort_guard(comm, info):
        _train(plan, config=config, info=info, comm=comm, run_dir=run_dir, progress=progress, is_reported=is_reported)


def _by_section(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    given = {**values, "inject": values["inject"] or None}
    return {section: {key: given[key] for key in keys.split()} for section, keys in _SETTINGS.items()}


def _num_ranks(info: RankInfo, ranks: int | None) -> int:
    if ranks is None:
        return info.world_size
    if info.launcher != "single" and ranks != info.world_size:
        raise WorldError(
            f"--ranks {ranks}, but {info.launcher} started {info.world_size} ranks ({info.size_variable}): "
            "leave --ranks to runs without a launcher"
        )
    return ranks


def _arguments(progress: str) -> list[str]:
    # Ranks write to a pipe of mpiexec and cannot see the terminal behind it.
    style = ["--progress", "bar"] if progress == "auto" and sys.stderr.isatty() else []
    return [*sys.argv[1:], *style]


def _train(
    plan: TrainPlan,
    *,
    config: Config,
    info: RankInfo,
    comm: Any,
    run_dir: Path | None,
    progress: str,
    is_reported: bool,
) -> None:
    text = open_text(config.train.data, plan.seq_len)
    if comm is not None:
        info, _ = locate_ranks(info, comm, host_identity())
    set_environ_default("OMP_NUM_THREADS", str(threads_of_rank(info.local_size)))
    # Imported this late because torch takes more than a second and reads the variable above.
    from hpcpace.train.loop import TrainJob, train

    result = train(
        TrainJob(plan=plan, config=config, info=info, comm=comm, text=text, run_dir=run_dir, progress=progress)
    )
    if info.rank != 0:
        return
    click.echo(
        f"loss {result.losses[-1]:.4f} after {len(result.losses)} steps, {format_count(result.tokens_per_s)} tokens/s"
    )
    if result.run is None:
        return
    click.echo(f"hpcpace report {result.run}")
    if is_reported:
        sys.stdout.flush()
        subprocess.run([sys.executable, "-m", "hpcpace", "report", str(result.run)], check=False)
