"""All rules of the audit, running them over a job, and the result: findings, bindings, exit code, as JSON too.

A rule names what it checks, from which facts, why, and the fix. It raises Unreadable if a fact that it needs is
missing: that becomes a finding of severity U, never a silent pass. It raises Skip if it does not apply.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hpcpace
from hpcpace.audit.facts import class_of_nccl
from hpcpace.audit.findings import (
    AuditFinding,
    Severity,
    Skip,
    bind_masks,
    bind_option,
    gpu_nodes,
    grouped,
    unknown,
    with_masks,
)
from hpcpace.audit.job import AuditedHost, AuditedJob, device_place, rank_place
from hpcpace.audit.rules import affinity, devices, hosts, nccl, network
from hpcpace.audit.tree import Unreadable
from hpcpace.core.codec import plain
from hpcpace.core.errors import EXIT_CANNOT_TELL, EXIT_FAILED, EXIT_OK, EXIT_WARNING, UsageError
from hpcpace.core.exposition import Family, MetricType
from hpcpace.core.exposition import exposition as text_of
from hpcpace.core.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        id: what `--rules`, `--ignore`, `--fail-on` and `explain` take, like `A02`.
        scope: what the rule runs on, once for each: `job`, `host`, `rank`, `gpu` or `link` (GPUs and adapters).
        title: what it checks.
        severities: letters that its findings can have, besides U.
        reads: where its facts come from.
        why: what goes wrong where it finds something, and when it is how severe.
        cost: what a finding costs that does not say so itself.
        fix: what to do.
        explains: whether a finding can make a rank slow or end it; only such ones stand beside culprits.
        check: the function that yields the findings.
    """

    id: str
    scope: str
    title: str
    severities: str
    reads: str
    why: str
    cost: str = ""
    fix: str
    explains: bool = True
    check: Callable[..., Iterator[AuditFinding]]

    @property
    def reads_nodes(self) -> bool:
        """Whether it needs facts of nodes, and not only a log or a file."""
        return self.check.__module__ != nccl.__name__ and self.id != "P09"


_CHECKS: dict[str, Callable[..., Iterator[AuditFinding]]] = {
    name[:3].upper(): check
    for module in (affinity, devices, hosts, nccl, network)
    for name, check in vars(module).items()
    if re.match(r"[a-z]\d\d_", name)
}
"""What each rule checks, by the id that its function's name begins with: yields its findings."""

_TEXTS = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
BY_ID = {rule_id: Rule(id=rule_id, check=_CHECKS[rule_id], **texts) for rule_id, texts in _TEXTS.items()}
"""In the order in which they run."""


_SEVERITIES = list(Severity)


@dataclass(frozen=True, kw_only=True)
class RuleRun:
    """The outcome of running rules.

    Attributes:
        num_rules: rules that were to run.
        findings: the most severe first.
        skipped: by rule id, why the rule applies to no host of the job.
    """

    num_rules: int
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
    chosen = [rule for rule in BY_ID.values() if (ids is None or rule.id in ids) and rule.id not in job.settings.ignore]
    findings: list[AuditFinding] = []
    skipped: dict[str, str] = {}
    for rule in chosen:
        outcomes = list(_run(rule, job))
        reasons = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if reasons and len(reasons) == len(outcomes):
            skipped[rule.id] = reasons[-1]
        findings += [finding for outcome in outcomes if not isinstance(outcome, str) for finding in outcome]
    findings.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
    return RuleRun(num_rules=len(chosen), findings=tuple(findings), skipped=skipped)


def check_ids(ids: Iterable[str]) -> None:
    """Refuse unknown rule ids.

    Raises:
        UsageError: an id is unknown; the message lists the valid ones.
    """
    for rule_id in ids:
        if rule_id not in BY_ID:
            raise UsageError(f"there is no rule {rule_id!r}: the rules are {' '.join(BY_ID)}")


@dataclass(frozen=True)
class _Item:
    """What a rule runs on once, and what its findings are about unless they say otherwise."""

    host: AuditedHost | None = None
    place: str = ""
    ranks: tuple[int, ...] = ()
    arguments: tuple[Any, ...] = ()


def _items(scope: str, host: AuditedHost | None) -> list[_Item]:
    """Return what a rule runs on, on one host or, without one, on all of them.

    Raises:
        Unreadable: it is not known which GPUs or adapters there are.
    """
    if host is None:
        return [_Item()]
    if scope == "host":
        return [_Item(host, arguments=(host,))]
    if scope == "rank":
        return [_Item(host, rank_place(rank), (rank.rank,), (host, rank)) for rank in host.ranks]
    devices = [device for kind in _DEVICES[scope] for device in host.hardware.of_kind(kind)]
    return [_Item(host, device_place(device), arguments=(host, device)) for device in devices]


_DEVICES = {"gpu": ("gpu",), "link": ("gpu", "nic")}


