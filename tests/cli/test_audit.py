"""`hpcpace audit` as its users call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.audit.rulebook import BY_ID
from hpcpace.audit.snapshot import take_tree
from hpcpace.audit.snapshot_files import save_snapshots
from tests.machines.cases import cgroup_cut, mtu_differs, siblings_shared, small_node
from tests.machines.machine import Machine, dgx_badly_bound

NUM_RULES = len(BY_ID)
NUM_APPLIED = NUM_RULES - 18  # `tree` has no GPU, adapter or log to look at
_LAUNCHERS = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "HPCPACE_")


def _audit(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return subprocess.run(
        [sys.executable, "-m", "hpcpace", "audit", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={**environ, **variables},
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return siblings_shared().write(tmp_path / "tree")


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    snapshots = [take_tree(machine.write(tmp_path / str(n))) for n, machine in enumerate(mtu_differs())]
    save_snapshots(tmp_path / "snapshots", snapshots)
    return tmp_path / "snapshots"


def test_this_machine_is_looked_at_without_options() -> None:
    done = _audit()
    assert done.returncode in (0, 1, 3, 4) and done.stderr == ""
    assert done.stdout.startswith("\nhpcpace audit ") and len(done.stdout.splitlines()) <= 30


def test_rules_that_were_not_asked_for_do_not_count_as_applied(tree: Path) -> None:
    asked = _audit("--sysfs-root", str(tree), "--rules", "A04")
    ignored = _audit("--sysfs-root", str(tree), "--ignore", "A04")
    assert "1 of 1 rule applied)" in asked.stdout
    assert f"{NUM_APPLIED - 1} of {NUM_RULES - 1} rules applied)" in ignored.stdout


def test_a_tree_has_its_findings_and_the_exit_code_of_the_worst(tree: Path) -> None:
    done = _audit("--sysfs-root", str(tree))
    assert done.returncode == 4
    assert done.stdout == (
        "\nhpcpace audit smt1\n"
        f"Verdict    1 fail, 1 warning (1 node, 4 ranks, {NUM_APPLIED} of {NUM_RULES} rules applied)\n"
        "\nFindings\n"
        "F A04      local ranks 0,1: share the cores of CPUs 0-3,8-11 [read]\n"
        "costs      each waits while the other computes, at moments that differ from step to step\n"
        "  fix: the binding below\n"
        "W S05      local ranks 0,1: run on hardware threads of the same cores (CPUs 0-3,8-11) [read]\n"
        "costs      two ranks on one core get about half of it each\n"
        "  fix: srun --hint=nomultithread ...\n"
        "\nCPU binding\n"
        "  bind 4 ranks per node: srun --cpu-bind=mask_cpu:0x303,0xc0c,0x3030,0xc0c0 ...\n"
    )


def test_a_verdict_has_at_most_30_lines_whatever_is_wrong(tmp_path: Path) -> None:
    done = _audit("--sysfs-root", str(dgx_badly_bound().write(tmp_path)))
    lines = done.stdout.splitlines()
    assert 20 < len(lines) <= 30
    assert all(len(line) <= 100 or "fix" in line or "srun" in line for line in lines)


def test_hosts_that_agree_are_grouped_and_odd_ones_named(cluster: Path) -> None:
    done = _audit("--from", str(cluster), "--rules", "N06,N08,N05")
    assert done.returncode == 4
    assert "F N06      ens0, n2: has MTU 1500, but 9000 on 3 of 4 hosts" in done.stdout
    assert "W N08      mlx5_1 port 1, all 4 nodes: symbol_error is 99" in done.stdout


def test_json_has_its_schema_findings_and_both_classes(cluster: Path) -> None:
    document = json.loads(_audit("--from", str(cluster), "--json").stdout)
    assert document["schema"] == "hpcpace-audit/1"
    assert document["hosts"] == ["n1", "n2", "n3", "n4"]
    assert {"rule", "severity", "place", "seen", "cost", "fix", "certainty", "hosts", "ranks", "evidence"} == set(
        document["findings"][0]
    )
    matrix = document["matrices"][0]
    assert matrix["class_physical"][0] == ["PHB", "NODE"] and matrix["class_nccl"][0] == ["PHB", "PHB"]


def test_matrix_and_map_are_printed_where_asked_for(tmp_path: Path) -> None:
    done = _audit("--sysfs-root", str(small_node("n1").write(tmp_path)), "--matrix", "--map")
    assert "  0000:11:00.0           PHB      NODE/PHB" in done.stdout
    assert "  rank 1     ........########  8-15" in done.stdout


def test_a_prolog_fails_on_named_rules_only(tree: Path) -> None:
    failed = _audit("--sysfs-root", str(tree), "--prolog", "--fail-on", "A04")
    passed = _audit("--sysfs-root", str(tree), "--prolog", "--fail-on", "N05,P01")
    assert (failed.returncode, failed.stdout.count("\n")) == (4, 1)
    assert (passed.returncode, passed.stdout) == (0, "hpcpace audit: no findings of N05,P01\n")


@each_case(
    "arguments",
    [
        ("--prolog", "--fail-on", "X1"),
        ("--prolog", "--no-such-option"),
        ("--prolog", "--sysfs-root", "/nowhere"),
        ("--prolog", "--config", "/nowhere.toml"),
        ("--prolog", "--from", "/nowhere"),
        ("--prolog", "--json"),
    ],
)
def test_a_prolog_never_drains_a_node_for_a_mistake_of_ours(arguments: tuple[str, ...]) -> None:
    done = _audit(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "", 1)


@each_case(
    ("arguments", "message"),
    [
        (("--rules", "X1"), "there is no rule 'X1'"),
        (("--ignore", "A99"), "there is no rule 'A99'"),
        (("--from", "/nowhere"), "cannot read /nowhere"),
        (("--sysfs-root", "/nowhere"), "no folder at /nowhere"),
        (("--from", "/a", "--sysfs-root", "/b"), "exclude each other"),
        (("--fail-on", "A01"), "--fail-on needs --prolog"),
        (("--json", "--prometheus"), "exclude each other"),
        (("--nccl-log", "/nowhere"), "cannot read the NCCL log"),
        (("explain", "X1"), "there is no rule 'X1'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: tuple[str, ...], message: str) -> None:
    done = _audit(*arguments)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_rules_are_ignored_and_thresholds_set_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('[audit]\nignore = ["A03", "A04", "A06", "S01", "S04", "C01"]\nleast_shm = 0\n')
    tree = cgroup_cut().write(tmp_path / "tree")
    done = _audit("--sysfs-root", str(tree), "--config", str(tmp_path / "site.toml"))
    assert done.returncode == 0 and "Verdict    no findings (" in done.stdout


@pytest.mark.parametrize("text", ["[audit]\nmtu = 1\n", "[audit]\ndrop_share = 2\n", '[audit]\nignore = ["X1"]\n'])
def test_a_wrong_setting_is_refused(text: str, tree: Path, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(text)
    done = _audit("--sysfs-root", str(tree), "--config", str(tmp_path / "site.toml"))
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_metrics_for_prometheus_count_each_rule(tree: Path) -> None:
    lines = _audit("--sysfs-root", str(tree), "--prometheus").stdout.splitlines()
    assert 'hpcpace_audit_findings{node="smt1",rule="A04",severity="F"} 1' in lines
    assert 'hpcpace_audit_findings{node="smt1",rule="N01",severity="F"} 0' in lines
    assert "hpcpace_audit_exit_code 4" in lines
    samples = [line for line in lines if not line.startswith("#")]
    assert len(samples) == 3 * len(BY_ID) + 1


@each_case("rule", BY_ID)
def test_every_rule_is_explained(rule: str) -> None:
    from click.testing import CliRunner

    from hpcpace.cli.audit import command

    done = CliRunner().invoke(command, ["explain", rule])
    assert done.exit_code == 0
    assert done.output.startswith(f"\n{rule}  ") and "\nwhy   " in done.output and "\nfix   " in done.output


def test_what_changed_on_a_node_is_shown(tmp_path: Path) -> None:
    for name, mtu in (("before", "9000"), ("after", "1500")):
        machine = small_node("n1")
        machine.files["sys/class/net/ens0/mtu"] = mtu
        save_snapshots(tmp_path / name, [take_tree(machine.write(tmp_path / f"tree-{name}"))])
    changed = _audit("diff", str(tmp_path / "before"), str(tmp_path / "after"))
    same = _audit("diff", str(tmp_path / "before"), str(tmp_path / "before"))
    assert (changed.returncode, changed.stdout) == (1, "n1 net/ens0/mtu: 9000 -> 1500\n")
    assert (same.returncode, same.stdout) == (0, "")


def test_saved_snapshots_give_the_same_answer(tree: Path, tmp_path: Path) -> None:
    first = _audit("--sysfs-root", str(tree), "--save", str(tmp_path / "saved"))
    again = _audit("--from", str(tmp_path / "saved"))
    assert (again.returncode, again.stdout) == (first.returncode, first.stdout)


def test_a_snapshot_that_is_cut_off_is_left_out_and_named(cluster: Path) -> None:
    path = cluster / "n3.json"
    path.write_text(path.read_text()[:1000])
    done = _audit("--from", str(cluster))
    assert "left out" in done.stdout and "n3.json" in done.stdout and "3 nodes" in done.stdout


def test_ranks_of_a_slurm_step_gather_in_a_run_of_their_own(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    second = _audit(cwd=tmp_path, **step, SLURM_NODEID="0", SLURM_PROCID="1", SLURM_LOCALID="1")
    first = _audit(cwd=tmp_path, **step, SLURM_NODEID="0", SLURM_PROCID="0", SLURM_LOCALID="0")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert "(1 node, 2 ranks, " in first.stdout
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path.parent) for path in files] == ["runs/17.3-audit/attempt-0/snapshot"]


def test_a_part_that_is_no_file_costs_its_rank_only(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    parts = tmp_path / "runs" / "17.3-audit" / "attempt-0" / "snapshot" / ".ranks-17.3"
    parts.mkdir(parents=True)
    os.mkfifo(parts / "rank-00001.json")
    rank = {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    # Of rules that find nothing on any machine, so that the missing rank alone decides.
    done = _audit("--timeout-s", "0.2", "--rules", "N05", cwd=tmp_path, **step, **rank)
    assert (done.returncode, done.stderr) == (3, "")
    assert "(1 node, 1 rank, " in done.stdout
    assert "left out   rank 1's facts cannot be used: it is no regular" in done.stdout


def test_a_folder_with_a_fifo_is_read_without_it(cluster: Path) -> None:
    os.mkfifo(cluster / "n9.json")
    done = _audit("--from", str(cluster))
    assert "left out   cannot read" in done.stdout and "4 nodes" in done.stdout


def test_a_snapshot_that_cannot_be_saved_is_named_below_the_verdict(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "saved" / "smt1.json").mkdir(parents=True)
    done = _audit("--sysfs-root", str(tree), "--save", str(tmp_path / "saved"))
    assert done.returncode == 4 and "F A04" in done.stdout
    assert "left out   cannot save snapshots in" in done.stdout


def test_ranks_of_mpiexec_are_told_how_to_gather() -> None:
    pmi = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    done = _audit(**pmi)
    assert done.returncode == 2 and "--save" in done.stderr and "--mpi" in done.stderr


def test_ranks_gather_over_mpi() -> None:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    command = [str(mpiexec), "-n", "2", sys.executable, "-m", "hpcpace", "audit", "--mpi", "--json"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    document = json.loads(done.stdout)
    assert (document["num_ranks"], document["missing"]) == (2, [])
    assert "A01" not in document["skipped"]


def test_ranks_that_each_see_an_mpi_world_of_one_are_found(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    arguments = ("--mpi", "--rules", "A01", "--save", str(tmp_path))
    _audit(*arguments, **step, SLURM_NODEID="0", SLURM_PROCID="1", SLURM_LOCALID="1")
    done = _audit(*arguments, **step, SLURM_NODEID="0", SLURM_PROCID="0", SLURM_LOCALID="0")
    assert done.returncode == 4
    assert "F A01      2 ranks each see an MPI world of 1" in done.stdout


def test_nothing_is_written_without_being_asked_for(tmp_path: Path) -> None:
    _audit(cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_audit_loads_nothing_heavy() -> None:
    code = "import hpcpace.cli.audit, sys; print([n for n in ('numpy', 'h5py', 'pandas', 'torch') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_host_name_cannot_steer_a_terminal(tmp_path: Path) -> None:
    machine: Machine = small_node("n\x1b[2J1")
    done = _audit("--sysfs-root", str(machine.write(tmp_path)), "--json")
    assert "\x1b" not in done.stdout
    assert json.loads(done.stdout)["hosts"] == ["n\\x1b[2J1"]
