"""Links that hold transfers up: slow, full of others' traffic, flapping, lossy, with a small MTU, or across switches.

The job's own connections show them by their rates, which need no common clock; transfers of groups show them where the
clocks are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hpcpace.core.config import DiagnosisConfig
from hpcpace.core.text import format_rate, percent, plural
from hpcpace.core.thresholds import Thresholds, ThresholdValues, number
from hpcpace.diagnosis.figures.network import NetworkEvidence
from hpcpace.diagnosis.finding import (
    Case,
    DiagnosisFinding,
    Evidence,
    FindingWords,
    Panels,
    Said,
    confidence_of,
    longer_words,
)
from hpcpace.diagnosis.summary import Culprit, Mode
from hpcpace.metrics import Floats
from hpcpace.metrics.communication import Kind
from hpcpace.metrics.flow_figures import (
    FigureThresholds,
    FlowFigures,
    FlowFindings,
    LinkCause,
    LinkFault,
    flow_figures,
    foreign_on_links,
)
from hpcpace.metrics.flow_links import FlowLimits, FlowThresholds, locate_by_flows
from hpcpace.metrics.links import LinkFindings
from hpcpace.metrics.topology import Topology, unit_name

_BITS = 8  # format: bits of a byte
_MESSAGES = ("send", "recv")
_WAYS = {"": "", "up": " (on the way up only)", "down": " (on the way down only)"}
_WORDS = {
    LinkCause.FOREIGN: (
        "foreign traffic on {}",
        "find what else uses it (squeue -w HOST; files and checkpoints count, too), or keep the job off it",
    ),
    LinkCause.SLOW: ("{} is slow and", "check the link's rate, errors and cables, or keep the job off it"),
    LinkCause.UPLINK: (
        "{} is slow, oversubscribed or shared, and",
        "place the job on fewer switches (#SBATCH --switches=1), or check the rate of the uplinks and who else uses "
        "them",
    ),
    LinkCause.FLAPPING: (
        "{} comes and goes, which",
        "check its cable, transceiver and switch port (dmesg, ip -s link), or keep the job off it",
    ),
    LinkCause.LOSSY: (
        "{} loses packets, which",
        "check its cable and transceiver for errors (ethtool -S), and the switch for dropped packets",
    ),
    LinkCause.SMALL_MTU: (
        "{} has a smaller MTU than the others, which",
        "give all interfaces and switches on the way one MTU (ip link set dev eth0 mtu N)",
    ),
}
"""By cause, the subject of its headline, and what to do."""
_BROKEN = (LinkCause.LOSSY, LinkCause.SMALL_MTU)  # faults by themselves, however little they cost this job


@dataclass(frozen=True, kw_only=True)
class CoreWaitThresholds(Thresholds, topic="links"):
    """How much waiting for cores excuses slow connections."""

    shared_wait_part: float = number(1 / 3, "share")
    """Part of the waiting for cores that all nodes have in common which excuses a connection: it slows all alike."""


@dataclass(frozen=True, kw_only=True)
class FlowEvidence(Evidence):
    """Connections that a link holds up.

    Attributes:
        fault: of the worst of the links.
        direction: `up` or `down` where only that one is slow; else empty.
        share: exposed transfer, or the time for which they were busy if that is less, as a share of the step time.
    """

    mode: ClassVar[str] = Mode.CONTENTION
    has_own_cause: ClassVar[bool] = True
    fault: LinkFault
    direction: str
    share: float

    @property
    def variety(self) -> str:
        """The fault of the link."""
        return str(self.fault.cause)

    def numbers(self) -> dict[str, float]:
        """Return the figures by name."""
        fault = self.fault
        return {
            "effect": fault.effect.value,
            "share": self.share,
            "slow_bytes_per_s": fault.slow_bytes_per_s,
            "usual_bytes_per_s": fault.usual_bytes_per_s,
            "foreign_bytes_per_s": fault.foreign_bytes_per_s,
            "repeats": fault.repeat_share,
            "others_repeats": fault.others_repeat_share,
            "stalls": fault.stall_share,
            "segment_bytes": float(fault.segment_bytes),
            "usual_segment_bytes": float(fault.usual_segment_bytes),
            "flows": float(len(fault.flows)),
        }

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        subject, advice = _WORDS[self.fault.cause]
        is_certain = self.fault.is_certain or self.fault.cause is not LinkCause.FOREIGN
        link = subject.format(said.who + _WAYS[self.direction]) + ("" if is_certain else ", which may also be slow,")
        return FindingWords(
            headline=f"fabric contention: {link} costs {said.lost}",
            why=self._why(longer_words(said.finding.culprits[0])),
            next=advice,
        )

    def _why(self, longer: str) -> str:
        """Return the figures behind the finding; `longer` says how much longer the connections take."""
        fault = self.fault
        through, s = f"{plural(len(fault.flows), 'connection')} through it", "s" if len(fault.flows) == 1 else ""
        slow, usual, foreign = (
            format_rate(round(bytes_per_s * _BITS))
            for bytes_per_s in (fault.slow_bytes_per_s, fault.usual_bytes_per_s, fault.foreign_bytes_per_s)
        )
        match fault.cause:
            case LinkCause.FLAPPING:
                return f"{through} stand{s} still for {percent(fault.stall_share)} of the time, while others go on"
            case LinkCause.LOSSY:
                again, others = percent(fault.repeat_share), percent(fault.others_repeat_share)
                return f"{through} send{s} {again} again, others {others}"
            case LinkCause.SMALL_MTU:
                sizes = f"{fault.segment_bytes} bytes, others {fault.usual_segment_bytes}"
                return f"{through} send{s} segments of {sizes}"
            case LinkCause.FOREIGN:
                return f"while busy, {through} get{s} {slow} beside {foreign} that is not this job's; alone, {usual}"
            case LinkCause.SLOW | LinkCause.UPLINK:
                return f"while busy, {through} get{s} {slow}, others {usual}: their bytes take {longer}"


@dataclass(frozen=True, kw_only=True)
class SlowLinkEvidence(Evidence):
    """A slow link.

    Attributes:
        effect: by what share transfers through it take longer.
        share: exposed transfer as a share of the step time.
    """

    mode: ClassVar[str] = Mode.CONTENTION
    variety: ClassVar[str] = "slow link"
    effect: float
    share: float

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        return FindingWords(
            headline=f"fabric contention: {said.who} is slow and costs {said.lost}",
            why=f"transfers through it take {longer_words(said.finding.culprits[0])}",
            next=_WORDS[LinkCause.SLOW][1],
        )


@dataclass(frozen=True, kw_only=True)
class LocalityEvidence(Evidence):
    """Groups that cross switches and are slower than groups within one.

    Attributes:
        factor: transfer of the former relative to that of the latter.
        share: exposed transfer as a share of the step time.
    """

    mode: ClassVar[str] = Mode.LOCALITY
    factor: float
    share: float

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        return FindingWords(
            headline=f"locality: groups that cross switches are slower than those within one, which costs {said.lost}",
            why=f"transfers across switches take {self.factor:.2f} times as long as those within one",
            next="keep the groups that communicate most within a switch: order of ranks, #SBATCH --switches=1",
        )


def find(case: Case) -> list[DiagnosisFinding]:
    """Return a finding for each fault of links that the job's connections show.

    The loss is what the step would gain if these links were as fast as the others. Rates of connections need no common
    clock, so these findings hold where a clock is wrong.
    """
    panels = case.panels
    if panels.flows is None:
        return []
    by_cause: dict[LinkCause, list[tuple[LinkFault, float]]] = {}
    for fault in panels.flows.faults:
        loss_share = _loss_share(fault, panels)
        if loss_share >= case.settings.contention_share or fault.cause in _BROKEN:
            by_cause.setdefault(fault.cause, []).append((fault, loss_share))
    return [_finding(faults, panels, case.links) for faults in by_cause.values()]


def _finding(faults: list[tuple[LinkFault, float]], panels: Panels, links: LinkFindings | None) -> DiagnosisFinding:
    """Return one finding for links with the same cause; in a ring they hold up the same steps, so losses do not add."""
    faults = sorted(faults, key=lambda pair: -pair[1])
    worst, loss_share = faults[0]
    return DiagnosisFinding(
        evidence=FlowEvidence(
            fault=worst, direction=worst.direction if len(faults) == 1 else "", share=_held_share(worst, panels)
        ),
        loss_share=loss_share,
        confidence=confidence_of(worst.p_value),
        culprits=tuple(_culprit(fault, links) for fault, _ in faults),
    )


def _held_share(fault: LinkFault, panels: Panels) -> float:
    """Return for which share of the step connections through a link can have held it up: they were busy, and awaited.

    Where transfers are not known, the busy time is the most that it can be.
    """
    busy_share = fault.stall_share if fault.cause is LinkCause.FLAPPING else fault.busy_share
    return min(busy_share, panels.transfer_share) if panels.transfer_share > 0 else busy_share


def _loss_share(fault: LinkFault, panels: Panels) -> float:
    share = _held_share(fault, panels)
    if fault.cause is LinkCause.FLAPPING:
        return share
    return share * max(1 - fault.slow_bytes_per_s / fault.usual_bytes_per_s, 0.0)


def _culprit(fault: LinkFault, links: LinkFindings | None) -> Culprit:
    """Return the link; of several, those that comparing groups holds for slow as well, where there are any."""
    by_groups = {name for culprit in (links.culprits if links is not None else ()) for name in culprit.ids}
    both = tuple(name for name in fault.ids if name in by_groups)
    ids = both if both and len(fault.ids) > 1 else fault.ids
    return Culprit(
        kind="link",
        id=ids[0],
        aliases=tuple(unit_name(("link", name)) for name in ids),
        effect=fault.effect.value,
        interval=fault.effect.interval,
    )


def find_by_transfers(case: Case) -> list[DiagnosisFinding]:
    """Return that groups across switches are slower, or a slow link, unless connections explain the transfers."""
    panels, links, crossing, settings = case.panels, case.links, case.crossing, case.settings
    if case.is_clock_wrong or explains_transfers(case):
        return []
    share = float(panels.transfer_ns.mean(axis=0).mean()) / panels.mean_length_ns
    is_one_link = links is not None and any(len(culprit.ids) == 1 for culprit in links.culprits)
    is_sure = crossing is not None and crossing.p_value < settings.level
    if crossing is not None and not is_one_link and is_sure and crossing.factor.low > 1 + settings.link_share:
        factor = crossing.factor.value
        locality = LocalityEvidence(factor=factor, share=share)
        return [DiagnosisFinding(evidence=locality, loss_share=share * (1 - 1 / factor), confidence=0.95)]
    if links is None or not links.culprits:
        return []
    first, effect = links.culprits[0], links.culprits[0].effect.value
    return [
        DiagnosisFinding(
            evidence=SlowLinkEvidence(effect=effect, share=share),
            loss_share=share * effect / (1 + effect),
            confidence=confidence_of(first.p_value),
            culprits=tuple(
                Culprit(
                    kind="link",
                    id=one.ids[0],
                    aliases=one.aliases,
                    effect=one.effect.value,
                    interval=one.effect.interval,
                )
                for one in links.culprits
            ),
        )
    ]


def explains_transfers(case: Case) -> bool:
    """Return whether findings on links explain why transfers are slow, so that transfers are not judged again."""
    by_flows = [finding for finding in case.findings if isinstance(finding.evidence, FlowEvidence)]
    is_costly = any(finding.loss_share >= case.settings.contention_share for finding in by_flows)
    if is_costly and {finding.variety for finding in by_flows} - {LinkCause.FLAPPING, LinkCause.SMALL_MTU}:
        return True
    return any(isinstance(finding.evidence, (SlowLinkEvidence, LocalityEvidence)) for finding in case.findings)


def flow_findings(
    network: NetworkEvidence,
    settings: DiagnosisConfig,
    kinds: Sequence[Kind],
    panels: Panels,
    thresholds: ThresholdValues,
) -> FlowFindings | None:
    """Return the links that hold connections up; None where no rank recorded its connections.

    Where most bytes are messages, as in a pipeline, the acknowledgement of the end of each may be delayed, unless data
    is sent back: connections between different stages then differ also on equal links, small messages by the most.

    Args:
        network: what was recorded in the time of the used steps.
        settings: the thresholds.
        kinds: the operations of the run.
        panels: the ranks' use of their cores: a rank that waits for one sends and receives late.
        thresholds: how much of that counts, and when a connection is slow.
    """
    if network.flows is None:
        return None
    places, window = network.places, network.window
    figures = flow_figures(
        network.flows,
        places,
        begin_ns=window.begin_ns,
        end_ns=window.end_ns,
        message_bytes=_message_bytes(kinds),
        core_wait=_core_wait(places, panels, thresholds.of(CoreWaitThresholds).shared_wait_part),
        thresholds=thresholds.of(FigureThresholds),
    )
    return _located(figures, network, settings, thresholds.of(FlowThresholds))


def _core_wait(places: Topology, panels: Panels, shared_part: float) -> Floats:
    """Return for which share of the time connections of each node may be held up for want of a core, (num_nodes,).

    A rank waits for a core or is kept from it. Waiting that all nodes have in common slows all connections, so only a
    part of it counts.
    """
    found, use = np.zeros(places.num_nodes), panels.cores
    if use is not None:
        is_placed = np.isin(panels.rank, places.ranks)
        node = places.node[np.searchsorted(places.ranks, panels.rank[is_placed])]
        np.maximum.at(found, node, np.nan_to_num(np.fmax(use.waiting, use.throttled))[is_placed])
    usual = float(np.median(found)) if len(found) else 0.0
    return np.asarray(np.maximum(found - usual, 0.0) + shared_part * np.minimum(found, usual))


def _message_bytes(kinds: Sequence[Kind]) -> float:
    """Return the mean size of messages, infinite where most bytes are of collectives."""
    messages = [kind for kind in kinds if kind.op in _MESSAGES]
    total = sum(kind.size_bytes for kind in messages)
    if total <= sum(kind.size_bytes for kind in kinds) / 2:
        return np.inf
    return total / max(sum(kind.num_rows for kind in messages), 1)


def _located(
    figures: FlowFigures, network: NetworkEvidence, settings: DiagnosisConfig, thresholds: FlowThresholds
) -> FlowFindings:
    places, loads = network.places, network.loads
    foreign, line_rate_bps = np.full((len(places.links), 2), np.nan), np.zeros(places.num_nodes)
    if loads is not None:
        foreign = foreign_on_links(loads, places)
        line_rate_bps[loads.node[loads.carries_job]] = loads.line_rate_bps[loads.carries_job]
    return locate_by_flows(
        figures,
        places,
        foreign_bytes_per_s=foreign,
        line_rate_bps=line_rate_bps,
        limits=FlowLimits(
            rate_share=settings.flow_share,
            uplink_factor=settings.uplink_factor,
            foreign_share=settings.foreign_share,
            repeat_share=settings.repeat_share,
            level=settings.level,
        ),
        thresholds=thresholds,
    )
