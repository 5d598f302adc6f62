"""Findings of rules, reasons why a rule does not apply, and equal findings of hosts as one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpcpace.core.hostlist import short_list

CANNOT_DETERMINE = "cannot determine "
"""How every finding of severity U begins; what could not be read, and why, follows."""


class Severity(StrEnum):
    """How bad a finding is, in the order in which findings are printed."""

    FAIL = "F"
    WARNING = "W"
    UNKNOWN = "U"
    INFORMATION = "I"


class Certainty(StrEnum):
    """How the audit knows what a finding says."""

    MEASURED = "measured"
    """Counted or timed while the audit ran."""
    READ = "read"
    """Read from the kernel, the driver or the environment."""
    INFERRED = "inferred"
    """Concluded from what was read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditFinding:
    """One problem that a rule found on one host, or a fact that it could not read there.

    Attributes:
        rule: id of the rule, like `A02`.
        host: name of the host; empty if the finding concerns the job as a whole.
        place: where on the host: `local rank 3`, `GPU 0000:17:00.0`, `mlx5_0 port 1`; empty for the whole host.
        seen: what was read there; the same problem has the same text on every host.
        cost: what the problem costs.
        fix: a line to paste, or to hand to an administrator.
        ranks: the affected ranks of the job.
    """

    rule: str
    severity: Severity
    host: str
    place: str
    seen: str
    cost: str
    fix: str
    certainty: Certainty
    ranks: tuple[int, ...] = ()


def unknown(rule: str, host: str, place: str, reason: str, ranks: tuple[int, ...] = ()) -> AuditFinding:
    """Return the finding for a fact that could not be read; `reason` names the fact, then says why."""
    return AuditFinding(
        rule=rule,
        severity=Severity.UNKNOWN,
        host=host,
        place=place,
        seen=CANNOT_DETERMINE + reason,
        cost="the problem that this rule looks for may or may not be there",
        fix="",
        certainty=Certainty.READ,
        ranks=ranks,
    )


class Skip(Exception):
    """A rule does not apply to this host or job; the message is the reason."""


_MOST_PLACES = 8
_WITH_DIGITS = re.compile(r"\S*\d\S*")
_MOST_ODD = 4


@dataclass(frozen=True, kw_only=True)
class FindingGroup:
    """One finding with all hosts on which it is the same.

    Attributes:
        hosts: names; empty if it concerns the job as a whole.
        ranks: affected ranks of the job.
    """

    rule: str
    severity: Severity
    place: str
    seen: str
    cost: str
    fix: str
    certainty: Certainty
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]


def grouped(findings: Iterable[AuditFinding]) -> list[FindingGroup]:
    """Return findings in the same order, equal ones of several hosts merged."""
    made: dict[tuple[str, ...], tuple[AuditFinding, dict[str, None], set[int]]] = {}
    for finding in findings:
        key = (finding.rule, finding.severity, finding.place, finding.seen, finding.fix)
        _, hosts, ranks = made.setdefault(key, (finding, {}, set()))
        if finding.host:
            hosts[finding.host] = None
        ranks.update(finding.ranks)
    return [
        FindingGroup(
            rule=finding.rule,
            severity=finding.severity,
            place=finding.place,
            seen=finding.seen,
            cost=finding.cost,
            fix=finding.fix,
            certainty=finding.certainty,
            hosts=tuple(hosts),
            ranks=tuple(sorted(ranks)),
        )
        for finding, hosts, ranks in made.values()
    ]


def blocks(groups: Iterable[FindingGroup]) -> list[list[FindingGroup]]:
    """Return blocks of groups with the same rule, severity and kind of problem, those of most hosts first.

    Two GPUs whose nearest adapters are both NODE have the same kind of problem; a port that is down and one that is
    slow do not.
    """
    made: dict[tuple[Severity, str, str], list[FindingGroup]] = {}
    for group in groups:
        made.setdefault((group.severity, *kind_of(group)), []).append(group)
    return [sorted(block, key=lambda group: -len(group.hosts)) for block in made.values()]


def kind_of(finding: AuditFinding | FindingGroup) -> tuple[str, str]:
    """Return the kind of problem of a finding: its rule, and what was seen with every word that has digits masked."""
    return finding.rule, _WITH_DIGITS.sub("#", finding.seen)


def hosts_text(hosts: Sequence[str], all_hosts: Sequence[str]) -> str:
    """Return hosts as a short text: `n3`, `all 16 nodes`, `14 of 16 nodes; odd ones out: n[03,07]`."""
    if len(all_hosts) < 2 or not hosts:
        return ""
    if len(hosts) == len(all_hosts):
        return f"all {len(all_hosts)} nodes"
    others = sorted(set(all_hosts) - set(hosts))
    if len(hosts) > len(all_hosts) / 2 and len(others) <= _MOST_ODD:
        return f"{len(hosts)} of {len(all_hosts)} nodes; odd ones out: {short_list(others)}"
    if len(hosts) == 1:
        return short_list(hosts)
    return f"{len(hosts)} of {len(all_hosts)} nodes: {_cut(short_list(hosts))}"


def place_text(block: Sequence[FindingGroup]) -> str:
    """Return the places of a block: `local rank 0`, `local rank 0, 1, 2`, at most eight and how many more."""
    places = list(dict.fromkeys(group.place for group in block if group.place))
    if len(places) <= 1:
        return "".join(places)
    prefix = _common_words(places)
    shown = [places[0], *(place[len(prefix) :] for place in places[1:_MOST_PLACES])]
    more = f" and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
    return ", ".join(shown) + more


def _common_words(places: Sequence[str]) -> str:
    first = places[0].split(" ")
    for length in range(len(first) - 1, 0, -1):
        prefix = " ".join(first[:length]) + " "
        if all(place.startswith(prefix) for place in places):
            return prefix
    return ""


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
