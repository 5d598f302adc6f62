"""The witnesses of a hang, each file taken for what its content shows, and together: who holds up whom."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum
from pathlib import Path

from hpcpace.core.errors import TraceError
from hpcpace.core.files import read_file
from hpcpace.core.log_text import encoding_of, plain_text
from hpcpace.core.records import dataclass
from hpcpace.core.text import first_few, listed, plural, printable, rank_list, shortened
from hpcpace.hang.rules import find_hang
from hpcpace.hang.views import Call, Channel, Hang, HangKind, JobView, RankView
from hpcpace.runs.imports.dump_view import job_view
from hpcpace.runs.imports.dumps import BESIDE, Dumps, files_in, read_dumps
from hpcpace.runs.imports.flight_recorder import MAX_RANKS
from hpcpace.runs.imports.input_files import InputFile, json_bytes
from hpcpace.runs.imports.py_spy import (
    MAX_BYTES,
    STACKS,
    StackDump,
    StackState,
    grouped,
    is_py_spy,
    judged,
    read_stacks,
    stack_job,
    stack_state,
)
from hpcpace.runs.imports.ras import (
    RasReport,
    is_ras_text,
    notes_of,
    ras_job,
    read_ras,
    unmapped,
    with_witness,
    world_communicator,
)
from hpcpace.runs.imports.watchdog import LogJob, log_job, read_log, settled, told_of
from hpcpace.runs.imports.watchdog_ranks import LogFile, rank_in_name

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
    states = _states(found, notes)
    logs = log_job(_with_size(found, states)) if found.logs else None
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
        told += [("Stacks", line) for line in (*grouped(states), *_without_stack(job, states))]
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


def _with_size(found: Witnesses, states: Mapping[int, StackState]) -> Sequence[LogFile]:
    """Return the logs, the first of which knows how many ranks the job has by other logs, by RAS and by stacks."""
    worlds = [world for _, report in found.ras if (world := world_communicator(report)) is not None]
    found.logs[0].min_ranks = max([found.num_ranks, *(rank + 1 for rank in states)])
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


def _states(found: Witnesses, notes: list[str]) -> dict[int, StackState]:
    """Return what the main thread of each rank does.

    Raises:
        TraceError: of no process is it known which rank it is, or two are the same rank.
    """
    states: dict[int, StackState] = {}
    nameless = 0
    ranks = _ranks_of(found.stacks, found, notes)
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


def _ranks_of(dumps: Sequence[StackDump], found: Witnesses, notes: list[str]) -> list[int | None]:
    """Return the rank of each process: by its file, by RAS, which knows pids, or by a number in the file's name."""
    num_ranks = found.dumps.world_size if found.dumps is not None else 0
    num_ranks = max([num_ranks, *(rank + 1 for log in found.logs for rank in log.ranks())])
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


def _without_stack(job: JobView, states: Mapping[int, StackState]) -> list[str]:
    """Return which ranks have no stack, unless other records are those of most ranks, and what stacks leave open."""
    lacking = sorted(job.ranks.keys() - states.keys())
    lines = [f"no stack of {rank_list(lacking)}"] if lacking and len(lacking) <= len(states) else []
    if job.source == STACKS:
        last = f"the last one with a stack is {max(states)}"
        lines.append(f"the stacks do not say how many ranks the job has; {last}")
    return lines


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


_SNIFFED_BYTES = 64 << 10  # format: a report or a stack shows what it is within so many bytes
_CODE = frozenset({".py", ".sh", ".md", ".yaml", ".yml", ".toml"})
_PICKLE, _GZIP = b"\x80", b"\x1f\x8b"
# Not what a training prints: `{'loss': 2.1}`, or a log in which each line is an object.
_JSON, _JSON_LINES = re.compile(r'\s*\{\s*(?:"|\}|$)'), re.compile(r"\s*\{[^\n]{0,65536}\}\s*\n\s*\{")
_MAX_CONTROL = 0.01  # format: share of control characters in a text
_MAX_NAMED = 2  # display: files of one kind


class FileKind(StrEnum):
    """What a file is taken for."""

    DUMP = "Flight Recorder"
    RAS = "NCCL RAS"
    LOG = "log of the watchdog"
    STACKS = "py-spy"


