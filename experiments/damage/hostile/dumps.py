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


def _far_rank(random: Random) -> dict[str, Any]:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 131071]"}}
    entries = [entry(number, process_group=("gloo", "default_pg")) for number in range(random.count(10, 5000))]
    return {"rank_0": dump(entries, pg_config=groups)}


def _names(random: Random) -> dict[str, Any]:
    parts = ("_v", "_into_tensor", "_", "_tensor")
    entries = [entry(n, profiling_name=f"nccl:{n:x}" + parts[n % 4] * random.count(0, 15)) for n in range(2000)]
    return {"rank_0": dump(entries), "rank_1": dump(entries[::-1])}


def _other_faults(random: Random) -> dict[str, Any]:
    def of(rank: int) -> Table:
        wrong = entry(0, **{(*entry(0),)[rank % 8]: f"\u202e{rank}" * 40})
        return dump([wrong], version=f"2.{rank}", comm_lib_version=f"v{rank}")

    return {f"{'x' * random.count(0, 200)}\x1b[3{rank % 8}mrank_{rank}": of(rank) for rank in range(1000)}


def _written(contents: Callable[[Random], dict[str, Any]]) -> Make:
    return lambda folder, random: hang(folder, write(folder, contents(random)))


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


def _bits(random: Random) -> dict[str, Any]:
    data = pickle.dumps(dump([*map(entry, range(200))]), 2)
    return {f"rank_{rank}": bytes(random.changed(data, 20)) for rank in range(8)}


_CPU_S_PER_FILE = 0.004
KINDS = (
    *kinds_of("dumps", _FORMAT, {"bits": _written(_bits), "names": _written(_names)}),
    # A dump of some kilobytes may be of the last of 131,072 ranks, and all of them are looked at.
    Hostile(name="dumps-far-rank", format=_FORMAT, make=_written(_far_rank), most_cpu_s_per_mb=3.0),
    *kinds_of(
        "hang",
        "folders of hpcpace hang",
        {"other-faults": _written(_other_faults), "foreign": _foreign, "links": _links},
        most_cpu_s=4.0 + _CPU_S_PER_FILE * 1000,
    ),
)
