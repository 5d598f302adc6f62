"""How a job scales: what stops it, the table of sizes, where the step goes, and what larger sizes would give."""

from __future__ import annotations

from hpcpace.core.text import format_count, format_duration, percent, plural
from hpcpace.report.document import NONE, Document, Notes, Section, Table
from hpcpace.runs.scaling.result import PredictedSize, Scaling, SizeFigures, stop_words
from hpcpace.runs.scaling.sizes import Kind

_MIN_SHOWN_CHANCE = 0.01  # display: a probability below it is not shown


def scaling_document(scaling: Scaling) -> Document:
    """Return all that is known of a series of sizes."""
    return Document(
        heading="",
        title="scaling",
        warnings=headline(scaling),
        sections=(
            _sizes_section(scaling),
            _parts_section(scaling),
            _predictions_section(scaling),
            Section("Left out", (Notes(scaling.left_out, is_folded=True),)),
        ),
        rest="--json",
    )


def headline(scaling: Scaling) -> list[tuple[str, str]]:
    """Return what matters most: how far the job scales, what stops it, and what larger sizes would give."""
    largest = scaling.sizes[-1]
    found = [
        (
            "Scaling",
            f"{scaling.kind} ({scaling.why}): {largest.speedup:.2f} times as fast on {largest.num_units} "
            f"{scaling.unit}s as on {scaling.sizes[0].num_units}, scaling factor {largest.scaling_factor:.2f}",
        ),
        ("Knee", _knee_words(scaling)),
    ]
    if scaling.stop is not None:
        lost = scaling.stop.lost.get(scaling.stop.part, 0.0)
        what = (
            f"{stop_words(scaling.stop.part, scaling.kind)}: {percent(lost)} of the step on {largest.num_units} "
            f"{scaling.unit}s"
            if scaling.stop.part
            else "nothing yet: no part costs 3 % of the step more than on the smallest size"
        )
        found.append(("Stopped by", what))
    elif scaling.no_parts:
        found.append(("Stopped by", f"not known: {scaling.no_parts}"))
    return found


def _knee_words(scaling: Scaling) -> str:
    knee, unit = scaling.knee, scaling.unit
    if scaling.kind is Kind.UNKNOWN:
        return "not known: neither weak nor strong scaling"
    if knee is None:
        return "not known: no size was measured together with twice that size"
    if knee.num_units is None:
        what = "measured" if knee.is_measured else "measured or predicted"
        doubt = " (95 %)" if knee.low is None else f", but it may be from {plural(knee.low, unit)} on (95 %)"
        return (
            f"none found: every doubling up to {2 * knee.searched} {unit}s, as {what}, gives at least half of its "
            f"ideal gain{doubt}{_unseen(scaling)}"
        )
    ends = [f"more than {knee.searched}" if end is None else str(end) for end in (knee.low, knee.high)]
    interval = f" (95 %: {' to '.join(dict.fromkeys(ends))})" if set(ends) != {str(knee.num_units)} else ""
    verb = "stops paying" if knee.is_measured else "is expected to stop paying"
    return (
        f"{verb} at {plural(knee.num_units, unit)}{interval}: each {unit} beyond gives less than 50 %{_unseen(scaling)}"
    )


def _unseen(scaling: Scaling) -> str:
    """Return what a predicted knee does not know, if there is anything."""
    if scaling.is_overlap_known or scaling.knee is None or scaling.knee.is_measured:
        return ""
    return "; communication hidden behind work cannot be seen in these runs, and may bring the knee forward"


def _sizes_section(scaling: Scaling) -> Section:
    head = (
        f"{scaling.unit}s",
        "runs",
        "speed",
        "S_n",
        "(95 %)",
        "further",
        "step",
        "CV",
        "busy",
        "wait",
        "trf",
        "band",
    )
    return Section(
        "Sizes",
        (Table(head, [_cells(size) for size in scaling.sizes]), Notes(scaling.remarks)),
        lead=f"{scaling.sample_unit}/s; means over repeats; further: what each {scaling.unit} beyond gave",
    )


def _cells(size: SizeFigures) -> list[str]:
    low, high = size.scaling_interval
    return [
        str(size.num_units),
        str(len(size.runs)),
        NONE if size.samples_per_s is None else format_count(size.samples_per_s),
        f"{size.scaling_factor:.2f}",
        _interval(low, high) if low != high else "",
        "" if size.further_gain is None else f"{100 * size.further_gain:.0f} %",
        _duration(size.step_ns),
        NONE if size.cv is None else f"{size.cv:.2f}",
        *(NONE if share is None else f"{100 * share:.0f}%" for share in (size.busy, size.wait, size.transfer)),
        str(size.band),
    ]


def _interval(low: float, high: float) -> str:
    """Return an interval with two digits behind the point, or three where two show no width."""
    digits = 2 if round(low, 2) < round(high, 2) else 3
    return f"{low:.{digits}f}-{high:.{digits}f}"


def _duration(step_ns: float | None) -> str:
    return NONE if step_ns is None else format_duration(step_ns)


def _parts_section(scaling: Scaling) -> Section:
    is_known = all(size.parts_ns for size in scaling.sizes)
    names = list(scaling.sizes[0].parts_ns)
    sizes: list[tuple[str, SizeFigures | PredictedSize]] = [(str(size.num_units), size) for size in scaling.sizes]
    sizes += [(f"{size.num_units}*", size) for size in scaling.predictions]
    rows = [
        (label, *(format_duration(size.parts_ns[name]) for name in names), _duration(size.step_ns))
        for label, size in sizes
        if is_known
    ]
    return Section(
        "Where the step goes",
        (
            Table((f"{scaling.unit}s", *names, "step"), rows),
            Notes(["* predicted"] if rows and scaling.predictions else []),
        ),
        lead="means over ranks; the parts add up to the step",
    )


def _predictions_section(scaling: Scaling) -> Section:
    if scaling.no_law:
        lines = [f"not predicted: {scaling.no_law}"]
    else:
        lines = [_predicted(size, scaling.unit) for size in scaling.predictions]
        lines += _knee_by_size(scaling)
        lines.append(f"rests on {'; '.join(scaling.rests_on)}")
        if scaling.backtest is not None:
            lines.append(
                f"the law of the smaller sizes is {100 * scaling.backtest:+.1f} % off at {scaling.sizes[-1].num_units} "
                f"{scaling.unit}s, which the intervals include"
            )
        lines.append(f"beyond {scaling.predictions[-1].num_units} {scaling.unit}s nothing is predicted")
    return Section("Larger sizes", (Notes(lines),), lead="mean step time of one more run, with its 95 % interval")


def _knee_by_size(scaling: Scaling) -> list[str]:
    if scaling.knee is None or scaling.knee.is_measured:
        return []
    doubtful = [(size, share) for size, share in scaling.knee.by_size if share >= _MIN_SHOWN_CHANCE]
    if not doubtful:
        return []
    shares = ", ".join(f"{100 * share:.0f} % at {size} {scaling.unit}s" for size, share in doubtful)
    return [f"probability that the knee is there or before: {shares}"]


def _predicted(size: PredictedSize, unit: str) -> str:
    low, high = (format_duration(value) for value in size.step_interval_ns)
    fast, slow = size.speedup_interval[1], size.speedup_interval[0]
    return (
        f"{size.num_units} {unit}s ({size.factor} times): {format_duration(size.step_ns)} ({low} to {high}), "
        f"{size.speedup:.2f} times as fast as the smallest size ({slow:.2f} to {fast:.2f}), scaling factor "
        f"{size.scaling_factor:.2f}"
    )
