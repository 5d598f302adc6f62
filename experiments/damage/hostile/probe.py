"""Saved probes: what `report` and `scale` read beside a run, and what a probe after maintenance is compared with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.damage.hostile.kind import SECRET, Call, Hostile, Random
from experiments.synthetic_run import SyntheticRun
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

_FORMAT = "saved probes"
_HOSTS = ("n1", "n2")
_RUN = SyntheticRun(num_ranks=4, num_steps=12, hosts=_HOSTS)
_ESCAPES = (
    *(
        "\x1b[31m",
        "\x1b]0;title\x07",
        "\r",
        "\x00",
        "\u202e",
        "\u2066",
        "\ud800",
        "\x9b2J",
        "\n\n",
        "=cmd|' /C calc'!A0",
    ),
    *("<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "{{7*7}}", "%s%n", "'\"><b>"),
)
_NUMBERS = (
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        "1e400",
        "-1e400",
        "1e-400",
        "5e-324",
        "1e18",
        "-1e18",
        "9e17",
        "-9e17",
        "0",
        "-0.0",
    ),
    *("-1", "1e308", "9223372036854775807", "9007199254740993", "-9223372036854775808", "18446744073709551616"),
)
_OTHERS = ("null", "true", '""', '"60"', "[]", "{}", "[[]]", '{"a": 1}', "[null]", "1.5", "-1", '"\\ud800"')
_MIN_BYTES, _MAX_BYTES = 100_000, 4_000_000


def _record() -> ProbeRecord:
    """Return a probe of two hosts with all parts."""
    pieces = [
        LawPiece(
            from_bytes=begin,
            from_low_bytes=begin / 2,
            from_high_bytes=2 * begin,
            latency_ns=30e3,
            latency_low_ns=29e3,
            latency_high_ns=31e3,
            ns_per_byte=0.8,
            ns_per_byte_low=0.7,
            ns_per_byte_high=0.9,
        )
        for begin in (0.0, 65536.0)
    ]
    law = LatencyLaw(
        op="all_reduce",
        num_nodes=2,
        num_ranks=4,
        pieces=tuple(pieces),
        least_bytes=64,
        most_bytes=1 << 26,
        least_error=-0.1,
        most_error=0.1,
        single_least_error=-0.5,
        single_most_error=0.5,
    )
    row = SweepRow(
        op="all_reduce",
        num_nodes=2,
        num_ranks=4,
        size_bytes=1024,
        num_repetitions=50,
        p50_ns=31e3,
        p95_ns=32e3,
        p99_ns=33e3,
        rounds_ns=(31e3, 31.1e3, 30.9e3),
        algbw=3.3e7,
        busbw=3.3e7,
        limit=1.25e9,
    )
    core = CoreFigures(
        share=0.001,
        longest_ns=12e3,
        num_detours=40,
        quantum_ns=50e3,
        resolution_ns=4e3,
        span_ns=200_000_000,
        period_ns=1e7,
        period_share=0.0005,
    )
    return ProbeRecord(
        versions={"hpcpace": "0.1.0", "torch": "2.13.0"},
        cluster="",
        job_id="7",
        started_unix_ns=1_795_000_000_000_000_000,
        device="cpu",
        device_name="",
        backend="gloo",
        time_s=60.0,
        took_s=59.0,
        part_s={"sweep": 30.0, "pairs": 20.0},
        hosts=tuple(
            ProbedHost(
                name=name,
                topology_addr=f"spine.leaf1.{name}",
                ranks=(2 * number, 2 * number + 1),
                interfaces=("eth0",),
                line_rate=1.25e9,
                pcie_rate=None,
                rate_words="10 Gb/s",
            )
            for number, name in enumerate(_HOSTS)
        ),
        sweep=tuple(
            replace(row, size_bytes=size, p50_ns=30e3 + size / 2, p95_ns=1e9, p99_ns=1e9) for size in (64, 1024)
        ),
        laws=(law, replace(law, op="broadcast")),
        skews=tuple(RankSkew(rank=rank, host=_HOSTS[rank // 2], mean_ns=100.0, p99_ns=900.0) for rank in range(4)),
        pairs=PairsRecord(
            carrier="TCP over eth0",
            usual=1e9,
            usual_of_limit=0.8,
            usual_latency_ns=15e3,
            rows=(PairRow(first="n1", second="n2", is_apart=True, forward=1e9, backward=9e8, least_ns=15e3),),
            bisections=(BisectionRow(source="leaf1", target="leaf2", num_pairs=1, rate=1e9, possible=2e9),),
            findings=(
                LinkFinding(
                    kind="link", names=("n1",), way="sends", measure="rate", value=1e8, usual=1e9, words="slow"
                ),
            ),
        ),
        noise=NoiseRecord(cores=tuple(CoreNoise(host=name, cpu=0, figures=core) for name in _HOSTS), notes=("shared",)),
        copies=CopiesRecord(
            memory=(MemoryRate(host="n1", numa_node=0, num_threads=2, rate=1e10),),
            devices=(
                DeviceRate(
                    host="n1",
                    device=0,
                    bus_id="0000:01:00.0",
                    numa_node=0,
                    is_pinned=True,
                    to_device=1e10,
                    from_device=1e10,
                    limit=3e10,
                ),
            ),
        ),
        problems=("n3 did not answer",),
    )


_PLAIN: dict[str, Any] = _record().to_json()
_MARK = "\x02mark\x02"


def _places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of each value."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path, *(place for name, value in inner for place in _places(value, (*path, name)))]


def _with(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a content in which something else is at a path."""
    if not path:
        return value
    copy = dict(content) if isinstance(content, dict) else list(content)
    copy[path[0]] = _with(copy[path[0]], path[1:], value)
    return copy


