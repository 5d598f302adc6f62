"""What the comparison of measured jitter with its null model means, on a terminal and on the page alike."""

from __future__ import annotations

from hpcpace.diagnosis.summary import Jitter

_MEANINGS = {
    "above": "the measured A is above it: events avoid each other, as in a rotation",
    "below": "the measured A is below it: ranks share the cause",
    "within": "the measured A is within its interval",
}


def comparison_reading(jitter: Jitter) -> str:
    """Return what it means that the measured amplification is above, below or within that of independent units."""
    return _MEANINGS.get(jitter.comparison, jitter.comparison)
