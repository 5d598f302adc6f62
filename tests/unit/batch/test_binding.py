"""HPCPACE_BIND=auto: the masks of the audit, or why they are not used."""

from __future__ import annotations

from pathlib import Path

from cases import each_case

from hpcpace.audit.snapshot import take_tree
from hpcpace.audit.snapshot_files import save_snapshots
from hpcpace.batch.job import choose_binding
from hpcpace.batch.launch import Allocation, Component, Launch
from tests.machines.machine import Machine, threaded


def _snapshots(folder: Path, *cores: int) -> Path:
    """Save what the audit saw of nodes with these numbers of cores and two ranks each."""
    found = []
    for node, count in enumerate(cores):
        machine = Machine(f"n{node}").processors({0: threaded(0, count)})
        for rank in range(2):
            machine.rank(2 * node + rank, f"0-{count - 1}", world=2 * len(cores), mems="0")
        found.append(take_tree(machine.write(folder / f"tree-{node}")))
    save_snapshots(folder / "snapshot", found)
    return folder / "snapshot"


def _launch(*options: str, num_nodes: int = 1, num_components: int = 1) -> Launch:
    component = Component(num_nodes=num_nodes, num_tasks=2 * num_nodes, cpus_per_task=1)
    allocation = Allocation(job="17", components=(component,) * num_components)
    return Launch(program=("hpcpace",), allocation=allocation, options=options)


def test_applies_the_masks_that_the_audit_proposes(tmp_path: Path) -> None:
    option, line = choose_binding(_launch(num_nodes=2), _snapshots(tmp_path, 4, 4), {})
    assert option == "--cpu-bind=mask_cpu:0x3,0xc"
    assert line == f"HPCPACE_BIND=auto: {option} for the 2 ranks on each of n[0-1]"


@each_case(
    ("launch", "cores", "reason"),
    [
        (_launch("--cpu-bind=cores"), (4,), "HPCPACE_SRUN_ARGS has a --cpu-bind, which stays"),
        (_launch(num_components=2), (4,), "the components of a heterogeneous job need their own"),
        (_launch(num_nodes=2), (4, 8), "the audit proposes different ones for different nodes"),
        (_launch(num_nodes=3), (4, 4), "the audit has seen 2 of 3 nodes"),
        (_launch(), (1,), "the job has 1 cores"),
        (Launch(program=("hpcpace",), allocation=None), (4,), "this is no Slurm job"),
    ],
    ids=["chosen by the user", "heterogeneous", "nodes differ", "a node is missing", "too few cores", "no Slurm"],
)
def test_says_why_ranks_are_not_bound(launch: Launch, cores: tuple[int, ...], reason: str, tmp_path: Path) -> None:
    option, line = choose_binding(launch, _snapshots(tmp_path, *cores), {})
    assert option == ""
    assert line.startswith("HPCPACE_BIND=auto: ranks are not bound: ") and reason in line


def test_an_audit_that_saved_nothing_is_no_reason_to_end(tmp_path: Path) -> None:
    assert "ranks are not bound: cannot read " in choose_binding(_launch(), tmp_path / "none", {})[1]
