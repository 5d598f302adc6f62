"""Profiles of torch.profiler, in files and folders of them."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from experiments.damage.hostile.engine import SECRET, Call, Random, kinds_of, one_of

_FORMAT = "profiles of torch.profiler"
_ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"
# For each MB of a file and of what comes out of gzip; a rank takes 20 ms, most of them for its file of the run.
_BOUNDS: dict[str, Any] = {"most_cpu_s": 2.0, "most_cpu_s_per_mb": 0.3}


def _size(random: Random, most_mb: float = 4.0) -> int:
    """Return a number of bytes from 0.1 MB on."""
    return int(random.uniform(0.1, most_mb) * 1e6)


def _call(folder: Path, num_bytes: int, **expected: Any) -> Call:
    run = folder.parent / "run"
    arguments = ("import", "kineto", str(folder), "--run-dir", str(run))
    return Call(arguments=arguments, num_bytes=num_bytes, never=("owned\x07",), **expected)


def _written(folder: Path, content: bytes, random: Random | None = None, **expected: Any) -> Call:
    """Write a profile of rank 0, packed in half of the cases."""
    is_packed = random is not None and random.random() < 0.5
    packed = gzip.compress(content, 1, mtime=0) if is_packed else content
    (folder / f"rank-0.json{'.gz' if is_packed else ''}").write_bytes(packed)
    return _call(folder, len(content) + len(packed), **expected)


def _event(name: str, cat: str, begin: float, length: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": length, "args": args}


def _sound_events(num_steps: int, per_step: int = 20) -> list[dict[str, Any]]:
    """Return events of a rank with a device that reduces once a step."""
    events = []
    for step in range(num_steps):
        at = 1e6 + 1e4 * step
        for number in range(per_step):
            link = step * per_step + number + 1
            events.append(_event("cudaLaunchKernel", "cuda_runtime", at + number, 1, correlation=link))
            events.append(_event("gemm", "kernel", at + 10 * number + 5, 8, correlation=link))
        said = {"Collective name": "allreduce", "dtype": "Float", "Process Group Name": "0"}
        events.append(_event("ncclDevKernel_AllReduce", "kernel", at + 5e3, 100, Seq=step, **said))
        events.append(_event(f"ProfilerStep#{step}", "user_annotation", at, 9e3))
    return events


def _facts(rank: int = 0, world_size: int = 2) -> dict[str, Any]:
    groups = [{"pg_name": "0", "ranks": list(range(world_size))}]
    info = {"backend": "nccl", "rank": rank, "world_size": world_size, "pg_config": groups}
    return {"distributedInfo": info, "host_name": "n1", "baseTimeNanoseconds": 1_700_000_000_000_000_000}


def _json(events: Iterable[object], facts: object = None) -> bytes:
    said = _facts() if facts is None else facts
    return (json.dumps(said)[:-1] + ', "traceEvents": ' + json.dumps(list(events)) + "}").encode()


def _repeated(part: bytes, num_bytes: int) -> bytes:
    return part * max(num_bytes // len(part), 1)


def _sound(folder: Path, random: Random) -> Call:
    return _written(folder, _json(_sound_events(int(random.integers(20, 300)))), random, codes=frozenset({0}))


def _begins(folder: Path, random: Random) -> Call:
    part = one_of((b'{"traceEvents":[', b'"traceEvents":[', b'{"a":{"traceEvents"  : [{}],'), random)
    return _written(folder, b'{"x":[' + _repeated(part, _size(random)), random)


def _brackets(folder: Path, random: Random) -> Call:
    before = _repeated(one_of([b"{},", b'{"name":"},{"},', b'{"a":[{},{}]},'], random), _size(random))
    text = _repeated(one_of((b"},{", b'\\"},{\\"', b"]},[{"), random), _size(random))
    return _written(folder, b'{"traceEvents":[' + before + b'{"name":"' + text, random)


def _structure(folder: Path, random: Random) -> Call:
    """Write a text of the signs of JSON alone."""
    signs = random.choice(list(b'[]{}",:\\ \n1'), _size(random), p=[0.12, 0.08, 0.12, 0.08, 0.2, 0.15, *[0.05] * 5])
    return _written(folder, b'{"traceEvents":[{},' + bytes(signs.tolist()), random)


def _members(folder: Path, random: Random) -> Call:
    """Write gzip of very many members."""
    member = gzip.compress(b",{}" * int(random.integers(0, 3)), mtime=0)
    packed = gzip.compress(b'{"traceEvents":[{}', mtime=0) + _repeated(member, _size(random))
    (folder / "rank-0.json.gz").write_bytes(packed)
    return _call(folder, 2 * len(packed))


def _bomb(folder: Path, random: Random) -> Call:
    part = one_of([b"{},", b" ", b"3,", json.dumps(_sound_events(1)[0]).encode() + b","], random)
    content = b'{"traceEvents":[' + _repeated(part, 20 * _size(random))
    packed = gzip.compress(content, 9, mtime=0)
    (folder / "rank-0.json.gz").write_bytes(packed)
    return _call(folder, len(content) + len(packed))


def _damaged(folder: Path, random: Random) -> Call:
    """Write a sound profile with bytes changed, removed, or the rest cut off."""
    content = bytearray(_json(_sound_events(int(random.integers(20, 300)))))
    is_packed = random.random() < 0.5
    data = bytearray(gzip.compress(bytes(content), mtime=0)) if is_packed else content
    for _ in range(int(random.integers(1, 30))):
        at = int(random.integers(len(data)))
        what = random.integers(3)
        if what == 0:
            data[at] = int(random.integers(256))
        elif what == 1:
            del data[at : at + int(random.integers(1, 100))]
        else:
            data[at:at] = bytes(random.integers(0, 256, 20).tolist())
    if random.random() < 0.3:
        del data[int(random.integers(len(data))) :]
    (folder / f"rank-0.json{'.gz' if is_packed else ''}").write_bytes(data)
    return _call(folder, 2 * len(content))


_VALUES: tuple[Any, ...] = (
    True, None, -1, 0, 0.5, 1e300, -1e18, 1 << 31, 1 << 62, 1 << 64, 10**400, "1", "9" * 40, "NaN", _ESCAPE, "\ud800",
    [], {}, [[[]]], {"a": [1]}, "x" * 5000,
)  # fmt: skip


def _value(random: Random) -> Any:
    return one_of(_VALUES, random)


def _other_types(folder: Path, random: Random) -> Call:
    """Write values of other types into some fields of some events."""
    events = _sound_events(int(random.integers(20, 200)))
    for event in events:
        if random.random() < 0.3:
            part = event if random.random() < 0.5 else event["args"]
            part[one_of(["ph", "cat", "name", "ts", "dur", "args", "correlation", "Seq", "dtype"], random)] = _value(
                random
            )
    return _written(folder, _json(events), random)


def _other_facts(folder: Path, random: Random) -> Call:
    facts = _facts()
    for part in (facts, facts["distributedInfo"], facts["distributedInfo"]["pg_config"][0]):
        for name in list(part):
            if random.random() < 0.2:
                part[name] = _value(random)
    facts["distributedInfo_" if random.random() < 0.1 else _ESCAPE] = 1
    return _written(folder, _json(_sound_events(20), facts), random)


def _groups(folder: Path, random: Random) -> Call:
    """Write operations of more groups than a trace can number, or of groups with very many members."""
    if random.random() < 0.5:
        num_groups = int(random.integers(60_000, 70_000))
        events = [
            _event(
                "ncclKernel_AllReduce", "kernel", n, 1, **{"Process Group Name": f"{n}", "Process Group Ranks": "[0]"}
            )
            for n in range(num_groups)
        ]
        return _written(folder, _json(events), random)
    facts = _facts()
    num_members = int(random.integers(1000, 100_000))
    facts["distributedInfo"]["pg_config"] *= int(random.integers(1, 20))
    for number, group in enumerate(facts["distributedInfo"]["pg_config"]):
        facts["distributedInfo"]["pg_config"][number] = {
            **group,
            "pg_name": f"{number}",
            "ranks": list(range(num_members)),
        }
    return _written(folder, _json(_sound_events(20), facts), random)


def _numbers(folder: Path, random: Random) -> Call:
    """Write a number of up to a million digits, in an event or in the facts."""
    number = _repeated(one_of([b"1", b"0.1", b"1e", b"-", b"9"], random), _size(random, 1.0))
    place = [
        b'{"x":%b,"traceEvents":[{}]}',
        b'{"traceEvents":[{},{"ts":%b}]}',
        b'{"traceEvents":[{"args":{"Seq":%b}}]}',
    ]
    return _written(folder, one_of(place, random) % number, random)


def _nested(folder: Path, random: Random) -> Call:
    opening, closing = [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":[', b"]}]")][random.integers(3)]
    depth = _size(random) // (len(opening) + len(closing))
    value = opening * depth + b"1" + closing * (depth if random.random() < 0.5 else 0)
    place = [b'{"x":%b,"traceEvents":[{}]}', b'{"traceEvents":[{},{"x":%b}]}', b'{"traceEvents":[{"args":{"Seq":%b}}]}']
    return _written(folder, one_of(place, random) % value, random)


def _long_names(folder: Path, random: Random) -> Call:
    name = one_of(["x", _ESCAPE, "autograd::engine::evaluate_function", "nccl", "},{"], random)
    events = _sound_events(20)
    for event in events:
        if random.random() < 0.02:
            long = name * (_size(random, 0.5) // len(name))
            event["name"] = event["args"]["Process Group Name"] = event["args"]["Process Group Ranks"] = long
    return _written(folder, _json(events), random)


def _steps(folder: Path, random: Random) -> Call:
    """Write steps that overlap each other, with numbers that jump, and functions that last for ever."""
    num_steps = _size(random) // 400
    end = 20.0 * num_steps
    events = _sound_events(20)
    for number in random.permutation(num_steps).tolist():
        shown = int(random.integers(0, 999_999_999)) if random.random() < 0.1 else number
        length = end if random.random() < 0.5 else 10.0
        events.append(_event(f"ProfilerStep#{shown}", "user_annotation", 20 * number, length))
        events.append(_event("autograd::engine::evaluate_function: A", "cpu_op", 20 * number + 1, length))
        events.append(_event("gemm", "kernel", 20 * number + 2, 3, correlation=number))
    return _written(folder, _json(events), random)


def _odd_events(folder: Path, random: Random) -> Call:
    part = one_of([b"3,", b"[],", b'"x",', b'{"ph":7},', b"{" + b'"ts":1,' * 20 + b'"ts":2},'], random)
    return _written(folder, b'{"traceEvents":[' + _repeated(part, _size(random)) + b"{}]}", random)


def _encodings(folder: Path, random: Random) -> Call:
    """Write texts that are no UTF-8, or profiles in other encodings and formats."""
    content = _json(_sound_events(50))
    made: list[Callable[[], bytes]] = [
        lambda: content.replace(b"gemm", b"\xff\xfe\x80"),
        lambda: content.replace(b"gemm", b"\\ud800"),
        lambda: content.decode().encode("utf-16"),
        lambda: b"\xef\xbb\xbf" + content,
        lambda: zlib.compress(content),
        lambda: b"PK\x03\x04" + content,
        lambda: b"\x28\xb5\x2f\xfd" + content,
        lambda: bytes(random.integers(0, 256, _size(random)).tolist()),
    ]
    data = one_of(made, random)()
    (folder / ("rank-0.json.gz" if random.random() < 0.5 else "rank-0.json")).write_bytes(data)
    return _call(folder, len(data))


def _places(folder: Path, random: Random) -> Call:
    """Put links, FIFOs and folders beside a profile."""
    secret = folder.parent / "secret"
    secret.write_text(f"{SECRET}\n" * 10)
    names = [f"rank-{rank}{_ESCAPE if random.random() < 0.2 else ''}.json" for rank in range(1, 6)]
    (folder / "rank-0.json").write_bytes(_json(_sound_events(20), _facts(0, 8)))
    for name in names:
        what = random.integers(4)
        if what == 0:
            (folder / name).symlink_to(one_of([secret, Path("/dev/zero"), folder, folder / name], random))
        elif what == 1:
            os.mkfifo(folder / name)
        elif what == 2:
            (folder / name).mkdir()
        else:
            (folder / name).symlink_to("rank-0.json")
    return _call(folder, 200_000, codes=frozenset({0, 1}))


def _many_files(folder: Path, random: Random) -> Call:
    """Write very many files, most of them with a fault of their own."""
    num_files = int(random.integers(100, 400))
    for rank in range(num_files):
        events = _sound_events(1, 1)
        contents = [b"[", b"", b'{"traceEvents":[{', _json(events, _facts(rank, num_files)), _json(events, {})]
        (folder / f"rank-{rank}-{'x' * 200}.json").write_bytes(one_of(contents, random))
    return _call(folder, 70_000 * num_files)  # each is a rank, and takes 20 ms at most


def _contradictions(folder: Path, random: Random) -> Call:
    """Write profiles of one rank, of different jobs, or of times that cannot be of one."""
    num_files = int(random.integers(2, 20))
    for number in range(num_files):
        rank = number if random.random() < 0.97 else 0
        facts = _facts(rank, num_files if random.random() < 0.97 else 7)
        facts["host_name"] = f"n{number % 3}"
        facts["baseTimeNanoseconds"] = int(random.choice([0, 1, 1 << 60, (1 << 62) - 1, -(1 << 61), 17 * 10**17]))
        events = _sound_events(20)
        for event in events:
            if random.random() < 0.01:
                event["ts"] = float(random.choice([0, 1e15, 2e15, 1e3]))
        (folder / f"rank-{number}.json").write_bytes(_json(events, facts))
    return _call(folder, num_files * 150_000)


_MAKERS = (
    *(_sound, _begins, _brackets, _structure, _members, _bomb, _damaged, _other_types),
    *(_other_facts, _groups, _numbers, _nested, _long_names, _steps, _odd_events, _encodings),
    *(_places, _many_files, _contradictions),
)
KINDS = kinds_of("kineto", _FORMAT, _MAKERS, **_BOUNDS)
