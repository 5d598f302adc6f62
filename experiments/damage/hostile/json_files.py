"""JSON made hostile: sound documents whose values are exchanged, nested, long or many, or whose bytes are hurt.

One table of changes is applied to every JSON that hpcpace reads: files in run directories, the index of a history,
snapshots of audits, saved probes, reports of NCCL's RAS, dumps of the Flight Recorder. Some formats have further kinds:
what only their own rules make costly.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from experiments.damage.hostile import dumps
from experiments.damage.hostile.engine import (
    CONTROL,
    Call,
    Hostile,
    Make,
    Random,
    kinds_of,
    one_of,
    put_no_file,
    secret_file,
    size_between,
    size_bytes,
    sound_run,
    text_size,
    with_changed_bytes,
)
from experiments.synthetic_run import SyntheticRun
from hpcpace.audit.snapshot import take_host
from hpcpace.audit.snapshot_files import snapshot_text
from hpcpace.audit.tree import Tree
from hpcpace.core.config import Config
from hpcpace.core.rundir import HISTORY_INDEX, RunDirectory, json_text
from hpcpace.diagnosis.analyze import Selection, analyze_traces
from hpcpace.hang.notices import Notice, NoticedCall, NoticedCount, NoticedGroup, ThreadStack, write
from hpcpace.probe.record import (
    BisectionRow,
    CopiesRecord,
    CoreFigures,
    CoreNoise,
    DeviceRate,
    LatencyLaw,
    LawPiece,
    LinkFinding,
    MemoryRate,
    NoiseRecord,
    PairRow,
    PairsRecord,
    ProbedHost,
    ProbeRecord,
    RankSkew,
    SweepRow,
)
from hpcpace.runs.history_index import indexed_runs, sealed
from hpcpace.trace.attempt_reader import read_attempt

Place = Callable[[Path, bytes, Random], Call]
"""Puts a document where a command reads it."""
Sound = Callable[[Path], Any]
"""Returns the values of a sound document, always new ones; it may put into the folder what goes with it."""
_ODD = (
    None, True, False, -1, 0, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, -1e308, 5e-324, 0.1,
    float("nan"), float("inf"), float("-inf"), "", "0", "1e999", "nan", "\x00", "\ud800", CONTROL, "/dev/zero", "$(id)",
    "../../../etc/passwd", "9" * 4000, [], {}, [[]], [{}], {"": ""}, {"rank": 0}, [0], [None], ["a", 1],
    {"a": {"b": {}}},
)  # fmt: skip
_ESCAPES = (
    "\x1b[31m", "\x1b]0;title\x07", "\r", "\x00", "\u202e", "\u2066", "\ud800", "\x9b2J", "\n\n", "=cmd|' /C calc'!A0",
    "<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "{{7*7}}", "%s%n", "'\"><b>",
)  # fmt: skip
_LITERALS = ("1e400", "-1e400", "1e-400", "-0.0", "NaN", "Infinity", "18446744073709551616", "1.", "01", "+1", "'a'")
"""Numbers that JSON's own writers never write, and some that are none."""


def kinds(prefix: str, format_: str, sound: Sound, place: Place, **bounds: Any) -> list[Hostile]:
    """Return the kinds of one document.

    Args:
        prefix: of their names.
        format_: the row of the table.
        sound: a sound document.
        place: puts a document where it is read.
        bounds: of `Hostile`.
    """

    def maker(change: Callable[[Any, Random], bytes]) -> Make:
        return lambda folder, random: place(folder, change(sound(folder), random), random)

    return kinds_of(prefix, format_, {name: maker(change) for name, change in _CHANGES.items()}, **bounds)


