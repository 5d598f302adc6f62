"""CSV files of measured runs, which `compare`, `history` and `scale` read."""

from __future__ import annotations

from pathlib import Path

from experiments.damage.hostile.documents import CONTROL, one_of, size_bytes, text_size
from experiments.damage.hostile.kind import Call, Hostile, Random

_FORMAT = "CSV files"
_HEADER = "date,run,step_time_s,throughput,nodes,job,ranks,batch\n"
_SOUND = "2026-01-{day:02d},run{n},1.{n:03d},{rate},n[0-1],gpt2,8,64\n"
_STEERING = CONTROL.replace("\n", "")
_ODD = (
    "", "nan", "inf", "-1", "0", "1e999", "9" * 400, "1_000", "²", "٣", _STEERING, '"', '"a""b"', "=1+1",
    "n[0-999999999]", "n[0-99][0-99][0-99]", "[" * 200, "n[0-9", "2026-13-45", "9999-12-31", "0000-00-00", "a" * 5000,
    "\x00", "-inf", "+1", "1e-320", "n0," * 20,
)  # fmt: skip


def _call(folder: Path, content: str | bytes, random: Random) -> Call:
    path, other = folder / "a.csv", folder / "b.csv"
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    other.write_text("run,nodes,throughput,batch\na,1,100,64\nb,2,190,128\nc,4,340,256\n")
    options = one_of(((), ("--json",)), random)
    calls = (("compare", str(other), str(path)), ("history", str(path)), ("scale", str(path)))
    return Call(arguments=(*one_of(calls, random), *options), num_bytes=size_bytes(folder))


def _rows(count: int) -> list[list[str]]:
    lines = [
        _SOUND.format(day=1 + n % 28, n=n % 1000, rate=round(64 / (1 + n % 1000 / 1000), 3)).strip().split(",")
        for n in range(count)
    ]
    return [[_HEADER.strip()], *lines]


def _joined(rows: list[list[str]]) -> str:
    return "\n".join(",".join(row) for row in rows) + "\n"


def _values(folder: Path, random: Random) -> Call:
    rows = _rows(int(random.integers(3, 60)))
    for _ in range(int(random.integers(1, 10))):
        row = rows[int(random.integers(1, len(rows)))]
        row[int(random.integers(len(row)))] = str(one_of(_ODD, random))
    return _call(folder, _joined(rows), random)


def _many(folder: Path, random: Random) -> Call:
    """As many sound lines as there is room for, of one job or of a job and nodes each."""
    rows = _rows(text_size(random) // 60)
    kind = int(random.integers(4))
    for n, row in enumerate(rows[1:]):
        row[1] = f"run{n}"
        if kind == 1:
            row[5] = f"job{n}"
        elif kind == 2:
            row[4] = f"n{n}"
        elif kind == 3:
            row[2] = f"{1 + n % 2}.{n}"
    return _call(folder, _joined(rows), random)


def _wrong_lines(folder: Path, random: Random) -> Call:
    """A mistake in every line."""
    rows = _rows(text_size(random) // 60)
    odd = str(one_of(_ODD, random))
    column = int(random.integers(8))
    for row in rows[1:]:
        row[column] = odd[:60]
    return _call(folder, _joined(rows), random)


def _columns(folder: Path, random: Random) -> Call:
    count = text_size(random) // 10
    names = [one_of(("run", "step_time_s", "x", _STEERING, ""), random) for _ in range(count)]
    return _call(folder, ",".join(names) + "\n" + "," * count + "\n", random)


def _long(folder: Path, random: Random) -> Call:
    """One field of megabytes, quoted, never closed, or of brackets."""
    size = text_size(random)
    text = one_of(("a", '""', "\n", "[", "n[0-9],", "9", "\x1b[2J", "\u202e", "0-"), random)
    field = text * (size // len(text))
    rows = _rows(3)
    rows[2][int(random.integers(8))] = one_of((f'"{field}"', f'"{field}', field), random)
    return _call(folder, _joined(rows), random)


def _hosts(folder: Path, random: Random) -> Call:
    """Lists of hosts that expand to millions, in many lines."""
    rows = _rows(text_size(random) // 200)
    text = one_of(("n[0-16000]", "n[0-99,0-99,0-99]", "n[00000000-00016383]", "a[0-9]b[0-9]c[0-9]"), random)
    for row in rows[1:]:
        row[4] = f'"{text}"'
    return _call(folder, _joined(rows), random)


def _bytes(folder: Path, random: Random) -> Call:
    content = one_of(
        (b"", b"\xff", b"\0" * 1000, b"\xef\xbb\xbf", random.bytes(text_size(random)), b"\n" * 10**6), random
    )
    return _call(folder, content, random)


_MADE = {
    "values": _values,
    "many": _many,
    "wrong-lines": _wrong_lines,
    "columns": _columns,
    "long": _long,
    "hosts": _hosts,
    "bytes": _bytes,
}
_OF_HOSTS = {"most_cpu_s_per_mb": 5.0}
"""A list of 11 letters may be of 16,000 nodes, each of which is compared; a file names a million at most."""
KINDS = tuple(
    Hostile(name=f"csv-{name}", format=_FORMAT, make=make, **(_OF_HOSTS if name == "hosts" else {}))
    for name, make in _MADE.items()
)
