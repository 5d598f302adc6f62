"""Text made hostile: CSV files of measured runs, settings in TOML, and topology files in both forms that Slurm has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from experiments.damage.hostile.engine import (
    CONTROL,
    Call,
    Hostile,
    Random,
    kinds_of,
    numbered,
    one_of,
    size_between,
    size_bytes,
    text_size,
)
from experiments.synthetic_run import SyntheticRun

_CSV_HEADER = "date,run,step_time_s,throughput,nodes,job,ranks,batch\n"
_CSV_SOUND = "2026-01-{day:02d},run{n},1.{n:03d},{rate},n[0-1],gpt2,8,64\n"
_CSV_STEERING = CONTROL.replace("\n", "")
_CSV_ODD = (
    "", "nan", "inf", "-1", "0", "1e999", "9" * 400, "1_000", "²", "٣", _CSV_STEERING, '"', '"a""b"', "=1+1",
    "n[0-999999999]", "n[0-99][0-99][0-99]", "[" * 200, "n[0-9", "2026-13-45", "9999-12-31", "0000-00-00", "a" * 5000,
    "\x00", "-inf", "+1", "1e-320", "n0," * 20,
)  # fmt: skip


def _csv_call(folder: Path, content: str | bytes, random: Random) -> Call:
    path, other = folder / "a.csv", folder / "b.csv"
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    other.write_text("run,nodes,throughput,batch\na,1,100,64\nb,2,190,128\nc,4,340,256\n")
    options = one_of(((), ("--json",)), random)
    calls = (("compare", str(other), str(path)), ("history", str(path)), ("scale", str(path)))
    return Call(arguments=(*one_of(calls, random), *options), num_bytes=size_bytes(folder))


def _csv_rows(count: int) -> list[list[str]]:
    lines = [
        _CSV_SOUND.format(day=1 + n % 28, n=n % 1000, rate=round(64 / (1 + n % 1000 / 1000), 3)).strip().split(",")
        for n in range(count)
    ]
    return [[_CSV_HEADER.strip()], *lines]


def _csv_joined(rows: list[list[str]]) -> str:
    return "\n".join(",".join(row) for row in rows) + "\n"


def _csv_values(folder: Path, random: Random) -> Call:
    rows = _csv_rows(int(random.integers(3, 60)))
    for _ in range(int(random.integers(1, 10))):
        row = rows[int(random.integers(1, len(rows)))]
        row[int(random.integers(len(row)))] = str(one_of(_CSV_ODD, random))
    return _csv_call(folder, _csv_joined(rows), random)


def _csv_many(folder: Path, random: Random) -> Call:
    """As many sound lines as there is room for, of one job or of a job and nodes each."""
    rows = _csv_rows(text_size(random) // 60)
    kind = int(random.integers(4))
    for n, row in enumerate(rows[1:]):
        row[1] = f"run{n}"
        if kind == 1:
            row[5] = f"job{n}"
        elif kind == 2:
            row[4] = f"n{n}"
        elif kind == 3:
            row[2] = f"{1 + n % 2}.{n}"
    return _csv_call(folder, _csv_joined(rows), random)


def _csv_wrong_lines(folder: Path, random: Random) -> Call:
    """A mistake in every line."""
    rows = _csv_rows(text_size(random) // 60)
    odd = str(one_of(_CSV_ODD, random))
    column = int(random.integers(8))
    for row in rows[1:]:
        row[column] = odd[:60]
    return _csv_call(folder, _csv_joined(rows), random)


def _csv_columns(folder: Path, random: Random) -> Call:
    count = text_size(random) // 10
    names = [one_of(("run", "step_time_s", "x", _CSV_STEERING, ""), random) for _ in range(count)]
    return _csv_call(folder, ",".join(names) + "\n" + "," * count + "\n", random)


def _csv_long(folder: Path, random: Random) -> Call:
    """One field of megabytes, quoted, never closed, or of brackets."""
    size = text_size(random)
    text = one_of(("a", '""', "\n", "[", "n[0-9],", "9", "\x1b[2J", "\u202e", "0-"), random)
    field = text * (size // len(text))
    rows = _csv_rows(3)
    rows[2][int(random.integers(8))] = one_of((f'"{field}"', f'"{field}', field), random)
    return _csv_call(folder, _csv_joined(rows), random)


def _csv_hosts(folder: Path, random: Random) -> Call:
    """Lists of hosts that expand to millions, in many lines."""
    rows = _csv_rows(text_size(random) // 200)
    text = one_of(("n[0-16000]", "n[0-99,0-99,0-99]", "n[00000000-00016383]", "a[0-9]b[0-9]c[0-9]"), random)
    for row in rows[1:]:
        row[4] = f'"{text}"'
    return _csv_call(folder, _csv_joined(rows), random)


def _csv_bytes(folder: Path, random: Random) -> Call:
    content = one_of(
        (b"", b"\xff", b"\0" * 1000, b"\xef\xbb\xbf", random.bytes(text_size(random)), b"\n" * 10**6), random
    )
    return _csv_call(folder, content, random)


"""A list of 11 letters may be of 16,000 nodes, each of which is compared; a file names a million at most."""


_RULE = "[[rollout]]\nnodes = ['{}']\ntrace.enabled = true\n"


def _settings_nested(random: Random) -> str:
    begin = one_of(("[", "{a = ", "[{a = ", "[["), random)
    return f"{one_of(('a', 'trace', 'rollout'), random)} = " + begin * size_between(random, 900, 200_000)


def _settings_keys_of_many_parts(random: Random) -> str:
    number = size_between(random, 1_000, 300_000)
    key = ".".join(one_of(("a", "trace", '"."'), random) for _ in range(number))
    return one_of(("{} = 1\n", "[{}]\n", "[[{}]]\n", "a = {{ {} = 1 }}\n"), random).format(key)


def _settings_numbers(random: Random) -> str:
    digits = size_between(random, 1_000, 900_000)
    value = ("9" * digits, "0x" + "f" * digits, "1e" + "9" * digits, "0." + "1" * digits, "-inf", "nan", "1_" * digits)
    key = ("trace.max_rows", "clock.interval_s", "trace.enabled", "trace.detail", "audit.ignore", "report.memory")
    return f"{one_of(key, random)} = {one_of(value, random)}1\n"


def _settings_unknown(random: Random) -> str:
    number = size_between(random, 10_000, 60_000)
    return one_of(("", "[trace]\n", "[lab]\n"), random) + numbered(number, lambda i: f"key{i} = {i}")


def _settings_sections(random: Random) -> str:
    return numbered(size_between(random, 10_000, 60_000), lambda i: f"[section{i}]\na = 1")


def _settings_rules(random: Random) -> str:
    number = size_between(random, 50, 10_000)
    what = one_of(("share = 0.5", "partitions = ['a']", "nodes = ['n[1-1000]']", "users = 'a'"), random)
    return numbered(number, lambda i: f"[[rollout]]\n{what}\ntrace.flush_interval_s = {i + 1}")


def _settings_nodes(random: Random) -> str:
    number = size_between(random, 1_000, 500_000)
    text = ("[" * number, "n[" * number, "n," * number, "n[1-65536]," * (number // 20), "n" * number + "[1-65536]")
    return _RULE.format(one_of(text, random)) * int(random.integers(1, 3))


def _settings_many_nodes(random: Random) -> str:
    number = size_between(random, 2, 100)
    return "".join(_RULE.format(f"n{i if number % 2 else ''}[1-65536]") for i in range(number))


def _settings_texts(random: Random) -> str:
    number = size_between(random, 10_000, 900_000)
    text = "".join(one_of(("x", "\\u001b]0;a\\u0007", "\\u0000", "\\U0001F600"), random) for _ in range(number // 8))
    key = ("trace.trace_dir", "trace.detail", "trace.detail_steps", "report.memory", "metrics.prometheus", "x")
    return f'{one_of(key, random)} = "{text}"\n'


def _settings_lists(random: Random) -> str:
    number = size_between(random, 10_000, 150_000)
    value = one_of(("'a', ", "1, ", "[], ", "{}, ", "['a', [1]], "), random)
    return f"{one_of(('audit.ignore', 'lab.share', 'trace.detail', 'rollout'), random)} = [{value * number}]\n"


def _settings_bytes(random: Random) -> str:
    letters = '[[rollout]].trace=enabled\'"""0123456789 \n\t\\#\x1b\x07\u202eé{},_e+-'
    chosen = random.integers(0, len(letters), size_between(random, 10_000, 900_000))
    return "[trace]\n" + "".join(letters[i] for i in chosen)


