"""Two hosts with two cables between them, as network namespaces: which cables carry a job, and over IPv6 alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "mpi" / "meeting_program.py"
HOSTS = ("hpn1", "hpn2")
TIMEOUT_S = 120
NUM_BYTES = 40_000_000


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def cables() -> Iterator[tuple[str, ...]]:
    """Two namespaces with two veth pairs, no addresses yet."""
    for host in HOSTS:
        ip("netns", "add", host)
    try:
        for number in range(2):
            ends = [f"{host}c{number}" for host in HOSTS]
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for host, end in zip(HOSTS, ends, strict=True):
                ip("link", "set", end, "netns", host)
                ip("-n", host, "link", "set", end, "name", f"eth{number}")
                ip("-n", host, "link", "set", f"eth{number}", "up")
        for host in HOSTS:
            ip("-n", host, "link", "set", "lo", "up")
        yield ("eth0", "eth1")
    finally:
        for host in HOSTS:
            ip("netns", "delete", host)


def give(host: str, interface: str, address: str) -> None:
    """Give an interface an address, at once."""
    nodad = ["nodad"] if ":" in address else []
    ip("-n", host, "address", "add", address, "dev", interface, *nodad)


def sent_bytes(host: str, interface: str) -> int:
    command = ["ip", "-n", host, "-json", "-statistics", "link", "show", "dev", interface]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(json.loads(done.stdout)[0]["stats64"]["tx"]["bytes"])


def reduce_over(place: str) -> list[str]:
    """Reduce over both hosts, which meet at a place; return what each rank says its interfaces are."""
    children = []
    for rank, host in enumerate(HOSTS):
        slurm = {
            "SLURM_JOB_ID": "78",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "SLURM_STEP_NODELIST": ",".join(HOSTS),
            "SLURM_NODEID": str(rank),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": "0",
            "HPCPACE_WORLD_START_TIMEOUT_S": "60",
            "HPCPACE_WORLD_RENDEZVOUS": place,
        }
        known = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
        named = f"hostname {host} && exec {sys.executable} {PROGRAM} cpu {NUM_BYTES}"
        children.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", named],
                env={**known, "OMP_NUM_THREADS": "1", **slurm},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = []
    for child in children:
        stdout, stderr = child.communicate(timeout=TIMEOUT_S)
        assert child.returncode == 0, stderr
        said.append(json.loads(stdout)["interfaces"])
    return said


def test_two_equal_cables_both_carry_the_collectives(cables: tuple[str, ...]) -> None:
    for number, interface in enumerate(cables):
        for rank, host in enumerate(HOSTS):
            give(host, interface, f"10.9{number}.0.{rank + 1}/24")
    before = {interface: sent_bytes(HOSTS[0], interface) for interface in cables}
    assert reduce_over("10.90.0.1") == ["eth0,eth1"] * 2
    shares = [sent_bytes(HOSTS[0], interface) - before[interface] for interface in cables]
    print(f"\nbytes sent by {HOSTS[0]} over {cables}: {shares}")
    assert min(shares) > 0.3 * sum(shares) > 0.3 * NUM_BYTES


def test_hosts_with_ipv6_alone_meet_and_reduce(cables: tuple[str, ...]) -> None:
    for rank, host in enumerate(HOSTS):
        give(host, cables[1], f"fd00:77::{rank + 1}/64")
        ip("-n", host, "link", "set", cables[0], "down")
    assert reduce_over("[fd00:77::1]:29511") == ["eth1"] * 2
