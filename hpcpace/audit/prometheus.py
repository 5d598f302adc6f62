"""The audit as Prometheus metrics, for node_exporter's textfile collector."""

from __future__ import annotations

from collections import Counter

from hpcpace.audit.findings import Severity
from hpcpace.audit.result import AuditResult
from hpcpace.audit.rulebook import BY_ID
from hpcpace.exposition import Family, Kind
from hpcpace.exposition import exposition as text_of


def exposition(result: AuditResult) -> str:
    """Return the number of findings of each rule, and the audit's exit code, in Prometheus' text format 0.0.4.

    Rules without findings are listed with 0, so that an alert can distinguish a clean node from one not audited.
    """
    counts = Counter((finding.host, finding.rule, finding.severity) for finding in result.findings)
    findings = Family(
        name="hpcpace_audit_findings",
        kind=Kind.GAUGE,
        help="Findings by node, rule and severity (F fail, W warning, U unknown).",
    )
    for host in result.hosts:
        for rule in BY_ID:
            for severity in (Severity.FAIL, Severity.WARNING, Severity.UNKNOWN):
                findings.add(counts[host, rule, severity], {"node": host, "rule": rule, "severity": str(severity)})
    code = Family(
        name="hpcpace_audit_exit_code",
        kind=Kind.GAUGE,
        help="Exit code of the audit (0 clean, 1 warning, 3 unknown or incomplete, 4 fail).",
    )
    code.add(result.exit_code, {})
    return text_of([findings, code])
