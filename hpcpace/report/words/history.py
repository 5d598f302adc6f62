"""What changed over a history of runs, in sentences."""

from __future__ import annotations

import time
from collections import Counter

from hpcpace.core.text import NS_PER_S, format_duration, listed, percent, plural, printable
from hpcpace.runs.history import LASTS_NS, LEAST_CHANGE, Event, History

_MOST_JOBS = 3
_RANK_0 = {
    "always": "; it always has rank 0, which may have more to do than the others",
    "gained": "; it has rank 0 since then, which may have more to do than the others",
    "lost": "; it had rank 0 before, which may have more to do than the others",
}
_DAY_NS = 86_400 * NS_PER_S


def event_sentence(event: Event) -> str:
    """Return what changed, by how much, since when or when, in which jobs, and what else may explain it."""
    return f"{_change_sentence(event)}{_RANK_0.get(event.rank_0, '')}"


def _change_sentence(event: Event) -> str:
    name = printable(event.name)
    if event.kind == "long steps":
        size = f"{percent(abs(event.share))} {'more' if event.share > 0 else 'less'}"
        levels = f"mean over median step {event.before:.2f} to {event.after:.2f}"
        return f"long steps of {name} cost {size} since {_begin(event)} ({levels}), {_in_runs(event)}"
    size = f"{percent(abs(event.share))} {'slower' if event.share > 0 else 'faster'}"
    than = " than the others of its runs" if event.kind == "host" else ""
    runs = plural(event.num_runs, "run")
    if event.duration == "chronic":
        of_all = (
            f"{event.num_runs} of its {event.num_runs + event.num_before} runs"
            if event.num_before
            else f"all its {runs}"
        )
        return f"{name} has been {size}{than} in {of_all}{_jobs(event)}"
    if event.duration == "one-off":
        when = f"in {runs} from" if event.num_runs > 1 else "on" if event.begun_unix_ns else "in"
        return f"{name} was {size}{than} {when} {_begin(event)} for once{_levels(event)}"
    if event.duration == "drift":
        came = f"{name} got {size}{than} gradually, from {_begin(event)} to {_end(event)}"
        return f"{came}{_levels(event)}, over {runs}{_jobs(event)}"
    since = f"{name} is {size}{than} since {_begin(event)}{_levels(event)}"
    if event.duration == "recent":
        return f"{since}, in {runs} so far: {_needed(event)} are needed to tell a lasting change from a one-off"
    return f"{since}, {_in_runs(event)}{_jobs(event)}{_of_mean(event)}"


def _of_mean(event: Event) -> str:
    """Return what the mean step did, where that is something else than the median did."""
    if event.mean_share is None or abs(event.mean_share - event.share) <= max(LEAST_CHANGE, abs(event.share) / 2):
        return ""
    return f"; its mean step, which throughput follows, changed by {100 * event.mean_share:+z.1f} %"


def _begin(event: Event) -> str:
    """Return when its first run began, or the run itself where dates are not known."""
    return date(event.begun_unix_ns) if event.begun_unix_ns else f"run {printable(event.run)}"


def _end(event: Event) -> str:
    """Return when its last run began."""
    return date(event.last_unix_ns) if event.last_unix_ns else "the last one"


def _needed(event: Event) -> str:
    """Return how many runs show that a recent change lasts; more where as many as that are not enough."""
    if event.has_enough_runs or event.last_unix_ns - event.begun_unix_ns >= LASTS_NS:
        return "more"
    return "3, or 2 a week apart that agree," if event.begun_unix_ns else "3"


def _in_runs(event: Event) -> str:
    """Return in how many runs, and how far apart they are where that is why they count as lasting."""
    runs = f"in {plural(event.num_runs, 'run')}"
    if event.has_enough_runs:
        return runs
    return f"{runs} {(event.last_unix_ns - event.begun_unix_ns) // _DAY_NS} days apart"


def _levels(event: Event) -> str:
    if event.kind == "host":
        return ""
    return f" ({format_duration(event.before * NS_PER_S)} to {format_duration(event.after * NS_PER_S)})"


def _jobs(event: Event) -> str:
    if event.kind != "host":
        return ""
    if len(event.jobs) == event.num_jobs:
        return f", in {'the one job' if event.num_jobs == 1 else f'all {event.num_jobs} jobs'} that used it"
    names = [printable(job) for job in event.jobs[:_MOST_JOBS]]
    more = [f"{len(event.jobs) - _MOST_JOBS} more"] if len(event.jobs) > _MOST_JOBS else []
    return f", in {len(event.jobs)} of {event.num_jobs} jobs that used it: {listed([*names, *more])}"


def date(unix_ns: int, *, with_time: bool = True) -> str:
    """Return a date in local time with its day of the week; `an unknown date` for 0."""
    if not unix_ns:
        return "an unknown date"
    try:
        return time.strftime("%a %Y-%m-%d %H:%M" if with_time else "%Y-%m-%d", time.localtime(unix_ns // NS_PER_S))
    except (OverflowError, OSError, ValueError):
        return "an unknown date"


def headline(history: History) -> str:
    """Return the result in one line."""
    num = Counter(event.duration for event in history.events)
    if not history.events:
        return "nothing changed beyond noise"
    counts = [
        ("lasting", "lasting change"),
        ("drift", "drift"),
        ("chronic", "chronically slow host"),
        ("recent", "recent change"),
        ("one-off", "one-off"),
    ]
    return listed([plural(num[duration], words) for duration, words in counts if num[duration]])


def counts_sentence(history: History) -> str:
    """Return what the history is of."""
    hosts = f"{plural(history.num_hosts, 'host')} compared" if history.num_hosts else "no host can be compared"
    parts = [f"{plural(history.num_runs, 'run')} in {len(history.series)} series (job, layout and work)", hosts]
    if history.broken:
        parts.append(f"{len(history.broken)} not used")
    if history.copies:
        parts.append(f"{len(history.copies)} left out as copies")
    if history.num_running:
        parts.append(f"{history.num_running} still running")
    return ", ".join([*parts, *passed_over_words(history)])


def passed_over_words(history: History) -> list[str]:
    """Return what was not searched for runs; nothing where all was."""
    found = history.passed_over
    links = f"{plural(found.num_links, 'link')} to folders elsewhere not followed"
    deep = f"{plural(found.num_deep, 'folder')} more than three deep not searched"
    return [words for words, num in ((links, found.num_links), (deep, found.num_deep)) if num]
