"""Reports of NCCL's RAS without any other record: the same verdict from text as from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import each_case
from known_dumps import hung_job, write

from hpcpace.core.errors import TraceError
from hpcpace.runs.imports.ras import read_ras
from hpcpace.runs.imports.witnesses import Evidence, evidence_of, read_witnesses, taken_for

DATA = Path(__file__).parents[2] / "data" / "hang" / "ras"
SUMMARY = """\
NCCL version 2.26.2 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          4            1          4        4

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
OF_ALL = "    0         1         1         4         4         4   RUNNING  {}\n"
PROCESS = "GPU {0} managed by process 10{0} on node 10.0.0.1"


def text(sections: str, *, errors: str = "MISMATCH", groups: str = OF_ALL) -> str:
    return f"{SUMMARY}{groups.format(errors)}\nErrors\n======\n\n{sections}"


def mismatch(op: str, lines: Sequence[str]) -> str:
    listed = "".join(f"  {line}\n" for line in lines)
    return f"#0-0 (ab12) MISMATCH\n  Communicator ranks have different {op} operation counts\n{listed}\n"


def as_json(counts: Mapping[int, Mapping[str, int]], *, dead: Sequence[int] = ()) -> str:
    ranks = [
        {"rank": rank, "host": "10.0.0.1", "pid": 100 + rank, "collective_counts": dict(counted)}
        for rank, counted in counts.items()
    ]
    lost = [{"rank": rank, "host": "10.0.0.1", "pid": 100 + rank, "status": {"considered_dead": True}} for rank in dead]
    one: dict[str, Any] = {"hash": "0xab12", "size": 4, "ranks": ranks, "missing_ranks": lost}
    return json.dumps({"nccl_version": "2.28.9", "communicators": [one]})


def judge(path: Path, content: str | bytes) -> Evidence:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return evidence_of(read_witnesses([path]))


def said(found: Evidence) -> tuple[object, ...]:
    hang = found.hang
    if hang is None:
        return (found.doubt,)
    call = hang.call and (hang.call.op, hang.call.seq, found.job.groups[hang.call.channel.group].name)
    return hang.kind, hang.culprits, hang.could_be, hang.waiting, call


AR, AG = "AllReduce", "AllGather"
ONE_BEHIND = [
    "3 ranks have launched up to operation 7",
    f"Rank 2 has launched up to operation 6 -- {PROCESS.format(2)}",
]
NONE_YET = ["3 ranks have launched up to operation 1", f"Rank 2 has not launched any operations -- {PROCESS.format(2)}"]
TWO = [
    "2 ranks have launched up to operation 7",
    f"Rank 2 has launched up to operation 5 -- {PROCESS.format(2)}",
    f"Rank 3 has launched up to operation 6 -- {PROCESS.format(3)}",
]
DEAD = f"""\
DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 102 on node 10.0.0.1 managing GPU 2

#0-0 (ab12) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 2 -- {PROCESS.format(2)}

"""
OLD_DEAD = DEAD.replace(f"  Rank 2 -- {PROCESS.format(2)}", "  The missing rank: 2")


def counted(numbers: Sequence[int], op: str = AR, **others: Sequence[int]) -> dict[int, dict[str, int]]:
    return {
        rank: {op: number} | {name: several[rank] for name, several in others.items()}
        for rank, number in enumerate(numbers)
    }


PAIRS = {
    "one behind": (text(mismatch(AR, ONE_BEHIND)), as_json(counted([7, 7, 6, 7])), (2,)),
    "none yet": (text(mismatch(AR, NONE_YET)), as_json(counted([1, 1, 0, 1])), (2,)),
    "two behind, one of them waits": (text(mismatch(AR, TWO)), as_json(counted([7, 7, 5, 6])), (2,)),
    "other operations": (
        text(mismatch(AR, ONE_BEHIND) + mismatch(AG, [line.replace("6", "8") for line in ONE_BEHIND])),
        as_json(counted([7, 7, 6, 7], AllGather=[7, 7, 8, 7])),
        (2,),
    ),
    "dead": (
        text(DEAD, errors="INCOMPLETE"),
        as_json({rank: {AR: 7} for rank in (0, 1, 3)}, dead=[2]),
        (2,),
    ),
    "dead, first missing": (
        text(OLD_DEAD.partition("#0-0")[0].replace("DEAD", "INCOMPLETE") + OLD_DEAD, errors="INCOMPLETE"),
        as_json({rank: {AR: 7} for rank in (0, 1, 3)}, dead=[2]),
        (2,),
    ),
    "dead, without processes": (
        text(OLD_DEAD, errors="INCOMPLETE"),
        as_json({rank: {AR: 7} for rank in (0, 1, 3)}, dead=[2]),
        (2,),
    ),
}


