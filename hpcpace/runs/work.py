"""Whether runs do the same work, so that their step times can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpcpace.runs.measured import MeasuredRun
from hpcpace.units import format_count

_LEAST_CHANGE = 0.001
# The same data may be found in another place.
_NOT_WORK = ("data.source", "model.name")


def work_differences(runs: Sequence[MeasuredRun]) -> list[str]:
    """Return in what the work of runs differs, one sentence each; empty where it is the same as far as recorded."""
    return list(dict.fromkeys(_differences(runs[0], runs[1:])))


def differs_beyond_batch(runs: Sequence[MeasuredRun]) -> bool:
    """Return whether more of the work differs than how many samples a step has, so that samples are not alike."""
    return bool(work_differences([replace(run, samples_per_step=0.0) for run in runs]))


def _differences(first: MeasuredRun, others: Sequence[MeasuredRun]) -> Iterator[str]:
    for other in others:
        if bool(first.samples_unit) != bool(other.samples_unit):
            yield "how many samples a step has is known of one of them alone"
        elif first.samples_unit != other.samples_unit:
            yield f"samples are {first.samples_unit} and {other.samples_unit}"
        elif _differ(first.samples_per_step, other.samples_per_step):
            sizes = [format_count(run.samples_per_step) for run in (first, other)]
            yield f"a step has {sizes[0]} and {sizes[1]} {first.samples_unit}"
        if first.emulation != other.emulation:
            yield "computation was emulated in one of them, or in another way"
        one, two = first.conditions.work, other.conditions.work
        for name in sorted(set(one) & set(two)):
            if one[name] != two[name] and name not in _NOT_WORK:
                yield f"{name} is {one[name]} and {two[name]}"


def _differ(one: float, two: float) -> bool:
    return bool(one and two) and abs(one - two) > _LEAST_CHANGE * max(one, two)


def is_work_known(runs: Sequence[MeasuredRun]) -> bool:
    """Return whether each run says what a step of it is."""
    return all(run.samples_per_step > 0 for run in runs)
