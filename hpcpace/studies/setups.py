"""A study: its set-ups, the runs that repeat them, and its folder.

A set-up has all that a training needs except the data and, unless it names one, the type of numbers, which come from
the environment. In the folder, STUDY/plan.json maps runs to set-ups, and STUDY/runs/NAME are ordinary run directories.
They show by themselves what is done, so an interrupted study resumes where it stopped.

A study may scale a model down. Scaled by s, a GPT-2 has 1/s of the width, the vocabulary and the context, and all of
its layers. Then parameters of blocks and of the vocabulary, and activations of a step at the same batch in sequences,
all go down by s^2 and keep their ratio, and so do the volumes of data, tensor and pipeline parallelism. The buckets of
DDP go down with the gradients.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from hpcpace.core.codec import WrongValue, decoder, json_object, read_json
from hpcpace.core.errors import ConfigError, UsageError
from hpcpace.core.files import Folder, read_file
from hpcpace.core.rundir import Attempt, RunDirectory, json_text
from hpcpace.train.plan import TrainPlan, plan_training
from hpcpace.train.settings import GPT2Shape, ModelShape, TrainConfig

PARALLELISMS = ("none", "data", "tensor", "pipeline")
_MAX_MICROBATCHES = 4
_DDP_BUCKET_MB = 25.0
"""The default of torch.nn.parallel.DistributedDataParallel."""


@dataclass(frozen=True, kw_only=True, order=True)
class Layout:
    """Number of servers, and ranks on each; `2x1` is two servers with one rank each."""

    servers: int
    ranks_per_server: int

    def __str__(self) -> str:
        return f"{self.servers}x{self.ranks_per_server}"

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.servers * self.ranks_per_server


def parse_layout(text: str) -> Layout:
    """Return the layout for a text like `2x1`.

    Raises:
        UsageError: it names none.
    """
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text, re.ASCII)
    if found is None:
        raise UsageError(f"layout {text!r}: give servers and ranks on each, like 2x1, from 1 to 999999")
    return Layout(servers=int(found[1]), ranks_per_server=int(found[2]))


NANO_CLUSTER_LAYOUTS = tuple(map(parse_layout, ("1x1", "1x2", "2x1", "2x2")))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One set-up of a study.

    Attributes:
        model: gpt2 or resnet18.
        preset: of gpt2; empty for resnet18.
        layout: servers and ranks.
        parallelism: over all ranks; none is a single rank.
        batch: sequences or images of one replica and step, as a data loader of each replica has them.
        shrink: what widths, and of gpt2 vocabulary and context, are divided by.
        stands_for: the batch of the published study that this one is compared with.
        steps, warmup_steps: to train, the latter among them.
        dtype: type of the computation; that of the environment where it is empty.
        compute_ms: what forward and backward of a sequence or image take on the whole model, emulated by waiting; as
            long as they take where it is None.
    """

    model: str
    preset: str = ""
    layout: Layout
    parallelism: str
    batch: int
    shrink: int = 1
    stands_for: int = 0
    steps: int = 50
    warmup_steps: int = 5
    dtype: str = ""
    compute_ms: float | None = None

    def __post_init__(self) -> None:
        if self.parallelism not in PARALLELISMS:
            raise UsageError(f"parallelism {self.parallelism!r}: choose one of {', '.join(PARALLELISMS)}")
        if (self.parallelism == "none") != (self.layout.num_ranks == 1):
            raise UsageError(
                f"parallelism {self.parallelism} over layout {self.layout}: use none for 1x1, and only there"
            )

    @property
    def name(self) -> str:
        """Its name within its study, like `gpt2-small-2x1-data-b16`."""
        model = f"{self.model}-{self.preset}" if self.preset else self.model
        return f"{model}-{self.layout}-{self.parallelism}-b{self.batch}"

    @property
    def mesh(self) -> str:
        """The mesh as `hpcpace train --mesh` takes it."""
        dimension = {"none": "dp", "data": "dp", "tensor": "tp", "pipeline": "pp"}[self.parallelism]
        return f"{dimension}={self.layout.num_ranks}"

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return self.layout.num_ranks if self.parallelism == "data" else 1

    @property
    def global_batch(self) -> int:
        """Sequences or images per step over all ranks."""
        return self.batch * self.num_replicas

    @property
    def microbatches(self) -> int:
        """Pieces of a replica's batch: at most four, in a pipeline only."""
        if self.parallelism != "pipeline":
            return 1
        return next(count for count in range(_MAX_MICROBATCHES, 0, -1) if self.batch % count == 0)


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One repetition of a set-up."""

    setup: Setup
    repetition: int

    @property
    def name(self) -> str:
        """The name of its run directory."""
        return f"{self.setup.name}-r{self.repetition}"


@dataclass(frozen=True, kw_only=True)
class NanoCluster:
    """The sweep of the nano-cluster study; the defaults are those of the published study.

    Attributes:
        preset: of gpt2.
        batches: sequences of a replica.
        image_batches: images of a replica for resnet18; empty leaves it out.
        repetitions: of each set-up.
        steps, image_steps, warmup_steps: of each run.
        shrink, image_shrink: see `Setup`.
        image_batch_divisor: what the batches of resnet18 are divided by, where its computation is scaled down, too.
        layouts: servers and ranks.
    """

    preset: str = "small"
    batches: tuple[int, ...] = (4, 8, 16)
    image_batches: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    repetitions: int = 5
    steps: int = 50
    image_steps: int = 50
    warmup_steps: int = 5
    shrink: int = 1
    image_shrink: int = 1
    image_batch_divisor: int = 1
    layouts: tuple[Layout, ...] = NANO_CLUSTER_LAYOUTS

    def setups(self) -> list[Setup]:
        """Return all set-ups, gpt2 first."""
        texts = _single("gpt2", self.steps, self.warmup_steps, preset=self.preset, shrink=self.shrink)
        images = _single("resnet18", self.image_steps, self.warmup_steps, shrink=self.image_shrink)
        return [
            *_swept(texts, self.layouts, PARALLELISMS[1:], self.batches),
            *_swept(images, self.layouts, ("data",), self.image_batches, divisor=self.image_batch_divisor),
        ]


def _single(model: str, steps: int, warmup_steps: int, *, preset: str = "", shrink: int) -> Setup:
    """Return the set-up of a model on one rank with one sequence or image."""
    return Setup(
        model=model,
        preset=preset,
        layout=Layout(servers=1, ranks_per_server=1),
        parallelism="none",
        batch=1,
        shrink=shrink,
        steps=steps + warmup_steps,
        warmup_steps=warmup_steps,
    )


def _swept(
    base: Setup, layouts: Iterable[Layout], parallelisms: Sequence[str], batches: Sequence[int], *, divisor: int = 1
) -> list[Setup]:
    """Return a set-up on each layout in each way, with each batch divided; a single rank has one way only."""
    return [
        replace(base, layout=layout, parallelism=parallelism, batch=max(1, batch // divisor), stands_for=batch)
        for layout in layouts
        for parallelism in (parallelisms if layout.num_ranks > 1 else ("none",))
        for batch in batches
    ]


MODEL_SIZES = ("small", "medium", "large", "xl")
"""The presets of the model-size study: GPT-2 with 12, 24, 36 and 48 layers."""


def model_size_setups(*, batch: int, shrink: int = 1, steps: int = 50, warmup_steps: int = 5) -> list[Setup]:
    """Return the set-ups of the model-size study: each size on one rank, and as a pipeline over 2x2."""
    single = _single("gpt2", steps, warmup_steps, shrink=shrink)
    layouts = parse_layout("1x1"), parse_layout("2x2")
    return [
        setup
        for preset in MODEL_SIZES
        for setup in _swept(replace(single, preset=preset), layouts, ("pipeline",), (batch,))
    ]


def repeated(
    setups: Sequence[Setup], repetitions: int, *, steps_of: Callable[[Setup], int] | None = None
) -> list[StudyRun]:
    """Return the runs of a study: all set-ups once, then all again, so that drift affects each of them alike.

    Args:
        setups: of the study.
        repetitions: how often each.
        steps_of: steps behind the warm-up of each set-up, where they are not the same for all.
    """
    if steps_of is not None:
        setups = [replace(setup, steps=setup.warmup_steps + steps_of(setup)) for setup in setups]
    return [StudyRun(setup=setup, repetition=index) for index in range(repetitions) for setup in setups]


_MAX_PLAN_BYTES = 1 << 24
"""Limit for plan.json, which has a few hundred bytes per run."""
_Run = TypeVar("_Run")

DONE, OUT_OF_MEMORY, FAILED, OPEN = "finished", "out of memory", "failed", "open"
_MAX_ATTEMPTS = 2


class HasName(Protocol):
    """What has a run directory of its name."""

    @property
    def name(self) -> str:
        """The name of its run directory."""


@dataclass(frozen=True)
class PlanFolder:
    """A study on disk: STUDY/plan.json lists its runs, and STUDY/runs/NAME has each of them.

    Attributes:
        schema: of the plan.
        kind: of the study, in words.
        script: that plans one.
    """

    schema: ClassVar[str]
    kind: ClassVar[str]
    script: ClassVar[str]
    path: Path

    @property
    def plan_json(self) -> Path:
        """The file that lists the runs."""
        return self.path / "plan.json"

    def run_dir(self, run: HasName) -> RunDirectory:
        """Return the run directory of a run, whether it exists or not."""
        return RunDirectory(self.path / "runs" / run.name)

    def _write(self, content: dict[str, Any]) -> None:
        try:
            with Folder.open(self.path, make=True) as folder:
                folder.make_folder("runs").close()
                folder.write(self.plan_json.name, json_text({"schema": self.schema, **content}))
        except OSError as error:
            raise UsageError(f"cannot write to {self.path}: {error.strerror}") from error

    def _plan(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(read_file(self.plan_json, most_bytes=_MAX_PLAN_BYTES))
        except FileNotFoundError:
            raise UsageError(f"no study at {self.path}{self.script}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"cannot read {self.plan_json}: {error}") from error
        if not isinstance(content, dict) or content.get("schema") != self.schema:
            raise UsageError(f"{self.plan_json} is not a plan of {self.schema}: name the folder of {self.kind}")
        return content

    def _planned(self, runs_of: Callable[[Any], list[_Run]]) -> list[_Run]:
        """Return the runs of the plan as a decoder makes them.

        Raises:
            UsageError: there is no plan, or it cannot be read.
        """
        try:
            return runs_of(self._plan().get("runs"))
        except WrongValue as error:
            raise UsageError(
                f"{self.plan_json} is not a plan of {self.schema} ({error}): plan the study again"
            ) from error


class StudyFolder(PlanFolder):
    """A study whose plan maps runs to set-ups."""

    schema, kind = "hpcpace-study/1", "a study"
    script = ", which has no plan.json: plan one with sbatch/nano_cluster.sh"

    def write_plan(self, name: str, runs: Sequence[StudyRun], *, facts: dict[str, Any] | None = None) -> bool:
        """Write the plan, unless there is one already; return whether it was written.

        Args:
            name: of the study.
            runs: in the order in which they will run.
            facts: further values to keep with the study.

        Raises:
            UsageError: the folder cannot be written.
        """
        if self.plan_json.exists():
            return False
        self._write(
            {
                "study": name,
                "facts": facts or {},
                "runs": [{"name": run.name, **dataclasses.asdict(run)} for run in runs],
            }
        )
        return True

    def facts(self) -> dict[str, Any]:
        """Return the further values that the plan keeps."""
        facts: dict[str, Any] = self._plan()["facts"]
        return facts

    def runs(self) -> list[StudyRun]:
        """Return the runs of the plan, in order.

        Raises:
            UsageError: there is no plan, or it cannot be read.
        """
        return self._planned(decoder(list[StudyRun]))

    def state(self, run: StudyRun) -> str:
        """Return finished, out of memory, failed (it ended twice without a result), or open."""
        attempts = self.run_dir(run).attempts()
        for attempt in attempts[::-1]:
            outcome = self.result(attempt).get("outcome", "")
            if outcome in (DONE, OUT_OF_MEMORY):
                return str(outcome)
        return FAILED if len(attempts) >= _MAX_ATTEMPTS else OPEN

    def open_runs(self, layout: Layout | None = None) -> list[StudyRun]:
        """Return the runs that still have to be done, of one layout or of all."""
        return [run for run in self.runs() if layout in (None, run.setup.layout) and self.state(run) == OPEN]

    def left_s(self) -> float | None:
        """Return about how many seconds the open runs take, each the mean of those done; None before any is."""
        took_s = []
        for run in self.runs():
            for attempt in self.run_dir(run).attempts()[-1:]:
                if attempt.result_json.exists() and attempt.run_json.exists():
                    took_s.append(attempt.result_json.stat().st_mtime - attempt.run_json.stat().st_mtime)
        return statistics.fmean(took_s) * len(self.open_runs()) if took_s else None

    def result(self, attempt: Attempt) -> dict[str, Any]:
        """Return the content of an attempt's result.json; empty if it is missing or incomplete."""
        return read_json(attempt, attempt.result_json.name, json_object, []) or {}


