"""Folders of mixed junk that `import` and `hang` are given, and packs of ranks whose bytes are hurt."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
from pathlib import Path

from experiments.damage.hostile.engine import (
    CONTROL,
    Call,
    Hostile,
    Random,
    one_of,
    secret_file,
    size_bytes,
    sound_run,
    text_size,
    with_changed_bytes,
)
from hpcpace.core.rundir import RunDirectory
from hpcpace.trace.packing import PackPlan, pack_attempt

_JUNK, _PACKS = "folders of mixed junk", "packs"
_NAMES = (
    "rank_{}", "rank{}_trace.json", "worker{}.pt.trace.json", "trace_{}.json.gz", "nccl_trace_rank_{}", "x{}.sqlite",
    "ras{}.txt", "trace-{}.parquet", "core.{}", "a b{}", "-{}", "{}\n\x1b[2J", "\u202e{}", "rank_\u00b2{}",
    "rank_9999999999{}",
)  # fmt: skip


def _junk(folder: Path, random: Random) -> Call:
    """Files of other formats under the names of this one, next to pipes, links, folders and nothing."""
    place = folder / "junk"
    place.mkdir()
    for number in range(int(random.integers(3, 40))):
        path = place / str(one_of(_NAMES, random)).format(number)
        if not path.exists() and not path.is_symlink():
            _put(path, random)
    out = str(folder / "out")
    calls = (
        ("import", "kineto", str(place), "--run-dir", out),
        ("import", "flight-recorder", str(place)),
        ("import", "wia", str(place), "--run-dir", out),
        ("import", "nsys", str(place), "--run-dir", out),
        ("hang", str(place)),
        ("report", str(place)),
        ("list", str(place)),
        ("history", str(place)),
        ("audit", "--from", str(place)),
    )
    return Call(arguments=one_of(calls, random), num_bytes=size_bytes(folder))


def _put(path: Path, random: Random) -> None:
    size = text_size(random) // 20
    kind = int(random.integers(13))
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(one_of((secret_file(), "/dev/zero", path.name, "nowhere", "/"), random))
    elif kind == 2:
        path.mkdir()
        (path / "rank_0").write_bytes(random.bytes(100))
    elif kind == 3:
        with path.open("wb") as stream:
            stream.truncate(int(random.integers(1 << 20, 1 << 36)))  # sparse
    else:
        path.write_bytes(_content(kind, size, random))


def _content(kind: int, size: int, random: Random) -> bytes:
    if kind == 4:
        return gzip.compress(b" " * size * 200)  # a bomb of some megabytes
    if kind == 5:
        return pickle.dumps({"version": "2.10", "entries": [{}] * (size // 10), "x": CONTROL})
    if kind == 6:
        return json.dumps(
            {"traceEvents": [{"ph": "X", "ts": n, "dur": -1, "name": CONTROL} for n in range(size // 60)]}
        ).encode()
    if kind == 7:
        return b"SQLite format 3\0" + random.bytes(size)
    if kind == 8:
        return b"PAR1" + random.bytes(size) + b"PAR1"
    if kind == 9:
        return b"\x89HDF\r\n\x1a\n" + random.bytes(size)
    if kind == 10:
        return b"[" * size
    return one_of((b"", random.bytes(size), b"\0" * size, b"{}", b"null"), random)


def _pack(folder: Path, random: Random) -> Call:
    """A pack of a run of four ranks, cut, with bytes exchanged or twice under another name."""
    run = sound_run(folder / "run", nodes=4)
    (attempt,) = RunDirectory(run).attempts()
    pack_attempt(attempt, PackPlan(has_ended=True), begin_stage=lambda _: lambda done, total: None)
    (pack,) = attempt.packs()
    content = with_changed_bytes(pack.read_bytes(), 60, random)
    if random.random() < 0.3:
        del content[int(random.integers(len(content))) :]
    if random.random() < 0.3:
        content += random.bytes(text_size(random))
    pack.write_bytes(bytes(content))
    if random.random() < 0.3:
        shutil.copy(pack, pack.with_name("pack-99999-00000000.h5"))
    other = str(sound_run(folder / "other"))
    path = str(run)
    calls = (
        ("report", path),
        ("dump", str(pack)),
        ("compare", other, path, "--anyway"),
        ("scale", other, path),
        ("history", str(folder)),
        ("timeline", path),
        ("hang", path),
        ("pack", path, "--ended"),
        ("list", str(folder)),
    )
    return Call(arguments=one_of(calls, random), num_bytes=size_bytes(folder))


KINDS = (
    Hostile(name="junk", format=_JUNK, make=_junk),
    Hostile(name="pack-bytes", format=_PACKS, make=_pack, most_lines=100),
)
