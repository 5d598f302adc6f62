"""The masks that are right, and the check that they clear what was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpace.audit import cpusets
from hpcpace.audit.findings import Severity, bind_masks, bind_option, with_masks
from hpcpace.audit.job import AuditedHost, AuditedJob
from hpcpace.audit.rulebook import BINDING_RULES, audit, run_rules
from hpcpace.audit.snapshot import take_tree
from hpcpace.audit.tree import Unreadable
from tests.machines.cases import CASES, hybrid_cpu, mi250x, offline_cpus
from tests.machines.machine import Machine, dgx_h100, threaded
from tests.machines.real import dgx_spark


def _lists(machine: Machine, folder: Path, num_tasks: int | None = None) -> list[str]:
    host = AuditedHost(take_tree(machine.write(folder)))
    return [cpusets.format_list(mask) for mask in bind_masks(host, num_tasks)]


def test_each_rank_of_a_dgx_gets_a_quarter_of_its_gpus_socket(tree_path: Path) -> None:
    assert _lists(dgx_h100(), tree_path)[:2] == ["0-13,112-125", "14-27,126-139"]


def test_ranks_follow_gpus_whose_order_runs_against_the_numa_nodes(tree_path: Path) -> None:
    lists = _lists(mi250x(in_order=False), tree_path)
    assert [text.split(",")[0] for text in lists] == [
        "48-55",
        "56-63",
        "16-23",
        "24-31",
        "0-7",
        "8-15",
        "32-39",
        "40-47",
    ]


def test_slow_cores_of_a_hybrid_processor_are_left_out(tree_path: Path) -> None:
    assert _lists(hybrid_cpu(), tree_path) == ["0-5", "6-11"]


def test_fast_cores_of_an_arm_processor_are_told_by_their_capacity(tree_path: Path) -> None:
    machine = dgx_spark()
    machine.folders.add("sys/bus/pci/devices")
    assert _lists(machine, tree_path, num_tasks=2) == ["5-9", "15-19"]


def test_slow_cores_are_used_where_there_are_more_ranks_than_fast_ones(tree_path: Path) -> None:
    assert _lists(hybrid_cpu(), tree_path, num_tasks=14)[-1] == "19"


def test_cpus_that_are_switched_off_are_left_out(tree_path: Path) -> None:
    assert _lists(offline_cpus(), tree_path) == ["0-5", "8-11"]


def test_ranks_without_a_gpu_are_dealt_out_in_blocks(tree_path: Path) -> None:
    machine = Machine("n1").processors({0: threaded(0, 8), 1: threaded(8, 4)})
    assert _lists(machine, tree_path, num_tasks=3) == ["0-3", "4-7", "8-11"]


def test_more_ranks_than_cores_have_no_masks(tree_path: Path) -> None:
    machine = Machine("n1").processors({0: threaded(0, 2)})
    with pytest.raises(Unreadable, match="masks for 3 ranks: the job has 2 cores"):
        _lists(machine, tree_path, num_tasks=3)


def test_the_option_is_what_srun_takes() -> None:
    assert bind_option((0x0F, 0xF0)) == "--cpu-bind=mask_cpu:0xf,0xf0"


@pytest.mark.parametrize("name", CASES)
def test_masks_clear_what_was_found_of_bindings(name: str, tree_path: Path) -> None:
    case = CASES[name]
    job = AuditedJob(case.snapshots(tree_path), case.settings)
    for host in job.hosts:
        try:
            masks = bind_masks(host)
        except Unreadable:
            continue
        if len(host.ranks) > 1:
            bound = AuditedJob([with_masks(host.snapshot, masks)], case.settings)
            left = [f for f in run_rules(bound, BINDING_RULES).findings if f.severity != Severity.INFORMATION]
            assert [f for f in left if f.rule != "A05" or "SLURM_CPUS_PER_TASK" not in f.seen] == []


def test_a_binding_that_leaves_findings_says_which(tree_path: Path) -> None:
    machine = Machine("n1").processors({0: threaded(0, 4)})
    for rank in range(4):
        machine.rank(rank, "0-3", world=4, mems="0", environ={"SLURM_CPUS_PER_TASK": "2"})
    result = audit(AuditedJob([take_tree(machine.write(tree_path))]))
    assert [binding.left for binding in result.bindings] == [("A05",)]
