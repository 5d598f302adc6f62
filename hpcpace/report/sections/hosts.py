"""Hosts: findings of the audit on the culprits, hosts and their devices, and ranks that wait for cores."""

from __future__ import annotations

from hpcpace.core.text import format_duration, percent, plural
from hpcpace.diagnosis.summary import AuditFigures, HostCores, Summary
from hpcpace.report.document import PAGE, TERMINAL, Block, Command, Notes, Row, Section, Table

_MAX_HOSTS = (8, 64)
"""The most rows on a terminal and on a page."""
_SEVERITIES = {"F": "fail", "W": "warning", "U": "unknown", "I": "note"}


def audit_section(summary: Summary) -> Section:
    """Return the audit's findings on the culprits, and what it could not read; empty without snapshots."""
    audit = summary.audit
    if audit is None:
        return Section("Audit", ())
    nothing = "" if audit.matches else "no finding on the culprits"
    findings: list[Block | None] = []  # a terminal has each fix in one piece, since it is to be pasted
    for match in audit.matches:
        findings += [
            Notes([match.told], on=TERMINAL),
            Command("fix", match.fix, on=TERMINAL) if match.fix else None,
        ]
    rows = [(match.who, f"{match.severity} {match.rule}", match.told, match.fix) for match in audit.matches]
    head = ("who", "rule", "seen", "fix")
    return Section(
        "Audit",
        (
            *findings,
            Table(head, rows, "Findings of the audit on the culprits", text=range(4), command=3, on=PAGE),
            Notes([nothing]),
            Notes(audit.problems, is_folded=True),
        ),
        lead=_audit_lead(audit),
    )


def _audit_lead(audit: AuditFigures) -> str:
    """Return how much the audit has found, and where to see it."""
    parts = [plural(audit.counts[letter], word) for letter, word in _SEVERITIES.items() if audit.counts.get(letter)]
    size = f"{plural(audit.num_hosts, 'node')}, {plural(audit.num_ranks, 'rank')}"
    return f"{', '.join(parts) or 'nothing found'} ({size}; `hpcpace audit --from RUN` shows all)"


def devices_section(summary: Summary) -> Section:
    """Return what hosts and devices did in each phase; empty without device times."""
    rows = [
        (
            row.phase,
            format_duration(row.host_ns),
            format_duration(row.device_ns),
            format_duration(row.lead_ns),
            percent(row.dry_share),
        )
        for row in summary.devices
    ]
    dry = "ran dry: share of begins at which the device had no work left and waited for the host"
    return Section(
        "Host and device",
        (
            Table(("phase", "on the host", "on the device", "host ahead at its begin", "ran dry"), rows),
            Notes([dry] * bool(rows)),
        ),
        lead="per step",
    )


def cores_section(summary: Summary) -> Section:
    """Return the hosts on which ranks wait for cores; empty without any."""
    rows = [Row(core_cells(row), hosts=row.host) for row in summary.cores]
    head = ("host", "ranks", "CPUs", "threads running", "or ready", "waiting", "CPU pressure", "throttled")
    waiting = "waiting: share of the time for which a rank was ready to run and had no core, of the worst rank"
    return Section(
        "Cores",
        (
            Table(head, rows, limits=_MAX_HOSTS, which="worst"),
            Notes([waiting] * bool(rows)),
        ),
        lead="hosts on which ranks were ready to run and had no core for a part of the time",
    )


def core_cells(row: HostCores) -> tuple[str, ...]:
    """Return the cells of a host."""
    counts = (str(row.num_ranks), str(row.num_cpus) if row.num_cpus else "not known")
    shares = (percent(share) for share in (row.waiting, row.pressure, row.throttled))
    return (row.host, *counts, f"{row.running:.1f}", f"{row.ready:.1f}", *shares)
