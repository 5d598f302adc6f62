"""The verdict in words: what is wrong, two numbers and a name for it, and what to do; or that it cannot be told.

The figures come from `hpcpace.diagnosis.diagnose`; here they only become sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpcpace.diagnosis.diagnose import Culprit, Diagnosis, Finding, Mode, Panels
from hpcpace.diagnosis.summary import AuditFigures, Causes, Verdict
from hpcpace.hostlist import exclusion, node_name
from hpcpace.metrics.lateness.hotspots import Hotspot
from hpcpace.quoting import printable
from hpcpace.units import format_duration
from hpcpace.wording import alias_name, listed, named_ranks, percent, place_name, plural, rank_list

_MOST_NAMED = 4
_LONGEST_LIST = 30


def verdict_of(diagnosis: Diagnosis, *, hosts: Mapping[int, str], remarks: Sequence[str] = ()) -> Verdict:
    """Return a diagnosis in words.

    Args:
        diagnosis: what was found.
        hosts: host names by rank.
        remarks: sentences that belong to the verdict whatever it is, such as on a pipeline's bubble.
    """
    if not diagnosis.findings:
        return _nothing(diagnosis, remarks)
    first, *others = diagnosis.findings
    is_most = bool(diagnosis.absent)
    return Verdict(
        mode=str(first.mode),
        variety=first.variety,
        culprits=tuple(culprit for finding in diagnosis.findings for culprit in finding.culprits),
        confidence=first.confidence,
        loss_share=first.loss_share,
        headline="; ".join([_headline(first, hosts, is_most=is_most), *_absent(diagnosis)]),
        why=tuple(_why(first)),
        next=(*_next(first, hosts), *_bring(diagnosis)),
        also=(*(_headline(other, hosts, is_most=is_most) for other in others), *remarks),
        findings=diagnosis.findings,
    )


def _absent(diagnosis: Diagnosis) -> list[str]:
    """Return what belongs into every headline while traces are missing."""
    if not diagnosis.absent:
        return []
    num_ranks = diagnosis.num_present + len(diagnosis.absent)
    has = "has" if len(diagnosis.absent) == 1 else "have"
    return [f"{_ranks_of(diagnosis)} of {num_ranks} {has} no trace that can be used"]


def _ranks_of(diagnosis: Diagnosis) -> str:
    text = rank_list(diagnosis.absent)
    if len(text) <= _LONGEST_LIST:
        return text
    return f"{len(diagnosis.absent)} ranks ({rank_list(diagnosis.absent[:_MOST_NAMED])}, ...)"


def _bring(diagnosis: Diagnosis) -> list[str]:
    """Return what to do about missing traces."""
    if not diagnosis.absent:
        return []
    traces = "trace" if len(diagnosis.absent) == 1 else "traces"
    return [f"find the {traces} of {_ranks_of(diagnosis)}: the list of what is missing, below, says why"]


def main_verdict(verdict: Verdict) -> Verdict:
    """Return a verdict with the culprits of its main mode alone, as a page shows them under its headline."""
    return replace(verdict, culprits=verdict.findings[0].culprits if verdict.findings else ())


_LARGE_BUBBLE, _NOTABLE_DATA = 0.15, 0.05
_MOST_RANKS = 8
_MOST_REMARKS = 2
_MORE_STEPS = "use more steps of the run (--steps, --include-warmup), or record more"


def near_misses(diagnosis: Diagnosis, panels: Panels, hotspots: Sequence[Hotspot]) -> tuple[str, ...]:
    """Return what stands out and stays below its threshold, where nothing is above one."""
    if diagnosis.findings or diagnosis.cannot_tell:
        return ()
    found = []
    if hotspots:
        first = hotspots[0]
        share = first.effect_ns / max(float(panels.work_ns.mean()), 1.0)
        found.append(f"{place_name(first.kind, first.id)} has {percent(share)} more own work than its like")
    if (data := float(panels.data_ns.mean()) / panels.mean_time_ns) >= _NOTABLE_DATA:
        found.append(f"waiting for data takes {percent(data)}")
    return (f"below the thresholds: {'; '.join(found)}",) if found else ()


def remarks_of(causes: Causes | None, hosts: Mapping[int, str]) -> tuple[str, ...]:
    """Return what belongs to every verdict: a pipeline's bubble, and arrivals that the clock is suspected of."""
    remarks = []
    bubble = causes.bubble if causes is not None else None
    if bubble is not None and bubble.share >= max(_LARGE_BUBBLE, bubble.ideal_share or 0.0):
        ideal = f" (the schedule alone costs {percent(bubble.ideal_share)})" if bubble.ideal_share else ""
        remarks.append(f"pipeline bubble {percent(bubble.share)} of the step{ideal}: more microbatches make it smaller")
    if causes is not None and causes.suspected_ranks:
        who = named_ranks(causes.suspected_ranks[:_MOST_RANKS], hosts)
        more = f" and {len(causes.suspected_ranks) - _MOST_RANKS} more" if causes.suspected_ranks[_MOST_RANKS:] else ""
        remarks.append(
            f"the clock of {who}{more} is suspected: arrivals contradict durations; nobody is blamed for them"
        )
    return tuple(remarks)


