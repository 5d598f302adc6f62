"""The reference workload of `hpcpace train`: the settings of `[train]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcpace.core.config import Section, choice, number
from hpcpace.core.errors import ConfigError

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
