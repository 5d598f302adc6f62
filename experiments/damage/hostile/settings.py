"""Settings in TOML, as the site's file has them with its roll-out, or a user's file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from experiments.damage.hostile.kind import Call, Hostile, Random

_FORMAT = "settings"
_RULE = "[[rollout]]\nnodes = ['{}']\ntrace.enabled = true\n"


def _size(random: Random, least: int, most: int) -> int:
    """Return a size by chance, as often below as above the geometric mean of its bounds."""
    return int(least * (most / least) ** random.random())


def _lines(number: int, line: Callable[[int], str]) -> str:
    return "\n".join(map(line, range(number))) + "\n"


def _nested(random: Random) -> str:
    begin = ("[", "{a = ", "[{a = ", "[[")[random.integers(4)]
    return f"{('a', 'trace', 'rollout')[random.integers(3)]} = " + begin * _size(random, 900, 200_000)


def _keys_of_many_parts(random: Random) -> str:
    number = _size(random, 1_000, 300_000)
    key = ".".join(("a", "trace", '"."')[random.integers(3)] for _ in range(number))
    return ("{} = 1\n", "[{}]\n", "[[{}]]\n", "a = {{ {} = 1 }}\n")[random.integers(4)].format(key)


def _numbers(random: Random) -> str:
    digits = _size(random, 1_000, 900_000)
    value = ("9" * digits, "0x" + "f" * digits, "1e" + "9" * digits, "0." + "1" * digits, "-inf", "nan", "1_" * digits)
    key = ("trace.max_rows", "clock.interval_s", "trace.enabled", "trace.detail", "audit.ignore", "report.memory")
    return f"{key[random.integers(6)]} = {value[random.integers(7)]}1\n"


def _unknown(random: Random) -> str:
    number = _size(random, 10_000, 60_000)
    return ("", "[trace]\n", "[lab]\n")[random.integers(3)] + _lines(number, lambda i: f"key{i} = {i}")


def _sections(random: Random) -> str:
    return _lines(_size(random, 10_000, 60_000), lambda i: f"[section{i}]\na = 1")


def _rules(random: Random) -> str:
    number = _size(random, 50, 10_000)
    what = ("share = 0.5", "partitions = ['a']", "nodes = ['n[1-1000]']", "users = 'a'")[random.integers(4)]
    return _lines(number, lambda i: f"[[rollout]]\n{what}\ntrace.flush_interval_s = {i + 1}")


def _nodes(random: Random) -> str:
    number = _size(random, 1_000, 500_000)
    text = ("[" * number, "n[" * number, "n," * number, "n[1-65536]," * (number // 20), "n" * number + "[1-65536]")
    return _RULE.format(text[random.integers(5)]) * int(random.integers(1, 3))


def _many_nodes(random: Random) -> str:
    number = _size(random, 2, 100)
    return "".join(_RULE.format(f"n{i if number % 2 else ''}[1-65536]") for i in range(number))


def _texts(random: Random) -> str:
    number = _size(random, 10_000, 900_000)
    text = "".join(
        ("x", "\\u001b]0;a\\u0007", "\\u0000", "\\U0001F600")[random.integers(4)] for _ in range(number // 8)
    )
    key = ("trace.trace_dir", "trace.detail", "trace.detail_steps", "report.memory", "metrics.prometheus", "x")
    return f'{key[random.integers(6)]} = "{text}"\n'


def _lists(random: Random) -> str:
    number = _size(random, 10_000, 150_000)
    value = ("'a', ", "1, ", "[], ", "{}, ", "['a', [1]], ")[random.integers(5)]
    return f"{('audit.ignore', 'lab.share', 'trace.detail', 'rollout')[random.integers(4)]} = [{value * number}]\n"


def _bytes(random: Random) -> str:
    letters = '[[rollout]].trace=enabled\'"""0123456789 \n\t\\#\x1b\x07\u202eé{},_e+-'
    chosen = random.integers(0, len(letters), _size(random, 10_000, 900_000))
    return "[trace]\n" + "".join(letters[i] for i in chosen)


def _comments(random: Random) -> str:
    return (" ", "\n", "#\n", "\t#x\n", "# é\n")[random.integers(5)] * _size(random, 50_000, 1_500_000)


def _made(text: Callable[[Random], str]) -> Callable[[Path, Random], Call]:
    def make(folder: Path, random: Random) -> Call:
        path = folder / "settings.toml"
        path.write_text(text(random))
        option = ("--site-file", "--config")[random.integers(2)]
        return Call(arguments=("config", option, str(path), "trace"), num_bytes=path.stat().st_size)

    return make


def _kind(name: str, text: Callable[[Random], str]) -> Hostile:
    return Hostile(
        name=f"settings-{name}",
        format=_FORMAT,
        make=_made(text),
        most_cpu_s=1.0,
        most_memory_bytes=384 << 20,
    )


KINDS = (
    _kind("nested", _nested),
    _kind("keys-of-many-parts", _keys_of_many_parts),
    _kind("numbers", _numbers),
    _kind("unknown", _unknown),
    _kind("sections", _sections),
    _kind("rules", _rules),
    _kind("nodes", _nodes),
    _kind("many-nodes", _many_nodes),
    _kind("texts", _texts),
    _kind("lists", _lists),
    _kind("bytes", _bytes),
    _kind("comments", _comments),
)