@dataclass(kw_only=True)
class Witnesses:
    """What files say of a hang, by kind.

    Attributes:
        dumps: of the Flight Recorder; None where there are none.
        num_ranks: that the job has at least by logs that say nothing else; 0 where unknown.
        ignored: files of which nothing was taken.
        problems: what cannot be read, a sentence each.
    """

    dumps: Dumps | None = None
    ras: list[tuple[Path, RasReport]] = field(default_factory=list)
    logs: list[LogFile] = field(default_factory=list)
    stacks: list[StackDump] = field(default_factory=list)
    num_ranks: int = 0
    ignored: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def is_of_dumps_alone(self) -> bool:
        """Whether there are dumps and nothing else."""
        return not self.ras and not self.logs and not self.stacks


def kind_of(path: Path) -> FileKind | None:
    """Return what a file is taken for by its content; a text may turn out to say nothing. None for a binary file.

    Raises:
        TraceError: it cannot be read.
    """
    file = InputFile.at(path)
    with file.open() as opened:
        start = opened.read(_SNIFFED_BYTES)
    if start.startswith(_GZIP):
        start = next(json_bytes(file), b"")[:_SNIFFED_BYTES]
    if start.startswith(_PICKLE):
        return FileKind.DUMP
    if not start:
        return FileKind.LOG if path.suffix.lower() in BESIDE else FileKind.DUMP
    text = plain_text(start).replace("\r", "")
    begin = text.lstrip()[:1]
    if begin == "{" and _JSON.match(text) and not _JSON_LINES.match(text):
        return FileKind.RAS if '"nccl_version"' in text and '"communicators' in text else FileKind.DUMP
    if is_py_spy(text):
        return FileKind.STACKS
    if is_ras_text(text):
        return FileKind.RAS
    if begin == "[" and text.lstrip()[1:].lstrip()[:1] in ("{", "]"):
        return FileKind.DUMP
    num_control = sum(letter < " " and letter not in "\t\n\x1b\x08\x0c" for letter in text)
    if encoding_of(start) == "utf-8" and b"\0" in start:
        return None
    return FileKind.LOG if num_control <= max(_MAX_CONTROL * len(text), 1) else None


def read_witnesses(
    paths: Sequence[Path], ras: Path | None = None, progress: Callable[[int, int], None] = lambda *_: None
) -> Witnesses:
    """Return what files and folders say of a hang.

    Args:
        paths: files of any kind, and folders of such files.
        ras: a report of RAS, named as one.
        progress: takes how many bytes of the logs are read, of how many.

    Raises:
        TraceError: nothing can be read, or it is of several jobs.
        CannotTell: of no dump is it known which rank left it.
    """
    found = Witnesses()
    by_kind: dict[FileKind | None, list[Path]] = {}
    named = {path for path in paths if not path.is_dir()}
    for file in sorted({file for path in paths for file in files_in(path)}):
        if file.suffix.lower() in _CODE:
            found.ignored += [file] if file in named else []
            continue
        try:
            by_kind.setdefault(kind_of(file), []).append(file)
        except TraceError as error:
            if file in named and len(named) == 1:
                raise
            found.problems.append(str(error))
    for path in [*by_kind.get(FileKind.RAS, []), *([ras] if ras is not None else [])]:
        found.ras.append((path, read_ras(path)))
    _read_stacks(found, by_kind.get(FileKind.STACKS, []))
    _read_logs(found, by_kind.get(FileKind.LOG, []), progress)
    # The output of a job may be in one file with a report.
    of_both = [read_log(path) for path, report in found.ras if not report.is_json]
    found.logs += [log for log in of_both if not log.is_empty]
    if found.is_of_dumps_alone and ras is None and found.ignored and not by_kind.keys() - {FileKind.LOG}:
        raise TraceError(
            found.problems[0]
            if found.problems
            else f"no Flight Recorder dump in {_few(found.ignored)}, and no report of NCCL RAS, no message of torch's"
            " watchdog or of gloo, and no stack of py-spy"
        )
    if found.is_of_dumps_alone or (ras is not None and len(found.ras) == 1 and not found.logs and not found.stacks):
        found.dumps = read_dumps([path for path in paths if path not in found.ignored] or paths)
        found.ignored = [path for path in found.ignored if path in named or path.suffix.lower() not in BESIDE]
    elif files := [*by_kind.get(FileKind.DUMP, []), *by_kind.get(None, [])]:
        _read_dumps(found, files, needs=bool(by_kind.get(FileKind.DUMP)))
    return found


