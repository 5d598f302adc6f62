"""What stands in front of the lines of a log: times, and labels of launchers, containers and loggers, in any order.

Known are `srun -l`, `mpirun --tag-output`, `pdsh` and `clush`, `kubectl logs --prefix`, the runtime of containers,
Docker, Ray, the journal, torchrun and glog, and times in the usual forms, with or without a date and a zone.
"""

from __future__ import annotations

import re

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S

_MAX_PARTS = 6  # format: labels of a launcher, a container, a logger and a shell, each with a time
_YEAR_DAYS = (0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)
_CLOCK = r"(?P<hour>\d{1,2}):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?"
# Names of months are those of any language, as `Nov 29`, `29 nov.` or `11月 29`.
_DATE = (
    r"(?:\d{4}[-/](?P<month>\d\d?)[-/](?P<day>\d\d?)|[\d/.\-]{8,10}"
    r"|(?:[^\W_]{2,10}\.?,? +)?[^\W_]{1,10}\.? +[^\W_]{1,10}[.,]?(?: \d{4})?)"
)
_ZONE = r"(?: ?(?P<zone>Z|UTC|GMT|[+-]\d\d:?\d\d|CES?T|[ECMP][SD]T|[BIJKM]ST|MSK)(?![\w:]))?"
_PART = re.compile(
    rf"[\[(]?(?:{_DATE}(?:T|,? +))?{_CLOCK}{_ZONE}[\])]?(?: std(?:out|err) [FP](?= ))?(?: ?[-|:,](?= ))?(?: |\t|$)"
    r"|(?P<glog>[EWIF]\d{3,4} \d\d:\d\d:\d\d\.\d{6,9} +(?:\d{1,10} +)?[\w./\-]{1,100}:\d{1,7}\])(?: |$)"
    r"| {0,6}(?P<task>\d{1,6}):(?: |(?=\t|$|\[))"
    r"|\[(?:[\w.\-]{1,100}@)?\d{1,6},(?P<mpi_rank>\d{1,6})\]<std(?:out|err|diag)>: ?"
    r"|\((?P<actor>[^\s()]{1,80}) pid=\d{1,10}(?:, ip=[^\s()]{1,60})?\)(?: |$)"
    r"|(?P<host>[A-Za-z0-9][\w.\-]{0,100})(?<!Error)(?<!Exception):(?: |(?=\t|$))"
    r"|(?P<logged_by>[A-Za-z][\w.\-]{0,100}) [\w./@\-]{1,100}\[\d{1,10}\]:(?: |$)"
    r"|\[(?P<bracketed>[^\]\s]{1,120})\](?P<colon>:?)(?: |(?=\t|$|\[))"
    r"|(?P<container>[\w.\-]{1,100}) +\|(?: |$)"
)
_NAME = re.compile(r"[A-Za-z][\w.\-]{0,100}")


@dataclass(frozen=True, kw_only=True)
class Front:
    """The front of a line.

    Attributes:
        text: the line without it.
        labels: it without times and without blanks at its begin.
        task: the rank by a label of Slurm or mpirun; None without one.
        host: the last name in it; empty without one.
        actor: the class of the Ray actor; empty without one.
        at_ns: its first time with a date, in a year of 366 days that has no number, in UTC where it has an offset from
            that; None without one.
    """

    text: str
    labels: str
    task: int | None
    host: str
    actor: str
    at_ns: int | None


def front_of(line: str) -> Front:
    """Return what stands in front of a line. Blanks behind a label but the first one belong to the line."""
    task, host, actor, at_ns = None, "", "", None
    labels: list[str] = []
    end = 0
    for _ in range(_MAX_PARTS):
        part = _PART.match(line, end)
        if part is None:
            break
        end = part.end()
        if part["second"]:
            at_ns = _at_ns(part) if at_ns is None else at_ns
        if part["second"] or part["glog"]:
            continue
        labels.append(part[0].lstrip())
        number = part["task"] or part["mpi_rank"]
        task = int(number) if number and task is None else task
        actor = part["actor"] or actor
        named = part["bracketed"] if part["colon"] and _NAME.fullmatch(part["bracketed"]) else ""
        host = part["host"] or part["logged_by"] or named or host
    return Front(text=line[end:], labels="".join(labels), task=task, host=host, actor=actor, at_ns=at_ns)


def _at_ns(part: re.Match[str]) -> int | None:
    if not part["month"]:
        return None
    month, day, hour, minute, second = (int(part[name]) for name in ("month", "day", "hour", "minute", "second"))
    found = year_ns(month, day, hour, minute, second, int((part["fraction"] or "").ljust(9, "0")))
    if found is None or (part["zone"] or "")[:1] not in ("+", "-"):
        return found
    hours, minutes = int(part["zone"][1:3]), int(part["zone"][-2:])
    offset_ns = (hours * 60 + minutes) * 60 * NS_PER_S
    return found - offset_ns if part["zone"][0] == "+" else found + offset_ns


def year_ns(month: int, day: int, hour: int, minute: int, second: int, nanosecond: int) -> int | None:
    """Return a time as nanoseconds since the begin of a year of 366 days; None where there is no such month."""
    if not 1 <= month <= len(_YEAR_DAYS):
        return None
    seconds = (((_YEAR_DAYS[month - 1] + day - 1) * 24 + hour) * 60 + minute) * 60 + second
    return seconds * NS_PER_S + nanosecond
