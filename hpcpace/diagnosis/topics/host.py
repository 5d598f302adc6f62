"""Devices that wait for their hosts to issue work: many small kernels, slow Python, or a synchronisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hpcpace.core.text import listed, percent
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.finding import (
    Case,
    DiagnosisFinding,
    Evidence,
    FindingWords,
    Said,
    mean_share_interval,
    phase_culprit,
)
from hpcpace.diagnosis.summary import Mode

_CONFIDENCE, _BOUNDED_CONFIDENCE = 0.95, 0.8  # statistics: as the score calibrates them; the latter of upper bounds


@dataclass(frozen=True, kw_only=True)
class HostThresholds(Thresholds, topic="host"):
    """Which phases are blamed for idle devices."""

    least_phase_share: float = number(
        0.2, "share", "Share of all idle time that a phase must hold to be named: less helps nobody to find the cause."
    )


@dataclass(frozen=True, kw_only=True)
class HostEvidence(Evidence):
    """Devices that wait for their hosts to issue work.

    Attributes:
        share: mean share of the step in which they are idle for that.
        phases: the phases that hold most of it, with their shares of the step, largest first.
        is_upper_bound: whether these are upper bounds of the idle time.
    """

    mode: ClassVar[str] = Mode.HOST
    needs_no_others: ClassVar[bool] = True
    share: float
    phases: tuple[tuple[str, float], ...] = ()
    is_upper_bound: bool = False

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        at_most = "at most " if self.is_upper_bound else ""
        names = [name for name, _ in self.phases]
        where = listed([name for name in names if name != "other"] + ["outside of all phases"] * ("other" in names))
        shares = ", ".join(f"{name} {percent(share)}" for name, share in self.phases)
        advice = []
        if set(names) - {"other"}:
            advice.append(
                f"issue less work there ({where}): torch.compile, CUDA graphs, fused optimizers, larger batches; "
                "remove calls that wait for the device, such as .item() and .cpu()"
            )
        if "other" in names:
            advice.append("check what the script does between its phases: logging, metrics, .item(), saving")
        looks_alike = (
            "how long devices worked there is not known: no step shows these phases without waiting for the host. A "
            "synchronisation at their ends looks the same"
        )
        return FindingWords(
            headline=f"host-bound: devices wait for their hosts ({where}), which costs {at_most}"
            f"{percent(said.finding.loss_share)} of the step time",
            why=f"idle {at_most}{percent(self.share)} of the step, because nothing was issued: {shares}",
            next="; ".join(advice),
            more=(looks_alike,) if self.is_upper_bound else (),
        )


def find(case: Case) -> list[DiagnosisFinding]:
    """Return whether devices wait for their hosts: mean share of the step in which they are idle for them.

    The loss is what the slowest rank of a role takes with this idle time, less without, and must exceed the threshold
    as well. Time in which devices wait for data is not in it: that is the phase `data`, and another mode.
    """
    panels = case.rest
    share = float(panels.host_ns.mean()) / panels.mean_time_ns
    gain_share = case.gain_share(panels.host_ns)
    if min(share, gain_share) < case.settings.host_share:
        return []
    least_ns = case.thresholds.of(HostThresholds).least_phase_share * sum(each.idle_ns for each in panels.idle)
    idle = [each for each in panels.idle if each.idle_ns >= least_ns]
    is_bound = sum(each.bounded_ns for each in idle) > sum(each.idle_ns for each in idle) / 2
    interval = mean_share_interval(panels, panels.host_ns)
    evidence = HostEvidence(
        share=share,
        phases=tuple((each.phase, each.idle_ns / panels.mean_time_ns) for each in idle),
        is_upper_bound=is_bound,
    )
    return [
        DiagnosisFinding(
            evidence=evidence,
            loss_share=gain_share,
            confidence=_BOUNDED_CONFIDENCE if is_bound else _CONFIDENCE,
            culprits=tuple(phase_culprit(each.phase, share, interval) for each in idle[:1]),
        )
    ]
