"""Links that hold connections up, in words."""

from __future__ import annotations

from hpcpace.core.text import format_rate, percent, plural
from hpcpace.diagnosis.modes.evidence import FlowEvidence
from hpcpace.metrics.flow_figures import LinkCause

_BITS = 8
_WAYS = {"": "", "up": " (on the way up only)", "down": " (on the way down only)"}
_ADVICE = {
    LinkCause.FOREIGN: "find what else uses it (squeue -w HOST; files and checkpoints count, too), or keep the job off "
    "it",
    LinkCause.SLOW: "check the link's rate, errors and cables, or keep the job off it",
    LinkCause.UPLINK: "place the job on fewer switches (#SBATCH --switches=1), or check the rate of the uplinks and "
    "who else uses them",
    LinkCause.FLAPPING: "check its cable, transceiver and switch port (dmesg, ip -s link), or keep the job off it",
    LinkCause.LOSSY: "check its cable and transceiver for errors (ethtool -S), and the switch for dropped packets",
    LinkCause.SMALL_MTU: "give all interfaces and switches on the way one MTU (ip link set dev eth0 mtu N)",
}


def flow_headline(evidence: FlowEvidence, name: str, lost: str) -> str:
    """Return the line that names a finding; `name` is that of the link, `lost` what it costs."""
    where = name + _WAYS[evidence.direction]
    match evidence.cause:
        case LinkCause.FOREIGN:
            also = "" if evidence.is_certain else ", which may also be slow,"
            return f"fabric contention: foreign traffic on {where}{also} costs {lost}"
        case LinkCause.SLOW:
            return f"fabric contention: {where} is slow and costs {lost}"
        case LinkCause.UPLINK:
            return f"fabric contention: {where} is slow, oversubscribed or shared, and costs {lost}"
        case LinkCause.FLAPPING:
            return f"fabric contention: {where} comes and goes, which costs {lost}"
        case LinkCause.LOSSY:
            return f"fabric contention: {where} loses packets, which costs {lost}"
        case LinkCause.SMALL_MTU:
            return f"fabric contention: {where} has a smaller MTU than the others, which costs {lost}"


def flow_why(evidence: FlowEvidence, longer: str) -> str:
    """Return the figures behind a finding; `longer` says how much longer the connections take."""
    through = f"{plural(evidence.flows, 'connection')} through it"
    slow, usual = (_rate(value) for value in (evidence.slow_bytes_per_s, evidence.usual_bytes_per_s))
    match evidence.cause:
        case LinkCause.FLAPPING:
            verb = "stands" if evidence.flows == 1 else "stand"
            return f"{through} {verb} still for {percent(evidence.stalls)} of the time, while others go on"
        case LinkCause.LOSSY:
            verb = "sends" if evidence.flows == 1 else "send"
            return f"{through} {verb} {percent(evidence.repeats)} again, others {percent(evidence.others_repeats)}"
        case LinkCause.SMALL_MTU:
            verb = "sends" if evidence.flows == 1 else "send"
            return f"{through} {verb} segments of {evidence.segment_bytes} bytes, others {evidence.usual_segment_bytes}"
        case LinkCause.FOREIGN:
            verb = "gets" if evidence.flows == 1 else "get"
            foreign = _rate(evidence.foreign_bytes_per_s)
            return f"while busy, {through} {verb} {slow} beside {foreign} that is not this job's; alone, {usual}"
        case LinkCause.SLOW | LinkCause.UPLINK:
            verb = "gets" if evidence.flows == 1 else "get"
            return f"while busy, {through} {verb} {slow}, others {usual}: their bytes take {longer}"


def flow_advice(evidence: FlowEvidence) -> str:
    """Return what to do."""
    return _ADVICE[evidence.cause]


def _rate(bytes_per_s: float) -> str:
    return format_rate(round(bytes_per_s * _BITS))
