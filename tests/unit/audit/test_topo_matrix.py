"""The matrix of `nvidia-smi topo -m` as text: all its forms, what it finds, and what it leaves alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcpace.audit.findings import AuditFinding
from hpcpace.audit.job import AuditedJob, read_topo
from hpcpace.audit.rulebook import run_rules
from hpcpace.core.errors import UsageError
from tests.machines.cases import LOGS

FAULTS = LOGS.parent / "topo" / "faults.txt"
ROCM = """\
============================ ROCm System Management Interface ============================
================================ Weight between two GPUs =================================
       GPU0         GPU1         GPU2         GPU3
GPU0   0            15           15           40
GPU1   15           0            15           15
GPU2   15           15           0            15
GPU3   40           15           15           0

================================= Link Type between two GPUs =============================
       GPU0         GPU1         GPU2         GPU3
GPU0   0            XGMI         XGMI         PCIE
GPU1   XGMI         0            XGMI         XGMI
GPU2   XGMI         XGMI         0            XGMI
GPU3   PCIE         XGMI         XGMI         0

======================================= Numa Nodes =======================================
GPU[0]\t\t: (Topology) Numa Node: 0
GPU[0]\t\t: (Topology) Numa Affinity: 0
"""


def _found(text: str, folder: Path, encoding: str = "utf-8") -> list[AuditFinding]:
    (folder / "topo").write_text(text, encoding=encoding)
    return list(run_rules(AuditedJob([], topo=read_topo(folder / "topo")), ["P09"]).findings)


def _matrix(rows: list[str], nics: str = "", cpus: str = "0-31") -> str:
    """Return a matrix of GPUs from the words of its rows, with the diagonal."""
    names = [f"GPU{number}" for number in range(len(rows))]
    head = "\t".join(["", *names, *nics.split(), "CPU Affinity", "NUMA Affinity"])
    body = ["\t".join([name, *row.split(), cpus, "0"]) for name, row in zip(names, rows, strict=True)]
    return "\n".join([head, *body]) + "\n"


def _mesh(num: int, path: str, *others: tuple[int, int, str]) -> list[str]:
    cells = [["X" if row == column else path for column in range(num)] for row in range(num)]
    for row, column, other in others:
        cells[row][column] = cells[column][row] = other
    return [" ".join(row) for row in cells]


def test_far_adapters_missing_links_and_gpus_without_cpus_are_found(tmp_path: Path) -> None:
    found = _found(FAULTS.read_text(), tmp_path)
    assert {(f.hosts, f.place, re.sub(r"[:(].*", "", f.seen).strip()) for f in found} == {
        (("n1",), "GPU2", "all adapters"),
        (("n1",), "GPU2", "NVLinks are missing between GPU2-GPU3 SYS"),
        (("n1",), "GPU3", "no CPU that this job or container may use is near it"),
    }
    assert "mlx5_0, mlx5_1" in found[0].seen and found[0].evidence.startswith("topo:4: GPU2 NV18")


def test_every_form_of_the_text_says_the_same(tmp_path: Path) -> None:
    text = "".join(line for line in FAULTS.read_text().splitlines(True) if line.startswith("n1:"))
    bare = text.replace("n1: ", "").replace("n1:", "").replace("\t\t1\t", "\t32-63\t1\t")
    forms = {
        "colours": "\x1b[4m" + bare.replace("\n", "\x1b[0m\n", 1),
        "old names": re.sub(r"\bNIC(\d)", r"mlx5_\1", bare).replace("SYS", "SOC"),
        "pasted": re.sub("[\t ]+", "   ", bare.replace("CPU Affinity", "CPU_A")).replace("CPU_A", "CPU Affinity"),
        "with its command": "user@n1:~$ nvidia-smi topo -m\n" + bare,
        "carriage returns": bare.replace("\n", "\r\n"),
        "srun": re.sub("^", "0: ", bare, flags=re.MULTILINE),
        "two labels": re.sub("^", "node3: [0] ", bare, flags=re.MULTILINE),
        "two tasks of a host": "".join(f"{task}: n1: {line}" for line in bare.splitlines(True) for task in (0, 1)),
        "times": re.sub("^", "2026-11-29T10:00:00.123+01:00 n1: ", bare, flags=re.MULTILINE),
        "Kubernetes": re.sub("^", "[pod/train-worker-3/pytorch] ", bare, flags=re.MULTILINE),
        "UTF-16": bare,
        "no affinity": re.sub(r"\t(CPU Affinity|\d\d?-\d).*", "", bare),
    }
    kinds = {
        name: [f.place for f in _found(form, tmp_path, "utf-16" if name == "UTF-16" else "utf-8")]
        for name, form in forms.items()
    }
    assert kinds == {name: ["GPU2", "GPU2"] for name in forms}


def test_columns_may_stand_in_any_order(tmp_path: Path) -> None:
    text = "\tmlx5_0\tGPU0\tGPU1\tNUMA Affinity\tCPU Affinity\n"
    text += "mlx5_0\tX\tSYS\tPIX\t\t\nGPU0\tSYS\tX\tNV4\t3\t0-7\nGPU1\tPIX\tNV4\tX\t1\t8-15\n"
    (tmp_path / "topo").write_text("GPU0 and GPU1 below are the ones in question\n" + text)
    (matrix,) = read_topo(tmp_path / "topo")
    assert (matrix.gpus, matrix.nics) == (["GPU0", "GPU1"], ["mlx5_0"])
    assert (matrix.paths["GPU0"], matrix.cpus) == ({"mlx5_0": "SYS", "GPU1": "NV4"}, {"GPU0": 0xFF, "GPU1": 0xFF00})


def test_machines_that_join_each_gpu_alike_are_left_alone(tmp_path: Path) -> None:
    cube = ["X NV1 NV1 NV2 NV2 SYS SYS SYS", "NV1 X NV2 NV1 SYS NV2 SYS SYS", "NV1 NV2 X NV2 SYS SYS NV1 SYS"]
    cube += ["NV2 NV1 NV2 X SYS SYS SYS NV1", "NV2 SYS SYS SYS X NV1 NV1 NV2", "SYS NV2 SYS SYS NV1 X NV2 NV1"]
    cube += ["SYS SYS NV1 SYS NV1 NV2 X NV2", "SYS SYS SYS NV1 NV2 NV1 NV2 X"]
    healthy = {
        "NVSwitch": _mesh(8, "NV18"),
        "no NVLink": _mesh(8, "SYS", (0, 1, "PIX")),
        "bridges": _mesh(4, "NODE", (0, 1, "NV4"), (2, 3, "NV4")),
        "cube": cube,
        "one": ["X"],
        "two": _mesh(2, "PHB"),
    }
    assert {name: found for name, rows in healthy.items() if (found := _found(_matrix(rows), tmp_path))} == {}


def test_gpus_with_fewer_links_than_most_are_named(tmp_path: Path) -> None:
    last = [(7, other) for other in range(7)]
    faults = {
        "a pair": (_mesh(8, "NV12", (0, 5, "SYS")), "between GPU0-GPU5 SYS"),
        "no bridge": (_mesh(6, "SYS", (0, 1, "NV4"), (2, 3, "NV4")), "has NVLinks to no GPUs, 4 others to 1"),
        "one GPU": (
            _mesh(8, "NV18", *((*pair, "SYS") for pair in last)),
            "has NVLinks to no GPUs, 7 others to 6",
        ),
        "one link": (
            _mesh(8, "NV18", *((*pair, "NV17") for pair in last)),
            "is joined by NV17, 7 others by NV18",
        ),
    }
    for rows, text in faults.values():
        assert text in _found(_matrix(rows), tmp_path)[0].seen
    (found,) = _found(ROCM, tmp_path)
    assert found.seen == "XGMI is missing between GPU0-GPU3 PCIE"


def test_a_rank_away_from_its_gpu_is_found_with_a_snapshot(tmp_path: Path) -> None:
    from tests.machines.cases import CASES

    case = CASES["topology-of-a-matrix"]
    found = run_rules(AuditedJob(case.snapshots(tmp_path), topo=case.topo), ["P09"]).findings
    assert [(f.severity, f.hosts, f.place) for f in found if "runs on" in f.seen] == [("F", ("n1",), "local rank 0")]


def test_what_is_no_whole_matrix_is_refused(tmp_path: Path) -> None:
    cut = _matrix(_mesh(4, "NV4"))
    for text, message in (
        ("", "no matrix"),
        ("node1:1:1 [0] NCCL INFO Using network IB\n", "no matrix"),
        (cut[:-60] + "\n", "cut or wrapped"),
        ("\tGPU0\tGPU1\n", "no matrix"),
        ("x" * 100_000, "no matrix"),
    ):
        with pytest.raises(UsageError, match=message):
            _found(text, tmp_path)
