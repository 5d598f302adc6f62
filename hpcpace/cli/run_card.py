"""Makes the card at the end of a run: `python -m hpcpace.cli.run_card`, started by rank 0 as its job ends.

It prints the head of the report in at most 12 lines, or one line that says why there is none. It ends at its time limit
and with the rank that has started it, and takes little: a low priority, one core, memory up to a limit, and only
runs with small traces.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpcpace.core.errors import CannotTell, HpcpaceError
from hpcpace.core.pool import end_with, in_one_thread
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.core.text import format_bytes, named_ranks, one_line
from hpcpace.observe.card import CardVerdict, no_card_line

MAX_TRACE_BYTES = 24 << 20
"""speed: one core takes 0.2 s a MB, so this much takes half of the 10 s that a card has by default."""
_MAX_ADDRESSES_BYTES = 1 << 30
"""memory: a run of two ranks takes 330 MB of addresses and 80 MB of memory, one of 32 MB on disk 700 MB and 520 MB."""
_MIN_LEFT_BYTES = 512 << 20
"""memory: what the job's cgroup must have left; Slurm marks a job as out of memory whichever process was killed."""
_FILES_SHARE = 0.3
"""timing: part of the time for which files of other ranks are waited for."""
_POLL_S = 0.05
_NICE = 10
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_WIDTH = 80
_MAX_HEADLINE = 500
"""memory: letters; each may take 6 bytes, and the longest headlines are of some 200."""


class NoCard(Exception):
    """There is no card, for the reason in its message."""


def main(words: list[str]) -> None:
    """Print a card.

    Args:
        words: folder of the attempt, number of ranks, seconds, pid of the rank, the run as a user names it, and `color`
            for a terminal.
    """
    path, world_size, timeout_s, parent, run, *color = words
    signal.setitimer(signal.ITIMER_REAL, float(timeout_s))  # whose default action ends this process
    threading.Thread(target=end_with, args=(int(parent),), daemon=True).start()
    _take_little()
    attempt = RunDirectory(Path(path).parent).attempt(Attempt(Path(path)).number)
    try:
        _check_memory()
        _wait_for_files(attempt, int(world_size), _FILES_SHARE * float(timeout_s))
        _check_size(attempt)
        with in_one_thread():
            text = _card(attempt, run, has_colors=bool(color))
    except (NoCard, HpcpaceError) as error:
        cannot_tell = "cannot tell: " * isinstance(error, CannotTell)
        text = no_card_line(attempt, cannot_tell + one_line(str(error)).removeprefix(f"{attempt.path}: "))
    except MemoryError:
        text = no_card_line(attempt, "memory ran out")
    sys.stdout.write(text)


def _take_little() -> None:
    """Lower the priority, bound the memory, and be the first that the kernel kills if memory runs out."""
    with suppress(OSError):
        os.nice(_NICE)
    with suppress(OSError):
        _OOM_SCORE.write_text("1000")
    with suppress(OSError, ValueError):  # the limit of the job may be lower
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_ADDRESSES_BYTES, hard))


def _check_memory() -> None:
    """Leave the memory to a job that has little left.

    Raises:
        NoCard: it has too little for a report.
    """
    left_bytes = min(_memory_left(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")), default=_MIN_LEFT_BYTES)
    if left_bytes < _MIN_LEFT_BYTES:
        raise NoCard(f"the job has only {format_bytes(max(left_bytes, 0))} of memory left")


def _memory_left(memberships: Path, root: Path) -> Iterator[int]:
    """Yield the bytes that each memory limit around this process leaves, without the cache that the kernel can drop."""
    with suppress(OSError, ValueError):
        for line in memberships.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                top, limit, usage, cache = root, "memory.max", "memory.current", "inactive_file"
            elif controllers == "memory":
                top, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
                cache = "total_inactive_file"
            else:
                continue
            own = top / path.lstrip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(top):
                    yield from _left_in(folder, limit, usage, cache)


def _left_in(folder: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    with suppress(OSError, ValueError, KeyError):  # the root has no limit, and `max` is no number
        most = int((folder / limit).read_text())
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        yield most - int((folder / usage).read_text()) + int(stat[cache])


def _wait_for_files(attempt: Attempt, world_size: int, timeout_s: float) -> None:
    """Wait until all ranks have closed their traces, and these can be seen here.

    Raises:
        NoCard: some have not in time.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        sizes = attempt.trace_sizes()
        found = set(attempt.trace_files())
        is_packed = bool(attempt.packs())
        missing = sorted(set(range(world_size)) - found)
        is_open = any(name.endswith(".journal") for name in sizes)
        if (is_packed or not missing) and not is_open:
            return
        if time.monotonic() >= end_s:
            break
        time.sleep(_POLL_S)
    if missing:
        raise NoCard(f"the trace of {named_ranks(missing, {})} is not here yet")
    raise NoCard("some ranks have not closed their traces")


def _check_size(attempt: Attempt) -> None:
    """Refuse a run that takes long to read.

    Raises:
        NoCard: its traces are too large.
    """
    size_bytes = attempt.trace_bytes()
    if size_bytes > MAX_TRACE_BYTES:
        raise NoCard(f"{format_bytes(size_bytes)} of traces take longer than a job should wait")


def _card(attempt: Attempt, run: str, *, has_colors: bool) -> str:
    """Return the card, with its verdict behind it.

    Raises:
        NoCard, HpcpaceError: there is none.
    """
    from hpcpace.core.environment import process_environ
    from hpcpace.core.settings import load_config
    from hpcpace.diagnosis.analyze import analyze
    from hpcpace.diagnosis.measure import Selection
    from hpcpace.report.run_report import card_text

    config = load_config(environ=process_environ())
    directory = RunDirectory(attempt.path.parent)
    analysis = analyze(directory, attempt, Selection(), config, begin_stage=lambda _: lambda done, total: None)
    assert analysis is not None  # there is no team
    if analysis.summary.world.missing or analysis.summary.cut_off.not_closed:
        raise NoCard("some traces are not complete")
    text = card_text(analysis.summary, run, width=_WIDTH, encoding=sys.stdout.encoding, has_colors=has_colors)
    said = analysis.summary.verdict
    headline = said.headline[:_MAX_HEADLINE]
    verdict = CardVerdict(headline=headline, mode=said.mode, loss_share=said.loss_share, confidence=said.confidence)
    return verdict.behind(text)


if __name__ == "__main__":
    main(sys.argv[1:])
