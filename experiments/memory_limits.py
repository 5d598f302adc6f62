"""Which sizes of GPT-2 fit into the memory of a rank, alone and shared out, by a limit that the kernel enforces.

`python -m experiments.memory_limits [--folder FOLDER] [--write]` trains each size for two steps, each rank in a control
group of its own. It needs root, control groups of version 1, 20 GiB of memory, and some ten minutes. See
docs/results/memory.md.

Options:
  --folder PATH  keep runs here; runs that are there are not done again
  --write        write docs/results/memory.md
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from experiments.jobs import clean_environ, free_port
from experiments.options import command_line
from experiments.pages import ROOT, command, table, write_page
from hpcpace.core.rundir import RunDirectory
from hpcpace.core.text import plural
from hpcpace.train.models import TensorMemory
from hpcpace.train.settings import GPT2_PRESETS

LIMIT_BYTES = 8 << 30
_SEQ_LEN, _STEPS, _TIMEOUT_S = 128, 2, 900.0
_STATE_BYTES = 16  # of a parameter in float32: itself, its gradient, and two moments of Adam
SIZES = ("small", "medium", "large")
LAYOUTS = {
    "one rank": ("--batch-size", "1"),
    "pipeline of two": ("--mesh", "pp=2", "--batch-size", "2", "--microbatches", "2"),
    "ZeRO 3 over two": ("--mesh", "dp=2", "--zero", "3", "--batch-size", "2"),
}
_TREE = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a training took.

    Attributes:
        codes: exit codes of its ranks.
        peak_bytes: most memory of a rank's control group.
        num_killed: ranks that the kernel killed for memory.
        tensor_bytes: parameters, gradients, optimizer state and activations of the rank with most, by torch; 0 unless
            it finished.
    """

    codes: list[int]
    peak_bytes: int
    num_killed: int
    tensor_bytes: int


def main() -> None:
    args = command_line(__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        rows = []
        for size in SIZES:
            for layout, options in LAYOUTS.items():
                outcome = _outcome(folder / f"{size}-{layout.replace(' ', '-')}", size, options)
                rows.append(_row(size, layout, outcome))
                print(*rows[-1], sep=" | ", flush=True)
    head = ("GPT-2", "ranks", "state by formula", "tensors by torch", "control group", f"{_gib(LIMIT_BYTES)} a rank")
    found = table(head, rows)
    if args.write:
        write_page("memory", command=command("experiments.memory_limits"), limit=_gib(LIMIT_BYTES), found=found)


def _row(size: str, layout: str, outcome: Outcome) -> tuple[str, ...]:
    state_bytes = _STATE_BYTES * GPT2_PRESETS[size].num_parameters / (1 if layout == "one rank" else 2)
    tensors = _gib(outcome.tensor_bytes) if outcome.tensor_bytes else ""
    ended = (
        "fits" if not any(outcome.codes) else f"killed: {outcome.num_killed} of {plural(len(outcome.codes), 'rank')}"
    )
    return size, layout, _gib(state_bytes), tensors, _gib(outcome.peak_bytes), ended


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"


def _outcome(folder: Path, size: str, options: tuple[str, ...]) -> Outcome:
    """Train, unless that was done before."""
    kept = folder / "outcome.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(asdict(_trained(folder, size, options))))
    return Outcome(**json.loads(kept.read_text()))


def _trained(folder: Path, size: str, options: tuple[str, ...]) -> Outcome:
    num_ranks = 1 if "--mesh" not in options else 2
    words = ["gpt2", "--preset", size, "--seq-len", _SEQ_LEN, "--steps", _STEPS, "--run-dir", folder / "run", *options]
    of_all = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0"}
    of_all |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    with _groups(num_ranks) as groups:
        ranks = []
        for rank, group in enumerate(groups):
            environ = clean_environ(**of_all, RANK=str(rank), LOCAL_RANK=str(rank))
            enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
            train = [*enter, sys.executable, "-m", "hpcpace", "train", *map(str, words)]
            with (folder / f"rank-{rank}.log").open("w") as log:
                ranks.append(subprocess.Popen(train, env=environ, stdout=log, stderr=log))
        codes = [rank.wait(_TIMEOUT_S) for rank in ranks]
        peaks = [int((group / "memory.max_usage_in_bytes").read_text()) for group in groups]
        killed = [int((group / "memory.oom_control").read_text().rsplit(maxsplit=1)[1]) for group in groups]
    tensors = 0 if any(codes) else _tensor_bytes(folder / "run")
    return Outcome(codes=codes, peak_bytes=max(peaks), num_killed=sum(map(bool, killed)), tensor_bytes=tensors)


def _tensor_bytes(run: Path) -> int:
    content = json.loads(RunDirectory(run).last_attempt().result_json.read_text())
    names = [field.name for field in fields(TensorMemory)]
    return max(sum(row[name] for name in names) for row in content["peak_memory"])


@contextmanager
def _groups(number: int) -> Iterator[list[Path]]:
    """Yield control groups that hold `LIMIT_BYTES` of memory each; swapping is no way out."""
    groups = [_TREE / f"hpcpace-memory-{rank}" for rank in range(number)]
    for group in groups:
        group.mkdir()
        for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
            (group / name).write_text(str(LIMIT_BYTES))
    try:
        yield groups
    finally:
        for group in groups:
            group.rmdir()


if __name__ == "__main__":
    main()
