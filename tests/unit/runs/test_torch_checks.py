"""Logs of torch's own checks, which name ranks that print nothing themselves, and of Ray, which leaves lines out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from known_logs import signal, timed_out, waiting

from hpcpace.hang.views import HangKind
from hpcpace.runs.imports.witnesses import Evidence, evidence_of, read_witnesses

NEVER, MISMATCH, UNKNOWN = HangKind.NEVER_CALLED, HangKind.MISMATCH, HangKind.UNKNOWN
REST = "TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda)"


def judge(tmp_path: Path, lines: Sequence[str]) -> Evidence:
    (tmp_path / "a.out").write_text("\n".join(lines) + "\n")
    return evidence_of(read_witnesses([tmp_path / "a.out"]))


def barrier(ranks: str, *, label: str = "") -> str:
    return f"{label}RuntimeError: [Rank 0]: {ranks} failed to pass monitoredBarrier in 1800000 ms"


def start(rank: int, come: int, size: int, *, key: str = "1") -> str:
    """Return what torch 1.8 to 2.1 print every ten seconds."""
    return (
        f"INFO:torch.distributed.distributed_c10d:Waiting in store based barrier to initialize process group for rank:"
        f" {rank}, key: store_based_barrier_key:{key} (world_size={size}, worker_count={come}, timeout=0:30:00)"
    )


def late_start(rank: int, come: int, size: int) -> str:
    """Return what newer ones end with."""
    return (
        f"torch.distributed.DistStoreError: Timed out initializing process group in store based barrier on rank {rank},"
        f" for key: store_based_barrier_key:default_pg (world_size={size}, num_workers_joined={come},"
        " timeout=0:30:00 error=wait timeout after 10000ms)"
    )


def called(rank: int, op: str, shape: str) -> str:
    return (
        f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=21, OpType={op},"
        f" TensorShape=[{shape}], {REST})"
    )


def compared(one: str, other: str, *, label: str = "") -> str:
    return f"{label}RuntimeError: Detected mismatch between collectives on ranks. {one}, but {other}.Collectives differ"


REDUCED, OTHER = (called(rank, "ALLREDUCE", "25, 4") for rank in (1, 2)), called(3, "BROADCAST", "1")
CASES: dict[str, tuple[list[str], HangKind, tuple[int, ...], tuple[int, ...]]] = {
    "a monitored barrier": ([barrier("Ranks 4, 5, 6, 7")], NEVER, (4, 5, 6, 7), ()),
    "a monitored barrier, the first": ([barrier("Rank 2", label="[rank0]: ")], NEVER, (2,), ()),
    "a monitored barrier of others": ([barrier("Rank 1", label="[rank4]: "), *waiting([0, 1, 3])], UNKNOWN, (), (2,)),
    "the start": ([start(rank, 7, 8) for rank in (0, 1, 2, 3, 5, 6, 7)], NEVER, (4,), ()),
    "the start, newer": ([late_start(rank, 3, 4) for rank in (0, 1, 3)], NEVER, (2,), ()),
    "the start, silent ranks": ([start(rank, 6, 8) for rank in (0, 1, 2)], UNKNOWN, (), (3, 4, 5, 6, 7)),
    "a later group": (
        [*(start(r, 1 + r, 4) for r in range(3)), *(start(rank, 3, 4, key="7") for rank in (0, 2, 3))],
        NEVER,
        (1,),
        (),
    ),
    "behind the start": ([*(start(r, 2, 4) for r in (0, 1)), *waiting([0, 1, 3]), signal(2, 21, 21)], NEVER, (2,), ()),
    "calls compared": ([compared(one, OTHER) for one in REDUCED], MISMATCH, (), (1, 2, 3)),
    "calls of most ranks compared": (
        [compared(called(rank, "ALLREDUCE", "25, 4"), OTHER) for rank in range(3)],
        MISMATCH,
        (3,),
        (),
    ),
    "sizes compared": (
        [compared(called(1, "ALLREDUCE", "195, 10"), called(0, "ALLREDUCE", "51, 10"), label="[rank1]: ")],
        MISMATCH,
        (),
        (0, 1),
    ),
    "calls compared, torch 1.11": (
        [f"Rank {rank} is running inconsistent collective: CollectiveFingerPrint(OpType={op}, TensorShape=[4], {REST})"
         for rank, op in ((0, "ALLGATHER"), (1, "ALLGATHER"), (2, "ALLREDUCE"))],
        MISMATCH,
        (2,),
        (),
    ),
    "calls compared, torch 2.0": (
        [compared(called(rank, "ALLREDUCE", "4"), "Rank 0 is running collective: CollectiveFingerPrint("
                  "SequenceNumber=513876813OpType=BROADCAST)") for rank in (1, 2)],
        MISMATCH,
        (0,),
        (),
    ),
    "messages that Ray has left out": (
        [*waiting([0]), f"(RayTrainWorker pid=9, ip=10.0.0.2) {timed_out(3, 22)} [repeated 2x across cluster]"],
        UNKNOWN,
        (),
        (),
    ),
    "actors of Ray with ranks of their own": (
        [f"(ActorModel pid=7) {line}" for line in waiting([0, 1])]
        + [f"(ReferenceModel pid=8) {line}" for line in waiting([2, 3], 7)],
        UNKNOWN,
        (),
        (),
    ),
    "sizes that nobody knows": (
        [line.replace("NumelIn=1024, NumelOut=1024", f"NumelIn={2**64 - 1}, NumelOut={2**64 - 1}")
         for line in (*waiting([0, 1, 3]), signal(2, 21, 21))],
        NEVER,
        (2,),
        (),
    ),
}  # fmt: skip


def test_who_is_named_by_checks_of_torch(tmp_path: Path) -> None:
    wrong = []
    for number, (name, (lines, kind, culprits, could_be)) in enumerate(CASES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = judge(folder, lines)
        assert found.hang is not None, name
        said = (found.hang.kind, found.hang.culprits, found.hang.could_be)
        if said != (kind, culprits, could_be):
            wrong.append((name, said, found.hang.reason))
    assert wrong == []


def test_a_start_to_which_too_few_or_too_many_came(tmp_path: Path) -> None:
    few = judge(tmp_path, ["DistStoreError: Timed out after 1801 seconds waiting for clients. 3/4 clients joined."])
    assert few.hang is None and few.doubt.startswith("3 of 4 processes came to init_process_group")
    many = judge(tmp_path, [start(rank, 16, 8) for rank in range(8)])
    assert any("another job or an earlier attempt uses the same store" in note for note in many.notes)


def test_words_say_what_was_left_out(tmp_path: Path) -> None:
    left_out = judge(tmp_path, CASES["messages that Ray has left out"][0]).hang
    assert left_out is not None and "Ray left out 2 messages of other ranks (RAY_DEDUP_LOGS=0)" in left_out.reason
    mixed = judge(tmp_path, CASES["actors of Ray with ranks of their own"][0]).hang
    assert mixed is not None and "Ray's actors ActorModel and ReferenceModel, each with ranks from 0" in mixed.reason
