"""Noise and copies of a host: who measures which core, what a process of a core says, and what is left out."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import each_case
from rich.console import Console

from hpcpace.core.rundir import write_json
from hpcpace.probe.hosts import Copies, Noise, memory_rates, note_on_sharing, numa_of_cpus, pci_address, share_out
from hpcpace.probe.record import CopiesRecord, CoreFigures, CoreNoise, DeviceRate, NoiseRecord, ProbeRecord, probe_from
from hpcpace.probe.world import Board, ProbeWorld
from hpcpace.report.document import Section
from hpcpace.report.sections.probe import copies_section, noise_section
from hpcpace.report.terminal import print_section
from hpcpace.world.deadline import Deadline
from tests.unit.probe.empty_record import empty_record


def printed(section: Section) -> list[str]:
    stream = io.StringIO()
    print_section(Console(file=stream, width=80, highlight=False, color_system=None), section)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def _world() -> ProbeWorld:
    return ProbeWorld(
        rank=0,
        node_of_rank=(0,),
        hosts=("n1",),
        topology_addrs=("",),
        device=torch.device("cpu"),
        backend="gloo",
        board=Board(dist.HashStore()),
        timeout_s=2.0,
    )


def _record() -> ProbeRecord:
    return empty_record()


@each_case(
    ("cpus", "shares"),
    [
        ({0: [0, 1], 1: [2, 3]}, {0: [0, 1], 1: [2, 3]}),
        ({0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}, {0: [0, 2], 1: [1, 3]}),
        ({4: [0, 1], 5: [0, 1], 6: [0, 1]}, {4: [0], 5: [1], 6: []}),
        ({0: [7], 1: [6, 7]}, {0: [7], 1: [6]}),
    ],
)
def test_every_core_is_measured_once_by_a_rank_that_may_use_it(
    cpus: dict[int, list[int]], shares: dict[int, list[int]]
) -> None:
    assert share_out(cpus) == shares


def test_more_ranks_than_cores_are_said() -> None:
    assert note_on_sharing({0: [0, 1], 1: [0, 1]}) == ""
    note = note_on_sharing({0: [0, 1], 1: [0, 1], 2: [0, 1]})
    assert note == "3 ranks share 2 cores: while one computes, another waits, which is not noise"


def test_all_cores_of_this_process_are_measured() -> None:
    noise = Noise(most_length_s=0.2).measure(_world(), Deadline(60.0), _record()).noise
    assert noise is not None
    assert [core.cpu for core in noise.cores] == sorted(os.sched_getaffinity(0))
    assert all(0 <= core.figures.share < 1 and core.figures.quantum_ns > 0 for core in noise.cores)


def test_noise_in_words() -> None:
    quiet = CoreFigures(
        share=0.0004,
        longest_ns=9e4,
        num_detours=3,
        quantum_ns=5e4,
        resolution_ns=5e3,
        span_ns=5 * 10**9,
        period_ns=None,
        period_share=None,
    )
    robbed = CoreFigures(
        share=0.0512,
        longest_ns=6e5,
        num_detours=500,
        quantum_ns=5e4,
        resolution_ns=5e3,
        span_ns=5 * 10**9,
        period_ns=1e7,
        period_share=0.05,
    )
    cores = [CoreNoise(host="n1", cpu=cpu, figures=robbed if cpu == 2 else quiet) for cpu in range(4)]
    record = NoiseRecord(cores=tuple(cores), notes=("n2: 3 ranks share 2 cores",))
    lines = printed(noise_section(record))
    assert {"- 4 cores, 5.00 s each, detours from 5.00 us on", "- a core usually loses 0.0 % of the time"} <= {*lines}
    assert lines[-1] == "- n2: 3 ranks share 2 cores"
    at = lines.index("cores, the noisiest first")
    assert lines[at + 3].split() == ["n1", "2", "5.1", "%", "600", "us", "500", "10.0", "ms", "5.0", "%"]


def test_numa_nodes_of_cores_come_from_the_kernel(tmp_path: Path) -> None:
    for node, cpus in enumerate(("0-1,4", "2-3,5")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(f"{cpus}\n")
    (tmp_path / "node7").mkdir()
    assert numa_of_cpus(tmp_path) == {0: 0, 1: 0, 4: 0, 2: 1, 3: 1, 5: 1}
    assert numa_of_cpus(tmp_path / "none") == {}


def test_cores_copy_within_their_numa_node() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    nodes = {cpu: number % 2 for number, cpu in enumerate(cpus)}
    rates = memory_rates(cpus, nodes, length_s=0.01, array_bytes=1 << 16)
    assert [rate.numa_node for rate in rates] == sorted(set(nodes.values()))
    assert sum(rate.num_threads for rate in rates) == len(cpus)
    assert all(rate.rate > 0 for rate in rates)


def test_a_core_that_this_process_may_not_use_is_left_out() -> None:
    assert memory_rates([100_000], {}, length_s=0.01, array_bytes=1 << 16) == []


def test_copies_are_measured_and_read_back_from_a_file(tmp_path: Path) -> None:
    record = Copies(length_s=0.01, array_bytes=1 << 16).measure(_world(), Deadline(60.0), _record())
    assert record.copies is not None
    assert sum(row.num_threads for row in record.copies.memory) == len(os.sched_getaffinity(0))
    write_json(tmp_path / "probe.json", record.to_json())
    assert probe_from((tmp_path / "probe.json").read_text()).copies == record.copies


def test_copies_that_do_not_fit_into_the_time_are_said() -> None:
    world = _world()
    assert Copies().measure(world, Deadline(0.1), _record()).copies is None
    assert world.problems == ["copies did not fit into the time: allow more with --time"]


def test_copies_of_a_device_in_words() -> None:
    row = DeviceRate(
        host="n1",
        device=0,
        bus_id="0000:17:00.0",
        numa_node=0,
        is_pinned=True,
        to_device=26.1e9,
        from_device=25.2e9,
        limit=31.5e9,
    )
    *_, caption, _, _, shown = printed(copies_section(CopiesRecord(devices=(row,))))
    assert caption == "copies between host and device"
    assert " ".join(shown.split()) == "n1 0 0 pinned 26.1 GB/s 25.2 GB/s 82.9 %"


@pytest.mark.parametrize(
    ("properties", "address"),
    [
        ({"pci_domain_id": 0, "pci_bus_id": 0x17, "pci_device_id": 0}, "0000:17:00.0"),
        ({"pci_bus_id": 0x17}, ""),
    ],
)
def test_the_address_of_a_gpu_is_that_of_linux(
    monkeypatch: pytest.MonkeyPatch, properties: dict[str, int], address: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties))
    assert pci_address(torch.device("cuda", 0)) == address