def test_text_and_json_give_one_verdict(tmp_path: Path) -> None:
    wrong = []
    for name, (as_text, of_json, culprits) in PAIRS.items():
        one, other = judge(tmp_path / "ras.txt", as_text), judge(tmp_path / "ras.json", of_json)
        named = one.hang and (one.hang.culprits or one.hang.could_be)
        if named != culprits or said(one)[:4] != said(other)[:4]:
            wrong.append((name, said(one), said(other)))
    assert wrong == []


def test_a_case_from_the_field(tmp_path: Path) -> None:
    one, other = (evidence_of(read_witnesses([DATA / name])) for name in ("thirty-behind.txt", "thirty-behind.json"))
    assert said(one) == said(other)
    assert one.hang is not None
    assert one.hang.call is not None
    assert (one.hang.call.op, one.hang.call.seq) == ("all_gather", 641)
    behind = tuple(rank for rank in range(32) if rank not in (12, 13))
    assert set(behind) <= set(one.hang.culprits or one.hang.could_be)


def test_what_a_report_does_not_show_is_not_said(tmp_path: Path) -> None:
    equal = judge(tmp_path / "a.txt", text("", errors="OK"))
    assert equal.doubt == "NCCL RAS reports the same counts for all ranks, so no rank is behind"
    halves = ["2 ranks have launched up to operation 7", "2 ranks have launched up to operation 6"]
    split = judge(tmp_path / "b.txt", text(mismatch(AR, halves)))
    assert split.hang is None
    assert "not which ranks differ" in split.doubt
    assert any("use ncclras -v" in line for _, line in split.told)
    of_two = [f"Rank {rank} has launched up to operation {7 - rank} -- {PROCESS.format(2 + rank)}" for rank in (0, 1)]
    pairs = "    0         2         1         2         2         4   RUNNING  MISMATCH\n"
    of_some = judge(tmp_path / "c.txt", text(mismatch(AR, of_two), groups=pairs))
    assert of_some.hang is None
    assert "global ranks are not known" in of_some.doubt
    assert any("its rank 1 (process 103 on 10.0.0.1) launched AllReduce 6 times" in line for _, line in of_some.told)


def test_a_smaller_communicator_that_differs_is_said_with_processes(tmp_path: Path) -> None:
    groups = OF_ALL.format("OK") + "    1         2         1         2         2         4   RUNNING  MISMATCH\n"
    of_two = [f"Rank {rank} has launched up to operation {7 - rank} -- {PROCESS.format(2 + rank)}" for rank in (0, 1)]
    sections = mismatch(AR, of_two).replace("#0-0", "#1-1")
    found = judge(tmp_path / "a.txt", text(sections, groups=groups))
    assert found.hang is None
    assert "not by their global rank" in found.doubt
    assert any("its rank 1 (process 103 on 10.0.0.1) launched AllReduce 6 times" in line for _, line in found.told)


def test_a_rank_of_a_smaller_communicator_that_does_not_answer_is_said_with_its_process(tmp_path: Path) -> None:
    groups = OF_ALL.format("OK") + "    1         2         1         2         2         3   RUNNING  INCOMPLETE\n"
    lost = "#1-0 (b3398875b8b2a063) INCOMPLETE\n  Missing communicator data from 1 rank\n"
    lost += f"  Rank 1 -- {PROCESS.format(2)}\n"
    found = judge(tmp_path / "a.txt", text(lost, groups=groups))
    assert found.hang is None
    assert any("b3398875b8b2a063, it has no data of rank 1 (process 102 on 10.0.0.1)" in line for _, line in found.told)


def test_lines_of_the_watchdog_in_the_file_of_a_report_count_too(tmp_path: Path) -> None:
    at = "[rank1]:[E603 17:48:01.005 ProcessGroupNCCL.cpp:632]"
    log = (
        f"{at} [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=8,"
        " NumelOut=8, Timeout(ms)=1800000) ran for 1800068 milliseconds before timing out.\n"
        f"{at} [PG ID 0 PG GUID 0(default_pg) Rank 1]  failure detected by watchdog at work sequence id: 7 PG status:"
        " last enqueued work: 9, last completed work: 6\n"
    )
    found = judge(tmp_path / "a.txt", text("", errors="OK") + log)
    assert found.hang is not None
    assert found.hang.waiting == (1,)
    assert found.missing == (0, 2, 3)


