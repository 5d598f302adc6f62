"""What the audit's snapshots say about a run.

The rules run here, on the snapshots that the session has saved. A finding explains why a rank is slow unless it holds
for all others as well; so such findings come first, and of the others one is shown, as common.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from hpcpace.audit.facts import RankFacts
from hpcpace.audit.findings import AuditFinding, Severity, blocks, grouped, kind_of
from hpcpace.audit.job import AuditedJob
from hpcpace.audit.rulebook import BY_ID, run_rules
from hpcpace.audit.settings import AuditConfig
from hpcpace.core.hostlist import short_list
from hpcpace.core.text import printable
from hpcpace.diagnosis.finding import DiagnosisFinding
from hpcpace.diagnosis.judged import JudgedAttempt
from hpcpace.diagnosis.summary import AuditFigures, AuditMatch, Culprit, Mode

_MAX_OWN, _MAX_COMMON, _MAX_CULPRITS = 3, 1, 8  # display: findings on each culprit, and culprits
_MAX_FOUND, _MAX_TEXT = 1000, 200  # display: findings in summary.json, and letters of each
_ORDER = {Severity.FAIL: 0, Severity.WARNING: 1}
_OF_NODES = "H01"  # its place is a fact of the node, such as its kernel
_LOCAL_RANK = re.compile(r"(?:local )?rank \d+")


def audit_figures(run: JudgedAttempt) -> AuditFigures:
    """Return what the snapshots of an attempt say; it has some, or some that cannot be read."""
    snapshots, hosts, blamed = run.snapshots, run.credible.hosts, run.diagnosis.findings
    problems = list(run.unread)
    try:
        job = AuditedJob(snapshots, run.config.of(AuditConfig))
        findings = run_rules(job).findings if snapshots else ()
        matches = tuple(_matches(job, findings, blamed, hosts)) if snapshots else ()
    except Exception as error:  # the boundary to a part of the report that the rest does not need
        problems.append(f"the rules ended with an error of hpcpace's own ({type(error).__name__}: {error})")
        job, findings, matches = AuditedJob(()), (), ()
    seen = {rank.rank for host in job.hosts for rank in host.ranks}
    absent = sorted({host for rank, host in hosts.items() if rank not in seen})
    if absent:
        problems.append(f"no snapshot has the ranks of {short_list(absent)}")
    found = sorted({_in_short(finding) for finding in findings if finding.severity in _ORDER})
    counts = {str(severity): 0 for severity in Severity}
    for block in blocks(grouped(findings)):
        counts[block[0].severity] += len(block)
    return AuditFigures(
        num_hosts=len(job.hosts),
        num_ranks=len(seen),
        counts=counts,
        matches=matches,
        problems=tuple(printable(problem) for problem in problems),
        found=tuple(found[:_MAX_FOUND]),
    )


def _in_short(finding: AuditFinding) -> str:
    where = " ".join(part for part in (finding.host, finding.place) if part) or "job"
    return printable(f"{finding.rule} on {where}: {finding.seen}")[:_MAX_TEXT]


def _matches(
    job: AuditedJob, findings: Iterable[AuditFinding], blamed: Sequence[DiagnosisFinding], hosts: Mapping[int, str]
) -> Iterator[AuditMatch]:
    """Yield the findings on blamed ranks and nodes, by culprit; the rarest of each come first."""
    by_host = {host.name: host.ranks for host in job.hosts}
    by_host[""] = tuple(rank for host in job.hosts for rank in host.ranks)
    world = {rank.rank for rank in by_host[""]}
    bad = [
        (finding, _concerned(by_host, finding))
        for finding in findings
        if finding.severity in _ORDER and BY_ID[finding.rule].explains
    ]
    having: dict[tuple[str, str], set[int]] = {}
    for finding, concerned in bad:
        having.setdefault(kind_of(finding), set()).update(concerned)
    named: dict[str, tuple[frozenset[int], str]] = {}
    for blame in blamed:
        for who, ranks in (place for culprit in blame.culprits for place in _places(culprit, hosts)):
            named.setdefault(who, (ranks, blame.mode))
    for who, (ranks, mode) in list(named.items())[:_MAX_CULPRITS]:
        gpus = {_gpu(rank) for rank in by_host[""] if rank.rank in ranks}
        own = [finding for finding, concerned in bad if concerned & ranks]
        # A finding that fewer ranks have explains more about this one.
        own.sort(key=lambda finding: (len(having[kind_of(finding)]), _ORDER[finding.severity]))
        common = [finding for finding in own if having[kind_of(finding)] >= world]
        rest = [finding for finding in own if finding not in common]
        for finding in (*rest[:_MAX_OWN], *common[:_MAX_COMMON]):
            yield _match(finding, who, ranks, gpus, mode, is_common=finding in common)


def _places(culprit: Culprit, hosts: Mapping[int, str]) -> Iterator[tuple[str, frozenset[int]]]:
    """Yield the ranks and nodes that a culprit may be, each with its name and ranks."""
    names = [f"{culprit.kind} {culprit.id}", *culprit.aliases]
    has_rank = any(name.startswith("rank ") for name in names)
    for name in dict.fromkeys(names):
        kind, _, place = name.partition(" ")
        if kind == "rank" and place.isdigit() and int(place) in hosts:
            yield f"rank {place} on {printable(hosts[int(place)])}", frozenset({int(place)})
        elif kind in ("node", "link") and place in hosts.values() and not has_rank:
            yield f"{kind} {printable(place)}", frozenset(rank for rank, host in hosts.items() if host == place)


def _concerned(by_host: Mapping[str, Sequence[RankFacts]], finding: AuditFinding) -> frozenset[int]:
    """Return the ranks that a finding is about: those it names, those of its GPU, else all of its host or job."""
    if finding.ranks:
        return frozenset(finding.ranks)
    ranks = by_host.get(finding.host, ())
    if finding.place.startswith("GPU "):
        ranks = [rank for rank in ranks if _gpu(rank) == finding.place.removeprefix("GPU ")] or ranks
    return frozenset(rank.rank for rank in ranks)


def _gpu(rank: RankFacts) -> str:
    return rank.gpus[rank.gpu].address if rank.gpus and 0 <= rank.gpu < len(rank.gpus) else ""


def _match(
    finding: AuditFinding, who: str, ranks: frozenset[int], gpus: Collection[str], mode: str, *, is_common: bool
) -> AuditMatch:
    state = {str(Mode.HANG): "hangs", str(Mode.ENDED): "ended early"}.get(mode, "is slow")
    so_do = ", as all others do" if is_common else ""
    subject, verb = _subject(finding, ranks, gpus)
    seen = printable(finding.seen)
    return AuditMatch(
        who=who,
        rule=finding.rule,
        severity=str(finding.severity),
        host=finding.host,
        place=finding.place,
        seen=finding.seen,
        cost=finding.cost,
        fix=finding.fix,
        is_common=is_common,
        told=f"{who} {state}, and {subject} {verb} {finding.rule}{so_do}: {seen}",
    )


def _subject(finding: AuditFinding, ranks: frozenset[int], gpus: Collection[str]) -> tuple[str, str]:
    """Return what a finding is on, as said of who is blamed, and the verb that goes with it."""
    place = printable(finding.place)
    if not place or finding.rule == _OF_NODES:
        return ("its node" if finding.host else "the job"), "has"
    if len(ranks) == 1 and _LOCAL_RANK.fullmatch(place) and set(finding.ranks) == ranks:
        return "it", "has"
    if finding.ranks:
        return place, "have" if place.startswith("local ranks ") else "has"
    if len(ranks) == 1 and place.removeprefix("GPU ") not in gpus and finding.host:
        return f"its node's {place}", "has"
    return f"its {place}", "has"
