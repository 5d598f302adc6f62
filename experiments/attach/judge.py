"""Judges a traced run by its untraced twin, by the witness inside it, and by torch's profiler."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.attach.rows import Fault, Row
from experiments.attach.runs import Ran
from experiments.attach.witness import SLOW_HOST, slow_ranks
from hpcpace.core.text import NS_PER_US, plural
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import Phase

IN_PLACE = "in place"
"""Before the rank of a finding that is right and not the first."""
_MEMORY_BYTES = 2**30
_LARGEST_DIFFERENCE = 0.05
# A bar of tqdm, which is drawn as often as there is time for it.
_PROGRESS = re.compile(r"\d%\|.*\[.*\]")
_COMPARED = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.DATA)
_SHORTEST_NS = 1_000_000
"""In a shorter interval, the profiler's own cost between two time stamps is more than the difference allowed."""


@dataclass(kw_only=True)
class Judgement:
    """What was found out about a row; empty texts and lists mean that all is well.

    Attributes:
        problems: what is wrong with losses, exit code, stderr, steps or samples.
        steps: of the script, and in the trace of each rank.
        samples: of rank 0 per step, by the script and in the trace.
        phases: share by which a phase differs from the profiler's, by name.
        faults: by fault, what the report said, and whether it is right.
        mode: the verdict without a fault.
        notes: what is not wrong but worth knowing.
    """

    problems: list[str] = field(default_factory=list)
    steps: str = ""
    samples: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    faults: dict[str, tuple[bool, str]] = field(default_factory=dict)
    mode: str = ""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return it as what JSON has."""
        return asdict(self)


def judge_runs(row: Row, plain: Ran, traced: Ran) -> Judgement:
    """Compare a traced run with its twin and with the truth of its witnesses."""
    found = Judgement()
    if plain.code:
        found.problems.append(f"without tracing it ends with exit code {plain.code}: {_last_line(plain.stderr)}")
        return found
    if traced.code != plain.code:
        found.problems.append(f"exit code {traced.code}, {plain.code} without tracing")
    _judge_losses(row, plain, traced, found)
    _judge_lines(plain, traced, found)
    _judge_traces(row, traced, found)
    return found


def _judge_losses(row: Row, plain: Ran, traced: Ran, found: Judgement) -> None:
    losses = [
        {rank: [step["loss"] for step in witness["steps"]] for rank, witness in ran.witnesses.items()}
        for ran in (plain, traced)
    ]
    if len(losses[0]) != row.num_ranks:
        found.problems.append(f"{len(losses[0])} of {row.num_ranks} ranks have a witness")
    if losses[0] != losses[1]:
        (found.problems if row.is_repeatable else found.notes).append("losses differ")


def _judge_lines(plain: Ran, traced: Ran, found: Judgement) -> None:
    """Compare stderr line by line, without order, numbers and our own lines."""
    before, after = (
        {
            _without_numbers(line.replace(str(ran.folder), ""))
            for line in ran.stderr.splitlines()
            if not _PROGRESS.search(line)
        }
        for ran in (plain, traced)
    )
    new = sorted(line for line in after - before if not line.startswith("hpcpace"))
    if new:
        found.problems.append(f"stderr has {plural(len(new), 'line')} more, first: {new[0][:120]}")
    if gone := before - after:
        found.notes.append(f"stderr has {len(gone)} lines less, first: {sorted(gone)[0][:80]}")
    ours = [line for line in traced.stderr.splitlines() if line.startswith("hpcpace")]
    found.notes += [line[:200] for line in dict.fromkeys(ours)][:3]


def _without_numbers(line: str) -> str:
    """Return a line without what differs from run to run: numbers, folders, and where it was cut."""
    whole = re.sub(r"((?<!\S)/.*|\S+) \.{3}$|(?<!\S)/\S*/", "", line)
    return re.sub(r"0x[0-9a-f]+|-?[\d.]+|\b[AP]M\b", "#", whole).strip()


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")[:200]


def _judge_traces(row: Row, traced: Ran, found: Judgement) -> None:
    paths = sorted(traced.run_dir.glob("attempt-*/**/rank-*.h5"))
    traces = [read_trace(path, memory_bytes=_MEMORY_BYTES) for path in paths]
    wanted = len(traced.witnesses[0]["steps"]) if 0 in traced.witnesses else 0
    counts = [len(trace.tables["steps"]["step"]) for trace in traces]
    found.steps = f"{'/'.join(map(str, sorted(set(counts)))) or 'none'} of {wanted}"
    if len(traces) != row.num_ranks:
        found.problems.append(f"{len(traces)} of {row.num_ranks} ranks have a trace")
    if set(counts) != {wanted}:
        found.problems.append(f"steps: {counts} in the traces, {wanted} in the script")
    if not traces:
        return
    truth = [step["samples"] for step in traced.witnesses[0]["steps"]]
    seen = [int(samples) for samples in traces[0].tables["steps"]["samples"]]
    found.samples = f"{_usual(seen)} of {_usual(truth)}"
    if row.shares_batches:
        found.samples = "none, ranks share batches"
        truth = [0] * len(seen)
    if seen != truth:
        num_wrong = sum(one != other for one, other in zip(seen, truth, strict=False))
        found.problems.append(f"samples differ in {num_wrong} steps: {sum(seen)} in all, {sum(truth)} in the script")
    _judge_phases(traced, traces[0].tables["phases"], found)


def _usual(values: Sequence[int]) -> int:
    return max(set(values), key=list(values).count, default=0)


def _judge_phases(traced: Ran, rows: Any, found: Judgement) -> None:
    """Compare rank 0's phases with those of the profiler, in the steps that it saw."""
    window = traced.witnesses[0]["profile"]
    path = traced.folder / "profile.json"
    if not path.exists() or "end_ns" not in window:
        found.notes.append("the profiler did not run")
        return
    inside = (rows["begin_ns"] >= window["begin_ns"]) & (rows["end_ns"] <= window["end_ns"])
    for phase, theirs in profiled_phases(path).items():
        if not theirs or statistics.median(end - begin for begin, end in theirs) < _SHORTEST_NS:
            continue
        of_phase = inside & (rows["phase"] == phase)
        ours = list(zip(rows["begin_ns"][of_phase].tolist(), rows["end_ns"][of_phase].tolist(), strict=True))
        name = phase.name.lower()
        found.phases[name] = typical_difference(ours, theirs)
        whole = covered_ns(ours) / covered_ns(theirs) - 1
        if abs(whole) > _LARGEST_DIFFERENCE >= abs(found.phases[name]):
            found.notes.append(f"{name} differs by {whole:+.0%} in sum, for one interval or a few")
    wrong = {name: share for name, share in found.phases.items() if abs(share) > _LARGEST_DIFFERENCE}
    found.problems += [f"{name} differs from the profiler's by {share:+.0%}" for name, share in wrong.items()]