def audit_remarks(audit: AuditFigures | None) -> tuple[str, ...]:
    """Return the first findings that tell the blamed from the others, for the verdict; their fixes stand below."""
    matches = audit.matches if audit is not None else ()
    return tuple(match.told for match in matches if not match.is_common)[:_MOST_REMARKS]


def _nothing(diagnosis: Diagnosis, remarks: Sequence[str]) -> Verdict:
    smallest = diagnosis.smallest_effect
    if diagnosis.cannot_tell:
        return Verdict(
            mode=str(Mode.CANNOT_TELL),
            variety="",
            culprits=(),
            confidence=0.0,
            loss_share=0.0,
            headline=f"cannot tell: {'; '.join([*_absent(diagnosis), diagnosis.cannot_tell])}",
            why=tuple(_certain(diagnosis)),
            next=tuple(_bring(diagnosis))
            or ("see the clock error below" if "clock" in diagnosis.cannot_tell else _MORE_STEPS,),
            also=tuple(remarks),
            findings=(),
        )
    seen = f"a rank {percent(smallest)} slower than its role would have been seen" if smallest is not None else ""
    return Verdict(
        mode=str(Mode.HEALTHY),
        variety="",
        culprits=(),
        confidence=0.95,
        loss_share=0.0,
        headline="healthy: no straggler, contention, imbalance or amplified jitter above the thresholds",
        why=(
            seen or "no two ranks do the same work, so slow ranks and slow stages were compared with other stages only",
        ),
        next=("nothing: to go faster, change the job, not the cluster",),
        also=tuple(remarks),
        findings=(),
    )


def _certain(diagnosis: Diagnosis) -> list[str]:
    """Return what holds whatever the missing ranks did."""
    if not diagnosis.absent:
        return []
    said = ["others may have waited for a missing rank, so waits and transfers prove nothing here"]
    if diagnosis.smallest_effect is not None:
        said.append(
            f"certain: of the {diagnosis.num_present} ranks with a trace none is {percent(diagnosis.smallest_effect)} "
            "slower than its role; that would have been seen"
        )
    return said


def culprit_name(culprit: Culprit, hosts: Mapping[int, str]) -> str:
    """Return a culprit as one reads it, with all that cannot be told from it."""
    name = _alias_name(f"{culprit.kind} {culprit.id}", hosts)
    others = [_alias_name(alias, hosts) for alias in culprit.aliases if alias != f"{culprit.kind} {culprit.id}"]
    if culprit.kind == "rank" and any(other.startswith("node ") for other in others):
        others = [other for other in others if not other.startswith("node ")]  # the rank is named with its host
        name += " (its only rank)"
    if culprit.kind == "link" and others:
        return "one of " + listed([name, *others][:_MOST_NAMED]) + (", ..." if len(others) >= _MOST_NAMED else "")
    return name + (f" (or {listed(others[:_MOST_NAMED])}: the same here)" if others else "")


