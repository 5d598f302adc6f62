"""The set-ups of the studies: model, servers, ranks, parallelism and batch; and the runs that repeat them.

A set-up has all that a training needs but the data and the type of numbers, which come from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpcpace.core.errors import UsageError

PARALLELISMS = ("none", "data", "tensor", "pipeline")
_MOST_MICROBATCHES = 4


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
        return next(count for count in range(_MOST_MICROBATCHES, 0, -1) if self.batch % count == 0)


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
        return [*self._texts(), *self._images()]

    def _texts(self) -> list[Setup]:
        return [
            Setup(
                model="gpt2",
                preset=self.preset,
                layout=layout,
                parallelism=parallelism,
                batch=batch,
                stands_for=batch,
                shrink=self.shrink,
                steps=self.steps + self.warmup_steps,
                warmup_steps=self.warmup_steps,
            )
            for layout in self.layouts
            for parallelism in (PARALLELISMS[1:] if layout.num_ranks > 1 else ("none",))
            for batch in self.batches
        ]

    def _images(self) -> list[Setup]:
        return [
            Setup(
                model="resnet18",
                layout=layout,
                parallelism="data" if layout.num_ranks > 1 else "none",
                batch=max(1, batch // self.image_batch_divisor),
                stands_for=batch,
                shrink=self.image_shrink,
                steps=self.image_steps + self.warmup_steps,
                warmup_steps=self.warmup_steps,
            )
            for layout in self.layouts
            for batch in self.image_batches
        ]


MODEL_SIZES = ("small", "medium", "large", "xl")
"""The presets of the model-size study: GPT-2 with 12, 24, 36 and 48 layers."""


def model_size_setups(*, batch: int, shrink: int = 1, steps: int = 50, warmup_steps: int = 5) -> list[Setup]:
    """Return the set-ups of the model-size study: each size on one rank, and as a pipeline over 2x2."""
    return [
        Setup(
            model="gpt2",
            preset=preset,
            layout=layout,
            parallelism="pipeline" if layout.num_ranks > 1 else "none",
            batch=batch,
            stands_for=batch,
            shrink=shrink,
            steps=steps + warmup_steps,
            warmup_steps=warmup_steps,
        )
        for preset in MODEL_SIZES
        for layout in map(parse_layout, ("1x1", "2x2"))
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
