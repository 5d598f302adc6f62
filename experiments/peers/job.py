"""The script that all tools trace: two ranks of DistributedDataParallel over gloo, with one fault.

It marks two moments, between which its steps count, and the processor time of all of its processes: ranks, launcher,
and what a tool runs besides them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

SLOW_RANK = 1
WARMUP_STEPS = 50
DEVICE_S = 0.002
"""Of a forward pass, and half of a backward pass: two ranks that compute without a break leave a tool no core."""
FAULT_S = 0.012
"""Of every step, as a fault."""
STALL_S, STALL_STEPS = 0.2, 25
SAVE_STEPS, SAVED_VALUES = 25, 2**25
HANG_STEP = 200
MARKS, HANGS, FAULT = "marks.json", "hangs", "fault"
"""Files: the two moments, that the job hangs, and that a fault of the lab has begun."""
_STEPS_OF_FAULT, _STOP = 60, "stop"
_BATCH, _WIDTH, _WIDTHS = 64, 128, {"gradients": 1024, "link": 512}


def burn(seconds: float) -> None:
    """Compute for so long, in time on a core, whatever else runs there."""
    end_ns = time.thread_time_ns() + seconds * 1e9
    while time.thread_time_ns() < end_ns:
        pass


class Numbers(Dataset):
    """Random batches that can be slow to read or to transform."""

    def __init__(self, case: str, rank: int, num_batches: int, width: int) -> None:
        is_slow = rank == SLOW_RANK
        self._read_s = FAULT_S * (case == "loader-all" or (is_slow and case == "loader"))
        self._transform_s = FAULT_S * (is_slow and case == "transform")
        self._length, self._batch = num_batches, torch.randn(_BATCH, width)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self._length:
            raise IndexError(index)
        if self._read_s:
            time.sleep(self._read_s)
        return self._transform(self._batch.clone())

    def _transform(self, batch: torch.Tensor) -> torch.Tensor:
        burn(self._transform_s)
        return batch


class Backward(torch.autograd.Function):
    """The identity, whose gradient takes a while."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, burn_s: float) -> torch.Tensor:
        """Return the input."""
        context.burn_s = burn_s
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient."""
        time.sleep(2 * DEVICE_S)
        burn(context.burn_s)
        return gradient, None


class Model(nn.Module):
    """A perceptron that waits in each pass, as for a device, and has a place for a fault there."""

    def __init__(self, case: str, rank: int, width: int) -> None:
        super().__init__()
        self._forward_s, self._backward_s = (
            FAULT_S * (rank == SLOW_RANK and case == stage) for stage in ("forward", "backward")
        )
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(DEVICE_S)
        burn(self._forward_s)
        return Backward.apply(self.layers(x), self._backward_s)


def mark(step: int, folder: Path, marks: list[dict[str, float]]) -> None:
    """Write down the time, and the processor time of all processes of the job, tool and launcher included."""
    usage = os.environ.get("PEERS_USAGE")
    cpu_s = int(Path(usage).read_text()) / 1e9 if usage else 0.0
    marks.append({"step": step, "wall_s": time.monotonic(), "cpu_s": cpu_s})
    (folder / MARKS).write_text(json.dumps(marks))


def last_step(rank: int, step: int, folder: Path) -> int | None:
    """Return the last step of a job whose fault has begun, some steps later; None before all ranks can know it."""
    if rank == 0 and (folder / FAULT).exists() and not (folder / _STOP).exists():
        (folder / _STOP).write_text(f"{step + _STEPS_OF_FAULT:6}")
    text = (folder / _STOP).read_text() if (folder / _STOP).exists() else ""
    return int(text) if text else None


def between_steps(case: str, rank: int, step: int, folder: Path) -> None:
    """Let a fault that does not strike in every step strike here."""
    if case == "stalls" and rank == SLOW_RANK and step % STALL_STEPS == 0:
        time.sleep(STALL_S)
    if case == "checkpoint" and rank == 0 and step % SAVE_STEPS == 0:
        torch.save(torch.zeros(SAVED_VALUES), folder / "checkpoint.pt")
    if case == "hang" and rank == SLOW_RANK and step == HANG_STEP:
        (folder / HANGS).touch()
        time.sleep(3600)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("tool")
    parser.add_argument("steps", type=int)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, width = dist.get_rank(), _WIDTHS.get(args.case, _WIDTH)
    model = nn.parallel.DistributedDataParallel(Model(args.case, rank, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Numbers(args.case, rank, args.steps, width), batch_size=None)
    in_step: Any = nullcontext
    if args.tool == "TraceML":  # as its README says for a loop of one's own
        import traceml_ai as traceml

        traceml.init(mode="auto")
        in_step = partial(traceml.trace_step, model)
    marks: list[dict[str, float]] = []
    for step, batch in enumerate(loader):
        last = (last_step(rank, step, args.folder) if args.case == "link" else None) or args.steps - 1
        if rank == 0 and step in (WARMUP_STEPS, last):
            mark(step, args.folder, marks)
        with in_step():
            optimizer.zero_grad(set_to_none=True)
            model(batch).square().mean().backward()
            optimizer.step()
            between_steps(args.case, rank, step, args.folder)
        if step == last:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
