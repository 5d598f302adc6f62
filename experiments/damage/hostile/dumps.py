"""Flight Recorder dumps that somebody made up, as pickles and as JSON, and folders of them for `hpcpace hang`.

Each call reads one file or a few, or a folder of many, of foreign ones, and of links.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.damage.hostile.engine import SECRET, Call, Hostile, Random, kinds_of, one_of, with_changed_bytes

_FORMAT = "Flight Recorder dumps"
_BEGIN_NS = 1_758_610_505_000_000_000
_PLACEHOLDER = "@@HOSTILE"
_FIRST_MEMO = 0x7F000000
Table = dict[str, Any]


def entry(number: int, **changes: Any) -> Table:
    """Return an operation that has not finished."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": _BEGIN_NS + number * 10_000_000,
        "input_sizes": [[16, 2]],
        "input_dtypes": ["Float"],
        "output_sizes": [[16, 2]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
        "is_p2p": False,
        "frames": [{"name": "step", "filename": "train.py", "line": 44}],
        **changes,
    }


def dump(entries: list[Table], *, world: int = 2, **changes: Any) -> Table:
    """Return a dump of a job whose only group has all ranks."""
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}},
        "comm_lib_version": "2.27.3",
        "pg_status": {"0": {"last_enqueued_collective": len(entries)}},
        "entries": entries,
        **changes,
    }


def write(folder: Path, contents: Mapping[str, Any]) -> int:
    """Write dumps by their names, and return their bytes; what is bytes already is written as it is."""
    num_bytes = 0
    for name, content in contents.items():
        if isinstance(content, bytes):
            data = content
        else:
            data = json.dumps(content).encode() if name.endswith(".json") else pickle.dumps(content, 2)
        (folder / name).write_bytes(data)
        num_bytes += len(data)
    return num_bytes


def hang(folder: Path, num_bytes: int, **expected: Any) -> Call:
    """Return the call on a folder of dumps."""
    return Call(arguments=("hang", str(folder)), num_bytes=num_bytes, **expected)


def with_bytes(content: Table, value: bytes) -> bytes:
    """Return a pickle in which instructions stand in the place of `_PLACEHOLDER`."""
    text = _PLACEHOLDER.encode()
    return pickle.dumps(content, 2).replace(b"X" + len(text).to_bytes(4, "little") + text, value)


def shared(levels: int) -> bytes:
    """Return the instructions for a tuple of two times the same tuple, and so on."""
    memo = [(_FIRST_MEMO + level).to_bytes(4, "little") for level in range(levels)]
    return b")" + b"".join(b"r" + place + b"j" + place + b"\x86" for place in memo)


def _anywhere(random: Random, value: Any) -> Table:
    """Return a dump that has a value in one of its fields."""
    one, content = entry(0), dump([])
    keys = [*one, "frame", "group", "shape", *content, "ranks", "status"]
    key = one_of(keys, random)
    if key == "frame":
        one["frames"][0][one_of(("name", "filename", "line"), random)] = value
    elif key == "group":
        one["process_group"] = ("0", value)
    elif key == "shape":
        one["input_sizes"] = [[2, value]]
    elif key == "ranks":
        content["pg_config"]["0"]["ranks"] = value
    elif key == "status":
        content["pg_status"]["0"]["last_enqueued_collective"] = value
    elif key in one:
        one[key] = value
    return {**content, "entries": [one], **({key: value} if key in content else {})}


def _line(folder: Path, random: Random) -> Call:
    content = dump([entry(0, frames=[{"name": "step", "filename": "train.py", "line": _PLACEHOLDER}])])
    return hang(folder, write(folder, {"rank_0": with_bytes(content, shared(int(random.integers(20, 200))))}))


def _levels(folder: Path, random: Random) -> Call:
    contents = {
        f"rank_{rank}": with_bytes(_anywhere(random, _PLACEHOLDER), shared(int(random.integers(20, 2000))))
        for rank in range(4)
    }
    return hang(folder, write(folder, contents))


def _circle(folder: Path, random: Random) -> Call:
    memo = _FIRST_MEMO.to_bytes(4, "little")
    value = b"]r" + memo + b"j" + memo + b"a"
    contents = {f"rank_{rank}": with_bytes(_anywhere(random, _PLACEHOLDER), value) for rank in range(4)}
    return hang(folder, write(folder, contents))


def _memory(folder: Path, random: Random) -> Call:
    opcode = one_of((b"\x94", b"(", b"]", b")\x85", b"}", b"K\x01\x85"), random)
    data = b"\x80\x04N" + opcode * int(random.integers(1 << 20, 4 << 20)) + b"."
    return hang(folder, write(folder, {"rank_0": data}), codes=frozenset({2}))


def _same_entry(folder: Path, random: Random) -> Call:
    count = int(random.integers(20_000, 500_000))
    value = b"](" + _inner(entry(0)) + b"q\xff" + b"h\xff" * count + b"e"
    return hang(folder, write(folder, {"rank_0": with_bytes({**dump([]), "entries": _PLACEHOLDER}, value)}))


