"""What holds an interface below its speed: the kernel's messages, and the rule over hosts."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.audit.collect_hardware import buckets_in, read_shapers
from hpcpace.audit.facts import Snapshot
from hpcpace.audit.job import AuditedJob
from hpcpace.audit.rulebook import run_rules
from hpcpace.audit.snapshot import take_tree
from tests.machines.cases import plain_pair

ROOT, DONE, ERROR = 0xFFFFFFFF, 3, 2


def attribute(kind: int, content: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(content), kind) + content + b"\0" * (-len(content) % 4)


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 2, 1, 0) + body + b"\0" * (-len(body) % 4)


def qdisc(index: int, name: bytes, options: bytes, *, parent: int = ROOT) -> bytes:
    traffic = struct.pack("=BxxxiIII", 0, index, 0x80010000, parent, 2)
    return message(36, traffic + attribute(1, name + b"\0") + attribute(2, options))


def bucket(index: int, rate_bytes: int, *, parent: int = ROOT, rate64: int = 0) -> bytes:
    parameters = struct.pack("=BBHhHI", 0, 1, 0, -1, 0, rate_bytes) + b"\0" * 24
    more = attribute(4, struct.pack("=Q", rate64)) if rate64 else b""
    return qdisc(index, b"tbf", attribute(1, parameters) + more, parent=parent)


def test_a_bucket_at_the_root_holds_an_interface() -> None:
    sent = qdisc(1, b"noqueue", b"") + bucket(2, 12_500_000) + bucket(3, 125, parent=0x10001)
    assert list(buckets_in(sent)) == [(2, 100.0)]


def test_rates_beyond_32_bits_are_read() -> None:
    assert list(buckets_in(bucket(2, 0xFFFFFFFF, rate64=12_500_000_000))) == [(2, 100_000.0)]


def test_the_last_message_and_an_error_end_it() -> None:
    found = buckets_in(bucket(2, 125_000) + message(DONE, b"\0\0\0\0"))
    assert next(found) == (2, 1.0)
    with pytest.raises(EOFError):
        next(found)
    with pytest.raises(PermissionError):
        list(buckets_in(message(ERROR, struct.pack("=i", -1) + b"\0" * 16)))


def test_no_cut_of_a_message_is_more_than_an_error_of_its_own() -> None:
    whole = bucket(2, 12_500_000) + message(DONE, b"\0\0\0\0")
    for length in range(len(whole)):
        try:
            assert set(buckets_in(whole[:length])) <= {(2, 100.0)}
        except EOFError:
            pytest.fail("no end was there")


def test_this_machine_answers() -> None:
    assert all(rate > 0 for rate in read_shapers().values())


def pair(tmp_path: Path, *rates: float | None) -> AuditedJob:
    snapshots: list[Snapshot] = []
    for number, (machine, rate) in enumerate(zip(plain_pair(), rates, strict=True)):
        snapshot = take_tree(machine.write(tmp_path / str(number)))
        nets = [dataclasses.replace(net, shaped_mbps=rate if net.name == "eth0" else 0.0) for net in snapshot.net or ()]
        snapshots.append(dataclasses.replace(snapshot, net=tuple(nets)))
    return AuditedJob(snapshots)


@each_case(
    ("rates", "seen"),
    [
        ((0.0, 0.0), []),
        ((1000.0, 1000.0), []),
        ((1000.0, 100.0), [("F", "n2", "is shaped to 0.1 Gb/s, but to 1 on other hosts")]),
        ((0.0, 100.0), [("F", "n2", "is shaped to 0.1 Gb/s, but not shaped on other hosts")]),
        ((0.0, None), [("U", "n2", "cannot determine whether its interfaces are shaped: not in the snapshot")]),
    ],
)
def test_an_interface_is_compared_with_that_of_other_hosts(
    rates: tuple[float | None, ...], seen: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    findings = run_rules(pair(tmp_path, *rates), ["N05"]).findings
    assert [(finding.severity, finding.host, finding.seen) for finding in findings] == seen
