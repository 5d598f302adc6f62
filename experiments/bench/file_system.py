"""Counts what a traced rank asks of its file systems: `python -m experiments.bench.file_system`.

A small job of one rank with a step every 20 ms runs under strace: untraced, traced into the run, and traced with
`trace.trace_dir`. Calls that name a file below the run's folder, which a cluster has on a shared file system, are
counted apart from those below the local folder, and those during training apart from those at start and end. Counts a
second do not depend on how much strace slows the job down, as flushes go by time.

Then ranks without strace show when in the second each of them flushes.

Options:
  --steps N           steps of each job [1000]
  --flushing-ranks N  ranks of the job that shows when they flush [4]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from experiments.options import command_line
from hpcpace.core.text import NS_PER_S
from hpcpace.trace.reader import read_trace

_JOB = """
import os, sys, time
import torch, torch.distributed as dist
import hpcpace
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hpcpace.session(run_dir=sys.argv[1], name="job") as session:
    session.watch(model)
    for step in range(int(sys.argv[2])):
        if step == 5:
            os.path.exists("/mark/begin")
        for _ in range(4):
            model(torch.ones(8, 64)).sum().backward()
            dist.all_reduce(model.weight.grad)
        optimizer.step()
        session.step(samples=8)
        time.sleep(0.02)
    os.path.exists("/mark/end")
"""
_CALL = re.compile(r"\d+ +([\d.]+) (\w+)\((.*)\) += (-?\d+)")
_MARK = re.compile(r'\d+ +([\d.]+) .*"/mark/(begin|end)"')
_KINDS = {
    **dict.fromkeys(("open", "openat", "creat"), "opens"),
    **dict.fromkeys(("stat", "lstat", "newfstatat", "fstat", "statx", "access", "faccessat2", "readlink"), "stats"),
    **dict.fromkeys(("unlink", "unlinkat", "rename", "renameat", "renameat2", "rmdir"), "removes, renames"),
    **dict.fromkeys(("mkdir", "mkdirat"), "folders made"),
    **dict.fromkeys(("fsync", "fdatasync"), "syncs"),
    **dict.fromkeys(("ftruncate", "fallocate"), "changes of size"),
    **dict.fromkeys(("flock", "fcntl"), "locks"),
    **dict.fromkeys(("getdents64",), "lists"),
    **dict.fromkeys(("read", "pread64"), "reads"),
    **dict.fromkeys(("write", "pwrite64", "writev", "pwritev"), "writes"),
}
_LOCKS = re.compile(r"F_(OFD_)?SETLKW?\b|LOCK_")
_ONE_RANK = {
    **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"},
}


@dataclass(frozen=True)
class Call:
    """A call that names a file below a folder: the part of the job that it is in, its kind and its result."""

    part: str
    kind: str
    result: int


def main() -> None:
    args = command_line(__doc__)
    has_strace = shutil.which("strace") is not None
    if not has_strace:
        print("calls are not counted: strace is not installed (apt install strace)")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        for name, variables in (
            ("untraced", {"HPCPACE_OPT_OUT": "1"}),
            ("into the run", {}),
            ("with trace_dir", {"HPCPACE_TRACE_TRACE_DIR": str(base / "local")}),
        )[: None if has_strace else 0]:
            log = _observe(base, name.replace(" ", "-"), variables, args.steps)
            for place in ("shared", "local"):
                calls, training_s = read_calls(log.read_text(errors="replace"), str(base / place))
                _print(f"{name}, {place}", calls, training_s)
        _print_spread(base / "spread", min(args.steps, 300), args.flushing_ranks)


def _observe(base: Path, name: str, variables: dict[str, str], num_steps: int) -> Path:
    """Run the job of one rank under strace, and return strace's log."""
    log, program = base / f"{name}.strace", base / "job.py"
    program.write_text(_JOB)
    (base / "shared").mkdir(exist_ok=True)
    # A `?`: some of the calls do not exist on every kind of processor.
    calls = ",".join(f"?{call}" for call in _KINDS)
    strace = ["strace", "-f", "--seccomp-bpf", "-y", "-ttt", "-e", "signal=none", "-e", f"trace={calls}", "-o", log]
    subprocess.run(
        [*strace, sys.executable, program, base / "shared" / name, str(num_steps)],
        env={**os.environ, **_ONE_RANK, **variables},
        check=True,
    )
    return log


def read_calls(log: str, below: str) -> tuple[list[Call], float]:
    """Return the calls that name a file below a folder, and how many seconds the training part lasted.

    Args:
        log: of `strace -f -y -ttt`.
        below: path of the folder.
    """
    part, marks, calls = "start", dict[str, float](), []
    for line in log.splitlines():
        if mark := _MARK.match(line):
            marks[mark[2]] = float(mark[1])
            part = "training" if mark[2] == "begin" else "end"
        elif below in line and (found := _CALL.match(line.replace(" <unfinished ...>", ") = 0"))):
            kind = _KINDS.get(found[2], "")
            if kind and (kind != "locks" or _LOCKS.search(found[3])):
                calls.append(Call(part, kind, int(found[4])))
    return calls, marks["end"] - marks["begin"]


def _print(title: str, calls: list[Call], training_s: float) -> None:
    print(title)
    for part in ("start", "training", "end"):
        of_part = [call for call in calls if call.part == part]
        seconds, unit = (training_s, " a second") if part == "training" else (1.0, "")
        counts = Counter(call.kind for call in of_part)
        written = sum(max(call.result, 0) for call in of_part if call.kind == "writes") / 1024
        names = ", ".join(f"{count / seconds:.3g} {kind}" for kind, count in sorted(counts.items()))
        print(f"  {part}: {names + f'; {written / seconds:.1f} KiB written{unit}' if of_part else 'nothing'}")


def _print_spread(run: Path, num_steps: int, num_ranks: int) -> None:
    """Print where in the second the ranks of one node flush."""
    program = run.with_suffix(".py")
    program.write_text(_JOB)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", program]
    variables = {"OMP_NUM_THREADS": "1", "HPCPACE_TRACE_SUMMARY": "false"}
    subprocess.run([*torchrun, run, str(num_steps)], check=True, env={**os.environ, **variables})
    for path in sorted((run / "attempt-0" / "trace").glob("*.h5")):
        times = read_trace(path).tables["account"]["time_ns"][1:-1] / NS_PER_S % 1
        print(f"{path.stem} flushes at {' '.join(f'{time:.2f}' for time in times)} of the second")


if __name__ == "__main__":
    main()