def _inner(value: Any) -> bytes:
    """Return the instructions for a value, without the begin and the end of a pickle."""
    return pickle.dumps(value, 2)[2:-1]


def _ranks_text(folder: Path, random: Random) -> Call:
    text = str(list(range(int(random.integers(10_000, 100_000)))))
    groups = {str(number): {"name": str(number), "desc": "", "ranks": text} for number in range(2000)}
    return hang(folder, write(folder, {"rank_0": dump([entry(0)], pg_config=groups)}))


def _long_text(folder: Path, random: Random) -> Call:
    letters = one_of(("x", "_v", "\x1b[2J", "a_tensor", "/", "9", "\U0001f600", "\u202e"), random)
    value = letters * int(random.integers(100_000, 1_000_000))
    names = ("rank_0", "rank_1.json")
    return hang(folder, write(folder, {name: _anywhere(random, value) for name in names}))


def _long_number(folder: Path, random: Random) -> Call:
    num_digits = int(random.integers(20, 600)) if random.integers(2) else 1_000_000
    number = "9" * num_digits
    text = json.dumps(_anywhere(random, _PLACEHOLDER)).replace(f'"{_PLACEHOLDER}"', number)
    return hang(folder, write(folder, {"rank_0": _anywhere(random, 10**600), "rank_1.json": text.encode()}))


def _far_rank(folder: Path, random: Random) -> Call:
    count = int(random.integers(10, 5000))
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 131071]"}}
    entries = [entry(number, process_group=("gloo", "default_pg")) for number in range(count)]
    return hang(folder, write(folder, {"rank_0": dump(entries, pg_config=groups)}))


def _unsaid_groups(folder: Path, random: Random) -> Call:
    count = int(random.integers(1000, 5000))
    entries = [entry(number, process_group=(f"g{number}", "")) for number in range(count)]
    return hang(folder, write(folder, {"rank_65535": dump(entries), "rank_0": dump(entries)}))


def _alone(folder: Path, random: Random) -> Call:
    """Many open operations in groups of one, that are held up by each other."""
    entries = [entry(number) for number in range(int(random.integers(1000, 8000)))]
    return hang(folder, write(folder, {"rank_0": dump(entries, world=1)}))


def _channels(folder: Path, random: Random) -> Call:
    """Many open operations, each in a group of its own, in another order on each rank."""
    count = int(random.integers(500, 3000))
    groups = {f"{n}": {"name": f"{n}", "desc": "", "ranks": "[0, 1]"} for n in range(count)}
    orders = [random.permutation(count).tolist() for _ in range(2)]
    contents = {
        f"rank_{rank}": dump(
            [entry(n, process_group=(str(g), ""), collective_seq_id=1) for n, g in enumerate(order)], pg_config=groups
        )
        for rank, order in enumerate(orders)
    }
    return hang(folder, write(folder, contents))


def _messages(folder: Path, random: Random) -> Call:
    world = int(random.integers(1000, 16_000))
    entries = [
        entry(n, profiling_name=f"nccl:send {n % 7}->{int(random.integers(2 * world))}", is_p2p=True, p2p_seq_id=n)
        for n in range(int(random.integers(1000, 4000)))
    ]
    return hang(folder, write(folder, {"rank_0": dump(entries, world=world), "rank_3": dump(entries, world=world)}))


def _names(folder: Path, random: Random) -> Call:
    entries = [
        entry(
            n, profiling_name=f"nccl:{n:x}" + ("_v", "_into_tensor", "_", "_tensor")[n % 4] * int(random.integers(15))
        )
        for n in range(2000)
    ]
    return hang(folder, write(folder, {"rank_0": dump(entries), "rank_1": dump(entries[::-1])}))


def _shapes(folder: Path, random: Random) -> Call:
    sizes = [[1 << 47] * int(random.integers(1, 100))] * int(random.integers(1000, 20_000))
    entries = [entry(n, input_sizes=sizes, input_dtypes=["Double"]) for n in range(500)]
    return hang(folder, write(folder, {"rank_0": dump(entries)}))


def _code(folder: Path, random: Random) -> Call:
    mark = folder / "ran"
    value = f"cos\nsystem\n(X{len(str(mark)) + 6:c}\0\0\0touch {mark}tR".encode()
    contents = {f"rank_{rank}": with_bytes(_anywhere(random, _PLACEHOLDER), value) for rank in range(2)}
    return hang(folder, write(folder, contents), codes=frozenset({2}), says=("asks for 'os.system'",))


def _wrong_values(folder: Path, random: Random) -> Call:
    values = (None, True, -1, 1 << 62, -(1 << 63), 1e308, float("nan"), [], {}, "", "\ud800", [[[[0]]]], {"a": 1})
    contents = {
        f"rank_{rank}{('', '.json')[rank % 2]}": _anywhere(random, one_of(values, random)) for rank in range(12)
    }
    return hang(folder, write(folder, contents))


