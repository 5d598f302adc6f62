"""Imports of other tools' traces against what is known of them.

python -m experiments.imports PROOF ...

published FOLDER       published traces: clones of ByteDance-Seed/StragglerAnalysis, HolisticTraceAnalysis of
                       facebookresearch and GindaChen/nsys-ai in FOLDER, under the last parts of their names
speed [MB [PYTHON]]    events a second and memory of a profile of that size; PYTHON has the other tools

Options:
  proof published|speed
  of TEXT?      FOLDER of the clones, or MB of the profile
  python TEXT?  that has the other tools
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from experiments.options import command_line
from hpcpace.core.config import Config
from hpcpace.core.rundir import open_run
from hpcpace.diagnosis.analyze import analyze
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import Summary
from hpcpace.runs.imports.imported_run import Import, write_run
from hpcpace.runs.imports.kineto import import_kineto
from hpcpace.runs.imports.nsys import import_nsys
from hpcpace.runs.imports.wia import import_wia
from hpcpace.trace.schema import Op

WIA = {"AR": 1.973, "ST": 1.179, "SE": 1.537}
"""Published slowdown of the three traces: mean step time over that of even work (data/result-*.json)."""


def report(found: Import, path: Path) -> Summary:
    """Write a run and return what its report says."""
    write_run(path, found)
    run = open_run(path)
    analysis = analyze(run, run.last_attempt(), Selection(), Config(), begin_stage=lambda _: lambda *_: None)
    assert analysis is not None
    return analysis.summary


def published(folder: Path) -> None:
    """Print what published traces say, beside what was published."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, slowdown in WIA.items():
            found = import_wia(folder / "StragglerAnalysis" / "data" / f"trace-{name}.parquet")
            summary = report(found, Path(scratch) / name)
            gains = summary.causes.gains if summary.causes else ()
            even = next((row.gain_share for row in gains if row.name == "all work, if it were even"), 0.0)
            print(f"{name}: {summary.verdict.headline}")
            for also in summary.verdict.also:
                print(f"    also: {also}")
            ours = 1 / (1 - even)
            print(f"    step over even step {ours:.3f}, published {slowdown} ({ours / slowdown - 1:+.1%})")
    sample = folder / "HolisticTraceAnalysis" / "tests" / "data" / "nccl_parser_config"
    rows = import_kineto([sample]).ranks[0].tables["collectives"]
    lengths_us = (rows["exit_ns"] - rows["enter_ns"]) / 1000
    counts = {op.name.lower(): int((rows["op"] == op).sum()) for op in (Op.ALL_REDUCE, Op.BROADCAST)}
    nearest_us = lengths_us[np.abs(lengths_us - 2636.669).argmin()]
    print(f"nccl_parser_config: {counts}, nearest to 2,636.669 us: {nearest_us} us")
    for name in ("before", "after"):
        path = folder / "nsys-ai" / "tests" / "fixtures" / f"mfu_2gpu_{name}.sqlite"
        counted = sqlite3.connect(f"file:{path}?mode=ro", uri=True).execute(
            "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.shortName "
            "WHERE s.value LIKE '%SendRecv%' GROUP BY k.deviceId"
        )
        ours = [len(one.tables["collectives"]) for one in import_nsys(path).ranks]
        print(f"{path.name}: SendRecv kernels a GPU {ours}, as SQL counts them {[row[0] for row in counted]}")


