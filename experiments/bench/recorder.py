"""Measures the cost of recording an interval: hpcpace alternates with scope-profiler and torch.profiler in one run.

Every measurement ends when its rows are in a file, whatever thread wrote them: the recorder's background thread runs
during the loop and is waited for; scope-profiler writes when it is finalized. torch's region is measured with no
profiler running, which is the least that it costs. Run it with `python -m experiments.bench.recorder`.

Options:
  --pairs N  [20]
  --events N  [200000]
"""

from __future__ import annotations

import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

from scope_profiler import ProfileManager
from torch.profiler import record_function

from experiments.bench.pairs import Pairs, alternate, header
from experiments.options import command_line
from hpcpace.trace.recorder import NullRecorder, Recorder
from hpcpace.trace.schema import Phase

_HEADER = header()


class Bench:
    """The measurements, each in nanoseconds an event, of `num_events` events."""

    def __init__(self, folder: Path, num_events: int) -> None:
        self._folder = folder
        self._events = range(num_events)
        self._recorder = Recorder(folder / "rank-00000.h5", _HEADER, warn=print)
        self._recorder.start()
        self._off = NullRecorder()

    def add_phase_ns(self) -> float:
        """An interval through the call that observation uses, with its two readings of the clock."""
        add, clock, forward = self._recorder.add_phase, time.monotonic_ns, int(Phase.FORWARD)
        begin_ns = time.perf_counter_ns()
        for step in self._events:
            start_ns = clock()
            add(step, forward, start_ns, clock(), -1)
        assert self._recorder.flush()
        return self._per_event(begin_ns)

    def phase_ns(self) -> float:
        """`with recorder.phase("data")`."""
        recorder = self._recorder
        begin_ns = time.perf_counter_ns()
        for _ in self._events:
            with recorder.phase("data"):
                pass
        assert recorder.flush()
        return self._per_event(begin_ns)

    def scope_profiler_ns(self) -> float:
        """scope-profiler's region, looked up once, and its file."""
        ProfileManager.setup(file_path=str(self._folder / "scope.h5"), replace=True)
        begin_ns = self._regions(ProfileManager.profile_region("data"))
        ProfileManager.finalize(verbose=False)
        return self._per_event(begin_ns)

    def record_function_ns(self) -> float:
        """torch.profiler's region, made for each use, as it has to be."""
        begin_ns = time.perf_counter_ns()
        for _ in self._events:
            with record_function("data"):
                pass
        return self._per_event(begin_ns)

    def off_ns(self) -> float:
        """`with recorder.phase("data")` while tracing is off."""
        off = self._off
        begin_ns = time.perf_counter_ns()
        for _ in self._events:
            with off.phase("data"):
                pass
        return self._per_event(begin_ns)

    def close(self) -> None:
        """Close the recorder; every event must be in its file."""
        self._recorder.close()
        assert not self._recorder.num_dropped, self._recorder.num_dropped

    def _regions(self, region: AbstractContextManager[object]) -> int:
        begin_ns = time.perf_counter_ns()
        for _ in self._events:
            with region:
                pass
        return begin_ns

    def _per_event(self, begin_ns: int) -> float:
        return (time.perf_counter_ns() - begin_ns) / len(self._events)


def main() -> None:
    args = command_line(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.events)
        peers = (
            ("scope-profiler's cached region", bench.scope_profiler_ns, (0.7, 1.0)),
            ("torch.profiler.record_function", bench.record_function_ns, (0.15, 0.15)),
        )
        ours = (("one interval by add_phase", bench.add_phase_ns), ("with phase()", bench.phase_ns))
        for peer_name, peer, targets in peers:
            for (name, measure), target in zip(ours, targets, strict=True):
                pairs = alternate(measure, peer, num_pairs=args.pairs)
                print(_line(name, pairs, f"{peer_name}, target {target}"))
        pairs = alternate(bench.off_ns, bench.phase_ns, num_pairs=args.pairs)
        print(_line("off", pairs, "with phase(); target 120 ns"))
        bench.close()


def _line(name: str, pairs: Pairs, peer: str) -> str:
    ratio, low, high = pairs.ratio()
    ns, peer_ns = (sorted(values)[len(values) // 2] for values in (pairs.a, pairs.b))
    return f"{name}: {ns:.0f} ns, {ratio:.2f} [{low:.2f}, {high:.2f}] times {peer_ns:.0f} ns of {peer}"


if __name__ == "__main__":
    main()
