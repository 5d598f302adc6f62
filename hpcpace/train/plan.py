"""Everything about a training that is decided, or refused, before torch is loaded.

All rules of the support matrix concern one feature or a pair, so a combination is supported unless a rule excludes it;
the tables in docs/cli.md show these rules. Without a launcher, the process becomes `mpiexec` for several ranks, or
torchrun where MPI is missing.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from hpcpace.core.errors import ConfigError, MeshError, WorldError, check_all
from hpcpace.core.records import dataclass
from hpcpace.train.inject import InjectedFault, parse_fault
from hpcpace.train.settings import (
    DIMENSIONS,
    GPT2_PRESETS,
    RESNET18,
    GPT2Shape,
    Mesh,
    ModelShape,
    TrainConfig,
    parse_mesh,
)
from hpcpace.world.mpi import load_mpi


def mpiexec_command(num_ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs `hpcpace ARGUMENTS` on several ranks of this host.

    Raises:
        WorldError: there is no mpiexec.
    """
    beside_python = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside_python) if beside_python.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise WorldError(
            f"no mpiexec beside {sys.executable} or on PATH, so --ranks {num_ranks} cannot start: "
            "`pip install mpich`, or start the ranks with srun, mpiexec or torchrun"
        )
    # Inside a Slurm allocation MPICH's mpiexec would start its ranks by srun, over all hosts.
    local = ["-launcher", "fork", "-hosts", "localhost"]
    return [mpiexec, *local, "-n", str(num_ranks), sys.executable, "-P", "-m", "hpcpace", *arguments]


