"""A comparison of runs in sentences, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import expm1
from statistics import fmean

from hpcpace.core.text import format_count, format_duration, milliseconds, percent, plural, printable
from hpcpace.runs.compare import ComparedRun, Comparison, Judged, Outcome
from hpcpace.runs.units import UnitChanges, UnitRow

AGAINST_OTHERS = "* against the ranks of its role in the same run: its own work in A and B is not the same"
_MOST_PLACES, _MOST_PARTS = 4, 3
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
    """Return a change in percent; one that is none has no sign."""
    percents = 100 * _rounded(share)
    return f"{percents:+.1f} %" if percents else "0.0 %"


def _rounded(share: float) -> float:
    """Return a share as `signed` tells it, to a tenth of a percent."""
    return round(100 * share, 1) / 100


def place_sentences(comparison: Comparison) -> list[str]:
    """Return who does its own work slower or faster than before, the largest changes first."""
    places = comparison.places
    if places is None:
        return ["own work is not known of all ranks: no place can be named"]
    found = [_place_sentence(row, places) for row in places.named[:_MOST_PLACES]]
    if len(places.named) > _MOST_PLACES:
        found.append(f"{len(places.named) - _MOST_PLACES} more places changed")
    if places.is_common:
        common = _common_sentence(places)
        if comparison.outcome is Outcome.SAME:
            common += ", though steps do not differ beyond noise"
        found.insert(0, common)
    if not found:
        found.append("no host or rank changed against the others beyond noise")
    if any(run.num_missing for run in (*comparison.before, *comparison.after)):
        found.append("of ranks without a trace this is not known")
    return found


def _common_sentence(places: UnitChanges) -> str:
    change, where, host = places.common, "most hosts", places.hosts[0]
    if len(places.hosts) == 1:
        where = printable(host.name)
        if places.named and places.common_kind == "rank":
            where = f"most ranks of {where}"
        elif host.change is not None:
            change = host.change.value
    direction = "more" if change > 0 else "less"
    return f"own work takes {percent(abs(expm1(change)))} {direction} time on {where}"


def _place_sentence(row: UnitRow, places: UnitChanges) -> str:
    assert row.beyond is not None
    name = printable(row.name if row.kind == "host" else f"rank {row.name}")
    if not row.is_in_both:
        return f"{name} {_against_others(row)}"
    if places.is_common and row.against == "itself" and row.change is not None and row.beyond.value * places.common < 0:
        low, high = signed(expm1(row.change.low)), signed(expm1(row.change.high))
        own = signed(expm1(row.change.value))
        return f"{name} did not change as most others did: its own work by {own} (95 %: {low} to {high})"
    direction = "slower" if row.beyond.value > 0 else "faster"
    low, high = signed(expm1(row.beyond.low)), signed(expm1(row.beyond.high))
    against = ""
    if row.against == "others":
        against = ", against the ranks of its role in the same run"
    elif signed(expm1(places.common)) != signed(0):
        against = ", beyond what most others changed by"
    return (
        f"{name} is {percent(abs(row.beyond_share))} {direction} in B by its own work (95 %: {low} to {high}){against}"
    )


def _against_others(row: UnitRow) -> str:
    """Return what a place that one group lacks is in the other one."""
    beyond = row.beyond
    assert beyond is not None
    sign, here, there = (1, "B", "A") if row.before_ns is None else (-1, "A", "B")
    value = expm1(sign * beyond.value)
    low, high = sorted(expm1(sign * end) for end in (beyond.low, beyond.high))
    direction = "slower" if value > 0 else "faster"
    return (
        f"is {percent(abs(value))} {direction} by its own work than the ranks of its role in {here} (95 %: "
        f"{signed(low)} to {signed(high)}); not all runs of {there} have it"
    )


def change_cells(row: UnitRow, none: str) -> tuple[str, str]:
    """Return the change of a place from A to B and its interval in percent, or `none` where a group lacks it.

    That against the others of its run has a star, which `AGAINST_OTHERS` explains.
    """
    if row.change is None or not row.is_in_both:
        return none, none
    star = "*" if row.against == "others" else ""
    return (
        f"{signed(row.change_share)}{star}",
        f"{100 * expm1(row.change.low):+.1f} to {100 * expm1(row.change.high):+.1f}",
    )


def noise_sentence(comparison: Comparison) -> str:
    """Return what the interval rests on, and what it could have missed."""
    difference = comparison.difference
    sides = f"{len(comparison.before)} and {len(comparison.after)} runs"
    mean = comparison.mean_difference
    seen = f"a difference below {percent(difference.half_width)} would not be seen"
    spread = f"that differ by {percent(difference.spread)}"
    if mean is not None:
        seen = (
            f"a difference of the median step below {percent(difference.half_width)} would not be seen, nor one of the "
            f"mean step below {percent(mean.half_width)}"
        )
        spread = f"whose median steps differ by {percent(difference.spread)} and mean steps by {percent(mean.spread)}"
    if difference.from_repeats:
        return f"{sides} {spread} (standard deviation); {seen}"
    taken = f"{percent(comparison.prior_cv)} (--run-cv)"
    if difference.spread > comparison.prior_cv:
        taken = f"{percent(difference.spread)}, as these repeats differ by more than {taken}"
    return (
        f"{plural(len(comparison.before), 'run')} of A and {len(comparison.after)} of B: runs of the same thing are "
        f"taken to differ by {taken}, because 3 repeats a side are needed to measure "
        f"that; {seen}"
    )


def other_work_sentences(comparison: Comparison) -> Iterator[str]:
    """Yield what a comparison of different work means."""
    if not comparison.other_work:
        return
    yield f"the work differs: {'; '.join(comparison.other_work)}"
    if comparison.per_batch is not None:
        yield "times are scaled to the batch of A: they say how fast samples are done, not how long a step of B takes"
    if comparison.differs_beyond_batch:
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
    """Return the parts that make most of the difference, the largest first; none of no difference beyond noise.

    Parts that changed the other way are no reason for it.
    """
    return [f"{name} {signed(share)}" for name, share in _main_shares(comparison)]


def reason_sentence(comparison: Comparison) -> str:
    """Return the parts that make most of the difference, and all others as one, so that they add up; "" without any."""
    found = _main_shares(comparison)
    if not found:
        return ""
    before, after = (sum(getattr(row, side) for row in comparison.parts) for side in ("before_ns", "after_ns"))
    rest = _rounded(after / before - 1) - sum(_rounded(share) for _, share in found)
    others = [f"all else {signed(rest)}"] if _rounded(rest) else []
    return f"of A's mean step: {', '.join([*main_parts(comparison), *others])}"


def _main_shares(comparison: Comparison) -> list[tuple[str, float]]:
    """Return the names of the main parts with their changes, as shares of A's mean step."""
    before = sum(row.before_ns for row in comparison.parts)
    if comparison.outcome is Outcome.SAME or not before:
        return []
    shares = [(f"{row.kind} {row.name}", row.change_ns / before) for row in comparison.parts]
    large = [(name, share) for name, share in shares if share / comparison.share > _LEAST_SHARE]
    return sorted(large, key=lambda found: -abs(found[1]))[:_MOST_PARTS]


def names_of(runs: Sequence[ComparedRun]) -> str:
    """Return the paths of a group."""
    return ", ".join(printable(run.path) for run in runs)
