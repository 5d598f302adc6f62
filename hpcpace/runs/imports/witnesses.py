"""The witnesses of a hang together: what they show of the ranks, who holds up whom, and where they contradict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpcpace.core.errors import TraceError
from hpcpace.core.text import plural, rank_list, shortened
from hpcpace.hang.rules import find_hang
from hpcpace.hang.views import Call, Channel, Hang, HangKind, JobView, RankView
from hpcpace.runs.imports.dump_view import job_view
from hpcpace.runs.imports.flight_recorder import MAX_RANKS
from hpcpace.runs.imports.py_spy import StackDump, StackState, grouped, judged, stack_job, stack_state
from hpcpace.runs.imports.ras import notes_of, ras_job, unmapped, with_witness, world_communicator
from hpcpace.runs.imports.watchdog import LogJob, log_job, settled, told_of
from hpcpace.runs.imports.watchdog_ranks import LogFile, rank_in_name
from hpcpace.runs.imports.witness_files import Witnesses

LABELS = ("RAS", "Logs", "Stacks")
"""Of what witnesses add to a verdict, in the order in which it is shown."""
_MAX_STACKS = 1 << 14
# display: of contradictions
_MAX_TOLD = 4
_SNAPSHOT = "RAS is a snapshot: the job hangs if a second report shows the same counts"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What witnesses show together.

    Attributes:
        job: its ranks and groups.
        hang: who holds up whom; None where nobody is seen to wait.
        doubt: why nothing can be said where `hang` is None; empty where every operation has finished.
        told: what each kind of witness adds, as pairs of a label and a sentence.
        notes: what was guessed, left out or is odd, a sentence each.
        missing: ranks without any record.
    """

    job: JobView
    hang: Hang | None
    doubt: str
    told: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    missing: tuple[int, ...]


def evidence_of(found: Witnesses) -> Evidence:
    """Return what witnesses show of one job.

    Raises:
        TraceError: they are of several jobs, or of no rank is it known who it is.
    """
    notes: list[str] = list(found.problems)
    told: list[tuple[str, str]] = []
    logs = log_job(_with_size(found)) if found.logs else None
    num_ranks = found.dumps.world_size if found.dumps is not None else len(logs.job.ranks) if logs is not None else 0
    states = _states(found, num_ranks, notes)
    job, doubt = _first_view(found, logs, states)
    if logs is not None:
        notes += logs.notes
        told += [("Logs", line) for line in told_of(found.logs, logs)]
        if found.dumps is not None:
            job, against = _with_logs(job, logs)
            told += [("Logs", line) for line in against]
    for _, report in found.ras:
        if found.dumps is not None or logs is not None or states:
            job, lines = with_witness(job, report)
            told += [("RAS", line) for line in lines]
        else:
            told.append(("RAS", _SNAPSHOT))
        told += [("RAS", line) for line in (*notes_of(report.communicators), *unmapped(report))][:_MAX_TOLD]
    if states:
        told += [("Stacks", line) for line in grouped(states)]
        job = _with_stacks(job, states)
    hang = find_hang(job)
    if found.dumps is None and logs is not None:
        hang = settled(hang, logs)
        doubt = doubt or logs.doubt
    if found.dumps is None and logs is None and not found.ras:
        hang, doubt = judged(hang, states)
    if hang is None and not doubt and found.dumps is None:
        doubt = "nobody is seen to wait in an operation"
    told += [("Stacks", line) for line in _against(hang, states)]
    missing = tuple(rank for rank, view in job.ranks.items() if not view.is_recorded)
    return Evidence(
        job=job, hang=hang, doubt=doubt if hang is None else "", told=tuple(told), notes=tuple(notes), missing=missing
    )


def _with_size(found: Witnesses) -> Sequence[LogFile]:
    """Return the logs, the first of which knows how many ranks the job has by other logs and by RAS."""
    worlds = [world for _, report in found.ras if (world := world_communicator(report)) is not None]
    found.logs[0].min_ranks = found.num_ranks
    found.logs[0].world_size = max([found.logs[0].world_size, *(min(world.size, MAX_RANKS) for world in worlds)])
    return found.logs


def _first_view(found: Witnesses, logs: LogJob | None, states: Mapping[int, StackState]) -> tuple[JobView, str]:
    if found.dumps is not None:
        return job_view(found.dumps), ""
    if logs is not None:
        return logs.job, ""
    if found.ras:
        job, doubt = ras_job(found.ras[-1][1])
        if job is not None:
            return job, doubt
        if not states:
            return JobView(groups=(), ranks={}, now_ns=0, source="NCCL RAS"), doubt
    return stack_job(states), ""


def _states(found: Witnesses, num_ranks: int, notes: list[str]) -> dict[int, StackState]:
    """Return what the main thread of each rank does.

    Raises:
        TraceError: of no process is it known which rank it is, or two are the same rank.
    """
    states: dict[int, StackState] = {}
    nameless = 0
    ranks = _ranks_of(found.stacks, found, num_ranks, notes)
    for dump, rank in zip(found.stacks[:_MAX_STACKS], ranks, strict=False):
        state = stack_state(dump)
        if state is None:
            continue
        if rank is None or rank >= MAX_RANKS:
            nameless += 1
        elif rank in states and states[rank] != state:
            raise TraceError(
                f"{shortened(dump.path.name)} is a second, different stack of rank {rank}: name one file a rank"
            )
        else:
            states[rank] = state
    if nameless:
        notes.append(
            f"{plural(nameless, 'stack')} of py-spy were left out: nothing says their rank; name files rank_3.txt"
        )
    if not states and found.dumps is None and not found.logs and not found.ras:
        why = "of no stack of py-spy is it known which rank it is: name the files rank_0.txt, rank_1.txt"
        raise TraceError(why if nameless else "no stack of py-spy has a frame: its files are cut off, or no Python ran")
    return states


