"""NCCL's log, and counters that grow while the audit watches."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from hpcpace.audit.nccl_log import read_nccl_log
from hpcpace.audit.snapshot import _grown, take_tree
from hpcpace.core.errors import UsageError
from tests.machines.machine import Machine, threaded

LOG = """\
n1:100:120 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
n1:100:120 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
n1:101:121 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA
n2:101:121 [0] NCCL INFO Channel 00 : 2[1b000] -> 3[2c000] via SHM/direct/direct
n2:101:121 [0] NCCL INFO Connected all rings
"""


def test_connections_of_a_log_are_read_once_each(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    assert read_nccl_log(tmp_path / "log").edges == {
        (0, 1, "P2P/CUMEM"),
        (1, 2, "NET/IB/0/GDRDMA"),
        (2, 3, "SHM/direct/direct"),
    }


@each_case("content", [b"", b"no NCCL here\n", b"\xff" * 10_000])
def test_a_log_without_connections_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(UsageError, match="NCCL_DEBUG=INFO"):
        read_nccl_log(tmp_path / "log")


def test_growth_is_what_came_within_the_window() -> None:
    counters = _grown({"a": 3, "b": 7}, {"a": 5, "b": 7, "c": 1}, 2.0)
    assert (counters.growth, counters.values, counters.window_s) == ({"a": 2, "c": 1}, {"a": 5, "b": 7, "c": 1}, 2.0)


def test_counters_that_are_not_0_are_kept(tree_path: Path) -> None:
    machine = Machine("n1").processors({0: threaded(0, 1)})
    machine.pci("pci0000:10/0000:10:01.0/0000:11:00.0", "0x020700", "0x15b3", "0x1021", corrected=7)
    machine.rdma("mlx5_0", "0000:11:00.0", counters={"symbol_error": 5, "out_of_sequence": 9})
    values = take_tree(machine.write(tree_path)).counters.values
    assert values == {
        "rdma/mlx5_0/1/symbol_error": 5,
        "rdma/mlx5_0/1/out_of_sequence": 9,
        "pci/0000:11:00.0/corrected": 7,
    }
