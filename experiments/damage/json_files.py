"""JSON made hostile: sound documents whose values are exchanged, nested, long or many, or whose bytes are hurt.

One table of changes is applied to every JSON that hpcpace reads: files in run directories, the index of a history,
snapshots of audits, saved probes, reports of NCCL's RAS, dumps of the Flight Recorder. Some formats have further kinds:
what only their own rules make costly.
"""

from __future__ import annotations

import json
import pickle
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass, replace
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from experiments.damage import hostile_files as engine
from experiments.damage.chance import Random
from experiments.damage.specimen import snapshot_of
from experiments.synthetic_run import SyntheticRun
from hpcpace.core.config import Config
from hpcpace.core.rundir import HISTORY_INDEX, RunDirectory, json_text
from hpcpace.diagnosis.analyze import Selection, analyze_traces
from hpcpace.hang.notices import Notice, write
from hpcpace.probe.record import CopiesRecord, LatencyLaw, NoiseRecord, PairsRecord, ProbedHost, ProbeRecord, RankSkew
from hpcpace.probe.record import SweepRow as Row
from hpcpace.runs.history_row import indexed_runs, sealed
from hpcpace.trace.attempt_reader import read_attempt

Place = Callable[[Path, bytes, Random], engine.Call]
"""Puts a document where a command reads it."""
Sound = Callable[[Path], Any]
"""Returns the values of a sound document, always new ones; it may put into the folder what goes with it."""
Change = Callable[[Any, Random], bytes]
_ODD = (
    None, True, False, -1, 0, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, -1e308, 5e-324, 0.1,
    float("nan"), float("inf"), float("-inf"), "", "0", "1e999", "nan", "\x00", "\ud800", engine.CONTROL,
    "/dev/zero", "$(id)", "../../../etc/passwd", "9" * 4000, [], {}, [[]], [{}], {"": ""}, {"rank": 0}, [0], [None],
    ["a", 1], {"a": {"b": {}}},
)  # fmt: skip
_ESCAPES = (
    "\x1b[31m", "\x1b]0;title\x07", "\r", "\x00", "\u202e", "\u2066", "\ud800", "\x9b2J", "\n\n", "=cmd|' /C calc'!A0",
    "<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "{{7*7}}", "%s%n", "'\"><b>",
)  # fmt: skip
_LITERALS = ("1e400", "-1e400", "1e-400", "-0.0", "NaN", "Infinity", "18446744073709551616", "1.", "01", "+1", "'a'")
"""Numbers that JSON's own writers never write, and some that are none."""
_LAST_DIGITS = re.compile(r"(?<![.\d])\d{1,6}(?=[\",}\]])")
_LONG = ("a", " ", "\\u001b[2J", "\\ud83d\\ude00", "\u00e4", "9", "\\n", "../", "[", "host[0-9]", "0,")