def _at_places(random: Random, texts: Callable[[], str], *, num_places: int = 1, kinds: tuple[type, ...] = ()) -> str:
    """Return the probe with other text, which may be no JSON, where values of some kinds are."""
    places = [place for place in _places(_PLAIN)[1:] if place != ("schema",)]
    if kinds:
        places = [place for place in places if type(_value(place)) in kinds]
    content: Any = _PLAIN
    chosen = random.permutation(len(places))[:num_places]
    for number in chosen:
        if _has(content, places[number]):
            content = _with(content, places[number], _MARK)
    parts = json.dumps(content).split(json.dumps(_MARK))
    return parts[0] + "".join(texts() + part for part in parts[1:])


def _value(path: tuple[Any, ...]) -> Any:
    content: Any = _PLAIN
    for name in path:
        content = content[name]
    return content


def _has(content: Any, path: tuple[Any, ...]) -> bool:
    try:
        for name in path:
            content = content[name]
    except (TypeError, LookupError):
        return False
    return not isinstance(content, str) or content != _MARK


def _size(random: Random) -> int:
    return int(random.integers(_MIN_BYTES, _MAX_BYTES))


def _of(random: Random, some: tuple[str, ...]) -> str:
    return some[int(random.integers(len(some)))]


def _nested(random: Random) -> str:
    opening, closing = (("[", "]"), ('{"a":', "}"), ('{"hosts":[', "]}"))[int(random.integers(3))]
    depth = _size(random) // len(opening)
    inside = opening * depth + ("0" + closing * depth if random.random() < 0.5 else "")
    return _at_places(random, lambda: inside)


def _digits(random: Random) -> str:
    digits = "9" * int(random.choice([4_000, 5_000, _size(random)]))
    return _at_places(random, lambda: f"{digits}{_of(random, ('', '.0', 'e5', 'e-5'))}", kinds=(int, float))


def _numbers(random: Random) -> str:
    return _at_places(
        random, lambda: _of(random, _NUMBERS), num_places=int(random.choice([1, 3, 1000])), kinds=(int, float)
    )


def _types(random: Random) -> str:
    return _at_places(random, lambda: _of(random, _OTHERS), num_places=int(random.choice([1, 1, 5])))