def _settings_comments(random: Random) -> str:
    return one_of((" ", "\n", "#\n", "\t#x\n", "# é\n"), random) * size_between(random, 50_000, 1_500_000)


def _settings_made(text: Callable[[Random], str]) -> Callable[[Path, Random], Call]:
    def make(folder: Path, random: Random) -> Call:
        path = folder / "settings.toml"
        path.write_text(text(random))
        option = one_of(("--site-file", "--config"), random)
        return Call(arguments=("config", option, str(path), "trace"), num_bytes=path.stat().st_size)

    return make


def _topology_hosts(random: Random) -> str:
    """Return a list of hosts that is none, or takes long to expand."""
    number = size_between(random, 30_000, 1_000_000)
    return one_of(
        (
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
        ),
        random,
    )


def _topology_brackets(random: Random) -> str:
    return f"SwitchName=s1 Nodes={_topology_hosts(random)}\n"


def _topology_many_lists(random: Random) -> str:
    return numbered(
        size_between(random, 100, 50_000), lambda i: f"SwitchName=s{i} Nodes=n{i}x[1-65536]{'[1]' * (i % 5)}"
    )


def _topology_one_switch(random: Random) -> str:
    number = size_between(random, 20_000, 100_000)
    return numbered(number, lambda i: f"SwitchName=s{i % (1 + number % 3)} Nodes=n{i}")