def _run(rule: Rule, job: AuditedJob) -> Iterator[list[AuditFinding] | str]:
    """Yield, for each item of the rule's scope, its findings, or why the rule does not apply to it."""
    if not job.hosts and rule.reads_nodes:
        yield "no node is audited: only a log or matrix was given"
        return
    for host in (None,) if rule.scope == "job" else job.hosts:
        try:
            items = _items(rule.scope, host)
        except Unreadable as error:
            yield [_completed(_not_read(host, error), rule, _Item(host))]
            continue
        for item in items:
            try:
                yield [_completed(finding, rule, item) for finding in _findings(rule, job, item)]
            except Skip as reason:
                yield str(reason)


def _findings(rule: Rule, job: AuditedJob, item: _Item) -> Iterator[AuditFinding]:
    try:
        yield from rule.check(job, *item.arguments)
    except Unreadable as error:
        yield _not_read(item.host, error)


def _not_read(host: AuditedHost | None, error: Unreadable) -> AuditFinding:
    return unknown(str(error) if host is None else host.explain(error))


def _completed(finding: AuditFinding, rule: Rule, item: _Item) -> AuditFinding:
    return replace(
        finding,
        rule=rule.id,
        hosts=finding.hosts or ((item.host.name,) if item.host else ()),
        place=finding.place or item.place,
        cost=finding.cost or rule.cost,
        ranks=finding.ranks or item.ranks,
    )


SCHEMA = "hpcpace-audit/1"
BINDING_RULES = ("A02", "A03", "A04", "A05", "S05")
"""Rules that the proposed masks should clear."""


@dataclass(frozen=True, kw_only=True)
class Binding:
    """The masks proposed for some hosts.

    Attributes:
        hosts: names of the hosts that the masks fit.
        num_tasks: ranks of each of these hosts.
        option: srun option to paste; empty if there are no masks.
        left: rules that still report ranks bound that way; empty if the masks clear them all.
        reason: why there are no masks, or why they do not follow the GPUs.
    """

    hosts: tuple[str, ...]
    num_tasks: int
    option: str
    left: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class PathMatrix:
    """Classes of the paths between GPUs and adapters of hosts that are alike.

    Attributes:
        gpus: PCI addresses.
        nics: ports by name.
        class_physical: classes in sysfs, one row per GPU.
        class_nccl: classes that NCCL uses, one row per GPU.
    """

    hosts: tuple[str, ...]
    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    class_physical: tuple[tuple[str, ...], ...]
    class_nccl: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The outcome of an audit.

    Attributes:
        hosts: names of all hosts.
        num_ranks: ranks of all hosts.
        num_rules: rules that were to run.
        findings: the most severe first.
        skipped: by rule id, why it did not apply.
        missing: one sentence for each host or rank that did not answer.
        problems: one sentence for each snapshot that could not be read.
    """

    hosts: tuple[str, ...]
    num_ranks: int
    num_rules: int
    findings: tuple[AuditFinding, ...]
    skipped: dict[str, str]
    bindings: tuple[Binding, ...]
    matrices: tuple[PathMatrix, ...]
    missing: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """4 if there is a finding F, else 1 for W, else 3 for U or if anything is missing, else 0."""
        severities = {finding.severity for finding in self.findings}
        if Severity.FAIL in severities:
            return EXIT_FAILED
        if Severity.WARNING in severities:
            return EXIT_WARNING
        if Severity.UNKNOWN in severities or self.missing or self.problems:
            return EXIT_CANNOT_TELL
        return EXIT_OK

    def to_json(self) -> dict[str, Any]:
        """Return plain values with findings grouped over hosts, as described in docs/audit-rules.md."""
        return {
            "schema": SCHEMA,
            "hpcpace_version": hpcpace.__version__,
            "exit_code": self.exit_code,
            "hosts": list(self.hosts),
            "num_ranks": self.num_ranks,
            "num_rules": self.num_rules,
            "missing": list(self.missing),
            "problems": list(self.problems),
            "findings": plain(grouped(self.findings)),
            "skipped": self.skipped,
            "bindings": plain(self.bindings),
            "matrices": plain(self.matrices),
        }


def audit(
    job: AuditedJob,
    *,
    ids: Sequence[str] | None = None,
    num_tasks: int | None = None,
    missing: Sequence[str] = (),
    problems: Sequence[str] = (),
) -> AuditResult:
    """Run rules over a job, and compute bindings and path classes.

    Args:
        job: the hosts.
        ids: rules to run; all by default.
        num_tasks: ranks per host to bind; by default as in the snapshots, or one per GPU if a host has a single rank.
        missing: hosts and ranks that did not answer.
        problems: snapshots that could not be read.

    Raises:
        UsageError: an id is unknown.
    """
    run: RuleRun = run_rules(job, ids)
    return AuditResult(
        hosts=job.names,
        num_ranks=job.num_ranks,
        num_rules=run.num_rules,
        findings=run.findings,
        skipped=run.skipped,
        bindings=_bindings(job, num_tasks),
        matrices=_matrices(job),
        missing=tuple(missing),
        problems=tuple(problems),
    )


def _bindings(job: AuditedJob, num_tasks: int | None) -> tuple[Binding, ...]:
    by_binding: dict[tuple[int, str, str], tuple[AuditedHost, list[str]]] = {}
    for host in job.hosts:
        count, planned = _num_tasks(host, num_tasks)
        if count < 2:
            continue
        key = (count, *_proposed(host, planned, is_requested=num_tasks is not None))
        by_binding.setdefault(key, (host, []))[1].append(host.name)
    return tuple(
        Binding(
            hosts=tuple(names),
            num_tasks=count,
            option=option,
            left=_left(job, host) if option and not reason and count == len(host.ranks) else (),
            reason=reason,
        )
        for (count, option, reason), (host, names) in sorted(by_binding.items(), key=lambda item: -len(item[1][1]))
    )


def _proposed(host: AuditedHost, planned: int | None, *, is_requested: bool) -> tuple[str, str]:
    """Return the option for a host, or an empty text, and the reason for what it lacks.

    Masks that do not follow the GPUs are proposed only if somebody has requested masks for a number of ranks.
    """
    try:
        follows_gpus, reason = True, ""
        try:
            gpu_nodes(host, planned)
        except Unreadable as error:
            follows_gpus, reason = not is_requested, host.explain(error)
        return bind_option(bind_masks(host, planned, near_gpus=follows_gpus)), reason
    except Unreadable as error:
        return "", host.explain(error)


def _num_tasks(host: AuditedHost, num_tasks: int | None) -> tuple[int, int | None]:
    """Return how many ranks to bind on a host, and the number to plan for, None if the snapshot has these ranks."""
    if num_tasks is not None and num_tasks != len(host.ranks):
        return num_tasks, num_tasks
    if len(host.ranks) > 1:
        return len(host.ranks), None
    count = len(host.snapshot.gpus or ())
    return count, count


def _left(job: AuditedJob, host: AuditedHost) -> tuple[str, ...]:
    """Return the rules that still report a host's ranks once they are bound as proposed."""
    bound = AuditedJob([with_masks(host.snapshot, bind_masks(host))], dataclasses.replace(job.settings, ignore=()))
    found = run_rules(bound, BINDING_RULES).findings
    return tuple(dict.fromkeys(finding.rule for finding in found if finding.severity != Severity.INFORMATION))


