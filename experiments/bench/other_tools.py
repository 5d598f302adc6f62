"""Compares a report with other tools that split waiting from transfer: `python -m experiments.bench.other_tools`.

The same records, written as each tool reads them, are read in turn by processes of their own: by the floor, which is
the least that a report has to do (experiments/bench/floor.py), by `hpcpace report`, and by the others. Then four runs
of known truth show whom each tool names.

Each of the others takes part if there is the interpreter of an environment in which it can be imported: for
HolisticTraceAnalysis `pip install --no-deps HolisticTraceAnalysis==0.5.0` and numpy, pandas, plotly, networkx, pydot,
psutil, pyyaml and ijson; TraceLens and the what-if analyzer are not on PyPI.

Options:
  --records N...    compare with so many records [40000 1000000 10000000]
  --repeats N       [3]
  --blame-steps N   steps of the runs whose slow rank is known [100]
  --limit-s X       end a tool that takes longer for a size [600]
  --hta PATH        Python with HolisticTraceAnalysis
  --tracelens PATH  Python with AMD's TraceLens
  --what-if PATH    Python with ByteDance's what-if analyzer
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil

from experiments.bench.other_formats import Timeline, timelines, write_kineto, write_what_if
from experiments.bench.pairs import Limits, NotFinished, Sample, run_apart
from experiments.bench.report_speed import write_run
from experiments.options import command_line
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.core.text import NS_PER_MS
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.reader import RankTrace
from hpcpace.trace.schema import Op, row_dtypes
from hpcpace.trace.writer import TraceWriter

_FOUND = "found.txt"
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


def _peers(hta: Path | None, tracelens: Path | None, what_if: Path | None) -> list[Peer]:
    """Return the tools that there are interpreters of.

    HolisticTraceAnalysis: load, overlap, temporal breakdown and stragglers. AMD's TraceLens: its tables of collectives.
    The what-if analyzer of ByteDance Seed: steps simulated without stragglers, and with one rank's.
    """
    as_rows = {"code": _WHAT_IF, "prepare": _TO_PARQUET, "write": write_what_if, "files": "*.parquet"}
    profiles = {"write": _write_all, "files": "*.json"}
    tools = {
        "HolisticTraceAnalysis": (hta, {"code": _HTA, **profiles}),
        "TraceLens": (tracelens, {"code": _TRACELENS, **profiles}),
        "what-if analyzer": (what_if, as_rows),
    }
    return [Peer(name=name, python=python, **how) for name, (python, how) in tools.items() if python is not None]


_NUM_RANKS = 8
_WORLD = 0
# A step in data parallelism, which all of the tools can read: buckets of gradients are reduced while the backward pass
# goes on, and the optimizer waits for the last one.
_BUCKET = (Op.ALL_REDUCE, _WORLD, 26_214_400, False, 0.3, 0.5)
_OTHER_TOOLS_LAST = (Op.ALL_REDUCE, _WORLD, 13_107_200, True, 1.5, 0.5)
_OPERATIONS = (*(_BUCKET,) * 26, _OTHER_TOOLS_LAST)
_LATE_RANK, _INNOCENT_RANK = 5, 2
_DELAY_NS = 3 * NS_PER_MS
# Of what is free when it begins: others may need the rest.
_MEMORY_SHARE = 0.5
_REPORT = """
import runpy
runpy.run_module("hpcpace", run_name="__main__", alter_sys=True)
"""
_FLOOR = """
from experiments.bench.floor import split
found = split(pathlib.Path(sys.argv[1]))
pathlib.Path(sys.argv[2]).write_text(f"{found.num_records} {found.wait_ns.tolist()} {found.transfer_ns.tolist()}")
"""


@dataclass(kw_only=True)
class Contestant:
    """Who takes part at one size.

    Attributes:
        name: of the tool.
        measure: runs it once.
        size_bytes: of what it reads.
        samples: what it took so far.
        reason: why it takes part no longer; empty while it does.
        has_failed: whether it was run and did not finish.
    """

    name: str
    measure: Callable[[], Sample]
    size_bytes: int
    samples: list[Sample] = field(default_factory=list)
    reason: str = ""
    has_failed: bool = False

    def run(self, limit_s: float) -> None:
        """Measure it once more, unless it has failed or taken its time."""
        if self.reason or sum(sample.wall_s for sample in self.samples) > limit_s:
            return
        try:
            self.samples.append(self.measure())
        except NotFinished as error:
            self.reason, self.has_failed = str(error), True

    def median(self, attribute: str) -> float:
        """Return the median of its samples."""
        return statistics.median(getattr(sample, attribute) for sample in self.samples)


@dataclass(kw_only=True)
class Comparison:
    """All sizes, from the smallest on.

    Attributes:
        tools: that take part beside the floor and hpcpace.
        num_repeats: how often each is measured at each size.
        limits: of each process.
        taken_s: what each tool took for a record at the size before; infinite if it failed.
    """

    tools: Sequence[Peer]
    num_repeats: int
    limits: Limits
    taken_s: dict[str, float] = field(default_factory=dict)

    def run(self, folder: Path, num_records: int) -> None:
        """Let all take turns on a run of about this size, and print what each took."""
        num_steps = -(-num_records // (_NUM_RANKS * len(_OPERATIONS)))
        num_records = _NUM_RANKS * num_steps * len(_OPERATIONS)
        print(f"{num_records:,} records: {_NUM_RANKS} ranks x {num_steps} steps x {len(_OPERATIONS)} all-reduces")
        run = RunDirectory(folder / "run")
        attempt = run.new_attempt()
        for trace in _traces(folder / "drawn", num_steps):
            _write_changed(attempt, trace)
        size_bytes = sum(path.stat().st_size for path in attempt.trace_dir.glob("*.h5"))
        ours = [
            Contestant(name="floor", measure=lambda: _floor(attempt, folder, self.limits), size_bytes=size_bytes),
            Contestant(name="hpcpace", measure=lambda: _report(run, self.limits), size_bytes=size_bytes),
        ]
        everyone = [*ours, *(self._contestant(tool, folder, attempt, num_records) for tool in self.tools)]
        for number in range(self.num_repeats):
            for one in everyone[:: -1 if number % 2 else 1]:
                one.run(self.limits.wall_s)
        for one in everyone:
            if one in ours and one.has_failed:
                sys.exit(f"{one.name}: {one.reason}")
            _print_row(one, num_records, *ours)
            if one.samples:
                self.taken_s[one.name] = one.median("wall_s") / num_records
            elif one.has_failed:
                self.taken_s[one.name] = math.inf

    def _contestant(self, tool: Peer, folder: Path, attempt: Attempt, num_records: int) -> Contestant:
        own = folder / tool.write.__name__
        one = Contestant(name=tool.name, measure=lambda: tool.measure(own, _NUM_RANKS, self.limits), size_bytes=0)
        expected_s = self.taken_s.get(tool.name, 0.0) * num_records
        if expected_s > self.limits.wall_s:
            would = f"at the speed of fewer it would take {expected_s:,.0f} s"
            would = would if expected_s < math.inf else "it failed with fewer"
            one.reason = f"not run with so many records: {would}"
            return one
        try:
            if not own.exists():
                tool.input(own, list(timelines(attempt)), self.limits)
            one.size_bytes = tool.size_bytes(own)
        except NotFinished as error:
            one.reason, one.has_failed = f"its input is not written: {error}", True
        return one


def main() -> None:
    args = command_line(__doc__)
    limits = Limits(wall_s=args.limit_s, memory_bytes=int(_MEMORY_SHARE * psutil.virtual_memory().available))
    with tempfile.TemporaryDirectory() as temporary:
        tools = _peers(args.hta, args.tracelens, args.what_if)
        comparison = Comparison(tools=tools, num_repeats=args.repeats, limits=limits)
        for num_records in sorted(args.records):
            with tempfile.TemporaryDirectory(dir=temporary) as folder:
                comparison.run(Path(folder), num_records)
        _print_blame(Path(temporary) / "blame", args.blame_steps, tools, limits)


def _floor(attempt: Attempt, folder: Path, limits: Limits) -> Sample:
    found = folder / "floor.txt"
    return run_apart(Path(sys.executable), _FLOOR, attempt.trace_dir, found, result=found, limits=limits)


def _report(run: RunDirectory, limits: Limits) -> Sample:
    return run_apart(Path(sys.executable), _REPORT, "report", run.path, result=run.summary_json, limits=limits)


def _print_row(one: Contestant, num_records: int, floor: Contestant, own: Contestant) -> None:
    if not one.samples:
        print(f"  {one.name:22} {one.reason}", flush=True)
        return
    wall_s = one.median("wall_s")
    compared = ""
    if one is own:
        compared = f"; time {_ratio(own, floor)} times floor, target 5"
    elif one is not floor:
        compared = f"; time {_ratio(one, floor)} times floor, {_ratio(one, own)} times hpcpace"
    print(
        f"  {one.name:22} {wall_s:7.2f} s, {num_records / wall_s:11,.0f} records/s, {one.median('cpu_s'):7.2f} s of "
        f"CPU, peak {one.median('peak_bytes') / 2**20:6.0f} MiB, {one.size_bytes / num_records:6.1f} bytes a record"
        f"{compared} ({len(one.samples)} runs)",
        flush=True,
    )


def _ratio(one: Contestant, other: Contestant) -> str:
    ratios = [mine.wall_s / theirs.wall_s for mine, theirs in zip(one.samples, other.samples, strict=False)]
    return f"{statistics.median(ratios):.1f} [{min(ratios):.1f} to {max(ratios):.1f}]"


def _traces(folder: Path, num_steps: int) -> Sequence[RankTrace]:
    write_run(RunDirectory(folder), _NUM_RANKS, num_steps, _OPERATIONS)
    return read_attempt(RunDirectory(folder).attempt(0)).traces


def _print_blame(folder: Path, num_steps: int, tools: Sequence[Peer], limits: Limits) -> None:
    traces = _traces(folder / "sound", num_steps)
    late, wrong = f"rank {_LATE_RANK} 3 ms late in each step", f"clock of rank {_INNOCENT_RANK} wrong by +3 ms"
    cases = (("nothing wrong", False, False), (late, True, False), (wrong, False, True))
    cases += ((f"{late}, and {wrong}", True, True),)
    print(f"whom they name, {_NUM_RANKS} ranks x {num_steps} steps")
    for number, (case, is_late, is_clock_wrong) in enumerate(cases):
        run = RunDirectory(folder / f"run-{number}")
        attempt = run.new_attempt()
        for trace in traces:
            is_innocent = trace.header.rank == _INNOCENT_RANK
            _write_changed(attempt, trace, is_late=is_late, is_clock_wrong=is_clock_wrong and is_innocent)
        _report(run, limits)
        print(f"  {case}\n    hpcpace: {_verdict(run)}")
        for tool in tools:
            own = folder / f"{tool.write.__name__}-{number}"
            try:
                if not own.exists():
                    tool.input(own, list(timelines(attempt)), limits)
                tool.measure(own, _NUM_RANKS, limits)
            except NotFinished as error:
                print(f"    {tool.name}: {error}")
                continue
            print(f"    {tool.name}: {tool.named(own)}", flush=True)


def _verdict(run: RunDirectory) -> str:
    verdict = json.loads(run.summary_json.read_text())["verdict"]
    culprits = [f"{culprit['kind']} {culprit['id']}" for culprit in verdict["culprits"]]
    modes = [finding["mode"] for finding in verdict["findings"]] or [verdict["mode"]]
    return f"{' + '.join(modes)}, blames {', '.join(culprits) or 'nobody'}"


def _write_changed(attempt: Attempt, trace: RankTrace, *, is_late: bool = False, is_clock_wrong: bool = False) -> None:
    """Write a trace again, of one rank on each host in data parallelism; where `is_late`, all wait for one of them."""
    rank, done, dtypes = trace.header.rank, trace.tables["collectives"], row_dtypes()
    last_ns = np.sort(done["enter_ns"][done["bytes"] == _OTHER_TOOLS_LAST[2]])
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