def _topology_names_twice(random: Random) -> str:
    number = size_between(random, 20_000, 100_000)
    return numbered(number, lambda i: f"SwitchName=s{i % (number // 2)} Nodes=n{i}")


def _topology_chain(random: Random) -> str:
    number = size_between(random, 20_000, 80_000)
    return numbered(number, lambda i: f"SwitchName=s{i} Nodes=n{i}\nSwitchName=s{i} Switches=s{i + 1}")


def _topology_loops(random: Random) -> str:
    number, length = size_between(random, 20_000, 80_000), size_between(random, 1, 80_000)
    return numbered(number, lambda i: f"n{i} s{i} s{i // length * length + (i + 1) % length}")


def _topology_wide(random: Random) -> str:
    """Return leaves below a switch, below very many others, or leaves each with many of their own."""
    number, wide = size_between(random, 5_000, 50_000), size_between(random, 100, 50_000)
    leaves = numbered(number, lambda i: f"SwitchName=l{i} Nodes=n{i}\nSwitchName=m{i % 997} Switches=l{i}")
    middle = numbered(min(number, 997), lambda i: f"SwitchName={'agg' if number % 2 else f'agg{i % 7}'} Switches=m{i}")
    return leaves + middle + numbered(wide, lambda i: f"SwitchName=s{i} Switches=agg,agg{i % 7}")


def _topology_lines_that_go_on(random: Random) -> str:
    number = size_between(random, 100_000, 1_500_000)
    return "\\\n" * number + "SwitchName=s1 Nodes=n[1-4]\n"


def _topology_words(random: Random) -> str:
    """Return lines that a regular expression may take long for."""
    number = size_between(random, 100_000, 3_000_000)
    return "SwitchName=s1 " + one_of(("a", " ", 'a="', "=", "\t", "\x0b", "\x85", "#", "aé"), random) * number


def _topology_bytes(random: Random) -> str:
    letters = 'SwitchName=Nodes[]-,0123456789 \n\t\\"#\x1b\x07\x9b\u202eé{}:*&!%'
    chosen = random.integers(0, len(letters), size_between(random, 10_000, 1_000_000))
    return "".join(letters[i] for i in chosen)


def _topology_table(random: Random) -> str:
    number = size_between(random, 20_000, 80_000)
    return numbered(number, lambda i: f"n{i} {' '.join(f's{(i * 7 + level) % number}' for level in range(7))}")


def _topology_entries(random: Random) -> str:
    number = size_between(random, 5_000, 60_000)
    return "- tree:\n    switches:\n" + numbered(
        number, lambda i: f"      - {{switch: s{i % (number // 2)}, children: 's[{i}-{i + 3}]'}}"
    )


def _topology_nested(random: Random) -> str:
    number = size_between(random, 3_000, 1_000_000)
    begin = one_of(("[", "{a: ", "- ", "? ", "[{a: ", "- ? ", "[]: ", "{["), random)
    return "- topology: t\n  tree:\n    " + begin * number


