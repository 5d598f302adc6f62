"""Snapshots that `audit --from` reads, trees of /sys and /proc that `--sysfs-root` reads, and logs of NCCL."""

from __future__ import annotations

import json
import os
from functools import cache
from itertools import islice
from pathlib import Path

from experiments.damage.hostile import documents
from experiments.damage.hostile.documents import CONTROL, one_of, secret_file, size_bytes, text_size
from experiments.damage.hostile.kind import Call, Hostile, Random
from hpcpace.audit.snapshot import take_host
from hpcpace.audit.snapshot_files import snapshot_text
from hpcpace.audit.tree import Tree

_SNAPSHOTS, _TREES, _LOGS = "snapshots of audits", "trees of /sys and /proc", "logs of NCCL"
_OF_TREES = (
    "sys/devices/system/node", "sys/devices/system/cpu/cpu0/topology", "sys/class/net", "sys/bus/pci/devices",
    "sys/class/infiniband", "sys/class/drm", "proc/sys/net/core", "proc/sys/kernel",
)  # fmt: skip
_VALUES = (
    "", "0", "-1", "1e9", "9" * 18, "9" * 4000, "nan", "0-", "0-4294967295", "0-3,5,2-1", "," * 1000, "0x" + "f" * 9999,
    "ffffffff," * 400, "Ä", "\x00\xff", CONTROL, "\n" * 5000, "[always] madvise never", "../../../../etc/shadow",
    "0000:00:00.0",
)  # fmt: skip


@cache
def _snapshot_text() -> str:
    return snapshot_text(take_host(Tree(), host="n0"))


def _put_snapshot(folder: Path, content: bytes, random: Random) -> Call:
    (folder / "n0.json").write_text(_snapshot_text())
    (folder / "n1.json").write_bytes(content)
    options = one_of(((), ("--json",), ("--matrix",), ("--show",), ("--map",), ("--prometheus",)), random)
    return Call(arguments=("audit", "--from", str(folder), *options), num_bytes=size_bytes(folder))


def _many_snapshots(folder: Path, random: Random) -> Call:
    """Hundreds of hosts that differ in everything."""
    content = json.loads(_snapshot_text())
    size = len(_snapshot_text())
    for host in range(max(text_size(random) // size, 2)):
        content["host"] = f"n{host}" if random.random() < 0.9 else f"{CONTROL}{host}"
        (folder / f"n{host:05d}.json").write_text(json.dumps(content))
    return Call(arguments=("audit", "--from", str(folder)), num_bytes=size_bytes(folder))


def _tree(folder: Path, random: Random) -> Call:
    """Copy what an audit reads of this machine, with values exchanged, and links, pipes and loops among them."""
    found = [path for name in _OF_TREES for path in islice(Path("/", name).rglob("*"), 60)]
    for path in found:
        copy = folder / path.relative_to("/")
        try:
            if path.is_symlink():
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.symlink_to(os.readlink(path))
            elif path.is_file() and random.random() < 0.9:
                copy.parent.mkdir(parents=True, exist_ok=True)
                _put_value(copy, path, random)
            elif path.is_dir():
                copy.mkdir(parents=True, exist_ok=True)
        except OSError:  # what this machine does not show, or what has a link above it
            continue
    return Call(arguments=("audit", "--sysfs-root", str(folder)), num_bytes=size_bytes(folder))


def _put_value(copy: Path, path: Path, random: Random) -> None:
    chance = random.random()
    if chance < 0.3:
        copy.write_bytes(str(one_of(_VALUES, random)).encode())
    elif chance < 0.35:
        copy.write_bytes(random.bytes(text_size(random) // 20))
    elif chance < 0.37:
        os.mkfifo(copy)
    elif chance < 0.4:
        copy.symlink_to(one_of((secret_file(), "/dev/zero", copy.name, "..", "/"), random))
    else:
        copy.write_bytes(path.read_bytes()[:20_000])


def _wide_tree(folder: Path, random: Random) -> Call:
    """Thousands of processors, nodes or devices."""
    count = int(random.integers(1000, 5000))
    for name in ("sys/devices/system/cpu", "sys/devices/system/node", "sys/bus/pci/devices", "sys/class/net"):
        place = folder / name
        place.mkdir(parents=True)
        for number in range(count // 4):
            entry = one_of(("cpu{}", "node{}", "0000:{:02x}:00.0", "eth{}", "cpu9999999{}"), random).format(number)
            (place / entry).mkdir(exist_ok=True)
            (place / entry / one_of(("online", "cpulist", "class", "speed", "numa_node"), random)).write_text("0-1023")
    (folder / "sys/devices/system/cpu/online").write_text(f"0-{10 ** int(random.integers(1, 12))}")
    (folder / "sys/devices/system/node/online").write_text(f"0-{10 ** int(random.integers(1, 12))}")
    return Call(arguments=("audit", "--sysfs-root", str(folder)), num_bytes=size_bytes(folder) + 100 * count)


def _log(folder: Path, random: Random) -> Call:
    """Lines like those of NCCL, many, long, half, or of ranks that there are none of."""
    path = folder / "nccl.log"
    line = "n0:1:2 [0] NCCL INFO Channel 00/0 : {a}[{b}] -> {c}[0] [send] via {via}\n"
    size, shape = text_size(random), int(random.integers(6))
    if shape == 0:
        lines = [line.format(a=n, b=n % 8, c=n + 1, via="NET/IB/0/GDRDMA") for n in range(size // 80)]
    elif shape == 1:
        lines = ["Channel 0" * (size // 9), "\n", line.format(a=0, b=0, c=1, via="P2P")]
    elif shape == 2:
        lines = [line.format(a=0, b="f" * size, c=1, via="A" * size), line.format(a=0, b=0, c=1, via="a" * 3000)]
    elif shape == 3:
        lines = ["Channel " + "0" * size + " : 0[0] -> ", line.format(a=9999999, b=0, c=9999999, via=CONTROL)]
    elif shape == 4:
        lines = [line.format(a=n % 9, b=0, c=n % 7, via=f"NET/{n}/{n}") for n in range(size // 80)]
    else:
        lines = [random.bytes(size).decode("latin-1")]
    path.write_text("".join(lines), "utf-8", "surrogatepass")
    (folder / "n0.json").write_text(_snapshot_text())
    arguments = ("audit", "--from", str(folder / "n0.json"), "--nccl-log", str(path))
    return Call(arguments=arguments, num_bytes=size_bytes(folder))


_LINES = {"most_lines": 200}
"""A matrix or a picture of a host takes more than a screen."""
KINDS = (
    *documents.kinds("snapshot", _SNAPSHOTS, lambda _: json.loads(_snapshot_text()), _put_snapshot, **_LINES),
    Hostile(name="snapshot-many", format=_SNAPSHOTS, make=_many_snapshots),
    Hostile(name="tree-values", format=_TREES, make=_tree),
    Hostile(name="tree-wide", format=_TREES, make=_wide_tree),
    Hostile(name="nccl-log", format=_LOGS, make=_log),
)
