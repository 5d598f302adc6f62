"""All rules of the audit in the order in which they run, and running them over a job.

A rule names what it checks, from which facts, why, and the fix. It raises Unreadable if a fact that it needs is
missing: that becomes a finding of severity U, never a silent pass. It raises Skip if it does not apply.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from hpcpace.audit.findings import AuditFinding, Severity, Skip, unknown
from hpcpace.audit.job import AuditedHost, AuditedJob, device_place, rank_place
from hpcpace.audit.rules import affinity, devices, hosts, nccl, network
from hpcpace.audit.tree import Unreadable
from hpcpace.core.errors import UsageError


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
    check: Callable[..., Iterator[AuditFinding]]

    @property
    def reads_nodes(self) -> bool:
        """Whether it needs facts of nodes, and not only a log or a file."""
        return self.check.__module__ not in (nccl.__name__, nccl.__name__, devices.__name__)


_CHECKS: dict[str, Callable[..., Iterator[AuditFinding]]] = {
    "A01": affinity.a01_mpi_singletons,
    "H01": hosts.h01_differing,
    "A02": affinity.a02_far_from_gpu,
    "A03": affinity.a03_partly_near,
    "A04": affinity.a04_overlap,
    "A05": affinity.a05_too_few_cpus,
    "A06": affinity.a06_quota,
    "A07": affinity.a07_memory,
    "A08": devices.a08_shared_gpu,
    "A09": devices.a09_ipc,
    "A10": affinity.a10_openmp_binding,
    "N01": network.n01_far_nic,
    "N02": network.n02_shared_nic,
    "N03": network.n03_selections,
    "N04": network.n04_sockets,
    "N05": network.n05_ports,
    "N06": network.n06_mtu,
    "N07": network.n07_gid,
    "N08": network.n08_errors,
    "N09": network.n09_gpudirect,
    "P01": devices.p01_width,
    "P02": devices.p02_speed,
    "P03": devices.p03_unequal,
    "P04": devices.p04_replays,
    "P05": devices.p05_acs,
    "P06": devices.p06_hidden_numa,
    "P07": devices.p07_nvlink,
    "P08": devices.p08_state,
    "P09": devices.p09_topology,
    "S01": hosts.s01_governor,
    "S02": hosts.s02_numa_balancing,
    "S03": hosts.s03_huge_pages,
    "S04": hosts.s04_threads,
    "S05": affinity.s05_siblings,
    "S06": hosts.s06_limits,
    "S07": hosts.s07_load,
    "S08": hosts.s08_strays,
    "S09": hosts.s09_memory,
    "S10": hosts.s10_clock,
    "C01": hosts.c01_debug_variables,
    "C02": nccl.c02_transports,
    "C03": nccl.c03_network,
    "C04": nccl.c04_affinity,
    "C05": nccl.c05_gpudirect,
    "C06": nccl.c06_failures,
    "C07": nccl.c07_topology,
    "H02": hosts.h02_placement,
}
"""What each rule checks: yields its findings."""

_TEXTS = tomllib.loads(files("hpcpace.audit").joinpath("rules.toml").read_text(encoding="utf-8"))
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