def test_a_damaged_text_is_refused_or_says_less(tmp_path: Path) -> None:
    whole = text(mismatch(AR, TWO))
    for end in ("Rank 3", "#0-0", "  Communicator ranks"):
        cut = judge(tmp_path / "a.txt", whole[: whole.index(end)])
        assert cut.hang is None
        assert "not which ranks differ" in cut.doubt
    with pytest.raises(TraceError, match="cut off before its groups"):
        judge(tmp_path / "b.txt", SUMMARY[: SUMMARY.index("Group")])
    for encoded in (whole.encode("utf-16"), whole.replace("\n", "\r\n").encode()):
        assert_names_rank_2(tmp_path / "c.txt", encoded)


@each_case(
    "front",
    [
        "0: ",  # srun -l
        "2026-11-29T10:00:{:02}.123456Z ",
        "Nov 29 10:00:{:02} n17.example ncclras[4711]: ",
        "[2026-11-29 10:00:{:02},123] [n1:0] | ",
    ],
)
def test_what_stands_in_front_of_all_lines_is_left_out(tmp_path: Path, front: str) -> None:
    lines = text(mismatch(AR, TWO)).split("\n")
    logged = "".join(f"{front.format(number % 60)}{line}".rstrip() + "\n" for number, line in enumerate(lines))
    assert_names_rank_2(tmp_path / "a.txt", logged.encode())


def assert_names_rank_2(path: Path, data: bytes) -> None:
    found = judge(path, data)
    assert found.hang is not None
    assert found.hang.culprits == (2,)


def test_a_text_goes_with_dumps_too(tmp_path: Path) -> None:
    (tmp_path / "ras.txt").write_text(text(mismatch(AR, ONE_BEHIND)))
    assert read_ras(tmp_path / "ras.txt").nccl_version == "2.26.2"
    assert taken_for(read_witnesses([tmp_path])) == ["ras.txt: NCCL RAS (text, NCCL 2.26.2)"]


def test_a_text_beside_dumps_counts_ranks_that_it_does_not_list(tmp_path: Path) -> None:
    folder = write(tmp_path / "dumps", hung_job())
    (folder / "ras.txt").write_text(text(mismatch(AR, ONE_BEHIND)))
    assert [line for label, line in evidence_of(read_witnesses([folder])).told if label == "RAS"] == [
        "NCCL RAS: in a communicator of 4 ranks, AllReduce was called by rank 2 6 times and ranks 0-1, 3 7 times"
    ]


def test_nodes_that_differ_and_several_communicators_of_all_ranks(tmp_path: Path) -> None:
    layout = """  Nodes  Processes         GPUs
          per node  per process
      1          3            1
      1          1            1

  Nodes  Processes         GPUs
(total)    (total)      (total)
      2          4            4
"""
    before = SUMMARY[SUMMARY.index("  Nodes") : SUMMARY.index("\nCommunicators")]
    two = OF_ALL.replace("    0         1", "    0         2")
    content = text(mismatch(AR, ONE_BEHIND).replace("#0-0", "#0-1"), groups=two).replace(before, layout)
    found = judge(tmp_path / "ras.txt", content)
    assert found.hang is not None
    assert found.hang.culprits == (2,)
    one = json.loads(as_json(counted([7, 7, 6, 7])))
    one["communicators"] *= 2
    again = judge(tmp_path / "ras.json", json.dumps(one))
    assert again.hang is not None
    assert again.hang.culprits == (2,)


def test_a_report_far_behind_other_text_is_asked_for_in_a_file_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"job\.out has a report of NCCL RAS behind other text: save that in a file"):
        judge(tmp_path / "job.out", "step 1 loss 2.3\n" * 9000 + text(mismatch(AR, ONE_BEHIND)))


@pytest.mark.parametrize(
    "front", ["2026-11-29T10:00:0{}.5+01:00 3: ", "[pod/train-worker-{}/pytorch] ", "[1,{}]<stdout>:"]
)
def test_a_report_is_read_behind_any_labels(tmp_path: Path, front: str) -> None:
    lines = text(mismatch(AR, ONE_BEHIND)).split("\n")
    content = "".join(f"\x1b[32m{front.format(number % 10)}{line}\x1b[0m\r\n" for number, line in enumerate(lines))
    found = judge(tmp_path / "ras.txt", content.encode("utf-16"))
    assert found.hang is not None and found.hang.culprits == (2,)
