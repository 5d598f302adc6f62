"""MLPerf training results of one system at several sizes: `python -m experiments.scale_lab.published`.

Where the batches of all sizes of a system and benchmark agree, or those of some, the largest of these is predicted from
the others, if these are two or more. Where those of all do not, the law is to be refused. tests/data/mlperf/README.md
says where the data are from; `--extract ROUND=GITDIR...` takes them from copies of the repositories.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcpace.core.exposition import csv_bytes
from hpcpace.runs.scaling.law import obstacle, predict
from hpcpace.runs.scaling.samples import Sample
from hpcpace.runs.scaling.sizes import series_of

DATA = Path(__file__).parents[2] / "tests" / "data" / "mlperf" / "scaling.csv"
COLUMNS = ("round", "organisation", "system", "benchmark", "nodes", "accelerators", "batch", "run", "samples_per_s")
_RESULT = re.compile(r"([^/]+)/results/([^/]+)/([^/]+)/result_(\d+)\.txt")
# What of a system's name says how many nodes it has, or which container.
_SIZE = re.compile(r"(_n\d+|^\d+x|-N\d+|(?<=v5p-)\d+-|(?<=v5e-)\d+-|-\d+$|_?ngc[\d.]+)")
_MARK = ":::MLLOG"
_MAX_RUNS = 10


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.scale_lab.published", description=__doc__)
    parser.add_argument("--extract", nargs="+", metavar="ROUND=GITDIR", help=f"write {DATA.name} anew from these")
    args = parser.parse_args()
    if args.extract:
        rows = [row for pair in args.extract for row in _extracted(*pair.split("=", 1))]
        DATA.write_bytes(csv_bytes(COLUMNS, rows))
    found = families()
    for family in found:
        print(f"{family.outcome:8} {family.name} at {', '.join(map(str, family.sizes))} nodes: {family.words}")
    counts = {
        outcome: sum(family.outcome == outcome for family in found) for outcome in sorted({f.outcome for f in found})
    }
    print(f"{len(found)} systems with several sizes: {', '.join(f'{count} {name}' for name, count in counts.items())}")


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


def _extracted(of_round: str, folder: str) -> Iterator[Sequence[Any]]:
    """Yield the rows of a repository of results, of systems that have several sizes."""
    git = ["git", f"--git-dir={folder}"]
    listed = subprocess.run([*git, "ls-tree", "-r", "--name-only", "HEAD"], capture_output=True, text=True, check=True)
    names = set(listed.stdout.splitlines())
    by_system: dict[tuple[str, ...], list[Sequence[Any]]] = defaultdict(list)
    with subprocess.Popen([*git, "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        for name in sorted(names):
            found = _RESULT.fullmatch(name)
            if not found or int(found[4]) >= _MAX_RUNS:
                continue
            organisation, system, benchmark, run = found.groups()
            shape_file = f"{organisation}/systems/{system}.json"
            shape = _json(_content(reader, shape_file)) if shape_file in names else {}
            nodes, accelerators = (_number(shape.get(key)) for key in ("number_of_nodes", "accelerators_per_node"))
            batch, rate = _speed(_content(reader, name))
            if nodes and batch and rate:
                family = (of_round, organisation, _SIZE.sub("", system), benchmark)
                by_system[family].append([*family, nodes, accelerators, f"{batch:g}", run, rate])
    for rows in by_system.values():
        if len({row[COLUMNS.index("nodes")] for row in rows}) > 1:
            yield from rows


def _content(reader: subprocess.Popen[bytes], name: str) -> str:
    """Return a file; empty where a copy of the repository lacks it, as of the largest ones."""
    assert reader.stdin is not None and reader.stdout is not None
    reader.stdin.write(f"HEAD:{name}\n".encode())
    reader.stdin.flush()
    head = reader.stdout.readline().split()
    if len(head) < 3:
        return ""
    content = reader.stdout.read(int(head[2]) + 1)
    return content.decode(errors="replace")


def _json(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _number(value: Any) -> int:
    found = re.search(r"\d+", str(value))
    return int(found[0]) if found else 0


def _speed(log: str) -> tuple[float, float]:
    """Return batch and samples per second of a run: the median that it logged, else its samples over its run time."""
    batch = count = start_ms = stop_ms = 0.0
    logged: list[float] = []
    for text in log.splitlines():
        try:
            entry = json.loads(text.partition(_MARK)[2])
        except ValueError:
            continue
        key, value, more = entry.get("key"), entry.get("value"), entry.get("metadata") or {}
        if key == "global_batch_size":
            batch = float(value)
        elif key == "run_start":
            start_ms = entry["time_ms"]
        elif key == "run_stop":
            stop_ms = entry["time_ms"]
        elif key == "tracked_stats" and isinstance(value, dict) and "throughput" in value:
            logged.append(float(value["throughput"]))
        elif key == "eval_accuracy":
            count = more.get("samples_count", more.get("epoch_num", count))
    if logged:
        return batch, sorted(logged)[len(logged) // 2]
    return batch, count / (stop_ms - start_ms) * 1e3 if count > 1000 and stop_ms > start_ms else 0.0


if __name__ == "__main__":
    main()
