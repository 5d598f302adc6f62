"""The snapshots that a session saves: whose facts they hold, and that nothing that goes wrong reaches the job."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpcpace.audit.snapshot_files import load_snapshots
from hpcpace.core.config import Config
from hpcpace.core.environment import RankInfo, host_identity
from hpcpace.observe import joined
from hpcpace.observe.joined import JoinedRank, SessionSettings, save_host_snapshots
from hpcpace.world.deadline import Deadline
from hpcpace.world.messages import NoMessages

ALONE = RankInfo(rank=0, world_size=1, local_rank=0, local_size=1, node=0, num_nodes=1, launcher="single", host="n1")


def _joined(info: RankInfo = ALONE, keys: Sequence[str] = ("a",), messages: Any = None) -> JoinedRank:
    return JoinedRank(
        settings=SessionSettings(), config=Config(), messages=messages or NoMessages(), identity=host_identity(),
        host_keys=list(keys), world=info, deadline=Deadline(30),
    )  # fmt: skip


class Together(NoMessages):
    """Ranks that are threads of this process."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks)
        self._values: dict[int, Any] = {}

    def allgather(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        self._values[value["rank"]] = value
        self._barrier.wait(timeout=30)
        return [self._values[rank] for rank in sorted(self._values)]


def saved_by(folder: Path, hosts: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Have ranks on some hosts save snapshots, and return their warnings."""
    warnings: list[str] = []
    together = Together(len(hosts))

    def of_rank(rank: int) -> None:
        local_rank = keys[:rank].count(keys[rank])
        info = dataclasses.replace(ALONE, rank=rank, world_size=len(hosts), local_rank=local_rank, host=hosts[rank])
        joined = _joined(info, keys, together)
        save_host_snapshots(joined, {"OMP_NUM_THREADS": f"{rank}"}, folder, warn=warnings.append)

    with ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(of_rank, range(len(hosts))))
    return warnings


def test_each_host_has_one_file_with_its_own_ranks(tmp_path: Path) -> None:
    assert saved_by(tmp_path / "snapshot", ["n1", "n2", "n1", "n2"], ["a", "b", "a", "b"]) == []
    snapshots, problems = load_snapshots(tmp_path / "snapshot")
    assert problems == []
    assert {one.host: [rank.rank for rank in one.ranks] for one in snapshots} == {"n1": [0, 2], "n2": [1, 3]}
    assert [rank.variables["OMP_NUM_THREADS"] for one in snapshots for rank in one.ranks] == ["0", "2", "1", "3"]


def test_hosts_of_one_name_keep_apart(tmp_path: Path) -> None:
    assert saved_by(tmp_path, ["box", "box", "box"], ["a", "b", "c"]) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["box#2.json", "box#3.json", "box.json"]
    assert {one.host: [rank.rank for rank in one.ranks] for one in load_snapshots(tmp_path)[0]} == {
        "box": [0],
        "box#2": [1],
        "box#3": [2],
    }


def test_the_mask_is_that_of_the_rank_itself(tmp_path: Path) -> None:
    save_host_snapshots(_joined(), {}, tmp_path, warn=pytest.fail)
    (snapshot,) = load_snapshots(tmp_path)[0]
    status = Path("/proc/self/status").read_text()
    assert snapshot.ranks[0].cpus == status.partition("Cpus_allowed_list:")[2].split()[0]


def test_a_rank_that_reads_nothing_leaves_the_others_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_rank = joined.take_rank

    def broken(info: RankInfo, *arguments: Any, **options: Any) -> Any:
        if info.rank == 1:
            raise RuntimeError("no such luck")
        return take_rank(info, *arguments, **options)

    monkeypatch.setattr(joined, "take_rank", broken)
    assert saved_by(tmp_path, ["n1", "n1", "n1"], ["a", "a", "a"]) == ["no snapshot for the audit: no such luck"]
    (snapshot,) = load_snapshots(tmp_path)[0]
    assert [rank.rank for rank in snapshot.ranks] == [0, 2]
    assert snapshot.unreadable["rank/1"] == "it could not read what it has"


def test_files_that_hang_cost_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(joined, "_SNAPSHOT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(joined, "take_host", lambda *_, **__: released.wait(30))
    warnings: list[str] = []
    begin_s = time.monotonic()
    save_host_snapshots(_joined(), {}, tmp_path, warn=warnings.append)
    took_s = time.monotonic() - begin_s
    released.set()
    assert warnings == ["no snapshot for the audit: reading /sys and /proc took longer than 0.05 s"]
    assert took_s < 20 and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "snapshot").write_text("in the way")
    warnings: list[str] = []
    save_host_snapshots(_joined(), {}, tmp_path / "snapshot", warn=warnings.append)
    assert len(warnings) == 1 and "the audit's snapshot of n1 is not saved: cannot save snapshots in" in warnings[0]


class _Torch:
    """Stands in for torch with a GPU in use, the second of the node."""

    class cuda:
        is_available = is_initialized = staticmethod(lambda: True)
        current_device = staticmethod(lambda: 1)

        class nccl:
            version = staticmethod(lambda: (2, 27, 5))

        @staticmethod
        def get_device_properties(index: int) -> Any:
            class Properties:
                pci_domain_id, pci_bus_id, pci_device_id, uuid = 0, 0x1B, index - 1, "11-22"

            return Properties()

    class distributed:
        is_nccl_available = staticmethod(lambda: True)


def test_the_gpu_is_the_one_that_torch_computes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", _Torch)
    save_host_snapshots(_joined(), {}, tmp_path, warn=pytest.fail)
    (rank,) = load_snapshots(tmp_path)[0][0].ranks
    assert rank.gpus is not None
    assert (rank.gpus[rank.gpu].address, rank.gpus[rank.gpu].uuid) == ("0000:1b:00.0", "GPU-11-22")
    assert (rank.gpu_source, rank.nccl_version) == ("session", "2.27.5")
