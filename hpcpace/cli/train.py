"""`hpcpace train`: the reference workloads, inside any launcher or on their own."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from hpcpace.cli.commands import Group, RankZeroCommand
from hpcpace.cli.options import PATH, Decorated, Whole, checked_steps, config_file, headed, option, setting, settings
from hpcpace.core.config import Config
from hpcpace.core.detail import DETAILS
from hpcpace.core.environment import RankInfo, host_identity, process_environ, rank_info, set_environ_default
from hpcpace.core.errors import EXIT_WARNING, WorldError
from hpcpace.core.settings import REQUESTED, load_config
from hpcpace.core.text import format_bytes, format_count
from hpcpace.observe.settings import ON_HANG
from hpcpace.pace.settings import POLICIES
from hpcpace.train.data import check_data, open_data
from hpcpace.train.plan import (
    TrainPlan,
    become_mpiexec,
    become_torchrun,
    check_compiler,
    lacks_mpi,
    plan_training,
    threads_of_rank,
)
from hpcpace.train.result import STYLES
from hpcpace.train.settings import COMPRESSIONS, DTYPES, PRESETS, SCHEDULES, SHORT_DTYPES, ZERO_STAGES, TrainConfig
from hpcpace.world.connection import Connection, check_torch, connect
from hpcpace.world.mpi import abort_guard, locate_ranks
from hpcpace.world.settings import BACKENDS, DEVICES, WorldConfig

_MIN_TORCH = (2, 11)  # reads checkpoints of Hugging Face and has pipelines as `hpcpace train` uses them

# Which setting an option sets: section and key.
_SETTINGS = {
    "train": (
        "preset mesh batch_size microbatches seq_len dtype steps warmup_steps seed learning_rate data inject log_every "
        "zero schedule compress sync_every outer_learning_rate bucket_mb overlap hierarchical compile compute_ms "
        "model vocabulary eval_every eval_batches checkpoint_every resume shared_cores"
    ),
    "world": "device backend interface timeout_s",
    "trace": "enabled trace_dir detail_steps detail keep_last summary",
    "pace": "policy",
    "hang": "on_hang",
}


_RANKS = headed(
    "Ranks and how they share the work",
    option(
        "--ranks",
        type=Whole(1, 1_000_000),
        show_default="1",
        help="Start this many ranks with mpiexec, or with torchrun if MPI is missing; not inside a launcher.",
    ),
    setting(
        "train",
        "mesh",
        "Lay the ranks out like this: dp=2,pp=2,tp=1. tp is innermost, dp outermost.",
        "all ranks in dp",
        metavar="MESH",
    ),
    setting(
        "train",
        "zero",
        "Shard across replicas: 1 the optimizer state, 3 also gradients and parameters.",
        type=click.Choice([str(stage) for stage in ZERO_STAGES]),
    ),
    setting(
        "train",
        "compress",
        f"Compress gradients on their way between replicas: {', '.join(COMPRESSIONS)}.",
        type=click.Choice(COMPRESSIONS),
        metavar="WAY",
    ),
    *settings(
        "train",
        sync_every="Average parameters every N steps instead of gradients every step (local SGD); 1: gradients.",
        outer_learning_rate=(
            "Take a step of X along the mean change of --sync-every steps, with momentum (DiLoCo).",
            "the mean",
        ),
        bucket_mb=("Use gradient buckets of this size in DDP, in MiB.", "the first 1, the others 25"),
        overlap="Send gradients while backward still runs, or all at once at its end (--no-overlap).",
        hierarchical="Average gradients within each host first, then between hosts, without overlap.",
    ),
)
_PIPELINE = headed(
    "Pipeline",
    *settings("train", microbatches="Cut the batch of a replica into this many pieces, if there is a pipeline."),
    setting(
        "train",
        "schedule",
        f"Order microbatches in a pipeline like this: {', '.join(SCHEDULES)}; interleaved gives each rank two stages.",
        type=click.Choice(SCHEDULES),
        metavar="ORDER",
    ),
)
_PRECISION = (
    setting(
        "train",
        "dtype",
        f"Compute in this type: {', '.join([*DTYPES, *SHORT_DTYPES])}. With bfloat16 (bf16), parameters, "
        "gradients and loss stay in float32.",
        type=click.Choice([*DTYPES, *SHORT_DTYPES]),
        metavar="TYPE",
    ),
    *settings(
        "train",
        compile="Compile blocks and head with torch.compile; needs a C++ compiler (CXX or g++).",
        compute_ms=(
            "Let forward and backward of a sequence or image take this long, in ms, by waiting; for more ranks than "
            "cores.",
            "as long as they take",
        ),
    ),
)
_GPT2 = headed(
    "Model",
    setting(
        "train", "preset", "Train a model of this size: 0.8 to 1,558 million parameters.", type=click.Choice(PRESETS)
    ),
    *settings("train", seq_len=("Use sequences of this many tokens.", "the context of the preset")),
    setting(
        "train",
        "vocabulary",
        "Read GPT-2's vocab.json and merges.txt from this folder.",
        "none: every byte is a token",
        type=PATH,
    ),
    *_PRECISION,
)
_RESNET18 = headed("Model", *_PRECISION)
_TRAINING = headed(
    "Training",
    *settings(
        "train",
        steps="Train for this many steps.",
        warmup_steps=("Leave this many first steps out of the report.", "3, or all but one of fewer steps"),
        batch_size="Train on this many sequences or images per step, over all ranks.",
        learning_rate="Use this step size in AdamW.",
        seed="Seed parameters and data; the same seed gives the same losses on every mesh.",
    ),
    setting(
        "train", "data", "Train on this file or folder.", "gpt2: sources of Python; resnet18: synthetic", type=PATH
    ),
    *settings(
        "train",
        eval_every="Evaluate on held-out data every N steps; 0: never.",
        eval_batches="Use this many global batches per evaluation, the same each time.",
    ),
)
_CHECKPOINTS = headed(
    "Checkpoints",
    *settings("train", checkpoint_every="Write a checkpoint every N steps; 0: only when a signal stops the job."),
    setting(
        "train",
        "resume",
        "Resume from the last checkpoint in --run-dir (auto), start anew (never), or start from PATH, "
        "a run or a checkpoint.",
        metavar="auto|never|PATH",
    ),
)
_WORLD = headed(
    "Devices and network",
    setting(
        "world",
        "device",
        "Compute here; auto takes the GPU of the local rank if torch sees one.",
        type=click.Choice(DEVICES),
    ),
    setting(
        "world",
        "backend",
        "Run collectives over this backend; auto takes nccl on GPUs and gloo on CPUs.",
        type=click.Choice(BACKENDS),
    ),
    setting(
        "world",
        "interface",
        "Use this network interface for collectives; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME wins.",
        "chosen from the hosts' addresses",
        metavar="NAME",
    ),
    *settings("world", timeout_s="End the job when a collective has not completed for this many seconds."),
)
_TRACE = headed(
    "Tracing, pacing and faults",
    setting("trace", "enabled", "Record a trace; --pace needs one.", flag="--trace"),
    setting(
        "trace",
        "trace_dir",
        "Keep traces in this node-local folder (auto: a disk of the node) while the job runs, and move them into "
        "the run at the end.",
        "the run",
        type=PATH,
    ),
    *settings(
        "trace",
        keep_last="Keep at least this many of the last steps in the trace, and drop older ones while the job runs; 0: "
        "all.",
    ),
    setting(
        "trace",
        "detail_steps",
        "Record only the steps from A to B - 1 in detail, and of all others their times.",
        "all",
        flag="--trace-steps",
        metavar="A:B[,C:D]",
        callback=checked_steps,
    ),
    setting(
        "trace",
        "detail",
        "Record this of them: full, collectives (no phases), or steps (no collectives either).",
        flag="--trace-detail",
        type=click.Choice(DETAILS),
        metavar="LEVEL",
    ),
    *settings("trace", summary="Print the verdict on stderr, and where the step went, when the training has ended."),
    setting(
        "pace",
        "policy",
        f"Hold early ranks back by this policy, if a trial in the job shows a gain: {', '.join(POLICIES)}; see "
        "hpcpace help pacing.",
        flag="--pace",
        type=click.Choice(POLICIES),
        metavar="POLICY",
    ),
    setting(
        "hang",
        "on_hang",
        "Write down what holds a step up that lasts too long and say so (report), also end the job with exit code "
        "4 (stop), or do not watch (off); see hpcpace help hang.",
        type=click.Choice(ON_HANG),
        metavar="WHAT",
    ),
    setting(
        "train",
        "inject",
        "Slow a rank down, like rank=2,size=30%; may be given several times. See hpcpace help faults.",
        "none",
        multiple=True,
        metavar="FAULT",
    ),
)
_OUTPUT = headed(
    "Settings and output",
    config_file,
    option(
        "--run-dir",
        type=PATH,
        show_default="runs/JOB-NAME",
        help="Write the run to this folder; a second start there becomes attempt-1.",
    ),
    *settings(
        "train",
        shared_cores="Let reports look for other causes where ranks share cores; for more ranks than cores on purpose.",
        log_every="Print a progress line every N steps in a log.",
    ),
    option(
        "--progress",
        type=click.Choice(STYLES),
        default="auto",
        help="Show progress like this; auto: a bar on a terminal, lines in a log.",
    ),
    option("--report", "is_reported", is_flag=True, help="Print the report at the end."),
)


def _options(*headings: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    """Return a decorator that adds the options of all headings, in this order."""

    def decorate(function: Decorated) -> Decorated:
        for add in reversed(headings):
            function = add(function)
        return function

    return decorate


@click.group(cls=Group)
def command() -> None:
    """Train a reference workload and trace it."""


@command.command(cls=RankZeroCommand)
@_options(_GPT2, _TRAINING, _RANKS, _PIPELINE, _CHECKPOINTS, _WORLD, _TRACE, _OUTPUT)
def gpt2(**values: Any) -> None:
    """Train GPT-2 on text with data, pipeline and tensor parallelism.

    Runs inside srun, mpiexec or torchrun, or starts its own ranks: hpcpace train gpt2 --ranks 4 --mesh dp=2,pp=2
    """
    _run(model="gpt2", **values)


@command.command(cls=RankZeroCommand)
@_options(_RESNET18, _TRAINING, _RANKS, _CHECKPOINTS, _WORLD, _TRACE, _OUTPUT)
def resnet18(**values: Any) -> None:
    """Train ResNet-18 on images with data parallelism.

    The images have 32 x 32 pixels.

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
        config = load_config(file=config_file, environ=environ, options=_by_section(values), requested=REQUESTED)
        if is_reported:  # which says all of the summary
            config = config.updated(trace={"summary": False})
        num_ranks = _num_ranks(info, ranks)
        plan = plan_training(config.of(TrainConfig), num_ranks)
        check_torch("hpcpace train", _MIN_TORCH, "safetensors")
        if config.of(TrainConfig).compile:
            check_compiler(environ)
        if num_ranks > info.world_size:
            check_data(plan)
            become = become_torchrun if lacks_mpi(config.of(WorldConfig).coordination) else become_mpiexec
            become(num_ranks, _arguments(progress), environ)
        connection = connect(
            info,
            environ,
            coordination=config.of(WorldConfig).coordination,
            rendezvous=config.of(WorldConfig).rendezvous,
            timeout_s=config.of(WorldConfig).start_timeout_s,
        )
    with abort_guard(connection.comm, info):
        is_stopped = _train(
            plan,
            config=config,
            info=info,
            connection=connection,
            run_dir=run_dir,
            progress=progress,
            is_reported=is_reported,
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
            f"--ranks is {ranks}, but {info.launcher} started {info.world_size} ranks ({info.size_variable}): "
            "leave --ranks out inside a launcher"
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
    connection: Connection,
    run_dir: Path | None,
    progress: str,
    is_reported: bool,
) -> bool:
    """Train, and return whether a signal stopped the training early."""
    data = open_data(plan)
    if info.rank == 0 and connection.line:
        click.echo(connection.line)
    if connection.comm is not None:
        info, _ = locate_ranks(info, connection.comm, host_identity())
    set_environ_default("OMP_NUM_THREADS", str(threads_of_rank(info.local_size)))
    if info.rank == 0 and data.facts()["synthetic"]:
        click.echo(f"data: {data.facts()['source']}; use --data for real data")
    # Imported this late because torch takes more than a second and reads the variable above. It makes hundreds of
    # thousands of objects that stay: to search them for garbage while it loads took a seventh of that time.
    gc.disable()
    from hpcpace.train.loop import TrainJob, train

    gc.enable()
    result = train(
        TrainJob(
            plan=plan,
            config=config,
            info=info,
            comm=connection.comm,
            rendezvous=connection.rendezvous,
            data=data,
            run_dir=run_dir,
            progress=progress,
        )
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
            f"stopped by {result.stopped_by} after {num_steps} of {config.of(TrainConfig).steps} steps, with a "
            f"checkpoint; to resume, run the same command with --run-dir {result.run}"
        )
    if result.run is not None:
        click.echo(f"hpcpace report {result.run}")
        if is_reported:
            sys.stdout.flush()
            subprocess.run([sys.executable, "-P", "-m", "hpcpace", "report", str(result.run)], check=False)
    return bool(result.stopped_by)


def _peak(memory: Sequence[Mapping[str, Any]]) -> str:
    """Return the peak memory over all ranks, of the GPU if they have one."""
    device = max(memory, key=lambda row: int(row["device_bytes"]))
    host = max(memory, key=lambda row: int(row["rss_bytes"]))
    if device["device_bytes"]:
        return f"at most {format_bytes(device['device_bytes'])} of GPU memory (rank {device['rank']})"
    return f"at most {format_bytes(host['rss_bytes'])} of memory (rank {host['rank']})"