def _topology_values(random: Random) -> str:
    number = size_between(random, 50_000, 1_300_000)
    value = one_of(("a,", "a: b,", "[],", "~,", "'',", '"\\x1b",'), random)
    return f"- {{tree: {{switches: [{value * number}]}}}}"


def _topology_networks(random: Random) -> str:
    return numbered(
        size_between(random, 2_000, 60_000), lambda i: f"- {{topology: t{i}, tree: {{switches: [{{switch: s{i}}}]}}}}"
    )


def _topology_documents(random: Random) -> str:
    number = size_between(random, 50_000, 500_000)
    return ("--- a\n", "---\n", "...\n", "%TAG !e! t\n", "- !!int 1\n", "- &a b\n", "- *a\n", "#\n")[
        random.integers(8)
    ] * number


def _topology_keys(random: Random) -> str:
    number = size_between(random, 20_000, 200_000)
    modulus = one_of((number, number - 1, 1), random)
    return "- topology: t\n" + numbered(number, lambda i: f"  k{i % modulus}: {i}")


def _topology_scalars(random: Random) -> str:
    number = size_between(random, 100_000, 4_000_000)
    text = ("9" * number, "1:" * (number // 2) + "1", "'" + "a\n\n" * (number // 3) + "'", "a " * (number // 2))
    where = one_of(("- topology: {}\n", "- tree: {{switches: [{{switch: {}}}]}}\n", "- {}\n"), random)
    return where.format(one_of(text, random))


def _topology_made(text: Callable[[Random], str], name: str) -> Callable[[Path, Random], Call]:
    def make(folder: Path, random: Random) -> Call:
        run = SyntheticRun(hosts=("n1", "n2"), num_ranks=2, num_steps=8).write(folder / "run").path
        path = folder / name
        path.write_bytes(text(random).encode())
        return Call(arguments=("report", "--topology", str(path), str(run)), num_bytes=path.stat().st_size)

    return make


def _named(prefix: str, makers: tuple[Callable[[Random], str], ...]) -> dict[str, Callable[[Random], str]]:
    return {make.__name__.removeprefix(prefix).replace("_", "-"): make for make in makers}


_SETTINGS = (
    *(_settings_nested, _settings_keys_of_many_parts, _settings_numbers, _settings_unknown, _settings_sections),
    *(_settings_rules, _settings_nodes, _settings_many_nodes, _settings_texts, _settings_lists, _settings_bytes),
    _settings_comments,
)
_TOPOLOGY = (
    *(_topology_brackets, _topology_many_lists, _topology_one_switch, _topology_names_twice, _topology_chain),
    *(_topology_loops, _topology_wide, _topology_lines_that_go_on, _topology_words, _topology_bytes, _topology_table),
)
_YAML = (
    *(_topology_entries, _topology_nested, _topology_values, _topology_networks, _topology_documents, _topology_keys),
    *(_topology_scalars, _topology_bytes),
)
# A report of a sound run without a file has 59 lines.
_OF_TOPOLOGY = {"most_cpu_s": 2.0, "most_memory_bytes": 512 << 20, "most_lines": 80}
KINDS = (
    *kinds_of(
        "csv",
        "CSV files",
        {
            "values": _csv_values,
            "many": _csv_many,
            "wrong-lines": _csv_wrong_lines,
            "columns": _csv_columns,
            "long": _csv_long,
            "bytes": _csv_bytes,
        },
    ),
    # A list of 11 letters may be of 16,000 nodes, each of which is compared; a file names a million at most.
    Hostile(name="csv-hosts", format="CSV files", make=_csv_hosts, most_cpu_s_per_mb=5.0),
    *kinds_of(
        "settings",
        "settings",
        {name: _settings_made(text) for name, text in _named("_settings_", _SETTINGS).items()},
        most_cpu_s=1.0,
        most_memory_bytes=384 << 20,
    ),
    *kinds_of(
        "topology",
        "topology files",
        {
            **{name: _topology_made(text, "topology.conf") for name, text in _named("_topology_", _TOPOLOGY).items()},
            **{
                f"yaml-{name}": _topology_made(text, "topology.yaml")
                for name, text in _named("_topology_", _YAML).items()
            },
        },
        **_OF_TOPOLOGY,
    ),
)
