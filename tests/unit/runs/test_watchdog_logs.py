"""Logs of torch's watchdog and of gloo: who is behind, and what they cannot show."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cases import each_case
from known_dumps import hung_job, write
from known_logs import (
    AT,
    DEFAULT,
    DESYNC,
    LATER,
    NEVER_JOINED,
    gloo,
    old,
    signal,
    status,
    timed_out,
    waiting,
)

from hpcpace.core.errors import TraceError
from hpcpace.hang.verdict import describe
from hpcpace.hang.views import HangKind
from hpcpace.runs.imports.witnesses import Evidence, evidence_of, read_witnesses

NEVER, MISMATCH, UNKNOWN = HangKind.NEVER_CALLED, HangKind.MISMATCH, HangKind.UNKNOWN
Files = dict[str, Sequence[str]]


def judge(tmp_path: Path, files: Files) -> Evidence:
    for name, lines in files.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return evidence_of(read_witnesses([tmp_path / name for name in files]))


GROUP = "[PG ID 11 PG GUID 119 Rank {}]"
KILLED = "srun: error: n3: tasks 2,3-4: Out Of Memory"
STUCK = f"[rank{{0}}]:[{AT} ProcessGroupNCCL.cpp:1743] [Rank {{0}}] ProcessGroupNCCL's watchdog got stuck for 480 s"


def raised(rank: int, what: str = "ValueError: no batch", *, label: str = "[rank{}]: ") -> list[str]:
    front = label.format(rank)
    return [f"{front}Traceback (most recent call last):", f'{front}  File "train.py", line 4, in x', f"{front}{what}"]


CASES: dict[str, tuple[Files, HangKind, tuple[int, ...], tuple[int, ...]]] = {
    # its own line says how far it came
    "behind by its own line": ({"a.out": [*waiting([0, 1, 3]), signal(2, 21, 21)]}, NEVER, (2,), ()),
    "silent rank": ({"a.out": waiting([0, 1, 3])}, UNKNOWN, (), (2,)),
    "nobody behind": ({"a.out": waiting(range(4))}, UNKNOWN, (), ()),
    "another operation": (
        {"a.out": [*waiting([0, 1, 2]), timed_out(3, 22, "BROADCAST"), status(3, 22, 21)]},
        MISMATCH,
        (3,),
        (),
    ),
    "another size": (
        {"a.out": [*waiting([0, 1, 2]), timed_out(3, 22, size=7), status(3, 22, 21)]},
        MISMATCH,
        (3,),
        (),
    ),
    "unlabelled, torch 1.9 to 2.1": ({"a.out": [old(rank, 22) for rank in (0, 1, 3)]}, UNKNOWN, (), (2,)),
    "without numbers, torch 1.8": ({"a.out": [old(rank, None) for rank in (0, 1, 3)]}, UNKNOWN, (), (2,)),
    "numbers of groups without names": ({"a.out": [old(0, 96120), old(0, 96117), old(1, 64088)]}, UNKNOWN, (), ()),
    "Slurm's labels": ({"a.out": [old(rank, 22, label=f"{rank}: ") for rank in (0, 1, 3)]}, UNKNOWN, (), (2,)),
    "mpirun's labels": (
        {"a.out": [line for rank in (0, 1, 3) for line in gloo(rank, label="10:00:00 [1,{}]<stderr>:")]},
        UNKNOWN,
        (),
        (2,),
    ),
    "Slurm's labels behind times": (
        {"a.out": [line for rank in (0, 1, 3) for line in gloo(rank, label="2026-11-29T10:00:00+01:00 {}: ")]},
        UNKNOWN,
        (),
        (2,),
    ),
    "torchrun's labels": (
        {"a.out": [old(rank, 22, label=f"[default{rank}]:") for rank in (0, 1, 3)]},
        UNKNOWN,
        (),
        (2,),
    ),
    "a file a rank": (
        {f"rank_{rank}.log": gloo(rank, label="") for rank in (0, 1, 3)} | {"rank_2.log": ["loss 3"]},
        UNKNOWN,
        (),
        (2,),
    ),
    "a report of torch": (
        {"a.out": [timed_out(0, 241), *DESYNC.split("\n"), status(0, 315, 183)]},
        NEVER,
        (7,),
        (),
    ),
    "a report on who never joined": (
        {"a.out": [timed_out(0, 5), *NEVER_JOINED.split("\n"), timed_out(1, 5), timed_out(2, 5)]},
        NEVER,
        (3,),
        (),
    ),
    "the last of two attempts": (
        {
            "a.out": [
                *waiting([0, 2, 3]),
                signal(1, 21, 21),
                *waiting([0, 1, 2], 500, at=LATER),
                signal(3, 499, 499, at=LATER),
            ]
        },
        NEVER,
        (3,),
        (),
    ),
    "gloo": ({"a.out": [line for rank in (0, 1, 3) for line in gloo(rank)]}, UNKNOWN, (), (2,)),
    "gloo, in the system's language": (
        {
            "a.out": [
                f"{rank}: RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error"
                " [10.0.0.1]:1234: Die Verbindung wurde vom Kommunikationspartner zur\u00fcckgesetzt"
                for rank in (0, 1, 3)
            ]
        },
        UNKNOWN,
        (),
        (2,),
    ),
    "ended by an exception": (
        {"a.out": [*raised(2), *waiting([0, 1, 3])]},
        HangKind.GONE,
        (2,),
        (),
    ),
    "ended by an exception, in its own file": (
        {f"rank_{r}.log": waiting([r]) for r in (0, 1, 3)} | {"rank_2.log": raised(2, label="")},
        HangKind.GONE,
        (2,),
        (),
    ),
    "an exception that was caught": ({"a.out": [*raised(2), *waiting([0, 1, 3]), signal(2, 21, 21)]}, NEVER, (2,), ()),
    "an exception because of the others": (
        {"a.out": [*waiting([0, 1, 3]), *raised(2, "torch.distributed.DistBackendError: NCCL error in: x.cpp:1")]},
        UNKNOWN,
        (),
        (2,),
    ),
    "an exception of an earlier attempt": (
        {
            "a.out": [
                *raised(2),
                *waiting([0, 1, 3]),
                *raised(1),
                *waiting([0, 2, 3], 7, at=LATER.replace("41:49", "48:11")),
            ]
        },
        HangKind.GONE,
        (1,),
        (),
    ),
    "a task that was killed": (
        {"a.out": [KILLED, *(f"{rank}: {line}" for rank in (0, 1, 5) for line in waiting([rank]))]},
        HangKind.GONE,
        (2, 3, 4),
        (),
    ),
    "a task of several ranks that was killed": (
        {"a.out": [KILLED, *(f"{rank // 2}: {line}" for rank in (0, 1, 5) for line in waiting([rank]))]},
        UNKNOWN,
        (),
        (2, 3, 4),
    ),
    "a task that was killed because of the others": (
        {"a.out": [*(f"{rank}: {line}" for rank in (0, 1, 5) for line in waiting([rank])), KILLED]},
        UNKNOWN,
        (),
        (2, 3, 4),
    ),
    "the watchdog itself stands still": (
        {"a.out": [*waiting([0, 1]), STUCK.format(2), STUCK.format(3)]},
        UNKNOWN,
        (),
        (2, 3),
    ),
    "gloo, closed": (
        {"a.out": [line for rank in (0, 1, 3) for line in gloo(rank, is_closed=True)]},
        UNKNOWN,
        (),
        (2,),
    ),
    "a group of which no more is known": (
        {"a.out": [line for r in (0, 1) for line in (timed_out(r, 5, member=r), status(r, 5, 4, GROUP))]},
        UNKNOWN,
        (),
        (),
    ),
    "in an operation by its counters alone": (
        {"a.out": [*waiting([0, 1]), status(3, 22, 21), signal(2, 21, 21)]},
        NEVER,
        (2,),
        (),
    ),
    "of unknown kind": (
        {"a.out": [*waiting([0]), timed_out(3, 22, "BROADCAST"), *(status(rank, 22, 21) for rank in (1, 2, 3))]},
        MISMATCH,
        (),
        (0, 3),
    ),
    "of unknown size": (
        {"a.out": [*waiting([0, 1]), timed_out(3, 22, size=7), status(3, 22, 21), status(2, 22, 21)]},
        MISMATCH,
        (),
        (0, 1, 3),
    ),
    "waits in a smaller group, perhaps": (
        {
            "a.out": [
                *waiting([0, 1]),
                signal(2, 21, 21),
                signal(3, 21, 21),
                timed_out(2, 5, member=0),
                status(2, 5, 4, GROUP).replace("Rank 2]", "Rank 0]"),
            ]
        },
        UNKNOWN,
        (),
        (3,),
    ),
    "an operation of a group that is not said": (
        {"a.out": [*waiting([0, 1, 2]), timed_out(3, 22, "ALLREDUCE", size=7, member=1), signal(3, 21, 21)]},
        UNKNOWN,
        (),
        (),
    ),
    "two jobs at one time": (
        {"a.out": [*waiting([0, 1, 3]), signal(2, 21, 21), *waiting([0, 1], 7), signal(2, 6, 6)]},
        UNKNOWN,
        (),
        (),
    ),
    "disjoint ranks of two jobs": ({"a.out": [*waiting([0, 1], 7000), *waiting([2, 3], 12)]}, UNKNOWN, (), ()),
    "a file of the day before": (
        {
            "a.out": [*waiting([0, 1, 3]), signal(2, 21, 21)],
            "b.out": [line.replace("E1128", "E1127") for line in (*waiting([0, 2, 3], 7), signal(1, 6, 6))],
        },
        NEVER,
        (2,),
        (),
    ),
    "messages": (
        {"a.out": [line for r in (0, 1) for line in (timed_out(r, 5 + r, "SEND"), status(r, 9, 3, GROUP))]},
        UNKNOWN,
        (),
        (),
    ),
    "counters that were never set": (
        {"a.out": [*(timed_out(r, 1) for r in (0, 1, 3)), status(0, 1, 76280750235782912), signal(2, 0, 0)]},
        NEVER,
        (2,),
        (),
    ),
}


def test_who_is_behind_by_logs(tmp_path: Path) -> None:
    wrong = []
    for number, (name, (files, kind, culprits, could_be)) in enumerate(CASES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = judge(folder, files)
        assert found.hang is not None, name
        said = (found.hang.kind, found.hang.culprits, found.hang.could_be)
        if said != (kind, culprits, could_be):
            wrong.append((name, said))
    assert wrong == []


def test_ranks_within_a_group_are_told_from_those_of_the_job(tmp_path: Path) -> None:
    lines = []
    for member, rank in enumerate((5, 13, 21, 29)):
        if member != 2:
            lines.append(timed_out(rank, 216, "ALLTOALL_BASE", member=member))
            lines.append(status(rank, 220, 215).replace(DEFAULT.format(rank), GROUP.format(member)))
    found = judge(tmp_path, {"a.out": lines})
    assert found.hang is not None
    assert (found.hang.waiting, found.hang.culprits) == ((5, 13, 29), ())
    assert 21 in found.hang.could_be
    assert any("member 2 of group 119 reported nothing" in line and "rank 21" in line for _, line in found.told)


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text.encode("utf-16"),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: gzip.compress(text.encode()),
        lambda text: "".join(f"\x1b[31m{line}\x1b[0m\n" for line in text.split("\n")).encode(),
        lambda text: text[:-40].encode(),
        lambda text: ("99%|####| 1/2 [00:01<00:01]" + text).replace("[rank1]", "\r 12%|#   | 3/9 [rank1]").encode(),
        lambda text: "".join(f"2026-11-28T21:11:49+09:00 node7 {line}\n" for line in text.split("\n")).encode(),
        lambda text: ("\u635f\u5931 " * 300_000 + "\n" + text).encode(),
        lambda text: ("\u635f\u5931 1.5\n" * 300 + text).encode("gbk"),
        lambda text: "".join(f"[pod/train-worker-1/pytorch] {line}\n" for line in text.split("\n")).encode("utf-16-be"),
        lambda text: "".join(
            f"\x1b[36m(RayTrainWorker pid=17, ip=10.0.0.1)\x1b[0m {line}\r\n" for line in text.split("\n")
        ).encode(),
        lambda text: "".join(f"29 nov. 10:00:00 n1 job[17]: {line}\n" for line in text.split("\n")).encode(),
        lambda text: "".join(f"2026-11-29T10:00:00.1Z stderr F {line}\n" for line in text.split("\n")).encode(),
    ],
    ids=[
        *("UTF-16", "CRLF", "gzip", "colours", "cut", "progress bars", "timestamps", "long lines", "GBK"),
        *("Kubernetes", "Ray", "journal", "containers"),
    ],
)
def test_the_form_of_a_log_does_not_matter(tmp_path: Path, encode: Callable[[str], bytes]) -> None:
    path = tmp_path / "a.out"
    path.write_bytes(encode("\n".join([*waiting([0, 1, 3]), signal(2, 21, 21)])))
    hang = evidence_of(read_witnesses([path])).hang
    assert hang is not None
    assert (hang.kind, hang.culprits) == (NEVER, (2,))


@pytest.mark.parametrize("width", [100, 132, 165, 200])
def test_lines_that_a_terminal_wrapped_are_those_of_their_rank(tmp_path: Path, width: int) -> None:
    lines = [*waiting([0, 1]), signal(2, 21, 21), *waiting([3])]
    wrapped = [line[begin : begin + width] for line in lines for begin in range(0, len(line), width)]
    hang = judge(tmp_path, {"a.out": wrapped}).hang
    assert hang is not None and (hang.kind, hang.culprits, hang.could_be) == (NEVER, (2,), ())


def test_a_log_that_is_cut_anywhere_names_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "a.out"
    text = "\n".join([*raised(12), *waiting([0, 1, 3]), signal(2, 21, 21)])
    for cut in range(0, len(text), 83):
        for part in (text[cut:], text[:cut]):
            path.write_text(part)
            try:
                hang = evidence_of(read_witnesses([path])).hang
            except TraceError:
                continue
            assert hang is None or set(hang.culprits) <= {2, 12}, (cut, part[:80])


def test_a_message_without_its_head_is_nobodys(tmp_path: Path) -> None:
    tail = signal(2, 21, 21).partition("debug info. ")[2]
    found = judge(tmp_path, {"a.out": [*waiting([0, 1, 3]), tail]})
    assert found.hang is not None and (found.hang.kind, found.hang.could_be) == (UNKNOWN, (2,))
    assert "1 message left out: nothing says of which rank" in found.notes


def test_clocks_of_another_zone_and_new_year_are_of_one_attempt(tmp_path: Path) -> None:
    zone, old_year, new_year = "E1129 05:11:51.041194513", "E1231 23:59:59.041194513", "E101 00:00:01.041194513"
    for name, here, there in (("zone", AT, zone), ("year", old_year, new_year)):
        found = judge(tmp_path, {name: [*waiting([0, 1], at=here), *waiting([3], at=there)]})
        assert found.hang is not None
        assert (found.hang.could_be, found.hang.waiting) == ((2,), (0, 1, 3)), name
        assert found.hang.since_ns is not None
        assert found.job.now_ns - found.hang.since_ns == 600_011_000_000, name
    found = judge(tmp_path, {"earlier": [*waiting([0, 1]), *waiting([3], at=LATER.replace("41:49", "48:11"))]})
    assert any("ranks 0-1 reported nothing since the last attempt began" in note for note in found.notes)


def test_times_in_front_of_lines_tell_attempts_apart(tmp_path: Path) -> None:
    early = [f"2026-11-29T10:30:00.1+01:00 {old(rank, 22)}" for rank in (0, 1, 3)]
    late = [f"2026-11-29T10:31:00.1Z {old(rank, 500)}" for rank in (0, 2, 3)]
    found = judge(tmp_path, {"a.out": [*early, *late]})
    assert "a.out holds 2 attempts or jobs; the last is judged" in found.notes
    assert found.hang is not None and (found.hang.waiting, found.hang.could_be) == ((0, 2, 3), (1,))


def test_what_a_training_prints_is_no_json(tmp_path: Path) -> None:
    lines = waiting([0, 1, 3])
    for name, printed in {
        "dict.out": ["{'loss': 2.3, 'lr': 1}", *lines],
        "objects.out": [json.dumps({"log": f"{line}\n", "stream": "stderr"}) for line in lines],
        "ray.out": [f"(Worker pid=17, ip=10.0.0.1) {line}" for line in lines],
    }.items():
        found = judge(tmp_path, {name: printed})
        assert found.hang is not None
        assert found.hang.could_be == (2,), name


def test_labels_and_messages_that_give_different_ranks_decide_nothing(tmp_path: Path) -> None:
    found = judge(tmp_path, {"a.out": [old(member, 22, label=f"{member + 4}: ") for member in (0, 1, 3)]})
    assert found.hang is not None
    assert (found.hang.kind, found.hang.could_be) == (UNKNOWN, ())
    assert "give processes different ranks" in found.hang.reason


def test_the_line_that_called_is_said(tmp_path: Path) -> None:
    torch = "#0 all_reduce from /opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:2810"
    frames = [torch, "#1 step from /home/me/train.py:44", "#2 main from /home/me/train.py:90"]
    found = judge(tmp_path, {"a.out": [line for rank in (0, 1, 3) for line in (timed_out(rank, 22), *frames)]})
    assert ("Logs", "what ran out of time was called at train.py:44 in step") in found.told


def test_what_ended_a_rank_is_said_and_so_is_a_watchdog_that_stands_still(tmp_path: Path) -> None:
    found = judge(tmp_path, {"a.out": [*raised(2), *waiting([0, 1, 3])]})
    assert found.hang is not None
    assert "rank 2, which ended (ValueError: no batch, by the log)" in describe(found.hang, found.job).headline
    found = judge(tmp_path, {"a.out": [*waiting([0, 1, 3]), STUCK.format(2)]})
    assert any("torch's watchdog itself stands still on rank 2" in line for _, line in found.told)
    found = judge(tmp_path, {"a.out": [STUCK.format(2)]})
    assert found.hang is None and found.doubt.startswith("torch's watchdog itself stands still on rank 2")


@each_case("tasks", ["0-99999999999", "7-", "1-2-3", "-4", "9-2", ",", "9" * 4000, "0-" + "9" * 3990])
def test_tasks_of_slurm_that_cannot_be_are_passed_over_and_take_no_memory(tmp_path: Path, tasks: str) -> None:
    line = f"srun: error: n3: tasks {tasks}: Out Of Memory"
    with_them = judge(tmp_path, {"a.out": [line, *waiting([0, 1, 3])]})
    assert with_them.hang == judge(tmp_path, {"a.out": waiting([0, 1, 3])}).hang


def test_a_rank_that_waits_in_another_group_is_not_silent(tmp_path: Path) -> None:
    said = [signal(rank, 6, 6) for rank in (0, 1, 3)]
    hang = judge(tmp_path, {"a.out": [timed_out(2, 2114), *said]}).hang
    assert hang is not None and hang.reason == "the logs do not say how far ranks 0-1, 3 came in it"


def test_a_name_of_a_file_does_not_say_how_many_ranks_there_are(tmp_path: Path) -> None:
    found = judge(tmp_path, {"rank_0.log": waiting([0]), "rank_1.log": waiting([1]), "rank_2.log": waiting([2])})
    assert found.hang is not None
    assert found.hang.kind is UNKNOWN
    found = judge(tmp_path, {"a.out": waiting([0, 1]), "rank_3.log": ["loss 3"]})
    assert found.hang is not None
    assert (found.hang.kind, found.hang.could_be) == (UNKNOWN, (2, 3))


def test_a_log_says_how_many_ranks_a_job_has(tmp_path: Path) -> None:
    said = "node1:17:17 [0] NCCL INFO comm 0x7f rank 0 nranks 4 cudaDev 0 busId 1000 - Init COMPLETE"
    found = judge(tmp_path, {"a.out": [said, *waiting(range(4))]})
    assert found.hang is not None
    assert found.hang.kind is HangKind.NETWORK


def test_logs_of_several_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"a\.out and b\.out are both of rank 0, and differ"):
        judge(tmp_path, {"a.out": waiting([0, 1]), "b.out": waiting([0, 1], 4711)})


def test_dumps_and_logs_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "dumps", hung_job())
    (folder / "slurm.out").write_text("\n".join(waiting([2], 5)))
    found = evidence_of(read_witnesses([folder]))
    assert found.hang is not None
    assert found.hang.culprits == (2,)
    assert [line for _, line in found.told if "contradiction" in line] == [
        "contradiction: all_reduce 5 of group default_pg ran out of time on rank 2 by its log, and has finished by its"
        " dump"
    ]


def test_a_log_fills_in_for_a_rank_without_a_dump(tmp_path: Path) -> None:
    contents = hung_job()
    del contents["nccl_trace_rank_2"]
    folder = write(tmp_path / "dumps", contents)
    (folder / "slurm.out").write_text(signal(2, 5, 5))
    hang = evidence_of(read_witnesses([folder])).hang
    assert hang is not None
    assert (hang.kind, hang.culprits) == (NEVER, (2,))


def test_a_piece_without_a_message_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.out"
    path.write_text("loss 2.3841\n" * 10)
    with pytest.raises(TraceError, match=r"no Flight Recorder dump in a\.out, and no report of NCCL RAS"):
        read_witnesses([path])
