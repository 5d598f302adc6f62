"""Models `srun -n N hpcpace report` of runs too large for this machine: `python -m experiments.bench.scaling_model`.

A model, not a measurement: runs of several sizes are reported on one core of this machine, the processor time of each
part is fitted, and the parts are added up for a run of any size. Two measured cases that are not fitted check it. It
leaves out the file system, the network between nodes, memory bandwidth that processes of a node share, and paging.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from experiments.bench.pairs import measured_apart, on_one_core, timed
from experiments.bench.report_speed import FEW, write_run
from hpcpace.core.config import Config
from hpcpace.core.pool import keep_freed_memory
from hpcpace.core.rundir import RunDirectory, json_text
from hpcpace.core.text import format_bytes
from hpcpace.diagnosis import analyze as analyses
from hpcpace.diagnosis import measure as examination
from hpcpace.diagnosis import operation_figures as operations
from hpcpace.diagnosis.close_up import close_up_columns
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.verdict import main_verdict
from hpcpace.diagnosis.within_steps import StepPanels
from hpcpace.report.run_report import page
from hpcpace.trace.packing import PackPlan, pack_attempt

_ALL, _FEW = 32, len(FEW)
_CHECKED = (192, 300, _ALL)
_TOGETHER = (128, 500, _ALL)
_TINY = (8, 40, _FEW)
_MESSAGE_BYTES, _NUM_MESSAGES = 1 << 26, 4
_EXCHANGE = f"""
import time, numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
values = np.ones({_MESSAGE_BYTES} // 8)
for number in range({_NUM_MESSAGES} + 1):
    comm.Barrier()
    if number == 1:
        begin_s = time.perf_counter()
    if comm.rank:
        comm.send(values, dest=0)
    else:
        values[:] = comm.recv(source=1)
if comm.rank == 0:
    print((time.perf_counter() - begin_s) / {_NUM_MESSAGES})
"""


@dataclass(frozen=True)
class Case:
    """A run to be reported: its size, and how many rows are in memory at once."""

    num_ranks: int
    num_steps: int
    num_operations: int
    max_rows: int = operations.MAX_ROWS

    @property
    def name(self) -> str:
        """What its folder is called."""
        return f"{self.num_ranks}x{self.num_steps}x{self.num_operations}"

    @property
    def num_rows(self) -> int:
        """Operations of all ranks."""
        return self.num_ranks * self.num_steps * self.num_operations


_CASES = (
    Case(64, 200, _ALL),
    Case(64, 400, _ALL),
    Case(64, 800, _FEW),
    Case(64, 800, _FEW, 12_000),
    Case(256, 40, _ALL),
    Case(256, 200, _FEW, 24_000),
    Case(256, 500, _FEW, 24_000),
    Case(1024, 30, _FEW),
)


@dataclass(frozen=True)
class Size:
    """What the parts of a report depend on: ranks, steps, operations, and ranks times ranges of steps."""

    num_ranks: float
    num_steps: float
    num_rows: float
    num_pieces: float


Feature = tuple[str, Callable[[Size], float]]
_CONSTANT: Feature = ("start", lambda size: 1.0)
_RANKS: Feature = ("rank", lambda size: size.num_ranks)
_CELLS: Feature = ("rank and step", lambda size: size.num_ranks * size.num_steps)
_ROWS: Feature = ("operation", lambda size: size.num_rows)
_CLOSE: Feature = ("operation of the close-up", lambda size: _num_close(size))
_PIECES: Feature = ("rank and range", lambda size: size.num_pieces)
PARTS: dict[str, tuple[Feature, ...]] = {
    "read": (_CONSTANT, _RANKS, _CELLS),
    "ranges": (_PIECES, _CELLS, _ROWS),
    "first": (_CONSTANT, _RANKS, _CELLS, _CLOSE),
}
"""What every process reads, what the processes share, and what the first one does alone."""
_MEMORY = (_CONSTANT, _RANKS, _CELLS)


@dataclass(frozen=True)
class Fitted:
    """Coefficients of one part, not negative, and how far the measured values are from them, relative."""

    features: tuple[Feature, ...]
    values: NDArray[np.float64]
    residuals: NDArray[np.float64]

    def __call__(self, size: Size) -> float:
        return float(sum(value * of(size) for (_, of), value in zip(self.features, self.values, strict=True)))


def _num_close(size: Size) -> float:
    """Return how many operations the first process takes apart: of some steps, so that it has about a million."""
    of_step = size.num_rows / size.num_steps
    return float(len(close_up_columns(int(size.num_steps), of_step)) * of_step)


def fit(features: tuple[Feature, ...], sizes: Sequence[Size], measured: Sequence[float]) -> Fitted:
    """Fit a part by least squares of relative errors, without negative coefficients."""
    values = np.array(measured)
    matrix = np.array([[of(size) for _, of in features] for size in sizes]) / values[:, None]
    scale = matrix.max(axis=0)
    found = nnls(matrix / scale, np.ones(len(values)))[0] / scale
    return Fitted(features, found, matrix @ found - 1)


def measure(run: RunDirectory, max_rows: int) -> dict[str, float]:
    """Return seconds of processor time of each part, how many ranges there were, and bytes of memory."""
    seconds: dict[str, float] = {}
    num_ranges: list[int] = []
    table_bytes: list[int] = []
    before_bytes = _peak_bytes()
    read, count = analyses.read_attempt, operations.rank_totals

    def read_and_weigh(*args: Any, **options: Any) -> Any:
        found = read(*args, **options)
        table_bytes.append(sum(trace.size_bytes for trace in found.traces))
        return found

    def counted(*args: Any) -> Any:
        num_ranges.append(1)
        return count(*args)

    module: Any = operations
    module.rank_totals, module._MIN_ROWS = counted, 1
    assert operations.measure_operations.__kwdefaults__ is not None
    operations.measure_operations.__kwdefaults__["max_rows"] = max_rows
    for place, name, part, function in (
        (analyses, "read_attempt", "read", read_and_weigh),
        (examination, "measure_operations", "ranges", operations.measure_operations),
    ):
        setattr(place, name, timed(function, part, seconds, time.process_time))
    keep_freed_memory()  # as the command does
    begin_s = time.process_time()
    analysis = analyses.analyze(
        run, run.attempt(0), Selection(), Config(), begin_stage=lambda _: lambda _done, _all: None
    )
    assert analysis is not None
    json_text(analysis.summary.to_json())
    page(analysis.summary, main_verdict(analysis.summary.verdict), analysis.plots)
    seconds["first"] = time.process_time() - begin_s - sum(seconds.values())
    return {
        **seconds,
        "num_ranges": len(num_ranges),
        # A small run may fit into what the process had before: then a page is the least that can be told.
        "peak_bytes": max(_peak_bytes() - before_bytes, resource.getpagesize()),
        "table_bytes": table_bytes[0],
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _written(folder: Path, case: Case, *, is_packed: bool) -> Path:
    own, packed = folder / case.name, folder / f"{case.name}-packed"
    if not own.exists():
        every = {"operations": FEW} if case.num_operations == _FEW else {}
        write_run(RunDirectory(own), case.num_ranks, case.num_steps, **every)
    if is_packed and not packed.exists():
        shutil.copytree(own, packed)
        pack_attempt(RunDirectory(packed).attempt(0), PackPlan(), begin_stage=lambda _: lambda done, total: None)
    return packed if is_packed else own


@dataclass(frozen=True)
class Model:
    """The fitted parts, seconds of one core of this machine, and bytes.

    Attributes:
        parts: as of `PARTS`.
        gather_s_per_byte: to pack, pass on, unpack and copy figures of steps from another process, in shared memory.
        peak_bytes: of a process that reports alone, by small ranges.
        table_bytes: what every process keeps of the traces, of each rank and step.
    """

    parts: dict[str, Fitted]
    gather_s_per_byte: float
    peak_bytes: Fitted
    table_bytes: float

    def predict(self, size: Size, num_processes: int) -> dict[str, float]:
        """Return the seconds of each part with some processes, each on a core of its own."""
        share = (num_processes - 1) / num_processes
        return {
            "read tables and index, in every process": self.parts["read"](size),
            "measure ranges, shared": self.parts["ranges"](size) / num_processes,
            "gather figures of steps": panel_bytes(size) * share * self.gather_s_per_byte,
            "diagnosis and page, first process alone": self.parts["first"](size),
        }


def panel_bytes(size: Size) -> float:
    """Return the size of the figures of each rank in each step that the first process has of the operations."""
    empty = StepPanels.empty((1, 1), np.zeros)
    return size.num_ranks * size.num_steps * sum(values.nbytes for values in vars(empty).values())


def fit_model(folder: Path, *, is_packed: bool, gather_s_per_byte: float, repeats: int) -> Model:
    """Measure the cases and fit the parts; print how well they fit."""
    sizes, measured = [], []
    for case in _CASES:
        path = _written(folder, case, is_packed=is_packed)
        one = min(
            (
                measured_apart("experiments.bench.scaling_model", "--measure", path, case.max_rows)
                for _ in range(repeats)
            ),
            key=_total_s,
        )
        sizes.append(_size(case, one["num_ranges"]))
        measured.append(one)
    parts = {name: fit(features, sizes, [one[name] for one in measured]) for name, features in PARTS.items()}
    small = [index for index, case in enumerate(_CASES) if case.num_rows < 600_000]
    peak = fit(_MEMORY, [sizes[index] for index in small], [measured[index]["peak_bytes"] for index in small])
    cells = [one["table_bytes"] / (size.num_ranks * size.num_steps) for one, size in zip(measured, sizes, strict=True)]
    model = Model(parts, gather_s_per_byte, peak, min(cells))
    for name, part in parts.items():
        costs = ", ".join(
            f"{value * 1e6:.3g} us a {what}" for (what, _), value in zip(part.features, part.values, strict=True)
        )
        errors = np.abs(part.residuals)
        print(f"  {name}: {costs}; off by {np.median(errors):.0%} in the median, {errors.max():.0%} at most")
    errors = np.abs(peak.residuals)
    print(
        f"  memory: {peak.values[2]:.0f} bytes a rank and step at the peak of a process alone (off by "
        f"{np.median(errors):.0%} in the median, {errors.max():.0%} at most), {model.table_bytes:.0f} of them tables"
    )
    return model


def _total_s(one: dict[str, float]) -> float:
    return sum(one[name] for name in PARTS)


def _size(case: Case, num_ranges: float) -> Size:
    return Size(case.num_ranks, case.num_steps, case.num_rows, case.num_ranks * num_ranges)


def _gather_s_per_byte() -> float:
    done = subprocess.run([*_mpiexec(), "-c", _EXCHANGE], check=True, capture_output=True, text=True)
    return float(done.stdout) / _MESSAGE_BYTES


def _mpiexec() -> list[str]:
    return [str(Path(sys.executable).with_name("mpiexec")), "-n", "2", sys.executable]


def _reported_s(path: Path) -> float:
    """Return the seconds of the clock that two processes take for a report."""
    begin_s = time.perf_counter()
    subprocess.run([*_mpiexec(), "-m", "hpcpace", "report", str(path)], capture_output=True, check=False)
    return time.perf_counter() - begin_s


def check(model: Model, folder: Path, *, is_packed: bool, repeats: int) -> None:
    """Print what the model says of cases that were not fitted, and what was measured, the shortest of the repeats."""
    case = Case(*_CHECKED)
    one = measured_apart(
        "experiments.bench.scaling_model", "--measure", _written(folder, case, is_packed=is_packed), case.max_rows
    )
    size = _size(case, one["num_ranges"])
    said = {name: part(size) for name, part in model.parts.items()}
    print(f"  not fitted, {case.name}, one process:")
    for name in PARTS:
        print(f"    {name}: predicted {said[name]:.2f} s, measured {one[name]:.2f} s ({said[name] / one[name]:.2f})")
    case, tiny = Case(*_TOGETHER), Case(*_TINY)
    path, start = (_written(folder, each, is_packed=is_packed) for each in (case, tiny))
    measured_s = min(_reported_s(path) for _ in range(repeats)) - min(_reported_s(start) for _ in range(repeats))
    # Two processes: two ranges at least, and as many more as rows in memory allow.
    num_ranges = 2 * -(-case.num_rows // (2 * operations.MAX_ROWS))
    said_s = sum(model.predict(_size(case, num_ranges), 2).values())
    said_s -= sum(model.predict(_size(tiny, 2), 2).values())
    print(
        f"  not fitted, {case.name}, `mpiexec -n 2 hpcpace report` less the time of a tiny run: predicted "
        f"{said_s:.2f} s, measured {measured_s:.2f} s of the clock ({said_s / measured_s:.2f})"
    )


def show(model: Model, args: argparse.Namespace) -> None:
    """Print the parts of a large run, the largest one, and whether its memory fits."""
    num_processes = args.nodes * args.processes_per_node
    num_steps = args.records_per_s * args.seconds / _ALL
    num_rows = float(args.ranks) * args.records_per_s * args.seconds
    rows_of_range = max(operations.MAX_ROWS, operations._MIN_ROWS * args.ranks)
    num_ranges = num_processes * np.ceil(num_rows / rows_of_range / num_processes)
    size = Size(args.ranks, num_steps, num_rows, args.ranks * num_ranges)
    parts = model.predict(size, num_processes)
    total_s = sum(parts.values())
    print(
        f"  MODEL: {args.ranks} ranks x {args.records_per_s} records/s x {args.seconds} s = {num_rows:.3g} records in "
        f"{num_steps:.0f} steps, {args.nodes} nodes x {args.processes_per_node} processes: {total_s:.0f} s"
    )
    for name, part_s in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"    {name}: {part_s:.1f} s ({part_s / total_s:.0%})")
    print("    by number of processes: " + ", ".join(_totals(model, size, num_processes)))
    cells = size.num_ranks * size.num_steps
    tables, first = cells * model.table_bytes, cells * model.peak_bytes.values[2]
    fits = args.node_memory_gib * 2**30
    print(
        f"    memory: tables of steps and phases {format_bytes(int(tables))} in EVERY process, "
        f"{format_bytes(int(tables * args.processes_per_node))} a node; the first process needs "
        f"{format_bytes(int(first))}, of which panels {format_bytes(int(panel_bytes(size)))}"
    )
    most_steps = int(fits / max(model.table_bytes * args.processes_per_node, model.peak_bytes.values[2]) / args.ranks)
    verdict = "fits" if num_steps <= most_steps else "DOES NOT FIT, so nobody reaches the time above:"
    print(
        f"    it {verdict} nodes of {args.node_memory_gib} GiB hold {most_steps} of {num_steps:.0f} steps of "
        f"{args.ranks} ranks ({most_steps * _ALL / args.records_per_s / 60:.0f} minutes)"
    )


def _totals(model: Model, size: Size, most: int) -> list[str]:
    numbers = [number for number in (1, 4, 16, 64, 256, 1024, 4096) if number <= most]
    return [f"{number}: {sum(model.predict(size, number).values()):.0f} s" for number in numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--records-per-s", type=int, default=100, help="of each rank")
    parser.add_argument("--seconds", type=int, default=86_400)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--processes-per-node", type=int, default=16)
    parser.add_argument("--node-memory-gib", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=1, help="measure each case so often and take the shortest")
    parser.add_argument("--only", choices=("a file per rank", "packed"), default="")
    parser.add_argument("--quick", action="store_true", help="measure three small cases, which say nothing")
    parser.add_argument("--folder", type=Path, help="keep the runs in this folder and reuse those in it")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    # One core: what the parts take, not how well threads share it.
    if args.measure:
        on_one_core()
        print(json.dumps(measure(RunDirectory(Path(args.measure[0])), int(args.measure[1]))))
        return
    if args.quick:
        global _CASES, _CHECKED, _TOGETHER
        _CASES = tuple(Case(ranks, steps, _FEW, 2_000) for ranks, steps in ((8, 40), (16, 40), (8, 120)))
        _CHECKED = _TOGETHER = (8, 60, _ALL)
    with tempfile.TemporaryDirectory() as temporary:
        gather_s_per_byte = _gather_s_per_byte()
        print(f"figures of steps from another process: {1e-9 / gather_s_per_byte:.2f} GB/s in shared memory")
        for name, is_packed in (("a file per rank", False), ("packed", True)):
            if args.only not in ("", name):
                continue
            print(f"{name}: processor time of one core", flush=True)
            folder = args.folder or Path(temporary)
            model = fit_model(folder, is_packed=is_packed, gather_s_per_byte=gather_s_per_byte, repeats=args.repeats)
            check(model, folder, is_packed=is_packed, repeats=1 if args.quick else 1 + args.repeats)
            show(model, args)
    print("left out: the file system, the network between nodes, bandwidth of memory that processes share, paging")


if __name__ == "__main__":
    main()
