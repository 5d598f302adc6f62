"""Dumps of one job: whose each is, which do not belong together, and what they show of the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import each_case
from known_dumps import dump, entry, hung_job, unfinished, write

from hpcpace.core.errors import CannotTell, TraceError
from hpcpace.hang.rules import find_hang
from hpcpace.hang.verdict import describe
from hpcpace.hang.views import Channel, Hang, HangKind
from hpcpace.runs.imports.dump_view import groups_of, job_view
from hpcpace.runs.imports.dumps import read_dumps

DAY_NS = 24 * 3600 * 10**9
PAIRS = {"1": ("tp", (0, 1)), "2": ("tp", (2, 3))}


def verdict(folder: Path) -> Hang:
    hang = find_hang(job_view(read_dumps([folder])))
    assert hang is not None
    return hang


@each_case(
    "name",
    ["nccl_trace_rank_2", "rank2.pickle", "job77_rank-2", "2024-01-05_rank_2.bin", "_dump_2", "trace2.pkl", "x_2.json"],
)
def test_the_rank_is_in_the_name_of_a_file(tmp_path: Path, name: str) -> None:
    assert list(read_dumps([write(tmp_path, {name: dump([entry(0)])})]).by_rank) == [2]


def test_the_groups_of_a_process_say_its_rank_where_only_one_is_in_all_of_them(tmp_path: Path) -> None:
    groups = {"1": ("tp", (2, 3)), "2": ("dp", (1, 3))}
    assert list(read_dumps([write(tmp_path, {"whatever": dump([], groups=groups)})]).by_rank) == [3]


@each_case(
    ("name", "groups", "reason"),
    [
        ("dump", {}, "neither its name nor its groups say"),
        ("rank_3", {"1": ("tp", (0, 1))}, "its name says rank 3, but its groups are those of ranks 0-1"),
        ("rank_9999999", None, "its name says rank 9999999"),
        ("rank_1", {"1": ("tp", (0, 1)), "2": ("dp", (2, 3))}, "no rank is in all of its groups"),
    ],
)
def test_a_dump_of_an_unknown_rank_is_left_out(
    tmp_path: Path, name: str, groups: dict[str, Any] | None, reason: str
) -> None:
    content = dump([], groups=groups) if groups is not None else dump([], pg_config={})
    with pytest.raises(CannotTell, match=reason):
        read_dumps([write(tmp_path, {name: content})])
    dumps = read_dumps([write(tmp_path, {name: content, "rank_0": dump([])})])
    assert list(dumps.by_rank) == [0]
    assert len(dumps.problems) == 1
    assert reason in dumps.problems[0]


def test_what_cannot_be_read_is_named_and_the_others_are_used(tmp_path: Path) -> None:
    folder = write(tmp_path, hung_job())
    (folder / "nccl_trace_rank_1").write_bytes(b"")
    (folder / "nccl_trace_rank_3").write_bytes((folder / "nccl_trace_rank_3").read_bytes()[:200])
    (folder / "slurm.log").write_text("not a dump, and not expected to be one")
    dumps = read_dumps([folder])
    assert sorted(dumps.by_rank) == [0, 2]
    assert dumps.missing == (1, 3)
    assert dumps.problems == (
        "nccl_trace_rank_1 was left out: it is empty: the job ended before PyTorch wrote it",
        "nccl_trace_rank_3 was left out: it is cut off",
    )


def test_a_folder_without_dumps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no file in"):
        read_dumps([tmp_path])
    with pytest.raises(TraceError, match="neither a pickle nor JSON"):
        (tmp_path / "rank_0").write_text("x")
        read_dumps([tmp_path])
    with pytest.raises(TraceError, match="No such file"):
        read_dumps([tmp_path / "nothing"])


@each_case(
    "other",
    [
        {"b_rank_5": dump([entry(0)], world=8)},
        {"b_rank_1": dump([entry(0)], groups={"1": ("tp", (1, 3))})},
        {"b_rank_2": dump([entry(0, time_created_ns=entry(0)["time_created_ns"] + 2 * DAY_NS)])},
    ],
    ids=["other world", "other groups", "other day"],
)
def test_dumps_of_two_jobs_are_not_mixed(tmp_path: Path, other: dict[str, Any]) -> None:
    folder = write(tmp_path, {"a_rank_0": dump([entry(0)], groups={"1": ("tp", (0, 1))})} | other)
    (name,) = other
    with pytest.raises(TraceError, match=f"are of 2 jobs: job 1: a_rank_0; job 2: {name}; name the files of one"):
        read_dumps([folder])


def test_parts_of_a_split_group_have_one_name_in_one_job(tmp_path: Path) -> None:
    contents = {f"rank_{r}": dump([], groups={"s": ("tp", (0, 1) if r < 2 else (2, 3))}) for r in range(4)}
    assert len(groups_of(read_dumps([write(tmp_path, contents)])).views) == 3


def test_two_different_dumps_of_one_rank_are_refused(tmp_path: Path) -> None:
    contents = {"a_rank_1": dump([entry(0)]), "b_rank_1": dump([entry(0), entry(1)])}
    with pytest.raises(TraceError, match="a_rank_1 and b_rank_1 are both of rank 1, and differ"):
        read_dumps([write(tmp_path, contents)])


def test_a_pickle_and_its_json_are_one_dump_and_the_pickle_is_used(tmp_path: Path) -> None:
    plain = dump([{**entry(0), "frames": []}])
    dumps = read_dumps([write(tmp_path, {"rank_1": dump([entry(0)]), "rank_1.json": plain})])
    assert dumps.by_rank[1].path.name == "rank_1"


def test_different_versions_are_said(tmp_path: Path) -> None:
    contents = {"rank_0": dump([]), "rank_1": dump([], version="2.9", comm_lib_version="2.26.2")}
    assert read_dumps([write(tmp_path, contents)]).problems == (
        "ranks ran different software: the format has versions 2.10 and 2.9",
        "ranks ran different software: the library is NCCL 2.26.2 and NCCL 2.27.3",
    )


def test_the_rank_that_never_came_is_named(tmp_path: Path) -> None:
    hang = verdict(write(tmp_path, hung_job()))
    assert (hang.kind, hang.culprits, hang.waiting) == (HangKind.NEVER_CALLED, (2,), (0, 1, 3))
    assert hang.call is not None
    assert hang.call.where == "train.py:44 in step"


def test_a_rank_without_a_dump_is_not_blamed(tmp_path: Path) -> None:
    folder = write(tmp_path, hung_job())
    (folder / "nccl_trace_rank_2").unlink()
    hang = verdict(folder)
    assert (hang.kind, hang.culprits, hang.could_be) == (HangKind.UNKNOWN, (), (2,))


def test_who_called_one_too_many_is_open_where_ranks_left_no_dump(tmp_path: Path) -> None:
    finished = {f"rank_{rank}": dump([entry(0)]) for rank in (0, 3)}
    hang = verdict(write(tmp_path, finished | {"rank_2": dump([entry(0), unfinished(1, "barrier")])}))
    assert (hang.culprits, hang.could_be, hang.sides) == ((), (0, 2, 3), ((2,), (0, 3)))


def test_nothing_hangs_where_all_has_finished(tmp_path: Path) -> None:
    contents = {f"rank_{rank}": dump([entry(0)]) for rank in range(4)}
    assert find_hang(job_view(read_dumps([write(tmp_path, contents)]))) is None


@pytest.mark.parametrize(
    ("called", "usual", "odd", "words"),
    [
        ("all_reduce", (2000, 2000), (2001, 2001), "all_reduce of 8,004 B where"),
        ("all_gather", (900, 3600), (880, 3600), "all_gather of 14.4 kB in parts of 3,520 B where"),
        ("_reduce_scatter_base", (3600, 900), (3600, 880), "reduce_scatter of 14.4 kB in parts of 3,520 B where"),
    ],
)
def test_another_size_in_one_place_is_a_mismatch(
    tmp_path: Path, called: str, usual: tuple[int, int], odd: tuple[int, int], words: str
) -> None:
    sizes = {rank: odd if rank == 3 else usual for rank in range(4)}
    contents = {
        f"rank_{rank}": dump([unfinished(0, called, input_sizes=[[into]], output_sizes=[[out]])])
        for rank, (into, out) in sizes.items()
    }
    job = job_view(read_dumps([write(tmp_path, contents)]))
    hang = find_hang(job)
    assert hang is not None
    assert (hang.kind, hang.culprits) == (HangKind.MISMATCH, (3,))
    assert words in describe(hang, job).headline


@pytest.mark.parametrize(
    ("called", "usual", "odd", "culprits"),
    [
        ("all_reduce", "Half", "BFloat16", (3,)),
        ("_allgather_base", "Float", "Int", (3,)),
        ("alltoall_base", "Float8_e4m3fn", "Float8_e5m2", (3,)),
        ("all_reduce", "Half", "SomethingNew", ()),
        ("all_reduce_barrier", "Float", "Byte", ()),
    ],
)
def test_another_type_of_equal_width_in_one_place_is_a_mismatch(
    tmp_path: Path, called: str, usual: str, odd: str, culprits: tuple[int, ...]
) -> None:
    contents = {}
    for rank in range(4):
        dtypes = [odd if rank == 3 else usual]
        contents[f"rank_{rank}"] = dump([unfinished(0, called, input_dtypes=dtypes, output_dtypes=dtypes)])
    job = job_view(read_dumps([write(tmp_path, contents)]))
    hang = find_hang(job)
    assert hang is not None
    assert hang.culprits == culprits
    if culprits:
        types = {rank: call.dtype for rank, view in job.ranks.items() for call in view.calls}
        assert len(set(types.values())) == 2
        headline = describe(hang, job).headline
        assert f" in {types[3]} where" in headline
        assert f" in {types[0]};" in headline


def test_a_message_that_nobody_sends_is_followed_to_its_sender(tmp_path: Path) -> None:
    group = {"1": ("pp", (1, 3))}
    message = {"is_p2p": True, "process_group": ("1", "pp"), "pg_id": 1, "p2p_seq_id": 1}
    contents = {
        "rank_1": dump([entry(0)], groups=group),
        "rank_3": dump([entry(0), unfinished(1, "recv 1<-0", **message)], groups=group),
        **{f"rank_{rank}": dump([entry(0)]) for rank in (0, 2)},
    }
    hang = verdict(write(tmp_path, contents))
    assert (hang.kind, hang.culprits, hang.waiting) == (HangKind.NEVER_CALLED, (1,), (3,))
    assert hang.call is not None
    assert hang.call.channel == Channel(1, 1, 3)


def test_what_was_overwritten_while_it_was_open_has_not_finished(tmp_path: Path) -> None:
    """Rank 2 never calls the last all_reduce; rank 0 has called so much since that it no longer remembers its own."""
    groups = {"1": ("tp", (0, 1))}
    ahead = {"process_group": ("1", "tp"), "pg_id": 1, "collective_seq_id": 3}
    status = {
        "0": {"last_enqueued_collective": 7, "last_completed_collective": 6},
        "1": {"last_enqueued_collective": 3, "last_completed_collective": 3},
    }
    contents = {
        "rank_0": dump([entry(7, **ahead)], world=3, groups=groups, pg_status=status),
        "rank_1": dump([entry(5), unfinished(6), entry(7, **ahead)], world=3, groups=groups, pg_status=status),
        "rank_2": dump([entry(5)], world=3, pg_status={}),
    }
    hang = verdict(write(tmp_path, contents))
    assert (hang.kind, hang.culprits) == (HangKind.NEVER_CALLED, (2,))


@pytest.mark.parametrize("is_common", [True, False])
def test_messages_of_overwritten_records_are_counted_from_a_collective_of_both_ranks(
    tmp_path: Path, is_common: bool
) -> None:
    """Rank 1 does not receive what rank 0 has sent; it is not said that rank 0 has not sent it."""
    message = {"is_p2p": True, "p2p_seq_id": 7}
    contents = {
        "rank_0": dump([entry(7), entry(8, "send 0->1", **message), unfinished(9, "recv 0<-1", **message)], world=2),
        "rank_1": dump([entry(7 if is_common else 6), unfinished(8, "recv 1<-0", **message)], world=2),
    }
    hang = verdict(write(tmp_path, contents))
    expected = (HangKind.PEERS_LEFT, (1,)) if is_common else (HangKind.UNKNOWN, ())
    assert (hang.kind, hang.could_be) == expected


def test_unfinished_operations_alone_say_with_the_status_who_has_not_come(tmp_path: Path) -> None:
    """With TORCH_INCLUDE_ONLY_ACTIVE, a rank that is in no operation has no entry at all."""
    status = {"last_started_collective": -1, "last_completed_collective": 99}
    groups = {"1": ("tp", (0, 1))}
    behind = {"0": {**status, "last_enqueued_collective": 99}, "4": {**status, "last_enqueued_collective": 7}}
    inside = {"pg_id": 0, "collective_seq_id": 100, "record_id": 5000}
    contents = {
        "rank_0": dump([], groups=groups, pg_status=behind),
        "rank_1": dump([unfinished(0, **inside)], groups=groups, pg_status=behind),
        "rank_2": dump([unfinished(0, **inside)], pg_status={"0": behind["0"]}),
        "rank_3": dump([unfinished(0, **inside)], pg_status={"0": behind["0"]}),
    }
    folder = write(tmp_path, contents)
    hang = verdict(folder)
    assert (hang.kind, hang.culprits) == (HangKind.NEVER_CALLED, (0,))
    # Without a status it is not known what rank 0 has called.
    write(folder, {"rank_0": dump([], groups=groups, pg_status={})})
    assert verdict(folder).kind is HangKind.UNKNOWN


def test_who_is_in_a_group_of_gloo_follows_from_who_used_it(tmp_path: Path) -> None:
    """gloo's dumps have one group, without a name."""
    nameless = {"": {"name": "", "desc": "", "ranks": "[]"}}

    def gloo(number: int, *, is_over: bool = True) -> dict[str, Any]:
        return unfinished(number, profiling_name="gloo:all_reduce", retired=is_over)

    contents = {
        "rank_0": dump([gloo(0), gloo(1, is_over=False)], pg_config=nameless),
        "rank_1": dump([gloo(0)], pg_config=nameless),
        "rank_2": dump([gloo(0), gloo(1, is_over=False)], pg_config=nameless),
    }
    folder = write(tmp_path, contents)
    assert [view.name for view in groups_of(read_dumps([folder])).views] == ["default_pg"]
    assert verdict(folder).culprits == (1,)


