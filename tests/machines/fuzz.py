"""Trees with some files damaged by seed: the audit must report findings or a clear error, never a traceback.

Each seed always does the same damage.
"""

from __future__ import annotations

import json
import os
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcpace.audit.job import AuditedJob
from hpcpace.audit.picture import pictures
from hpcpace.audit.picture_text import WIDTH, map_lines, matrix_lines, picture_lines, svg
from hpcpace.audit.rulebook import AuditResult, audit, exposition
from hpcpace.audit.snapshot import take_tree
from hpcpace.audit.snapshot_files import MAX_BYTES, snapshot_from, snapshot_text
from hpcpace.core.errors import UsageError
from hpcpace.report.audit_report import MAX_LINES
from tests.audit_lines import verdict_lines
from tests.machines.cases import far_adapter, gb200, one_gpu_for_two, siblings_shared, small_node, virtual_machine
from tests.machines.machine import Machine

MACHINES: tuple[Callable[[], Machine], ...] = (
    lambda: small_node("n1"),
    one_gpu_for_two,
    far_adapter,
    siblings_shared,
    gb200,
    virtual_machine,
)
TEXTS: tuple[bytes, ...] = (
    b"",
    b"\n",
    b"\0",
    b"-1",
    b"0",
    b"1",
    b"255",
    b"99999999999999999999999",
    b"-99999999999999999999999",
    b"nan",
    b"\xff\xfe\x80",
    b"\x1b[2J\x1b]0;x\x07",
    b"$(reboot)`reboot`;reboot",
    b"0-4294967295",
    b"0-3,2-5",
    b"8191",
    b"4: ACTIVE",
    b"Unknown speed",
    b"x" * 70_000,
    b"\n" * 20_000,
    "\u202e\u2028\u0665".encode(),
    b"0000:99:99.9",
    b"max max",
    b"max 0",
    b"10 20 30",
)

VALUES: tuple[Any, ...] = (
    *("", "\x1b[2J", "0-3,8", "9999999999", "$(reboot)", "0000:11:00.0", "ACTIVE", "\ud800", "bind:9"),
    *(0, -1, 7, 1 << 62, 1 << 70),
    *(0.5, -1e300, float("nan")),
    *(None, [], {}, ["x"], {"x": 1}, True),
)
NAMES = ("eth\x1b[0m", "mlx5_0;reboot", "-rf", " ", "a" * 200, "ib\n0", "..x", "n\u00e9t", "\udcff")


def damage(machine: Machine, rng: random.Random) -> None:
    """Damage one to six files, links or folders of a machine."""
    for _ in range(rng.randint(1, 6)):
        if not machine.files:
            return
        path = rng.choice(sorted(machine.files))
        kind = rng.randrange(8)
        if kind == 0:
            del machine.files[path]
        elif kind == 1:
            folder = "/".join(path.split("/")[: rng.randint(1, path.count("/"))])
            machine.without(f"{folder}/")
        elif kind == 2 and machine.links:
            link = rng.choice(sorted(machine.links))
            machine.links[link] = rng.choice(
                ["/proc/self/root", link.split("/")[-1], "..", "../../../..", "/", "/nowhere"]
            )
        elif kind == 3:
            content = machine.files[path]
            raw = bytearray(content.encode() if isinstance(content, str) else content) or bytearray(b"0")
            raw[rng.randrange(len(raw))] = rng.randrange(256)
            machine.files[path] = bytes(raw)
        elif kind == 4:
            content = machine.files[path]
            raw = bytearray(content.encode() if isinstance(content, str) else content)
            machine.files[path] = bytes(raw[: rng.randrange(len(raw) + 1)])
        elif kind == 5:
            name = rng.choice(
                ["eth\x1b[0m", "mlx5_0;reboot", "-rf", " ", "a" * 200, "ib\n0", "..x", "n\u00e9t", "\udcff"]
            )
            machine.net(name, mtu=rng.randint(-5, 10**6), speed=rng.randint(-5, 10**9))
        else:
            machine.files[path] = rng.choice(TEXTS)


def examined(seed: int, folder: Path) -> AuditResult | None:
    """Return what the audit says of a damaged machine; None where it refuses it with a clear error."""
    rng = random.Random(seed)
    machine = MACHINES[seed % len(MACHINES)]()
    damage(machine, rng)
    write_anyhow(machine, folder, rng)
    try:
        snapshot = take_tree(folder)
    except UsageError as error:
        assert str(error).isprintable()
        return None
    text = snapshot_text(snapshot)
    assert len(text) < MAX_BYTES
    job = AuditedJob([snapshot_from(text)])
    result = audit(job)
    lines = [*verdict_lines(result)]
    assert len(lines) <= MAX_LINES
    lines += [*matrix_lines(result.matrices, result.hosts), *map_lines(job)]
    assert all(line.isprintable() for line in lines)
    json.dumps(result.to_json())
    assert exposition(result).endswith("\n")
    _draw(job)
    return result


def examined_snapshot(seed: int, text: str) -> AuditResult | None:
    """Return what the audit says of a snapshot with some values exchanged; None where it refuses it."""
    rng = random.Random(seed)
    document = json.loads(text)
    for _ in range(rng.randint(1, 4)):
        _exchange(document, rng)
    damaged = json.dumps(document)
    if rng.random() < 0.2:
        damaged = damaged[: rng.randrange(len(damaged))]
    try:
        job = AuditedJob([snapshot_from(damaged)])
    except UsageError as error:
        assert str(error).isprintable()
        return None
    result = audit(job)
    assert all(line.isprintable() for line in [*verdict_lines(result), *map_lines(job)])
    assert all(finding.fix.isprintable() for finding in result.findings)
    json.dumps(result.to_json())
    _draw(job)
    return result


def _draw(job: AuditedJob) -> None:
    drawn, _ = pictures(job)
    lines = [line for picture in drawn for line in picture_lines(picture)]
    assert all(line.isprintable() and len(line) <= WIDTH for line in lines)
    ElementTree.fromstring(svg(drawn))


def _exchange(document: Any, rng: random.Random) -> None:
    """Exchange one value somewhere within a document; mostly for one of the same kind."""
    place, key = document, rng.choice(sorted(document))
    while isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.95:
        place = place[key]
        key = rng.choice(sorted(place)) if isinstance(place, dict) else rng.randrange(len(place))
    kinds = {str: VALUES[:9], bool: (True, False), int: VALUES[9:14], float: VALUES[14:17]}
    same = kinds.get(type(place[key]), VALUES)
    place[key] = rng.choice(same if rng.random() < 0.8 else VALUES)


def write_anyhow(machine: Machine, folder: Path, rng: random.Random) -> None:
    """Write a tree even if a file has replaced a folder."""
    for path in [path for path in machine.files if any(path.startswith(f"{link}/") for link in machine.links)]:
        del machine.files[path]
    machine.write(folder)
    for path in rng.sample(sorted(machine.files), min(2, len(machine.files))):
        place = folder / path
        if rng.random() < 0.2 and place.is_file():
            place.unlink()
            rng.choice([os.mkdir, os.mkfifo, lambda at: os.symlink(at.name, at)])(place)
