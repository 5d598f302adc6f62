"""What must hold of a report on damaged input, whatever the damage."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.damage.child import TIME_LIMIT_S, Result, memory_limit_bytes
from experiments.damage.specimen import FIGURES, FURTHER, Damaged, RunCopy, Secret
from hpcpace.core.rundir import HISTORY_INDEX

_NAMES = {
    "report": r"(.*/)?(summary\.json|report\.html)",
    "timeline": r"(.*/)?timeline\.pftrace",
    "history": rf"(.*/)?{re.escape(HISTORY_INDEX)}",
    "pack": r"(.*/)?attempt-\d+/trace(/.*)?",
    "collect": r"(.*/)?attempt-\d+/trace(/.*)?",
    "switch": r"(.*/)?switch",
}
"""By command: names in the folder that was given to it. `SECURITY.md` lists them in words."""
_OPTIONS = frozenset({"--run-dir", "--timeline", "--html", "--csv", "--out", "--output", "-o", "--save", "--show"})
"""What follows them is written; the commands that are run here give `--json` no file."""

State = Mapping[Path, tuple[int, ...]]


def state_of(*folders: Path) -> State:
    """Return what files and folders are: mode, owner and group, and of files inode, size and times too."""
    found: dict[Path, tuple[int, ...]] = {}
    for folder in folders:
        for where, _, names in os.walk(folder):
            for path in (Path(where), *(Path(where, name) for name in names)):
                one = path.lstat()
                owned = (one.st_mode, one.st_uid, one.st_gid)
                is_folder = path == Path(where)
                found[path] = (
                    owned if is_folder else (*owned, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns)
                )
    return found


def wrongly_written(arguments: Sequence[str], before: State, after: State, place: Path) -> list[str]:
    """Return what a command has made, changed or removed and may not have.

    Args:
        arguments: of `hpcpace`, or a script and its own.
        before: as of `state_of`.
        after: likewise.
        place: the folder that names are shown relative to.
    """
    named = [Path(path) for option, path in pairwise(arguments) if option in _OPTIONS]
    pattern = re.compile(_NAMES.get(arguments[0], r"\0"), re.DOTALL)
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    return [
        f"{_what(path, before, after)} {os.path.relpath(path, place)!r}"
        for path in changed
        if not pattern.fullmatch(os.path.relpath(path, place)) and not any(path.is_relative_to(one) for one in named)
    ][:5]


def _what(path: Path, before: State, after: State) -> str:
    return "makes" if path not in before else "removes" if path not in after else "changes"


_CODES = (0, 1, 2, 3)
_NO_REPORT = (2, 3)
_WITH_MEMORY, _DEFAULT_MEMORY = ("report", "dump", "compare", "history", "timeline", "pack"), "2GiB"
_VIEW_CODES = (0, 1, 2, 3, 4)
_MAX_PRINTED_BYTES = 200_000
_MAX_LINES, _SCREENFUL = 120, ("list", "history", "compare", "scale", "watch", "hang", "timeline", "import", "collect",
                                "switch", "pack")  # fmt: skip
"""Commands that print a screen or two, however large the run is, and how many lines that is."""
_WARNING = re.compile(r"^.*\b\w*Warning: .*$|^HDF5-DIAG.*$|^.*Exception ignored.*$", re.MULTILINE)


def problems_of(result: Result, damaged: Damaged, run: RunCopy, folder: Path, *, as_json: bool) -> list[str]:
    """Return what does not hold.

    Args:
        result: how the report ended.
        damaged: what was done to the run.
        run: the copy.
        folder: the run folder that was reported.
        as_json: whether the summary was printed as JSON.
    """
    stdout, stderr = (text.decode("utf-8", "surrogateescape") for text in (result.stdout, result.stderr))
    problems = [*_end(result, stdout + stderr, damaged.memory, _CODES), *_steering("stderr", stderr)]
    problems += [] if as_json else _steering("stdout", stdout)
    if problems and (result.is_late or result.signal):
        return problems
    if not as_json and len(stdout) + len(stderr) > _MAX_PRINTED_BYTES:
        problems.append(f"prints {len(stdout) + len(stderr)} bytes")
    printed = stdout if as_json else _read(folder / "summary.json")
    is_reported = bool(stdout.strip())
    if is_reported:
        summary = _summary(printed, problems)
        if summary is not None:
            problems += _ranks(summary, damaged, run)
            problems += _blamed(summary, damaged)
    else:
        problems += _error(result, stderr, damaged, run)
    said = without_space(stdout + stderr)
    if not (as_json and is_reported):  # the summary has it in other words
        problems += [f"does not say {text!r}" for text in damaged.says if not _is_said(text, said)]
    page = _read(folder / "report.html")
    problems += [f"has {text!r} in report.html" for text in damaged.never if text in page]
    problems += _leaks(result, run.shelf.secret, folder)
    return problems


def problems_of_view(
    arguments: Sequence[str], result: Result, damaged: Damaged, secret: Secret, folder: Path
) -> list[str]:
    """Return what does not hold of another command than the report, on the same input.

    Args:
        arguments: of the command.
        result: how it ended.
        damaged: what was done to the run.
        secret: what it may not give away.
        folder: the run folder.
    """
    stdout, stderr = (text.decode("utf-8", "surrogateescape") for text in (result.stdout, result.stderr))
    as_json = "--json" in arguments
    memory = damaged.memory if arguments[0] in _WITH_MEMORY else _DEFAULT_MEMORY
    problems = [*_end(result, stdout + stderr, memory, _VIEW_CODES), *_steering("stderr", stderr)]
    problems += [] if as_json else _steering("stdout", stdout)
    if not as_json and len(stdout) + len(stderr) > _MAX_PRINTED_BYTES:
        problems.append(f"prints {len(stdout) + len(stderr)} bytes")
    if not as_json and arguments[0] in _SCREENFUL and (lines := len((stdout + stderr).splitlines())) > _MAX_LINES:
        problems.append(f"prints {lines} lines")
    if result.code and not (stdout + stderr).strip() and not problems:
        problems.append(f"ends with {result.code} and prints nothing")
    problems += _leaks(result, secret, folder)
    name = Path(arguments[0]).name
    return [f"{name}{' --json' if as_json else ''}: {problem}" for problem in problems]


def _leaks(result: Result, secret: Secret, folder: Path) -> list[str]:
    """Return where the secret is, of all that was printed and of all that was written into the run."""
    places = {"stdout": result.stdout, "stderr": result.stderr}
    places |= {path.name: path.read_bytes() for path in _written(folder)}
    return [f"{found} is in {name}" for name, content in places.items() for found in secret.leaks(content)]


def _written(folder: Path) -> list[Path]:
    paths = [folder / "summary.json", folder / "report.html"]
    if (folder / FIGURES).is_dir():
        paths += sorted((folder / FIGURES).iterdir())
    paths += [path for one in folder.parent.glob(f"{FURTHER}*") for path in (one, *one.rglob("*"))]
    paths += [folder.parent / HISTORY_INDEX, folder / "timeline.pftrace"]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def _end(result: Result, text: str, memory: str, codes: Collection[int]) -> list[str]:
    problems = []
    if result.is_late:
        problems.append(f"takes {result.wall_s:.1f} s ({result.cpu_s:.1f} s of a core), more than {TIME_LIMIT_S:g} s")
    elif result.signal:
        problems.append(f"is killed by signal {result.signal}")
    elif result.code not in codes:
        problems.append(f"ends with {result.code}")
    if result.memory_bytes > memory_limit_bytes(memory):
        limit = memory_limit_bytes(memory) >> 20
        problems.append(f"takes {result.memory_bytes >> 20} MiB of memory, more than {limit} MiB")
    if "Traceback (most recent call last)" in text:
        last = [line for line in text.splitlines() if line.strip()][-1]
        place = re.findall(r'File ".*?((?:hpcpace/|site-packages/)\S+)", line (\d+)', text)
        where = " < ".join(f"{file}:{line}" for file, line in reversed(place[-6:]))
        problems.append(f"traceback: {last} ({where})")
    problems += [f"warns: {found}" for found in _WARNING.findall(text)[:3]]
    return problems


def _steering(name: str, text: str) -> list[str]:
    found = sorted({character for character in text if character != "\n" and not character.isprintable()})
    return [f"prints {found!r} to {name}"] if found else []


def _summary(text: str, problems: list[str]) -> dict[str, Any] | None:
    """Return summary.json where it is JSON as other programs read it, without NaN and infinities."""
    if not text:
        return None

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        found = json.loads(text, parse_constant=refuse)
    except ValueError as error:
        problems.append(f"summary.json: {error}")
        return None
    return found if isinstance(found, dict) else None


def _ranks(summary: dict[str, Any], damaged: Damaged, run: RunCopy) -> list[str]:
    sound = run.ranks - damaged.hurt
    named, shown = set(summary["world"]["ranks"]), {row["rank"] for row in summary["ranks"]}
    problems = []
    if sound - named:
        problems.append(f"sound ranks {sorted(sound - named)} are not in world.ranks")
    if sound - shown:
        problems.append(f"sound ranks {sorted(sound - shown)} have no figures")
    return problems


def _blamed(summary: dict[str, Any], damaged: Damaged) -> list[str]:
    """Return whom the verdict blames and may not."""
    if damaged.blamed is None:
        return []
    verdict = summary["verdict"]
    ranks = {int(text) for item in verdict["culprits"] for text in re.findall(r"\d+", json.dumps(item))}
    wrong = ranks - damaged.blamed
    return [f"blames {sorted(wrong)}: {verdict['headline']}"] if wrong or (verdict["culprits"] and not ranks) else []


def _error(result: Result, stderr: str, damaged: Damaged, run: RunCopy) -> list[str]:
    problems = []
    if result.code not in _NO_REPORT:
        problems.append(f"ends with {result.code} and prints no report")
    if not stderr.strip():
        problems.append("prints nothing")
    if run.ranks - damaged.hurt:
        problems.append(f"reports none of the sound ranks {sorted(run.ranks - damaged.hurt)}: {stderr.strip()[:300]}")
    places = [without_space(_escaped(place)) for place in damaged.places]
    if places and not any(place in without_space(stderr) for place in places):
        problems.append(f"names no place: {stderr.strip()[:300]}")
    return problems


def _read(path: Path) -> str:
    return path.read_text(errors="surrogateescape") if path.is_file() else ""


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _is_said(text: str, said: str) -> bool:
    """Return whether a text is among what was said; several ranks' files may be said as one, as `rank-*.h5`."""
    words = without_space(_escaped(text))
    return words in said or re.sub(r"rank-\d+", "rank-*", words) in said


def without_space(text: str) -> str:
    """Return a text without its spaces and line breaks, wherever a terminal has wrapped it."""
    return re.sub(r"\s+", "", text)