def _text(content: Any) -> bytes:
    return json.dumps(content).encode("utf-8", "surrogatepass")


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of all values below."""
    found, left = [], [content]
    while left:
        one = left.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        found += [(one, key) for key in keys]
        left += [one[key] for key in keys]
    return found


def _values(content: Any, random: Random) -> bytes:
    """Exchange a few values for odd ones, or leave them out."""
    for _ in range(random.count(1, 6)):
        if places := _places(content):
            container, key = random.of(places)
            container[key] = random.of(_ODD)
            if random.maybe(0.15):
                del container[key]
    return _text(content)


def _with(text: Callable[[Any, Random], str]) -> Change:
    """Return the change that puts a text in place of a value, or of all of a document."""

    def change(content: Any, random: Random) -> bytes:
        made, places = text(content, random), _places(content)
        if not places or random.maybe(0.1):
            return made.encode("utf-8", "surrogatepass")
        container, key = random.of(places)
        container[key] = "@here@"
        return json.dumps(content).replace('"@here@"', made).encode("utf-8", "surrogatepass")

    return change


def _deep(content: Any, random: Random) -> str:
    depth = random.size(100, 1_000_000)
    sign, middle, close = random.one(("[", "", "]"), ('{"a":', "0", "}"))
    return str(sign * depth + middle + close * random.one(depth, depth, depth, 0))


def _long(content: Any, random: Random) -> str:
    letter = random.of(_LONG)
    text = letter * (random.text_size() // len(letter))
    return text if letter == "9" and random.maybe() else f'"{text}"'


def _wide(content: Any, random: Random) -> str:
    row = json.dumps(random.of(_ODD))
    return f"[{','.join([row] * (random.text_size() // (len(row) + 1) + 1))}]"


def _many(content: Any, random: Random) -> bytes:
    """Repeat a row of a list in its place, as it is, or with all of its numbers and names numbered."""
    content = {"content": content}
    lists = [(container, key) for container, key in _places(content) if isinstance(container[key], list)]
    container, key = random.of(
        [(container, key) for container, key in lists if container[key]] or [(content, "content")]
    )
    row = json.dumps(container[key][0] if isinstance(container[key], list) else container[key])
    first = random.one(0, 0, 1 << 53, (1 << 63) - 100_000)
    rows = [row] * (random.text_size() // len(row) + 1)
    if random.maybe():
        rows = [_LAST_DIGITS.sub(str(first + number), one) for number, one in enumerate(rows)]
    container[key] = "@here@"
    return json.dumps(content["content"]).replace('"@here@"', f"[{','.join(rows)}]").encode("utf-8", "surrogatepass")


def _keys(content: Any, random: Random) -> str:
    name = random.one("k{}", "rank{}", "1{}", "\\u001b[{}m", "same")
    return "{" + ",".join(f'"{name.format(n)}":{n % 7}' for n in range(random.text_size() // 20)) + "}"


def _bytes(content: Any, random: Random) -> bytes:
    found = random.changed(_text(content), 20)
    return bytes(found[: random.count(0, len(found) + 1)] if random.maybe(0.3) else found)


def _other(_: Any, random: Random) -> bytes:
    """Return what is no such document at all."""
    size = random.text_size()
    short = (b"", b"null", b"0", b'""', b"[]", b"{}", b"\xff\xfe{\x00}\x00", b"{" * 9, b"\xef\xbb\xbf{}")
    long = (b"\0" * size, random.bytes(size), b"-" * size, b"9" * size, b'"' + b"\\" * size, _text(random.of(_ODD)))
    return bytes(random.one(*short, *long))


def _literals(content: Any, random: Random) -> str:
    """Return one literal that no writer writes, or a number of thousands of digits."""
    digits = "9" * random.one(400, 4_000, 5_000) + random.one("", ".0", "e5", "e-5")
    return str(random.one(*_LITERALS, digits))


def _escapes(content: Any, random: Random) -> bytes:
    """Put texts that would steer a terminal or run in a page in the place of all texts."""
    for container, key in _places(content):
        if isinstance(container[key], str) and key != "schema":
            container[key] = random.of(_ESCAPES)
    return _text(content)


_CHANGES: dict[str, Change] = {
    **{
        "values": _values,
        "deep": _with(_deep),
        "long": _with(_long),
        "wide": _with(_wide),
        "many": _many,
        "keys": _with(_keys),
    },
    **{"bytes": _bytes, "other": _other, "literals": _with(_literals), "escapes": _escapes},
}


def _changed(sound: Sound, place: Place, change: Change) -> engine.Make:
    return lambda folder, random: place(folder, change(sound(folder), random), random)


def json_kinds(prefix: str, group: str, sound: Sound, place: Place, **bounds: Any) -> list[engine.Hostile]:
    """Return the kinds of one document.

    Args:
        prefix: of their names.
        group: the row of the table.
        sound: a sound document.
        place: puts a document where it is read.
        bounds: of `Hostile`.
    """
    made = {name: _changed(sound, place, change) for name, change in _CHANGES.items()}
    return engine.kinds_of(prefix, group, made, **bounds)


_PLAIN = ((bool, True), (int, 1), (float, 1.0), (str, "n1"))


def sample(kind: Any, /, **known: Any) -> Any:
    """Return a sound value of an annotated type: of a record, fields by their names, others plain values."""
    if is_dataclass(kind):
        hints = get_type_hints(kind).items()
        values = {name: known[name] if name in known else sample(hint, **known) for name, hint in hints}
        return kind(**values)
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple:
        return (sample(args[0], **known),)
    if origin is dict:
        return {sample(args[0]): sample(args[1])}
    if origin is UnionType:
        return sample(args[0], **known)
    if issubclass(kind, Enum):
        return next(iter(kind))
    return next(kind(value) for base, value in _PLAIN if issubclass(kind, base))


# The JSON files of a run


def _put(name: str, folder: Path, content: bytes, random: Random) -> engine.Call:
    """Put a file into a sound run and call a command that reads it."""
    run, other = engine.sound_run(folder / "run"), str(engine.sound_run(folder / "other", nodes=4))
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(content)
    path = str(run)
    calls = (
        *(("report", path), ("hang", path), ("timeline", path), ("audit", "--from", path), ("watch", path, "--once")),
        *(("list", str(folder)), ("list", str(folder), "--json"), ("history", str(folder))),
        *(("compare", other, path), ("scale", other, path), ("collect", path, "--trace-dir", path)),
    )
    return engine.Call(arguments=random.of(calls), num_bytes=engine.size_bytes(folder))


@cache
def _summary_text() -> str:
    with tempfile.TemporaryDirectory() as name:
        run = RunDirectory(engine.sound_run(Path(name) / "run"))
        attempt = run.attempts()[-1]
        return json_text(analyze_traces(run, attempt, read_attempt(attempt), Selection()).summary.to_json())


@cache
def _notice_text() -> str:
    with tempfile.TemporaryDirectory() as name:
        attempt = RunDirectory(Path(name) / "run").new_attempt()
        write(attempt, sample(Notice, op="all_reduce", ended="resumed", frames=("train.py:1 in main",)))
        (path,) = (attempt.path / "hang").iterdir()
        return path.read_text()


_RUN_FILES, _REPORT = "JSON files of a run", {"most_lines": 100}
"""A report of a few ranks has about 80."""


# The index of a history: with sound seals, so that its content counts


def _index(folder: Path) -> Any:
    engine.sound_run(folder / "run")
    indexed_runs(folder, Config(), progress=lambda done, total: None)
    return json.loads((folder / HISTORY_INDEX).read_text())


def _put_index(folder: Path, content: bytes, random: Random) -> engine.Call:
    (folder / HISTORY_INDEX).write_bytes(content)
    return engine.Call(arguments=("history", str(folder)), num_bytes=engine.size_bytes(folder))


def _history(folder: Path, random: Random) -> engine.Call:
    size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())
    return engine.Call(arguments=(random.one("history", "list"), str(folder)), num_bytes=min(size, 1 << 27))


def _planted(folder: Path, content: bytes, random: Random) -> engine.Call:
    """Put an index whose entries were changed, sealed as if hpcpace wrote it, where it still is one."""
    with suppress(ValueError, RecursionError, AttributeError):
        content = sealed(json.loads(content))
    (folder / HISTORY_INDEX).write_bytes(content)
    return _history(folder, random)


def _runs(folder: Path) -> Any:
    """Return the entries of two runs."""
    for name in ("a", "b"):
        SyntheticRun(hosts=("n1", "n2"), num_ranks=2, num_steps=24).write(folder / name)
    indexed_runs(folder)
    return json.loads((folder / HISTORY_INDEX).read_bytes())["runs"]


def _many_runs(folder: Path, random: Random) -> engine.Call:
    """Return a call on a folder with very many folders, links and files."""
    for number in range(random.size(500, 5_000)):
        path = folder / f"run-{number}"
        below = random.one("/", "", "attempt-0", f"attempt-{'9' * random.count(1, 200)}", "a/b/c/d")
        if below == "/":
            path.symlink_to("/")
        elif below:
            (path / below).mkdir(parents=True)
        else:
            path.write_text("x")
    return replace(_history(folder, random), num_bytes=4_000_000)


_INDEX = "history index"
_INDEX_BOUNDS: dict[str, Any] = {"most_cpu_s": 1.0, "most_memory_bytes": 256 << 20}


# Snapshots of audits

_SNAPSHOTS = "snapshots of audits"
sound_snapshot = cache(partial(snapshot_of, "n0"))


def _put_snapshot(folder: Path, content: bytes, random: Random) -> engine.Call:
    (folder / "n0.json").write_text(sound_snapshot())
    (folder / "n1.json").write_bytes(content)
    options = random.one((), ("--json",), ("--matrix",), ("--show",), ("--map",), ("--prometheus",))
    return engine.Call(arguments=("audit", "--from", str(folder), *options), num_bytes=engine.size_bytes(folder))


def _many_snapshots(folder: Path, random: Random) -> engine.Call:
    """Hundreds of hosts that differ in everything."""
    content = json.loads(sound_snapshot())
    for host in range(max(random.text_size() // len(sound_snapshot()), 2)):
        content["host"] = f"{'' if random.maybe(0.9) else engine.CONTROL}n{host}"
        (folder / f"n{host:05d}.json").write_text(json.dumps(content))
    return engine.Call(arguments=("audit", "--from", str(folder)), num_bytes=engine.size_bytes(folder))


# Saved probes: what `report` and `scale` read beside a run, and what a later probe is compared with

_PROBES, _PROBED = "saved probes", ("n1", "n2")
_PROBED_RUN = SyntheticRun(num_ranks=4, num_steps=12, hosts=_PROBED)


@cache
def _probe_text() -> str:
    """Return a probe of two hosts with all parts."""
    on_both = {"op": "all_reduce", "num_nodes": 2, "num_ranks": 4, "host": "n1", "carrier": "TCP over eth0"}
    row, law = (
        sample(Row, size_bytes=64, **on_both),
        sample(LatencyLaw, from_bytes=0.0, least_bytes=64, most_bytes=1 << 26, **on_both),
    )
    host = partial(sample, ProbedHost, interfaces=("eth0",), rate_words="10 Gb/s")
    record = ProbeRecord(
        **{"cluster": "", "job_id": "7", "device": "cpu", "device_name": "", "backend": "gloo", "time_s": 60.0},
        **{"versions": {"hpcpace": "0.1.0"}, "started_unix_ns": 1_795_000_000_000_000_000, "part_s": {"sweep": 30.0}},
        hosts=tuple(host(name=name, ranks=(2 * n, 2 * n + 1)) for n, name in enumerate(_PROBED)),
        sweep=(row, replace(row, size_bytes=1024)),
        laws=(law, replace(law, op="broadcast")),
        skews=tuple(sample(RankSkew, rank=rank, host=_PROBED[rank // 2]) for rank in range(4)),
        pairs=sample(PairsRecord, second="n2", target="n2", kind="link", way="sends", measure="rate", **on_both),
        noise=sample(NoiseRecord, **on_both),
        copies=sample(CopiesRecord, **on_both),
        problems=("n3 did not answer",),
    )
    return json.dumps(record.to_json())


def _probe(_: Path | None = None) -> Any:
    return json.loads(_probe_text())


def _read_probe(folder: Path, random: Random) -> engine.Call:
    """Return a call that reads the probe in the folder that gets the run."""
    run, path = _PROBED_RUN.write(folder / "run"), folder / "probe.json"
    arguments = (random.one("report", "scale", ""), "--probe", str(path), str(run.path))
    if not arguments[0]:
        path = path.rename(run.attempt(0).probe_json)
        arguments = ("report", str(run.path))
    num_bytes = path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    return engine.Call(arguments=arguments, num_bytes=num_bytes + 200_000)


def _put_probe(folder: Path, content: bytes, random: Random) -> engine.Call:
    (folder / "probe.json").write_bytes(content)
    return _read_probe(folder, random)


_VERSIONS = ("hpcpace-probe/2", "hpcpace-probe/" + "9" * 100_000, "hpcpace-probe/\x1b[31m", "hpcpace-trial/1", 7, None)


def _probe_versions(folder: Path, random: Random) -> engine.Call:
    return _put_probe(folder, _text({**_probe(), "schema": random.of(_VERSIONS)}), random)


def _probe_against(folder: Path, random: Random) -> engine.Call:
    """Compare a new probe with one to which anything was done."""
    path = folder / "probe.json"
    path.write_bytes(random.of([*_CHANGES.values()])(_probe(), random))
    arguments = ("probe", "--time", "1", "--only", "noise", "--other-hosts", "--against", str(path))
    return engine.Call(arguments=arguments, num_bytes=path.stat().st_size)


# Dumps of the Flight Recorder, and reports of NCCL's RAS beside those of a small job

_DUMPS, _RAS, _WORLD = "Flight Recorder dumps", "reports of NCCL RAS", 4
_BEGIN_NS = 1_758_610_505_000_000_000
Content = dict[str, Any]


def entry(number: int, **changes: Any) -> Content:
    """Return an operation that has not finished."""
    return {
        **{"record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "profiling_name": "nccl:all_reduce"},
        **{"collective_seq_id": number + 1, "p2p_seq_id": 0, "is_p2p": False, "state": "scheduled", "retired": False},
        **{"input_sizes": [[16, 2]], "input_dtypes": ["Float"], "output_sizes": [[16, 2]], "output_dtypes": ["Float"]},
        **{"time_created_ns": _BEGIN_NS + number * 10_000_000, "time_discovered_started_ns": None},
        **{"time_discovered_completed_ns": None, "frames": [{"name": "step", "filename": "train.py", "line": 44}]},
        **changes,
    }


def dump(entries: list[Content], *, world: int = 2, **changes: Any) -> Content:
    """Return a dump of a job whose only group has all ranks."""
    return {
        **{"version": "2.10", "comm_lib_version": "2.27.3", "entries": entries},
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}},
        "pg_status": {"0": {"last_enqueued_collective": len(entries)}},
        **changes,
    }


def write_dumps(folder: Path, contents: Mapping[str, Any]) -> int:
    """Write dumps by their names, and return their bytes; what is bytes already is written as it is."""
    num_bytes = 0
    for name, content in contents.items():
        data = content if isinstance(content, bytes) else pickle.dumps(content, 2)
        num_bytes += (folder / name).write_bytes(data)
    return num_bytes


def hang(folder: Path, num_bytes: int, *options: str) -> engine.Call:
    """Return the call on a folder of dumps."""
    return engine.Call(arguments=("hang", str(folder), *options), num_bytes=num_bytes)


def _ras_report(_: Path) -> Any:
    def of(rank: int) -> Any:
        status = {"unresponsive": False, "considered_dead": False}
        counts = {"status": status, "collective_counts": {"Broadcast": 0, "AllReduce": 6}}
        return {"rank": rank, "host": "10.0.0.1", "pid": 100 + rank, "cuda_dev": rank, "nvml_dev": rank, **counts}

    whole = {"hash": "0x1", "size": _WORLD, "ranks": [*map(of, range(_WORLD))], "missing_ranks": [of(3)]}
    return {"nccl_version": "2.28.9", "timestamp": "2026-11-24 09:00:00", "communicators": [whole]}


def _put_ras(folder: Path, content: bytes, random: Random) -> engine.Call:
    place, path = folder / "dumps", folder / "ras.json"
    place.mkdir()
    found = {f"rank_{rank}": dump([entry(0)] if rank != 2 else [], world=_WORLD) for rank in range(_WORLD)}
    return hang(place, write_dumps(place, found) + path.write_bytes(content), "--ras", str(path))


def _put_dump(folder: Path, content: bytes, random: Random) -> engine.Call:
    return hang(folder, write_dumps(folder, {"rank_0.json": content}))


def _loaded(text: Callable[[], str]) -> Sound:
    return lambda _: json.loads(text())


_DOCUMENTS: dict[str, tuple[str, Callable[[], str]]] = {
    "run-json": ("attempt-0/run.json", partial(engine.sound_text, "run.json")),
    "summary-json": ("summary.json", _summary_text),
    "trial-json": ("attempt-0/trial.json", partial(engine.sound_text, "trial.json")),
    "notice": ("attempt-0/hang/rank-00000.json", _notice_text),
}
"""By the prefix of their kinds: where they are in a run, and a sound one."""


KINDS = (
    *(
        kind
        for prefix, (name, text) in _DOCUMENTS.items()
        for kind in json_kinds(prefix, _RUN_FILES, _loaded(text), partial(_put, name), **_REPORT)
    ),
    *json_kinds("history-index", _INDEX, _index, _put_index),
    *json_kinds("history-sealed", _INDEX, _runs, _planted, most_lines=80, **_INDEX_BOUNDS),
    # `list` has a row for each run.
    *engine.kinds_of("history", _INDEX, {"many-runs": _many_runs}, most_lines=12_000, **_INDEX_BOUNDS),
    # A matrix or a picture of a host takes more than a screen.
    *json_kinds("snapshot", _SNAPSHOTS, _loaded(sound_snapshot), _put_snapshot, most_lines=200),
    *engine.kinds_of("snapshot", _SNAPSHOTS, {"many-hosts": _many_snapshots}),
    *json_kinds("probe", _PROBES, _probe, _put_probe, **_REPORT),
    *engine.kinds_of("probe", _PROBES, {"versions": _probe_versions}, **_REPORT),
    # The probe that is compared is measured: that takes torch and a second of all cores.
    *engine.kinds_of("probe", _PROBES, {"against": _probe_against}, most_cpu_s=12.0, **_REPORT),
    *json_kinds("ras", _RAS, _ras_report, _put_ras),
    *json_kinds("dumps-json", _DUMPS, lambda _: dump([entry(n) for n in range(3)]), _put_dump),
)
