"""What rules return: findings, or the reason why a rule does not apply."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

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
