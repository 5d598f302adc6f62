"""Folders of mixed junk that `import` and `hang` are given, and packs of ranks whose bytes are hurt."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
from pathlib import Path

from experiments.damage.chance import Random
from experiments.damage.hostile.engine import CONTROL, Call, Hostile, put_no_file, secret_file, size_bytes, sound_run
from hpcpace.core.rundir import RunDirectory
from hpcpace.trace.packing import PackPlan, pack_attempt

_NAMES = (
    "rank_{}", "rank{}_trace.json", "worker{}.pt.trace.json", "trace_{}.json.gz", "nccl_trace_rank_{}", "x{}.sqlite",
    "ras{}.txt", "trace-{}.parquet", "core.{}", "a b{}", "-{}", "{}\n\x1b[2J", "\u202e{}", "rank_\u00b2{}",
    "rank_9999999999{}",
)  # fmt: skip


def _call(folder: Path, commands: str, random: Random, /, **places: object) -> Call:
    """Return one of some calls, in which words in braces are places."""
    words = random.of(commands.strip().splitlines()).split()
    return Call(arguments=tuple(word.format(**places) for word in words), num_bytes=size_bytes(folder))


_ON_JUNK = """
import kineto {junk} --run-dir {out}
import flight-recorder {junk}
import wia {junk} --run-dir {out}
import nsys {junk} --run-dir {out}
hang {junk}
report {junk}
list {junk}
history {junk}
audit --from {junk}
"""


def _junk(folder: Path, random: Random) -> Call:
    """Files of other formats under the names of this one, next to pipes, links, folders and nothing."""
    place = folder / "junk"
    place.mkdir()
    for number in range(random.count(3, 40)):
        path = place / str(random.of(_NAMES)).format(number)
        if path.exists() or path.is_symlink():
            continue
        if random.maybe(0.25):
            outside = [lambda path, to=to: path.symlink_to(to) for to in (secret_file(), "nowhere", "/")]
            put_no_file(path, random, lambda path: (path.touch(), os.truncate(path, 1 << 36)), *outside)
        else:
            path.write_bytes(_content(random.text_size() // 20, random))
    return _call(folder, _ON_JUNK, random, junk=place, out=folder / "out")


def _content(size: int, random: Random) -> bytes:
    """Return what looks like the begin of a format, or nothing, or noise."""
    noise = random.bytes(size)
    events = [{"ph": "X", "ts": number, "dur": -1, "name": CONTROL} for number in range(size // 60)]
    content: bytes = random.one(
        gzip.compress(b" " * size * 200),
        pickle.dumps({"version": "2.10", "entries": [{}] * (size // 10), "x": CONTROL}),
        json.dumps({"traceEvents": events}).encode(),
        b"SQLite format 3\0" + noise,
        b"PAR1" + noise + b"PAR1",
        b"\x89HDF\r\n\x1a\n" + noise,
        b"[" * size,
        random.one(b"", noise, b"\0" * size, b"{}", b"null"),
    )
    return content


_ON_PACK = """
report {run}
dump {pack}
compare {other} {run} --anyway
scale {other} {run}
history {folder}
timeline {run}
hang {run}
pack {run} --ended
list {folder}
"""


def _pack(folder: Path, random: Random) -> Call:
    """A pack of a run of four ranks, cut, with bytes exchanged or twice under another name."""
    run, other = sound_run(folder / "run", nodes=4), sound_run(folder / "other")
    (attempt,) = RunDirectory(run).attempts()
    pack_attempt(attempt, PackPlan(has_ended=True), begin_stage=lambda _: lambda done, total: None)
    (pack,) = attempt.packs()
    content = random.changed(pack.read_bytes(), 60)
    if random.maybe(0.3):
        del content[random.count(0, len(content)) :]
    if random.maybe(0.3):
        content += random.bytes(random.text_size())
    pack.write_bytes(bytes(content))
    if random.maybe(0.3):
        shutil.copy(pack, pack.with_name("pack-99999-00000000.h5"))
    return _call(folder, _ON_PACK, random, run=run, other=other, pack=pack, folder=folder)


KINDS = (
    Hostile(name="junk", format="folders of mixed junk", make=_junk),
    Hostile(name="pack-bytes", format="packs", make=_pack, most_lines=100),
)
