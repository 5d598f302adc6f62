"""A study as a table: a row for each set-up, with its figures, their range over repetitions, and the published ones."""

from __future__ import annotations

from typing import Any

from hpcpace.studies.figures import SetupFigures
from hpcpace.studies.published import Published, published_of
from hpcpace.studies.setups import DONE, OUT_OF_MEMORY

FIGURES = (
    *("samples_per_s", "scaling_factor", "network_bps", "network_bytes_per_sample"),
    *("peak_memory_bytes", "step_ms", "forward_ms", "communication_share"),
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