def _rows(random: Random) -> str:
    name = _of(random, ("hosts", "sweep", "laws", "skews", "problems", "lost_hosts"))
    rows = _PLAIN[name] or ["n1"]
    num = max(_size(random) // len(json.dumps(rows)), 1)
    return json.dumps({**_PLAIN, name: rows * num})


def _pairs(random: Random) -> str:
    num = _size(random) // 150
    rows = [{**_PLAIN["pairs"]["rows"][0], "first": f"n{number}", "second": f"m{number}"} for number in range(num)]
    return json.dumps({**_PLAIN, "pairs": {**_PLAIN["pairs"], "rows": rows}})


def _pieces(random: Random) -> str:
    num = _size(random) // 200
    law = _PLAIN["laws"][0]
    pieces = [{**law["pieces"][0], "from_bytes": float(number)} for number in range(num)]
    return json.dumps({**_PLAIN, "laws": [{**law, "pieces": pieces}]})


def _nodes(random: Random) -> str:
    """Return laws of many numbers of hosts, of which some are too large for a float."""
    first = int(random.choice([2, 1 << 53, (1 << 63) - 100_000]))
    laws = [{**_PLAIN["laws"][0], "num_nodes": first + number} for number in range(_size(random) // 800)]
    return json.dumps({**_PLAIN, "laws": [_PLAIN["laws"][0], *laws]})


def _values(random: Random) -> str:
    part = _of(random, ("{}", "[]", '""', "0", '{"a":[]}', "[[]]"))
    many = ",".join([part] * (_size(random) // len(part)))
    return _at_places(random, lambda: f"[{many}]", kinds=(list,))


def _long_names(random: Random) -> str:
    long = json.dumps(_of(random, _ESCAPES) * (_size(random) // 20))
    if random.random() < 0.5:
        return _at_places(random, lambda: long, kinds=(str,), num_places=2)
    return json.dumps(_PLAIN)[:-1] + f', {long}: 1, "versions": {{{long}: 5}}}}'


def _escapes(random: Random) -> str:
    return _at_places(random, lambda: json.dumps(_of(random, _ESCAPES)), kinds=(str,), num_places=1000)


def _versions(random: Random) -> str:
    schema = ("hpcpace-probe/2", "hpcpace-probe/" + "9" * 100_000, "hpcpace-probe/\x1b[31m", "hpcpace-trial/1", 7, None)
    return json.dumps({**_PLAIN, "schema": schema[int(random.integers(len(schema)))]})


def _cut(random: Random) -> bytes:
    content = json.dumps(_PLAIN).encode()
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: content[: int(random.integers(len(content)))],
        lambda: random.bytes(_size(random)),
        lambda: content.decode().encode("utf-16"),
        lambda: b"\xef\xbb\xbf" + content,
        lambda: content + b"\0" * _size(random),
        lambda: b"",
        lambda: content * 3,
    )
    return ways[int(random.integers(len(ways)))]()


def _no_file(folder: Path, random: Random) -> Path:
    """Put something in the place of a probe that is no file, or too large a one, and return its path."""
    path = folder / "probe.json"
    (folder / "secret").write_text(SECRET)
    ways: tuple[Callable[[], Any], ...] = (
        lambda: path.symlink_to(folder / "secret"),
        lambda: path.symlink_to("/dev/zero"),
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: (path.touch(), os.truncate(path, 1 << 40)),
        lambda: path.write_bytes(b" " * 100_000_000),
    )
    ways[int(random.integers(len(ways)))]()
    return path


def _call(folder: Path, random: Random, path: Path, *, against: bool = False) -> Call:
    """Return a call that reads the probe at a path, in the folder that gets the run."""
    if against:
        arguments = ("probe", "--time", "1", "--only", "noise", "--other-hosts", "--against", str(path))
        return Call(arguments=arguments, num_bytes=_num_bytes(path))
    run = _RUN.write(folder / "run")
    way = int(random.integers(3))
    if way == 0:
        arguments = ("report", "--probe", str(path), str(run.path))
    elif way == 1:
        arguments = ("scale", "--probe", str(path), str(run.path))
    else:
        path = path.rename(run.attempt(0).probe_json)
        arguments = ("report", str(run.path))
    return Call(arguments=arguments, num_bytes=_num_bytes(path) + 200_000)


def _num_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() and not path.is_symlink() else 0


def _written(made: Callable[[Random], str | bytes], *, against: bool = False) -> Callable[[Path, Random], Call]:
    def make(folder: Path, random: Random) -> Call:
        content = made(random)
        path = folder / "probe.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
        return _call(folder, random, path, against=against)

    return make


def _placed(folder: Path, random: Random) -> Call:
    return _call(folder, random, _no_file(folder, random))


_MADE: dict[str, Callable[[Random], str | bytes]] = {
    "nested": _nested,
    "digits": _digits,
    "numbers": _numbers,
    "types": _types,
    "rows": _rows,
    "pairs": _pairs,
    "pieces": _pieces,
    "nodes": _nodes,
    "values": _values,
    "long-names": _long_names,
    "escapes": _escapes,
    "versions": _versions,
    "cut": _cut,
}


def _any(random: Random) -> str | bytes:
    names = sorted(_MADE)
    return _MADE[names[int(random.integers(len(names)))]](random)


# A report of a sound run takes 70 lines.
_MAX_LINES = 100
KINDS = (
    *(
        Hostile(name=f"probe-{name}", format=_FORMAT, make=_written(made), most_lines=_MAX_LINES)
        for name, made in _MADE.items()
    ),
    Hostile(name="probe-no-file", format=_FORMAT, make=_placed, most_lines=_MAX_LINES),
    # The probe that is compared is measured: that takes torch and a second of all cores.
    Hostile(name="probe-against", format=_FORMAT, make=_written(_any, against=True), most_cpu_s=12.0),
)
