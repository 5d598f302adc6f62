"""What a throughput in a table counts, by the name of its column: all ranks together, one GPU or one node."""

from __future__ import annotations

import re
from enum import StrEnum


class Per(StrEnum):
    """What a throughput is of."""

    TOTAL = "total"
    GPU = "gpu"
    NODE = "node"


_GPU = frozenset(("gpu", "gpus", "rank", "device", "card", "accelerator", "worker", "process", "gcd", "tpu", "npu"))
_NODE = frozenset(("node", "host", "server"))
_RATE = frozenset(
    (
        *(
            "throughput",
            "speed",
            "rate",
            "samples",
            "sample",
            "tokens",
            "token",
            "tok",
            "toks",
            "images",
            "image",
            "img",
        ),
        *("imgs", "sequences", "seqs", "seq", "sentences", "frames", "items", "examples", "records", "tps", "ips"),
    )
)
_TIME = frozenset(("s", "sec", "secs", "second", "seconds", "per", "in", "k"))


def per_of_column(name: str) -> Per | None:
    """Return what a column like `samples/s/GPU` or `throughput_per_gpu` is of; None if it is no throughput.

    A name that says neither GPU nor node is no throughput that this can recognise, because it may be of either.
    """
    words = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())
    found = {Per.GPU if word in _GPU else Per.NODE for word in words if word in _GPU | _NODE}
    if len(found) != 1 or not set(words) <= _GPU | _NODE | _RATE | _TIME:
        return None
    return found.pop() if _RATE & set(words) or "per" in words else None
