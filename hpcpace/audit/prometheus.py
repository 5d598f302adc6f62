"""The audit as Prometheus metrics, for node_exporter's textfile collector."""

from __future__ import annotations

from collections import Counter

from hpcpace.audit.findings import Severity
from hpcpace.audit.result import AuditResult
from hpcpace.audit.rulebook import BY_ID
from hpcpace.quoting import printable


def exposition(result: AuditResult) -> str:
    """Return the number of findings of each rule, and the audit's exit code, in Prometheus' text format 0.0.4.

    Rules without findings are listed with 0, so that an alert can distinguish a clean node from one not audited.
    """
    counts = Counter((finding.host, finding.rule, finding.severity) for finding in result.findings)
    lines = [
        "# HELP hpcpace_audit_findings Findings by host, rule and severity (F fail, W warning, U unknown).",
        "# TYPE hpcpace_audit_findings gauge",
    ]
    severities = (Severity.FAIL, Severity.WARNING, Severity.UNKNOWN)
    for host in result.hosts:
        for rule in BY_ID:
            for severity in severities:
                labels = f'host="{_escaped(host)}",rule="{rule}",severity="{severity}"'
                lines.append(f"hpcpace_audit_findings{{{labels}}} {counts[host, rule, severity]}")
    lines += [
        "# HELP hpcpace_audit_exit_code Exit code of the audit (0 clean, 1 warning, 3 unknown or incomplete, 4 fail).",
        "# TYPE hpcpace_audit_exit_code gauge",
        f"hpcpace_audit_exit_code {result.exit_code}",
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')
