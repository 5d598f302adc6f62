"""Text made hostile: CSV files of measured runs, settings in TOML, topology files in both forms, and logs of NCCL.

One table of changes is applied to a sound text of each format: words are exchanged, grow long or nest, and lines are
repeated. Some formats have further kinds, what only their own rules make costly: the name, and the text by chance.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.damage.chance import Random
from experiments.damage.hostile_files import CONTROL, Call, Hostile, Make, kinds_of, size_bytes, sound_text
from experiments.damage.json_files import sound_snapshot
from experiments.synthetic_run import SyntheticRun

Text = Callable[[Random], str]
Place = Callable[[Path, str, Random], Call]
"""Puts a text where a command reads it."""
_ODD = (
    "", "nan", "inf", "-1", "0", "1e999", "9" * 400, "1_000", "²", "٣", CONTROL.replace("\n", ""), '"', '"a""b"',
    "=1+1", "n[0-999999999]", "n[0-99][0-99][0-99]", "[" * 200, "n[0-9", "2026-13-45", "9999-12-31", "0000-00-00",
    "a" * 5000, "\x00", "-inf", "+1", "1e-320", "n0," * 20, "[]", "{}", "~", "'", "#", "\\",
)  # fmt: skip
_PARTS = (
    "a", " ", "n,", "9", "0x", "1_", '""', "\n", "=", "\t", "\x0b", "\x85", "#", "aé", "\\\n", "0-", "\x1b[2J",
    "\u202e", "\\u001b]0;a\\u0007", "\\U0001F600", "a.", "1, ", "'a', ", "[], ", "{}, ", "a: b,", "#\n",
)  # fmt: skip
"""They make long words."""
_OPENINGS = (
    "[", "{", "(", "n[", "n[1", "n[1-65536],", "{a = ", "[{a = ", "[[", "{a: ", "- ", "? ", "[{a: ", "- ? ", "[]: ",
    "{[",
)  # fmt: skip
"""They nest, or look as if they did."""
_WORD = re.compile(r"[^\s,=:\[\]{}'\"]+")


def _in_place_of(text: str, random: Random, value: str) -> str:
    """Return a text with a value in place of a word."""
    word = random.of([*_WORD.finditer(text)])
    return text[: word.start()] + value + text[word.end() :]


def _values(text: str, random: Random) -> str:
    for _ in range(random.count(1, 10)):
        text = _in_place_of(text, random, random.of(_ODD))
    return text


def _long(text: str, random: Random) -> str:
    """Return one word of megabytes, quoted, never closed, or bare."""
    part = random.of(_PARTS)
    long = part * (random.text_size() // len(part))
    return _in_place_of(text, random, random.one(f'"{long}"', f'"{long}', f"'{long}'", long, f"{long}[1-65536]"))


def _many(text: str, random: Random) -> str:
    """Repeat a line as it is, or with one of its numbers, or all, numbered."""
    lines = text.splitlines()
    place = random.count(0, len(lines))
    head, *parts = re.split(r"\d+", lines[place])
    count = random.text_size() // (len(lines[place]) + 1)
    kept = random.one(0, 1, len(parts))
    numbered = (head + "".join(f"{n if k < kept else 1}{part}" for k, part in enumerate(parts)) for n in range(count))
    return "\n".join([*lines[:place], *numbered, *lines[place:]]) + "\n"


def _wrong_lines(text: str, random: Random) -> str:
    """Return a mistake in every line."""
    lines, odd = text.splitlines(), random.of(_ODD)[:60]
    line = _in_place_of(lines[-1], random, odd)
    return "\n".join([*lines, *[line] * (random.text_size() // (len(line) + 1))]) + "\n"


def _bytes(text: str, random: Random) -> str:
    letters = text + ' ,"\n\x00a1\udcff\x1b\x07\x9b\u202eé'
    noise = "".join(letters[n] for n in random.integers(0, len(letters), random.size(10_000, 1_000_000)))
    return str(random.one(noise, text + noise, "", "\udcff", "\0" * 1000, "\ufeff" + text, "\n" * 10**6))


CHANGES: Mapping[str, Callable[[str, Random], str]] = {
    **{"values": _values, "long": _long, "many": _many, "wrong-lines": _wrong_lines, "bytes": _bytes},
    "nested": lambda text, random: _in_place_of(text, random, random.of(_OPENINGS) * random.size(900, 300_000)),
    "wide": lambda text, random: text.replace(
        word := random.of(_WORD.findall(text)), f"{word}," * random.size(900, 99_000), 1
    ),
}
_CSV = sound_text("measured.csv")


def _put_csv(folder: Path, text: str, random: Random) -> Call:
    path, other = folder / "a.csv", folder / "b.csv"
    path.write_text(text, "utf-8", "surrogateescape")
    other.write_text("run,nodes,throughput,batch\na,1,100,64\nb,2,190,128\nc,4,340,256\n")
    calls = (("compare", str(other), str(path)), ("history", str(path)), ("scale", str(path)))
    return Call(arguments=(*random.of(calls), *random.one((), ("--json",))), num_bytes=size_bytes(folder))


def _put_settings(folder: Path, text: str, random: Random) -> Call:
    path = folder / "settings.toml"
    num_bytes = path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return Call(
        arguments=("config", random.one("--site-file", "--site-file", "--config"), str(path), "trace"),
        num_bytes=num_bytes,
    )


def _put_topology(folder: Path, text: str, random: Random) -> Call:
    run = SyntheticRun(hosts=("n1", "n2"), num_ranks=2, num_steps=8).write(folder / "run").path
    path = folder / ("topology.yaml" if text.startswith("-") else "topology.conf")
    num_bytes = path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return Call(arguments=("report", "--topology", str(path), str(run)), num_bytes=num_bytes)


def _put_log(folder: Path, text: str, random: Random) -> Call:
    (folder / "nccl.log").write_text(text, "utf-8", "surrogateescape")
    (folder / "n0.json").write_text(sound_snapshot())
    arguments = ("audit", "--from", str(folder / "n0.json"), "--nccl-log", str(folder / "nccl.log"))
    return Call(arguments=arguments, num_bytes=size_bytes(folder))


# What only one format makes costly

_HOST_LISTS = ("n[0-16000]", "n[0-99,0-99,0-99]", "n[00000000-00016383]", "a[0-9]b[0-9]c[0-9]")


def _host_lists(random: Random) -> str:
    line = f'2026-01-01,run,1.0,64,"{random.of(_HOST_LISTS)}",gpt2,8,64\n'
    return _CSV + line * (random.text_size() // 200)


def _made(place: Place, text: Text) -> Make:
    return lambda folder, random: place(folder, text(random), random)


def _kinds(prefix: str, group: str, sound: str, place: Place, **bounds: Any) -> list[Hostile]:
    """Return the kinds of one format: a sound text changed."""
    made = {name: _made(place, lambda random, change=change: change(sound, random)) for name, change in CHANGES.items()}
    return kinds_of(prefix, group, made, **bounds)


_OF_SETTINGS: dict[str, Any] = {"most_cpu_s": 1.0, "most_memory_bytes": 384 << 20}
# A report of a sound run without a file has 59 lines.
_OF_TOPOLOGY: dict[str, Any] = {"most_cpu_s": 2.0, "most_memory_bytes": 512 << 20, "most_lines": 80}
KINDS = (
    *_kinds("csv", "CSV files", _CSV, _put_csv),
    # A list of 11 letters may be of 16,000 nodes, each of which is compared; a file names a million at most.
    *kinds_of("csv", "CSV files", {"hosts": _made(_put_csv, _host_lists)}, most_cpu_s_per_mb=5.0),
    *_kinds("settings", "settings", sound_text("settings.toml"), _put_settings, **_OF_SETTINGS),
    *_kinds("topology", "topology files", sound_text("topology.conf"), _put_topology, **_OF_TOPOLOGY),
    *_kinds("topology-table", "topology files", sound_text("table.conf"), _put_topology, **_OF_TOPOLOGY),
    *_kinds("topology-yaml", "topology files", sound_text("topology.yaml"), _put_topology, **_OF_TOPOLOGY),
    *_kinds("nccl-log", "logs of NCCL", sound_text("nccl.log"), _put_log),
)