def become_mpiexec(num_ranks: int, arguments: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by mpiexec, so that signals and exit codes are those of the job.

    Raises:
        WorldError: there is no mpiexec.
    """
    _become(mpiexec_command(num_ranks, arguments), environ)


def become_torchrun(num_ranks: int, arguments: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by torchrun, which needs no MPI. It ends with 1 whatever code a rank ended with."""
    # torchrun would print a warning for what it sets itself.
    threads = {"OMP_NUM_THREADS": str(threads_of_rank(num_ranks))}
    _become(torchrun_command(num_ranks, arguments), {**threads, **environ})


def torchrun_command(num_ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs `hpcpace ARGUMENTS` on several ranks of this host without MPI."""
    options = ["--standalone", "--nproc-per-node", str(num_ranks), "--no-python"]
    python = [sys.executable, "-P"]
    return [*python, "-m", "torch.distributed.run", *options, *python, "-m", "hpcpace", *arguments]


def lacks_mpi(coordination: str) -> bool:
    """Return whether ranks started here do without MPI: by the setting, or because it or its mpiexec is missing."""
    if coordination != "auto":
        return coordination == "torch"
    try:
        load_mpi({})
        mpiexec_command(1, [])
    except WorldError:
        return True
    return False


def _become(command: list[str], environ: Mapping[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, dict(environ))


def check_compiler(environ: Mapping[str, str]) -> None:
    """Refuse a machine on which torch.compile would fail in the first step.

    Raises:
        ConfigError: there is no C++ compiler, which it needs for CPUs, and on GPUs for the launch of kernels.
    """
    compiler = environ.get("CXX", "g++")
    if shutil.which(compiler, path=environ.get("PATH")) is None:
        raise ConfigError(
            f"--compile needs a C++ compiler, but there is no {compiler}: install one (`apt-get install g++`), name it "
            "with CXX, or drop --compile"
        )


def threads_of_rank(local_size: int) -> int:
    """Return the threads that a rank may use, so that the ranks of a host have a core each where there are enough.

    A launcher that binds ranks to cores has done this already; else the cores are shared out evenly.
    """
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, (os.cpu_count() or 1) // local_size))


class Need(NamedTuple):
    """A feature that needs a dimension of the mesh."""

    feature: str
    dimension: str
    reason: str


class Conflict(NamedTuple):
    """Two features that exclude each other."""

    first: str
    second: str
    reason: str


ZERO_1, ZERO_3 = "--zero 1", "--zero 3"
GPIPE, INTERLEAVED = "--schedule gpipe", "--schedule interleaved"
FP16, BF16, INT8, POWERSGD = (f"--compress {name}" for name in ("fp16", "bf16", "int8", "powersgd"))
INT8_BLOCK = 256
"""Elements with a scale of their own, as in Dettmers et al. 2022 (block-wise quantization)."""
SCALE_BYTES = 4
POWERSGD_RANK = 4
"""Rank of PowerSGD's matrices, the largest of the paper's (Vogels et al. 2019, table 3)."""
POWERSGD_START = 2
"""Steps before PowerSGD begins: DDP makes its buckets anew after the first step, which torch's hook cannot follow."""
MASTER_DTYPES = {"float32": "float32", "bfloat16": "float32", "float64": "float64"}
"""Type of parameters, gradients and the optimizer's state, by that of the computation."""
COMPRESS = (FP16, BF16, INT8, POWERSGD)
SYNC_EVERY, BUCKET_MB, NO_OVERLAP, COMPILE = "--sync-every", "--bucket-mb", "--no-overlap", "--compile"
HIERARCHICAL = "--hierarchical"
BFLOAT16 = "--dtype bfloat16"
FEATURES = (
    *DIMENSIONS, ZERO_1, ZERO_3, GPIPE, INTERLEAVED, *COMPRESS, SYNC_EVERY, BUCKET_MB, NO_OVERLAP, HIERARCHICAL,
    COMPILE, BFLOAT16,
)  # fmt: skip

NEEDS = tuple(
    Need(feature, dimension, reason)
    for dimension, needing, reason in (
        ("dp", (ZERO_1, ZERO_3), "splits state between replicas, but there is only one"),
        (
            "dp",
            (*COMPRESS, SYNC_EVERY, BUCKET_MB, NO_OVERLAP, HIERARCHICAL),
            "concerns messages between replicas, but there is only one",
        ),
        ("pp", (GPIPE, INTERLEAVED), "orders the stages of a pipeline, but there is none"),
    )
    for feature in needing
)
CONFLICTS = tuple(
    Conflict(first, second, reason)
    for firsts, seconds, reason in (
        ((ZERO_1,), (SYNC_EVERY,), "the split state must see every replica's gradient"),
        ((ZERO_3,), (SYNC_EVERY,), "no replica holds all parameters, so none can step alone"),
        ((ZERO_3,), (*COMPRESS, HIERARCHICAL), "fully_shard averages gradients without DDP's hooks"),
        ((ZERO_3,), (BUCKET_MB, NO_OVERLAP), "fully_shard has no buckets: it sends block by block"),
        ((*COMPRESS, BUCKET_MB, NO_OVERLAP, HIERARCHICAL), (SYNC_EVERY,), "local SGD sends parameters, not gradients"),
        ((BUCKET_MB,), (NO_OVERLAP,), "a single message has no buckets"),
        (COMPRESS, (HIERARCHICAL,), "each has a way of its own to average"),
        ((INT8, POWERSGD), (BUCKET_MB,), "its messages depend on each other, so it needs one bucket"),
    )
    for first in firsts
    for second in seconds
)


def features(settings: TrainConfig, mesh: Mesh) -> frozenset[str]:
    """Return the features that a run uses, by their names in `FEATURES`."""
    used = {
        f"--zero {settings.zero}": settings.zero > 0,
        f"--schedule {settings.schedule}": settings.schedule != "1f1b",
        f"--compress {settings.compress}": settings.compress != "none",
        SYNC_EVERY: settings.sync_every > 1,
        BUCKET_MB: settings.bucket_mb is not None,
        NO_OVERLAP: not settings.overlap,
        HIERARCHICAL: settings.hierarchical,
        COMPILE: settings.compile,
        BFLOAT16: settings.dtype == "bfloat16",
        **{name: size > 1 for name, size in mesh.as_dict().items()},
    }
    return frozenset(name for name, is_used in used.items() if is_used)


def refusal(used: frozenset[str]) -> str | None:
    """Return why features cannot be combined, or None if they can."""
    for need in NEEDS:
        if need.feature in used and need.dimension not in used:
            return f"{need.feature} {need.reason}: use a mesh with {need.dimension}=2 or more, or drop the option"
    for conflict in CONFLICTS:
        if conflict.first in used and conflict.second in used:
            return f"{conflict.first} and {conflict.second} cannot be combined: {conflict.reason}; drop one"
    return None


_INTERLEAVED_STAGES = 2


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """A run that fits: settings, model, mesh and faults."""

    settings: TrainConfig
    shape: ModelShape
    mesh: Mesh
    seq_len: int
    """Tokens of a sequence; 1 for images."""
    faults: tuple[InjectedFault, ...]
    ranks_per_host: int | None = None
    """Ranks of each host, the first ones on the first; what `--hierarchical` sends depends on it."""
    shrink: int = 1
    """What the widths of the model are divided by; a study says so, hpcpace train has no option for it."""

    @property
    def preset(self) -> str:
        """Name of the model's size, like `small`, or `small-shrunk-16` where a study has scaled it down."""
        return self.settings.preset if self.shrink == 1 else f"{self.settings.preset}-shrunk-{self.shrink}"

    @property
    def sequences_per_replica(self) -> int:
        """Sequences or images that one replica trains in a step."""
        return self.settings.batch_size // self.mesh.dp

    @property
    def samples_unit(self) -> str:
        """What samples are: tokens or images."""
        return "tokens" if isinstance(self.shape, GPT2Shape) else "images"

    @property
    def samples_per_step(self) -> int:
        """Tokens or images that all ranks together train in a step."""
        return self.settings.batch_size * self.seq_len

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline; the interleaved schedule gives each rank two of them (Narayanan et al. 2021)."""
        return self.mesh.pp * (_INTERLEAVED_STAGES if self.settings.schedule == "interleaved" else 1)

    def stages_of(self, place: Mesh) -> tuple[int, ...]:
        """Return the stages that a rank has, from the front of the model to its back."""
        return tuple(range(place.pp, self.num_stages, self.mesh.pp))

    def rows(self, place: Mesh) -> slice:
        """Return the rows of the global batch that a rank's replica trains."""
        return slice(place.dp * self.sequences_per_replica, (place.dp + 1) * self.sequences_per_replica)

    def credited_samples(self, place: Mesh) -> int:
        """Return the samples of a step that a rank is credited with; over all ranks they add up to those of a step."""
        samples, sharers = self.sequences_per_replica * self.seq_len, self.mesh.pp * self.mesh.tp
        index = place.pp * self.mesh.tp + place.tp
        return samples * (index + 1) // sharers - samples * index // sharers

    def facts(self) -> dict[str, Any]:
        """Return what a run records of its model."""
        text = {"preset": self.preset, "seq_len": self.seq_len} if isinstance(self.shape, GPT2Shape) else {}
        scaled: dict[str, float] = {"shrink": self.shrink} if self.shrink > 1 else {}
        if self.settings.compute_ms is not None:
            scaled["compute_ms"] = self.settings.compute_ms
        return {
            **self.shape.facts(),
            **text,
            **scaled,
            "dtype": self.settings.dtype,
            f"{self.samples_unit}_per_step": self.samples_per_step,
        }


def parallelism_facts(plan: TrainPlan) -> dict[str, Any]:
    """Return what a run records of how its model is shared out; None is what has no meaning on its mesh."""
    settings, mesh = plan.settings, plan.mesh
    is_pipeline, has_replicas = mesh.pp > 1, mesh.dp > 1
    sends_gradients = has_replicas and settings.zero < 3 and settings.sync_every == 1
    return {
        "mesh": mesh.as_dict(),
        "schedule": settings.schedule if is_pipeline else None,
        "num_stages": plan.num_stages if is_pipeline else None,
        "microbatches": settings.microbatches if is_pipeline else None,
        "zero": settings.zero,
        "compress": settings.compress if sends_gradients else None,
        "sync_every": settings.sync_every if has_replicas else None,
        "outer_learning_rate": settings.outer_learning_rate,
        "bucket_mb": settings.bucket_mb,
        "overlap": settings.overlap and not settings.hierarchical if sends_gradients else None,
        "hierarchical": settings.hierarchical if sends_gradients else None,
        "compile": settings.compile,
    }


def plan_training(settings: TrainConfig, world_size: int) -> TrainPlan:
    """Fit settings and world together.

    Raises:
        MeshError: mesh, model, batch and world do not fit.
        ConfigError: a setting is out of range, or a fault cannot be read.
        UsageError: of the kind of the first, with the messages of all, where several of these are wrong.
    """
    shape = GPT2_PRESETS[settings.preset] if settings.model == "gpt2" else RESNET18
    of_mesh = partial(_fitting_mesh, settings, shape, world_size)
    of_seq_len = partial(_seq_len, settings, shape)
    of_faults = [partial(_fault, spec, world_size) for spec in settings.inject]
    check_all((of_mesh, of_seq_len, *of_faults))
    faults = tuple(of_fault() for of_fault in of_faults)
    return TrainPlan(settings=settings, shape=shape, mesh=of_mesh(), seq_len=of_seq_len(), faults=faults)


def _fitting_mesh(settings: TrainConfig, shape: ModelShape, world_size: int) -> Mesh:
    mesh = parse_mesh(settings.mesh, world_size)
    shape.check_mesh(mesh)
    reason = refusal(features(settings, mesh))
    if reason is not None:
        raise ConfigError(reason)
    _check_stages(settings, shape, mesh)
    _check_batch(settings, mesh)
    return mesh


def _fault(spec: str, world_size: int) -> InjectedFault:
    fault = parse_fault(spec)
    if fault.rank is not None and fault.rank >= world_size:
        raise ConfigError(f"fault {spec!r}: no rank {fault.rank}; the job's ranks are 0 to {world_size - 1}")
    return fault


def _seq_len(settings: TrainConfig, shape: ModelShape) -> int:
    if not isinstance(shape, GPT2Shape):
        return 1
    if settings.seq_len is not None and settings.seq_len > shape.context:
        raise ConfigError(
            f"train.seq_len is {settings.seq_len}: preset {settings.preset} reads at most {shape.context} tokens"
        )
    return shape.context if settings.seq_len is None else settings.seq_len


def _check_stages(settings: TrainConfig, shape: ModelShape, mesh: Mesh) -> None:
    if settings.schedule != "interleaved" or not isinstance(shape, GPT2Shape):
        return
    num_stages = _INTERLEAVED_STAGES * mesh.pp
    if num_stages > shape.num_layers:
        raise MeshError(
            f"mesh {mesh} has {num_stages} stages with --schedule interleaved, more than the model has layers "
            f"({shape.num_layers}): lower pp, or use another schedule"
        )
    rounds = max(1, settings.microbatches // mesh.pp)
    if settings.microbatches % rounds:
        raise MeshError(
            f"{settings.microbatches} microbatches cannot be split into {rounds} equal rounds over pp={mesh.pp}, as "
            f"--schedule interleaved needs: use --microbatches {next_multiple(settings.microbatches, mesh.pp)}"
        )


def _check_batch(settings: TrainConfig, mesh: Mesh) -> None:
    batch_size, microbatches = settings.batch_size, settings.microbatches
    if batch_size % mesh.dp:
        raise MeshError(
            f"a batch of {batch_size} cannot be split evenly over dp={mesh.dp}: "
            f"use --batch-size {next_multiple(batch_size, mesh.dp)}"
        )
    if mesh.pp == 1:
        return
    if microbatches < mesh.pp and settings.schedule != "gpipe":
        raise MeshError(
            f"{microbatches} microbatches do not fill {mesh.pp} stages: use --microbatches {mesh.pp} or more"
        )
    if batch_size // mesh.dp % microbatches:
        fitting = next_multiple(batch_size, mesh.dp * microbatches)
        raise MeshError(
            f"a batch of {batch_size} sequences gives each of dp={mesh.dp} replicas {batch_size // mesh.dp}, which "
            f"cannot be cut into {microbatches} microbatches: use --batch-size {fitting}, or other --microbatches"
        )


def next_multiple(number: int, factor: int) -> int:
    """Return the least multiple of a factor that is not below a number."""
    return -(-number // factor) * factor


def groups_along(mesh: Mesh, dimension: Literal["dp", "pp", "tp"]) -> Iterator[tuple[Mesh, tuple[int, ...]]]:
    """Yield the groups along a dimension, with the place of their first member; none where the dimension is 1."""
    size = mesh.as_dict()[dimension]
    if size == 1:
        return
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    for first in places:
        if first.as_dict()[dimension] == 0:
            ranks = [mesh.rank(Mesh(**{**first.as_dict(), dimension: index})) for index in range(size)]
            yield first, tuple(ranks)