def settings_of(setup: Setup, base: TrainConfig) -> TrainConfig:
    """Return the settings of a set-up's training.

    Args:
        setup: what is trained.
        base: what a set-up does not say, such as data.
    """
    buckets = base.bucket_mb
    if setup.shrink > 1 and setup.num_replicas > 1 and base.overlap and base.compress == "none":
        buckets = (buckets or _DDP_BUCKET_MB) / setup.shrink**2
    return replace(
        base,
        model=setup.model,
        preset=setup.preset or base.preset,
        dtype=setup.dtype or base.dtype,
        compute_ms=setup.compute_ms or base.compute_ms,
        bucket_mb=buckets,
        mesh=setup.mesh,
        batch_size=setup.global_batch,
        microbatches=setup.microbatches,
        steps=setup.steps,
        warmup_steps=setup.warmup_steps,
        seq_len=None,
        resume="never",
    )


def planned(setup: Setup, base: TrainConfig | None = None) -> TrainPlan:
    """Return the plan of a set-up's training.

    Raises:
        ConfigError: the model cannot be scaled down that far.
        MeshError: model, mesh and batch do not fit.
    """
    plan = plan_training(settings_of(setup, base or TrainConfig()), setup.layout.num_ranks)
    if setup.shrink == 1:
        return plan
    shape = shrunk(plan.shape, setup.shrink)
    seq_len = shape.context if isinstance(shape, GPT2Shape) else plan.seq_len
    return replace(plan, shape=shape, shrink=setup.shrink, seq_len=seq_len)


def shrunk(shape: ModelShape, divisor: int) -> ModelShape:
    """Return a model with all widths divided, for GPT-2 also vocabulary and context; layers and heads stay.

    Raises:
        ConfigError: a width cannot be divided.
    """
    if isinstance(shape, GPT2Shape):
        if shape.width % (divisor * shape.num_heads):
            raise ConfigError(
                f"a width of {shape.width} over {shape.num_heads} heads cannot be divided by {divisor}: "
                f"take a divisor of {shape.width // shape.num_heads}"
            )
        return replace(
            shape,
            width=shape.width // divisor,
            context=shape.context // divisor,
            vocabulary=shape.vocabulary // divisor,
        )
    if any(width % divisor for width in shape.widths):
        raise ConfigError(
            f"widths of {shape.widths} cannot be divided by {divisor}: take a divisor of {shape.widths[0]}"
        )
    return replace(shape, widths=tuple(width // divisor for width in shape.widths))