def _matrices(job: AuditedJob) -> tuple[PathMatrix, ...]:
    made: dict[PathMatrix, list[str]] = {}
    for host in job.hosts:
        matrix = _matrix(host)
        if matrix is not None:
            made.setdefault(matrix, []).append(host.name)
    return tuple(dataclasses.replace(matrix, hosts=tuple(names)) for matrix, names in made.items())


def _matrix(host: AuditedHost) -> PathMatrix | None:
    try:
        gpus = [device.address for device in host.hardware.of_kind("gpu")]
        ports = [port for port in host.fabric if port.pci in host.hardware.devices]
    except Unreadable:
        return None
    if not gpus or not ports:
        return None
    physical = tuple(tuple(host.hardware.class_of(gpu, port.pci) for port in ports) for gpu in gpus)
    return PathMatrix(
        hosts=(),
        gpus=tuple(gpus),
        nics=tuple(port.name for port in ports),
        class_physical=physical,
        class_nccl=tuple(
            tuple(
                class_of_nccl(name, has_gdr=host.has_gdr is not False, is_c2c=host.hardware.is_c2c(gpu)) for name in row
            )
            for gpu, row in zip(gpus, physical, strict=True)
        ),
    )


def exposition(result: AuditResult) -> str:
    """Return the number of findings of each rule, and the audit's exit code, in Prometheus' text format 0.0.4.

    Rules without findings are listed with 0, so that an alert can distinguish a clean node from one not audited.
    """
    counts = Counter((finding.host, finding.rule, finding.severity) for finding in result.findings)
    findings = Family(
        name="hpcpace_audit_findings",
        kind=MetricType.GAUGE,
        help="Findings by node, rule and severity (F fail, W warning, U unknown).",
    )
    for host in result.hosts:
        for rule in BY_ID:
            for severity in (Severity.FAIL, Severity.WARNING, Severity.UNKNOWN):
                findings.add(counts[host, rule, severity], {"node": host, "rule": rule, "severity": str(severity)})
    code = Family(
        name="hpcpace_audit_exit_code",
        kind=MetricType.GAUGE,
        help="Exit code of the audit (0 clean, 1 warning, 3 unknown or incomplete, 4 fail).",
    )
    code.add(result.exit_code, {})
    return text_of([findings, code])