def _alias_name(alias: str, hosts: Mapping[int, str]) -> str:
    kind, _, name = alias.partition(" ")
    if kind == "rank":
        host = hosts.get(int(name), "") if name.isdigit() else ""
        return f"rank {name}" + (f" on {printable(host)}" if host else "")
    return alias_name(alias)


def _named(finding: Finding, hosts: Mapping[int, str]) -> str:
    culprits = finding.culprits
    are_nodes = len(culprits) > 1 and all(culprit.kind == "node" and len(culprit.aliases) < 2 for culprit in culprits)
    names = [printable(culprit.id) if are_nodes else culprit_name(culprit, hosts) for culprit in culprits]
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ("nodes " if are_nodes else "") + listed([*names[:_MOST_NAMED], *more])


def _headline(finding: Finding, hosts: Mapping[int, str], *, is_most: bool = False) -> str:
    lost = f"{'at most ' if is_most else ''}{percent(finding.loss_share)} of the step time"
    who = _named(finding, hosts)
    match finding.mode:
        case Mode.HANG:
            where = f"{finding.variety} in step {finding.numbers['step']:.0f}"
            who = named_ranks([int(culprit.id) for culprit in finding.culprits][:_MOST_RANKS], hosts)
            if finding.numbers.get("absent", 1.0) and not finding.culprits:
                return f"hang: {where} never completed, and all ranks with a trace had entered it"
            if finding.numbers.get("absent", 1.0):
                return f"hang: {where} never completed, because {who} never entered it"
            silent = f", and {who} gave no sign of life there" if finding.culprits else ""
            return f"hang: {where} never completed, though all of its ranks entered it{silent}"
        case Mode.STRAGGLER:
            variety = "persistent" if finding.variety == "fixed" else finding.variety
            return f"{variety} straggler: {who} {'cost' if finding.culprits[1:] else 'costs'} {lost}"
        case Mode.IMBALANCE:
            return f"pipeline imbalance: {who} has more work than the other stages and costs {lost}"
        case Mode.INPUT:
            return f"input-bound: ranks wait for their data for {lost}"
        case Mode.RUNTIME if finding.variety == "periodic":
            every = format_duration(finding.numbers["period_ns"])
            where = f" on {who}" if who else ""
            return f"runtime and control plane: something that comes back every {every}{where} costs {lost}"
        case Mode.RUNTIME if finding.variety == "recurring":
            return f"runtime and control plane: something that comes back on {who} costs {lost}"
        case Mode.RUNTIME:
            return f"runtime and control plane: {finding.variety} costs {lost}"
        case Mode.CONTENTION if finding.culprits:
            return f"fabric contention: {who} is slow and costs {lost}"
        case Mode.CONTENTION:
            return f"fabric contention: bursts in which transfers take much longer than usual cost {lost}"
        case Mode.LOCALITY:
            return f"locality: groups that cross switches are slower than those inside; it costs {lost}"
        case Mode.COMMUNICATION:
            told = (
                "no link or burst explains it"
                if finding.variety == "even"
                else "no groups differ that could tell a slow link"
            )
            return f"communication-bound: exposed transfers take {lost}; {told}"
        case _:
            return f"synchronisation amplification: steps wait for the slowest of all ranks, which costs {lost}"


