"""Findings in words: for each kind of evidence one line that names it, the figures behind it, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from hpcpace.core.hostlist import exclusion, node_name
from hpcpace.core.text import (
    alias_name,
    format_duration,
    listed,
    named_ranks,
    percent,
    place_name,
    plural,
    printable,
    rank_list,
)
from hpcpace.diagnosis.flow_words import flow_advice, flow_headline, flow_why
from hpcpace.diagnosis.modes.evidence import (
    ArrivalEvidence,
    BurstEvidence,
    CollectionEvidence,
    CoreCause,
    CoreEvidence,
    DataEvidence,
    EndEvidence,
    EventEvidence,
    FlowEvidence,
    HangEvidence,
    HostEvidence,
    ImbalanceEvidence,
    InputEvidence,
    InterruptionEvidence,
    JitterEvidence,
    LatenessEvidence,
    LatePattern,
    LocalityEvidence,
    SlowLinkEvidence,
    TransferEvidence,
)
from hpcpace.diagnosis.modes.finding import Culprit, DiagnosisFinding
from hpcpace.diagnosis.modes.run_end import EndKind, RunEnd
from hpcpace.diagnosis.sentences import HOST_TIMES, rank_end_line, run_end_line
from hpcpace.diagnosis.stage_words import (
    advice_of_events,
    advice_of_imbalance,
    advice_of_straggler,
    by_stage,
    interval_words,
    stage_sentences,
    subject_of_events,
)
from hpcpace.hang.verdict import describe

_MOST_NAMED = 4
_MOST_RANKS = 8
_LEAST_SHOWN = 0.0005
_FULL = 0.9  # of the line rate
_LOOKS_ALIKE = (
    "how long devices worked there is not known: no step shows these phases without waiting for the host. A "
    "synchronisation at their ends looks the same"
)
_BALANCE_DATA = (
    "give ranks microbatches of equal work: sort or pack sequences by length, or balance tokens across ranks"
)
_REDUCE_JITTER = "synchronise less often per step, keep cores free for the system, or align events to the same step"


@dataclass(frozen=True, kw_only=True)
class FindingWords:
    """A finding in words: one line, the figures behind it, what to do, and further figures, one sentence each."""

    headline: str
    why: str
    next: str
    more: tuple[str, ...] = ()


def words_of(finding: DiagnosisFinding, hosts: Mapping[int, str], *, is_most: bool = False) -> FindingWords:
    """Return a finding in words.

    Args:
        finding: what was found.
        hosts: host names by rank.
        is_most: whether its loss is an upper bound.
    """
    evidence = finding.evidence
    lost = f"{'at most ' if is_most else ''}{percent(finding.loss_share)} of the step time"
    match evidence:
        case EndEvidence():
            return _end(evidence.end, hosts)
        case HangEvidence():
            return _hang(evidence, hosts)
        case LatenessEvidence():
            return _lateness(evidence, finding, hosts, lost)
        case ArrivalEvidence():
            return _arrival(evidence, finding, hosts)
        case ImbalanceEvidence():
            return _imbalance(evidence, finding, hosts, lost)
        case EventEvidence():
            return _events(evidence, finding, hosts, lost)
        case CollectionEvidence() | InputEvidence():
            return _phase(evidence, finding, hosts, lost)
        case HostEvidence():
            return _host(evidence, finding)
        case InterruptionEvidence():
            return _interruption(evidence, hosts, lost)
        case FlowEvidence():
            return FindingWords(
                headline=flow_headline(evidence, _named(finding, hosts), lost),
                why=flow_why(evidence, _longer(finding.culprits[0])),
                next=flow_advice(evidence),
            )
        case SlowLinkEvidence() | BurstEvidence() | LocalityEvidence() | TransferEvidence():
            return _transfers(evidence, finding, hosts, lost)
        case JitterEvidence():
            return _jitter(evidence.share, lost)
        case DataEvidence():
            return _data(evidence, lost)
        case CoreEvidence():
            return _cores(evidence, hosts)
        case _:
            assert_never(evidence)


def _end(end: RunEnd, hosts: Mapping[int, str]) -> FindingWords:
    who = named_ranks(end.ranks[:_MOST_RANKS], hosts)
    advice = {
        EndKind.EXCEPTION: f"read the traceback of {who} in its log; errors of other ranks may follow from it",
        EndKind.EXIT: f"find what made {who} exit, in its log; errors of other ranks may follow from it",
        EndKind.HANG: f"see what {who} wrote into the folder hang of the attempt",
        EndKind.SIGNAL: f"find who sent the signal to {who}: a launcher, a memory limit, or a user",
        EndKind.SILENT: f"look for a crash in the log of {who}, and for the out-of-memory killer on its host (dmesg)",
        EndKind.FAILURE: f"find what kept {who} from it, or give the process group a longer timeout",
    }
    if not end.ranks:
        advice[EndKind.FAILURE] = "read the logs of all ranks: the traces do not show who left the operation"
    told = [rank_end_line(one, hosts) for one in end.ends[:_MOST_NAMED]]
    more = len(end.ends) - _MOST_NAMED
    return FindingWords(
        headline=run_end_line(end, hosts),
        why="; ".join([*told, *([f"{plural(more, 'more rank')} after that"] if more > 0 else [])]),
        next=advice[end.kind],
    )


def _hang(evidence: HangEvidence, hosts: Mapping[int, str]) -> FindingWords:
    words = describe(evidence.found.hang, evidence.found.job)
    late = evidence.late_ranks[:_MOST_RANKS]
    came = [f"{named_ranks(late, hosts)} entered it only when it had failed on the others"] if late else []
    first, *more = (*came, *words.why) or ("no rank is known to wait",)
    return FindingWords(headline=words.headline, why=first, next=words.advice, more=tuple(more))


def _lateness(
    evidence: LatenessEvidence, finding: DiagnosisFinding, hosts: Mapping[int, str], lost: str
) -> FindingWords:
    who = _named(finding, hosts)
    match evidence.pattern:
        case LatePattern.FIXED | LatePattern.TRANSIENT:
            return _straggler(evidence, finding, hosts, lost)
        case LatePattern.PERIODIC:
            return FindingWords(
                headline=_periodic_headline(evidence, who, lost),
                why="late steps recur at more regular intervals than chance allows",
                next=advice_of_events(evidence),
                more=stage_sentences(evidence.stages, [who]),
            )
        case LatePattern.ROTATING:
            return _jitter(evidence.share, lost)
        case _:
            assert_never(evidence.pattern)


def _straggler(
    evidence: LatenessEvidence, finding: DiagnosisFinding, hosts: Mapping[int, str], lost: str
) -> FindingWords:
    kind = "persistent" if evidence.pattern is LatePattern.FIXED else "transient"
    when = ""
    if evidence.first is not None and evidence.stop is not None:
        when = f", in steps {evidence.first} to {evidence.stop - 1} of those used (counted from 0)"
    excess, interval = _first_effect(finding)
    names = [place_name(culprit.kind, culprit.id) for culprit in finding.culprits]
    costs = f"{'cost' if finding.culprits[1:] else 'costs'} {lost}{by_stage(evidence.stages)}"
    return FindingWords(
        headline=f"{kind} straggler: {_named(finding, hosts)} {costs}",
        why=f"own work {percent(excess)} above that of its role {interval}{when}; the others wait for it",
        next=advice_of_straggler(evidence.stages, _exclude(finding.culprits, hosts)),
        more=stage_sentences(evidence.stages, names),
    )


def _arrival(evidence: ArrivalEvidence, finding: DiagnosisFinding, hosts: Mapping[int, str]) -> FindingWords:
    arrival, duration = format_duration(evidence.arrival_ns), format_duration(evidence.duration_ns)
    low, high = (percent(bound) for bound in finding.culprits[0].interval)
    costs = "cost" if finding.culprits[1:] else "costs"
    return FindingWords(
        headline=f"persistent straggler: {_named(finding, hosts)} {costs} at most {percent(finding.loss_share)} of the "
        "step time",
        why=f"enters collectives {arrival} after the others, and they last {duration} less for it; "
        f"at least {percent(evidence.effect)} slower than the others (95 %: {low} to {high})",
        next=advice_of_straggler((None,), _exclude(finding.culprits, hosts)),
        more=(f"found by its arrivals on the device alone: why it is late, and what else costs time, is {HOST_TIMES}",),
    )


def _host(evidence: HostEvidence, finding: DiagnosisFinding) -> FindingWords:
    at_most = "at most " if evidence.is_most else ""
    names = [name for name, _ in evidence.phases]
    where = listed([name for name in names if name != "other"] + ["outside of all phases"] * ("other" in names))
    shares = ", ".join(f"{name} {percent(share)}" for name, share in evidence.phases)
    advice = []
    if set(names) - {"other"}:
        advice.append(
            f"issue less work there ({where}): torch.compile, CUDA graphs, fused optimizers, larger batches; remove "
            "calls that wait for the device, such as .item() and .cpu()"
        )
    if "other" in names:
        advice.append("check what the script does between its phases: logging, metrics, .item(), saving")
    return FindingWords(
        headline=f"host-bound: devices wait for their hosts ({where}), which costs {at_most}"
        f"{percent(finding.loss_share)} of the step time",
        why=f"idle {at_most}{percent(evidence.share)} of the step, because nothing was issued: {shares}",
        next="; ".join(advice),
        more=(_LOOKS_ALIKE,) if evidence.is_most else (),
    )


def _imbalance(
    evidence: ImbalanceEvidence, finding: DiagnosisFinding, hosts: Mapping[int, str], lost: str
) -> FindingWords:
    excess, interval = _first_effect(finding)
    names = [place_name(culprit.kind, culprit.id) for culprit in finding.culprits]
    costs = f"costs {lost}{by_stage(evidence.stages)}"
    return FindingWords(
        headline=f"pipeline imbalance: {_named(finding, hosts)} has more work than the other stages and {costs}",
        why=f"own work {percent(excess)} above that of the other stages {interval}; the others wait for it",
        next=advice_of_imbalance(evidence.stages),
        more=stage_sentences(evidence.stages, names),
    )


def _events(evidence: EventEvidence, finding: DiagnosisFinding, hosts: Mapping[int, str], lost: str) -> FindingWords:
    who = _named(finding, hosts)
    if evidence.period_ns is None:
        return FindingWords(
            headline=f"runtime and control plane: {subject_of_events(evidence)} that recurs on {who} costs {lost}",
            why=f"{evidence.events} steps stand out, more often on one node than chance allows",
            next=advice_of_events(evidence),
            more=stage_sentences(evidence.stages, [who]),
        )
    return FindingWords(
        headline=_periodic_headline(evidence, who, lost),
        why=f"{evidence.events} steps stand out, at more regular intervals than chance allows",
        next=advice_of_events(evidence),
        more=stage_sentences(evidence.stages, [who or "the latest rank"]),
    )


def _periodic_headline(evidence: EventEvidence | LatenessEvidence, who: str, lost: str) -> str:
    where, what = f" on {who}" if who else "", subject_of_events(evidence)
    return f"runtime and control plane: {what} that recurs every {interval_words(evidence)}{where} costs {lost}"


def _interruption(evidence: InterruptionEvidence, hosts: Mapping[int, str], lost: str) -> FindingWords:
    who = named_ranks(evidence.ranks[:_MOST_RANKS], hosts)
    who += f" and {len(evidence.ranks) - _MOST_RANKS} more" if evidence.ranks[_MOST_RANKS:] else ""
    is_eval = evidence.variety == "evaluation"
    what = "evaluation" if is_eval else "checkpointing"
    often = f", every {evidence.period_steps} steps," if evidence.period_steps else ""
    return FindingWords(
        headline=f"runtime and control plane: {what} on {who} alone{often} costs {lost}",
        why=f"{plural(evidence.events, 'step')} with it, {format_duration(evidence.mean_ns)} each; the others wait",
        next="evaluate on all ranks, each on its share of the data, or less often"
        if is_eval
        else "save less often, asynchronously, or on all ranks, each its share (torch.distributed.checkpoint)",
    )


def _who_waits(evidence: InputEvidence, hosts: Mapping[int, str]) -> str:
    if not evidence.ranks:
        return ", on all ranks" if len(hosts) > 1 else ""
    more = f" and {len(evidence.ranks) - _MOST_RANKS} more" if evidence.ranks[_MOST_RANKS:] else ""
    return f", on {named_ranks(evidence.ranks[:_MOST_RANKS], hosts)}{more}"


def _waits(evidence: InputEvidence) -> str:
    if evidence.waiting_ns is None or evidence.others_ns is None:
        return ""
    waiting, others = format_duration(evidence.waiting_ns), format_duration(evidence.others_ns)
    return f"; {waiting} per step on {rank_list(evidence.ranks)}, {others} on the others"


def _phase(
    evidence: CollectionEvidence | InputEvidence, finding: DiagnosisFinding, hosts: Mapping[int, str], lost: str
) -> FindingWords:
    _, interval = _first_effect(finding)
    why = f"the phase takes {percent(evidence.share)} of the step {interval}"
    match evidence:
        case CollectionEvidence():
            return FindingWords(
                headline=f"runtime and control plane: garbage collection costs {lost}",
                why=why,
                next="call gc.freeze() after start-up, and collect at the same step on all ranks or not in the loop",
            )
        case InputEvidence():
            return FindingWords(
                headline=f"input-bound: waiting for data costs {lost}{_who_waits(evidence, hosts)}",
                why=why + _waits(evidence),
                next="use more loader workers, prefetching, or a faster or node-local file system",
            )
        case _:
            assert_never(evidence)


def _transfers(
    evidence: SlowLinkEvidence | BurstEvidence | LocalityEvidence | TransferEvidence,
    finding: DiagnosisFinding,
    hosts: Mapping[int, str],
    lost: str,
) -> FindingWords:
    match evidence:
        case SlowLinkEvidence():
            return FindingWords(
                headline=f"fabric contention: {_named(finding, hosts)} is slow and costs {lost}",
                why=f"transfers through it take {_longer(finding.culprits[0])}",
                next="check the link's rate, errors and cables, or keep the job off it",
            )
        case BurstEvidence():
            return FindingWords(
                headline=f"fabric contention: bursts of slow transfers cost {lost}",
                why=f"in {percent(evidence.bursts)} of the steps, transfers take over 1.5 times their lower quartile",
                next="place the job on fewer switches (#SBATCH --switches=1), or find the other jobs on its links",
            )
        case LocalityEvidence():
            return FindingWords(
                headline=f"locality: groups that cross switches are slower than those within one, which costs {lost}",
                why=f"transfers across switches take {evidence.factor:.2f} times as long as those within one",
                next="keep the groups that communicate most within a switch: order of ranks, #SBATCH --switches=1",
            )
        case TransferEvidence(are_links_compared=are_compared):
            links = "no link or burst explains it" if are_compared else "the job's groups cannot single out a slow link"
            parts = _parts_of_transfer(evidence) + _line_rate(evidence)
            kind = "steady" if parts else "exposed"
            whole = f", of {percent(evidence.transfer)} transfer in all" if parts else ""
            least = f" (threshold {percent(evidence.least)})" if evidence.least else ""
            return FindingWords(
                headline=f"communication-bound: {kind} transfers take {lost}{whole}; {links}",
                why=f"of own work and {kind} transfer, {percent(evidence.of_work)} is transfer{least}{parts}",
                next="use larger batches per rank, fewer or smaller messages, more overlap, or faster links",
            )
        case _:
            assert_never(evidence)


def _parts_of_transfer(evidence: TransferEvidence) -> str:
    """Return what all exposed transfer consists of; empty where all of it is steady."""
    held = evidence.transfer - evidence.share - evidence.bursts
    shares = ((evidence.share, "steady"), (evidence.bursts, "bursts"), (held, "senders held by their receivers"))
    parts = [f"{percent(share)} {name}" for share, name in shares if share >= _LEAST_SHOWN]
    return f"; transfer is {percent(evidence.transfer)} of the step: {listed(parts)}" if parts[1:] else ""


def _line_rate(evidence: TransferEvidence) -> str:
    """Return that links are full, not broken; empty where they are not, or that is not known."""
    if evidence.line_share is None or evidence.line_share < _FULL:
        return ""
    return f"; connections reach {percent(evidence.line_share)} of the line rate while busy: links are full, not broken"


def _jitter(share: float, lost: str) -> FindingWords:
    return FindingWords(
        headline=f"synchronisation amplification: every step waits for its slowest rank, which costs {lost}",
        why=f"no rank stands out beyond chance: {percent(share)} is lost to whichever rank is last in a step",
        next=_REDUCE_JITTER,
    )


def _data(evidence: DataEvidence, lost: str) -> FindingWords:
    return FindingWords(
        headline="work varies with the data (sequence length): steps wait for the longest microbatches, which costs "
        f"{lost}",
        why=f"a microbatch that takes long on one stage takes long on the next (correlation {evidence.shared:.2f}); "
        f"the work of those of a step differs by {percent(evidence.spread)} (standard deviation)",
        next=_BALANCE_DATA,
    )


def _cores(evidence: CoreEvidence, hosts: Mapping[int, str]) -> FindingWords:
    where = _shortened([printable(host) for host in evidence.hosts])
    cpus, ranks = plural(evidence.cpus, "CPU"), plural(evidence.of_host, "rank")
    crowd = f"{ranks} of this job on {cpus} of {printable(evidence.hosts[0])}"
    who = rank_list(evidence.ranks) if len(set(hosts.values())) == 1 else where
    holders = {
        CoreCause.RANKS: crowd,
        CoreCause.OTHERS: f"other processes on {where} take them",
        CoreCause.BOTH: f"{crowd}, and other processes there",
        CoreCause.QUOTA: f"the CPU quota of the cgroup on {where} is used up",
        CoreCause.UNKNOWN: f"on {where}",
    }
    fewer = "start fewer ranks per node or fewer threads per rank, or give each rank its own cores (srun -c N)"
    others = f"find what else runs on {where} (top, squeue -w), or ask for whole nodes (sbatch --exclusive)"
    advice = {
        CoreCause.RANKS: fewer,
        CoreCause.OTHERS: others,
        CoreCause.BOTH: f"{others}; and {fewer}",
        CoreCause.QUOTA: f"raise the quota (cpu.max of the cgroup; srun -c N), or {fewer}",
        CoreCause.UNKNOWN: f"{fewer}, or {others}",
    }
    verb = "waits" if len(evidence.ranks) == 1 and who != where else "wait"
    use = f"on average {evidence.ready:.1f} of their threads are ready to run, and {evidence.running:.1f} run"
    facts = [f"{use} on {cpus}" if evidence.cpus else use]
    if evidence.throttled >= _LEAST_SHOWN:
        facts.append(f"throttled for {percent(evidence.throttled)} of the time")
    if evidence.pressure >= _LEAST_SHOWN:
        facts.append(f"CPU pressure {percent(evidence.pressure)}")
    facts.append(f"{evidence.switches:.0f} involuntary context switches a second and rank")
    subject = who if who != where else f"ranks on {where}"
    return FindingWords(
        headline=f"ranks share cores: {holders[evidence.cause]}; {subject} {verb} for a core for up to "
        f"{percent(evidence.share)} of the time",
        why="; ".join(facts),
        next=advice[evidence.cause],
    )


def _first_effect(finding: DiagnosisFinding) -> tuple[float, str]:
    """Return the effect of the first culprit and its interval in words."""
    first = finding.culprits[0]
    low, high = first.interval
    return first.effect, f"(95 %: {percent(low)} to {percent(high)})"


def _longer(culprit: Culprit) -> str:
    low, high = culprit.interval
    if culprit.effect < 1:
        return f"{percent(culprit.effect)} longer than others (95 %: {percent(low)} to {percent(high)})"
    return f"{1 + culprit.effect:.1f} times as long as others (95 %: {1 + low:.1f} to {1 + high:.1f})"


def culprit_name(culprit: Culprit, hosts: Mapping[int, str]) -> str:
    """Return the name of a culprit, with everything that the data cannot separate from it."""
    name = _alias_name(f"{culprit.kind} {culprit.id}", hosts)
    others = [_alias_name(alias, hosts) for alias in culprit.aliases if alias != f"{culprit.kind} {culprit.id}"]
    if culprit.kind == "rank" and any(other.startswith("node ") for other in others):
        others = [other for other in others if not other.startswith("node ")]  # the rank is named with its host
        name += " (its only rank)"
    if culprit.kind == "link" and others:
        return _one_of([name, *others])
    return name + (f" (or {listed(others[:_MOST_NAMED])}: not distinguishable here)" if others else "")


def _one_of(names: Sequence[str]) -> str:
    if all(name.startswith("link ") for name in names):
        names = [name.removeprefix("link ") for name in names]
        return "one of the links " + _shortened(names)
    return "one of " + _shortened(names)


def _shortened(names: Sequence[str]) -> str:
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return listed([*names[:_MOST_NAMED], *more])


def _alias_name(alias: str, hosts: Mapping[int, str]) -> str:
    kind, _, name = alias.partition(" ")
    if kind == "rank":
        host = hosts.get(int(name), "") if name.isdigit() else ""
        return f"rank {name}" + (f" on {printable(host)}" if host else "")
    return alias_name(alias)


def _named(finding: DiagnosisFinding, hosts: Mapping[int, str]) -> str:
    culprits = finding.culprits
    are_nodes = len(culprits) > 1 and all(culprit.kind == "node" and len(culprit.aliases) < 2 for culprit in culprits)
    names = [printable(culprit.id) if are_nodes else culprit_name(culprit, hosts) for culprit in culprits]
    return ("nodes " if are_nodes else "") + _shortened(names)


def _exclude(culprits: Sequence[Culprit], hosts: Mapping[int, str]) -> str:
    """Return the line that keeps the culprits' nodes out of the next job; empty where that is all of them."""
    nodes = {culprit.id for culprit in culprits if culprit.kind == "node"}
    nodes |= {hosts.get(int(culprit.id), "") for culprit in culprits if culprit.kind == "rank"} - {""}
    return exclusion({node_name(host) for host in nodes}, [node_name(host) for host in hosts.values()])
