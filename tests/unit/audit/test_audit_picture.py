"""The machine as text and SVG: what is where, who may run there, and names that try to break out of it."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from hpcpace.audit.facts import Snapshot
from hpcpace.audit.job import AuditedJob
from hpcpace.audit.picture import MAX_PICTURES, Picture, pictures
from hpcpace.audit.picture_text import WIDTH, picture_lines, svg
from hpcpace.audit.rulebook import audit
from hpcpace.audit.snapshot import take_tree
from hpcpace.report.audit_report import audit_document, picture_sections
from hpcpace.report.html import html_page
from tests.machines.cases import CASES, HEALTHY, cgroup_cut, small_node
from tests.machines.machine import Machine, dgx_h100, threaded


def _picture(machine: Machine, folder: Path) -> Picture:
    (drawn,), _ = pictures(AuditedJob([take_tree(machine.write(folder))]))
    return drawn


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.hosts()])
def test_every_machine_fits_a_terminal_and_is_valid_svg(name: str, tree_path: Path) -> None:
    drawn, _ = pictures(AuditedJob(CASES[name].snapshots(tree_path)))
    lines = [line for picture in drawn for line in picture_lines(picture)]
    assert drawn and max(map(len, lines)) <= WIDTH and "".join(lines).isascii()
    assert ElementTree.fromstring(svg(drawn)).tag.endswith("svg")


def test_each_ranks_cores_and_gpu_are_drawn_on_their_numa_node(tree_path: Path) -> None:
    picture = _picture(dgx_h100(), tree_path)
    node = picture.packages[1].nodes[0]
    assert [(len(group.cores), group.ranks_text) for group in node.groups] == [(14, f"rank {n}") for n in range(4, 8)]
    assert [(device.name, device.ranks) for device in node.devices if device.is_gpu] == [
        (f"GPU{number}", (number,)) for number in range(4, 8)
    ]
    text = "\n".join(picture_lines(picture))
    assert "[44444444444444555555555555556666666666666677777777777777]" in text
    assert "14 cores  CPUs 98-111,210-223              2 threads  rank 7" in text


def test_links_are_classes_of_paths_and_nvlinks_behind_switches(tree_path: Path) -> None:
    snapshot = take_tree(dgx_h100().write(tree_path))
    gpus = tuple(dataclasses.replace(gpu, nvml=HEALTHY) for gpu in snapshot.gpus or ())
    hardware = dataclasses.replace(snapshot.hardware, num_nvswitches=4)
    (drawn,), _ = pictures(AuditedJob([dataclasses.replace(snapshot, gpus=gpus, hardware=hardware)]))
    assert drawn.links["GPU0", "GPU7"] == "NV18"
    assert (drawn.links["mlx5_0", "GPU0"], drawn.links["mlx5_0", "GPU4"]) == ("PIX", "SYS")
    assert "Links, GPU x GPU: NV18 between all" in list(picture_lines(drawn))


def test_direct_nvlinks_are_drawn_between_the_gpus_that_they_join(tree_path: Path) -> None:
    snapshot = take_tree(dgx_h100().write(tree_path))
    addresses = [gpu.address for gpu in snapshot.gpus or ()]
    pairs = zip(addresses[::2], addresses[1::2], strict=True)
    to = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
    gpus = tuple(
        dataclasses.replace(gpu, nvml=dataclasses.replace(HEALTHY, links_to={to[gpu.address]: 4}))
        for gpu in snapshot.gpus or ()
    )
    (drawn,), _ = pictures(AuditedJob([dataclasses.replace(snapshot, gpus=gpus)]))
    assert [drawn.links["GPU0", f"GPU{number}"] for number in (1, 2, 4)] == ["NV4", "NODE", "SYS"]


def test_devices_on_two_numa_nodes_are_sys_whatever_their_paths(tree_path: Path) -> None:
    snapshot = take_tree(dgx_h100().write(tree_path))
    pci = tuple(dataclasses.replace(device, parents=None) for device in snapshot.hardware.pci or ())
    hardware = dataclasses.replace(snapshot.hardware, pci=pci)
    (drawn,), _ = pictures(AuditedJob([dataclasses.replace(snapshot, hardware=hardware)]))
    assert (drawn.links["GPU0", "GPU4"], drawn.links["GPU0", "GPU1"]) == ("SYS", "?")


def test_cores_that_ranks_share_are_drawn_as_shared(tree_path: Path) -> None:
    text = "\n".join(picture_lines(_picture(cgroup_cut(), tree_path)))
    assert "*" in text and "ranks " in text


def test_a_rank_on_some_threads_of_a_core_is_there_in_part(tree_path: Path) -> None:
    machine = Machine("n1").processors({0: threaded(0, 4, 4)})
    machine.rank(0, "0-1", world=2, mems="0").rank(1, "4-5", world=2, mems="0")
    (group, free) = _picture(machine, tree_path).packages[0].nodes[0].groups
    assert (group.ranks_text, free.ranks_text) == ("ranks 0-1 in part", "")


def test_hosts_that_look_the_same_are_drawn_once(tree_path: Path) -> None:
    snapshot = take_tree(small_node("n1").write(tree_path))
    hosts = [dataclasses.replace(snapshot, host=f"n{number}") for number in range(1, 5)]
    drawn, num_left = pictures(AuditedJob(hosts))
    assert ([picture.title for picture in drawn], num_left) == (["n[1-4], ranks by local rank"], 0)


def test_few_kinds_of_hosts_are_drawn_and_the_others_counted(tree_path: Path) -> None:
    snapshot = take_tree(small_node("n1").write(tree_path))
    hosts = [
        dataclasses.replace(snapshot, host=f"n{n}", hardware=dataclasses.replace(snapshot.hardware)) for n in range(20)
    ]
    drawn, num_left = pictures(AuditedJob(hosts))
    assert (len(drawn), num_left) == (MAX_PICTURES, 20 - MAX_PICTURES)


def test_devices_whose_place_is_hidden_are_drawn_apart(tree_path: Path) -> None:
    (drawn,), _ = pictures(AuditedJob(CASES["vm-hidden-numa"].snapshots(tree_path)))
    assert {device.name for device in drawn.unplaced} >= {"GPU0", "GPU3"}
    assert "  Where these are is not known:" in list(picture_lines(drawn))


def test_an_empty_machine_is_a_picture_that_says_what_is_not_known(tree_path: Path) -> None:
    machine = small_node("n1").without("sys/")
    machine.folders = {"sys"}
    picture = _picture(machine, tree_path)
    assert any("which CPUs are online" in note for note in picture.notes)
    assert list(picture_lines(picture)) and ElementTree.fromstring(svg([picture])) is not None


def _hostile(snapshot: Snapshot) -> Snapshot:
    evil = '</title><script>alert(1)</script>"\x1b[2J\u202e'
    return dataclasses.replace(
        snapshot,
        host=evil,
        net=tuple(dataclasses.replace(net, name=evil) for net in snapshot.net or ()),
        rdma=tuple(dataclasses.replace(one, name=evil) for one in snapshot.rdma or ()),
        gpus=tuple(dataclasses.replace(gpu, name=evil) for gpu in snapshot.gpus or ()),
        hardware=dataclasses.replace(
            snapshot.hardware,
            cpus=dataclasses.replace(snapshot.hardware.cpus, model=evil, packages={evil: "0-7", "1": "8-15"}),
            pci=tuple(
                dataclasses.replace(device, address=f"{number}{evil}", vendor=evil)
                for number, device in enumerate(snapshot.hardware.pci or ())
            ),
        ),
    )


def test_names_of_a_snapshot_cannot_break_out_of_the_picture(tree_path: Path) -> None:
    job = AuditedJob([_hostile(take_tree(small_node("n1").write(tree_path)))])
    drawn, _ = pictures(job)
    result = dataclasses.replace(audit(job), missing=("<i>\x1b[2J",), skipped={"A01": "<i>"})
    page = html_page(audit_document(result, list(picture_sections(job, result))))
    assert "<script>alert" not in page and "\x1b" not in page and "<i>" not in page
    assert ElementTree.fromstring(svg(drawn)) is not None
    assert all(line.isprintable() and len(line) <= WIDTH for line in picture_lines(drawn[0]))


def test_a_snapshot_of_very_many_cores_and_ranks_is_drawn_within_bounds(tree_path: Path) -> None:
    snapshot = take_tree(small_node("n1").write(tree_path))
    cpus = dataclasses.replace(
        snapshot.hardware.cpus,
        online="0-8191",
        cores=tuple(map(str, range(8_192))),
        packages={"0": "0-8191"},
    )
    ranks = tuple(
        dataclasses.replace(snapshot.ranks[0], rank=number, local_rank=number, cpus=str(number))
        for number in range(600)
    )
    large = dataclasses.replace(snapshot, hardware=dataclasses.replace(snapshot.hardware, cpus=cpus), ranks=ranks)
    drawn, _ = pictures(AuditedJob([large]))
    assert len(svg(drawn)) < 2_000_000 and len(list(picture_lines(drawn[0]))) < 500
    assert any("cores are not drawn" in note for note in drawn[0].notes)


@pytest.mark.parametrize("number", [-1, 1 << 62])
def test_a_rank_whose_number_is_impossible_is_drawn(number: int, tree_path: Path) -> None:
    snapshot = take_tree(small_node("n1").write(tree_path))
    ranks = (dataclasses.replace(snapshot.ranks[0], rank=number), *snapshot.ranks[1:])
    (drawn,), _ = pictures(AuditedJob([dataclasses.replace(snapshot, ranks=ranks)]))
    assert str(number) in svg([drawn]) and all(len(line) <= WIDTH for line in picture_lines(drawn))
