"""The tools that a report is compared with: how to get and run each, and in which words it names a rank.

Each runs all its analyses that say where ranks wait, and writes whom it names into a file.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.apart import Limits, NotFinished, Sample, run_apart
from experiments.bench.kineto import write_kineto
from experiments.bench.timeline import Timeline
from experiments.bench.what_if import write_what_if

_FOUND = "found.txt"
# What HolisticTraceAnalysis imports; its JupyterLab is for its notebooks.
_HTA_PACKAGES = (
    ("HolisticTraceAnalysis==0.5.0", "--no-deps"),
    ("numpy", "pandas", "plotly", "networkx", "pydot", "psutil", "pyyaml", "ijson"),
)
_LAST = """
def last(counts):
    if not sum(counts.values()):
        return "nobody"
    worst = max(counts, key=counts.__getitem__)
    return f"rank {worst}, last to start in {100 * counts[worst] / sum(counts.values()):.0f} % of the steps"
"""
_HTA = """
from hta.analyzers.straggler import find_stragglers_with_late_start_comm_kernels as late_starts
from hta.trace_analysis import TraceAnalysis
counts = {}
def count(*args):
    found = late_starts(*args)
    counts.update({int(rank): int(number) for rank, number in found.items()})
    return found
analysis = TraceAnalysis(trace_dir=sys.argv[1])
overlap = analysis.get_comm_comp_overlap(visualize=False)
parts = analysis.get_temporal_breakdown(visualize=False)
analysis.get_potential_stragglers(num_candidates=1, visualize=False, straggler_identification_impl=count)
assert len(overlap) == len(parts) == int(sys.argv[3])
pathlib.Path(sys.argv[2]).write_text(last(counts))
"""
_TRACELENS = """
from TraceLens import NcclAnalyser
num_ranks = int(sys.argv[3])
analyser = NcclAnalyser([f"{sys.argv[1]}/rank{rank}_trace.json" for rank in range(num_ranks)], num_ranks)
found = analyser.build_df_nccl_implicit_sync_cat(detailed=True)
analyser.build_df_summary_nccl_implicit_sync_cat(agg_metrics=["mean"])
# It names only who came first; who came last, its waits say: of the last operation of a step, the only one of its size.
found = found[found["Full msg size (MB)"] == found["Full msg size (MB)"].min()]
waits = found[[f"rank_{rank}_wait_time" for rank in range(num_ranks)]].to_numpy()
lasts = waits.argmin(axis=1).tolist()
pathlib.Path(sys.argv[2]).write_text(last({rank: lasts.count(rank) for rank in range(num_ranks)}))
"""
_TO_PARQUET = """
import numpy, pandas
rows = dict(numpy.load(f"{sys.argv[1]}/rows.npz"))
names = rows.pop("names")
table = pandas.DataFrame(rows | {"optype": pandas.Categorical.from_codes(rows["optype"], names)})
table.to_parquet(sys.argv[2])
"""
_WHAT_IF = """
import analyzer
# One of its modules imports another one by its bare name.
sys.path.append(analyzer.__path__[0])
from analyzer.metatypes import JobMeta
from analyzer.wia import WhatIfAnalyzer
num_ranks = int(sys.argv[3])
meta = JobMeta(trial_name="bench", dp_size=num_ranks, world_size=num_ranks)
found = WhatIfAnalyzer(f"{sys.argv[1]}/rows.parquet", root=None, steps=None).analyze(meta)
ratio, by_rank = found.blocking_slowdown, found.blocking_decompose_by_dp_rank
if by_rank is None:
    words = f"nobody: steps are {ratio:.2f} times as long as without stragglers, below its threshold"
else:
    worst = max(by_rank, key=by_rank.__getitem__)
    words = f"rank {worst}: steps are {ratio:.2f} times as long as without stragglers, {by_rank[worst]:.2f} by it alone"
pathlib.Path(sys.argv[2]).write_text(words)
"""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another tool.

    Attributes:
        name: of the tool.
        python: the interpreter that has it.
        code: what it runs on a folder of traces; it writes whom it names into a file.
        write: writes traces of all ranks into a folder as the tool reads them, and returns the number of their rows.
        files: pattern of the names of what it reads.
        prepare: what its interpreter does with these traces beforehand, if anything.
    """

    name: str
    python: Path
    code: str
    write: Callable[[Path, Sequence[Timeline]], int]
    files: str
    prepare: str = ""

    def input(self, folder: Path, timelines: Sequence[Timeline], limits: Limits) -> int:
        """Write its input into a folder, and return the number of rows.

        Raises:
            NotFinished: the input cannot be made within the limits.
        """
        num_rows = self.write(folder, timelines)
        if self.prepare:
            result = folder / "rows.parquet"
            run_apart(self.python, self.prepare, folder, result, result=result, limits=limits)
        return num_rows

    def measure(self, folder: Path, num_ranks: int, limits: Limits) -> Sample:
        """Run all its analyses.

        Raises:
            NotFinished: they take more than the limits, or fail.
        """
        found = folder / _FOUND
        return run_apart(self.python, _LAST + self.code, folder, found, num_ranks, result=found, limits=limits)

    def named(self, folder: Path) -> str:
        """Return whom it named when it was measured."""
        return (folder / _FOUND).read_text()

    def size_bytes(self, folder: Path) -> int:
        """Return the size of what it reads."""
        return sum(path.stat().st_size for path in folder.glob(self.files))


def _write_all(folder: Path, timelines: Sequence[Timeline]) -> int:
    return sum(write_kineto(folder, timeline) for timeline in timelines)


def hta(python: Path) -> Peer:
    """Return HolisticTraceAnalysis: load, overlap, temporal breakdown and stragglers."""
    return Peer(name="HolisticTraceAnalysis", python=python, code=_HTA, write=_write_all, files="*.json")


def tracelens(python: Path) -> Peer:
    """Return AMD's TraceLens: its tables of collectives."""
    return Peer(name="TraceLens", python=python, code=_TRACELENS, write=_write_all, files="*.json")


def what_if(python: Path) -> Peer:
    """Return the what-if analyzer of ByteDance Seed: steps simulated without stragglers, and with one rank's."""
    return Peer(
        name="what-if analyzer",
        python=python,
        code=_WHAT_IF,
        write=write_what_if,
        files="*.parquet",
        prepare=_TO_PARQUET,
    )


def hta_environment(path: Path) -> Path:
    """Return the interpreter of a new environment with HolisticTraceAnalysis.

    Its versions of pandas and plotly stay apart there.

    Raises:
        NotFinished: PyPI cannot be reached.
    """
    python = path / "bin" / "python"
    commands = [[sys.executable, "-m", "venv", str(path)]]
    commands += [[str(python), "-m", "pip", "install", "--quiet", *what] for what in _HTA_PACKAGES]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        except subprocess.TimeoutExpired:
            raise NotFinished(f"{' '.join(command[1:])} took longer than 10 minutes") from None
        if done.returncode:
            raise NotFinished((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return python
