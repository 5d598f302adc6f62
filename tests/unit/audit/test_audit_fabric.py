"""Registration of GPUs with the fabric manager behind NVLink switches (P07), and interfaces without a route (N03)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.audit.facts import Snapshot
from hpcpace.audit.job import AuditedJob
from hpcpace.audit.rulebook import run_rules
from hpcpace.audit.snapshot import take_tree
from tests.machines.cases import HEALTHY, small_node
from tests.machines.machine import Machine


def with_fabric(tmp_path: Path, fabric: str | None, num_switches: int) -> Snapshot:
    snapshot = take_tree(small_node("n1").write(tmp_path / "tree"))
    gpus = [
        dataclasses.replace(gpu, nvml=dataclasses.replace(HEALTHY, fabric=fabric if number else "completed"))
        for number, gpu in enumerate(snapshot.gpus or ())
    ]
    hardware = dataclasses.replace(snapshot.hardware, num_nvswitches=num_switches)
    return dataclasses.replace(snapshot, gpus=tuple(gpus), hardware=hardware)


@each_case(
    ("fabric", "num_switches", "found"),
    [
        ("completed", 4, []),
        ("none", 0, []),
        (None, 0, []),
        (None, 4, [("U", "cannot determine whether the fabric manager has registered it: NVML does not say")]),
        ("not started", 4, [("F", "its fabric registration has not been started")]),
        ("in progress", 4, [("F", "its fabric registration has not finished")]),
        ("failed 999", 4, [("F", "its fabric registration failed with NVML error 999")]),
    ],
)
def test_a_gpu_that_the_fabric_manager_has_not_registered_is_found(
    fabric: str | None, num_switches: int, found: list[tuple[str, str]], tmp_path: Path
) -> None:
    findings = run_rules(AuditedJob([with_fabric(tmp_path, fabric, num_switches)]), ["P07"]).findings
    assert [(finding.severity, finding.seen) for finding in findings] == found
    assert {finding.place for finding in findings} <= {"GPU 0000:21:00.0"}


def node(variable: str, value: str, *, has_route: bool) -> Machine:
    machine = small_node("n1", ranks=0).net("ens9", mtu=9000, speed=100_000, has_route=has_route)
    return machine.rank(0, "0-7", world=1, mems="0", environ={variable: value})


def n03(machine: Machine, tmp_path: Path) -> list[tuple[str, str, str]]:
    findings = run_rules(AuditedJob([take_tree(machine.write(tmp_path / "tree"))]), ["N03"]).findings
    return [(finding.severity, finding.seen, finding.fix) for finding in findings]


@pytest.mark.parametrize(("variable", "value"), [("NCCL_SOCKET_IFNAME", "=ens9"), ("GLOO_SOCKET_IFNAME", "ens9")])
def test_an_interface_without_any_route_is_found(variable: str, value: str, tmp_path: Path) -> None:
    ((severity, seen, fix),) = n03(node(variable, value, has_route=False), tmp_path)
    assert (severity, seen) == ("F", f"{variable}={value} selects ens9, which no route uses: it has no address")
    assert fix.startswith(f"export {variable}=") and "ens9" not in fix
    assert n03(node(variable, value, has_route=True), tmp_path / "routed") == []


def test_one_with_a_route_of_ipv6_only_is_not(tmp_path: Path) -> None:
    machine = node("NCCL_SOCKET_IFNAME", "=ens9", has_route=False)
    row = "fd000000000000000000000000000000 40 {} 00 {} 00000100 00000001 00000000 00000001     ens9\n"
    machine.files["proc/net/ipv6_route"] = row.format("0" * 32, "0" * 32)
    assert n03(machine, tmp_path) == []


@pytest.mark.parametrize("row", ["ens9\t0000FEA9\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n", "ens9\n"])
def test_a_link_local_route_leads_to_nobody(row: str, tmp_path: Path) -> None:
    machine = node("NCCL_SOCKET_IFNAME", "=ens9", has_route=False)
    machine.files["proc/net/route"] = f"{machine.files['proc/net/route']!s}{row}"
    assert [severity for severity, _, _ in n03(machine, tmp_path)] == ["F"]


@each_case("content", [None, b"\xff", b"x" * 300_000])
def test_tables_that_cannot_be_read_are_unknown(content: bytes | None, tmp_path: Path) -> None:
    machine = node("NCCL_SOCKET_IFNAME", "=ens9", has_route=True).without("proc/net/route")
    if content is not None:
        machine.files["proc/net/route"] = content
    ((severity, seen, _),) = n03(machine, tmp_path)
    assert severity == "U" and seen.startswith(
        "cannot determine whether a route uses what NCCL_SOCKET_IFNAME selects: "
    )
