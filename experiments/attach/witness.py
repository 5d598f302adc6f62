"""A witness inside the training script: it knows the truth that a trace is judged by, and injects the faults.

Scripts call it in their own loop. It knows nothing of hpcpace, is the same with and without tracing, and writes one
JSON file per rank. A second, torch's own profiler, runs for some steps of rank 0.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SLOW_HOST = "slowhost"
FIRST_PROFILED, LAST_PROFILED = 6, 12
_CLONE_NEWUTS = 0x04000000


def slow_ranks(fault: str, num_ranks: int) -> range:
    """Return the ranks that a fault slows: rank 1, the middle one, or the second half of them, a host by itself."""
    half = num_ranks // 2
    return {"compute": range(1, 2), "loader": range(half, half + 1), "host": range(half, num_ranks)}[fault]


def find_rank(environ: Mapping[str, str]) -> int:
    """Return this process's rank, by its group or else by the variables of its launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(environ.get("RANK") or environ.get("LOCAL_RANK") or 0)


class Slow(torch.nn.Module):
    """Passes its input on; a place for slow compute in a model made of torch's own layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        hold("compute")
        return x


def hold(stage: str, parts: int = 1) -> None:
    """Sleep here if this rank has a fault of the stage, "compute" or "data".

    Args:
        stage: where the call is.
        parts: calls in a step, which share the time.
    """
    fault = os.environ.get("ATTACH_FAULT", "")
    if not fault:
        return
    if stage == ("data" if fault == "loader" else "compute") and find_rank(os.environ) in _slow_ranks(fault):
        time.sleep(float(os.environ["ATTACH_HOLD_S"]) / parts)


class Witness:
    """Writes down each step of this rank, from the script's own loop.

    Args:
        rank: of this process, where the environment does not have it yet.
    """

    def __init__(self, rank: int | None = None) -> None:
        self._steps: list[dict[str, Any]] = []
        self._profile: dict[str, Any] = {}
        self._profiler: Any = None
        self._rank = rank
        self._folder = Path(os.environ["ATTACH_FOLDER"])
        rank = find_rank(os.environ) if rank is None else rank
        if os.environ.get("ATTACH_FAULT") == "host" and rank in _slow_ranks("host"):
            _take_name(SLOW_HOST)

    def step(self, loss: Any, samples: int) -> None:
        """Note that a step ended.

        Args:
            loss: a tensor or number whose bits depend on every step before.
            samples: of this rank in this step.
        """
        value = float(loss.detach().double().sum()) if isinstance(loss, torch.Tensor) else float(loss)
        self._steps.append({"loss": value.hex(), "samples": samples, "end_ns": time.monotonic_ns()})
        rank = find_rank(os.environ) if self._rank is None else self._rank
        if rank == 0 and os.environ.get("ATTACH_PROFILE"):
            self._profile_some()
        truth = {"rank": rank, "steps": self._steps, "profile": self._profile}
        (self._folder / f"witness-{rank}.json").write_text(json.dumps(truth))

    def _profile_some(self) -> None:
        if len(self._steps) == FIRST_PROFILED:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True)
            self._profiler.__enter__()
            self._profile["begin_ns"] = time.monotonic_ns()
        elif len(self._steps) == LAST_PROFILED:
            self._profile["end_ns"] = time.monotonic_ns()
            self._profiler.__exit__(None, None, None)
            self._profiler.export_chrome_trace(str(self._folder / "profile.json"))


def _slow_ranks(fault: str) -> range:
    return slow_ranks(fault, int(os.environ["ATTACH_RANKS"]))


def _take_name(name: str) -> None:
    """Give this process a host name for itself; needs root."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWUTS)")
    socket.sethostname(name)
