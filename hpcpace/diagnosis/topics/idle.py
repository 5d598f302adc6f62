"""Time without work: ranks that wait for their data, and devices that wait for their hosts to issue some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hpcpace.core.text import format_duration, listed, percent, rank_list
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.finding import (
    Case,
    DiagnosisFinding,
    Evidence,
    FindingWords,
    Said,
    first_ranks,
    mean_share_interval,
    phase_culprit,
    rank_culprit,
)
from hpcpace.diagnosis.summary import Mode
from hpcpace.metrics import Bools


@dataclass(frozen=True, kw_only=True)
class InputThresholds(Thresholds, topic="input"):
    """When waiting for data is worth a word, and which ranks are named."""

    notable_share: float = number(0.05, "share")
    """Share of the step that waiting for data must take to be mentioned if nothing is wrong."""
    part_of_all: float = number(0.5, "share")
    """Part of the threshold of all ranks that one rank must wait to be named: others wait less."""
    part_of_longest: float = number(0.25, "share")
    """Part of the longest wait of a rank that another one must wait to be named with it."""


@dataclass(frozen=True, kw_only=True)
class InputEvidence(Evidence):
    """Waiting for data.

    Attributes:
        share: its mean share of the step time.
        ranks: the ranks that wait; empty where that is all of them.
        waiting_ns, others_ns: mean time per step of those that wait and of the others; None where all wait.
    """

    mode: ClassVar[str] = Mode.INPUT
    needs_no_others: ClassVar[bool] = True
    share: float
    ranks: tuple[int, ...] = ()
    waiting_ns: float | None = None
    others_ns: float | None = None

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        why = f"the phase takes {percent(self.share)} of the step {said.interval}"
        if self.waiting_ns is not None and self.others_ns is not None:
            waiting, others = format_duration(self.waiting_ns), format_duration(self.others_ns)
            why += f"; {waiting} per step on {rank_list(self.ranks)}, {others} on the others"
        return FindingWords(
            headline=f"input-bound: waiting for data costs {said.lost}{self._where(said.hosts)}",
            why=why,
            next="use more loader workers, prefetching, or a faster or node-local file system",
        )

    def _where(self, hosts: Mapping[int, str]) -> str:
        if not self.ranks:
            return ", on all ranks" if len(hosts) > 1 else ""
        return f", on {first_ranks(self.ranks, hosts)}"


def find_input(case: Case) -> list[DiagnosisFinding]:
    """Return whether the job waits for its data: mean share of the phase `data` in the step.

    The loss is what the slowest rank of a role takes with this phase, less without: all wait for the rank whose data
    arrive last.
    """
    panels, limits, least = case.rest, case.thresholds.of(InputThresholds), case.settings.input_share
    share = float(panels.data_ns.mean()) / panels.mean_time_ns
    if share < least:
        return []
    of_rank = panels.data_ns.mean(axis=1) / panels.mean_time_ns
    waits: Bools = of_rank >= max(limits.part_of_all * least, limits.part_of_longest * float(of_rank.max()))
    interval = mean_share_interval(panels, panels.data_ns)
    evidence = InputEvidence(share=share)
    culprits = [phase_culprit("data", share, interval)]
    if not waits.all():
        for row in np.flatnonzero(waits).tolist():
            spent_ns = panels.data_ns[row : row + 1]
            effect, interval = float(spent_ns.mean()) / panels.mean_time_ns, mean_share_interval(panels, spent_ns)
            culprits.append(rank_culprit(int(panels.rank[row]), effect, interval, panels))
        evidence = InputEvidence(
            share=share,
            ranks=tuple(panels.rank[waits].tolist()),
            waiting_ns=float(panels.data_ns[waits].mean()),
            others_ns=float(panels.data_ns[~waits].mean()),
        )
    loss_share = max(case.gain_share(panels.data_ns), share)
    return [DiagnosisFinding(evidence=evidence, loss_share=loss_share, confidence=0.97, culprits=tuple(culprits))]


_CONFIDENCE, _BOUNDED_CONFIDENCE = 0.95, 0.8  # statistics: as the score calibrates them; the latter of upper bounds


@dataclass(frozen=True, kw_only=True)
class HostThresholds(Thresholds, topic="host"):
    """Which phases are blamed for idle devices."""

    least_phase_share: float = number(0.2, "share")
    """Share of all idle time that a phase must hold to be named: less helps nobody to find the cause."""
    bounded_part: float = number(0.5, "share")
    """Part of an upper bound on idle time that counts when findings are ranked: a sure cost comes first."""


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


def find_host(case: Case) -> list[DiagnosisFinding]:
    """Return whether devices wait for their hosts: mean share of the step in which they are idle for them.

    The loss is what the slowest rank of a role takes with this idle time, less without, and must exceed the threshold
    as well. Time in which devices wait for data is not in it: that is the phase `data`, and another mode. Where idle
    time is only bounded, ranks may wait for each other's hosts as well, so the bound has all exposed wait.
    """
    panels = case.rest
    share = float(panels.host_ns.mean()) / panels.mean_time_ns
    gain_share = case.gain_share(panels.host_ns)
    if min(share, gain_share) < case.settings.host_share:
        return []
    least_ns = case.thresholds.of(HostThresholds).least_phase_share * sum(each.idle_ns for each in panels.idle)
    idle = [each for each in panels.idle if each.idle_ns >= least_ns]
    is_bound = sum(each.bounded_ns for each in idle) > sum(each.idle_ns for each in idle) / 2
    if is_bound:
        gain_share = min(gain_share + float(panels.wait_ns.mean()) / panels.mean_time_ns, 1.0)
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
            counted_part=case.thresholds.of(HostThresholds).bounded_part if is_bound else 1.0,
            culprits=tuple(phase_culprit(each.phase, share, interval) for each in idle[:1]),
        )
    ]
