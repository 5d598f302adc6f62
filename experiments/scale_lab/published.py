"""MLPerf training results of one system at several sizes: `python -m experiments.scale_lab --published`.

Where the batches of all sizes of a system and benchmark agree, or those of some, the largest of these is predicted from
the others, if these are two or more. Where those of all do not, the law is to be refused. tests/data/mlperf/README.md
says where the data are from.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcpace.runs.scaling.result import obstacle, predict
from hpcpace.runs.scaling.samples import Sample
from hpcpace.runs.scaling.sizes import series_of

DATA = Path(__file__).parents[2] / "tests" / "data" / "mlperf" / "scaling.csv"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One system with one benchmark: the sizes, and what became of the largest.

    Attributes:
        sizes: numbers of nodes.
        outcome: `inside`, `outside`, `refused`, or `too few` where less than two sizes are left to predict from.
        words: numbers, or why not.
    """

    name: str
    sizes: tuple[int, ...]
    outcome: str
    words: str


def families() -> list[Family]:
    """Return the outcome of each system and benchmark with several sizes."""
    by_name: dict[str, list[Sample]] = defaultdict(list)
    with DATA.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name = " ".join(row[column] for column in ("round", "organisation", "system", "benchmark"))
            by_name[name].append(_sample(row))
    return [family for name, samples in sorted(by_name.items()) for family in _of_system(name, samples)]


def _of_system(name: str, samples: Sequence[Sample]) -> Iterator[Family]:
    """Yield the outcome for all sizes of a system, and for those of equal batches where not all are."""
    whole = _judged(name, samples)
    yield whole
    if whole.outcome != "refused":
        return
    for what in ("batch", "batch of a node"):
        alike: dict[float, list[Sample]] = defaultdict(list)
        for sample in samples:
            alike[round(sample.batch / (sample.num_nodes if what != "batch" else 1), 6)].append(sample)
        for value, some in sorted(alike.items()):
            if len({sample.num_nodes for sample in some}) > 1:
                yield _judged(f"{name}, {what} {value:g},", some)


def _sample(row: Mapping[str, str]) -> Sample:
    nodes, batch, rate = int(row["nodes"]), float(row["batch"]), float(row["samples_per_s"])
    name = f"{row['benchmark']}-{nodes}-{row['run']}"
    return Sample(
        name=name,
        path=name,
        num_nodes=nodes,
        num_ranks=nodes * int(row["accelerators"]),
        step_ns=batch / rate * 1e9,
        samples_per_s=rate,
        batch=batch,
        unknown="only speeds are published",
        same_way={"batch": row["batch"]},
    )


def _judged(name: str, samples: Sequence[Sample]) -> Family:
    series = series_of(samples)
    sizes = tuple(size.num_units for size in series.sizes)
    if reason := obstacle(series):
        return Family(name=name, sizes=sizes, outcome="refused", words=reason)
    known, largest = series.without_largest(), series.sizes[-1]
    if obstacle(known):
        return Family(name=name, sizes=sizes, outcome="too few", words=f"{series.kind}, one size would be left")
    found, measured_ns = predict(known, [largest.num_units]), largest.mean("step_ns") or 0.0
    low, high, center = (float(values[0]) / 1e6 for values in (found.low_ns, found.high_ns, found.step_ns))
    return Family(
        name=name,
        sizes=sizes,
        outcome="inside" if low <= measured_ns / 1e6 <= high else "outside",
        words=f"{series.kind}, {measured_ns / 1e6:.4g} ms, predicted {center:.4g} ({low:.4g} to {high:.4g})",
    )
