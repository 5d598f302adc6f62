"""Reads damaged copies of a sound trace; prints one JSON line each, before and after, so a crash names its input."""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpcpace.core.errors import TraceError
from hpcpace.trace.reader import read_trace

_MEMORY_BYTES = 4 << 30


def truncate(content: bytearray, choose: random.Random) -> None:
    # Within a word of 8 bytes: between two records, a cut journal is that of a rank which ended earlier.
    del content[choose.randrange(len(content)) | 1 :]


def flip_bits(content: bytearray, choose: random.Random) -> None:
    for _ in range(choose.choice((1, 3, 30))):
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)


def flip_early_bits(content: bytearray, choose: random.Random) -> None:
    """Where the superblock, the root group and the journal's header stand."""
    for _ in range(choose.choice((1, 3))):
        content[choose.randrange(2048)] ^= 1 << choose.randrange(8)


def overwrite(content: bytearray, choose: random.Random) -> None:
    begin = choose.randrange(len(content))
    size = min(choose.choice((8, 512, 4096)), len(content) - begin)
    content[begin : begin + size] = choose.choice((bytes(size), choose.randbytes(size)))


def swap(content: bytearray, choose: random.Random) -> None:
    one, other = (choose.randrange(len(content) - 512) for _ in range(2))
    content[one : one + 512], content[other : other + 512] = content[other : other + 512], content[one : one + 512]


def main(source: Path, folder: Path, num_inputs: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    path = folder / source.name
    originals = {item.suffix: item.read_bytes() for item in source.parent.iterdir()}
    damages: list[Callable[[bytearray, random.Random], None]] = [truncate, flip_bits, flip_early_bits, overwrite, swap]
    for seed in range(num_inputs):
        choose = random.Random(seed)
        damage, victims = (
            choose.choice(damages),
            choose.choice(((".h5",), (".h5",), (".journal",), (".h5", ".journal"))),
        )
        for suffix, original in originals.items():
            content = bytearray(original)
            if suffix in victims:
                damage(content, choose)
            path.with_suffix(suffix).write_bytes(content)
        print(json.dumps({"seed": seed, "damage": damage.__name__, "victims": victims}), flush=True)
        begin_ns = time.monotonic_ns()
        try:
            trace = read_trace(path)
        except TraceError as error:
            outcome = {"error": str(error), "names_file": path.stem in str(error)}
        else:
            lengths = {name: len(table) for name, table in trace.tables.items()}
            outcome = {"problems": trace.problems, "lengths": lengths}
        print(json.dumps({**outcome, "duration_ns": time.monotonic_ns() - begin_ns}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
