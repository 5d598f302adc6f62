"""Compares a nano-cluster study with the published one: order of parallelisms, and whether set-ups are comparable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hpcpace.studies.figures import SetupFigures
from hpcpace.studies.published import BATCH, PublishedRow
from hpcpace.studies.setups import Layout

Published = Mapping[tuple[Layout, str], PublishedRow]


def published_of(row: SetupFigures, published: Published) -> PublishedRow | None:
    """Return the published values for a set-up: those of GPT-2 small at the batch they imply."""
    setup = row.setup
    if (setup.model, setup.preset, setup.stands_for) != ("gpt2", "small", BATCH):
        return None
    return published.get((setup.layout, setup.parallelism))


def order_at(rows: Sequence[SetupFigures], layout: Layout, name: str) -> list[str]:
    """Return the parallelisms of GPT-2 at the published batch, from the highest value of a figure to the lowest."""
    of_layout = [
        (row.median(name), row.setup.parallelism)
        for row in rows
        if row.setup.model == "gpt2" and row.setup.layout == layout and row.setup.stands_for == BATCH
    ]
    known = [(value, parallelism) for value, parallelism in of_layout if value is not None]
    return [parallelism for _, parallelism in sorted(known, reverse=True)]


def orders(rows: Sequence[SetupFigures], published: Iterable[PublishedRow]) -> list[str]:
    """Return a sentence for each published order of parallelisms: whether it is the same here."""
    found, published = [], list(published)
    for layout in sorted({row.layout for row in published}):
        for what, name, ours in (
            ("throughput", "tokens_per_s", "samples_per_s"),
            ("network volume", "network_bytes_per_sample", "network_bytes_per_sample"),
        ):
            of_layout = [(getattr(row, name), row.parallelism) for row in published if row.layout == layout]
            known = [(value, parallelism) for value, parallelism in of_layout if value is not None]
            wanted = [parallelism for _, parallelism in sorted(known, reverse=True)]
            here = order_at(rows, layout, ours)
            if len(here) == len(wanted) > 0:
                same = "as published" if here == wanted else f"published: {' > '.join(wanted)}"
                found.append(f"{what} at {layout}, batch {BATCH}: {' > '.join(here)} ({same})")
    return found


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