def _text(content: Any) -> bytes:
    return json.dumps(content).encode("utf-8", "surrogatepass")


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of all values below."""
    found, left = [], [content]
    while left:
        one = left.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            found.append((one, key))
            left.append(one[key])
    return found


def _values(content: Any, random: Random) -> bytes:
    """Exchange a few values for odd ones, or leave them out."""
    for _ in range(int(random.integers(1, 6))):
        places = _places(content)
        if not places:
            break
        container, key = one_of(places, random)
        if random.random() < 0.15:
            del container[key]
        else:
            container[key] = one_of(_ODD, random)
    return _text(content)


def _in_place_of(content: Any, random: Random, text: str) -> bytes:
    """Return a document with a text in place of a value, or of all of it."""
    places = _places(content)
    if not places or random.random() < 0.1:
        return text.encode("utf-8", "surrogatepass")
    container, key = one_of(places, random)
    container[key] = "@here@"
    return json.dumps(content).replace('"@here@"', text).encode("utf-8", "surrogatepass")


def _deep(content: Any, random: Random) -> bytes:
    depth = int(10 ** random.uniform(2, 6))
    sign, close = one_of((("[", "]"), ('{"a":', "}")), random)
    middle = "" if sign == "[" else "0"
    return _in_place_of(content, random, sign * depth + middle + (close * depth if random.random() < 0.8 else ""))


def _long(content: Any, random: Random) -> bytes:
    letters = ("a", " ", "\\u001b[2J", "\\ud83d\\ude00", "\u00e4", "9", "\\n", "../", "[", "host[0-9]", "0,")
    letter = one_of(letters, random)
    text = letter * (text_size(random) // len(letter))
    is_number = letter == "9" and random.random() < 0.5
    return _in_place_of(content, random, text if is_number else f'"{text}"')


def _wide(content: Any, random: Random) -> bytes:
    places = _places(content)
    lists = [container[key] for container, key in places if isinstance(container[key], list) and container[key]]
    row = json.dumps(one_of(one_of(lists, random), random) if lists and random.random() < 0.6 else one_of(_ODD, random))
    rows = ",".join([row] * (text_size(random) // (len(row) + 1) + 1))
    return _in_place_of(content, random, f"[{rows}]")


def _keys(content: Any, random: Random) -> bytes:
    count = text_size(random) // 20
    name = one_of(("k{}", "rank{}", "1{}", "\\u001b[{}m", "same"), random)
    return _in_place_of(content, random, "{" + ",".join(f'"{name.format(n)}":{n % 7}' for n in range(count)) + "}")


def _bytes(content: Any, random: Random) -> bytes:
    found = with_changed_bytes(_text(content), 20, random)
    return bytes(found[: int(random.integers(len(found) + 1))] if random.random() < 0.3 else found)


def _other(_: Any, random: Random) -> bytes:
    """Return what is no such document at all."""
    size = text_size(random)
    found: bytes = one_of(
        (b"", b"null", b"0", b'""', b"[]", b"{}", b"\xff\xfe{\x00}\x00", b"\0" * size, random.bytes(size), b"{" * 9,
         b"\xef\xbb\xbf{}", b"-" * size, b"9" * size, b'"' + b"\\" * size, _text(one_of(_ODD, random))),
        random,
    )  # fmt: skip
    return found


def _literals(content: Any, random: Random) -> bytes:
    """Put one literal that no writer writes, or a number of thousands of digits, in the place of a value."""
    digits = "9" * int(one_of((400, 4_000, 5_000), random)) + str(one_of(("", ".0", "e5", "e-5"), random))
    return _in_place_of(content, random, one_of((*_LITERALS, digits), random))


def _escapes(content: Any, random: Random) -> bytes:
    """Put texts that would steer a terminal or run in a page in the place of all texts."""
    for container, key in _places(content):
        if isinstance(container[key], str) and key != "schema":
            container[key] = one_of(_ESCAPES, random)
    return _text(content)


_CHANGES: dict[str, Callable[[Any, Random], bytes]] = {
    "values": _values,
    "deep": _deep,
    "long": _long,
    "wide": _wide,
    "keys": _keys,
    "bytes": _bytes,
    "other": _other,
    "literals": _literals,
    "escapes": _escapes,
}


# The JSON files of a run


def _commands(folder: Path, run: Path) -> tuple[tuple[str, ...], ...]:
    """Return the commands that read the files of a run."""
    other = str(sound_run(folder / "other", nodes=4))
    return (
        ("report", str(run)),
        ("list", str(folder)),
        ("list", str(folder), "--json"),
        ("history", str(folder)),
        ("compare", other, str(run)),
        ("scale", other, str(run)),
        ("watch", str(run), "--once"),
        ("hang", str(run)),
        ("timeline", str(run)),
        ("collect", str(run), "--trace-dir", str(run)),
        ("audit", "--from", str(run)),
    )


def _put(name: str, folder: Path, content: bytes, random: Random) -> Call:
    """Put a file into a sound run and call a command that reads it."""
    run = sound_run(folder / "run")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(content)
    return Call(arguments=one_of(_commands(folder, run), random), num_bytes=size_bytes(folder))


def _record(_: Path) -> Any:
    return {
        "schema": "hpcpace-run/1",
        "name": "run",
        "created_unix_ns": 1_790_000_000_000_000_000,
        "ranks": [{"rank": rank, "host": f"n{rank}", "node": rank, "pid": 100 + rank} for rank in range(2)],
        "versions": {"hpcpace": "0.1.0", "python": "3.11.7", "torch": "2.9.0"},
        "environment": {"SLURM_JOB_ID": "17", "HPCPACE_LAB_EMULATION": "1"},
        "command": ["python", "train.py"],
        "config": {"trace": {"trace_dir": "/nonexistent", "detail": "full"}, "pace": {"policy": "auto"}},
        "workload": {"name": "gpt2", "parameters": 1000, "mesh": "dp=2"},
        "network": {"interfaces": [{"name": "eth0", "speed_mbps": 100}]},
        "clock": {"offsets_ns": [0, 1]},
    }


@cache
def _summary_text() -> str:
    with tempfile.TemporaryDirectory() as name:
        run = RunDirectory(sound_run(Path(name) / "run"))
        attempt = run.attempts()[-1]
        return json_text(analyze_traces(run, attempt, read_attempt(attempt), Selection()).summary.to_json())


@cache
def _notice_text() -> str:
    call = NoticedCall(
        group="default_pg", op="all_reduce", seq=20, size_bytes=8, peer=-1, entered_ns=8 * 10**9, step=19
    )
    notice = Notice(
        rank=0, host="n0", pid=100, host_key="n0", time_ns=9 * 10**9, unix_ns=1_790_000_000 * 10**9,
        first_time_ns=8 * 10**9,
        num_looks=2, step=19, step_age_ns=60 * 10**9, limit_ns=30 * 10**9, usual_step_ns=10**8, is_first_step=False,
        groups=(NoticedGroup(name="default_pg", members=(0, 1)),),
        calls=(call,),
        entered=(NoticedCount(group="default_pg", source=-1, destination=-1, num_entered=21),),
        is_complete=True, stacks=(ThreadStack(name="MainThread", is_training=True, frames=("train.py:1 in main",)),),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        attempt = RunDirectory(Path(name) / "run").new_attempt()
        write(attempt, notice)
        return attempt.hang_file(0).read_text()


def _trial(_: Path) -> Any:
    effect = {"value": 0.03, "interval": [0.01, 0.05]}
    return {
        "schema": "hpcpace-trial/1",
        "policy": "auto",
        "tried": "delay",
        "is_on": True,
        "sentence": "pacing on: 3 % faster",
        "reason": "",
        "points": [{"name": "optimizer", "share": 0.5}],
        "mechanisms": ["gc"],
        "facts": {"gc_share": 0.1},
        "seed": 1,
        "trial": {"outcome": "kept", "effect": effect, "is_on": True},
        "num_harms": 0,
        "collections": {"off": {"count": 1}, "on": {"count": 0}},
    }


_RUN_FILES = "JSON files of a run"
_REPORT = {"most_lines": 100}
"""A report of a few ranks has about 80."""


# The index of a history: with sound seals, so that its content counts


def _index(folder: Path) -> Any:
    sound_run(folder / "run")
    indexed_runs(folder, Config(), progress=lambda done, total: None)
    return json.loads((folder / HISTORY_INDEX).read_text())


def _put_index(folder: Path, content: bytes, random: Random) -> Call:
    (folder / HISTORY_INDEX).write_bytes(content)
    return Call(arguments=("history", str(folder)), num_bytes=size_bytes(folder))


def _two_runs(folder: Path) -> None:
    """Write two runs, and the index of them."""
    for name in ("a", "b"):
        SyntheticRun(hosts=("n1", "n2"), num_ranks=2, num_steps=24).write(folder / name)
    indexed_runs(folder)


def _history(folder: Path, random: Random, *, says: tuple[str, ...] = ()) -> Call:
    command = one_of(("history", "list"), random)
    size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())
    shown = says if command == "history" else ()
    return Call(arguments=(command, str(folder)), num_bytes=min(size, 1 << 27), says=shown)


def _planted(change: Callable[[dict[str, Any], Random], None]) -> Make:
    """Return what makes a call on an index whose entries were changed, and that is sealed as if hpcpace wrote it."""

    def make(folder: Path, random: Random) -> Call:
        _two_runs(folder)
        runs = json.loads((folder / HISTORY_INDEX).read_bytes())["runs"]
        change(runs, random)
        (folder / HISTORY_INDEX).write_bytes(sealed(runs))
        return _history(folder, random, says=("2 runs",))

    return make


def _index_values(runs: dict[str, Any], random: Random) -> None:
    odd = (10**400, -1, float("nan"), float("inf"), None, [], {}, "", "\x1b]0;a\x07", True, "x" * 99_999)
    for entry in runs.values():
        for name in entry["row"]:
            if random.random() < 0.3:
                entry["row"][name] = one_of(odd, random)


def _index_entries(runs: dict[str, Any], random: Random) -> None:
    """Add entries of runs that are not there."""
    row = runs["a"]["row"]
    for number in range(size_between(random, 100, 5_000)):
        runs[f"x{number}"] = {"stamp": runs["a"]["stamp"], "row": {**row, "run": f"x{number}"}, "problem": ""}


def _index_hosts(runs: dict[str, Any], random: Random) -> None:
    names = [f"n{number}" for number in range(size_between(random, 1_000, 60_000))]
    for entry in runs.values():
        entry["row"] |= {"run": "c", "hosts": names, "slowness": dict.fromkeys(names, 1.0)}


def _index_nested(runs: dict[str, Any], random: Random) -> None:
    value: Any = 1
    for _ in range(size_between(random, 100, 900)):
        value = [value] if random.integers(2) else {"a": value}
    runs["a"]["row"]["work"] = runs["b"]["stamp"] = value


def _index_others(runs: dict[str, Any], random: Random) -> None:
    """Let entries name the runs of others, or places outside."""
    for entry in runs.values():
        entry["row"]["run"] = one_of(("b", "../..", "/etc", ""), random)


def _index_no_file(folder: Path, random: Random) -> Call:
    """Return a call where something that is no file has the name of the index, or of a record."""
    _two_runs(folder)
    path = folder / one_of((HISTORY_INDEX, "a/summary.json", "a/attempt-0/run.json", "b/attempt-0/result.json"), random)
    path.unlink(missing_ok=True)
    put_no_file(path, random)
    return _history(folder, random)


def _many_runs(folder: Path, random: Random) -> Call:
    """Return a call on a folder with very many folders, links and files."""
    for number in range(size_between(random, 500, 5_000)):
        path = folder / f"run-{number}"
        match int(random.integers(5)):
            case 0:
                path.symlink_to("/")
            case 1:
                path.write_text("x")
            case 2:
                (path / "attempt-0").mkdir(parents=True)
            case 3:
                (path / f"attempt-{'9' * int(random.integers(1, 200))}").mkdir(parents=True)
            case _:
                (path / "a" / "b" / "c" / "d").mkdir(parents=True)
    return replace(_history(folder, random), num_bytes=4_000_000)


_INDEX = "history index"
_INDEX_BOUNDS: dict[str, Any] = {"most_cpu_s": 1.0, "most_memory_bytes": 256 << 20}


# Snapshots of audits, trees of /sys and /proc, and logs of NCCL

_SNAPSHOTS, _TREES, _LOGS = "snapshots of audits", "trees of /sys and /proc", "logs of NCCL"
_OF_TREES = (
    "sys/devices/system/node", "sys/devices/system/cpu/cpu0/topology", "sys/class/net", "sys/bus/pci/devices",
    "sys/class/infiniband", "sys/class/drm", "proc/sys/net/core", "proc/sys/kernel",
)  # fmt: skip
_TREE_VALUES = (
    "", "0", "-1", "1e9", "9" * 18, "9" * 4000, "nan", "0-", "0-4294967295", "0-3,5,2-1", "," * 1000, "0x" + "f" * 9999,
    "ffffffff," * 400, "Ä", "\x00\xff", CONTROL, "\n" * 5000, "[always] madvise never", "../../../../etc/shadow",
    "0000:00:00.0",
)  # fmt: skip


@cache
def _snapshot_text() -> str:
    return snapshot_text(take_host(Tree(), host="n0"))


def _put_snapshot(folder: Path, content: bytes, random: Random) -> Call:
    (folder / "n0.json").write_text(_snapshot_text())
    (folder / "n1.json").write_bytes(content)
    options = one_of(((), ("--json",), ("--matrix",), ("--show",), ("--map",), ("--prometheus",)), random)
    return Call(arguments=("audit", "--from", str(folder), *options), num_bytes=size_bytes(folder))


def _many_snapshots(folder: Path, random: Random) -> Call:
    """Hundreds of hosts that differ in everything."""
    content = json.loads(_snapshot_text())
    for host in range(max(text_size(random) // len(_snapshot_text()), 2)):
        content["host"] = f"n{host}" if random.random() < 0.9 else f"{CONTROL}{host}"
        (folder / f"n{host:05d}.json").write_text(json.dumps(content))
    return Call(arguments=("audit", "--from", str(folder)), num_bytes=size_bytes(folder))


def _tree(folder: Path, random: Random) -> Call:
    """Copy what an audit reads of this machine, with values exchanged, and links, pipes and loops among them."""
    for path in [path for name in _OF_TREES for path in islice(Path("/", name).rglob("*"), 60)]:
        copy = folder / path.relative_to("/")
        try:
            if path.is_symlink():
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.symlink_to(os.readlink(path))
            elif path.is_file() and random.random() < 0.9:
                copy.parent.mkdir(parents=True, exist_ok=True)
                _put_value(copy, path, random)
            elif path.is_dir():
                copy.mkdir(parents=True, exist_ok=True)
        except OSError:  # what this machine does not show, or what has a link above it
            continue
    return Call(arguments=("audit", "--sysfs-root", str(folder)), num_bytes=size_bytes(folder))


def _put_value(copy: Path, path: Path, random: Random) -> None:
    chance = random.random()
    if chance < 0.3:
        copy.write_bytes(str(one_of(_TREE_VALUES, random)).encode())
    elif chance < 0.35:
        copy.write_bytes(random.bytes(text_size(random) // 20))
    elif chance < 0.37:
        os.mkfifo(copy)
    elif chance < 0.4:
        copy.symlink_to(one_of((secret_file(), "/dev/zero", copy.name, "..", "/"), random))
    else:
        copy.write_bytes(path.read_bytes()[:20_000])


def _wide_tree(folder: Path, random: Random) -> Call:
    """Thousands of processors, nodes or devices."""
    count = int(random.integers(1000, 5000))
    for name in ("sys/devices/system/cpu", "sys/devices/system/node", "sys/bus/pci/devices", "sys/class/net"):
        place = folder / name
        place.mkdir(parents=True)
        for number in range(count // 4):
            entry = one_of(("cpu{}", "node{}", "0000:{:02x}:00.0", "eth{}", "cpu9999999{}"), random).format(number)
            (place / entry).mkdir(exist_ok=True)
            (place / entry / one_of(("online", "cpulist", "class", "speed", "numa_node"), random)).write_text("0-1023")
    for kind in ("cpu", "node"):
        (folder / f"sys/devices/system/{kind}/online").write_text(f"0-{10 ** int(random.integers(1, 12))}")
    return Call(arguments=("audit", "--sysfs-root", str(folder)), num_bytes=size_bytes(folder) + 100 * count)


def _nccl_log(folder: Path, random: Random) -> Call:
    """Lines like those of NCCL, many, long, half, or of ranks that there are none of."""
    path = folder / "nccl.log"
    line = "n0:1:2 [0] NCCL INFO Channel 00/0 : {a}[{b}] -> {c}[0] [send] via {via}\n".format
    size, shape = text_size(random), int(random.integers(6))
    if shape == 0:
        lines = [line(a=n, b=n % 8, c=n + 1, via="NET/IB/0/GDRDMA") for n in range(size // 80)]
    elif shape == 1:
        lines = ["Channel 0" * (size // 9), "\n", line(a=0, b=0, c=1, via="P2P")]
    elif shape == 2:
        lines = [line(a=0, b="f" * size, c=1, via="A" * size), line(a=0, b=0, c=1, via="a" * 3000)]
    elif shape == 3:
        lines = ["Channel " + "0" * size + " : 0[0] -> ", line(a=9999999, b=0, c=9999999, via=CONTROL)]
    elif shape == 4:
        lines = [line(a=n % 9, b=0, c=n % 7, via=f"NET/{n}/{n}") for n in range(size // 80)]
    else:
        lines = [random.bytes(size).decode("latin-1")]
    path.write_text("".join(lines), "utf-8", "surrogatepass")
    (folder / "n0.json").write_text(_snapshot_text())
    arguments = ("audit", "--from", str(folder / "n0.json"), "--nccl-log", str(path))
    return Call(arguments=arguments, num_bytes=size_bytes(folder))


# Saved probes: what `report` and `scale` read beside a run, and what a later probe is compared with

_PROBES, _PROBED = "saved probes", ("n1", "n2")
_PROBED_RUN = SyntheticRun(num_ranks=4, num_steps=12, hosts=_PROBED)


@cache
def _probe_text() -> str:
    """Return a probe of two hosts with all parts."""
    piece = LawPiece(
        from_bytes=0.0, from_low_bytes=0.0, from_high_bytes=0.0, latency_ns=30e3, latency_low_ns=29e3,
        latency_high_ns=31e3, ns_per_byte=0.8, ns_per_byte_low=0.7, ns_per_byte_high=0.9,
    )  # fmt: skip
    last = replace(piece, from_bytes=65536.0, from_low_bytes=32768.0, from_high_bytes=131072.0)
    law = LatencyLaw(
        op="all_reduce", num_nodes=2, num_ranks=4, pieces=(piece, last), least_bytes=64, most_bytes=1 << 26,
        least_error=-0.1, most_error=0.1, single_least_error=-0.5, single_most_error=0.5,
    )  # fmt: skip
    row = SweepRow(
        op="all_reduce", num_nodes=2, num_ranks=4, size_bytes=64, num_repetitions=50, p50_ns=30e3, p95_ns=1e9,
        p99_ns=1e9, rounds_ns=(31e3, 31.1e3, 30.9e3), algbw=3.3e7, busbw=3.3e7, limit=1.25e9,
    )  # fmt: skip
    core = CoreFigures(
        share=0.001, longest_ns=12e3, num_detours=40, quantum_ns=50e3, resolution_ns=4e3, span_ns=200_000_000,
        period_ns=1e7, period_share=0.0005,
    )  # fmt: skip
    pairs = PairsRecord(
        carrier="TCP over eth0", usual=1e9, usual_of_limit=0.8, usual_latency_ns=15e3,
        rows=(PairRow(first="n1", second="n2", is_apart=True, forward=1e9, backward=9e8, least_ns=15e3),),
        bisections=(BisectionRow(source="leaf1", target="leaf2", num_pairs=1, rate=1e9, possible=2e9),),
        findings=(LinkFinding(kind="link", names=("n1",), way="sends", measure="rate", value=1e8, usual=1e9,
                              words="slow"),),
    )  # fmt: skip
    device = DeviceRate(
        host="n1", device=0, bus_id="0000:01:00.0", numa_node=0, is_pinned=True, to_device=1e10, from_device=1e10,
        limit=3e10,
    )  # fmt: skip
    hosts = tuple(
        ProbedHost(
            name=name, topology_addr=f"spine.leaf1.{name}", ranks=(2 * number, 2 * number + 1), interfaces=("eth0",),
            line_rate=1.25e9, pcie_rate=None, rate_words="10 Gb/s",
        )
        for number, name in enumerate(_PROBED)
    )  # fmt: skip
    record = ProbeRecord(
        versions={"hpcpace": "0.1.0", "torch": "2.13.0"}, cluster="", job_id="7",
        started_unix_ns=1_795_000_000_000_000_000, device="cpu", device_name="", backend="gloo", time_s=60.0,
        took_s=59.0, part_s={"sweep": 30.0, "pairs": 20.0}, hosts=hosts,
        sweep=(replace(row, p50_ns=30e3 + 32), replace(row, size_bytes=1024, p50_ns=30e3 + 512)),
        laws=(law, replace(law, op="broadcast")),
        skews=tuple(RankSkew(rank=rank, host=_PROBED[rank // 2], mean_ns=100.0, p99_ns=900.0) for rank in range(4)),
        pairs=pairs,
        noise=NoiseRecord(cores=tuple(CoreNoise(host=name, cpu=0, figures=core) for name in _PROBED),
                          notes=("shared",)),
        copies=CopiesRecord(memory=(MemoryRate(host="n1", numa_node=0, num_threads=2, rate=1e10),), devices=(device,)),
        problems=("n3 did not answer",),
    )  # fmt: skip
    return json.dumps(record.to_json())


def _probe(_: Path | None = None) -> Any:
    return json.loads(_probe_text())


def _read_probe(folder: Path, path: Path, random: Random) -> Call:
    """Return a call that reads the probe at a path, in the folder that gets the run."""
    run = _PROBED_RUN.write(folder / "run")
    way = int(random.integers(3))
    arguments: tuple[str, ...] = (("report", "scale")[way % 2], "--probe", str(path), str(run.path))
    if way == 2:
        path = path.rename(run.attempt(0).probe_json)
        arguments = ("report", str(run.path))
    num_bytes = path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    return Call(arguments=arguments, num_bytes=num_bytes + 200_000)


def _put_probe(folder: Path, content: bytes, random: Random) -> Call:
    (folder / "probe.json").write_bytes(content)
    return _read_probe(folder, folder / "probe.json", random)


def _probe_rows(random: Random) -> Any:
    probe = _probe()
    name = one_of(("hosts", "sweep", "laws", "skews", "problems", "lost_hosts"), random)
    rows = probe[name] or ["n1"]
    return {**probe, name: rows * max(text_size(random) // len(json.dumps(rows)), 1)}


def _probe_pairs(random: Random) -> Any:
    probe = _probe()
    row, count = probe["pairs"]["rows"][0], text_size(random) // 150
    rows = [{**row, "first": f"n{number}", "second": f"m{number}"} for number in range(count)]
    return {**probe, "pairs": {**probe["pairs"], "rows": rows}}


def _probe_pieces(random: Random) -> Any:
    probe = _probe()
    law = probe["laws"][0]
    pieces = [{**law["pieces"][0], "from_bytes": float(number)} for number in range(text_size(random) // 200)]
    return {**probe, "laws": [{**law, "pieces": pieces}]}


def _probe_nodes(random: Random) -> Any:
    """Return laws of many numbers of hosts, of which some are too large for a float."""
    probe = _probe()
    law, first = probe["laws"][0], int(one_of((2, 1 << 53, (1 << 63) - 100_000), random))
    more = [{**law, "num_nodes": first + number} for number in range(text_size(random) // 800)]
    return {**probe, "laws": [law, *more]}


def _probe_versions(random: Random) -> Any:
    schemas = (
        "hpcpace-probe/2",
        "hpcpace-probe/" + "9" * 100_000,
        "hpcpace-probe/\x1b[31m",
        "hpcpace-trial/1",
        7,
        None,
    )
    return {**_probe(), "schema": one_of(schemas, random)}


def _probed(content: Callable[[Random], Any]) -> Make:
    return lambda folder, random: _put_probe(folder, _text(content(random)), random)


def _probe_no_file(folder: Path, random: Random) -> Call:
    """Put something in the place of a probe that is no file, or too large a one."""
    path = folder / "probe.json"
    sparse, spaces = lambda p: (p.touch(), os.truncate(p, 1 << 40)), lambda p: p.write_bytes(b" " * 100_000_000)
    put_no_file(path, random, sparse, spaces)
    return _read_probe(folder, path, random)


def _probe_against(folder: Path, random: Random) -> Call:
    """Compare a new probe with one to which anything was done."""
    path = folder / "probe.json"
    path.write_bytes(one_of(tuple(_CHANGES.values()), random)(_probe(), random))
    arguments = ("probe", "--time", "1", "--only", "noise", "--other-hosts", "--against", str(path))
    return Call(arguments=arguments, num_bytes=path.stat().st_size)


# Reports of NCCL's RAS that somebody made up, beside the dumps of a small job

_RAS, _WORLD = "reports of NCCL RAS", 4


def _ras_rank(rank: int, **changes: Any) -> Any:
    return {
        "rank": rank,
        "host": "10.0.0.1",
        "pid": 100 + rank,
        "cuda_dev": rank,
        "nvml_dev": rank,
        "status": {"unresponsive": False, "considered_dead": False},
        "collective_counts": {"Broadcast": 0, "AllReduce": 6},
        **changes,
    }


def _communicator(ranks: Sequence[Any], missing: Sequence[Any] = (), size: int = _WORLD) -> Any:
    return {"hash": "0x1", "size": size, "ranks": ranks, "missing_ranks": missing}


def _ras_report(*communicators: Any) -> Any:
    whole = _communicator([_ras_rank(rank) for rank in range(_WORLD)], [_ras_rank(3)])
    facts = {"nccl_version": "2.28.9", "timestamp": "2026-11-24 09:00:00"}
    return {**facts, "communicators": [whole, *communicators]}


def _put_ras(folder: Path, content: bytes | None, random: Random, **expected: Any) -> Call:
    place, path = folder / "dumps", folder / "ras.json"
    place.mkdir()
    found = {f"rank_{rank}": dumps.dump([dumps.entry(0)] if rank != 2 else [], world=_WORLD) for rank in range(4)}
    num_bytes = dumps.write(place, found)
    if content is not None:
        path.write_bytes(content)
    arguments = ("hang", str(place), "--ras", str(path))
    return Call(arguments=arguments, num_bytes=num_bytes + len(content or b""), **expected)


def _ras(content: Callable[[Random], Any]) -> Make:
    return lambda folder, random: _put_ras(folder, _text(content(random)), random)


def _many_communicators(random: Random) -> Any:
    count = int(random.integers(10_000, 50_000))
    return _ras_report(*[_communicator([], size=1)] * count, *[_communicator([_ras_rank(1)])] * 3000)


def _many_ops(random: Random) -> Any:
    count = int(random.integers(1000, 10_000))
    ranks = [_ras_rank(rank % _WORLD, collective_counts={f"op{rank}": rank}) for rank in range(count)]
    return _ras_report(_communicator(ranks))


def _many_ras_ranks(random: Random) -> Any:
    count = int(random.integers(5000, 15_000))
    ranks = [_ras_rank(rank, collective_counts={f"op{op}": rank % 2 for op in range(8)}) for rank in range(count)]
    return _ras_report(_communicator(ranks, [_ras_rank(n % 4, pid=n) for n in range(count)], size=count))


def _ras_twice(folder: Path, random: Random) -> Call:
    keys = ",".join([f'"rank": {int(random.integers(10))}, "AllReduce": 1'] * int(random.integers(10_000, 60_000)))
    return _put_ras(folder, json.dumps(_ras_report()).replace('"rank": 2', keys).encode(), random)


def _ras_commas(folder: Path, random: Random) -> Call:
    text = '"nvml_dev": ' + "1" * int(random.integers(10, 100_000)) + " " * int(random.integers(10, 100_000))
    content = ('{"a": [' + f"{{{text}}}," * int(random.integers(2, 20))).encode()
    return _put_ras(folder, content, random, codes=frozenset({2}))


def _ras_no_file(folder: Path, random: Random) -> Call:
    put_no_file(folder / "ras.json", random)
    return _put_ras(folder, None, random, codes=frozenset({2}))


def _put_dump(folder: Path, content: bytes, random: Random) -> Call:
    return dumps.hang(folder, dumps.write(folder, {"rank_0.json": content}))


def _loaded(text: Callable[[], str]) -> Sound:
    return lambda _: json.loads(text())


KINDS = (
    *kinds("run-json", _RUN_FILES, _record, partial(_put, "attempt-0/run.json"), **_REPORT),
    *kinds("summary-json", _RUN_FILES, _loaded(_summary_text), partial(_put, "summary.json"), **_REPORT),
    *kinds("trial-json", _RUN_FILES, _trial, partial(_put, "attempt-0/trial.json"), **_REPORT),
    *kinds("notice", _RUN_FILES, _loaded(_notice_text), partial(_put, "attempt-0/hang/rank-00000.json"), **_REPORT),
    *kinds("history-index", _INDEX, _index, _put_index),
    *kinds_of(
        "history",
        _INDEX,
        {
            "values": _planted(_index_values),
            "entries": _planted(_index_entries),
            "hosts": _planted(_index_hosts),
            "nested": _planted(_index_nested),
            "others": _planted(_index_others),
            "no-file": _index_no_file,
        },
        most_lines=80,
        **_INDEX_BOUNDS,
    ),
    # `list` has a row for each run.
    Hostile(name="history-many-runs", format=_INDEX, make=_many_runs, most_lines=12_000, **_INDEX_BOUNDS),
    # A matrix or a picture of a host takes more than a screen.
    *kinds("snapshot", _SNAPSHOTS, _loaded(_snapshot_text), _put_snapshot, most_lines=200),
    Hostile(name="snapshot-many", format=_SNAPSHOTS, make=_many_snapshots),
    Hostile(name="tree-values", format=_TREES, make=_tree),
    Hostile(name="tree-wide", format=_TREES, make=_wide_tree),
    Hostile(name="nccl-log", format=_LOGS, make=_nccl_log),
    *kinds("probe", _PROBES, _probe, _put_probe, **_REPORT),
    *kinds_of(
        "probe",
        _PROBES,
        {
            "rows": _probed(_probe_rows),
            "pairs": _probed(_probe_pairs),
            "pieces": _probed(_probe_pieces),
            "nodes": _probed(_probe_nodes),
            "versions": _probed(_probe_versions),
            "no-file": _probe_no_file,
        },
        **_REPORT,
    ),
    # The probe that is compared is measured: that takes torch and a second of all cores.
    Hostile(name="probe-against", format=_PROBES, make=_probe_against, most_cpu_s=12.0, **_REPORT),
    *kinds("ras", _RAS, lambda _: _ras_report(), _put_ras),
    *kinds_of(
        "ras",
        _RAS,
        {
            "many-communicators": _ras(_many_communicators),
            "many-ops": _ras(_many_ops),
            "many-ranks": _ras(_many_ras_ranks),
            "twice": _ras_twice,
            "commas": _ras_commas,
            "no-file": _ras_no_file,
        },
    ),
    *kinds("dumps-json", "Flight Recorder dumps", lambda _: dumps.dump([dumps.entry(n) for n in range(3)]), _put_dump),
)
