"""Profiles of torch.profiler, in files and folders of them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.damage.chance import Random
from experiments.damage.hostile.engine import Call, Make, kinds_of, put_no_file
from experiments.damage.hostile.json_files import kinds

_FORMAT = "profiles of torch.profiler"
_ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"
# For each MB of a file and of what comes out of gzip; a rank takes 20 ms, most of them for its file of the run.
_BOUNDS: dict[str, Any] = {"most_cpu_s": 2.0, "most_cpu_s_per_mb": 0.3}


def _call(folder: Path, num_bytes: int, **expected: Any) -> Call:
    arguments = ("import", "kineto", str(folder), "--run-dir", str(folder.parent / "run"))
    return Call(arguments=arguments, num_bytes=num_bytes, never=("owned\x07",), **expected)


def _written(folder: Path, data: bytes, random: Random, **expected: Any) -> Call:
    """Write a profile of rank 0, packed in half of the cases."""
    is_packed = random.maybe()
    packed = gzip.compress(data, 1, mtime=0) if is_packed else data
    (folder / f"rank-0.json{'.gz' if is_packed else ''}").write_bytes(packed)
    return _call(folder, len(data) + len(packed), **expected)


def _made(content: Callable[[Random], bytes], **expected: Any) -> Make:
    return lambda folder, random: _written(folder, content(random), random, **expected)


def _packed(content: Callable[[Random], tuple[bytes, int]]) -> Make:
    """Return what writes gzip as it is made, with the bytes that come out of it."""

    def make(folder: Path, random: Random) -> Call:
        packed, num_bytes = content(random)
        (folder / "rank-0.json.gz").write_bytes(packed)
        return _call(folder, num_bytes + len(packed))

    return make


def _event(name: str, cat: str, begin: float, length: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": length, "args": args}


def _sound_events(num_steps: int, per_step: int = 20) -> list[dict[str, Any]]:
    """Return events of a rank with a device that reduces once a step."""
    events = []
    said = {"Collective name": "allreduce", "dtype": "Float", "Process Group Name": "0"}
    for step in range(num_steps):
        at = 1e6 + 1e4 * step
        for number in range(per_step):
            link = step * per_step + number + 1
            events.append(_event("cudaLaunchKernel", "cuda_runtime", at + number, 1, correlation=link))
            events.append(_event("gemm", "kernel", at + 10 * number + 5, 8, correlation=link))
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


def _repeated(random: Random, *parts: bytes, times: float = 1.0) -> bytes:
    """Return one of some parts again and again, from 0.1 MB on."""
    part: bytes = random.of(parts)
    return part * max(int(random.uniform(0.1, 4.0) * 1e6 * times) // len(part), 1)


def _structure(random: Random) -> bytes:
    """Return a text of the signs of JSON alone."""
    shares = [0.12, 0.08, 0.12, 0.08, 0.2, 0.15, *[0.05] * 5]
    signs = random.choice(list(b'[]{}",:\\ \n1'), random.size(100_000, 4_000_000), p=shares)
    return b'{"traceEvents":[{},' + bytes(signs.tolist())


def _members(random: Random) -> tuple[bytes, int]:
    """Return gzip of very many members."""
    packed = gzip.compress(b'{"traceEvents":[{}', mtime=0)
    packed += _repeated(random, gzip.compress(b",{}" * random.count(0, 3), mtime=0))
    return packed, len(packed)


def _bomb(random: Random) -> tuple[bytes, int]:
    event = json.dumps(_sound_events(1)[0]).encode() + b","
    content = b'{"traceEvents":[' + _repeated(random, b"{},", b" ", b"3,", event, times=20)
    return gzip.compress(content, 9, mtime=0), len(content)


def _groups(random: Random) -> bytes:
    """Return operations of more groups than a trace can number, or of groups with very many members."""
    if random.maybe():
        groups = ({"Process Group Name": f"{n}", "Process Group Ranks": "[0]"} for n in range(65_000))
        return _json(_event("ncclKernel_AllReduce", "kernel", n, 1, **said) for n, said in enumerate(groups))
    facts, members = _facts(), list(range(random.count(1000, 100_000)))
    groups = [{"pg_name": f"{number}", "ranks": members} for number in range(random.count(1, 20))]
    facts["distributedInfo"]["pg_config"] = groups
    return _json(_sound_events(20), facts)


def _steps(random: Random) -> bytes:
    """Return steps that overlap each other, with numbers that jump, and functions that last for ever."""
    num_steps = random.count(250, 10_000)
    events = _sound_events(20)
    for number in random.permutation(num_steps).tolist():
        shown = random.count(0, 999_999_999) if random.maybe(0.1) else number
        length = random.one(20.0 * num_steps, 10.0)
        events.append(_event(f"ProfilerStep#{shown}", "user_annotation", 20 * number, length))
        events.append(_event("autograd::engine::evaluate_function: A", "cpu_op", 20 * number + 1, length))
        events.append(_event("gemm", "kernel", 20 * number + 2, 3, correlation=number))
    return _json(events)


def _encodings(folder: Path, random: Random) -> Call:
    """Write texts that are no UTF-8, or profiles in other encodings and formats."""
    content = _json(_sound_events(50))
    texts = (content.replace(b"gemm", b"\xff\xfe\x80"), content.replace(b"gemm", b"\\ud800"), zlib.compress(content))
    begins = [begin + content for begin in (b"\xef\xbb\xbf", b"PK\x03\x04", b"\x28\xb5\x2f\xfd")]
    noise = random.bytes(random.size(100_000, 4_000_000))
    data = random.one(*texts, *begins, content.decode().encode("utf-16"), noise)
    (folder / random.one("rank-0.json.gz", "rank-0.json")).write_bytes(data)
    return _call(folder, len(data))


def _places(folder: Path, random: Random) -> Call:
    """Put links, FIFOs and folders beside a profile."""
    (folder / "rank-0.json").write_bytes(_json(_sound_events(20), _facts(0, 8)))
    for rank in range(1, 6):
        path = folder / f"rank-{rank}{_ESCAPE if random.maybe(0.2) else ''}.json"
        put_no_file(path, random, lambda path: path.symlink_to(random.one("rank-0.json", folder)))
    return _call(folder, 200_000, codes=frozenset({0, 1}))


def _many_files(folder: Path, random: Random) -> Call:
    """Write very many files, most of them with a fault of their own."""
    num_files, events = random.count(100, 400), _sound_events(1, 1)
    for rank in range(num_files):
        sound = _json(events, _facts(rank, num_files))
        content = random.one(b"[", b"", b'{"traceEvents":[{', sound, _json(events, {}))
        (folder / f"rank-{rank}-{'x' * 200}.json").write_bytes(content)
    return _call(folder, 70_000 * num_files)  # each is a rank, and takes 20 ms at most


def _contradictions(folder: Path, random: Random) -> Call:
    """Write profiles of one rank, of different jobs, or of times that cannot be of one."""
    num_files = random.count(2, 20)
    for number in range(num_files):
        facts = _facts(0 if random.maybe(0.03) else number, 7 if random.maybe(0.03) else num_files)
        facts["host_name"] = f"n{number % 3}"
        facts["baseTimeNanoseconds"] = random.one(0, 1, 1 << 60, (1 << 62) - 1, -(1 << 61), 17 * 10**17)
        events = _sound_events(20)
        for event in events:
            if random.maybe(0.01):
                event["ts"] = random.one(0.0, 1e15, 2e15, 1e3)
        (folder / f"rank-{number}.json").write_bytes(_json(events, facts))
    return _call(folder, num_files * 150_000)


_BEGINS = (b'{"traceEvents":[', b'"traceEvents":[', b'{"a":{"traceEvents"  : [{}],')
_CONTENTS: Mapping[str, Callable[[Random], bytes]] = {
    "begins": lambda r: b'{"x":[' + _repeated(r, *_BEGINS),
    "brackets": lambda r: (
        b'{"traceEvents":['
        + _repeated(r, b"{},", b'{"name":"},{"},', b'{"a":[{},{}]},')
        + b'{"name":"'
        + _repeated(r, b"},{", b'\\"},{\\"', b"]},[{")
    ),
    "structure": _structure,
    "groups": _groups,
    "steps": _steps,
}
_SOUND = _made(lambda random: _json(_sound_events(random.count(20, 300))), codes=frozenset({0}))
_OWN = {
    **{"sound": _SOUND, "members": _packed(_members), "bomb": _packed(_bomb)},
    **{name: _made(content) for name, content in _CONTENTS.items()},
    **{"encodings": _encodings, "places": _places, "many-files": _many_files, "contradictions": _contradictions},
}
KINDS = (
    *kinds_of("kineto", _FORMAT, _OWN, **_BOUNDS),
    *kinds("kineto-json", _FORMAT, lambda _: json.loads(_json(_sound_events(20))), _written, **_BOUNDS),
)
