"""Ranks that are late inside a phase: by computation, by waiting that uses no core, or the data cannot tell which."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from cases import each_case

from experiments.synthetic_run import MS, Extra, SyntheticRun
from hpcpace.diagnosis.analyze import examine
from hpcpace.diagnosis.summary import Mode, Verdict
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.schema import PHASES_ON_CORES, TABLES, Phase
from hpcpace.trace.tables import RankTrace, Table

SECOND_NS, READ_EVERY_NS = 1000 * MS, 105 * MS
LATE = 1
COMPUTES, WAITS, EITHER = "by computation", "by waiting that uses no core", "by computation or waiting inside it"
CLOCKS, FILES = "clock speeds", "files, locks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sometimes(Extra):
    """What takes time in some steps alone, as a lock that another thread holds now and then."""

    share: float

    def of_step(self, step: int, random: np.random.Generator) -> int:
        """Return its nanoseconds in a step."""
        own = np.random.default_rng([11, step])
        return int(self.length_ns * own.uniform(0.3, 1.0)) if own.random() < self.share else 0


def in_forward(length_ms: float, *, spread: float = 0.02, share: float | None = None) -> Extra:
    """Return what the late rank does first in its forward pass, in some steps only if a share of them is given."""
    of_late = {"rank": LATE, "phase": Phase.FORWARD, "length_ns": int(length_ms * MS)}
    return Extra(**of_late, spread=spread) if share is None else Sometimes(**of_late, share=share)


def with_counters(trace: RankTrace, running: float, queued: float = 0.0, waits_share: float = 0.01) -> RankTrace:
    """Return a trace with what the kernel counts: read in ten steps a second, and kept once a second.

    Args:
        trace: of a rank whose first of two forward phases in a step is what it does on top.
        running: the part of that for which it runs; it is idle for the rest.
        queued: the part of all else for which it waits for a core, on average; it runs for the rest.
        waits_share: of its time, for which its other threads wait for a core.
    """
    random = np.random.default_rng([7, trace.header.rank])
    steps, phases, blocked = (trace.tables[name] for name in ("steps", "phases", "collectives"))
    read, now_ns = np.zeros((len(steps), 2 + 3 * len(PHASES_ON_CORES))), 0
    ran_ns = np.zeros(len(steps))
    for row, (step, begin_ns, end_ns) in enumerate(zip(steps["step"], steps["begin_ns"], steps["end_ns"], strict=True)):
        spent = {phase: np.zeros(3) for phase in PHASES_ON_CORES}
        here = np.flatnonzero(phases["step"] == step)
        is_extra = (phases["phase"][here] == Phase.FORWARD).sum() > 1
        for index in here:
            phase = Phase(phases["phase"][index])
            length = float(phases["end_ns"][index] - phases["begin_ns"][index])
            length -= float(blocked["blocked_ns"][blocked["step"] == step].sum()) * (phase is Phase.BACKWARD)
            waited = 0.0 if is_extra and phase is Phase.FORWARD else length * min(queued * random.exponential(), 0.9)
            part = running if is_extra and phase is Phase.FORWARD else 1.0
            is_extra = is_extra and phase is not Phase.FORWARD
            spent[phase] += (length, (length - waited) * part, waited)
        ran_ns[row] = sum(values[1] for values in spent.values())
        if begin_ns >= now_ns:
            now_ns = begin_ns + READ_EVERY_NS
            read[row] = [1, end_ns - begin_ns, *np.concatenate([spent[phase] for phase in PHASES_ON_CORES])]
    times_ns = np.arange(steps["begin_ns"][0], steps["end_ns"][-1] + SECOND_NS, SECOND_NS)
    times_ns[-1] = steps["end_ns"][-1] + MS
    done = np.searchsorted(steps["end_ns"], times_ns, side="right")
    rows = np.zeros(len(times_ns), TABLES["host"].dtype)
    rows["time_ns"] = times_ns
    counted = np.concatenate([np.zeros((1, read.shape[1])), read.cumsum(axis=0)])[done]
    names = ["read_steps", "read_ns"]
    names += [f"{phase.name.lower()}{end}_ns" for phase in PHASES_ON_CORES for end in ("", "_cpu", "_wait")]
    for name, column in zip(names, counted.T, strict=True):
        rows[name] = column
    rows["cpu_time_ns"] = np.append(0.0, ran_ns.cumsum())[done]
    rows["run_wait_ns"] = waits_share * (times_ns - times_ns[0])
    return dataclasses.replace(trace, tables={**trace.tables, "host": Table.from_rows(rows)})


def verdict_on(folder: Path, extras: Sequence[Extra], running: float, **truth: object) -> Verdict:
    """Return the verdict on ranks of which one does more, and runs for a part of that."""
    queued = float(truth.pop("queued", 0.0))
    values: Mapping[str, object] = {"num_ranks": 2, "num_steps": 100, "noise": 0.02, "extras": tuple(extras), **truth}
    run = SyntheticRun(**values).write(folder / "run")
    traces = read_attempt(run.attempts()[0]).traces
    return examine([with_counters(trace, running, queued) for trace in traces])


LOCK = in_forward(30, share=0.45)


@each_case(
    ("extra", "running", "said", "advised", "not_advised"),
    [
        (LOCK, 0.0, WAITS, FILES, CLOCKS),
        (in_forward(60, share=0.45), 0.02, WAITS, FILES, CLOCKS),
        (in_forward(30), 0.01, WAITS, FILES, CLOCKS),
        (in_forward(8), 0.01, WAITS, FILES, CLOCKS),
        # Reading a file takes some processor time.
        (in_forward(40, spread=0.3), 0.25, WAITS, FILES, CLOCKS),
        (in_forward(30), 1.0, COMPUTES, CLOCKS, FILES),
        (in_forward(8), 0.98, COMPUTES, CLOCKS, FILES),
        (LOCK, 1.0, COMPUTES, CLOCKS, FILES),
        (in_forward(20), 0.8, COMPUTES, CLOCKS, FILES),
    ],
)
def test_a_rank_that_is_late_in_a_phase_computes_or_waits_there(tmp_path, extra, running, said, advised, not_advised):
    problems = []
    for num_ranks in (2, 4):
        verdict = verdict_on(tmp_path / str(num_ranks), [extra], running, num_ranks=num_ranks)
        is_right = verdict.mode == Mode.STRAGGLER and [each.id for each in verdict.culprits] == [str(LATE)]
        is_right &= said in verdict.headline and EITHER not in verdict.headline
        is_right &= advised in verdict.next[0] and not_advised not in verdict.next[0]
        is_right &= any("without using its core" in line for line in verdict.why) == (said == WAITS)
        if not is_right:
            problems.append(verdict)
    assert problems == []


def test_the_wait_has_its_length_with_an_interval_and_its_phase(tmp_path):
    verdict = verdict_on(tmp_path, [in_forward(8)], 0.0)
    (numbers,) = (found.numbers for found in verdict.findings)
    assert 7.5 * MS < numbers["off_core_ns"] < 8.5 * MS and abs(numbers["running_ns"]) < MS
    assert numbers["idle_ns"] == numbers["off_core_ns"] and numbers["spent_half_ns"] < MS
    (line,) = (line for line in verdict.why if "without using its core" in line)
    assert line.startswith(f"rank {LATE} on n0 waits 8.") or line.startswith(f"rank {LATE} on n0 waits 7.")
    assert "more of each step than others in forward" in line and line.endswith("I/O, a lock or sleep")


@each_case(
    ("extra", "running", "truth"),
    [
        (in_forward(20), 0.5, {}),  # as much of either
        (LOCK, 0.5, {}),
        (LOCK, 0.0, {"num_steps": 12}),  # too few steps were read
        (in_forward(30), 1.0, {"num_steps": 12}),
    ],
)
def test_neither_is_the_cause_where_the_data_cannot_tell(tmp_path, extra, running, truth):
    verdict = verdict_on(tmp_path, [extra], running, **truth)
    assert EITHER in verdict.headline or "cannot tell" in verdict.headline
    assert "off_core_ns" not in verdict.findings[0].numbers if verdict.findings else True
    if verdict.findings:
        assert CLOCKS in verdict.next[0] and FILES in verdict.next[0]
        assert any(line.startswith("cannot tell whether computation or waiting prevails") for line in verdict.why)


def test_without_processor_time_computation_is_not_told_from_waiting(tmp_path):
    run = SyntheticRun(num_ranks=2, num_steps=100, noise=0.02, extras=(in_forward(30),)).write(tmp_path / "run")
    verdict = examine(read_attempt(run.attempts()[0]).traces)
    assert EITHER in verdict.headline
    assert any("too little is known of the processor time of rank 1" in line for line in verdict.why)


@each_case(("extra", "running"), [(LOCK, 0.0), (in_forward(30), 0.0), (in_forward(30), 1.0), (LOCK, 1.0)])
def test_long_waiting_for_cores_leaves_no_wrong_cause(tmp_path, extra, running):
    wrong = COMPUTES if running == 0.0 else WAITS
    for seed in range(3):
        verdict = verdict_on(tmp_path / str(seed), [extra], running, queued=0.6, noise=0.1 + 0.05 * seed)
        assert wrong not in verdict.headline.replace(EITHER, "")
        assert all(each.id == str(LATE) for each in verdict.culprits if each.kind == "rank")
