"""The sizes of a model in a study: how time and traffic grow with its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcpace.studies.figures import SetupFigures, Spread, straight_line
from hpcpace.studies.setups import Setup, planned
from hpcpace.train.operations import compute_itemsize, master_itemsize
from hpcpace.train.presets import GPT2Shape

TOKENS = 1_000_000


_STATE_BYTES = 16
"""Of a parameter in float32: itself, its gradient, and the two moments of AdamW."""


def expected_tensor_bytes(setup: Setup) -> float:
    """Return the bytes of the tensors of GPT-2 on one rank: state, and what autograd saves of each layer.

    For each token, a block saves 16 hidden states: its input, both normalised ones, query, key and value, what
    attention mixed, the sum after it, and 4 before and 4 after the MLP's activation. The head saves two and the logits.
    """
    plan = planned(setup)
    assert isinstance(plan.shape, GPT2Shape)
    itemsize, tokens = compute_itemsize(plan), setup.batch * plan.seq_len
    hidden = (16 * plan.shape.num_layers + 2) * plan.shape.width * itemsize
    logits = plan.shape.vocabulary * master_itemsize(plan)
    return _STATE_BYTES * plan.shape.num_parameters + tokens * (hidden + logits)


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of the family: as a pipeline over several servers, and on one rank where that was run."""

    shape: GPT2Shape
    pipeline: SetupFigures
    single: SetupFigures | None

    @property
    def preset(self) -> str:
        """Name of the size."""
        return self.pipeline.setup.preset

    @property
    def time_s(self) -> Spread | None:
        """Seconds a million tokens; the fastest repetition is its least."""
        found = self.pipeline.spreads["samples_per_s"]
        if found is None:
            return None
        return Spread(median=TOKENS / found.median, low=TOKENS / found.high, high=TOKENS / found.low, num=found.num)

    @property
    def volume(self) -> Spread | None:
        """Bytes a token on a server's link, both directions."""
        return self.pipeline.spreads["network_bytes_per_sample"]


def sizes_of(rows: Sequence[SetupFigures]) -> list[Size]:
    """Return the sizes of a study, from the smallest to the largest."""
    found = []
    for row in rows:
        shape = planned(row.setup).shape
        if row.setup.parallelism == "pipeline" and isinstance(shape, GPT2Shape):
            alone = [
                other for other in rows if other.setup.preset == row.setup.preset and other.setup.parallelism == "none"
            ]
            found.append(Size(shape=shape, pipeline=row, single=alone[0] if alone else None))
    return sorted(found, key=lambda size: size.shape.num_parameters)


def growth_sentences(sizes: Sequence[Size]) -> list[str]:
    """Return how straight the growth is, and how the family was scaled down."""
    remarks = []
    layers = [size.shape.num_layers for size in sizes]
    for what, values in (
        ("time", [size.time_s for size in sizes]),
        ("network volume", [size.volume for size in sizes]),
    ):
        points = [(x, found.median) for x, found in zip(layers, values, strict=True) if found is not None]
        line = straight_line([x for x, _ in points], [y for _, y in points])
        if line is not None:
            remarks.append(f"{what} over layers: a straight line explains {100 * line.r_squared:.1f} % of the variance")
    shrink = sizes[0].pipeline.setup.shrink
    if shrink > 1:
        remarks.append(
            "a family scaled down: the layers and heads of GPT-2, with width, vocabulary and context divided by "
            f"{shrink}; its memory does not compare with the published one"
        )
    return remarks