def at(line: int, name: str, folder: str = "/home/a/job/") -> dict[str, Any]:
    torch = {"name": "barrier", "filename": "/lib/torch/distributed/distributed_c10d.py", "line": 1}
    own = {"name": name, "filename": f"{folder}run.py", "line": line}
    return {"frames": [torch, own, {"name": "main", "filename": f"{folder}run.py", "line": 9}]}


def test_a_barrier_that_one_rank_alone_calls_is_found_by_its_line_on_hosts_with_other_folders(tmp_path: Path) -> None:
    steps = [entry(number, **at(44, "step")) for number in range(5)]
    saver = [*steps, entry(5, "barrier", **at(70, "save")), unfinished(6, "barrier", **at(90, "leave"))]
    others = [entry(number, **at(44, "step", "/tmp/b/job/")) for number in range(5)]
    others += [entry(5, "barrier", **at(90, "leave", "/tmp/b/job/"))]
    folder = write(tmp_path, {f"rank_{rank}": dump(others if rank else saver) for rank in range(4)})
    hang = verdict(folder)
    assert (hang.kind, hang.culprits, [call.seq for call in hang.extra]) == (HangKind.TOO_MANY, (0,), [6])
    assert hang.extra[0].where == "/home/a/job/run.py:70 in save"


def test_most_members_still_inside_what_one_has_left_are_a_set_and_the_network_too(tmp_path: Path) -> None:
    """Three of four ranks are in one all_reduce; the fourth has finished it and is in the next one."""
    done = [entry(number) for number in range(5)]
    behind, ahead = [*done, unfinished(5)], [*done, entry(5), unfinished(6)]
    folder = write(tmp_path, {f"rank_{rank}": dump(ahead if rank == 3 else behind) for rank in range(4)})
    hang = verdict(folder)
    assert (hang.kind, hang.culprits, hang.could_be) == (HangKind.PEERS_LEFT, (), (0, 1, 2))
    said = describe(hang, job_view(read_dumps([folder])))
    assert said.headline.startswith(
        "hang: ranks 0-2 are still in all_reduce 6 of group default_pg, which rank 3 has finished: one or more of them,"
        " or the network between them, holds it up; since "
    )


