"""Counters of adapters from made-up trees of sysfs, with the files that the drivers of each kind have."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from hpcpace.observe.host.network import Details, find_fabric_ports
from hpcpace.trace.schema import LinkState

MLX5 = {
    "counters/port_xmit_data": "250\n", "counters/port_rcv_data": "1000\n", "counters/port_xmit_wait": "77\n",
    "counters/symbol_error": "1\n", "counters/port_rcv_errors": "2\n", "counters/link_error_recovery": "4\n",
    "counters/local_link_integrity_errors": "8\n", "counters/port_xmit_discards": "5\n", "counters/link_downed": "3\n",
    "hw_counters/np_cnp_sent": "10\n", "hw_counters/rp_cnp_handled": "20\n", "hw_counters/out_of_sequence": "9\n",
    "hw_counters/packet_seq_err": "1\n", "hw_counters/roce_adp_retrans": "2\n", "hw_counters/rnr_nak_retry_err": "4\n",
    "hw_counters/local_ack_timeout_err": "8\n", "rate": "400 Gb/sec (4X NDR)\n", "state": "4: ACTIVE\n",
}  # fmt: skip
EFA = {
    "hw_counters/tx_bytes": "123\n", "hw_counters/rx_bytes": "456\n", "hw_counters/rx_drops": "7\n",
    "hw_counters/retrans_pkts": "8\n", "rate": "100 Gb/sec (4X EDR)\n", "state": "4: ACTIVE\n",
}  # fmt: skip
BNXT = {
    "counters/port_xmit_data": "1\n", "counters/port_rcv_data": "1\n", "hw_counters/rx_cnp_pkts": "5\n",
    "hw_counters/tx_cnp_pkts": "6\n", "hw_counters/to_retransmits": "2\n", "hw_counters/oos_drop_count": "3\n",
    "state": "1: DOWN\n",
}  # fmt: skip
SLINGSHOT = {
    "hni_sts_tx_ok_octets": "900@1700000000.123\n", "hni_sts_rx_ok_octets": "800@1700000000.123\n",
    "hni_tx_paused_0": "3@1.5\n", "hni_tx_paused_7": "4@1.5\n", "hni_pcs_uncorrected_cw": "2@1.5\n",
    "hni_llr_tx_replay_event": "6@1.5\n", "hni_llr_tx_discard": "1@1.5\n", "pct_bad_seq_nacks": "5@1.5\n",
}  # fmt: skip


def lay_out(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("place", "files", "name", "sizes", "details"),
    [
        (
            "infiniband/mlx5_0/ports/1", MLX5, "mlx5_0/1", (1000, 4000),
            Details(15, 5, 77, 30, 15, 9, 3, 400 * 10**9, LinkState.UP),
        ),
        (
            "infiniband/efa_0/ports/1", EFA, "efa_0/1", (123, 456),
            Details(drops=7, retransmits=8, rate_bps=100 * 10**9, state=LinkState.UP),
        ),
        (
            "infiniband/bnxt_re0/ports/1", BNXT, "bnxt_re0/1", (4, 4),
            Details(marks=11, retransmits=2, out_of_order=3, state=LinkState.DOWN),
        ),
        (
            "cxi/cxi0/device/telemetry", SLINGSHOT, "cxi0", (900, 800),
            Details(errors=2, drops=1, pauses=7, retransmits=6, out_of_order=5),
        ),
    ],
    ids=["InfiniBand", "EFA", "Broadcom", "Slingshot"],
)  # fmt: skip
def test_the_counters_of_a_kind_of_adapter_are_added_up_by_column(tmp_path, place, files, name, sizes, details):
    lay_out(tmp_path / "class" / place, files)
    (port,) = find_fabric_ports(tmp_path)
    assert (port.name, port.bytes(), port.details()) == (name, sizes, details)


def test_ports_are_in_order_and_those_without_bytes_are_left_out(tmp_path):
    for place in ("infiniband/mlx5_1/ports/1", "infiniband/mlx5_0/ports/2", "infiniband/mlx5_0/ports/1"):
        lay_out(tmp_path / "class" / place, MLX5)
    lay_out(tmp_path / "class" / "infiniband/siw0/ports/1", {"state": "4: ACTIVE\n"})
    lay_out(tmp_path / "class" / "cxi/cxi0/device/telemetry", SLINGSHOT)
    assert [port.name for port in find_fabric_ports(tmp_path)] == ["mlx5_0/1", "mlx5_0/2", "mlx5_1/1", "cxi0"]


@each_case("content", ["", "N/A\n", "-3\n", "0x10\n", "\0\0", "9" * 40])
def test_a_file_that_holds_no_number_counts_as_zero(tmp_path, content):
    folder = tmp_path / "class" / "infiniband/mlx5_0/ports/1"
    lay_out(folder, MLX5)
    lay_out(folder, {"counters/symbol_error": content, "rate": content, "state": content})
    (port,) = find_fabric_ports(tmp_path)
    assert (port.details().errors, port.details().rate_bps) == (14, 0)


def test_files_that_go_away_count_as_zero(tmp_path):
    folder = tmp_path / "class" / "infiniband/mlx5_0/ports/1"
    lay_out(folder, MLX5)
    (port,) = find_fabric_ports(tmp_path)
    for name in MLX5:
        (folder / name).unlink()
    assert (port.bytes(), port.details()) == ((0, 0), Details())


def test_a_host_without_adapters_has_none(tmp_path):
    assert find_fabric_ports(tmp_path) == ()
