"""The published nano-cluster study (doi 10.1145/3769695.3771676), and set-ups compared with it.

GPT-2 small on two servers with two A40 GPUs each and 1 Gb/s between them; network throughput has both directions. Slow
processors on a fast link represent such a cluster only if the ratio of communication to computation is the same. The
published throughput of one GPU and the published traffic determine it before anything runs.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcpace.core.errors import DataError
from hpcpace.core.records import dataclass
from hpcpace.studies.setups import DONE, OUT_OF_MEMORY, Layout, Setup, planned
from hpcpace.train.plan import TrainPlan
from hpcpace.train.settings import GPT2Shape

from .figures import SetupFigures, Spread, spread, straight_line
from .volume import (
    Operation,
    PacketOverhead,
    compute_itemsize,
    link_volumes,
    master_itemsize,
    messages,
    step_operations,
    wire_matrix,
)

_BITS = 8


def bytes_per_sample(network_bps: float, samples_per_s: float) -> float:
    """Return the bytes per sample on a network, from its mean throughput and that of the training: B / (8 R)."""
    return network_bps / _BITS / samples_per_s


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What a set-up communicates and computes.

    Attributes:
        link_bytes_per_sample: bytes a sample in the busier direction of the busiest server's link.
        samples_per_s_of_one: samples a second of a single rank that communicates with nobody.
        num_ranks: that compute.
        link_bps: rate of the link in one direction.
    """

    link_bytes_per_sample: float
    samples_per_s_of_one: float
    num_ranks: int
    link_bps: float

    @property
    def communication_s(self) -> float:
        """Seconds per sample on the link, 8 v / L."""
        return _BITS * self.link_bytes_per_sample / self.link_bps

    @property
    def computation_s(self) -> float:
        """Seconds per sample on all ranks together, 1 / (n R1)."""
        return 1 / (self.num_ranks * self.samples_per_s_of_one)

    @property
    def ratio(self) -> float:
        """Communication over computation, 8 v n R1 / L; above 1 the link is the limit."""
        return self.communication_s / self.computation_s


def link_rate_bps(ratio: float, *, link_bytes_per_sample: float, samples_per_s_of_one: float, num_ranks: int) -> float:
    """Return the link rate at which a set-up has a given ratio: L = 8 v n R1 / ratio.

    Args:
        ratio: of communication to computation, as of `Balance`.
        link_bytes_per_sample, samples_per_s_of_one, num_ranks: as of `Balance`.
    """
    return _BITS * link_bytes_per_sample * num_ranks * samples_per_s_of_one / ratio


