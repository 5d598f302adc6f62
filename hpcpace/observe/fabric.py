"""Counters of adapters whose traffic passes no network device: InfiniBand, RoCE, EFA and Slingshot, from sysfs.

Every driver has names of its own for the same thing, so each column of the trace's `network` is the sum of the files
that exist. Sources: the kernel's Documentation/ABI/stable/sysfs-class-infiniband, NVIDIA's "Understanding mlx5 ethtool
and RDMA counters", drivers/infiniband/hw/efa/efa_verbs.c, and cxi_stat's counters of Cassini.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcpace.observe.cores import read_counter
from hpcpace.observe.interface_counters import Details
from hpcpace.trace.schema import LinkState

_WORD_BYTES = 4
_MOST = 1 << 62
# Slingshot writes `VALUE@TIME`.
_NUMBER = re.compile(rb"\s*(\d{1,20})\b")
_RATE = re.compile(rb"\s*(\d{1,6}(?:\.\d{1,3})?) Gb/sec")
_BITS_PER_GIGABIT = 10**9

_RDMA_BYTES = (
    (("counters/port_xmit_data", "counters/port_rcv_data"), _WORD_BYTES),
    (("hw_counters/tx_bytes", "hw_counters/rx_bytes"), 1),
)
_RDMA_EVENTS: Mapping[str, Sequence[str]] = {
    "errors": [
        f"counters/{name}"
        for name in ("symbol_error", "port_rcv_errors", "link_error_recovery", "local_link_integrity_errors")
    ],
    "drops": ["counters/port_xmit_discards", "hw_counters/rx_drops"],
    "pauses": ["counters/port_xmit_wait"],
    "marks": [
        f"hw_counters/{name}"
        for name in ("np_cnp_sent", "rp_cnp_handled", "tx_cnp_pkts", "rx_cnp_pkts", "cnpSent", "cnpHandled")
    ],
    "retransmits": [
        f"hw_counters/{name}"
        for name in (
            "packet_seq_err", "roce_adp_retrans", "rnr_nak_retry_err", "local_ack_timeout_err", "to_retransmits",
            "retrans_pkts",
        )
    ],
    "out_of_order": ["hw_counters/out_of_sequence", "hw_counters/oos_drop_count"],
    "link_downs": ["counters/link_downed"],
}  # fmt: skip
_CXI_BYTES = ((("hni_sts_tx_ok_octets", "hni_sts_rx_ok_octets"), 1),)
_CXI_EVENTS: Mapping[str, Sequence[str]] = {
    "errors": ["hni_pcs_uncorrected_cw"],
    "drops": ["hni_llr_tx_discard", "ixe_rx_pkt_drop_pct"],
    "pauses": [f"hni_tx_paused_{number}" for number in range(8)],
    "retransmits": ["hni_llr_tx_replay_event"],
    "out_of_order": ["pct_bad_seq_nacks"],
}


@dataclass(frozen=True)
class FabricPort:
    """A port of an adapter; files that it does not have count as zero.

    Attributes:
        name: `DEVICE/PORT`, or `DEVICE` of Slingshot.
        folder: where its counters are.
        bytes_files: files with bytes sent and received, and by how much to multiply them.
        event_files: by column, the files that are added up.
    """

    name: str
    folder: Path
    bytes_files: tuple[Sequence[str], int]
    event_files: Mapping[str, Sequence[str]]

    def bytes(self) -> tuple[int, int]:
        """Return bytes sent and received."""
        names, factor = self.bytes_files
        sent, received = (self._sum([name]) * factor for name in names)
        return sent, received

    def details(self) -> Details:
        """Return all else that is counted."""
        events = {column: self._sum(names) for column, names in self.event_files.items()}
        rate = _RATE.match(read_counter(self.folder / "rate"))
        return Details(
            **events,
            rate_bps=round(float(rate[1]) * _BITS_PER_GIGABIT) if rate else 0,
            state=_state(read_counter(self.folder / "state")),
        )

    def _sum(self, names: Sequence[str]) -> int:
        found = (_NUMBER.match(read_counter(self.folder / name)) for name in names)
        return min(sum(int(number[1]) for number in found if number), _MOST)


def find_fabric_ports(sys: Path = Path("/sys")) -> tuple[FabricPort, ...]:
    """Return the ports of the adapters of this host that have counters, ascending by name."""
    rdma = sorted(port for port in (sys / "class" / "infiniband").glob("*/ports/*") if port.is_dir())
    found = [_port(f"{port.parent.parent.name}/{port.name}", port, _RDMA_BYTES, _RDMA_EVENTS) for port in rdma]
    cxi = sorted((sys / "class" / "cxi").glob("*/device/telemetry"))
    found += [_port(folder.parent.parent.name, folder, _CXI_BYTES, _CXI_EVENTS) for folder in cxi]
    return tuple(port for port in found if port is not None)


def _port(
    name: str,
    folder: Path,
    bytes_files: Sequence[tuple[Sequence[str], int]],
    event_files: Mapping[str, Sequence[str]],
) -> FabricPort | None:
    """Return a port with the files that it has; None if it does not count bytes."""
    for names, factor in bytes_files:
        if all(os.access(folder / file, os.R_OK) for file in names):
            events = {
                column: [file for file in files if os.access(folder / file, os.R_OK)]
                for column, files in event_files.items()
            }
            return FabricPort(name, folder, (names, factor), events)
    return None


def _state(text: bytes) -> LinkState:
    """Return the state that a port's file `state` names, like `4: ACTIVE`."""
    if not text.strip():
        return LinkState.UNKNOWN
    return LinkState.UP if b"ACTIVE" in text else LinkState.DOWN