def test_most_members_that_have_not_called_an_operation_are_said_to_be_behind_with_the_doubt(tmp_path: Path) -> None:
    done = [entry(number) for number in range(5)]
    ahead = [*done, unfinished(5)]
    folder = write(tmp_path, {f"rank_{rank}": dump(ahead if rank == 3 else done, world=32) for rank in range(32)})
    hang = verdict(folder)
    assert (hang.culprits, hang.sides) == ((), ((3,), tuple(rank for rank in range(32) if rank != 3)))
    said = describe(hang, job_view(read_dumps([folder])))
    assert "ranks 0-2, 4-31 called one too few, or rank 3 one too many" in said.headline


WORLD, LEFT, RIGHT = ("0", "default_pg"), ("1", "tp"), ("2", "tp")


def numbered_together(rank: int, *, num_steps: int = 4, begin: int = 0) -> dict[str, Any]:
    """Return a dump that counts all operations together: ranks 0-1 call two in their pair in each step, the others one.

    Rank 3 does not come to the last operation of all, in which the others are; operations before `begin` are lost.
    """
    pair = LEFT if rank < 2 else RIGHT
    called = ([*([pair] * (2 if rank < 2 else 1)), WORLD] * num_steps)[: -1 if rank == 3 else None]
    is_open = [rank != 3 and number == len(called) - 1 for number in range(len(called))]
    entries = [
        (unfinished if is_open[number] else entry)(number, process_group=group, pg_id=int(group[0]))
        for number, group in enumerate(called)
    ]
    return dump(entries[begin:], groups={pair[0]: (pair[1], (0, 1) if rank < 2 else (2, 3))})


