"""Communication: bursts of slow transfers, or simply much of it, also next to the rates of a probe."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, listed, percent
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.finding import Case, CoreWaiting, DiagnosisFinding, Evidence, FindingWords, Panels, Said
from hpcpace.diagnosis.network_summary import ProbedFigures
from hpcpace.diagnosis.summary import Mode, Verdict
from hpcpace.diagnosis.topics.idle import HostEvidence
from hpcpace.diagnosis.topics.links import FlowEvidence, explains_transfers
from hpcpace.diagnosis.topics.straggler import LatenessEvidence
from hpcpace.metrics import Floats
from hpcpace.metrics.flow_figures import LinkCause

_LOWER_QUARTILE = 0.25  # statistics: transfers without bursts
_MIN_SHOWN_SHARE = 0.0005  # display: less is 0.0 %
_TINY = 1e-9  # statistics: no division by zero


@dataclass(frozen=True, kw_only=True)
class CommunicationThresholds(Thresholds, topic="communication"):
    """When transfers vary, and how much they count."""

    burst_factor: float = number(1.5, "times")
    """Transfers of a step over their lower quartile from which they are a burst: jitter stays below."""
    least_bursts: int = number(3, "events")
    """Bursts that make contention: one or two may be anything."""
    full_line_share: float = number(0.9, "share")
    """Share of the line rate from which a link is full, not broken: protocols take the rest."""
    steady_part: float = number(0.5, "share")
    """Part of steady transfer that counts when findings are ranked: it costs between nothing and its time, because no
    job is without it, and a slow rank that certainly costs as much comes first."""


@dataclass(frozen=True, kw_only=True)
class BurstEvidence(Evidence):
    """Bursts of slow transfers.

    Attributes:
        share: loss as a share of the step time.
        bursts: share of the steps that have one.
        limits: the thresholds of a burst.
    """

    mode: ClassVar[str] = Mode.CONTENTION
    variety: ClassVar[str] = "bursts"
    may_be_uneven_waiting: ClassVar[bool] = True
    share: float
    bursts: float
    limits: CommunicationThresholds = CommunicationThresholds()

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        factor = f"{self.limits.burst_factor:g}"
        return FindingWords(
            headline=f"fabric contention: bursts of slow transfers cost {said.lost}",
            why=f"in {percent(self.bursts)} of the steps, transfers take over {factor} times their lower quartile",
            next="place the job on fewer switches (#SBATCH --switches=1), or find the other jobs on its links",
        )


@dataclass(frozen=True, kw_only=True)
class TransferEvidence(Evidence):
    """Much communication without a slow link or bursts.

    Attributes:
        share: steady transfer, that is, exposed transfer without bursts and blocked senders, as a share of the step.
        of_work: steady transfer as a share of own work and steady transfer.
        are_links_compared: whether the groups or the connections of the job can single out a slow link.
        is_of_one_node: whether all ranks are on one node, so that there is no link between nodes.
        transfer: all exposed transfer as a share of the step; the rest beyond `share` and `bursts` is blocked senders.
        bursts: time of bursts as a share of the step.
        least: the threshold of `of_work`.
        line_share: the part of its interface's line rate that the connection that needs it longest reached while busy;
            None where that is not known.
        is_line_full: whether that is about all of it.
        on_line: share of the step that exposed transfer takes at least, because its bytes need that time at the line
            rate; 0 where the rate is not known.
    """

    mode: ClassVar[str] = Mode.COMMUNICATION
    share: float
    of_work: float
    are_links_compared: bool
    transfer: float = 0.0
    bursts: float = 0.0
    least: float = 0.0
    line_share: float | None = None
    is_line_full: bool = False
    on_line: float = 0.0
    is_of_one_node: bool = False

    @property
    def variety(self) -> str:
        """Whether links were compared."""
        return "even" if self.are_links_compared else "links not told"

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        one_slow = (
            "no link or burst explains it"
            if self.are_links_compared
            else "all ranks are on one node"
            if self.is_of_one_node
            else "the job's groups cannot single out a slow link"
        )
        more_or = "or more overlap" if self.is_of_one_node else "more overlap, or faster links"
        parts = self._parts()
        more: tuple[str, ...] = ()
        if self.is_line_full and self.line_share is not None:
            rate = percent(self.line_share)
            parts += f"; the busiest connection reaches {rate} of the line rate: links are full, not broken"
        elif self.line_share is not None:
            more = (
                f"the busiest connection reaches {percent(self.line_share)} of the line rate; why not more is not seen "
                "on this job's hosts: narrower links between switches, traffic of others there, or senders at their "
                "limit",
            )
        kind = "steady" if parts else "exposed"
        whole = f", of {percent(self.transfer)} transfer in all" if parts else ""
        least = f" (threshold {percent(self.least)})" if self.least else ""
        return FindingWords(
            headline=f"communication-bound: {kind} transfers take {said.lost}{whole}; {one_slow}",
            why=f"of own work and {kind} transfer, {percent(self.of_work)} is transfer{least}{parts}",
            next=f"use larger batches per rank, fewer or smaller messages, {more_or}",
            more=more,
        )

    def _parts(self) -> str:
        """Return the parts of all exposed transfer; empty where all of it is steady."""
        held = self.transfer - self.share - self.bursts
        shares = ((self.share, "steady"), (self.bursts, "bursts"), (held, "senders held by their receivers"))
        parts = [f"{percent(share)} {name}" for share, name in shares if share >= _MIN_SHOWN_SHARE]
        return f"; transfer is {percent(self.transfer)} of the step: {listed(parts)}" if parts[1:] else ""

    def is_waiting_for_cores(self, finding: DiagnosisFinding, waiting: CoreWaiting, panels: Panels) -> bool:
        """Return whether too little transfer is left without the waiting for cores.

        The kernel's and gloo's threads wait as well: in the worst case, all waiting is in transfers. But no core makes
        a line faster than its rate.
        """
        left = max(self.share - waiting.mean_share, self.on_line)
        work = self.share / self.of_work - self.share
        return left / max(left + work, _TINY) < self.least


def find(case: Case) -> list[DiagnosisFinding]:
    """Return bursts of slow transfers, and whether the job is bound by communication, unless links explain transfers.

    Contention is what transfers beyond one and a half of their lower quartile take. Without bursts and slow links, a
    large share of transfer is the work that there is; of a job with stragglers, what would be left of it without them.
    """
    panels, settings, limits = case.panels, case.settings, case.thresholds.of(CommunicationThresholds)
    if not case.are_transfers_known or explains_transfers(case):
        return []
    transfer = panels.transfer_ns.mean(axis=0)
    exposed = _beside_passing(case, transfer)
    usual = float(np.quantile(exposed, _LOWER_QUARTILE))
    burst_ns = np.where(exposed > limits.burst_factor * usual, exposed - usual, 0.0)
    burst_share, num_bursts = float(burst_ns.mean()) / panels.mean_length_ns, int((burst_ns > 0).sum())
    found: list[DiagnosisFinding] = []
    is_flapping = any(
        isinstance(each.evidence, FlowEvidence) and each.variety == LinkCause.FLAPPING for each in case.findings
    )
    are_many = burst_share >= settings.contention_share and num_bursts >= limits.least_bursts
    # An operation that is issued behind one that waits for a late host waits as well.
    are_of_hosts = any(
        isinstance(each.evidence, HostEvidence) and each.loss_share >= burst_share for each in case.findings
    )
    # One node has no fabric: what varies there is its own load.
    if are_many and len(np.unique(panels.node)) > 1 and not is_flapping and not are_of_hosts:
        bursts = BurstEvidence(share=burst_share, bursts=num_bursts / len(transfer), limits=limits)
        found.append(DiagnosisFinding(evidence=bursts, loss_share=burst_share, confidence=0.95))
    moved = float(transfer.mean()) - float(burst_ns.mean())
    if case.late is not None and case.steps is not None:
        # Whoever waits for a straggler sees a transfer that would be hidden without it.
        moved = min(moved, case.steps.transfer_ns(case.late))
    of_work = moved / max(moved + float(panels.work_ns.mean()) + panels.explained_idle_ns, 1.0)
    if of_work >= settings.communication_share:
        share = moved / panels.mean_length_ns
        flows, links = panels.flows, case.links
        line_share = flows.line_share if flows is not None else None
        is_line_full = line_share is not None and line_share >= limits.full_line_share
        are_compared = (links is not None and links.is_identifiable) or (flows is not None and flows.is_compared)
        transfers = TransferEvidence(
            share=share,
            of_work=of_work,
            are_links_compared=are_compared,
            line_share=line_share,
            is_line_full=is_line_full,
            on_line=min(_exposed_on_line(panels), share),
            transfer=panels.transfer_share,
            bursts=burst_share,
            least=settings.communication_share,
            is_of_one_node=len(np.unique(panels.node)) == 1,
        )
        found.append(
            DiagnosisFinding(evidence=transfers, loss_share=share, confidence=0.95, counted_part=limits.steady_part)
        )
    return found


def _beside_passing(case: Case, transfer_ns: Floats) -> Floats:
    """Return the exposed transfer of each step, as ranks that are late in some steps see it, (num_steps,).

    Whoever waits for them sees transfers in these steps that are hidden in others.
    """
    passing = [
        each.evidence.ranks
        for each in case.findings
        if isinstance(each.evidence, LatenessEvidence) and each.evidence.makes_steps_differ
    ]
    if not passing:
        return transfer_ns
    late = np.isin(case.panels.rank, np.concatenate(passing))
    return np.minimum(transfer_ns, case.panels.transfer_ns[late].mean(axis=0)) if late.any() else transfer_ns


def _exposed_on_line(panels: Panels) -> float:
    """Return the share of the time that bytes need at the line rate, less what any rank can have hidden behind work."""
    if panels.flows is None or panels.flows.line_s is None:
        return 0.0
    hidden = float(panels.hidden_ns.mean(axis=1).max()) / panels.mean_length_ns
    return max(panels.flows.line_s * NS_PER_S / float(panels.times_ns.sum()) - hidden, 0.0)


def with_probe(verdict: Verdict, probed: ProbedFigures | None, least: float) -> Verdict:
    """Return a verdict with its transfers compared with those of a probe.

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
    rate = "the link's own rate" if is_own else "less than the link gives"
    sentence = f"transfers achieve {percent(probed.achieved)} of the probed rate: {rate} (threshold {percent(least)})"
    if verdict.mode == Mode.COMMUNICATION:
        advice = "look for other traffic on the links, then probe again: hosts that are slower now have changed"
        steps = verdict.next if is_own else (advice, *verdict.next)
        return replace(verdict, why=(*verdict.why, sentence), next=steps)
    return verdict if is_own else replace(verdict, also=(*verdict.also, sentence))
