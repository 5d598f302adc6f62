"""Where devices are, on trees that lack numa_node, lists of CPUs or package numbers; and masks without knowing GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from hpcpace.audit import cpusets
from hpcpace.audit.collect_hardware import collect_hardware
from hpcpace.audit.facts import hardware_view
from hpcpace.audit.job import AuditedJob
from hpcpace.audit.rulebook import Binding, audit, run_rules
from hpcpace.audit.snapshot import take_tree
from hpcpace.audit.tree import Tree, Unreadable
from tests.audit_lines import verdict_lines
from tests.machines.machine import GPU, NVIDIA, Machine, dgx_h100, threaded

_GPU = "0000:11:00.0"
_PLACE = f"sys/devices/pci0000:10/{_GPU}"


def _machine(cpus: str, *, numa: int = -1) -> Machine:
    machine = Machine("n1").processors({0: threaded(0, 4), 1: threaded(4, 4)})
    return machine.pci(f"pci0000:10/{_GPU}", GPU, NVIDIA, "0x2330", numa=numa, cpus=cpus)


def _node_of(machine: Machine, folder: Path) -> int:
    return hardware_view(take_tree(machine.write(folder)).hardware).node_of(_GPU)


def test_a_device_whose_numa_node_is_hidden_is_on_the_node_of_its_local_cpus(tree_path: Path) -> None:
    assert _node_of(_machine("4-7"), tree_path) == 1


def test_a_device_without_numa_node_is_on_the_node_of_its_local_cpus(tree_path: Path) -> None:
    assert _node_of(_machine("4-7").without(f"{_PLACE}/numa_node"), tree_path) == 1


def test_a_mask_of_local_cpus_is_read_where_the_list_is_missing(tree_path: Path) -> None:
    machine = _machine("").without(f"{_PLACE}/local_cpulist", f"{_PLACE}/numa_node")
    machine.files[f"{_PLACE}/local_cpus"] = "0000,000000f0\n"
    assert _node_of(machine, tree_path) == 1


def test_a_numa_node_that_is_read_wins_over_local_cpus(tree_path: Path) -> None:
    assert _node_of(_machine("4-7", numa=0), tree_path) == 0


def test_local_cpus_on_several_nodes_place_nothing(tree_path: Path) -> None:
    with pytest.raises(Unreadable, match="the firmware reports -1"):
        _node_of(_machine("0-7"), tree_path)


@each_case("text", ["", "g", "0x1", "1,", "123456789", "1" * 40_000])
def test_damaged_masks_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a mask"):
        cpusets.parse_mask(text)


def test_a_device_that_local_cpus_place_is_not_hidden(tree_path: Path) -> None:
    snapshot = take_tree(_machine("4-7").without(f"{_PLACE}/numa_node").write(tree_path))
    assert run_rules(AuditedJob([snapshot]), ["P06"]).findings == ()


def test_cpus_are_counted_by_their_folders_where_no_list_says_which_are_online(tree_path: Path) -> None:
    machine = _machine("").without("sys/devices/system/cpu/online")
    machine.files["sys/devices/system/cpu/cpu2/online"] = "0"
    assert collect_hardware(Tree(machine.write(tree_path))).cpus.online == "0-1,3-7"


def test_packages_without_numbers_are_told_by_the_cpus_that_the_kernel_groups(tree_path: Path) -> None:
    machine = _machine("")
    for cpu in range(8):
        place = f"sys/devices/system/cpu/cpu{cpu}/topology"
        machine.files[f"{place}/physical_package_id"] = "-1"
        machine.files[f"{place}/core_siblings"] = "f" if cpu < 4 else "f0"
    packages = collect_hardware(Tree(machine.write(tree_path))).cpus.packages
    assert packages == {"0": "0-3", "4": "4-7"}


def _binding(machine: Machine, folder: Path, num_tasks: int | None) -> tuple[Binding, str]:
    result = audit(AuditedJob([take_tree(machine.write(folder))]), num_tasks=num_tasks)
    return result.bindings[0], "\n".join(verdict_lines(result))


def test_masks_for_a_number_of_ranks_are_proposed_where_gpus_are_unknown(tree_path: Path) -> None:
    binding, text = _binding(_machine("", numa=-1), tree_path, 4)
    assert binding.option == "--cpu-bind=mask_cpu:0x3,0xc,0x30,0xc0"
    assert f"it does not follow the GPUs: cannot determine the NUMA node of {_GPU}" in text


def test_masks_that_nobody_has_requested_are_not_proposed_where_gpus_are_unknown(tree_path: Path) -> None:
    machine = dgx_h100()
    for path in [path for path in machine.files if path.endswith(("/numa_node", "/local_cpulist"))]:
        del machine.files[path]
    binding, _ = _binding(machine, tree_path, None)
    assert (binding.option, "the NUMA node of" in binding.reason) == ("", True)
