"""JSON made hostile: sound documents whose values are exchanged, nested, long or many, or whose bytes are hurt."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from experiments.damage.hostile.kind import SECRET, Call, Hostile, Random
from experiments.synthetic_run import SyntheticRun

Place = Callable[[Path, bytes, Random], Call]
"""Puts a document where a command reads it."""
CONTROL = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\r\n<script>alert(1)</script>=cmd|' /C calc'!A1"
_DIGITS = "9" * 4000
_ODD = (
    None, True, False, -1, 0, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, -1e308, 5e-324, 0.1,
    float("nan"), float("inf"), float("-inf"), "", "0", "1e999", "nan", "\x00", "\ud800", CONTROL, "/dev/zero", "$(id)",
    "../../../etc/passwd", _DIGITS, [], {}, [[]], [{}], {"": ""}, {"rank": 0}, [0], [None], ["a", 1], {"a": {"b": {}}},
)  # fmt: skip


def size_bytes(folder: Path) -> int:
    """Return what is in all regular files of a folder, without the holes of sparse ones."""
    found = [path.stat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(min(one.st_size, 512 * one.st_blocks) for one in found)


def text_size(random: Random) -> int:
    """Return the size of a large text by chance: 0.1 to 4 MB, small ones more often."""
    return int(100_000 * 40 ** random.random())


def kinds(prefix: str, format_: str, sound: Callable[[Path], Any], place: Place, **bounds: Any) -> tuple[Hostile, ...]:
    """Return the kinds of one document.

    Args:
        prefix: of their names.
        format_: the row of the table.
        sound: returns the values of a sound document, always new ones; it may put into the folder what goes with it.
        place: puts a document where it is read.
        bounds: of `Hostile`.
    """
    made: dict[str, Callable[[Any, Random], bytes]] = {
        "values": _values,
        "deep": _deep,
        "long": _long,
        "wide": _wide,
        "keys": _keys,
        "bytes": _bytes,
        "other": _other,
    }
    return tuple(
        Hostile(name=f"{prefix}-{name}", format=format_, make=partial(_make, sound, content, place), **bounds)
        for name, content in made.items()
    )


def _make(
    sound: Callable[[Path], Any], content: Callable[[Any, Random], bytes], place: Place, folder: Path, random: Random
) -> Call:
    return place(folder, content(sound(folder), random), random)


def one_of(choices: Sequence[Any], random: Random) -> Any:
    """Return one of several by chance."""
    return choices[int(random.integers(len(choices)))]


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
        return text.encode()
    container, key = one_of(places, random)
    container[key] = "@here@"
    return json.dumps(content).replace('"@here@"', text).encode()


def _deep(content: Any, random: Random) -> bytes:
    depth = int(10 ** random.uniform(2, 6))
    sign, close = one_of((("[", "]"), ('{"a":', "}")), random)
    middle = "" if sign == "[" else "0"
    return _in_place_of(content, random, sign * depth + middle + (close * depth if random.random() < 0.8 else ""))


def _long(content: Any, random: Random) -> bytes:
    letter = one_of(
        ("a", " ", "\\u001b[2J", "\\ud83d\\ude00", "\u00e4", "9", "\\n", "../", "[", "host[0-9]", "0,"), random
    )
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
    found = bytearray(_text(content))
    for _ in range(int(random.integers(1, 20))):
        found[int(random.integers(len(found)))] = int(random.integers(256))
    return bytes(found[: int(random.integers(len(found) + 1))] if random.random() < 0.3 else found)


def _other(content: Any, random: Random) -> bytes:
    """Return what is no such document at all."""
    del content
    size = text_size(random)
    return bytes(
        one_of(
            (b"", b"null", b"0", b'""', b"[]", b"{}", b"\xff\xfe{\x00}\x00", b"\0" * size, random.bytes(size), b"{" * 9,
             b"\xef\xbb\xbf{}", b"-" * size, b"9" * size, b'"' + b"\\" * size, _text(one_of(_ODD, random))),
            random,
        )
    )  # fmt: skip


@cache
def _runs() -> Path:
    """Return a folder of sound runs, which goes with this process."""
    holder = tempfile.TemporaryDirectory(prefix="hpcpace-sound-")
    _HOLDERS.append(holder)
    folder = Path(holder.name)
    for nodes in (1, 2, 4):
        hosts = tuple(f"n{node}" for node in range(nodes))
        SyntheticRun(num_ranks=nodes, num_steps=20, hosts=hosts, noise=0.02, samples_per_step=8).write(
            folder / f"run{nodes}"
        )
    (folder / "secret").write_text(SECRET)
    return folder


_HOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def sound_run(path: Path, *, nodes: int = 2) -> Path:
    """Copy a sound run of so many nodes, 1, 2 or 4, to a path."""
    shutil.copytree(_runs() / f"run{nodes}", path)
    return path


def secret_file() -> Path:
    """Return a file that no output may show."""
    return _runs() / "secret"
