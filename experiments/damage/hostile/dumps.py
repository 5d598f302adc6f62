"""Flight Recorder dumps that somebody made up, as pickles and as JSON, and folders of them for `hpcpace hang`.

Each call reads one file or a few, or a folder of many, of foreign ones, and of links.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.damage.chance import Random
from experiments.damage.hostile.engine import SECRET, Call, Hostile, Make, kinds_of, put_no_file

_FORMAT = "Flight Recorder dumps"
_BEGIN_NS = 1_758_610_505_000_000_000
_PLACEHOLDER = "@@HOSTILE"
_FIRST_MEMO = 0x7F000000
Table = dict[str, Any]


def entry(number: int, **changes: Any) -> Table:
    """Return an operation that has not finished."""
    return {
        **{"record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "profiling_name": "nccl:all_reduce"},
        **{"collective_seq_id": number + 1, "p2p_seq_id": 0, "is_p2p": False, "state": "scheduled", "retired": False},
        **{"input_sizes": [[16, 2]], "input_dtypes": ["Float"], "output_sizes": [[16, 2]], "output_dtypes": ["Float"]},
        **{"time_created_ns": _BEGIN_NS + number * 10_000_000, "time_discovered_started_ns": None},
        **{"time_discovered_completed_ns": None, "frames": [{"name": "step", "filename": "train.py", "line": 44}]},
        **changes,
    }


def dump(entries: list[Table], *, world: int = 2, **changes: Any) -> Table:
    """Return a dump of a job whose only group has all ranks."""
    return {
        **{"version": "2.10", "comm_lib_version": "2.27.3", "entries": entries},
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}},
        "pg_status": {"0": {"last_enqueued_collective": len(entries)}},
        **changes,
    }


def write(folder: Path, contents: Mapping[str, Any]) -> int:
    """Write dumps by their names, and return their bytes; what is bytes already is written as it is."""
    num_bytes = 0
    for name, content in contents.items():
        if not isinstance(content, bytes):
            content = json.dumps(content).encode() if name.endswith(".json") else pickle.dumps(content, 2)
        num_bytes += (folder / name).write_bytes(content)
    return num_bytes


def hang(folder: Path, num_bytes: int, **expected: Any) -> Call:
    """Return the call on a folder of dumps."""
    return Call(arguments=("hang", str(folder)), num_bytes=num_bytes, **expected)


def _with_bytes(content: Table, value: bytes) -> bytes:
    """Return a pickle in which instructions stand in the place of `_PLACEHOLDER`."""
    text = _PLACEHOLDER.encode()
    return pickle.dumps(content, 2).replace(b"X" + len(text).to_bytes(4, "little") + text, value)


def _shared(levels: int) -> bytes:
    """Return the instructions for a tuple of two times the same tuple, and so on."""
    memo = [(_FIRST_MEMO + level).to_bytes(4, "little") for level in range(levels)]
    return b")" + b"".join(b"r" + place + b"j" + place + b"\x86" for place in memo)


def _anywhere(random: Random, value: Any) -> Table:
    """Return a dump that has a value in one of its fields."""
    one, content = entry(0), dump([])
    inside: dict[str, tuple[Any, Any, Any]] = {
        "frame": (one["frames"][0], random.one("name", "filename", "line"), value),
        "group": (one, "process_group", ("0", value)),
        "shape": (one, "input_sizes", [[2, value]]),
        "ranks": (content["pg_config"]["0"], "ranks", value),
        "status": (content["pg_status"]["0"], "last_enqueued_collective", value),
    }
    content["entries"] = [one]
    key = random.of([*one, *inside, *content])
    place, name, value = inside.get(key, (one if key in one else content, key, value))
    place[name] = value
    return content


def _by_rank(content: Callable[[Random], Any], *, ranks: int = 4) -> Callable[[Random], dict[str, Any]]:
    """Return what makes a dump for each of some ranks, of odd ones as JSON unless it is bytes."""

    def make(random: Random) -> dict[str, Any]:
        made = [content(random) for _ in range(ranks)]
        return {f"rank_{n}{'.json' if n % 2 and not isinstance(one, bytes) else ''}": one for n, one in enumerate(made)}

    return make


def _levels(random: Random) -> bytes:
    return _with_bytes(_anywhere(random, _PLACEHOLDER), _shared(random.count(20, 2000)))


def _circle(random: Random) -> bytes:
    memo = _FIRST_MEMO.to_bytes(4, "little")
    return _with_bytes(_anywhere(random, _PLACEHOLDER), b"]r" + memo + b"j" + memo + b"a")


def _same_entry(random: Random) -> dict[str, Any]:
    inner = pickle.dumps(entry(0), 2)[2:-1]  # the instructions for it, without the begin and the end of a pickle
    value = b"](" + inner + b"q\xff" + b"h\xff" * random.count(20_000, 500_000) + b"e"
    return {"rank_0": _with_bytes({**dump([]), "entries": _PLACEHOLDER}, value)}


def _ranks_text(random: Random) -> dict[str, Any]:
    text = str(list(range(random.count(10_000, 100_000))))
    groups = {str(number): {"name": str(number), "desc": "", "ranks": text} for number in range(2000)}
    return {"rank_0": dump([entry(0)], pg_config=groups)}


def _long_number(random: Random) -> dict[str, Any]:
    number = "9" * random.one(random.count(20, 600), 1_000_000)
    text = json.dumps(_anywhere(random, _PLACEHOLDER)).replace(f'"{_PLACEHOLDER}"', number)
    return {"rank_0": _anywhere(random, 10**600), "rank_1.json": text.encode()}


def _far_rank(random: Random) -> dict[str, Any]:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 131071]"}}
    entries = [entry(number, process_group=("gloo", "default_pg")) for number in range(random.count(10, 5000))]
    return {"rank_0": dump(entries, pg_config=groups)}


def _unsaid_groups(random: Random) -> dict[str, Any]:
    entries = [entry(number, process_group=(f"g{number}", "")) for number in range(random.count(1000, 5000))]
    return {"rank_65535": dump(entries), "rank_0": dump(entries)}


def _channels(random: Random) -> dict[str, Any]:
    """Many open operations, each in a group of its own, in another order on each rank."""
    count = random.count(500, 3000)
    groups = {f"{n}": {"name": f"{n}", "desc": "", "ranks": "[0, 1]"} for n in range(count)}

    def entries() -> list[Table]:
        order = enumerate(random.permutation(count).tolist())
        return [entry(n, process_group=(str(group), ""), collective_seq_id=1) for n, group in order]

    return {f"rank_{rank}": dump(entries(), pg_config=groups) for rank in range(2)}


def _messages(random: Random) -> dict[str, Any]:
    world = random.count(1000, 16_000)
    entries = [
        entry(n, profiling_name=f"nccl:send {n % 7}->{random.count(0, 2 * world)}", is_p2p=True, p2p_seq_id=n)
        for n in range(random.count(1000, 4000))
    ]
    return {f"rank_{rank}": dump(entries, world=world) for rank in (0, 3)}


def _names(random: Random) -> dict[str, Any]:
    parts = ("_v", "_into_tensor", "_", "_tensor")
    entries = [entry(n, profiling_name=f"nccl:{n:x}" + parts[n % 4] * random.count(0, 15)) for n in range(2000)]
    return {"rank_0": dump(entries), "rank_1": dump(entries[::-1])}


def _shapes(random: Random) -> dict[str, Any]:
    sizes = [[1 << 47] * random.count(1, 100)] * random.count(1000, 20_000)
    return {"rank_0": dump([entry(n, input_sizes=sizes, input_dtypes=["Double"]) for n in range(500)])}


def _same_fault(random: Random) -> dict[str, Any]:
    data = pickle.dumps(dump([entry(0)]), 2)[: random.count(20, 200)]
    return {f"rank_{rank}": data for rank in range(1000)}


def _other_faults(random: Random) -> dict[str, Any]:
    def of(rank: int) -> Table:
        wrong = entry(0, **{(*entry(0),)[rank % 8]: f"\u202e{rank}" * 40})
        return dump([wrong], version=f"2.{rank}", comm_lib_version=f"v{rank}")

    return {f"{'x' * random.count(0, 200)}\x1b[3{rank % 8}mrank_{rank}": of(rank) for rank in range(1000)}


def _other_jobs(random: Random) -> dict[str, Any]:
    contents = {f"rank_{rank}": dump([entry(0)], pg_config={"0": {"ranks": [0, rank]}}) for rank in range(1, 500)}
    return contents | {f"x{rank}": dump([entry(random.count(0, 1 << 30))]) for rank in range(500)}


def _versions(random: Random) -> dict[str, Any]:
    """A job whose ranks each hold up another operation, of names and versions of their own."""
    contents = {}
    whole = {"name": "0", "desc": "default_pg", "ranks": str([*range(600)])}
    done = entry(0, state="completed", time_discovered_completed_ns=_BEGIN_NS + 1)
    for pair in range(0, 600, 2):
        name = f"tp{pair}" + "y" * random.count(0, 150)
        groups = {"0": whole, name: {"name": name, "desc": name, "ranks": [pair, pair + 1]}}
        call = entry(1, process_group=(name, name), collective_seq_id=1, profiling_name="nccl:" + "z" * 150)
        for rank, entries in ((pair, [done, call]), (pair + 1, [done])):
            software = {"version": f"2.{rank}" + "0" * 30, "comm_lib_version": f"{rank}" + "9" * 30}
            contents[f"rank_{rank}"] = dump(entries, pg_config=groups, **software)
    return contents


def _half(random: Random) -> dict[str, Any]:
    """Half of the ranks of a large job, and operations that all of them are in."""
    world = random.count(500, 1500)
    data = pickle.dumps(dump([entry(number) for number in range(random.count(1, 40))], world=world), 2)
    return {f"rank_{rank}": data for rank in range(0, world, 2)}


_OPERATIONS = (b"\x94", b"(", b"]", b")\x85", b"}", b"K\x01\x85")
_LINE: Table = {"name": "step", "filename": "train.py", "line": _PLACEHOLDER}
_DUMPS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "line": lambda r: {"rank_0": _with_bytes(dump([entry(0, frames=[_LINE])]), _shared(r.count(20, 200)))},
    "levels": _by_rank(_levels),
    "circle": _by_rank(_circle),
    "same-entry": _same_entry,
    "ranks-text": _ranks_text,
    "long-number": _long_number,
    "unsaid-groups": _unsaid_groups,
    # Many open operations in groups of one, that are held up by each other.
    "alone": lambda r: {"rank_0": dump([entry(number) for number in range(r.count(1000, 8000))], world=1)},
    "channels": _channels,
    "messages": _messages,
    "names": _names,
    "shapes": _shapes,
    "bits": _by_rank(lambda r: bytes(r.changed(pickle.dumps(dump([*map(entry, range(200))]), 2), 20)), ranks=8),
}
_FOLDERS = {
    **{"same-fault": _same_fault, "other-faults": _other_faults, "other-jobs": _other_jobs, "versions": _versions},
    "half": _half,
}


def _written(contents: Callable[[Random], dict[str, Any]]) -> Make:
    return lambda folder, random: hang(folder, write(folder, contents(random)))


def _memory(folder: Path, random: Random) -> Call:
    data = b"\x80\x04N" + random.of(_OPERATIONS) * random.count(1 << 20, 4 << 20) + b"."
    return hang(folder, write(folder, {"rank_0": data}), codes=frozenset({2}))


def _code(folder: Path, random: Random) -> Call:
    mark = folder / "ran"
    value = f"cos\nsystem\n(X{len(str(mark)) + 6:c}\0\0\0touch {mark}tR".encode()
    contents = {f"rank_{rank}": _with_bytes(_anywhere(random, _PLACEHOLDER), value) for rank in range(2)}
    return hang(folder, write(folder, contents), codes=frozenset({2}), says=("asks for 'os.system'",))


def _foreign(folder: Path, random: Random) -> Call:
    for number in range(10_000):
        (folder / f"core.{number}").write_bytes(b"\x7fELF" * random.count(1, 8))
    return hang(folder, write(folder, {f"rank_{rank}": dump([entry(0)]) for rank in range(2)}) + 160_000)


def _links(folder: Path, random: Random) -> Call:
    secret = folder / "secret.txt"
    secret.write_text(f'{{"version": "{SECRET}", "pg_config": {{}}}}')
    num_bytes = write(folder, {"rank_0": dump([entry(0)])})
    for rank in range(1, 200):
        put_no_file(folder / f"rank_{rank}", random, lambda path: path.symlink_to(random.one(secret, folder)))
    return hang(folder, num_bytes)


_CPU_S_PER_FILE = 0.004
"""To open one file, and to start processes that read them."""
_MADE = {name: _written(contents) for name, contents in _DUMPS.items()}
KINDS = (
    *kinds_of("dumps", _FORMAT, _MADE | {"memory": _memory, "code": _code}),
    # A dump of some kilobytes may be of the last of 131,072 ranks, and all of them are looked at.
    Hostile(name="dumps-far-rank", format=_FORMAT, make=_written(_far_rank), most_cpu_s_per_mb=3.0),
    *kinds_of(
        "hang",
        "folders of hpcpace hang",
        {name: _written(contents) for name, contents in _FOLDERS.items()} | {"foreign": _foreign, "links": _links},
        most_cpu_s=4.0 + _CPU_S_PER_FILE * 1000,
    ),
)
