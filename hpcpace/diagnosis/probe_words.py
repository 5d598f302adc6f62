"""What a probe adds to the verdict: whether much communication is the link's own rate, or less than the link gives."""

from __future__ import annotations

from dataclasses import replace

from hpcpace.core.text import percent
from hpcpace.diagnosis.modes.mode import Mode
from hpcpace.diagnosis.network_summary import ProbedFigures
from hpcpace.diagnosis.summary import Verdict

_LINK_OWN = "the link's own rate"
_LESS = "less than the link gives"
_ADVICE = "look for other traffic on the links, then probe again: hosts that are slower now have changed"


def with_probe(verdict: Verdict, probed: ProbedFigures | None, least: float) -> Verdict:
    """Return a verdict with what the probe says of its transfers.

    Where the job is communication-bound, its sentences are split by it; elsewhere it is a remark, where transfers reach
    less than the probe.

    Args:
        verdict: what was found.
        probed: the transfers next to a probe; None without one.
        least: share of the probed rate that counts as the link's own.
    """
    if probed is None or probed.achieved is None:
        return verdict
    is_own = probed.achieved >= least
    sentence = (
        f"transfers achieve {percent(probed.achieved)} of the probed rate: {_LINK_OWN if is_own else _LESS} "
        f"(threshold {percent(least)})"
    )
    if verdict.mode == Mode.COMMUNICATION:
        steps = verdict.next if is_own else (_ADVICE, *verdict.next)
        return replace(verdict, why=(*verdict.why, sentence), next=steps)
    return verdict if is_own else replace(verdict, also=(*verdict.also, sentence))
