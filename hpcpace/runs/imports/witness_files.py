"""Files that say something of a hang, each taken for what its content shows: dumps, reports of RAS, logs, stacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from hpcpace.core.errors import TraceError
from hpcpace.core.files import read_file
from hpcpace.core.log_text import encoding_of, plain_text
from hpcpace.core.text import first_few, listed, plural, printable, rank_list, shortened
from hpcpace.runs.imports.dumps import BESIDE, Dumps, files_in, read_dumps
from hpcpace.runs.imports.flight_recorder import MAX_RANKS
from hpcpace.runs.imports.input_files import InputFile, json_bytes
from hpcpace.runs.imports.py_spy import MAX_BYTES, StackDump, is_py_spy, read_stacks
from hpcpace.runs.imports.ras import RasReport, read_ras
from hpcpace.runs.imports.ras_text import is_ras_text
from hpcpace.runs.imports.watchdog import read_log
from hpcpace.runs.imports.watchdog_ranks import LogFile, rank_in_name

_SNIFFED_BYTES = 64 << 10  # format: a report or a stack shows what it is within so many bytes
_CODE = frozenset({".py", ".sh", ".md", ".yaml", ".yml", ".toml"})
_PICKLE, _GZIP = b"\x80", b"\x1f\x8b"
# Not what a training prints: `{'loss': 2.1}`, or a log in which each line is an object.
_JSON, _JSON_LINES = re.compile(r'\s*\{\s*(?:"|\}|$)'), re.compile(r"\s*\{[^\n]{0,65536}\}\s*\n\s*\{")
_MAX_CONTROL = 0.01  # format: share of control characters in a text
_MAX_NAMED = 2  # display: files of one kind


class Kind(StrEnum):
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


def kind_of(path: Path) -> Kind | None:
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
        return Kind.DUMP
    if not start:
        return Kind.LOG if path.suffix.lower() in BESIDE else Kind.DUMP
    text = plain_text(start).replace("\r", "")
    begin = text.lstrip()[:1]
    if begin == "{" and _JSON.match(text) and not _JSON_LINES.match(text):
        return Kind.RAS if '"nccl_version"' in text and '"communicators' in text else Kind.DUMP
    if is_py_spy(text):
        return Kind.STACKS
    if is_ras_text(text):
        return Kind.RAS
    if begin == "[" and text.lstrip()[1:].lstrip()[:1] in ("{", "]"):
        return Kind.DUMP
    num_control = sum(letter < " " and letter not in "\t\n\x1b\x08\x0c" for letter in text)
    if encoding_of(start) == "utf-8" and b"\0" in start:
        return None
    return Kind.LOG if num_control <= max(_MAX_CONTROL * len(text), 1) else None


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
    by_kind: dict[Kind | None, list[Path]] = {}
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
    for path in [*by_kind.get(Kind.RAS, []), *([ras] if ras is not None else [])]:
        found.ras.append((path, read_ras(path)))
    _read_stacks(found, by_kind.get(Kind.STACKS, []))
    _read_logs(found, by_kind.get(Kind.LOG, []), progress)
    if found.is_of_dumps_alone and ras is None and found.ignored and not by_kind.keys() - {Kind.LOG}:
        raise TraceError(
            f"no Flight Recorder dump in {_few(found.ignored)}, and no report of NCCL RAS, no message of torch's"
            " watchdog or of gloo, and no stack of py-spy"
        )
    if found.is_of_dumps_alone or (ras is not None and len(found.ras) == 1 and not found.logs and not found.stacks):
        found.dumps = read_dumps([path for path in paths if path not in found.ignored] or paths)
        found.ignored = [path for path in found.ignored if path in named or path.suffix.lower() not in BESIDE]
    elif files := [*by_kind.get(Kind.DUMP, []), *by_kind.get(None, [])]:
        _read_dumps(found, files, needs=bool(by_kind.get(Kind.DUMP)))
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

    def told_of_one(done: int, _: int) -> None:
        progress(before + done, total)

    for path in files:
        try:
            log = read_log(path, told_of_one)
        except TraceError as error:
            found.problems.append(str(error))
            continue
        before += path.stat().st_size
        if log.is_empty:
            found.ignored.append(path)
            rank = rank_in_name(path)
            found.num_ranks = max(found.num_ranks, 0 if rank is None else min(rank + 1, MAX_RANKS))
        else:
            found.logs.append(log)


def taken_for(found: Witnesses) -> list[str]:
    """Return what each file was taken for, a line for each kind."""
    lines = []
    if found.dumps is not None:
        dumps = found.dumps.by_rank
        lines.append(f"{_span([dump.path for _, dump in sorted(dumps.items())])}: {Kind.DUMP}")
    for path, report in found.ras:
        form = "JSON" if report.is_json else "text"
        version = shortened(report.nccl_version, max_letters=20)
        lines.append(f"{shortened(path.name)}: {Kind.RAS} ({form}, NCCL {version})")
    for log in found.logs[:8]:
        ranks = [rank for rank in log.ranks() if not log.attempts[rank][-1].is_silent]
        lines.append(f"{shortened(log.path.name)}: {Kind.LOG}" + (f" of {rank_list(ranks)}" if ranks else ""))
    if len(found.logs) > 8:
        lines.append(f"{plural(len(found.logs) - 8, 'more file')}: {Kind.LOG}")
    if found.stacks:
        paths = list(dict.fromkeys(dump.path for dump in found.stacks))
        lines.append(f"{_span(paths)}: {Kind.STACKS}, {plural(len(found.stacks), 'stack')}")
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
