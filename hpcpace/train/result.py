"""The progress of a training, as a bar or lines in a log, and its result on disk."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hpcpace.core.environment import RankInfo
from hpcpace.core.errors import TrainingFailed
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import format_bytes, format_count, format_duration, nanoseconds
from hpcpace.train.plan import TrainPlan
from hpcpace.train.settings import GPT2Shape

if TYPE_CHECKING:
    import torch

STYLES = ("auto", "bar", "lines", "off")


class ProgressView:
    """Shows the progress of a run; this one shows nothing, for all ranks but the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, num_steps: int, *, losses: Sequence[float], samples_per_s: float) -> None:
        """Show that `num_steps` are done; the losses known so far are those of the first steps."""

    def note(self, text: str) -> None:
        """Show a line that stays."""


class Bar(ProgressView):
    """A progress bar on stderr."""

    def __init__(self, num_steps: int, *, first_step: int, unit: str, is_forced: bool) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TextColumn(f"loss {{task.fields[loss]}}  {{task.fields[rate]}} {unit}/s  ETA"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True, force_terminal=is_forced or None),
            # Drawing takes time from the rank that it runs on.
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("train", total=num_steps, completed=first_step, loss="-", rate="-")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, num_steps: int, *, losses: Sequence[float], samples_per_s: float) -> None:
        """Move the bar."""
        text = f"{losses[-1]:.4f}" if losses else "-"
        self._bar.update(self._task, completed=num_steps, loss=text, rate=format_count(samples_per_s))

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, highlight=False, markup=False)


class Lines(ProgressView):
    """A line on stderr each time that the losses of some steps have become known."""

    def __init__(self, num_steps: int, *, first_step: int, unit: str) -> None:
        self._total, self._first, self._num_shown, self._unit = num_steps, first_step, first_step, unit
        self._begin_s = time.monotonic()

    def show(self, num_steps: int, *, losses: Sequence[float], samples_per_s: float) -> None:
        """Print the line when there is news."""
        if len(losses) == self._num_shown:
            return
        self._num_shown = len(losses)
        left_s = (time.monotonic() - self._begin_s) / (num_steps - self._first) * (self._total - num_steps)
        left = f"  ETA {format_duration(nanoseconds(left_s))}" if left_s else ""
        print(
            f"step {len(losses)}/{self._total}  loss {losses[-1]:.4f}  {format_count(samples_per_s)} {self._unit}/s"
            + left,
            file=sys.stderr,
            flush=True,
        )

    def note(self, text: str) -> None:
        """Print the line."""
        print(text, file=sys.stderr, flush=True)


def progress_view(style: str, *, num_steps: int, first_step: int = 0, unit: str = "tokens") -> ProgressView:
    """Return the view of a style; `auto` is a bar on a terminal and lines elsewhere.

    Args:
        style: one of STYLES.
        num_steps: steps of the whole training.
        first_step: steps done before.
        unit: what the rate counts.
    """
    if style == "off":
        return ProgressView()
    if style == "bar" or (style == "auto" and sys.stderr.isatty()):
        return Bar(num_steps, first_step=first_step, unit=unit, is_forced=style == "bar")
    return Lines(num_steps, first_step=first_step, unit=unit)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the peak memory of this process so far: `rss_bytes`, and `device_bytes`, 0 without a GPU.

    Linux counts the first (VmHWM of /proc/self/status), torch's caching allocator the second; what CUDA, NCCL and
    libraries take besides torch's tensors is not in it.
    """
    import torch

    device_bytes = int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0
    return {"rss_bytes": _peak_rss_bytes(), "device_bytes": device_bytes}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out.

    On CPUs torch raises a plain RuntimeError, which only its text distinguishes from others ("DefaultCPUAllocator:
    can't allocate memory" in c10/core/impl/alloc_cpu.cpp; NCCL and gloo pass on the words of the system).
    """
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    texts = r"can't allocate memory|not enough memory|CUDA out of memory|Cannot allocate memory|std::bad_alloc"
    return isinstance(error, (RuntimeError, OSError)) and re.search(texts, str(error)) is not None


def memory_facts(device: torch.device, *, rank: int, host: str) -> dict[str, Any]:
    """Return what a run records of the memory of a rank."""
    return {"rank": rank, "host": host, **peak_memory(device)}


def _peak_rss_bytes() -> int:
    # ru_maxrss would do as well, had it not the peak of the process that this one was started from.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


RESULT_SCHEMA = "hpcpace-result/2"


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a run.

    Attributes:
        losses: mean loss over the global batch, one a step from step 0 on, also where this attempt began later; the
            same on every rank.
        evaluations: facts of the evaluations, in order.
        samples_per_s: samples of all ranks per second of this attempt's steps after the warm-up, with evaluations and
            checkpoints, seen from this rank; 0 where no step was left.
        samples_unit: tokens or images.
        dtype: type of the computation, as `--dtype` names it.
        first_step: the step that this attempt began with.
        stopped_by: the signal that ended it early; empty if all steps were done.
        peak_memory: the most memory of each rank: rank, host, rss_bytes, device_bytes.
        run: the run directory; None where none could be made.
    """

    losses: Sequence[float]
    evaluations: Sequence[Mapping[str, Any]]
    samples_per_s: float
    samples_unit: str
    dtype: str
    first_step: int
    stopped_by: str
    peak_memory: Sequence[Mapping[str, Any]]
    run: Path | None


def write_result(attempt: Attempt, result: TrainResult) -> None:
    """Write result.json of an attempt; a full disk costs one warning and fails no finished training."""
    outcome = "stopped" if result.stopped_by else "finished"
    content = {"schema": RESULT_SCHEMA, "outcome": outcome, **asdict(result)}
    del content["run"]
    try:
        attempt.write_json(attempt.result_json, content)
    except OSError as error:
        print(f"hpcpace: cannot write {attempt.result_json}: {error.strerror}", file=sys.stderr)


def out_of_memory(
    error: BaseException, *, attempt: Attempt, plan: TrainPlan, info: RankInfo, device: torch.device
) -> TrainingFailed:
    """Record that this rank ran out of memory, and return the error to raise."""
    memory = memory_facts(device, rank=info.rank, host=info.host)
    # Of torch's own text, what it said before where in its source.
    cause = re.sub(r"^\[enforce fail[^\]]*\] [^.]*\. ", "", " ".join(str(error).split())) or type(error).__name__
    content = {"schema": RESULT_SCHEMA, "outcome": "out of memory", "cause": cause, "peak_memory": [memory]}
    with contextlib.suppress(OSError, MemoryError):
        attempt.write_json(attempt.result_json, content, make=True)
    used = memory["device_bytes"] or memory["rss_bytes"]
    return TrainingFailed(
        f"rank {info.rank} on {info.host} is out of memory after {format_bytes(used)}: {_remedy(plan)} ({cause[:120]})"
    )


def _remedy(plan: TrainPlan) -> str:
    if not isinstance(plan.shape, GPT2Shape):
        return f"lower --batch-size ({plan.settings.batch_size}), or use more ranks"
    return (
        f"lower --batch-size ({plan.settings.batch_size}) or --seq-len ({plan.seq_len}), use a smaller --preset than "
        f"{plan.settings.preset}, or more ranks with pp or tp in --mesh or with --zero 3"
    )
