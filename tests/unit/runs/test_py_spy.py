"""Stacks of py-spy: who waits in a collective, who does not, and whose stack it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from known_logs import signal, waiting

from hpcpace.core.errors import TraceError
from hpcpace.hang.views import Doing, HangKind
from hpcpace.runs.imports.py_spy import read_stacks
from hpcpace.runs.imports.witnesses import Evidence, evidence_of, read_witnesses

MAIN = ("main (train.py:90)", "<module> (train.py:101)")
C10D = "torch/distributed/distributed_c10d.py"
IN_ALL_REDUCE = (
    f"all_reduce ({C10D}:2810)",
    "wrapper (torch/distributed/c10d_logger.py:81)",
    "step (train.py:44)",
    *MAIN,
)
ELSEWHERE = (*IN_ALL_REDUCE[:2], "validate (train.py:70)", *MAIN)
IN_BARRIER = (f"barrier ({C10D}:4510)", "wrapper (torch/distributed/c10d_logger.py:81)", "save (train.py:70)", *MAIN)
LOADING = (
    "poll (multiprocessing/popen_fork.py:27)",
    "wait (multiprocessing/connection.py:931)",
    "_try_get_data (torch/utils/data/dataloader.py:1132)",
    "__next__ (torch/utils/data/dataloader.py:701)",
    "step (train.py:30)",
    *MAIN,
)
OWN_LINE = ("log (train.py:60)", *MAIN)
ON_GPU = ("cudaStreamSynchronize (libcudart.so.12)", "at::native::item(at::Tensor) (libtorch_cuda.so)", *OWN_LINE)
IN_C = ("__futex_abstimed_wait_common (libc.so.6)", "0x7f12 (libhdf5.so)", *OWN_LINE)
IN_BACKWARD = (
    "torch::autograd::Engine::execute (libtorch_cpu.so)",
    "_engine_run_backward (torch/autograd/graph.py:769)",
    "backward (torch/_tensor.py:521)",
    *MAIN,
)
OF_A_HOOK = f"""\
Thread 8287 (active)
    all_gather_into_tensor ({C10D}:2709)
    wrapper (torch/distributed/c10d_logger.py:72)
    all_gather_into_tensor (deepspeed/comm/torch.py:219)
    _allgather_params (deepspeed/runtime/zero/partition_parameters.py:90)
