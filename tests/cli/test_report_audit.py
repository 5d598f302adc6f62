"""What a report says of snapshots: on whom the verdict blames, on a terminal, on the page and in summary.json."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from experiments.synthetic_run import SyntheticRun
from hpcpace.audit.facts import Snapshot, TimeSync
from hpcpace.audit.snapshot import take_tree
from hpcpace.audit.snapshot_files import save_snapshots
from tests.machines.cases import small_node
from tests.machines.machine import dgx_badly_bound

Report = Callable[..., tuple[int, str, str]]
TWO_HOSTS = SyntheticRun(num_ranks=4, hosts=("n1", "n2"), slow={3: 1.3}, noise=0.02)


@pytest.fixture
def report(hpcpace: Report) -> Report:
    """Run `hpcpace report` and return its exit code, stdout and stderr."""
    return partial(hpcpace, "report")


def two_hosts(tmp_path: Path) -> list[Snapshot]:
    """Return snapshots of n1 with ranks 0 and 1, and n2 with 2 and 3, each with half of the cores."""
    made = []
    for number in (0, 1):
        machine = small_node(f"n{number + 1}", ranks=0)
        for local in (0, 1):
            cpus = f"{local * 8}-{local * 8 + 7}"
            machine.rank(2 * number + local, cpus, world=4, local=local, mems="0", environ={"OMP_NUM_THREADS": "8"})
        made.append(take_tree(machine.write(tmp_path / f"tree{number}")))
    return made


def with_cpus(snapshot: Snapshot, rank: int, cpus: str) -> Snapshot:
    ranks = tuple(dataclasses.replace(own, cpus=cpus) if own.rank == rank else own for own in snapshot.ranks)
    return dataclasses.replace(snapshot, ranks=ranks)


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_slow_rank_has_its_finding_and_the_fix_in_one_piece(report: Report, tmp_path: Path) -> None:
    run = TWO_HOSTS.write(tmp_path / "run")
    one, other = two_hosts(tmp_path)
    save_snapshots(run.attempt(0).snapshot_dir, [one, with_cpus(other, 3, "4-11")])
    code, out, err = report(run.path)
    assert (code, err) == (1, "")
    told = "rank 3 on n2 is slow, and local ranks 0,1 have A04: share CPUs 4-7"
    verdict, _, section = out.partition("\nAudit  ")
    assert told in words(verdict) and told in words(section)
    assert "  fix: srun --cpu-bind=mask_cpu:0xff,0xff00 ...  # or -c 8 on the srun line itself\n" in section
    (match, *_) = json.loads((run.path / "summary.json").read_text())["audit"]["matches"]
    assert (match["who"], match["rule"], match["severity"], match["is_common"]) == ("rank 3 on n2", "A04", "F", False)
    assert match["fix"] in section
    page = (run.path / "report.html").read_text()
    assert told in page and "Findings of the audit on the culprits" in page


def test_what_makes_nobody_slow_stands_beside_no_culprit(report: Report, tmp_path: Path) -> None:
    run = TWO_HOSTS.write(tmp_path / "run")
    one, other = two_hosts(tmp_path)
    wrong = TimeSync(is_synchronised=False, error_s=16.0, max_error_s=16.0, daemons=())
    save_snapshots(run.attempt(0).snapshot_dir, [one, dataclasses.replace(other, time_sync=wrong)])
    _, out, _ = report(run.path)
    assert "S10" not in out
    audit = json.loads((run.path / "summary.json").read_text())["audit"]
    assert {match["rule"] for match in audit["matches"]} == {"N01"}
    assert any(text.startswith("S10 on n2") for text in audit["found"])


def test_what_holds_for_all_is_told_as_common_and_not_in_the_verdict(report: Report, tmp_path: Path) -> None:
    run = TWO_HOSTS.write(tmp_path / "run")
    save_snapshots(run.attempt(0).snapshot_dir, two_hosts(tmp_path))
    _, out, _ = report(run.path)
    verdict, _, section = out.partition("\nAudit  ")
    assert "is slow, and" not in verdict
    assert "rank 3 on n2 is slow, and its GPU 0000:21:00.0 has N01" in words(section)
    assert json.loads((run.path / "summary.json").read_text())["audit"]["num_ranks"] == 4


def test_of_a_rank_its_own_gpu_is_told(report: Report, tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=8, hosts=("dgx2",), slow={5: 1.3}, noise=0.02).write(tmp_path / "run")
    save_snapshots(run.attempt(0).snapshot_dir, [take_tree(dgx_badly_bound().write(tmp_path / "tree"))])
    report(run.path)
    matches = json.loads((run.path / "summary.json").read_text())["audit"]["matches"]
    assert {match["who"] for match in matches} == {"rank 5 on dgx2"}
    assert matches[0]["rule"] in ("A03", "A04") and not matches[0]["is_common"]
    assert [match["is_common"] for match in matches] == sorted(match["is_common"] for match in matches)


def test_without_snapshots_nothing_is_said(report: Report, tmp_path: Path) -> None:
    run = TWO_HOSTS.write(tmp_path / "run")
    _, out, _ = report(run.path)
    assert "Audit" not in out
    assert json.loads((run.path / "summary.json").read_text())["audit"] is None
    assert ">Audit<" not in (run.path / "report.html").read_text()


def test_a_healthy_run_stays_healthy_whatever_the_audit_finds(report: Report, tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=8, num_steps=80, noise=0.01, hosts=("dgx2",)).write(tmp_path / "run")
    save_snapshots(run.attempt(0).snapshot_dir, [take_tree(dgx_badly_bound().write(tmp_path / "tree"))])
    code, out, _ = report(run.path)
    assert code == 0
    assert "no finding on the culprits" in out


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"schema": "hpcpace-audit-snapshot/9"}', b"[" * 100_000])
def test_a_damaged_snapshot_is_a_note(content: bytes, report: Report, tmp_path: Path) -> None:
    run = TWO_HOSTS.write(tmp_path / "run")
    before = report(run.path)
    save_snapshots(run.attempt(0).snapshot_dir, two_hosts(tmp_path)[:1])
    (run.attempt(0).snapshot_dir / "n2.json").write_bytes(content)
    code, out, err = report(run.path)
    assert (code, err) == (before[0], "")
    assert "n2.json" in "".join(out.split()) and "no snapshot has the ranks of n2" in " ".join(out.split())
    assert len(json.loads((run.path / "summary.json").read_text())["audit"]["problems"]) == 2


def test_what_is_no_file_is_a_note(report: Report, tmp_path: Path) -> None:
    run = TWO_HOSTS.write(tmp_path / "run")
    save_snapshots(run.attempt(0).snapshot_dir, two_hosts(tmp_path)[:1])
    os.mkfifo(run.attempt(0).snapshot_dir / "n2.json")
    (run.attempt(0).snapshot_dir / "n3.json").mkdir()
    _, out, err = report(run.path)
    assert err == "" and words(out).count("is no regular file") == 2


def test_an_error_of_the_rules_is_a_note(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TWO_HOSTS.write(tmp_path / "run")
    save_snapshots(run.attempt(0).snapshot_dir, two_hosts(tmp_path))

    def fail(*_: object) -> None:
        raise IndexError("of 7")

    monkeypatch.setattr("hpcpace.diagnosis.figures.audit.run_rules", fail)
    code, out, _ = report(run.path)
    assert code == 1
    assert "the rules ended with an error of hpcpace's own (IndexError: of 7)" in words(out)