def _ranks_of(dumps: Sequence[StackDump], found: Witnesses, num_ranks: int, notes: list[str]) -> list[int | None]:
    """Return the rank of each process: by its file, by RAS, which knows pids, or by a number in the file's name."""
    of_pid: dict[int, set[int]] = {}
    for world in (world for _, report in found.ras if (world := world_communicator(report)) is not None):
        for one in (*world.ranks, *world.missing_ranks):
            of_pid.setdefault(one.pid, set()).add(one.rank)
    # Processes of different hosts may have the same number.
    pids = {pid: min(ranks) for pid, ranks in of_pid.items() if pid >= 0 and len(ranks) == 1}
    alone = {path for path in (dump.path for dump in dumps) if sum(other.path == path for other in dumps) == 1}
    ranks: list[int | None] = []
    by_name = 0
    for dump in dumps:
        rank = dump.rank if dump.rank is not None else pids.get(dump.pid)
        if rank is None and dump.path in alone:
            rank = rank_in_name(dump.path)
            by_name += rank is not None
        ranks.append(rank)
    if None in ranks and len(alone) == len(dumps):
        numbers = [_last_number(dump.path.name) for dump in dumps]
        known = {number for number in numbers if number is not None}
        if len(known) == len(numbers) and max(known) < max(num_ranks, 2 * len(numbers)):
            by_name, ranks = len(numbers), list(numbers)
    if by_name:
        notes.append(f"the ranks of {plural(by_name, 'stack')} are taken from the names of the files")
    return ranks


def _last_number(name: str) -> int | None:
    stem, _, suffix = name.rpartition(".")
    found = re.findall(r"\d{1,6}", name if suffix.isdecimal() else stem)
    return int(found[-1]) if found else None


def _with_logs(job: JobView, logs: LogJob) -> tuple[JobView, list[str]]:
    """Return a job by dumps with what logs say of ranks without one, and where the two contradict each other."""
    places = {group.name: place for place, group in enumerate(job.groups)}
    channels: dict[Channel, Channel] = {}
    for place, group in enumerate(logs.job.groups):
        if group.name in places:
            channels[Channel(place)] = Channel(places[group.name])
        elif group.name == "(not named)" and "default_pg" in places:
            channels[Channel(place)] = Channel(places["default_pg"])
    ranks = dict(job.ranks)
    against: list[str] = []
    for rank, said in logs.job.ranks.items():
        if not said.is_recorded or rank not in ranks:
            continue
        moved = _moved(said, channels)
        if not ranks[rank].is_recorded:
            ranks[rank] = replace(moved, is_complete=moved.is_complete and len(channels) == len(job.groups))
            continue
        against += _contradictions(rank, ranks[rank], moved, job)
    return replace(job, ranks=ranks), against[:_MAX_TOLD]


def _moved(view: RankView, channels: Mapping[Channel, Channel]) -> RankView:
    return replace(
        view,
        entered={channels[key]: number for key, number in view.entered.items() if key in channels},
        completed={channels[key]: number for key, number in view.completed.items() if key in channels},
        calls=tuple(replace(call, channel=channels[call.channel]) for call in view.calls if call.channel in channels),
    )


def _contradictions(rank: int, dumped: RankView, said: RankView, job: JobView) -> list[str]:
    by_place = {(call.channel, call.seq): call for call in dumped.calls}
    lines = []
    for call in said.calls:
        known: Call | None = by_place.get((call.channel, call.seq))
        group = job.groups[call.channel.group].name
        what = f"{call.op} {call.seq} of group {shortened(group)} ran out of time on rank {rank} by its log"
        if known is not None and known.op != call.op:
            lines.append(f"contradiction: {what}; its dump has {known.op} in this place")
        elif known is not None and not known.is_open:
            lines.append(f"contradiction: {what}, and has finished by its dump")
        elif known is None and dumped.entered.get(call.channel, 0) <= call.seq and dumped.is_complete:
            lines.append(f"contradiction: {what}, and was never called by its dump: are both of one job?")
    return lines


def _with_stacks(job: JobView, states: Mapping[int, StackState]) -> JobView:
    """Return a job whose ranks have stacks; a rank without another record that is surely in no collective has one."""
    ranks = dict(job.ranks)
    for rank, state in states.items():
        if rank not in ranks:
            continue
        view = ranks[rank]
        doing = view.doing if state.doing.value == "unknown" else state.doing
        is_known = view.is_recorded or state.is_sure
        is_complete = view.is_complete or (state.is_sure and not view.calls)
        ranks[rank] = replace(view, stack=state.frames, doing=doing, is_recorded=is_known, is_complete=is_complete)
    return replace(job, ranks=ranks)


def _against(hang: Hang | None, states: Mapping[int, StackState]) -> list[str]:
    """Return which stacks contradict a verdict: those it names as not having come, but that are in a collective."""
    if hang is None or hang.kind not in (HangKind.NEVER_CALLED, HangKind.OWN_WORK, HangKind.GONE):
        return []
    inside = [rank for rank in hang.culprits if rank in states and states[rank].op]
    if not inside:
        return []
    state = states[inside[0]]
    return [
        f"contradiction: the stack of {rank_list(inside)} is in {state.op}, at {state.where}: it may be another"
        " operation, or the stack is of another time"
    ]