"""
NATIVE = ("ncclGroupEndInternal (libnccl.so.2)", "c10d::ProcessGroupNCCL::collective (libtorch_cuda.so)", *MAIN)


def text(rank: int, frames: Sequence[str], *, command: str = "python train.py", locals_: Sequence[str] = ()) -> str:
    lines = [f"    {frame}" for frame in frames]
    lines[1:1] = locals_
    return "\n".join(
        [
            f"Process {100 + rank}: {command}",
            "Python v3.10.12 (/usr/bin/python3.10)",
            "",
            f'Thread {100 + rank} (idle): "MainThread"',
            *lines,
            'Thread 4711 (active): "Thread-1 (_pin_memory_loop)"',
            f"    all_reduce ({C10D}:2810)",
            "",
        ]
    )


def as_json(rank: int, frames: Sequence[str]) -> str:
    found = []
    for frame in frames:
        name, place = frame[:-1].rsplit(" (", 1)
        file, _, line = place.rpartition(":")
        number = int(line) if line.isdecimal() else 0
        found.append({"name": name, "filename": f"/opt/{file}", "short_filename": file or place, "line": number})
    threads = [("Thread-1", 4711, found[-1:]), ("MainThread", 100 + rank, found)]
    return json.dumps(
        [{"pid": 100 + rank, "thread_id": 9, "thread_name": n, "os_thread_id": os, "frames": f} for n, os, f in threads]
    )


def judge(folder: Path, contents: Mapping[str, str]) -> Evidence:
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(content)
    return evidence_of(read_witnesses([folder]))


def of(*stacks: Sequence[str]) -> dict[str, str]:
    return {f"rank_{rank}.txt": text(rank, frames) for rank, frames in enumerate(stacks) if frames}


KINDS = HangKind
CASES: dict[str, tuple[dict[str, str], HangKind | None, tuple[int, ...], tuple[int, ...]]] = {
    "in a wait of its own": (of(IN_ALL_REDUCE, IN_ALL_REDUCE, LOADING, IN_ALL_REDUCE), KINDS.OWN_WORK, (2,), ()),
    "in C code of its own": (of(IN_ALL_REDUCE, IN_ALL_REDUCE, IN_C, IN_ALL_REDUCE), KINDS.NEVER_CALLED, (2,), ()),
    "at a line that may wait for the GPU": (of(IN_ALL_REDUCE, OWN_LINE, IN_ALL_REDUCE), KINDS.UNKNOWN, (), (1,)),
    "waiting for the GPU": (of(IN_ALL_REDUCE, ON_GPU, IN_ALL_REDUCE), KINDS.UNKNOWN, (), (1,)),
    "in another collective": (of(IN_BARRIER, *[IN_ALL_REDUCE] * 3), KINDS.UNKNOWN, (), (0,)),
    "alone in a collective": (of(IN_BARRIER, *[LOADING] * 3), KINDS.UNKNOWN, (), ()),
    "without a stack": (of(IN_ALL_REDUCE, (), IN_ALL_REDUCE), KINDS.UNKNOWN, (), (1,)),
    "at another line": (of(*[IN_ALL_REDUCE] * 3, ELSEWHERE), KINDS.UNKNOWN, (), (3,)),
    "all inside": (of(*[IN_ALL_REDUCE] * 4), KINDS.UNKNOWN, (), ()),
    "nobody inside": (of(OWN_LINE, OWN_LINE, LOADING), None, (), ()),
    "in NCCL by frames of C": (of(NATIVE, NATIVE, LOADING), KINDS.OWN_WORK, (2,), ()),
    "JSON": (
        {
            f"dump-{rank}.json": as_json(rank, frames)
            for rank, frames in enumerate([IN_ALL_REDUCE, LOADING, IN_ALL_REDUCE])
        },
        KINDS.OWN_WORK,
        (1,),
        (),
    ),
    "all ranks in one file": (
        {
            "all.txt": "".join(
                f"== rank {r} ==\n{text(r, f)}\n" for r, f in enumerate([IN_ALL_REDUCE, IN_ALL_REDUCE, LOADING])
            )
        },
        KINDS.OWN_WORK,
        (2,),
        (),
    ),
    "behind Slurm's labels": (
        {
            "all.txt": "\n".join(
                f"{rank}: {line}"
                for line_number in range(20)
                for rank, frames in enumerate([IN_ALL_REDUCE, LOADING])
                for line in text(rank, frames).split("\n")[line_number : line_number + 1]
            )
        },
        KINDS.OWN_WORK,
        (1,),
        (),
    ),
    "behind times and labels of mpirun": (
        {
            "all.txt": "\n".join(
                f"2026-11-29T10:00:00.123+01:00 [1,{rank}]<stdout>: {line}"
                for line_number in range(20)
                for rank, frames in enumerate([IN_ALL_REDUCE, LOADING])
                for line in text(rank, frames).split("\n")[line_number : line_number + 1]
            )
        },
        KINDS.OWN_WORK,
        (1,),
        (),
    ),
    "behind names of hosts": (
        {
            "all.txt": "\n".join(
                f"n{rank}: {line}"
                for line_number in range(20)
                for rank, frames in enumerate([IN_ALL_REDUCE, LOADING])
                for line in text(rank, frames, command=f"python t.py --rank={rank}").split("\n")[
                    line_number : line_number + 1
                ]
            )
        },
        KINDS.OWN_WORK,
        (1,),
        (),
    ),
    "ranks on the command line": (
        {
            f"{n}x": text(r, f, command=f"python t.py --rank={r}")
            for n, r, f in (("b", 0, IN_ALL_REDUCE), ("a", 1, LOADING))
        },
        KINDS.OWN_WORK,
        (1,),
        (),
    ),
    "ranks among the locals": (
        {
            f"{n}x": text(
                r, f, locals_=["        Locals:", f"            rank: {r}", '            x: "all_reduce (a.py:1)"']
            )
            for n, r, f in (("b", 0, IN_ALL_REDUCE), ("a", 1, LOADING))
        },
        KINDS.OWN_WORK,
        (1,),
        (),
    ),
}


def test_who_differs_by_stacks(tmp_path: Path) -> None:
    wrong = []
    for number, (name, (contents, kind, culprits, could_be)) in enumerate(CASES.items()):
        hang = judge(tmp_path / str(number), contents).hang
        said = (None, (), ()) if hang is None else (hang.kind, hang.culprits, hang.could_be)
        if said != (kind, culprits, could_be):
            wrong.append((name, said))
    assert wrong == []


def test_a_hook_of_backward_calls_collectives_for_the_main_thread(tmp_path: Path) -> None:
    waits = {name: stack + OF_A_HOOK for name, stack in of(*[IN_BACKWARD] * 3).items()}
    found = judge(tmp_path / "hooks", waits | {"rank_3.txt": text(3, LOADING)})
    assert found.hang is not None and (found.hang.kind, found.hang.culprits) == (HangKind.OWN_WORK, (3,))
    assert any("partition_parameters.py:90 in _allgather_params" in line for _, line in found.told)
    alone = judge(tmp_path / "alone", of(*[IN_ALL_REDUCE] * 3, IN_BACKWARD)).hang
    assert alone is not None and (alone.kind, alone.could_be) == (HangKind.UNKNOWN, (3,))


def test_a_stack_says_where_a_rank_is(tmp_path: Path) -> None:
    found = judge(tmp_path, of(IN_ALL_REDUCE, IN_ALL_REDUCE, LOADING))
    assert [line for label, line in found.told if label == "Stacks"] == [
        "ranks 0-1: all_reduce, at train.py:44 in step",
        "rank 2: at train.py:30 in step",
        "the stacks do not say how many ranks the job has; the last one with a stack is 2",
    ]
    assert found.job.ranks[2].stack[-1] == "popen_fork.py:27 in poll"
    assert found.job.ranks[2].doing is Doing.LOADING


@pytest.mark.parametrize(
    "front",
    [
        "[pod/train-worker-1/pytorch] ",
        "(RayTrainWorker pid=17, ip=10.0.0.1) ",
        "I1129 10:00:00.123456 4711 x.cc:12] ",
        "2026-11-29 10:00:00,123 - ",
        "29 nov. 10:00:00 n1 py-spy[17]: ",
        "n1-1  | ",
    ],
)
def test_stacks_are_read_behind_any_labels(tmp_path: Path, front: str) -> None:
    stacks = of(IN_ALL_REDUCE, LOADING, IN_ALL_REDUCE)
    labelled = {name: "".join(f"{front}{line}\n" for line in stack.split("\n")) for name, stack in stacks.items()}
    hang = judge(tmp_path, labelled).hang
    assert hang is not None and (hang.kind, hang.culprits) == (HangKind.OWN_WORK, (1,))


@pytest.mark.parametrize("form", [text, as_json])
def test_ranks_without_a_stack_are_named_beside_the_culprit(tmp_path: Path, form: Callable[..., str]) -> None:
    stacks = [IN_ALL_REDUCE, LOADING, (), IN_ALL_REDUCE]
    found = judge(tmp_path / "alone", {f"rank_{rank}": form(rank, one) for rank, one in enumerate(stacks) if one})
    assert found.hang is not None and (found.hang.culprits, found.missing) == ((1,), (2,))
    assert ("Stacks", "no stack of rank 2") in found.told
    log = "\n".join(waiting([0, 1, 2]))
    beside = judge(tmp_path / "beside", {"job.out": log, "rank_3.txt": text(3, LOADING)})
    assert not any("no stack" in line for _, line in beside.told)


def test_a_stack_fills_in_for_a_silent_rank_and_contradicts_others(tmp_path: Path) -> None:
    log = "\n".join(waiting([0, 1, 3]))
    found = judge(tmp_path / "a", {"job.out": log, "rank_2.txt": text(2, LOADING)})
    assert found.hang is not None
    assert (found.hang.kind, found.hang.culprits) == (HangKind.OWN_WORK, (2,))
    against = judge(tmp_path / "b", {"job.out": f"{log}\n{signal(2, 21, 21)}", "rank_2.txt": text(2, IN_BARRIER)})
    assert any("contradiction: the stack of rank 2 is in barrier, at train.py:70" in line for _, line in against.told)


def test_helpers_of_a_process_are_left_out(tmp_path: Path) -> None:
    helper = text(7, LOADING).replace("\n\n", "\nParent Process 100: python train.py\n\n", 1)
    (only,) = read_stacks(tmp_path / "a", f"{text(0, IN_ALL_REDUCE)}\n----\n{helper}".encode())
    assert only.pid == 100


def test_what_is_cut_damaged_or_without_a_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="of no stack of py-spy is it known which rank it is"):
        judge(tmp_path / "a", {"stack.txt": text(0, LOADING)})
    found = judge(tmp_path / "b", of(IN_ALL_REDUCE, LOADING) | {"rank_2.json": as_json(2, LOADING)[:-40]})
    assert any("rank_2.json was left out" in note for note in found.notes)
    with pytest.raises(TraceError, match="second, different stack of rank 0"):
        judge(tmp_path / "c", {"rank_0.txt": text(0, LOADING), "rank0.txt": text(0, IN_ALL_REDUCE)})