def _bits(folder: Path, random: Random) -> Call:
    contents = {}
    for rank in range(8):
        data = pickle.dumps(dump([entry(number) for number in range(200)]), 2)
        contents[f"rank_{rank}"] = bytes(with_changed_bytes(data, 20, random))
    return hang(folder, write(folder, contents))


# A dump of some kilobytes may be of the last of 131,072 ranks, and all of them are looked at.


_CPU_S_PER_FILE = 0.004
"""To open one file, and to start processes that read them."""


def _same_fault(folder: Path, random: Random) -> Call:
    data = pickle.dumps(dump([entry(0)]), 2)[: int(random.integers(20, 200))]
    return hang(folder, write(folder, {f"rank_{rank}": data for rank in range(1000)}))


def _other_faults(folder: Path, random: Random) -> Call:
    contents = {}
    for rank in range(1000):
        contents[f"{'x' * int(random.integers(200))}\x1b[3{rank % 8}mrank_{rank}"] = dump(
            [entry(0, **{(*entry(0),)[rank % 8]: f"\u202e{rank}" * 40})],
            version=f"2.{rank}",
            comm_lib_version=f"v{rank}",
        )
    return hang(folder, write(folder, contents))


def _other_jobs(folder: Path, random: Random) -> Call:
    contents = {f"rank_{rank}": dump([entry(0)], pg_config={"0": {"ranks": [0, rank]}}) for rank in range(1, 500)}
    contents |= {f"x{rank}": dump([entry(int(random.integers(1 << 30)))]) for rank in range(500)}
    return hang(folder, write(folder, contents))


def _versions(folder: Path, random: Random) -> Call:
    """A job whose ranks each hold up another operation, of names and versions of their own."""
    contents = {}
    for pair in range(0, 600, 2):
        name = f"tp{pair}" + "y" * int(random.integers(150))
        groups = {
            "0": {"name": "0", "desc": "default_pg", "ranks": str([*range(600)])},
            name: {"name": name, "desc": name, "ranks": [pair, pair + 1]},
        }
        call = entry(1, process_group=(name, name), collective_seq_id=1, profiling_name="nccl:" + "z" * 150)
        done = entry(0, state="completed", time_discovered_completed_ns=entry(0)["time_created_ns"] + 1)
        for rank, entries in ((pair, [done, call]), (pair + 1, [done])):
            software = {"version": f"2.{rank}" + "0" * 30, "comm_lib_version": f"{rank}" + "9" * 30}
            contents[f"rank_{rank}"] = dump(entries, pg_config=groups, **software)
    return hang(folder, write(folder, contents))


def _foreign(folder: Path, random: Random) -> Call:
    for number in range(10_000):
        (folder / f"core.{number}").write_bytes(b"\x7fELF" * int(random.integers(1, 8)))
    num_bytes = write(folder, {f"rank_{rank}": dump([entry(0)]) for rank in range(2)})
    return hang(folder, num_bytes + 160_000)


def _links(folder: Path, random: Random) -> Call:
    secret = folder / "secret.txt"
    secret.write_text(f'{{"version": "{SECRET}", "pg_config": {{}}}}')
    num_bytes = write(folder, {"rank_0": dump([entry(0)])})
    for rank in range(1, 200):
        kind, place = int(random.integers(5)), folder / f"rank_{rank}"
        if kind == 0:
            place.symlink_to(secret)
        elif kind == 1:
            os.mkfifo(place)
        elif kind == 2:
            place.symlink_to("/dev/zero")
        elif kind == 3:
            place.symlink_to(folder)
        else:
            place.mkdir()
    return hang(folder, num_bytes)


def _half(folder: Path, random: Random) -> Call:
    """Half of the ranks of a large job, and operations that all of them are in."""
    world = int(random.integers(500, 1500))
    count = int(random.integers(1, 40))
    data = pickle.dumps(dump([entry(number) for number in range(count)], world=world), 2)
    return hang(folder, write(folder, {f"rank_{rank}": data for rank in range(0, world, 2)}))


# A dump of some kilobytes may be of the last of 131,072 ranks, and all of them are looked at.
KINDS = (
    *kinds_of(
        "dumps",
        _FORMAT,
        (
            *(_line, _levels, _circle, _memory, _same_entry, _ranks_text, _long_text, _long_number, _unsaid_groups),
            *(_alone, _channels, _messages, _names, _shapes, _code, _wrong_values, _bits),
        ),
    ),
    Hostile(name="dumps-far-rank", format=_FORMAT, make=_far_rank, most_cpu_s_per_mb=3.0),
    *kinds_of(
        "hang",
        "folders of hpcpace hang",
        (_same_fault, _other_faults, _other_jobs, _versions, _foreign, _links, _half),
        most_cpu_s=4.0 + _CPU_S_PER_FILE * 1000,
    ),
)
