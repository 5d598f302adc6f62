"""The values of the published nano-cluster study (doi 10.1145/3769695.3771676) and what follows from them.

GPT-2 small on two servers with two A40 GPUs each and 1 Gb/s between them; network throughput has both directions.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcpace.core.errors import DataError
from hpcpace.studies.ratio import Balance, bytes_per_sample
from hpcpace.studies.setups import Layout
from hpcpace.studies.statistics import Spread, spread

LINK_BPS = 1e9
BATCH = 16
"""Sequences of a replica: what the published volumes imply. Data parallelism over two ranks sends 2 (N-1)/N of 124.4 M
gradients of 4 bytes a step and rank, and crosses the link with 30.3 kB a token in both directions together: a step of a
replica then has 16 sequences of 1,024 tokens."""
GPT2_SMALL_LAYERS, GPT2_XL_LAYERS = 12, 48
VOLUME_OF_LAYERS_GBYTE = {GPT2_SMALL_LAYERS: 174.0, GPT2_XL_LAYERS: 330.0}
"""Of a pipeline over 2x2; the study shows a straight line between the two ends."""
PEAK_MEMORY_GBYTE: dict[str, float | None] = {"small": 13.68, "medium": 29.94, "large": 46.31, "xl": None}
"""Of training on one GPU with 48 GB; None means out of memory."""


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """A set-up of the published study; None for values that were not published."""

    layout: Layout
    parallelism: str
    tokens_per_s: float
    scaling_factor: float
    network_bps: float | None
    network_bytes: float | None

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
    def number(name: str, unit: float) -> float | None:
        return float(values[name]) * unit if values[name] else None

    return PublishedRow(
        layout=Layout(servers=int(values["servers"]), ranks_per_server=int(values["gpus_per_server"])),
        parallelism=values["parallelism"],
        tokens_per_s=float(values["throughput_ktokens_per_s"]) * 1e3,
        scaling_factor=float(values["scaling_factor"]),
        network_bps=number("network_throughput_gbit_per_s", 1e9),
        network_bytes=number("network_volume_gbyte", 1e9),
    )


def tokens_per_s_of_one(rows: Sequence[PublishedRow]) -> Spread:
    """Return the throughput of one GPU: R_n / (n times the scaling factor), over the rows.

    The study prints scaling factors with two digits, so that only those of at least 0.1 tell it.
    """
    found = spread(
        [row.tokens_per_s / row.layout.num_ranks / row.scaling_factor for row in rows if row.scaling_factor >= 0.1]
    )
    assert found is not None
    return found


def published_balance(row: PublishedRow, tokens_per_s_of_one: float, *, link_bps: float = LINK_BPS) -> Balance:
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
        link_bps=link_bps,
    )


def published_volume_gbyte(num_layers: int) -> float:
    """Return the volume on the published line, which passes through 174 GB at 12 layers and 330 GB at 48."""
    (first, low), (last, high) = VOLUME_OF_LAYERS_GBYTE.items()
    return low + (high - low) * (num_layers - first) / (last - first)
