"""Topology files of Slurm, in its plain and its YAML form, and tables of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from experiments.damage.hostile.kind import Call, Hostile, Random
from experiments.synthetic_run import SyntheticRun

_FORMAT = "topology files"
_Text = Callable[[Random], str]


def _size(random: Random, least: int, most: int) -> int:
    """Return a size by chance, as often below as above the geometric mean of its bounds."""
    return int(least * (most / least) ** random.random())


def _lines(number: int, line: Callable[[int], str]) -> str:
    return "\n".join(map(line, range(number))) + "\n"


def _hosts(random: Random) -> str:
    """Return a list of hosts that is none, or takes long to expand."""
    number = _size(random, 30_000, 1_000_000)
    return (
        "[" * number,
        "n[" * number,
        "n[1" * number,
        "n" + "[1]" * number,
        "n," * number,
        "n[" + "1," * number,
        "n[1-65536]" + "[1]" * 10,
        "n[1-65536]," * number,
        "n" * number + "[1-65536]",
        "n[" + "9" * number + "]",
    )[random.integers(10)]


def _brackets(random: Random) -> str:
    return f"SwitchName=s1 Nodes={_hosts(random)}\n"


def _many_lists(random: Random) -> str:
    return _lines(_size(random, 100, 50_000), lambda i: f"SwitchName=s{i} Nodes=n{i}x[1-65536]{'[1]' * (i % 5)}")


def _one_switch(random: Random) -> str:
    number = _size(random, 20_000, 100_000)
    return _lines(number, lambda i: f"SwitchName=s{i % (1 + number % 3)} Nodes=n{i}")


def _names_twice(random: Random) -> str:
    number = _size(random, 20_000, 100_000)
    return _lines(number, lambda i: f"SwitchName=s{i % (number // 2)} Nodes=n{i}")


def _chain(random: Random) -> str:
    number = _size(random, 20_000, 80_000)
    return _lines(number, lambda i: f"SwitchName=s{i} Nodes=n{i}\nSwitchName=s{i} Switches=s{i + 1}")


def _loops(random: Random) -> str:
    number, length = _size(random, 20_000, 80_000), _size(random, 1, 80_000)
    return _lines(number, lambda i: f"n{i} s{i} s{i // length * length + (i + 1) % length}")


def _wide(random: Random) -> str:
    """Return leaves below a switch, below very many others, or leaves each with many of their own."""
    number, wide = _size(random, 5_000, 50_000), _size(random, 100, 50_000)
    leaves = _lines(number, lambda i: f"SwitchName=l{i} Nodes=n{i}\nSwitchName=m{i % 997} Switches=l{i}")
    middle = _lines(min(number, 997), lambda i: f"SwitchName={'agg' if number % 2 else f'agg{i % 7}'} Switches=m{i}")
    return leaves + middle + _lines(wide, lambda i: f"SwitchName=s{i} Switches=agg,agg{i % 7}")


def _lines_that_go_on(random: Random) -> str:
    number = _size(random, 100_000, 1_500_000)
    return "\\\n" * number + "SwitchName=s1 Nodes=n[1-4]\n"


def _words(random: Random) -> str:
    """Return lines that a regular expression may take long for."""
    number = _size(random, 100_000, 3_000_000)
    return "SwitchName=s1 " + ("a", " ", 'a="', "=", "\t", "\x0b", "\x85", "#", "aé")[random.integers(9)] * number


def _bytes(random: Random) -> str:
    letters = 'SwitchName=Nodes[]-,0123456789 \n\t\\"#\x1b\x07\x9b\u202eé{}:*&!%'
    chosen = random.integers(0, len(letters), _size(random, 10_000, 1_000_000))
    return "".join(letters[i] for i in chosen)


def _table(random: Random) -> str:
    number = _size(random, 20_000, 80_000)
    return _lines(number, lambda i: f"n{i} {' '.join(f's{(i * 7 + level) % number}' for level in range(7))}")


def _entries(random: Random) -> str:
    number = _size(random, 5_000, 60_000)
    return "- tree:\n    switches:\n" + _lines(
        number, lambda i: f"      - {{switch: s{i % (number // 2)}, children: 's[{i}-{i + 3}]'}}"
    )


def _nested(random: Random) -> str:
    number = _size(random, 3_000, 1_000_000)
    begin = ("[", "{a: ", "- ", "? ", "[{a: ", "- ? ", "[]: ", "{[")[random.integers(8)]
    return "- topology: t\n  tree:\n    " + begin * number


def _values(random: Random) -> str:
    number = _size(random, 50_000, 1_300_000)
    value = ("a,", "a: b,", "[],", "~,", "'',", '"\\x1b",')[random.integers(6)]
    return f"- {{tree: {{switches: [{value * number}]}}}}"


def _networks(random: Random) -> str:
    return _lines(
        _size(random, 2_000, 60_000), lambda i: f"- {{topology: t{i}, tree: {{switches: [{{switch: s{i}}}]}}}}"
    )


def _documents(random: Random) -> str:
    number = _size(random, 50_000, 500_000)
    return ("--- a\n", "---\n", "...\n", "%TAG !e! t\n", "- !!int 1\n", "- &a b\n", "- *a\n", "#\n")[
        random.integers(8)
    ] * number


def _keys(random: Random) -> str:
    number = _size(random, 20_000, 200_000)
    modulus = (number, number - 1, 1)[random.integers(3)]
    return "- topology: t\n" + _lines(number, lambda i: f"  k{i % modulus}: {i}")


def _scalars(random: Random) -> str:
    number = _size(random, 100_000, 4_000_000)
    text = ("9" * number, "1:" * (number // 2) + "1", "'" + "a\n\n" * (number // 3) + "'", "a " * (number // 2))
    where = ("- topology: {}\n", "- tree: {{switches: [{{switch: {}}}]}}\n", "- {}\n")[random.integers(3)]
    return where.format(text[random.integers(4)])


def _made(text: _Text, name: str) -> Callable[[Path, Random], Call]:
    def make(folder: Path, random: Random) -> Call:
        run = SyntheticRun(hosts=("n1", "n2"), num_ranks=2, num_steps=8).write(folder / "run").path
        path = folder / name
        path.write_bytes(text(random).encode())
        return Call(arguments=("report", "--topology", str(path), str(run)), num_bytes=path.stat().st_size)

    return make


def _kind(name: str, text: _Text, file: str = "topology.conf") -> Hostile:
    return Hostile(
        name=f"topology-{name}",
        format=_FORMAT,
        make=_made(text, file),
        most_cpu_s=2.0,
        most_memory_bytes=512 << 20,
        most_lines=80,  # a report of a sound run without a file has 59
    )


KINDS = (
    _kind("brackets", _brackets),
    _kind("many-lists", _many_lists),
    _kind("one-switch", _one_switch),
    _kind("names-twice", _names_twice),
    _kind("chain", _chain),
    _kind("loops", _loops),
    _kind("wide", _wide),
    _kind("lines-that-go-on", _lines_that_go_on),
    _kind("words", _words),
    _kind("bytes", _bytes),
    _kind("table", _table),
    _kind("yaml-entries", _entries, "topology.yaml"),
    _kind("yaml-nested", _nested, "topology.yaml"),
    _kind("yaml-values", _values, "topology.yaml"),
    _kind("yaml-networks", _networks, "topology.yaml"),
    _kind("yaml-documents", _documents, "topology.yaml"),
    _kind("yaml-keys", _keys, "topology.yaml"),
    _kind("yaml-scalars", _scalars, "topology.yaml"),
    _kind("yaml-bytes", _bytes, "topology.yaml"),
)
