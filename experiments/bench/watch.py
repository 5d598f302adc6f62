"""Measures what `hpcpace watch` costs: `python -m experiments.bench.watch`.

Ranks are files: a process appends to the journals of all of them once a second what a rank appends that does eight
steps a second with eight phases and 24 operations each, and begins each journal anew every 40 s, as a rank does once a
chunk is full. In another process the run is watched and drawn on a terminal of 200 columns. Processor time and memory
are of that process; the first seconds, in which it loads and finds the files, are given apart.

Options:
  --ranks N  [1024]
  --seconds X  [60.0]
  --watch PATH
"""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments.bench.pairs import header
from experiments.options import command_line
from hpcpace.core.rundir import RunDirectory, write_json
from hpcpace.report.terminal import Shown
from hpcpace.trace.journal import RecordKind, encode_header, encode_records
from hpcpace.trace.schema import TABLES, Phase, TraceHeader, row_dtypes
from hpcpace.watch.view import Choice, page
from hpcpace.watch.watcher import Watcher

_DTYPES = row_dtypes()
_NUMBERS = {name: number for number, name in enumerate(TABLES)}
_STEPS_A_SECOND, _PHASES, _CALLS = 8, 8, 24
_SECONDS_A_JOURNAL = 40
_RANKS_A_HOST = 8
_START_S = 5.0


def main() -> None:
    args = command_line(__doc__)
    if args.watch:
        print(json.dumps(watch(args.watch, args.seconds)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        run = RunDirectory(Path(temporary) / "run")
        writer = Writer(run, args.ranks)
        command = [sys.executable, "-m", "experiments.bench.watch", "--watch", str(run.path)]
        with subprocess.Popen([*command, "--seconds", str(args.seconds)], stdout=subprocess.PIPE, text=True) as process:
            late_s = writer.write_while(lambda: process.poll() is None)
            assert process.stdout is not None
            found = json.loads(process.stdout.read())
    print(
        f"{args.ranks} ranks, {found['num_states']} states in {found['wall_s']:.1f} s: "
        f"{100 * found['cpu_s'] / found['wall_s']:.1f} % of a core, {found['peak_bytes'] / 1e6:.0f} MB; "
        f"start {found['start_cpu_s']:.2f} s of CPU; oldest figure {found['looked_s']:.1f} s, in detail "
        f"{found['detail_s']:.1f} s; the writer was at most {late_s:.2f} s late"
    )


class Writer:
    """Writes the journals of all ranks."""

    def __init__(self, run: RunDirectory, num_ranks: int) -> None:
        self._attempt = run.new_attempt()
        self._num_ranks = num_ranks
        self._begin_ns = time.monotonic_ns()
        self._headers = [encode_header(self._header(rank), _DTYPES) for rank in range(num_ranks)]
        ranks = [{"rank": rank, "host": f"n{rank // _RANKS_A_HOST}"} for rank in range(num_ranks)]
        write_json(self._attempt.run_json, {"name": "bench", "created_unix_ns": time.time_ns(), "ranks": ranks})
        self._tick = 0
        for rank in range(num_ranks):
            self._begin(rank)

    def write_while(self, is_wanted: Callable[[], bool]) -> float:
        """Write once a second; return by how much the last flush of a second was late at most."""
        late_s = 0.0
        while is_wanted():
            self._tick += 1
            content = self._flush(self._tick)
            for rank in range(self._num_ranks):
                if (rank + self._tick) % _SECONDS_A_JOURNAL == 0:
                    self._begin(rank)
                with self._journal(rank).open("ab", buffering=0) as file:
                    file.write(content)
            left_s = self._begin_ns / 1e9 + self._tick - time.monotonic()
            late_s = max(late_s, -left_s)
            time.sleep(max(left_s, 0.0))
        return late_s

    def _journal(self, rank: int) -> Path:
        return self._attempt.trace_file(rank).with_suffix(".journal")

    def _begin(self, rank: int) -> None:
        path = self._journal(rank)
        new = path.with_suffix(".new")
        new.write_bytes(self._headers[rank] + self._rows("account", self._tick, 1))
        os.replace(new, path)

    def _header(self, rank: int) -> TraceHeader:
        node, local_rank = divmod(rank, _RANKS_A_HOST)
        place = {"local_rank": local_rank, "local_size": _RANKS_A_HOST, "node": node, "host": f"n{node}"}
        return header(rank, self._num_ranks, interfaces=("eth0",), created_unix_ns=time.time_ns(), **place)

    def _flush(self, tick: int) -> bytes:
        counts = {"steps": 1, "phases": _PHASES, "collectives": _CALLS}
        parts = [self._rows("account", tick, 1)]
        parts += [self._rows(name, tick, _STEPS_A_SECOND * count) for name, count in counts.items()]
        return b"".join([*parts, self._rows("host", tick, 1), self._rows("network", tick, 1)])

    def _rows(self, name: str, tick: int, num_rows: int) -> bytes:
        rows = np.zeros(num_rows, _DTYPES[name])
        now_ns = self._begin_ns + tick * 1_000_000_000
        if "time_ns" in (rows.dtype.names or ()):
            rows["time_ns"] = now_ns
        if name == "network":
            rows["tx_bytes"] = rows["rx_bytes"] = tick * 10_000_000
        if "step" in (rows.dtype.names or ()):
            step_ns, per_step = 1_000_000_000 // _STEPS_A_SECOND, num_rows // _STEPS_A_SECOND
            place = np.arange(num_rows)
            rows["step"] = (tick - 1) * _STEPS_A_SECOND + place // per_step
            begin_ns = now_ns - 1_000_000_000 + place * (step_ns // per_step)
            first, last = ("enter_ns", "exit_ns") if name == "collectives" else ("begin_ns", "end_ns")
            rows[first], rows[last] = begin_ns, begin_ns + step_ns // per_step
            if name == "collectives":
                rows["blocked_ns"], rows["seq"] = step_ns // per_step // 4, (tick - 1) * num_rows + place
            if name == "phases":
                rows["phase"] = np.array([Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER])[place % 4]
        return encode_records(_NUMBERS[name], RecordKind.ROW, tick * num_rows, rows)


def watch(path: Path, seconds: float) -> dict[str, float]:
    """Watch a run and draw it, and return what that took."""
    console = Console(file=io.StringIO(), width=200, height=50, highlight=False, emoji=False, markup=False)
    watcher = Watcher(path, interval_s=1.0, hang_s=5.0)
    begin_s, after_s, num_states = time.monotonic(), -1.0, 0
    start_s = start_cpu_s = 0.0
    ages: list[tuple[float, float]] = []
    watcher.start()
    while time.monotonic() - begin_s < _START_S + seconds:
        seen = watcher.seen(after_s=after_s, timeout_s=1.0)
        if seen is None:
            continue
        after_s = seen.at_s
        console.file = io.StringIO()
        console.print(Shown(page(seen.state, Choice(), width=200, height=50, has_keys=True)))
        if not start_s and time.monotonic() - begin_s >= _START_S:
            start_s, start_cpu_s = time.monotonic(), time.process_time()
        if start_s:
            num_states += 1
            ages.append((seen.state.looked_s, seen.state.detail_s or 0.0))
    taken = {"wall_s": time.monotonic() - start_s, "cpu_s": time.process_time() - start_cpu_s}
    watcher.close()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    oldest = {name: max(values) for name, values in zip(("looked_s", "detail_s"), zip(*ages, strict=True), strict=True)}
    return {**taken, **oldest, "num_states": num_states, "start_cpu_s": start_cpu_s, "peak_bytes": peak_bytes}


if __name__ == "__main__":
    main()
