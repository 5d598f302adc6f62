"""What an operation could reach: bytes that each algorithm sends over a host's network, and the rates of the audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from cases import each_case

from hpcpace.audit.facts import Counters, Cpus, Hardware, Kernel, NetDevice, PciDevice, RdmaDevice, RdmaPort, Snapshot
from hpcpace.probe.start import bus_limit, network_rate

RATE = 100.0


@each_case(
    ("op", "backend", "node_of_rank", "limit"),
    [
        ("all_reduce", "gloo", (0, 1, 2, 3), RATE),
        ("all_gather", "gloo", (0, 1, 2, 3), RATE),
        ("reduce_scatter", "gloo", (0, 1, 2, 3), RATE / 2),  # torch performs it as an all_reduce
        ("broadcast", "gloo", (0, 1), RATE),
        ("broadcast", "gloo", (0, 1, 2, 3), RATE / 2),  # the root sends to ranks 1 and 2
        ("broadcast", "gloo", (0, 0, 1, 1), RATE / 2),  # ranks 0 and 1 send to 2 and 3
        ("all_to_all", "gloo", (0, 1, 2, 3), RATE),
        ("all_to_all", "gloo", (0, 0, 1, 1), RATE * 3 / 4),
        ("send_recv", "gloo", (0, 0, 1, 1), RATE),
        ("send_recv", "gloo", (0, 1, 0, 1), RATE / 2),  # each rank's neighbours are on the other host
        ("all_reduce", "gloo", (0, 1, 0, 1), RATE / 2),
        ("all_reduce", "nccl", (0, 1, 0, 1), RATE),  # orders its ring by host
        ("reduce_scatter", "nccl", (0, 0, 1, 1), RATE),
        ("broadcast", "nccl", (0, 0, 1, 1), RATE),
        ("all_reduce", "gloo", (0, 0, 0, 0), None),
    ],
)
def test_the_host_with_the_most_to_send_limits_an_operation(
    op: str, backend: str, node_of_rank: Sequence[int], limit: float | None
) -> None:
    assert bus_limit(op, backend, node_of_rank, dict.fromkeys(range(4), RATE)) == limit


def test_the_slowest_host_limits_a_ring_and_an_unknown_rate_leaves_it_unknown() -> None:
    assert bus_limit("all_reduce", "gloo", (0, 1, 2), {0: 3.0, 1: 2.0, 2: 5.0}) == 2.0
    assert bus_limit("all_reduce", "gloo", (0, 1, 2), {0: 3.0, 1: None, 2: 5.0}) is None


CPUS = Cpus(online="0", offline="", model="", packages={}, cores=("0",), caches=(), governors={}, driver="", fast="")
KERNEL = Kernel(
    release="",
    command_line="",
    is_virtual=False,
    numa_balancing=0,
    huge_pages="",
    huge_pages_defrag="",
    modules={},
    rdma_holders=(),
    nvidia_driver="",
    is_nvidia_open=None,
    has_verbs=False,
    shm_bytes=0,
    memory_bytes=0,
    nccl_conf={},
)


def net(name: str, speed_mbps: int | None, *, shaped_mbps: float | None = 0.0, pci: str = "") -> NetDevice:
    return NetDevice(
        name=name,
        pci=pci,
        kind="loopback" if name == "lo" else "ethernet",
        mtu=1500,
        speed_mbps=speed_mbps,
        state="up",
        is_physical=bool(pci),
        master="",
        shaped_mbps=shaped_mbps,
    )


def adapter(address: str, speed_gts: float | None, width: int) -> PciDevice:
    return PciDevice(
        address=address,
        kind="nic",
        vendor="",
        device="",
        parents=(),
        numa_node=0,
        local_cpus="0",
        speed_gts=speed_gts,
        max_speed_gts=speed_gts,
        width=width,
        max_width=width,
        driver="",
        iommu_group="",
        is_virtual_function=False,
        acs_control=None,
    )


def rdma(name: str, pci: str, *rates_gbps: float | None, state: str = "ACTIVE") -> RdmaDevice:
    ports = tuple(
        RdmaPort(number=number + 1, state=state, phys_state="", rate_gbps=rate, link_layer="InfiniBand", gids=())
        for number, rate in enumerate(rates_gbps)
    )
    return RdmaDevice(name=name, pci=pci, firmware="", board="", ports=ports)


SNAPSHOT = Snapshot(
    hpcpace_version="",
    host="n1",
    boot_id="",
    taken_unix_ns=0,
    is_live=True,
    hardware=Hardware(
        cpus=CPUS,
        numa=(),
        pci=(adapter("0000:17:00.0", 16.0, 16), adapter("0000:18:00.0", 8.0, 8), adapter("0000:19:00.0", None, 0)),
        num_nvswitches=0,
    ),
    rdma=(),
    net=(),
    gpus=(),
    kernel=KERNEL,
    counters=Counters(values={}, growth=None, window_s=0.0),
)


def test_a_shaped_interface_counts_with_the_rate_of_its_token_bucket() -> None:
    found = network_rate(replace(SNAPSHOT, net=(net("eth0", 10_000, shaped_mbps=400.0),)), ["eth0"], with_rdma=False)
    assert (found.line_rate, found.rate_words) == (50e6, "400 Mb/s")


def test_rails_add_up_and_are_counted_in_words() -> None:
    devices = (rdma("mlx5_0", "0000:17:00.0", 200.0), rdma("mlx5_1", "0000:18:00.0", 200.0))
    found = network_rate(replace(SNAPSHOT, rdma=devices), ["eth0"], with_rdma=True)
    assert (found.line_rate, found.rate_words, found.interfaces) == (50e9, "2 x 200 Gb/s", ("mlx5_0/1", "mlx5_1/1"))
    assert found.pcie_rate == pytest.approx((16e9 * 16 + 8e9 * 8) * 128 / 130 / 8)


def test_two_ports_of_one_adapter_share_its_pcie_link() -> None:
    found = network_rate(replace(SNAPSHOT, rdma=(rdma("mlx5_0", "0000:17:00.0", 100.0, 100.0),)), [], with_rdma=True)
    assert found.pcie_rate == pytest.approx(16e9 * 16 * 128 / 130 / 8)


def test_gloo_sends_over_its_interface_though_rdma_is_active() -> None:
    snapshot = replace(SNAPSHOT, rdma=(rdma("mlx5_0", "0000:17:00.0", 200.0),), net=(net("eth0", 25_000),))
    assert network_rate(snapshot, ["eth0"], with_rdma=False).rate_words == "25 Gb/s"


@each_case(
    ("devices", "interfaces", "words"),
    [
        ((net("eth0", None),), ["eth0"], "eth0 reports no speed"),
        ((net("eth0", 0), net("eth1", 1000)), ["eth0", "eth1"], "eth0 reports no speed"),
        ((net("lo", None),), ["lo"], "all ranks are on one host"),
        ((net("eth0", 1000),), [], "the interface is not known"),
    ],
)
def test_a_rate_that_nobody_knows_has_its_reason(
    devices: tuple[NetDevice, ...], interfaces: list[str], words: str
) -> None:
    found = network_rate(replace(SNAPSHOT, net=devices), interfaces, with_rdma=False)
    assert (found.line_rate, found.rate_words) == (None, words)


def test_a_port_that_is_down_carries_nothing() -> None:
    snapshot = replace(SNAPSHOT, rdma=(rdma("mlx5_0", "0000:17:00.0", 200.0, state="DOWN"),), net=(net("eth0", 1000),))
    assert network_rate(snapshot, ["eth0"], with_rdma=True).rate_words == "1 Gb/s"
