"""Links that hold transfers up: slow, full of others' traffic, flapping, lossy, with a small MTU, or across switches.

The job's own connections show them by their rates, which need no common clock; transfers of groups show them where the
clocks are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, format_duration, format_rate, listed, percent, plural
from hpcpace.diagnosis.finding import (
    MAX_NAMED,
    Case,
    DiagnosisFinding,
    Evidence,
    FindingWords,
    Panels,
    Said,
    confidence_of,
    culprit_name,
    longer_words,
)
from hpcpace.diagnosis.summary import Culprit, Mode
from hpcpace.metrics.flow_figures import LinkCause, LinkFault, Usual
from hpcpace.metrics.links import LinkCulprit, LinkFindings
from hpcpace.metrics.topology import unit_name
from hpcpace.metrics.what_if import links_change

_BITS, _MS_PER_S = 8, 1000  # format: units
_SHOWN_REPEATS = 10  # display: over those of others, from which repetitions are mentioned
_MIN_REPEATS = 0.001  # display: a smaller share counts as this much
_USUAL_TRANSFERS = (0.1, 0.9, 1.0)  # statistics: quantiles of transfers over other links; the middle one counts
_WELL_SHARE = 0.75  # display: of the usual rate, from which the other direction of a link is said to be well
_WORDS = {
    LinkCause.FOREIGN: (
        "foreign traffic on {who}{when} costs",
        "foreign traffic on {who}{when} costs",
        "find what else uses it (squeue -w HOST; files and checkpoints count, too), or keep the job off it",
    ),
    LinkCause.LATENCY: (
        "{who} adds {latency} to each round trip{when}, which costs",
        "{who} add up to {latency} to each round trip{when}, which costs",
        "look for a longer way or a device that holds packets (ping and tracepath from other hosts), or keep the job "
        "off it; fewer and larger messages suffer less",
    ),
    LinkCause.SLOW: (
        "{who} is slow{when} and costs",
        "{who} are slow{when} and cost",
        "check the link's rate, errors and cables, or keep the job off it",
    ),
    LinkCause.UPLINK: (
        "{who} is slow, oversubscribed or shared{when}, and costs",
        "{who} are slow, oversubscribed or shared{when}, and cost",
        "place the job on fewer switches (#SBATCH --switches=1), or check the rate of the uplinks and who else uses "
        "them",
    ),
    LinkCause.FLAPPING: (
        "{who} comes and goes, which costs",
        "{who} come and go, which costs",
        "check its cable, transceiver and switch port (dmesg, ip -s link), or keep the job off it",
    ),
    LinkCause.LOSSY: (
        "{who} loses packets{when}, which costs",
        "{who} lose packets{when}, which costs",
        "check its cable and transceiver for errors (ethtool -S), and the switch for dropped packets",
    ),
    LinkCause.REORDERING: (
        "on {who} packets overtake each other{when}, which costs",
        "on {who} packets overtake each other{when}, which costs",
        "look for a bond or for equal paths that deal out the packets of one connection (cat /proc/net/bonding/*, the "
        "hash of the switches)",
    ),
    LinkCause.SMALL_MTU: (
        "{who} has a smaller MTU than the others, which costs",
        "{who} have a smaller MTU than the others, which costs",
        "give all interfaces and switches on the way one MTU (ip link set dev eth0 mtu N)",
    ),
}
"""By cause, the headline of one link and of several, and what to do."""
_OVERTAKING = (
    "packets that overtake each other are sent again as well, but of none of these is it known that it arrived twice: "
    "nstat -az TcpExtTCPDSACKRecv counts such ones"
)
_USUAL = {
    Usual.OTHERS: "others {}",
    Usual.LINE: "at the line rate of other hosts it would be {}",
    Usual.REST: "{} in other steps",
}
_BROKEN = (
    LinkCause.LOSSY,
    LinkCause.REORDERING,
    LinkCause.SMALL_MTU,
)  # faults by themselves, however little they cost this job


@dataclass(frozen=True, kw_only=True)
class FlowEvidence(Evidence):
    """Connections that links hold up.

    Attributes:
        faults: of these links, all with the same cause, the worst one first.
        share: exposed transfer, or the time for which they were busy if that is less, as a share of the step time.
    """

    mode: ClassVar[str] = Mode.CONTENTION
    has_own_cause: ClassVar[bool] = True
    faults: tuple[LinkFault, ...]
    share: float

    @property
    def fault(self) -> LinkFault:
        """The worst of them."""
        return self.faults[0]

    @property
    def variety(self) -> str:
        """The fault of the link."""
        return str(self.fault.cause)

    @property
    def makes_steps_differ(self) -> bool:
        """Whether only some steps are slow for it."""
        return bool(self.fault.steps)

    def numbers(self) -> dict[str, float]:
        """Return the figures of the worst link by name.

        Returns:
            effect: by which share connections over it take longer for their bytes than others.
            share: exposed transfer, or the time for which links hold connections up, as a share of the step time.
            slow_bytes_per_s, usual_bytes_per_s: rate of the slowest of these connections while it was busy, and of
                others of its kind.
            foreign_bytes_per_s: foreign traffic on it; 0 where none is known.
            repeats, others_repeats: share of segments that these connections sent again, and that of the others.
            duplicates: part of the segments sent again that had arrived before; 0 also where not known.
            stalls: share of the time for which they stood still.
            segment_bytes, usual_segment_bytes: largest payload of their segments, and of those of others; 0 unknown.
            flows: how many connections it holds up.
            latency_ms: what it adds to each round trip; 0 where that is not the fault.
            first_step, last_step: of a fault in a part of the run.
        """
        fault = self.fault
        found = {
            "effect": fault.effect.value,
            "share": self.share,
            "slow_bytes_per_s": fault.slow_bytes_per_s,
            "usual_bytes_per_s": fault.usual_bytes_per_s,
            "foreign_bytes_per_s": fault.foreign_bytes_per_s,
            "repeats": fault.repeat_share,
            "others_repeats": fault.others_repeat_share,
            "duplicates": fault.duplicate_share,
            "stalls": fault.stall_share,
            "segment_bytes": float(fault.segment_bytes),
            "usual_segment_bytes": float(fault.usual_segment_bytes),
            "flows": float(len(fault.flows)),
            "latency_ms": fault.latency_s * _MS_PER_S,
        }
        if fault.steps:
            found |= {"first_step": float(fault.steps[0][0]), "last_step": float(fault.steps[-1][1])}
        return found

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        one, several, advice = _WORDS[self.fault.cause]
        has_doubt = self.fault.cause is LinkCause.FOREIGN and not self.fault.is_certain
        alike = len({(fault.direction, fault.steps) for fault in self.faults}) == 1
        who, is_one = said.who, len(self.faults) == 1
        if is_one and not self.fault.is_one_enough:
            who, is_one = who.replace("one of", "at least two of", 1), False
        subject = (one if is_one else several).format(
            who=who + (_way_words(self.fault) if alike else ""),
            when=(_step_words(self.fault) if alike else "") + (", which may also be slow," if has_doubt else ""),
            latency=format_duration(self.fault.latency_s * NS_PER_S),
        )
        culprits = [culprit_name(culprit, said.hosts) for culprit in said.finding.culprits]
        always = " in all steps" if any(fault.steps for fault in self.faults) else ""
        each = [
            f"{name}{_way_words(fault)}{_step_words(fault) or always}"
            for name, fault in zip(culprits, self.faults, strict=False)
        ]
        return FindingWords(
            headline=f"fabric contention: {subject} {said.lost}",
            why=self._why(longer_words(said.finding.culprits[0])),
            next=advice,
            more=(*self._more(), *([] if alike else [listed(each[:MAX_NAMED])])),
        )

    def _more(self) -> tuple[str, ...]:
        """Return what else may look like the fault, and what cannot be known."""
        fault = self.fault
        arrived = f"of these, {percent(fault.duplicate_share)} arrived twice: packets that overtake each other do"
        doubt = arrived if fault.duplicate_share else _OVERTAKING
        if fault.cause is LinkCause.LOSSY:
            return (doubt,)
        if fault.cause is LinkCause.SLOW and fault.repeat_share >= _SHOWN_REPEATS * max(
            fault.others_repeat_share, _MIN_REPEATS
        ):
            again, others = percent(fault.repeat_share), percent(fault.others_repeat_share)
            return (f"they send {again} again, others {others}: losses in a full queue, or on the link; {doubt}",)
        if fault.cause is not LinkCause.UPLINK:
            return ()
        missing = format_rate(round((fault.usual_bytes_per_s - fault.slow_bytes_per_s) * _BITS))
        if fault.usual is Usual.REST:
            return (
                f"others send about {missing} there in these steps, or the uplinks are slower: this job's hosts do not "
                "see what crosses uplinks",
            )
        return (f"this job's hosts do not see what others send over uplinks: it is between nothing and {missing}",)

    def _why(self, longer: str) -> str:
        """Return the figures behind the finding; `longer` says how much longer the connections take."""
        fault = self.fault
        through, s = f"{plural(len(fault.flows), 'connection')} through it", "s" if len(fault.flows) == 1 else ""
        slow, usual, foreign, other = (
            format_rate(round(bytes_per_s * _BITS))
            for bytes_per_s in (
                fault.slow_bytes_per_s,
                fault.usual_bytes_per_s,
                fault.foreign_bytes_per_s,
                fault.other_way_bytes_per_s,
            )
        )
        match fault.cause:
            case LinkCause.FLAPPING:
                return f"{through} stand{s} still for {percent(fault.stall_share)} of the time, while others go on"
            case LinkCause.LOSSY | LinkCause.REORDERING:
                again, others = percent(fault.repeat_share), percent(fault.others_repeat_share)
                late = f"; {percent(fault.duplicate_share)} of that had arrived, late"
                had_arrived = late if fault.cause is LinkCause.REORDERING else ""
                return f"{through} send{s} {again} again, others {others}{had_arrived}"
            case LinkCause.SMALL_MTU:
                sizes = f"{fault.segment_bytes} bytes, others {fault.usual_segment_bytes}"
                return f"{through} send{s} segments of {sizes}"
            case LinkCause.FOREIGN:
                return f"while busy, {through} get{s} {slow} beside {foreign} that is not this job's; alone, {usual}"
            case LinkCause.LATENCY:
                more = format_duration(fault.latency_s * NS_PER_S)
                least = f"even the least round trip is {more} longer than that of others"
                return f"while busy, {through} get{s} {slow}, others {usual}: {least}"
            case LinkCause.SLOW | LinkCause.UPLINK:
                than = _USUAL[fault.usual].format(usual)
                back = f"; the other way it gives {other} or more" if fault.other_way_bytes_per_s else _both_ways(fault)
                return f"while busy, {through} get{s} {slow}, {than}: their bytes take {longer}{back}"


def _both_ways(fault: LinkFault) -> str:
    """Return why the direction of a slow link is not known, where its connections send in both; empty otherwise."""
    senders, receivers = ({flow[end] for flow in fault.flows} for end in (0, 1))
    if fault.direction or len(fault.ids) > 1 or not senders & receivers:
        return ""
    return "; whether one way is slow or both is not known: acknowledgements of one pass the other"


def _way_words(fault: LinkFault) -> str:
    """Return the direction of a fault in brackets; empty where both may have it."""
    is_slow_too = 0 < fault.other_way_bytes_per_s < _WELL_SHARE * fault.usual_bytes_per_s
    only = "" if is_slow_too else " only"
    return f" (on the way {fault.direction}{only})" if fault.direction else ""


def _step_words(fault: LinkFault) -> str:
    """Return the steps of a fault; empty where all steps may have it."""
    shown = [f"{first} to {last}" for first, last in fault.steps[:MAX_NAMED]]
    more = [f"{len(fault.steps) - MAX_NAMED} more stretches"] if len(fault.steps) > MAX_NAMED else []
    return f" in steps {listed([*shown, *more])}" if shown else ""


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
            next=_WORDS[LinkCause.SLOW][-1],
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
        evidence=FlowEvidence(faults=tuple(fault for fault, _ in faults), share=_held_share(worst, panels)),
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
    if not case.are_transfers_known or explains_transfers(case):
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
    cost, interval = _cost(case, links.culprits, share)
    return [
        DiagnosisFinding(
            evidence=SlowLinkEvidence(effect=effect, share=share),
            loss_share=cost,
            loss_interval=interval,
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


def _cost(case: Case, culprits: Sequence[LinkCulprit], share: float) -> tuple[float, tuple[float, float] | None]:
    """Return what slow links cost as a share of the step time, with the interval.

    What rebuilt steps gain where transfers over them are as fast as others: in a pipeline a slow message delays all
    stages. Where steps are not rebuilt, the excess of exposed transfer.
    """
    effect = culprits[0].effect.value
    if case.steps is None or case.touches is None:
        return share * effect / (1 + effect), None
    passes, kind = case.touches({name for one in culprits for name in one.ids})
    changes = [links_change(case.steps.graph, passes, kind, 1 / (1 + effect), usual) for usual in _USUAL_TRANSFERS]
    costs = [case.cost(case.steps.gain(change)) for change in changes]
    case.mended.append(case.steps.replaced(changes[1]))
    return costs[1].value, (min(cost.low for cost in costs), max(cost.high for cost in costs))


def explains_transfers(case: Case) -> bool:
    """Return whether findings on links explain why transfers are slow, so that transfers are not judged again."""
    by_flows = [finding for finding in case.findings if isinstance(finding.evidence, FlowEvidence)]
    is_costly = any(finding.loss_share >= case.settings.contention_share for finding in by_flows)
    if is_costly and {finding.variety for finding in by_flows} - {LinkCause.FLAPPING, LinkCause.SMALL_MTU}:
        return True
    return any(isinstance(finding.evidence, (SlowLinkEvidence, LocalityEvidence)) for finding in case.findings)
