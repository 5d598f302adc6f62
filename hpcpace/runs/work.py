"""Whether runs do the same work, so that their step times can be compared."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hpcpace.core.text import format_count
from hpcpace.runs.measured import MeasuredRun

_OTHER_BATCH = 0.02
# The same data may be found in another place.
_NOT_WORK = ("data.source", "model.name")


def is_same_batch(one: float, two: float) -> bool:
    """Return whether two numbers of samples per step, both above 0, differ by less than 2 %.

    Where samples have different lengths, their mean number differs by as much from run to run, and nobody changed it.
    """
    return max(one, two) < (1 + _OTHER_BATCH) * min(one, two)


def usual_batches(batches: Iterable[float]) -> dict[float, float]:
    """Return for each number of samples per step the one that it counts as; 0, which is unknown, for 0.

    Those that count as one are all the same by `is_same_batch`: the range with most of the batches given, then that of
    the rest with most. They count as their median.
    """
    given = sorted(batches)
    left = [batch for batch in given if batch > 0]
    usual = {batch: batch for batch in given if batch <= 0}
    while left:
        stops = [bisect_left(left, batch * (1 + _OTHER_BATCH), lo=at) for at, batch in enumerate(left)]
        first = max(range(len(left)), key=lambda at: stops[at] - at)
        alike = left[first : stops[first]]
        usual |= dict.fromkeys(alike, alike[(len(alike) - 1) // 2])
        del left[first : stops[first]]
    return usual


def work_differences(runs: Sequence[MeasuredRun]) -> list[str]:
    """Return in what the work of runs differs, one sentence each; empty where it is the same as far as recorded."""
    return list(dict.fromkeys(_differences(runs[0], runs[1:])))


def differs_beyond_batch(runs: Sequence[MeasuredRun]) -> bool:
    """Return whether more of the work differs than how many samples a step has, so that samples are not alike."""
    return bool(work_differences([replace(run, samples_per_step=0.0, is_per_sample=False) for run in runs]))


def _differences(first: MeasuredRun, others: Sequence[MeasuredRun]) -> Iterator[str]:
    for other in others:
        if bool(first.samples_unit) != bool(other.samples_unit):
            yield "how many samples a step has is known of one of them alone"
        elif first.samples_unit != other.samples_unit:
            yield f"samples are {first.samples_unit} and {other.samples_unit}"
        elif first.is_per_sample != other.is_per_sample:
            yield "the batch is known of one of them alone, the other has a throughput without it"
        elif is_work_known((first, other)) and not is_same_batch(first.samples_per_step, other.samples_per_step):
            sizes = [format_count(run.samples_per_step) for run in (first, other)]
            yield f"a step has {sizes[0]} and {sizes[1]} {first.samples_unit}"
        if first.emulation != other.emulation:
            yield "computation was emulated in one of them, or in another way"
        one, two = compared_work(first), compared_work(other)
        for name in sorted(set(one) & set(two)):
            if one[name] != two[name]:
                yield f"{name} is {one[name]} and {two[name]}"


def compared_work(run: MeasuredRun) -> dict[str, str]:
    """Return what a run says of its work, by name, without what does not make it other work."""
    return {name: value for name, value in run.conditions.work.items() if name not in _NOT_WORK}


def is_work_known(runs: Sequence[MeasuredRun]) -> bool:
    """Return whether each run says what a step of it is."""
    return all(run.samples_per_step > 0 for run in runs)
