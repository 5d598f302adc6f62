"""What the rules say: findings, and reasons why a rule had nothing to look at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is; the order is the order of printing."""

    FAIL = "F"
    WARNING = "W"
    UNKNOWN = "U"
    INFORMATION = "I"


class Certainty(StrEnum):
    """How a finding is known."""

    MEASURED = "measured"
    """Counted or timed while the audit ran."""
    READ = "read"
    """Read from the kernel, the driver or the environment."""
    INFERRED = "inferred"
    """Concluded from what was read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditFinding:
    """One thing that a rule says of one host.

    Attributes:
        rule: id of the rule, like `A02`.
        host: name; empty for what concerns the job as a whole.
        place: where on the host: `local rank 3`, `GPU 0000:17:00.0`, `mlx5_0 port 1`; empty for the host.
        seen: what was read there, the same text for the same fault on every host.
        cost: what that costs.
        fix: a line to paste, or to hand to an administrator.
        ranks: ranks of the job that it concerns.
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
    """Return the finding of a fact that could not be read."""
    return AuditFinding(
        rule=rule,
        severity=Severity.UNKNOWN,
        host=host,
        place=place,
        seen=f"cannot tell {reason}",
        cost="what this rule looks for may be there or not",
        fix="",
        certainty=Certainty.READ,
        ranks=ranks,
    )


class Skip(Exception):
    """A rule has nothing to look at on this host or job; the message is the reason."""
