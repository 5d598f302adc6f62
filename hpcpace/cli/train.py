"""`hpcpace train`: the reference workloads, inside any launcher or by themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from hpcpace.config import BACKENDS, COMPRESSIONS, DEVICES, DTYPES, PRESETS, SCHEDULES, ZERO_STAGES, Config, load_config
from hpcpace.errors import EXIT_WARNING, HpcpaceError, WorldError
from hpcpace.pace.settings import POLICIES
from hpcpace.train.data import check_data, open_data
from hpcpace.train.launch import become_mpiexec, check_compiler, threads_of_rank
from hpcpace.train.plan import TrainPlan, plan_training
from hpcpace.train.progress import STYLES
from hpcpace.units import format_bytes, format_count
from hpcpace.world.environment import RankInfo, host_identity, process_environ, rank_info, set_environ_default
from hpcpace.world.mpi import abort_guard, let_rank_zero_speak, locate_ranks, mpi_world

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

# Which setting an option sets: section and key are those of hpcpace.config.
_SETTINGS = {
    "train": (
        "preset mesh batch_size microbatches seq_len dtype steps warmup_steps seed learning_rate data inject log_every "
        "zero schedule compress sync_every bucket_mb overlap compile "
        "model vocabulary eval_every eval_batches checkpoint_every resume"
    ),
    "world": "device backend interface timeout_s",
    "trace": "enabled trace_dir",
    "pace": "policy",
}


_PATH = click.Path(path_type=Path)


class RankZeroCommand(click.Command):
    """A command whose wrong options are reported by rank 0 alone, because every rank has the same ones."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse options; on other ranks than 0 an error is only an exit code."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            try:
                info = rank_info(process_environ())
            except HpcpaceError:
                raise error from None
            if info.rank > 0:
                let_rank_zero_speak(info)
                ctx.exit(error.exit_code)
            raise


