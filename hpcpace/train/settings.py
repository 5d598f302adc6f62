"""The reference workload of `hpcpace train`: the settings of `[train]`, shapes of models, and the mesh of ranks.

Nothing here needs torch, so a mesh that does not fit is refused before anything slow is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcpace.core.config import Section, choice, number
from hpcpace.core.errors import ConfigError, MeshError
from hpcpace.core.records import dataclass

MODELS = ("gpt2", "resnet18")
PRESETS = ("tiny", "small", "medium", "large", "xl")
DTYPES = ("float32", "bfloat16", "float64")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
"""Other names of the same types, as users of mixed precision write them."""
ZERO_STAGES = (0, 1, 3)
SCHEDULES = ("1f1b", "gpipe", "interleaved")
COMPRESSIONS = ("none", "fp16", "bf16", "int8", "powersgd")
SHARED_CORES_VARIABLE = "HPCPACE_TRAIN_SHARED_CORES"
"""By this variable, `hpcpace trace` hands on whether ranks share cores on purpose."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section, section="train"):
    """A reference workload."""

    model: str = choice("gpt2", MODELS)
    """gpt2 or resnet18; set by the command."""
    preset: str = choice("tiny", PRESETS)
    """Size of gpt2: tiny for laptops and tests, or the sizes of GPT-2 from small (124M parameters) to xl (1558M)."""
    mesh: str = ""
    """Layout of the ranks, like dp=2,pp=2,tp=1; by default all ranks are data-parallel replicas."""
    batch_size: int = number(8, 1)
    """Sequences or images per step, over all ranks."""
    microbatches: int = number(4, 1)
    """Number of pieces that the batch of a replica is cut into if there is a pipeline."""
    seq_len: int | None = number(None, 2)
    """Tokens per sequence; by default the context length of the preset."""
    dtype: str = choice("float32", DTYPES)
    """Type of the computation: float32 (fp32), bfloat16 (bf16) or float64 (fp64). With bfloat16, parameters, their
    gradients, the optimizer and the loss stay in float32."""
    steps: int = number(50, 1)
    """Number of steps to train."""
    warmup_steps: int | None = number(None, 0)
    """Number of first steps that are trained and recorded but left out of the report; by default 3, or all but one of
    fewer steps."""
    seed: int = number(0, 0, (1 << 63) - 1)
    """Seed of parameters and data; the same seed gives the same losses on every mesh."""
    learning_rate: float = number(3e-4, 0)
    """Step size of AdamW."""
    data: Path | None = None
    """Training data. gpt2: a text file or the folder of Wikitext, by default the sources of Python's standard library.
    resnet18: the folder of CIFAR-10's binary version, by default synthetic images."""
    vocabulary: Path | None = None
    """Folder with GPT-2's vocab.json and merges.txt; by default every byte of a text is a token."""
    eval_every: int = number(0, 0)
    """Steps between two evaluations on held-out data; 0: no evaluations."""
    eval_batches: int = number(8, 1)
    """Global batches per evaluation, the same ones each time; at most as many as the held-out data fill."""
    checkpoint_every: int = number(0, 0)
    """Steps between two checkpoints; 0: only when a signal stops the job."""
    resume: str = "auto"
    """auto resumes from the last checkpoint of the run directory, never starts anew, and a path (of a checkpoint or of
    another run) starts from there."""
    inject: tuple[str, ...] = ()
    """Faults to inject; see docs/cli.md."""
    shared_cores: bool = False
    """Whether ranks share cores on purpose, with each other or other programs: reports then look for other causes."""
    log_every: int = number(10, 1)
    """Steps between two progress lines if the output is not a terminal."""
    zero: int = 0
    """What is sharded across replicas (ZeRO): 0 nothing, 1 the optimizer state, 3 also gradients and parameters."""
    schedule: str = choice("1f1b", SCHEDULES)
    """Order of microbatches in a pipeline: 1f1b, gpipe or interleaved."""
    compress: str = choice("none", COMPRESSIONS)
    """Compression of gradients on their way between replicas: none, fp16, bf16, int8 or powersgd."""
    sync_every: int = number(1, 1)
    """Steps between two averages of the replicas' parameters (local SGD); 1: average gradients in every step."""
    outer_learning_rate: float | None = number(None, 0)
    """Step size of an outer optimizer, which takes the mean change of a round of local SGD for a gradient (DiLoCo); by
    default, the mean is taken as it is."""
    bucket_mb: float | None = number(None, 0.001)
    """Size of DDP's gradient buckets in MiB; by default 1 for the first and 25 for the others."""
    overlap: bool = True
    """Whether gradients are sent while backward still runs; otherwise all at once at its end."""
    hierarchical: bool = False
    """Whether replicas average gradients within each host first, then between hosts; nothing is overlapped then."""
    compile: bool = False
    """Whether torch.compile compiles blocks and head."""
    compute_ms: float | None = number(None, 0.001)
    """Milliseconds that forward and backward of one sequence or image take on the whole model, emulated by waiting; by
    default, as long as they take."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", SHORT_DTYPES.get(self.dtype, self.dtype))
        super().__post_init__()

    def checks(self) -> Iterator[Callable[[], None]]:
        """Yield the checks of choices and bounds, and those of sharding and warm-up."""
        yield from super().checks()
        yield self._check_zero
        yield self._check_warmup
        yield self._check_outer

    def _check_outer(self) -> None:
        if self.outer_learning_rate is not None and self.sync_every == 1:
            raise ConfigError(
                "train.outer_learning_rate is for rounds of local SGD, but gradients are averaged in every step: add "
                "--sync-every, or leave it out"
            )

    def _check_zero(self) -> None:
        if self.zero not in ZERO_STAGES:
            raise ConfigError(f"train.zero is {self.zero!r}: choose one of {', '.join(map(str, ZERO_STAGES))}")

    def _check_warmup(self) -> None:
        if self.num_warmup_steps >= self.steps > 0:
            raise ConfigError(
                f"train.warmup_steps is {self.warmup_steps} and train.steps {self.steps}: no steps are left to report"
                f"; train more steps, or leave out at most {self.steps - 1}"
            )

    @property
    def num_warmup_steps(self) -> int:
        """Number of first steps that the report leaves out."""
        return min(3, self.steps - 1) if self.warmup_steps is None else self.warmup_steps

    @property
    def has_one_bucket(self) -> bool:
        """Whether all gradients of a module go in one bucket.

        The hooks of int8 and PowerSGD send a second message from a gloo thread once the first has arrived. With several
        buckets, ranks would issue these messages in different orders, and the two threads of gloo would deadlock.
        """
        return not self.overlap or self.compress in ("int8", "powersgd")


DIMENSIONS = ("dp", "pp", "tp")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The sizes of the three dimensions, or the place of one rank in them.

    Ranks are numbered like the elements of an array of shape (dp, pp, tp) in C order: tensor parallelism, which
    communicates most, is innermost and so stays within a node where it can; data parallelism is outermost.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """The number of ranks that the mesh needs."""
        return self.dp * self.pp * self.tp

    def coordinates(self, rank: int) -> Mesh:
        """Return the place of a rank in the mesh."""
        pipeline, tp = divmod(rank, self.tp)
        dp, pp = divmod(pipeline, self.pp)
        return Mesh(dp=dp, pp=pp, tp=tp)

    def rank(self, place: Mesh) -> int:
        """Return the rank at a place: the inverse of `coordinates`."""
        return (place.dp * self.pp + place.pp) * self.tp + place.tp

    def as_dict(self) -> dict[str, int]:
        """Return the numbers by the name of their dimension."""
        return asdict(self)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.as_dict().items())


def parse_mesh(text: str, world_size: int) -> Mesh:
    """Read a mesh like `dp=2,pp=2,tp=1`.

    A dimension that is not named is 1; no text at all means data parallelism over all ranks.

    Raises:
        MeshError: the text is not a mesh, or its product is not the number of ranks.
    """
    if not text.strip():
        return Mesh(dp=world_size)
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in DIMENSIONS or not (value.isascii() and value.isdigit()) or int(value) < 1:
            raise MeshError(f"mesh {text!r}: cannot read {part.strip()!r}; write sizes from 1 on, like dp=2,pp=2,tp=1")
        if name in sizes:
            raise MeshError(f"mesh {text!r} names {name} twice: write each of dp, pp and tp once")
        sizes[name] = int(value)
    mesh = Mesh(**sizes)
    if mesh.size != world_size:
        raise MeshError(
            f"mesh {mesh} needs {mesh.size} ranks, but the job has {world_size}: change the mesh or the number of ranks"
        )
    return mesh


@dataclass(frozen=True, kw_only=True)
class GPT2Shape:
    """The shape of a GPT-2 (Radford et al. 2019, table 2)."""

    num_layers: int
    width: int
    num_heads: int
    context: int
    """Longest sequence, in tokens."""
    vocabulary: int
    """Number of different tokens."""

    @property
    def num_parameters(self) -> int:
        """The number of parameters; the head shares those of the token embedding."""
        width = self.width
        # attention 4 w^2 + 4 w, MLP 8 w^2 + 5 w, two layer norms 4 w
        block = 12 * width * width + 13 * width
        return (self.vocabulary + self.context) * width + self.num_layers * block + 2 * width

    def facts(self) -> dict[str, Any]:
        """Return what a run records of the shape."""
        return {
            "name": "gpt2",
            "num_parameters": self.num_parameters,
            "num_layers": self.num_layers,
            "width": self.width,
            "num_heads": self.num_heads,
            "vocabulary": self.vocabulary,
        }

    def check_mesh(self, mesh: Mesh) -> None:
        """Refuse a mesh over which the model cannot be cut.

        Raises:
            MeshError: more stages than layers, or heads or tokens that cannot be shared out.
        """
        if mesh.pp > self.num_layers:
            raise MeshError(f"mesh {mesh} has more stages than the model has layers ({self.num_layers}): lower pp")
        if self.num_heads % mesh.tp:
            divisors = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)
            raise MeshError(f"mesh {mesh}: {self.num_heads} heads cannot be split evenly: use tp of {divisors}")
        if self.vocabulary < mesh.tp:
            raise MeshError(f"mesh {mesh}: a vocabulary of {self.vocabulary} is too small: lower tp")

    def stage_layers(self, stage: int, num_stages: int) -> range:
        """Return the layers of a pipeline stage.

        Layers that are left over go to the first stages, because the last one also has the head.
        """
        each, left_over = divmod(self.num_layers, num_stages)
        first = stage * each + min(stage, left_over)
        return range(first, first + each + (stage < left_over))


@dataclass(frozen=True, kw_only=True)
class ResNetShape:
    """A ResNet of basic blocks for images of 32 x 32 pixels (He et al. 2016).

    ResNet-18 as it is usual for CIFAR-10: four stages of two blocks, behind a 3 x 3 convolution with stride 1 and no
    max-pooling, for 7 x 7 with stride 2 and pooling would leave 8 x 8 pixels.
    """

    widths: tuple[int, ...]
    """Channels of each stage; all but the first halve the image."""
    blocks_per_stage: int
    num_classes: int

    @property
    def num_parameters(self) -> int:
        """The number of parameters."""
        return sum(self.parameter_sizes())

    def parameter_sizes(self) -> list[int]:
        """Return the number of elements of each parameter, in the order of the model's modules."""
        stem = self.widths[0]
        sizes, channels = [3 * stem * 9, stem, stem], stem
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks_per_stage):
                sizes += [channels * width * 9, width, width, width * width * 9, width, width]
                if block == 0 and stage > 0:
                    sizes += [channels * width, width, width]
                channels = width
        return [*sizes, channels * self.num_classes, self.num_classes]

    def facts(self) -> dict[str, Any]:
        """Return what a run records of the shape."""
        return {"name": "resnet18", "num_parameters": self.num_parameters, "num_classes": self.num_classes}

    def check_mesh(self, mesh: Mesh) -> None:
        """Refuse a mesh over which the model cannot be cut.

        Raises:
            MeshError: pipeline or tensor parallelism.
        """
        if mesh.pp > 1 or mesh.tp > 1:
            raise MeshError(f"mesh {mesh}: resnet18 supports data parallelism only: use dp={mesh.size}, or gpt2")


ModelShape = GPT2Shape | ResNetShape

GPT2_PRESETS = {
    "tiny": GPT2Shape(num_layers=4, width=128, num_heads=4, context=128, vocabulary=256),
    "small": GPT2Shape(num_layers=12, width=768, num_heads=12, context=1024, vocabulary=50257),
    "medium": GPT2Shape(num_layers=24, width=1024, num_heads=16, context=1024, vocabulary=50257),
    "large": GPT2Shape(num_layers=36, width=1280, num_heads=20, context=1024, vocabulary=50257),
    "xl": GPT2Shape(num_layers=48, width=1600, num_heads=25, context=1024, vocabulary=50257),
}
RESNET18 = ResNetShape(widths=(64, 128, 256, 512), blocks_per_stage=2, num_classes=10)
