"""A comparison of runs in sentences, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import expm1
from statistics import fmean

from hpcpace.quoting import printable
from hpcpace.runs.compare import ComparedRun, Comparison, Judged, Outcome
from hpcpace.runs.places import PlaceRow
from hpcpace.units import format_count, format_duration
from hpcpace.wording import milliseconds, percent, plural

_MOST_PLACES = 4
_LEAST_SHARE = 0.1


def headline(comparison: Comparison) -> str:
    """Return the verdict in one line, without the word verdict."""
    low, high = comparison.interval
    interval = f"95 %: {signed(low)} to {signed(high)}"
    per = f" for a batch of {format_count(comparison.per_batch)}" if comparison.per_batch is not None else ""
    by = ""
    if comparison.judged_by is Judged.MEAN:
        median = signed(expm1(comparison.difference.value))
        by = f" by its mean step, which throughput follows; the median step changed by {median}"
    if comparison.outcome is Outcome.SAME:
        return f"no difference beyond noise: B {signed(comparison.share)}{per} ({interval}){by}"
    return f"B is {percent(abs(comparison.share))} {comparison.outcome} than A{per} ({interval}){by}"


def signed(share: float) -> str:
    """Return a change in percent."""
    return f"{100 * share:+.1f} %"


def place_sentences(comparison: Comparison) -> list[str]:
    """Return who does its own work slower or faster than before, the largest changes first."""
    places = comparison.places
    if places is None:
        return ["own work is not known of all ranks: no place can be named"]
    found = [_place_sentence(row, places.common) for row in places.named[:_MOST_PLACES]]
    if len(places.named) > _MOST_PLACES:
        found.append(f"{len(places.named) - _MOST_PLACES} more places changed")
    if places.is_common:
        direction = "more" if places.common > 0 else "less"
        where = "most hosts" if len(places.hosts) > 1 else printable(places.hosts[0].name)
        found.insert(0, f"own work takes {percent(abs(expm1(places.common)))} {direction} time on {where}")
    if not found:
        found.append("no host or rank changed against the others beyond noise")
    return found


def _place_sentence(row: PlaceRow, common: float) -> str:
    assert row.beyond is not None
    name = printable(row.name if row.kind == "host" else f"rank {row.name}")
    direction = "slower" if row.beyond.value > 0 else "faster"
    low, high = signed(expm1(row.beyond.low)), signed(expm1(row.beyond.high))
    against = ""
    if row.against == "others":
        against = ", against the ranks of its role in the same run"
    elif common:
        against = ", beyond what most hosts changed by"
    return (
        f"{name} is {percent(abs(row.beyond_share))} {direction} in B by its own work (95 %: {low} to {high}){against}"
    )


def noise_sentence(comparison: Comparison) -> str:
    """Return what the interval rests on, and what it could have missed."""
    difference = comparison.difference
    sides = f"{len(comparison.before)} and {len(comparison.after)} runs"
    seen = f"a difference below {percent(difference.half_width)} would not be seen{_mean_noise(comparison)}"
    if difference.from_repeats:
        return f"{sides} that differ by {percent(difference.spread)} (standard deviation); {seen}"
    return (
        f"{plural(len(comparison.before), 'run')} of A and {len(comparison.after)} of B: runs of the same thing are "
        f"taken to differ by {percent(comparison.prior_cv)} (--run-cv), because 3 repeats a side are needed to measure "
        f"that; {seen}"
    )


def _mean_noise(comparison: Comparison) -> str:
    """Return what the mean steps, which throughput follows, could have missed."""
    mean = comparison.mean_difference
    return "" if mean is None else f", one of the mean step below {percent(mean.half_width)}"


def other_work_sentences(comparison: Comparison) -> Iterator[str]:
    """Yield what a comparison of different work means."""
    if not comparison.other_work:
        return
    yield f"the work differs: {'; '.join(comparison.other_work)}"
    if comparison.per_batch is not None:
        yield "times are scaled to the batch of A: they say how fast samples are done, not how long a step of B takes"
    else:
        yield "a longer step is then no slower run: the figures say how long steps take, and not which run is better"


def run_sentence(run: ComparedRun) -> str:
    """Return what one run was."""
    rate = f", {format_count(run.samples_per_s)}/s" if run.samples_per_s else ""
    steps = f" ({plural(run.num_steps, 'step')})" if run.num_steps else ""
    cv = f", CV {run.cv:.3f}" if run.cv is not None else ""
    mean = f", mean {format_duration(run.mean_ns)}" if run.num_steps else ""
    return f"{run.path}: median step {format_duration(run.p50_ns)}{mean}{steps}{cv}{rate}"


def change_ms(change_ns: float) -> str:
    """Return a change in milliseconds with its sign; that of nothing has none."""
    size = milliseconds(abs(change_ns))
    return size if not float(size) else f"{'-' if change_ns < 0 else '+'}{size}"


def median_cells(comparison: Comparison) -> tuple[str, str, str, str]:
    """Return median step of A, of B, change, and that relative to A: means over the runs of a side."""
    before, after = (fmean(run.p50_ns for run in runs) for runs in (comparison.before, comparison.after))
    return milliseconds(before), milliseconds(after), change_ms(after - before), signed(after / before - 1)


def main_parts(comparison: Comparison) -> list[str]:
    """Return the parts that make most of the difference, the largest first; none of no difference beyond noise."""
    if comparison.outcome is Outcome.SAME:
        return []
    total = sum(row.change_ns for row in comparison.parts)
    rows = sorted(comparison.parts, key=lambda row: -abs(row.change_ns))
    before = sum(row.before_ns for row in comparison.parts)
    large = [row for row in rows if abs(row.change_ns) > _LEAST_SHARE * abs(total) and before][:3]
    return [f"{row.kind} {row.name} {signed(row.change_ns / before)}" for row in large]


def names_of(runs: Sequence[ComparedRun]) -> str:
    """Return the paths of a group."""
    return ", ".join(printable(run.path) for run in runs)