def workload_options(function: Decorated) -> Decorated:
    """Add the options that all workloads share."""
    path = _PATH
    for option in reversed(
        (
            click.option("--ranks", type=click.IntRange(1), help="Start this many ranks here, where no launcher did."),
            click.option("--mesh", metavar="MESH", help="Layout of the ranks, like dp=2,pp=2,tp=1; all dp by default."),
            click.option("--batch-size", type=int, help="Sequences or images per step over all ranks."),
            click.option(
                "--zero",
                type=click.Choice([str(stage) for stage in ZERO_STAGES]),
                help="What replicas share out: 1 the optimizer's state, 3 also gradients and parameters.",
            ),
            click.option("--compress", type=click.Choice(COMPRESSIONS), help="How gradients travel between replicas."),
            click.option("--sync-every", type=int, help="Steps between averagings of parameters: local SGD."),
            click.option("--bucket-mb", type=float, help="Size of DDP's gradient buckets in MiB."),
            click.option("--overlap/--no-overlap", default=None, help="Whether gradients travel during backward."),
            click.option("--compile/--no-compile", default=None, help="Whether torch.compile compiles the blocks."),
            click.option("--dtype", type=click.Choice(DTYPES), help="Type of parameters and computation."),
            click.option("--steps", type=int, help="Steps to train."),
            click.option("--warmup-steps", type=int, help="First steps, which the report leaves out."),
            click.option("--seed", type=int, help="Seed of parameters and data."),
            click.option("--learning-rate", type=float, help="Step size of AdamW."),
            click.option("--data", type=path, help="What to train on; see docs/cli.md."),
            click.option("--eval-every", type=int, help="Steps between two evaluations on held-out data."),
            click.option("--eval-batches", type=int, help="Batches of an evaluation."),
            click.option("--checkpoint-every", type=int, help="Steps between two checkpoints."),
            click.option("--resume", metavar="auto|never|PATH", help="Which checkpoint to go on from."),
            click.option(
                "--inject", multiple=True, metavar="FAULT", help="Slow a rank, like rank=2,size=30%; see docs/cli.md."
            ),
            click.option("--pace", "policy", type=click.Choice(POLICIES), help="Hold early ranks back: the policy."),
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
@click.option("--vocabulary", type=_PATH, help="Folder of GPT-2's vocab.json and merges.txt; bytes without.")
@click.option("--microbatches", type=int, help="Pieces of a replica's batch, where there is a pipeline.")
@click.option("--schedule", type=click.Choice(SCHEDULES), help="Order of microbatches in a pipeline.")
@workload_options
def gpt2(**values: Any) -> None:
    """Train GPT-2 on text, in data, pipeline and tensor parallelism.

    Runs inside srun, mpiexec or torchrun, or starts its own ranks: hpcpace train gpt2 --ranks 4 --mesh dp=2,pp=2
    """
    _run(model="gpt2", **values)


@command.command(cls=RankZeroCommand)
@workload_options
def resnet18(**values: Any) -> None:
    """Train ResNet-18 on images of 32 x 32 pixels, in data parallelism.

    Runs inside srun, mpiexec or torchrun, or starts its own ranks: hpcpace train resnet18 --ranks 4
    """
    _run(model="resnet18", **values)


def _run(
    *,
    ranks: int | None,
    config_file: Path | None,
    run_dir: Path | None,
    progress: str,
    is_reported: bool,
    **values: Any,
) -> None:
    environ = process_environ()
    info = rank_info(environ)
    with abort_guard(None, info, errors_alike=True):
        config = load_config(file=config_file, environ=environ, options=_by_section(values))
        num_ranks = _num_ranks(info, ranks)
        plan = plan_training(config.train, num_ranks)
        if config.train.compile:
            check_compiler(environ)
        if num_ranks > info.world_size:
            check_data(plan)
            become_mpiexec(num_ranks, _arguments(progress), environ)
        comm = mpi_world(info, timeout_s=config.world.start_timeout_s)
    with abort_guard(comm, info):
        is_stopped = _train(
            plan, config=config, info=info, comm=comm, run_dir=run_dir, progress=progress, is_reported=is_reported
        )
    # Outside of the guard, and of rank 0 alone: under srun --kill-on-bad-exit any rank would end the others.
    if is_stopped and info.rank == 0:
        sys.exit(EXIT_WARNING)


def _by_section(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    given = {**values, "inject": values["inject"] or None}
    return {section: {key: given.get(key) for key in keys.split()} for section, keys in _SETTINGS.items()}


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
) -> bool:
    """Train, and return whether a signal has stopped that ahead of time."""
    data = open_data(plan)
    if comm is not None:
        info, _ = locate_ranks(info, comm, host_identity())
    set_environ_default("OMP_NUM_THREADS", str(threads_of_rank(info.local_size)))
    if info.rank == 0 and data.facts()["synthetic"]:
        click.echo(f"data: {data.facts()['source']}; name real ones with --data")
    # Imported this late because torch takes more than a second and reads the variable above.
    from hpcpace.train.loop import TrainJob, train

    result = train(
        TrainJob(plan=plan, config=config, info=info, comm=comm, data=data, run_dir=run_dir, progress=progress)
    )
    if info.rank != 0:
        return bool(result.stopped_by)
    num_steps = len(result.losses)
    click.echo(
        f"loss {result.losses[-1]:.4f} after {num_steps} steps, {format_count(result.samples_per_s)} "
        f"{result.samples_unit}/s, {_peak(result.peak_memory)}"
    )
    if result.stopped_by:
        click.echo(
            f"stopped by {result.stopped_by} after {num_steps} of {config.train.steps} steps, with a checkpoint; the "
            f"same command with --run-dir {result.run} goes on"
        )
    if result.run is not None:
        click.echo(f"hpcpace report {result.run}")
        if is_reported:
            sys.stdout.flush()
            subprocess.run([sys.executable, "-P", "-m", "hpcpace", "report", str(result.run)], check=False)
    return bool(result.stopped_by)


def _peak(memory: Sequence[Mapping[str, Any]]) -> str:
    """Return the most memory that a rank had, on its GPU where it has one."""
    device = max(memory, key=lambda row: int(row["device_bytes"]))
    host = max(memory, key=lambda row: int(row["rss_bytes"]))
    if device["device_bytes"]:
        return f"at most {format_bytes(device['device_bytes'])} of GPU memory (rank {device['rank']})"
    return f"at most {format_bytes(host['rss_bytes'])} of memory (rank {host['rank']})"