def _why(finding: Finding) -> list[str]:
    numbers = finding.numbers
    first = finding.culprits[0] if finding.culprits else None
    interval = f"(95 %: {percent(first.interval[0])} to {percent(first.interval[1])})" if first else ""
    match finding.mode:
        case Mode.HANG:
            inside = plural(int(numbers["inside"]), "rank")
            return [f"{inside} waited inside for {format_duration(numbers['age_ns'])} until the recording ended"]
        case Mode.STRAGGLER | Mode.IMBALANCE if first:
            others = "its role" if finding.mode is Mode.STRAGGLER else "the other stages"
            when = ""
            if "first" in numbers:
                when = f", in steps {numbers['first']:.0f} to {numbers['stop'] - 1:.0f} of those used (from 0)"
            return [f"own work {percent(first.effect)} above that of {others} {interval}{when}; the others wait for it"]
        case Mode.CONTENTION if first:
            return [f"transfers that pass it take {_longer(first.effect)} than those that do not {interval}"]
        case Mode.CONTENTION:
            return [
                f"{percent(numbers['bursts'])} of the steps have transfers of more than 1.5 times their lower quartile"
            ]
        case Mode.RUNTIME if finding.variety == "recurring":
            return [f"{numbers['events']:.0f} steps stand out, on one node more often than chance allows"]
        case Mode.RUNTIME if finding.variety == "periodic":
            events = f"{numbers['events']:.0f} steps stand out" if "events" in numbers else "late steps"
            return [f"{events}, and their distances repeat more than chance allows"]
        case Mode.INPUT | Mode.RUNTIME:
            return [f"the phase takes {percent(numbers['share'])} of the step {interval}"]
        case Mode.LOCALITY:
            return [f"transfers across switches take {numbers['factor']:.2f} times as long as those inside of one"]
        case Mode.COMMUNICATION:
            of_work = percent(numbers["of_work"])
            return [f"{of_work} of the time without waits is transfer after the last rank has arrived"]
        case _:
            lost = percent(numbers["share"])
            return [f"no rank stands out beyond chance: {lost} is lost to whoever happens to be last"]


def _longer(effect: float) -> str:
    return f"{percent(effect)} longer" if effect < 1 else f"{1 + effect:.1f} times as long"


def _next(finding: Finding, hosts: Mapping[int, str]) -> list[str]:
    match finding.mode:
        case Mode.HANG:
            whose = "the named ranks'" if finding.culprits else "all ranks'"
            return [f"look at {whose} logs and stacks (py-spy dump), and at their hosts"]
        case Mode.STRAGGLER:
            advice = "look at clocks, throttling, pinning and other processes there"
            line = _exclude(finding.culprits, hosts)
            return [f"{advice}, or leave it out: {line}" if line else advice]
        case Mode.IMBALANCE:
            return ["move layers from that stage to the others, or look at its host where the partition is even"]
        case Mode.INPUT:
            return ["more loader workers, prefetching, or data on a faster or node-local file system"]
        case Mode.RUNTIME if finding.variety == "periodic":
            return ["look for what runs at that distance: cron, health checks, monitoring, checkpoints, logging"]
        case Mode.RUNTIME if finding.variety == "recurring":
            return ["look at what else runs there: daemons, health checks, other jobs, throttling"]
        case Mode.RUNTIME:
            return ["gc.freeze() after the start and collections at the same step on all ranks, or none in the loop"]
        case Mode.CONTENTION if finding.culprits:
            return ["look at the link's rate, errors and cables, or keep the job off it"]
        case Mode.CONTENTION:
            return ["place the job on fewer switches (#SBATCH --switches=1), or find the other jobs on its links"]
        case Mode.LOCALITY:
            return ["keep groups that communicate most inside a switch: order of ranks, #SBATCH --switches=1"]
        case Mode.COMMUNICATION:
            return ["larger batches per rank, fewer or smaller messages, overlap, or faster links"]
        case _:
            return ["fewer synchronisations per step, cores kept free for the system, or events on the same step"]


def _exclude(culprits: Sequence[Culprit], hosts: Mapping[int, str]) -> str:
    """Return the line that keeps the culprits' nodes out of the next job; empty where that is all of them."""
    nodes = {culprit.id for culprit in culprits if culprit.kind == "node"}
    nodes |= {hosts.get(int(culprit.id), "") for culprit in culprits if culprit.kind == "rank"} - {""}
    return exclusion({node_name(host) for host in nodes}, [node_name(host) for host in hosts.values()])
