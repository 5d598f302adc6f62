"""Where a step measures: its sizes on a GPU or in a rehearsal, its folder, and how it runs programs there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpcpace.core.rundir import open_run
from hpcpace.trace.reader import RankTrace, read_trace

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("job.py")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a step measures.

    Attributes:
        name: of the step.
        folder: for what it leaves behind: runs, profiles, dumps.
        is_rehearsal: whether it runs on CPUs, over gloo in place of NCCL, with small sizes.
        may_set_clocks: whether it may lower the clocks of the GPU.
        figures: what it has found so far, by name; written at once, so that a step that is killed leaves it.
    """

    name: str
    folder: Path
    is_rehearsal: bool
    may_set_clocks: bool = False
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """The device of jobs."""
        return "cpu" if self.is_rehearsal else "cuda"

    @property
    def backend(self) -> str:
        """The backend of a world of one."""
        return "gloo" if self.is_rehearsal else "nccl"

    def choose(self, on_gpu: Any, in_rehearsal: Any) -> Any:
        """Return a size for a GPU, or that for a rehearsal."""
        return in_rehearsal if self.is_rehearsal else on_gpu

    def note(self, **figures: Any) -> None:
        """Keep figures."""
        self.figures.update(figures)
        figures_file(self.folder).write_text(json.dumps(self.figures, indent=1, default=str))

    def run(
        self,
        *command: object,
        environ: Mapping[str, str] | None = None,
        codes: Container[int] = (0,),
        read: Callable[[str], None] = lambda line: None,
        is_json: bool = False,
    ) -> str:
        """Run a program, with its output in the log of the step, and return the output.

        Args:
            command: its words.
            environ: variables besides those of this process.
            codes: exit codes that are well.
            read: takes each line as it comes, for a program that may be killed.
            is_json: whether its stderr goes to the log alone.

        Raises:
            RuntimeError: it ends with another exit code.
        """
        words = [str(word) for word in command]
        print(f"$ {' '.join(words)}", flush=True)
        # Ranks of a rehearsal share cores: reports look for other causes, and more threads would be in the way.
        settings = {"HPCPACE_TRAIN_SHARED_CORES": "1", "OMP_NUM_THREADS": "1"} if self.is_rehearsal else {}
        lines = []
        with subprocess.Popen(
            words,
            env={**os.environ, **settings, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=None if is_json else subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                print(line, end="", flush=True)
                lines.append(line)
                read(line)
        print(f"exit code {child.returncode}", flush=True)
        if child.returncode not in codes:
            last = next((line for line in reversed(lines) if line.strip()), "no output").strip()
            raise RuntimeError(f"{' '.join(words[1:5])} ... ended with {child.returncode}: {last[:200]}")
        return "".join(lines)

    def hpcpace(self, *arguments: object, **options: Any) -> str:
        """Run a command of hpcpace."""
        return self.run(sys.executable, "-m", "hpcpace", *arguments, **options)

    def bench(self, name: str, *arguments: object) -> str:
        """Run a benchmark and return what it prints."""
        return self.run(sys.executable, "-m", f"experiments.bench.{name}", *arguments)

    def job(self, run: Path, *arguments: object, ranks: int = 1, trace: Sequence[object] = (), **options: Any) -> str:
        """Run the job of job.py on some ranks under torchrun, traced from outside."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        words = [*launch, JOB, "--device", self.device, *arguments]
        return self.hpcpace("trace", "--run-dir", run, *trace, "--", *words, **options)

    def report(self, run: Path) -> dict[str, Any]:
        """Return the summary of a run's report."""
        summary: dict[str, Any] = json.loads(self.hpcpace("report", "--json", run, codes=(0, 1, 3), is_json=True))
        return summary


def figures_file(folder: Path) -> Path:
    """Return the file of a step's figures."""
    return folder / "figures.json"


def verdict_words(summary: Mapping[str, Any]) -> str:
    """Return the headline of a report, with its confidence."""
    verdict = summary["verdict"]
    return f"{verdict['headline']} (confidence {100 * verdict['confidence']:.0f} %)"


def answer(is_right: bool, words: str) -> str:
    """Return a judged figure: yes or no, and what it is judged by."""
    return f"{'yes' if is_right else 'NO'}: {words}"


def traces_of(run: Path) -> list[RankTrace]:
    """Return the traces of a run's last attempt."""
    attempt = open_run(run).last_attempt()
    return [read_trace(path) for path in sorted(attempt.trace_dir.glob("rank-*.h5"))]


def device_share(traces: Sequence[RankTrace]) -> str:
    """Return how many phases and steps have times on the device, in words."""
    columns = [
        trace.tables[table]["device_end_ns"]
        for trace in traces
        for table in ("phases", "steps")
        if "device_end_ns" in trace.tables[table]
    ]
    marks = np.concatenate(columns) if columns else np.zeros(0)
    return f"{np.count_nonzero(marks)} of {len(marks)}"