@each_case(
    ("begins", "kind", "culprits"),
    [
        ({}, HangKind.NEVER_CALLED, (3,)),
        # Numbers of one operation differ between the pairs, and where they are the same is lost.
        (dict.fromkeys(range(4), 5), HangKind.UNKNOWN, ()),
    ],
)
def test_numbers_that_run_over_all_groups_name_nobody_innocent(
    tmp_path: Path, begins: dict[int, int], kind: HangKind, culprits: tuple[int, ...]
) -> None:
    contents = {f"rank_{rank}": numbered_together(rank, num_steps=8, begin=begins.get(rank, 0)) for rank in range(4)}
    dumps = read_dumps([write(tmp_path, contents)])
    hang = find_hang(job_view(dumps))
    assert hang is not None
    assert (hang.kind, hang.culprits) == (kind, culprits)
    assert "count the operations of all groups together" in dumps.problems[-1]


def test_numbers_over_all_groups_that_agree_are_counted_from_the_last_finished_one(tmp_path: Path) -> None:
    """All ranks call one operation in their pair and one of all in turn, and rank 3 leaves out one of its pair."""
    contents = {}
    for rank in range(4):
        pair = LEFT if rank < 2 else RIGHT
        called = [pair, WORLD] * 6 + ([WORLD] if rank == 3 else [pair] if rank == 2 else [pair, WORLD])
        is_over = {number: number < 12 or (rank < 2 and number == 12) for number in range(len(called))}
        entries = [
            (entry if is_over[number] else unfinished)(number, process_group=group, pg_id=int(group[0]))
            for number, group in enumerate(called)
        ]
        contents[f"rank_{rank}"] = dump(entries[3:], groups={pair[0]: (pair[1], (0, 1) if rank < 2 else (2, 3))})
    hang = verdict(write(tmp_path, contents))
    # Rank 2 waits in the pair for rank 3, which waits with ranks 0-1 in that of all for rank 2.
    assert (hang.kind, hang.could_be or hang.culprits) == (HangKind.DISORDER, (2, 3))


def test_a_number_for_each_group_is_left_as_it_is(tmp_path: Path) -> None:
    dumps = read_dumps([write(tmp_path, hung_job())])
    assert not dumps.problems
    assert [one.seq for one in dumps.by_rank[2].entries] == [1, 2, 3, 4, 5]