def typical_difference(ours: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]) -> float:
    """Return by which share of the profiler's time ours differ: the median of pairs of outermost intervals.

    Short ones do not count. A rank that loses its core between two time stamps puts milliseconds between them. Where
    the numbers of intervals differ, their sums are compared, and anything that only one of both has counts.
    """
    pairs = list(zip(_outermost(ours), _outermost(theirs), strict=False))
    lengths = [(end - begin, their_end - their_begin) for (begin, end), (their_begin, their_end) in pairs]
    shares = [own / other - 1 for own, other in lengths if other >= _SHORTEST_NS]
    if not shares or len(_outermost(ours)) != len(_outermost(theirs)):
        return covered_ns(ours) / covered_ns(theirs) - 1
    return statistics.median(shares)


def profiled_phases(path: Path) -> dict[Phase, list[tuple[int, int]]]:
    """Return the outermost intervals of each phase in a trace of torch's profiler, in nanoseconds.

    Modules that are called in backward (activation checkpointing) or in an optimizer's closure count once, where
    they are: as forward in the closure, and as backward otherwise.
    """
    events = json.loads(path.read_text())["traceEvents"]
    spans: dict[Phase, list[tuple[int, int]]] = {phase: [] for phase in _COMPARED}
    for event in events:
        phase = _phase_of(event.get("name", ""))
        if phase is not None and event.get("ph") == "X":
            begin_ns = round(event["ts"] * NS_PER_US)
            spans[phase].append((begin_ns, begin_ns + round(event["dur"] * NS_PER_US)))
    backward = _outermost(spans[Phase.BACKWARD])
    spans[Phase.FORWARD] = [
        span for span in spans[Phase.FORWARD] if not any(begin <= span[0] < end for begin, end in backward)
    ]
    return {phase: _outermost(of_phase) for phase, of_phase in spans.items()}


def _phase_of(name: str) -> Phase | None:
    if name.startswith("nn.Module: "):
        return Phase.FORWARD
    if re.fullmatch(r"torch/autograd/__init__\.py\(\d+\): backward", name):
        return Phase.BACKWARD
    # Not "Optimizer.step#...": that has the hooks in it, and so what hpcpace does at the end of a step.
    if re.fullmatch(r"torch/optim/(?!optimizer)\w+\.py\(\d+\): step", name):
        return Phase.OPTIMIZER
    return Phase.DATA if re.fullmatch(r"torch/utils/data/dataloader\.py\(\d+\): __next__", name) else None


def _outermost(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin_ns, end_ns in sorted(spans):
        if merged and begin_ns < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_ns))
        else:
            merged.append((begin_ns, end_ns))
    return merged


def covered_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Return the time that spans cover together, in nanoseconds."""
    return sum(end_ns - begin_ns for begin_ns, end_ns in _outermost(spans))


def judge_fault(row: Row, fault: Fault, summary: dict[str, Any] | None) -> tuple[bool, str]:
    """Return whether a report names what is slow and the stage first, and what it says; otherwise both."""
    if summary is None:
        return False, "no report"
    verdict = summary["verdict"]
    culprits = {(culprit["kind"], culprit["id"]) for culprit in verdict["culprits"]}
    aliases = {alias for culprit in verdict["culprits"] for alias in culprit["aliases"]}
    text = " ".join((verdict["headline"], *verdict["why"])).lower()
    stages = row.loader_stage if fault == "loader" else row.compute_stage
    wanted = ("node", SLOW_HOST) if fault == "host" else ("rank", str(slow_ranks(fault, row.num_ranks)[0]))
    # With one rank a stage, rank and stage cannot be told apart: the rank is then another name of the culprit.
    target = SLOW_HOST if fault == "host" else " ".join(wanted)
    named = wanted in culprits or any(re.search(rf"\b{target}\b", alias) for alias in aliases)
    named = named or (fault == "host" and any(SLOW_HOST in name for _, name in culprits))
    staged = any(stage in text for stage in stages) and "cannot tell which stage" not in text
    if named and staged:
        return True, verdict["headline"]
    for place, other in enumerate(verdict.get("also", ()), start=2):
        if re.search(rf"\b{target}\b", other) and any(stage in other for stage in stages):
            return False, f"{verdict['headline']}; {IN_PLACE} {place}: {other}"
    missing = ", ".join(what for what, there in (("culprit", named), ("stage", staged)) if not there)
    return False, f"{verdict['headline']} (wrong: {missing})"