def speed(size_mb: int, others: str) -> None:
    """Print how fast a profile is read, and with how much memory, beside other tools that a Python `others` has."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "rank-0.json"
        num_events = _write_profile(path, size_mb << 20)
        print(f"{path.stat().st_size / 1e6:,.0f} MB, {num_events:,} events")
        for name, code in _READERS.items():
            _timed(name, code, path, num_events, sys.executable if name in _OURS else others)


_OURS = ("hpcpace import kineto", "json.load")
_READERS = {
    "hpcpace import kineto": (
        "from pathlib import Path\n"
        "from hpcpace.runs.imports.kineto import import_kineto\n"
        "import_kineto([Path({path!r})])"
    ),
    "json.load": "import json; json.load(open({path!r}))",
    "Holistic Trace Analysis": (
        "from hta.configs.parser_config import ParserConfig\n"
        "from hta.common.trace_parser import parse_trace_dataframe\n"
        "parse_trace_dataframe({path!r}, ParserConfig(ParserConfig.get_minimum_args()))"
    ),
    "TraceLens": "from TraceLens import TreePerfAnalyzer; TreePerfAnalyzer.from_file({path!r})",
}


def _timed(name: str, code: str, path: Path, num_events: int, python: str) -> None:
    begin_s = time.monotonic()
    usage = "import resource; u = resource.getrusage(resource.RUSAGE_SELF); print(u.ru_maxrss, u.ru_utime + u.ru_stime)"
    result = subprocess.run(
        [python, "-c", f"{code.format(path=str(path))}\n{usage}"], capture_output=True, text=True, check=False
    )
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-1:] or [f"exit {result.returncode}"]
        print(f"    {name:24} not measured: {reason[0][:100]}")
        return
    taken_s = time.monotonic() - begin_s
    peak_kb, cpu_s = result.stdout.split()[-2:]
    print(
        f"    {name:24} {taken_s:6.1f} s, {num_events / taken_s:10,.0f} events/s; processor {float(cpu_s):6.1f} s, "
        f"{num_events / float(cpu_s):10,.0f} events/s; {int(peak_kb) / 1024:,.0f} MiB"
    )


def _write_profile(path: Path, least_bytes: int) -> int:
    """Write a profile of a rank on a GPU, and return its number of events."""
    said = {"rank": 0, "world_size": 1, "backend": "nccl", "pg_config": [{"pg_name": "0", "ranks": [0]}]}
    num_events = 0
    with path.open("w") as file:
        file.write(json.dumps({"schemaVersion": 1, "distributedInfo": said})[:-1] + ', "traceEvents": [\n')
        step = 0
        while file.tell() < least_bytes:
            lines = [json.dumps(one) for one in _step_events(step)]
            file.write((",\n" if step else "") + ",\n".join(lines))
            num_events += len(lines)
            step += 1
        file.write("\n]}\n")
    return num_events


def _step_events(step: int) -> list[dict[str, object]]:
    """Return the events of a step: as many operators, launches, kernels and arrows as profiles of training have."""
    at = step * 1e6
    events: list[dict[str, object]] = []

    def add(name: str, cat: str, begin: float, length: float, **args: object) -> None:
        place = {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 7}
        events.append({**place, "ts": at + begin, "dur": length, "args": {"External id": len(events), **args}})

    add(f"ProfilerStep#{step}", "user_annotation", 0, 9e5)
    add("DistributedDataParallel.forward", "user_annotation", 0, 3e5)
    for number in range(300):
        link, begin = step * 1000 + number, number * 2800.0
        for depth, operator in enumerate(("aten::linear", "aten::t", "aten::addmm", "aten::empty")):
            add(operator, "cpu_op", begin + depth, 100.0 - depth, **{"Record function id": number, "Ev Idx": number})
        add("cudaLaunchKernel", "cuda_runtime", begin + 50, 5, cbid=211, correlation=link)
        add("ampere_sgemm_128x64_tn", "kernel", begin + 60, 2000, correlation=link, grid=[8, 1, 1], block=[256, 1, 1])
        events.append({"ph": "s", "id": link, "pid": 7, "tid": 7, "ts": at + begin, "cat": "ac2g", "name": "ac2g"})
    for number in range(5):
        reduced = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float"}
        add(
            "ncclDevKernel_AllReduce_Sum_f32",
            "kernel",
            5e5 + number * 1e4,
            5e3,
            **{"Process Group Name": "0"},
            **reduced,
        )
    add("Optimizer.step#Adam.step", "user_annotation", 8.5e5, 4e4)
    return events


def main() -> None:
    """Run the proof that the arguments name."""
    args = command_line(__doc__)
    if args.proof == "published" and args.of is None:
        sys.exit("published needs the FOLDER of the clones")
    if args.proof == "published":
        published(Path(args.of))
    else:
        speed(int(args.of or 1000), args.python or sys.executable)


if __name__ == "__main__":
    main()
