"""The verdict: what is put together, what is left out where there is no room, and names of hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from hpcpace.audit.findings import (
    CANNOT_DETERMINE,
    AuditFinding,
    Certainty,
    Severity,
    blocks,
    grouped,
    hosts_text,
    place_text,
)
from hpcpace.audit.job import AuditedJob
from hpcpace.audit.rulebook import AuditResult, audit
from hpcpace.audit.snapshot import take_tree
from hpcpace.report.audit_report import MAX_LINES
from tests.audit_lines import WIDTH, verdict_lines
from tests.machines.cases import CASES, mtu_differs


def _finding(
    rule: str = "P01", host: str = "n1", place: str = "GPU 0", seen: str = "x", **other: object
) -> AuditFinding:
    values = {"severity": Severity.FAIL, "cost": "c", "fix": "f", "certainty": Certainty.READ, **other}
    return AuditFinding(rule=rule, hosts=(host,), place=place, seen=seen, **values)


def _result(
    findings: list[AuditFinding], hosts: tuple[str, ...] = ("n1",), missing: tuple[str, ...] = ()
) -> AuditResult:
    return AuditResult(
        hosts=hosts,
        num_ranks=0,
        num_rules=37,
        findings=tuple(findings),
        skipped={},
        bindings=(),
        matrices=(),
        missing=missing,
        problems=(),
    )


@each_case(
    ("affected", "text"),
    [
        (range(1, 17), "all 16 nodes"),
        ([number for number in range(1, 17) if number not in (3, 7)], "14 of 16 nodes; odd ones out: n[3,7]"),
        ([5], "n5"),
        (range(1, 9), "8 of 16 nodes: n[1-8]"),
    ],
)
def test_hosts_are_named_by_the_shorter_list(affected: object, text: str) -> None:
    everybody = [f"n{number}" for number in range(1, 17)]
    assert hosts_text([f"n{number}" for number in affected], everybody) == text


def test_hosts_that_say_the_same_are_one_finding() -> None:
    (group,) = grouped([_finding(host=f"n{number}", ranks=(number,)) for number in range(3)])
    assert (group.hosts, group.ranks) == (("n0", "n1", "n2"), (0, 1, 2))


def test_faults_of_one_kind_are_put_together_and_of_two_are_not() -> None:
    findings = [
        _finding(place="mlx5_0", seen="runs at 50 Gb/s"),
        _finding(place="mlx5_1", seen="runs at 25 Gb/s"),
        _finding(place="mlx5_2", seen="is DOWN"),
    ]
    assert [place_text(block) for block in blocks(grouped(findings))] == ["mlx5_0, mlx5_1", "mlx5_2"]


@each_case("num_rules", [1, 5, 12, 30, 200])
def test_a_verdict_is_never_longer_than_30_lines(num_rules: int) -> None:
    findings = [
        _finding(rule="N03", place=f"variable {'x' * number}", seen=f"{'word ' * 40}{'y' * number}")
        for number in range(num_rules)
    ]
    findings += [_finding(severity=Severity.UNKNOWN, seen=f"{CANNOT_DETERMINE}{'z' * number}") for number in range(20)]
    findings += [_finding(severity=Severity.INFORMATION, seen="i" * number) for number in range(1, 20)]
    lines = verdict_lines(_result(findings, missing=("n7 did not answer",) * 9))
    assert len(lines) <= MAX_LINES
    assert all(len(line) <= WIDTH for line in lines)


def test_fixes_come_before_costs_where_room_is_short() -> None:
    findings = [_finding(rule="N03", place="x" * number, seen="y" * number, fix="mend it") for number in range(1, 11)]
    lines = verdict_lines(_result(findings))
    assert sum("fix: mend it" in line for line in lines) == 10
    assert 0 < sum("costs" in line for line in lines) < 10


def test_how_sure_a_finding_is_stands_beside_it_even_where_it_is_cut() -> None:
    findings = [_finding(place="x" * number, seen="word " * 40 + "y" * number) for number in range(1, 28)]
    lines = verdict_lines(_result(findings))
    assert all(line.endswith("[read]") for line in lines if line.startswith("F "))


@each_case(
    ("severities", "missing", "code"),
    [
        ("", (), 0),
        ("I", (), 0),
        ("U", (), 3),
        ("UW", (), 1),
        ("IUWF", (), 4),
        ("", ("n2 did not answer",), 3),
        ("W", ("n2 did not answer",), 1),
    ],
)
def test_exit_code_follows_from_the_worst(severities: str, missing: tuple[str, ...], code: int) -> None:
    assert _result([_finding(severity=Severity(s)) for s in severities], missing=missing).exit_code == code


def test_ranks_of_the_job_are_named_where_there_are_several_hosts(tree_path: Path) -> None:
    machines = mtu_differs()
    machines[1].files["proc/1002/status"] = "Cpus_allowed_list:\t0-9\nMems_allowed_list:\t0\n"
    job = AuditedJob([take_tree(machine.write(tree_path / str(n))) for n, machine in enumerate(machines)])
    lines = verdict_lines(audit(job, ids=["A04"]))
    assert any(line.startswith("F A04      local ranks 0,1, ranks 2-3, n2: share CPUs 8-9") for line in lines)


@pytest.mark.parametrize("name", CASES)
def test_lines_fit_but_for_what_is_to_be_pasted(name: str, tree_path: Path) -> None:
    case = CASES[name]
    lines = verdict_lines(audit(AuditedJob(case.snapshots(tree_path), case.settings, case.log, case.topo)))
    assert len(lines) <= MAX_LINES
    assert [line for line in lines if len(line) > WIDTH and "  fix: " not in line and "srun --cpu" not in line] == []


def test_a_file_that_is_left_out_is_named_however_deep_it_lies() -> None:
    lines = verdict_lines(_result([], missing=(f"/{'folder/' * 30}n3.json: no whole JSON",)))
    assert "/n3.json:nowholeJSON" in "".join("".join(lines).split())