def link_bytes_per_step(setup: Setup, plan: TrainPlan) -> float:
    """Return the bytes of frames per step in the busier direction of the busiest server's link, over gloo.

    docs/measuring.md has the formula. 0 on one server.

    Args:
        setup: says which ranks are on one server: the first ones are on the first.
        plan: of its training.
    """
    num_ranks = setup.layout.num_ranks
    if setup.layout.servers == 1:
        return 0.0
    plan = replace(plan, ranks_per_host=setup.layout.ranks_per_server)
    hosts = [str(rank // setup.layout.ranks_per_server) for rank in range(num_ranks)]
    volumes = link_volumes(wire_matrix(messages(_operations(plan)), num_ranks, PacketOverhead()), hosts)
    return float(max(max(volume.tx_bytes, volume.rx_bytes) for volume in volumes.values()))


def _operations(plan: TrainPlan) -> list[Operation]:
    if isinstance(plan.shape, GPT2Shape):
        return step_operations(plan)
    size = plan.shape.num_parameters * master_itemsize(plan)
    ranks = tuple(range(plan.mesh.size))
    return [
        Operation(kind="all_reduce", cause="gradients", ranks=ranks, size_bytes=size, itemsize=master_itemsize(plan))
    ]


def predicted_step_s(setup: Setup, plan: TrainPlan, *, samples_per_s_of_one: float, link_bps: float) -> float:
    """Return the step time without overlap of computation and communication, with all ranks busy."""
    computation_s = plan.samples_per_step / (setup.layout.num_ranks * samples_per_s_of_one)
    return computation_s + _BITS * link_bytes_per_step(setup, plan) / link_bps


LINK_BPS = 1e9
BATCH = 16
"""Sequences of a replica: what the published volumes imply. Data parallelism over two ranks sends 2 (N-1)/N of 124.4 M
gradients of 4 bytes a step and rank, and crosses the link with 30.3 kB a token in both directions together: a step of a
replica then has 16 sequences of 1,024 tokens."""
GPT2_SMALL_LAYERS, GPT2_XL_LAYERS = 12, 48
VOLUME_OF_LAYERS_GBYTE = {GPT2_SMALL_LAYERS: 174.0, GPT2_XL_LAYERS: 330.0}
"""Traffic of a pipeline over 2x2; the study shows a straight line between the two ends."""
PEAK_MEMORY_GBYTE: dict[str, float | None] = {"small": 13.68, "medium": 29.94, "large": 46.31, "xl": None}
"""Peak memory of training on one GPU with 48 GB; None means out of memory."""


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """A set-up of the published study; None for values that were not published."""

    layout: Layout
    parallelism: str
    tokens_per_s: float
    scaling_factor: float
    network_bps: float | None

    @property
    def network_bytes_per_sample(self) -> float | None:
        """Bytes per token that cross a server's link, both directions."""
        return None if self.network_bps is None else bytes_per_sample(self.network_bps, self.tokens_per_s)


def read_published(path: Path) -> list[PublishedRow]:
    """Return the rows of the published table.

    Raises:
        DataError: the file is missing, or has other columns.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [_row(values) for values in csv.DictReader(file)]
    except (OSError, KeyError, ValueError) as error:
        raise DataError(
            f"{path} does not have the published values ({error}): restore it from the repository"
        ) from error


def _row(values: dict[str, str]) -> PublishedRow:
    network_gbps = values["network_throughput_gbit_per_s"]
    return PublishedRow(
        layout=Layout(servers=int(values["servers"]), ranks_per_server=int(values["gpus_per_server"])),
        parallelism=values["parallelism"],
        tokens_per_s=float(values["throughput_ktokens_per_s"]) * 1e3,
        scaling_factor=float(values["scaling_factor"]),
        network_bps=float(network_gbps) * 1e9 if network_gbps else None,
    )


def tokens_per_s_of_one(rows: Sequence[PublishedRow]) -> Spread:
    """Return the throughput of one GPU: R_n / (n times the scaling factor), over the rows.

    The study prints scaling factors with two digits, so only those of at least 0.1 are precise enough.
    """
    found = spread(
        [row.tokens_per_s / row.layout.num_ranks / row.scaling_factor for row in rows if row.scaling_factor >= 0.1]
    )
    assert found is not None
    return found


def published_balance(row: PublishedRow, tokens_per_s_of_one: float) -> Balance:
    """Return what a published set-up communicates and computes; both directions of its link carry the same.

    Raises:
        DataError: the study has no traffic for it.
    """
    if row.network_bytes_per_sample is None:
        raise DataError(
            f"the published study has no network traffic for {row.layout} {row.parallelism}: take two servers"
        )
    return Balance(
        link_bytes_per_sample=row.network_bytes_per_sample / 2,
        samples_per_s_of_one=tokens_per_s_of_one,
        num_ranks=row.layout.num_ranks,
        link_bps=LINK_BPS,
    )


def published_volume_gbyte(num_layers: int) -> float:
    """Return the volume on the published line, which passes through 174 GB at 12 layers and 330 GB at 48."""
    (first, low), (last, high) = VOLUME_OF_LAYERS_GBYTE.items()
    return low + (high - low) * (num_layers - first) / (last - first)


IMAGES_PER_S, IMAGE_BATCH = 13_000.0, 2048
"""The highest throughput of ResNet-18 in the study: at 2x2 with this batch on each GPU."""
IMAGE_SCALING, IMAGE_GAIN = 0.9, 1.16
"""Scaling factor that ResNet-18 reaches at 1x2, and throughput at 2x2 over that at 1x2."""


def images_per_s_of_one() -> float:
    """Return the throughput of one GPU with ResNet-18, which follows from that at 2x2: R1 = R / 1.16 / (2 0.9)."""
    return IMAGES_PER_S / IMAGE_GAIN / (2 * IMAGE_SCALING)


def image_balance(setup: Setup) -> Balance:
    """Return what the published ResNet-18 communicates and computes; the study does not print its traffic.

    Args:
        setup: a set-up of resnet18 as published, whose gradients go around one ring.
    """
    plan = planned(setup)
    return Balance(
        link_bytes_per_sample=link_bytes_per_step(setup, plan) / plan.samples_per_step,
        samples_per_s_of_one=images_per_s_of_one(),
        num_ranks=setup.layout.num_ranks,
        link_bps=LINK_BPS,
    )


Published = Mapping[tuple[Layout, str], PublishedRow]


def published_of(row: SetupFigures, published: Published) -> PublishedRow | None:
    """Return the published values for a set-up: those of GPT-2 small at the batch they imply."""
    setup = row.setup
    if (setup.model, setup.preset, setup.stands_for) != ("gpt2", "small", BATCH):
        return None
    return published.get((setup.layout, setup.parallelism))


def bases_of(rows: Sequence[SetupFigures], published: Published) -> tuple[float, float]:
    """Return the network volume of data parallelism over two servers, measured and published; 1 where not known."""
    for row in rows:
        if (str(row.setup.layout), row.setup.parallelism) == ("2x1", "data"):
            theirs = published_of(row, published)
            volume = theirs.network_bytes_per_sample if theirs else None
            return row.median("network_bytes_per_sample") or 1.0, volume or 1.0
    return 1.0, 1.0


def order_at(rows: Sequence[SetupFigures], layout: Layout, name: str) -> list[str]:
    """Return the parallelisms of GPT-2 at the published batch, from the highest value of a figure to the lowest."""
    return _ordered(
        (row.median(name), row.setup.parallelism)
        for row in rows
        if row.setup.model == "gpt2" and row.setup.layout == layout and row.setup.stands_for == BATCH
    )


def _ordered(figures: Iterable[tuple[float | None, str]]) -> list[str]:
    """Return what figures are of, from the highest to the lowest, without those that are not known."""
    known = [(value, name) for value, name in figures if value is not None]
    return [name for _, name in sorted(known, reverse=True)]


def orders(rows: Sequence[SetupFigures], published: Iterable[PublishedRow]) -> list[str]:
    """Return a sentence for each published order of parallelisms: whether it is the same here."""
    found, published = [], list(published)
    for layout in sorted({row.layout for row in published}):
        for what, name, ours in (
            ("throughput", "tokens_per_s", "samples_per_s"),
            ("network volume", "network_bytes_per_sample", "network_bytes_per_sample"),
        ):
            wanted = _ordered((getattr(row, name), row.parallelism) for row in published if row.layout == layout)
            here = order_at(rows, layout, ours)
            if len(here) == len(wanted) > 0:
                same = "as published" if here == wanted else f"published: {' > '.join(wanted)}"
                found.append(f"{what} at {layout}, batch {BATCH}: {' > '.join(here)} ({same})")
    return found


AGREES_WITHIN = 1.25
"""Two figures agree if neither is more than this times the other, the published one within its last digit."""


def verdict(ours: float | None, theirs: float | None, *, digits: int) -> str:
    """Return the ratio of a figure to the published one and whether they agree, like `1.08, agrees`.

    Args:
        ours: the figure; no verdict if it is not known.
        theirs: the published one, likewise.
        digits: that it was printed with, behind the point.
    """
    if ours is None or not theirs:
        return ""
    half = 0.5 * 10**-digits
    agrees = (theirs - half) / AGREES_WITHIN <= ours <= (theirs + half) * AGREES_WITHIN
    return f"{ours / theirs:.2f}, {'agrees' if agrees else 'differs'}"


def image_facts(rows: Sequence[SetupFigures]) -> list[tuple[str, str, str, str]]:
    """Return what the study says of ResNet-18: the fact, here, as published, and a verdict.

    Args:
        rows: set-ups of resnet18 on 1x1, 1x2 and 2x2, with the published batches that they stand for.
    """
    by_layout = {
        layout: {row.setup.stands_for: row for row in rows if str(row.setup.layout) == layout}
        for layout in ("1x1", "1x2", "2x2")
    }

    def speed(layout: str, batch: int) -> float | None:
        row = by_layout[layout].get(batch)
        return row.median("samples_per_s") if row else None

    batches = sorted(by_layout["1x2"])
    scaling = max((by_layout["1x2"][batch].median("scaling_factor") or 0.0 for batch in batches), default=0.0)
    facts = [_fact("highest scaling factor at 1x2", scaling, IMAGE_SCALING, 1)]
    one, two, four = (speed(layout, IMAGE_BATCH) for layout in ("1x1", "1x2", "2x2"))
    if one and two and four:
        gain = "throughput at 2x2 over that at 1x2, batch 2048", four / two, IMAGE_GAIN, 2
        peak = (
            "throughput at 2x2 over that of one rank, batch 2048",
            four / one,
            IMAGES_PER_S / images_per_s_of_one(),
            2,
        )
        facts += [_fact(*gain), _fact(*peak)]
    for layout in ("1x2", "2x2"):
        ahead = [b for b in batches if (speed(layout, b) or 0.0) > (speed("1x1", b) or float("inf"))]
        here = f"from batch {min(ahead)} on" if ahead else "at no batch"
        facts.append((f"{layout} is ahead of one rank", here, "not with small batches", ""))
    return facts


def _fact(name: str, ours: float, theirs: float, digits: int) -> tuple[str, str, str, str]:
    return name, f"{ours:.2f}", f"{theirs:.{digits}f}", verdict(ours, theirs, digits=digits)


def compute_spread(rows: Sequence[SetupFigures]) -> list[str]:
    """Return a sentence for each microbatch size: how much its computation time varies over layouts."""
    groups: dict[tuple[str, int], list[tuple[float, str]]] = {}
    for row in rows:
        setup, forward_ms = row.setup, row.median("forward_ms")
        if forward_ms is not None and setup.parallelism != "tensor":
            group = groups.setdefault((setup.model, setup.batch // setup.microbatches), [])
            group.append((forward_ms, f"{setup.layout} {setup.parallelism}"))
    return [
        f"forward computation of a microbatch of {size}, {model}: {min(found)[0]:.3g} ms ({min(found)[1]}) to "
        f"{max(found)[0]:.3g} ms ({max(found)[1]}) over {len(found)} set-ups"
        for (model, size), found in sorted(groups.items())
        if len(found) > 1
    ]


FIGURES = (
    *("samples_per_s", "scaling_factor", "network_bps", "network_bytes_per_sample"),
    *("peak_memory_bytes", "tensor_memory_bytes", "step_ms", "forward_ms", "communication_share"),
)
COLUMNS = (
    *("model", "preset", "servers", "ranks_per_server", "parallelism", "batch", "stands_for_batch", "shrink"),
    *("num_finished", "num_out_of_memory"),
    *(f"{name}{end}" for name in FIGURES for end in ("", "_low", "_high")),
    *("published_samples_per_s", "published_scaling_factor", "published_network_bps"),
    "published_network_bytes_per_sample",
)


def values_of(row: SetupFigures, published: Published) -> list[Any]:
    """Return a row: a value for each of `COLUMNS`, None where it is not known or was not published."""
    setup, theirs = row.setup, published_of(row, published)
    values: list[Any] = [setup.model, setup.preset, setup.layout.servers, setup.layout.ranks_per_server]
    values += [setup.parallelism, setup.batch, setup.stands_for, setup.shrink]
    values += [row.states.get(DONE, 0), row.states.get(OUT_OF_MEMORY, 0)]
    for name in FIGURES:
        found = row.spreads[name]
        values += [None] * 3 if found is None else [found.median, found.low, found.high]
    names = ("tokens_per_s", "scaling_factor", "network_bps", "network_bytes_per_sample")
    return [*values, *(getattr(theirs, name, None) for name in names)]


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
