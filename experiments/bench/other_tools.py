"""A report beside other tools that split waiting from transfer: `python -m experiments.bench.other_tools`.

HolisticTraceAnalysis reads PyTorch profiler traces, hpcpace its own: the same records, written both ways, are read in
turn by processes of their own. Then four runs of known truth show whom each tool blames. The other tool comes from
PyPI into a temporary environment, so that its versions of pandas and plotly stay apart; without PyPI it is left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.bench.kineto import write_kineto
from experiments.bench.pairs import alternate
from experiments.bench.report_speed import write_run
from hpcpace.diagnosis.evidence import gather_evidence
from hpcpace.rundir import Attempt, RunDirectory
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.encoding import row_dtypes
from hpcpace.trace.reader import RankTrace
from hpcpace.trace.schema import Op
from hpcpace.trace.writer import TraceWriter
from hpcpace.units import NS_PER_MS

_NUM_RANKS = 8
_WORLD, _SLOT = 0, 1
_LAYER = (Op.ALL_REDUCE, _SLOT, 3_145_728, True, 0.3, 0.5)
_BUCKET = (Op.ALL_REDUCE, _WORLD, 26_214_400, False, 1.0, 0.05)
_LAST = (Op.ALL_REDUCE, _WORLD, 13_107_200, True, 1.5, 0.4)
_OPERATIONS = (*(_LAYER,) * 8, *(_LAYER, _LAYER, _BUCKET) * 6, _LAST)
_BLAME_OPERATIONS = (*(_LAYER,) * 16, _LAST)
_BLAME_STEPS = 100
_FOUND = "last-to-start.txt"
_LATE_RANK, _INNOCENT_RANK = 5, 2
_DELAY_NS = 3 * NS_PER_MS
# What HolisticTraceAnalysis imports; its JupyterLab is for its notebooks.
_HTA = (
    ("HolisticTraceAnalysis==0.5.0", "--no-deps"),
    ("numpy", "pandas", "plotly", "networkx", "pydot", "psutil", "pyyaml", "ijson"),
)

# A process tells its own peak: the one that the kernel hands to its parent begins with the parent's.
_WITH_PEAK = """
import atexit, pathlib, resource, sys
def keep_peak(path=sys.argv.pop(1)):
    own = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
    pathlib.Path(path).write_text(str(max(int(own), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024))
atexit.register(keep_peak)
"""
_REPORT = """
import runpy
runpy.run_module("hpcpace", run_name="__main__", alter_sys=True)
"""
_ANALYSE_HTA = """
import json
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
pathlib.Path(sys.argv[2]).write_text(json.dumps(counts))
"""
_ANALYSE_TRACELENS = """
import json
from TraceLens import NcclAnalyser
num_ranks = int(sys.argv[3])
analyser = NcclAnalyser([f"{sys.argv[1]}/rank{rank}_trace.json" for rank in range(num_ranks)], num_ranks)
found = analyser.build_df_nccl_implicit_sync_cat(detailed=True)
analyser.build_df_summary_nccl_implicit_sync_cat(agg_metrics=["mean"])
# It names only who came first; who came last, its waits say: of the largest operation, before which a rank is late.
found = found[found["Full msg size (MB)"] == found["Full msg size (MB)"].max()]
waits = found[[f"rank_{rank}_wait_time" for rank in range(num_ranks)]].to_numpy()
last = waits.argmin(axis=1).tolist()
pathlib.Path(sys.argv[2]).write_text(json.dumps({rank: last.count(rank) for rank in range(num_ranks)}))
"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one process took; its peak of memory is that of its largest process."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Tool:
    """Another tool: the interpreter that has it, and what it runs on a folder of traces."""

    name: str
    python: Path
    code: str

    def measure(self, folder: Path) -> Sample:
        """Run all its analyses."""
        return _run_apart(self.python, self.code, folder, folder / _FOUND, _NUM_RANKS, result=folder / _FOUND)

    def blame(self, folder: Path) -> str:
        """Return whom it names, after `measure`, with how often."""
        counts = {int(rank): count for rank, count in json.loads((folder / _FOUND).read_text()).items()}
        if not sum(counts.values()):
            return "nobody"
        worst = max(counts, key=counts.__getitem__)
        return f"rank {worst}, last to start in {100 * counts[worst] / sum(counts.values()):.0f} % of the steps"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collectives", type=int, default=5_000, help="of each of the 8 ranks")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--hta", type=Path, help="an interpreter that has HolisticTraceAnalysis; made otherwise")
    parser.add_argument("--tracelens", type=Path, help="an interpreter that has AMD's TraceLens, which PyPI has not")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tools = []
        hta, reason = (args.hta, "") if args.hta else _environment(folder / "venv")
        if hta:
            tools.append((Tool(name="HolisticTraceAnalysis", python=hta, code=_ANALYSE_HTA), args.collectives))
        else:
            print(f"HolisticTraceAnalysis is left out: {reason}")
        if args.tracelens:
            # It searches all rows for each collective: its time grows with their square.
            tool = Tool(name="TraceLens", python=args.tracelens, code=_ANALYSE_TRACELENS)
            tools.append((tool, args.collectives // 4))
        for tool, num_collectives in tools:
            _compare(tool, folder / tool.name, num_collectives, args.pairs)
        _print_blame(folder / "blame", [tool for tool, _ in tools])


def _environment(path: Path) -> tuple[Path | None, str]:
    """Return the interpreter of a new environment with HolisticTraceAnalysis, or None and why there is none."""
    python = path / "bin" / "python"
    commands = [[sys.executable, "-m", "venv", str(path)]]
    commands += [[str(python), "-m", "pip", "install", "--quiet", *what] for what in _HTA]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        except subprocess.TimeoutExpired:
            return None, f"{' '.join(command[1:])} took longer than 10 minutes"
        if done.returncode:
            return None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return python, ""


def _compare(tool: Tool, folder: Path, num_collectives: int, num_pairs: int) -> None:
    num_steps = -(-num_collectives // len(_OPERATIONS))
    run, kineto = RunDirectory(folder / "run"), folder / "kineto"
    attempt = run.new_attempt()
    for trace in _traces(folder / "drawn", num_steps, _OPERATIONS):
        _write_changed(attempt, trace)
    num_events = write_kineto(kineto, gather_evidence(read_attempt(attempt).traces))
    own: list[Sample] = []
    others: list[Sample] = []

    def kept(samples: list[Sample], sample: Sample) -> float:
        samples.append(sample)
        return sample.wall_s

    pairs = alternate(lambda: kept(own, _report(run)), lambda: kept(others, tool.measure(kineto)), num_pairs=num_pairs)
    own, others = own[-num_pairs:], others[-num_pairs:]
    num_records = _NUM_RANKS * num_steps * len(_OPERATIONS)
    own_bytes, other_bytes = _size_bytes(attempt.trace_dir, "*.h5"), _size_bytes(kineto, "*.json")
    print(
        f"{_NUM_RANKS} ranks x {num_steps} steps x {len(_OPERATIONS)} all-reduces, {num_records:,} records, "
        f"{num_events:,} events for {tool.name}; {num_pairs} pairs, medians"
    )
    _print_row("hpcpace", num_records, own, own_bytes)
    _print_row(tool.name, num_records, others, other_bytes)
    rates = (pairs.b / pairs.a).tolist()
    cpus = [other.cpu_s / mine.cpu_s for other, mine in zip(others, own, strict=True)]
    peaks = [other.peak_bytes / mine.peak_bytes for other, mine in zip(others, own, strict=True)]
    print(
        f"  {tool.name} / hpcpace: time {_spread(rates)}, CPU {_spread(cpus)}, peak of memory {_spread(peaks)}, bytes "
        f"on disk {other_bytes / own_bytes:.0f}, with gzip {_zipped_bytes(kineto) / own_bytes:.1f}; time for an event "
        f"of its files beside that of a record {statistics.median(rates) * num_records / num_events:.2f}",
        flush=True,
    )


def _traces(folder: Path, num_steps: int, operations: tuple[tuple[object, ...], ...]) -> Sequence[RankTrace]:
    write_run(RunDirectory(folder), _NUM_RANKS, num_steps, operations)
    return read_attempt(RunDirectory(folder).attempt(0)).traces


def _print_row(name: str, num_records: int, samples: list[Sample], size_bytes: int) -> None:
    wall_s, cpu_s = (statistics.median(getattr(sample, name) for sample in samples) for name in ("wall_s", "cpu_s"))
    peak_bytes = statistics.median(sample.peak_bytes for sample in samples)
    print(
        f"  {name}: {num_records / wall_s:,.0f} records/s, {wall_s:.2f} s, {cpu_s:.2f} s of CPU, "
        f"peak {peak_bytes / 2**20:.0f} MiB, {size_bytes / num_records:.1f} bytes a record on disk"
    )


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.1f} [{min(ratios):.1f} to {max(ratios):.1f}]"


def _size_bytes(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


def _zipped_bytes(folder: Path) -> int:
    return sum(len(gzip.compress(path.read_bytes(), 6)) for path in folder.glob("*.json"))


def _report(run: RunDirectory) -> Sample:
    return _run_apart(Path(sys.executable), _REPORT, "report", run.path, result=run.summary_json)


def _run_apart(python: Path, code: str, *args: object, result: Path) -> Sample:
    """Run a program and measure it; it must write `result`, whatever its exit code says of what it found."""
    result.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        peak, log = Path(folder) / "peak", Path(folder) / "log"
        command = [str(python), "-c", _WITH_PEAK + code, str(peak), *map(str, args)]
        with log.open("w") as output:
            begin_s = time.perf_counter()
            child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(child.pid, 0)
            wall_s = time.perf_counter() - begin_s
        child.returncode = os.waitstatus_to_exitcode(status)
        if not result.exists():
            sys.exit(f"{python} ended with {child.returncode} and no {result.name}:\n{log.read_text()[-2000:]}")
        cpu_s = usage.ru_utime + usage.ru_stime
        return Sample(wall_s=wall_s, cpu_s=cpu_s, peak_bytes=int(peak.read_text()))


def _print_blame(folder: Path, tools: list[Tool]) -> None:
    traces = _traces(folder / "sound", _BLAME_STEPS, _BLAME_OPERATIONS)
    late, wrong = f"rank {_LATE_RANK} 3 ms late in each step", f"clock of rank {_INNOCENT_RANK} wrong by +3 ms"
    cases = (
        ("nothing wrong", False, False),
        (late, True, False),
        (wrong, False, True),
        (f"{late}, and {wrong}", True, True),
    )
    print(f"whom they blame, {_NUM_RANKS} ranks x {_BLAME_STEPS} steps")
    for number, (case, is_late, is_clock_wrong) in enumerate(cases):
        run, kineto = RunDirectory(folder / f"run-{number}"), folder / f"kineto-{number}"
        attempt = run.new_attempt()
        for trace in traces:
            is_innocent = trace.header.rank == _INNOCENT_RANK
            _write_changed(attempt, trace, is_late=is_late, is_clock_wrong=is_clock_wrong and is_innocent)
        write_kineto(kineto, gather_evidence(read_attempt(attempt).traces))
        _report(run)
        print(f"  {case}\n    hpcpace: {_verdict(run)}")
        for tool in tools:
            tool.measure(kineto)
            print(f"    {tool.name}: {tool.blame(kineto)}", flush=True)


def _verdict(run: RunDirectory) -> str:
    verdict = json.loads(run.summary_json.read_text())["verdict"]
    culprits = [f"{culprit['kind']} {culprit['id']}" for culprit in verdict["culprits"]]
    modes = [finding["mode"] for finding in verdict["findings"]] or [verdict["mode"]]
    return f"{' + '.join(modes)}, blames {', '.join(culprits) or 'nobody'}"


def _write_changed(attempt: Attempt, trace: RankTrace, *, is_late: bool = False, is_clock_wrong: bool = False) -> None:
    """Write a trace again, of one rank on each host in data parallelism; where `is_late`, all wait for one of them."""
    rank, done, dtypes = trace.header.rank, trace.tables["collectives"], row_dtypes()
    last_ns = np.sort(done["enter_ns"][done["bytes"] == _LAST[2]])
    # What comes after is later on all ranks: on the late one from its enter on, on the others from their exit on.
    late_from_ns = last_ns - (rank == _LATE_RANK)
    header = replace(
        trace.header, node=rank, host=f"n{rank}", host_key=f"n{rank}", local_rank=0, local_size=1,
        mesh=f"dp={_NUM_RANKS}", dp=rank, tp=0,
    )  # fmt: skip
    writer = TraceWriter(attempt.trace_file(rank), header)
    for name, table in trace.tables.items():
        rows = np.zeros(len(table), dtypes[name])
        for column in dtypes[name].names or ():
            rows[column] = table[column]
            if is_late and column in ("begin_ns", "end_ns", "enter_ns", "exit_ns", "local_ns", "time_ns"):
                rows[column] += _DELAY_NS * np.searchsorted(late_from_ns, rows[column])
        if is_late and name == "collectives":
            rows["blocked_ns"] += rows["exit_ns"] - rows["enter_ns"] - (done["exit_ns"] - done["enter_ns"])
        if is_clock_wrong and name == "clock":
            rows["offset_ns"] -= _DELAY_NS
        writer.add(name, rows)
    writer.close()


if __name__ == "__main__":
    main()
