"""Files of other tools whose bytes are hurt, folders of them, and folders of mixed junk and hurt packs.

Attacks that only one format invites are unit tests with a known answer; here a few bytes of sound files are changed by
chance, values of JSON are exchanged, and folders hold what no tool wrote.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from experiments.damage.chance import Random
from experiments.damage.hostile_files import (
    CONTROL,
    SECRET,
    Call,
    Hostile,
    Make,
    kinds_of,
    put_no_file,
    size_bytes,
    sound_run,
)
from experiments.damage.json_files import Content, dump, entry, hang, json_kinds, write_dumps
from hpcpace.core.rundir import RunDirectory
from hpcpace.runs.imports.wia import COLUMNS
from hpcpace.trace.packing import PackPlan, pack_attempt

# Dumps of the Flight Recorder


def _far_rank(random: Random) -> Content:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 131071]"}}
    entries = [entry(number, process_group=("gloo", "default_pg")) for number in range(random.count(10, 5000))]
    return {"rank_0": dump(entries, pg_config=groups)}


def _other_faults(random: Random) -> Content:
    def of(rank: int) -> Content:
        wrong = entry(0, **{(*entry(0),)[rank % 8]: f"\u202e{rank}" * 40})
        return dump([wrong], version=f"2.{rank}", comm_lib_version=f"v{rank}")

    return {f"{'x' * random.count(0, 200)}\x1b[3{rank % 8}mrank_{rank}": of(rank) for rank in range(1000)}


def _bits_of_dumps(random: Random) -> Content:
    data = pickle.dumps(dump([*map(entry, range(200))]), 2)
    return {f"rank_{rank}": bytes(random.changed(data, 20)) for rank in range(8)}


def _dumped(contents: Callable[[Random], Content]) -> Make:
    return lambda folder, random: hang(folder, write_dumps(folder, contents(random)))


def _links(folder: Path, random: Random) -> Call:
    secret = folder / "secret.txt"
    secret.write_text(f'{{"version": "{SECRET}", "pg_config": {{}}}}')
    num_bytes = write_dumps(folder, {"rank_0": dump([entry(0)])})
    for rank in range(1, 200):
        put_no_file(folder / f"rank_{rank}", random, lambda path: path.symlink_to(random.one(secret, folder)))
    return hang(folder, num_bytes)


# What `hpcpace import` reads


def _import(format_: str, path: Path, num_bytes: int) -> Call:
    run = path.parent.parent / "run"
    return Call(
        arguments=("import", format_, str(path), "--run-dir", str(run)), num_bytes=num_bytes, never=("owned\x07",)
    )


def _kineto_events(num_steps: int = 20, per_step: int = 20) -> Any:
    """Return a profile of a rank with a device that reduces once a step."""

    def event(name: str, cat: str, begin: float, length: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": length, "args": args}

    events = []
    for step in range(num_steps):
        at = 1e6 + 1e4 * step
        for number in range(per_step):
            link = step * per_step + number + 1
            events.append(event("cudaLaunchKernel", "cuda_runtime", at + number, 1, correlation=link))
            events.append(event("gemm", "kernel", at + 10 * number + 5, 8, correlation=link))
        said = {"Collective name": "allreduce", "dtype": "Float", "Process Group Name": "0"}
        events.append(event("ncclDevKernel_AllReduce", "kernel", at + 5e3, 100, Seq=step, **said))
        events.append(event(f"ProfilerStep#{step}", "user_annotation", at, 9e3))
    info = {"backend": "nccl", "rank": 0, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    facts = {"distributedInfo": info, "host_name": "n1", "baseTimeNanoseconds": 1_700_000_000_000_000_000}
    return {**facts, "traceEvents": events}


def _put_kineto(folder: Path, data: bytes, random: Random) -> Call:
    """Write a profile of rank 0, packed in half of the cases."""
    is_packed = random.maybe()
    packed = gzip.compress(data, 1, mtime=0) if is_packed else data
    (folder / f"rank-0.json{'.gz' if is_packed else ''}").write_bytes(packed)
    return _import("kineto", folder / ".", len(data) + len(packed))


_NSYS_TABLES = {
    "StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)": "(?, ?)",
    "CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, correlationId, globalPid, shortName)": "(?, ?, ?, ?, ?, ?)",
    "CUPTI_ACTIVITY_KIND_RUNTIME (start, end, correlationId, globalTid)": "(?, ?, ?, ?)",
    "NVTX_EVENTS (start, end, eventType, text TEXT, textId, globalTid)": "(?, ?, ?, ?, ?, ?)",
}


def _nsys_bits(folder: Path, random: Random) -> Call:
    path, pid, numbers = folder / "export.sqlite", 1 << 24, range(5000)
    rows: tuple[list[tuple[Any, ...]], ...] = (
        [(1, "k")],
        [(10 * n, 10 * n + 5, n % 2, n + 1, pid, 1) for n in numbers],
        [(n, n + 1, n + 1, pid) for n in numbers],
        [(n, n + 1, 59, f"step {n}", None, pid) for n in numbers],
    )
    with closing(sqlite3.connect(path)) as connection:
        for (table, places), values in zip(_NSYS_TABLES.items(), rows, strict=True):
            connection.execute(f"CREATE TABLE {table}")
            connection.executemany(f"INSERT INTO {table.partition(' ')[0]} VALUES {places}", values)
        connection.commit()
    path.write_bytes(random.changed(path.read_bytes(), 200))
    return _import("nsys", path, path.stat().st_size)


_WIA_OPERATIONS = (
    *("forward-compute", "backward-compute", "forward-send", "forward-recv", "backward-send", "backward-recv"),
    *("optimizer", "params-all-gather", "grads-reduce-scatter", "optimizer-clip-main-grad"),
    *("embedding-grads-all-reduce", "layernorm-grads-all-reduce"),
)
# A row takes 5 bytes in a file at least, and 5 us and 700 bytes of memory in the import: 1 s a MB. A worker takes
# 20 ms, most of them for its file of the run, and counts as 20 kB.
_ROW_BYTES, _WORKER_BYTES, _NUM_WORKERS = 5, 20_000, 8


def _wia(path: Path, num_rows: int) -> Call:
    return _import("wia", path, path.stat().st_size + _ROW_BYTES * num_rows + _WORKER_BYTES * _NUM_WORKERS)


def _wia_bytes(folder: Path, random: Random) -> Call:
    """Change bytes of the pages of a trace, or of the metadata at its end."""
    num_rows = random.count(1000, 200_000)
    worker, begins = random.integers(0, _NUM_WORKERS, num_rows), random.uniform(0, 1, num_rows).astype(np.float32)
    codes = np.asarray(random.integers(0, len(_WIA_OPERATIONS), num_rows), np.int32)
    columns: dict[str, Any] = {
        **{"dp_rank": worker // 2, "stage": worker % 2, "rank": worker, "step": random.integers(0, 10, num_rows)},
        **{"seq_id": np.arange(num_rows), "mc": np.zeros(num_rows, np.int64), "gmc": np.zeros(num_rows, np.int64)},
        **{"mb_id": random.integers(0, 8, num_rows), "start_ts": begins, "duration": begins / 100},
        "optype": pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(_WIA_OPERATIONS)),
    }
    path = folder / "trace-X.parquet"
    parquet.write_table(pa.table({name: columns[name] for name in COLUMNS if name in columns}), path)
    data = path.read_bytes()
    first = len(data) - 3000 if random.maybe(0.6) else 0
    data = data[:first] + random.changed(data[first:], 20)
    path.write_bytes(data[: random.count(0, len(data))] if random.maybe(0.2) else data)
    return _wia(path, num_rows + 200_000)


def _wia_timeline(_: Path) -> Any:
    tracks = [
        {"ph": "M", "name": "thread_name", "tid": 0, "pid": n, "args": {"name": f"PP rank {n // 2}, TP rank 0"}}
        for n in range(4)
    ]
    events = [
        {"ph": "X", "name": _WIA_OPERATIONS[n % 7], "pid": n % 4, "tid": 0, "ts": 10.0 * n, "dur": 5.0,
         "args": {"step": 0, "mb_id": n % 8, "seq_id": n, "model_chunk": 0}}
        for n in range(200)
    ]  # fmt: skip
    return {"traceEvents": [*tracks, *events]}


def _put_wia_timeline(folder: Path, content: bytes, random: Random) -> Call:
    path = folder / "timeline.json"
    path.write_bytes(content)
    return _wia(path, len(content) // 100)


# Folders of junk, and packs

_NAMES = (
    "rank_{}", "rank{}_trace.json", "worker{}.pt.trace.json", "trace_{}.json.gz", "nccl_trace_rank_{}", "x{}.sqlite",
    "ras{}.txt", "trace-{}.parquet", "core.{}", "a b{}", "-{}", "{}\n\x1b[2J", "\u202e{}", "rank_\u00b2{}",
    "rank_9999999999{}",
)  # fmt: skip
_ON_JUNK = (
    *("import kineto {junk} --run-dir {out}", "import flight-recorder {junk}", "import wia {junk} --run-dir {out}"),
    *("import nsys {junk} --run-dir {out}", "hang {junk}", "report {junk}", "list {junk}", "history {junk}"),
    "audit --from {junk}",
)
_ON_PACK = (
    *("report {run}", "dump {pack}", "compare {other} {run} --anyway", "scale {other} {run}", "history {folder}"),
    *("timeline {run}", "hang {run}", "pack {run} --ended", "list {folder}"),
)


def _call(folder: Path, commands: tuple[str, ...], random: Random, /, **places: object) -> Call:
    """Return one of some calls, in which words in braces are places."""
    words = str(random.of(commands)).split()
    return Call(arguments=tuple(word.format(**places) for word in words), num_bytes=size_bytes(folder))


def _junk(folder: Path, random: Random) -> Call:
    """Put files of other formats under the names of this one, next to pipes, links, folders and nothing."""
    place = folder / "junk"
    place.mkdir()
    for number in range(random.count(3, 40)):
        path = place / str(random.of(_NAMES)).format(number)
        if path.exists() or path.is_symlink():
            continue
        if random.maybe(0.25):
            outside = [lambda path, to=to: path.symlink_to(to) for to in ("nowhere", "/")]
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
        *(b"SQLite format 3\0" + noise, b"PAR1" + noise + b"PAR1", b"\x89HDF\r\n\x1a\n" + noise, b"[" * size),
        random.one(b"", noise, b"\0" * size, b"{}", b"null"),
    )
    return content


def _pack(folder: Path, random: Random) -> Call:
    """Cut a pack of a run of four ranks, exchange its bytes, or leave it twice under another name."""
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


_DUMPS, _HANGS, _WIA = "Flight Recorder dumps", "folders of hpcpace hang", "traces of the what-if analysis"
_KINETO = "profiles of torch.profiler"
# For each MB of a file and of what comes out of gzip; a rank takes 20 ms, most of them for its file of the run.
_OF_KINETO: dict[str, Any] = {"most_cpu_s": 2.0, "most_cpu_s_per_mb": 0.3}
_OF_WIA: dict[str, Any] = {"most_cpu_s_per_mb": 1.5}
KINDS = (
    *kinds_of("dumps", _DUMPS, {"bits": _dumped(_bits_of_dumps)}),
    # A dump of some kilobytes may be of the last of 131,072 ranks, and all of them are looked at.
    *kinds_of("dumps", _DUMPS, {"far-rank": _dumped(_far_rank)}, most_cpu_s_per_mb=3.0),
    # A file takes 4 ms.
    *kinds_of("hang", _HANGS, {"other-faults": _dumped(_other_faults), "links": _links}, most_cpu_s=8.0),
    *json_kinds("kineto-json", _KINETO, lambda _: _kineto_events(), _put_kineto, **_OF_KINETO),
    *kinds_of("nsys", "exports of Nsight Systems", {"bits": _nsys_bits}),
    *kinds_of("wia", _WIA, {"bytes": _wia_bytes}, **_OF_WIA),
    *json_kinds("wia-timeline", _WIA, _wia_timeline, _put_wia_timeline, **_OF_WIA),
    Hostile(name="junk", group="folders of mixed junk", make=_junk),
    Hostile(name="pack-bytes", group="packs", make=_pack, most_lines=100),
)