def _read_dumps(found: Witnesses, files: Sequence[Path], *, needs: bool) -> None:
    """Read dumps beside other witnesses: where no file is one, the others are judged alone."""
    try:
        found.dumps = read_dumps(files)
    except TraceError as error:
        if "are of" in str(error) or "are both of" in str(error):
            raise
        if needs:
            found.problems.append(str(error))
        else:
            found.ignored += files


def _read_stacks(found: Witnesses, files: Sequence[Path]) -> None:
    for path in files:
        try:
            found.stacks += read_stacks(path, read_file(path, most_bytes=MAX_BYTES))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            found.problems.append(f"{shortened(path.name)} was left out: {printable(why)[:200]}")


def _read_logs(found: Witnesses, files: Sequence[Path], progress: Callable[[int, int], None]) -> None:
    total = sum(path.stat().st_size for path in files)
    before = 0
    ends: list[LogFile] = []

    def told_of_one(done: int, _: int) -> None:
        progress(before + done, total)

    for path in files:
        try:
            log = read_log(path, told_of_one)
        except TraceError as error:
            found.problems.append(str(error))
            continue
        before += path.stat().st_size
        if log.has_report:
            name = shortened(path.name)
            found.problems.append(f"{name} has a report of NCCL RAS behind other text: save that in a file of its own")
        if log.all_ended() and log.is_empty:
            ends.append(log)
        elif log.is_empty:
            found.ignored.append(path)
            rank = rank_in_name(path)
            found.num_ranks = max(found.num_ranks, 0 if rank is None else min(rank + 1, MAX_RANKS))
        else:
            found.logs.append(log)
    # An exception says something beside ranks that wait.
    if found.logs:
        found.logs += ends
    else:
        found.ignored += [log.path for log in ends]


def taken_for(found: Witnesses) -> list[str]:
    """Return what each file was taken for, a line for each kind."""
    lines = []
    if found.dumps is not None:
        dumps = found.dumps.by_rank
        lines.append(f"{_span([dump.path for _, dump in sorted(dumps.items())])}: {FileKind.DUMP}")
    for path, report in found.ras:
        form = "JSON" if report.is_json else "text"
        version = shortened(report.nccl_version, max_letters=20)
        lines.append(f"{shortened(path.name)}: {FileKind.RAS} ({form}, NCCL {version})")
    for log in found.logs[:8]:
        ranks = [rank for rank in log.ranks() if not log.attempts[rank][-1].is_silent] or sorted(log.all_ended())
        lines.append(f"{shortened(log.path.name)}: {FileKind.LOG}" + (f" of {rank_list(ranks)}" if ranks else ""))
    if len(found.logs) > 8:
        lines.append(f"{plural(len(found.logs) - 8, 'more file')}: {FileKind.LOG}")
    if found.stacks:
        paths = list(dict.fromkeys(dump.path for dump in found.stacks))
        lines.append(f"{_span(paths)}: {FileKind.STACKS}, {plural(len(found.stacks), 'stack')}")
    return lines


def ignored_line(found: Witnesses) -> str:
    """Return in one sentence which files say nothing of a hang; empty where there are none."""
    if not found.ignored:
        return ""
    return f"{_few(found.ignored)}: nothing about a hang"


def _few(paths: Sequence[Path]) -> str:
    return listed(first_few(paths, _MAX_NAMED + 1, words=lambda path: shortened(path.name), noun="file"))


def _span(paths: Sequence[Path]) -> str:
    names = [shortened(path.name) for path in paths]
    return listed(names) if len(names) <= _MAX_NAMED else f"{names[0]} ... {names[-1]} ({plural(len(names), 'file')})"
