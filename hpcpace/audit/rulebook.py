"""Running the rules over a job; nothing else calls their check functions.

A rule raises Unreadable if a fact that it needs is missing: that becomes a finding of severity U, never a silent pass.
It raises Skip if it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpcpace.audit.findings import AuditFinding, Severity, Skip, unknown
from hpcpace.audit.job import AuditedHost, AuditedJob, rank_place
from hpcpace.audit.rules.table import RULES, Rule
from hpcpace.audit.tree import Unreadable
from hpcpace.core.errors import UsageError

_ORDER = {severity: index for index, severity in enumerate(Severity)}


@dataclass(frozen=True, kw_only=True)
class RuleRun:
    """The outcome of running rules.

    Attributes:
        findings: the most severe first.
        skipped: by rule id, why the rule applies to no host of the job.
    """

    findings: tuple[AuditFinding, ...]
    skipped: dict[str, str]


def run_rules(job: AuditedJob, ids: Collection[str] | None = None) -> RuleRun:
    """Run rules over all hosts of a job.

    Args:
        job: the hosts.
        ids: rules to run; all by default. Those in `settings.ignore` never run.

    Raises:
        UsageError: an id is unknown.
    """
    check_ids([*(ids or ()), *job.settings.ignore])
    chosen = [rule for rule in RULES if (ids is None or rule.id in ids) and rule.id not in job.settings.ignore]
    findings: list[AuditFinding] = []
    skipped: dict[str, str] = {}
    for rule in chosen:
        applied = False
        for outcome in _run(rule, job):
            if isinstance(outcome, str):
                skipped[rule.id] = outcome
            else:
                applied = True
                findings += outcome
        if applied:
            skipped.pop(rule.id, None)
    return RuleRun(findings=tuple(sorted(findings, key=_rank_of)), skipped=skipped)


def check_ids(ids: Iterable[str]) -> None:
    """Refuse unknown rule ids.

    Raises:
        UsageError: an id is unknown; the message lists the valid ones.
    """
    for rule_id in ids:
        if rule_id not in BY_ID:
            raise UsageError(f"there is no rule {rule_id!r}: the rules are {' '.join(BY_ID)}")


def _rank_of(finding: AuditFinding) -> tuple[int, int]:
    return _ORDER[finding.severity], _NUMBER[finding.rule]


def _run(rule: Rule, job: AuditedJob) -> Iterator[list[AuditFinding] | str]:
    """Yield, for each item of the rule's scope, its findings, or why the rule does not apply to it."""
    if rule.scope == "job":
        yield _guarded(rule, None, "", (), rule.check(job))
        return
    for host in job.hosts:
        try:
            items = _ITEMS[rule.scope](host)
        except Unreadable as error:
            yield [unknown(rule.id, host.name, "", host.explain(error))]
            continue
        for place, ranks, arguments in items:
            yield _guarded(rule, host, place, ranks, rule.check(job, host, *arguments))


def _guarded(
    rule: Rule, host: AuditedHost | None, place: str, ranks: tuple[int, ...], findings: Iterator[AuditFinding]
) -> list[AuditFinding] | str:
    made: list[AuditFinding] = []
    try:
        for finding in findings:
            made.append(finding)
    except Unreadable as error:
        text = str(error) if host is None else host.explain(error)
        made.append(unknown(rule.id, "" if host is None else host.name, place, text, ranks))
    except Skip as reason:
        return str(reason)
    return made


_Items = Sequence[tuple[str, tuple[int, ...], tuple[Any, ...]]]


def _of_host(host: AuditedHost) -> _Items:
    return [("", (), ())]


def _of_ranks(host: AuditedHost) -> _Items:
    return [(rank_place(rank), (rank.rank,), (rank,)) for rank in host.ranks]


def _of_gpus(host: AuditedHost) -> _Items:
    gpus = host.hardware.of_kind("gpu")
    return [(f"GPU {device.address}", (), (device,)) for device in gpus]


def _of_links(host: AuditedHost) -> _Items:
    nics = [(f"NIC {device.address}", (), (device,)) for device in host.hardware.of_kind("nic")]
    return [*_of_gpus(host), *nics]


_ITEMS: dict[str, Callable[[AuditedHost], _Items]] = {
    "host": _of_host,
    "rank": _of_ranks,
    "gpu": _of_gpus,
    "link": _of_links,
}

BY_ID = {rule.id: rule for rule in RULES}
_NUMBER = {rule.id: number for number, rule in enumerate(RULES)}
