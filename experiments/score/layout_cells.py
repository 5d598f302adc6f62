"""Cells of modern jobs on devices: DDP in buckets, FSDP, tensor, expert and pipeline parallelism, each with its truth.

`experiments.score.layouts` plays each job and writes its traces; nothing of hpcpace's own replay is used. What a fault
costs is known by playing the job without it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.score.cells import pick, run_seed
from experiments.score.layouts import MS, Layout
from experiments.score.truth import AMPLIFIED_SHARE, HEALTHY_SHARE, Truth, same_names
from hpcpace.core.rundir import RunDirectory
from hpcpace.diagnosis.summary import Mode
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.tables import RankTrace

_COMMUNICATION_SHARE = 0.10  # of the step, from which naming transfers is right
_BUBBLE_SHARE = 0.08
_LARGE_SHARE = 0.04  # of the jobs that may be large


@dataclass(frozen=True, kw_only=True)
class LayoutScenario:
    """One job of a layout with one fault or none.

    Attributes:
        fault, size: what is wrong, in a word, and by how much; `none` for nothing.
        sound: the attributes of the job without its fault.
        right: the modes that are right where the fault costs enough.
        slow_ranks, slow_node: whose work or whose link it is; empty and -1 for nobody's.
    """

    seed: int
    job: Layout
    fault: str = "none"
    size: float = 0.0
    sound: Mapping[str, Any] = field(default_factory=dict)
    right: tuple[str, ...] = ()
    slow_ranks: tuple[int, ...] = ()
    slow_node: int = -1
    data: str = "sound"

    @property
    def layout(self) -> str:
        return self.job.kind

    @property
    def num_ranks(self) -> int:
        return self.job.num_ranks

    @property
    def num_stages(self) -> int:
        return self.job.pp

    @property
    def num_steps(self) -> int:
        return self.job.num_steps

    @property
    def noise(self) -> str:
        return "normal"

    @property
    def level(self) -> float:
        return self.job.noise

    def names_of(self, rank: int) -> tuple[str, ...]:
        """Return the names of all units that a rank belongs to."""
        names = (f"rank {rank}", f"node g{rank // self.job.per_node}")
        return names if self.job.pp == 1 else (*names, f"slot pp{rank // self.job.tp % self.job.pp}")

    def traces(self) -> list[RankTrace]:
        """Return the traces of the job, through files as a real one's."""
        with tempfile.TemporaryDirectory() as folder:
            self.job.write(Path(folder) / "run")
            return read_attempt(RunDirectory(Path(folder) / "run").attempts()[0]).traces

    def truth(self) -> Truth:
        """Return what is right to say."""
        step_ns = self.job.step_ns()
        healthy = replace(self.job, **self.sound)
        healthy_ns = healthy.step_ns() if self.sound else step_ns
        quiet = replace(healthy, noise=0.0, host_noise=0.0)
        quiet_ns = quiet.step_ns()
        fault_share, noise_share = 1 - healthy_ns / step_ns, (healthy_ns - quiet_ns) / step_ns
        moved_share = 1 - replace(quiet, transfer_ns=0).step_ns() / quiet_ns
        ranks = self.slow_ranks
        culprits = (f"link g{self.slow_node}",) if self.slow_node >= 0 else same_names(self, ranks)
        return Truth(
            modes=self._modes(fault_share, noise_share, moved_share),
            varieties=("", "fixed", "fixed rank", "fixed slot", "fixed node"),
            culprits=culprits,
            ranks=ranks,
            tolerated=tuple(f"phase {name}" for name in ("forward", "backward", "optimizer", "other", "data"))
            if self.fault == "slow_hosts"
            else (),
            is_identifiable=True,
            effect=None,
            fault_share=fault_share,
            noise_share=noise_share,
        )

    def _modes(self, fault_share: float, noise_share: float, moved_share: float) -> tuple[str, ...]:
        modes = [*self.right] if self.right and fault_share > 0.005 else []  # below it, nothing is there to be found
        if noise_share >= HEALTHY_SHARE and noise_share >= 0.5 * fault_share:
            modes.append(Mode.AMPLIFICATION)
        if moved_share >= _COMMUNICATION_SHARE and fault_share < HEALTHY_SHARE:
            modes.append(Mode.COMMUNICATION)
        if noise_share < AMPLIFIED_SHARE and fault_share < HEALTHY_SHARE:
            modes.append(Mode.HEALTHY)
            if (self.job.pp - 1) / (self.job.num_microbatches + self.job.pp - 1) >= _BUBBLE_SHARE:
                modes.append(Mode.IMBALANCE)
            if self.fault == "clock_error":
                modes.append(Mode.CANNOT_TELL)
        return tuple(modes)


@dataclass(frozen=True, kw_only=True)
class LayoutCell:
    """A kind of job; attributes as of `experiments.score.cells.Cell`."""

    name: str
    title: str
    draw: Callable[[np.random.Generator], dict[str, Any]]
    cost: int = 4

    def scenario(self, seed: int) -> LayoutScenario:
        """Return the scenario of a seed."""
        drawn = self.draw(np.random.default_rng([seed, *self.name.encode()]))
        own_seed = run_seed(self.name, seed)
        drawn["job"] = replace(drawn["job"], seed=own_seed)
        return LayoutScenario(seed=own_seed, **drawn)


def _job(random: np.random.Generator, kind: str) -> Layout:
    """Return a sound job of 4 to 1,024 ranks, whose steps take 2 ms to 30 s."""
    is_large = random.random() < _LARGE_SHARE
    pp, tp = 1, 1
    if kind == "pipeline":
        pp, tp = pick(random, 2, 4, 4, 8), pick(random, 1, 1, 2)
    elif kind in ("tensor", "experts"):
        tp = 4
    num_ranks = pick(random, 256, 1024) if is_large else max(pick(random, 4, 8, 8, 16, 32), 2 * pp * tp)
    num_layers = 2 if is_large else pick(random, 4, 8) if kind != "pipeline" else 2
    num_microbatches = 4 if is_large else pick(random, 4, 8)
    num_works = 3 * num_layers * (num_microbatches if kind == "pipeline" else 1)
    step_ns = float(np.exp(random.uniform(np.log(2 * MS), np.log(30_000 * MS))))
    forward_ns = int(step_ns / num_works)
    return Layout(
        kind=kind,
        num_ranks=num_ranks,
        per_node=min(pick(random, 2, 4, 4) if kind == "pipeline" else 4, num_ranks // 2),
        num_steps=40,
        num_layers=num_layers,
        forward_ns=forward_ns,
        transfer_ns=int(forward_ns * random.uniform(0.05, 0.3)),
        noise=pick(random, 0.005, 0.01, 0.02),
        pp=pp,
        tp=tp,
        num_microbatches=num_microbatches,
        reads_loss=bool(random.random() < 0.3),
    )


_KINDS = ("ddp", "fsdp", "tensor", "experts", "pipeline")


def _healthy(random: np.random.Generator) -> dict[str, Any]:
    return {"job": _job(random, pick(random, *_KINDS))}


def _wrong_clock(random: np.random.Generator) -> dict[str, Any]:
    job = _job(random, "experts")
    error_ns = int(random.uniform(0.3, 3.0) * MS) * pick(random, -1, 1)
    node = int(random.integers(1, -(-job.num_ranks // job.per_node)))
    wrong = {"fault": "clock_error", "size": abs(error_ns) / MS}
    return {"job": replace(job, clock_error_ns={node: error_ns}), **wrong}


def _noisy(random: np.random.Generator) -> dict[str, Any]:
    level = pick(random, 0.1, 0.15, 0.2)
    job = _job(random, pick(random, "tensor", "experts"))
    return {"job": replace(job, noise=level), "size": level}


def _slow_hosts(random: np.random.Generator) -> dict[str, Any]:
    issue = float(random.uniform(1.3, 1.5))
    job = _job(random, pick(random, "ddp", "fsdp", "tensor", "pipeline"))
    job = replace(job, issue=issue, host_noise=pick(random, 0.0, 0.02))
    return {"job": job, "fault": "slow_hosts", "size": issue - 1, "sound": {"issue": 0.02}, "right": (Mode.HOST,)}


def _slow_link(random: np.random.Generator) -> dict[str, Any]:
    factor = pick(random, 4.0, 10.0, 20.0)
    job = _job(random, "pipeline")
    if is_plain := bool(random.random() < 0.5):
        job = replace(job, pp=4, tp=1, num_ranks=4, per_node=1)
    else:
        tp = pick(random, 2, 4)
        job = replace(job, pp=4, tp=tp, num_ranks=8 * tp, per_node=tp)
    node = int(random.integers(1, 3 if is_plain else job.num_ranks // job.per_node))
    job = replace(job, slow_links={node: factor})
    slow = {"fault": "slow_nic", "size": factor, "sound": {"slow_links": {}}, "right": (Mode.CONTENTION,)}
    return {"job": job, **slow, "slow_node": node}


def _straggler(kind: str) -> Callable[[np.random.Generator], dict[str, Any]]:
    def draw(random: np.random.Generator) -> dict[str, Any]:
        job, size = _job(random, kind), pick(random, 0.1, 0.2, 0.3, 0.5)
        rank = int(random.integers(job.num_ranks))
        slow = {"fault": "slow", "size": size, "sound": {"slow": {}}, "right": (Mode.STRAGGLER,), "slow_ranks": (rank,)}
        return {"job": replace(job, slow={rank: 1 + size}), **slow}

    return draw


def _slow_host(random: np.random.Generator) -> dict[str, Any]:
    job, factor = _job(random, pick(random, "ddp", "fsdp")), float(random.uniform(1.2, 1.6))
    rank = int(random.integers(job.num_ranks))
    slow = {"fault": "slow_host", "size": factor - 1, "sound": {"slow_hosts": {}}, "right": (Mode.STRAGGLER, Mode.HOST)}
    return {"job": replace(job, slow_hosts={rank: factor / job.issue}), **slow, "slow_ranks": (rank,)}


def _half_of_the_stages(random: np.random.Generator) -> dict[str, Any]:
    job = _job(random, "pipeline")
    size = pick(random, 0.1, 0.25, 0.5)
    ranks = tuple(rank for rank in range(job.num_ranks) if rank // job.tp % job.pp >= job.pp / 2)
    slow = {"fault": "slow_stages", "size": size, "sound": {"slow": {}}, "right": (Mode.IMBALANCE, Mode.STRAGGLER)}
    return {"job": replace(job, slow=dict.fromkeys(ranks, 1 + size)), **slow, "slow_ranks": ranks}


LAYOUT_CELLS: tuple[LayoutCell, ...] = (
    LayoutCell(name="layout-healthy", title="no fault, any layout", draw=_healthy),
    LayoutCell(
        name="layout-clock", title="no fault, expert groups over nodes, a clock 0.3 to 3 ms off", draw=_wrong_clock
    ),
    LayoutCell(name="layout-noise", title="noise between the collectives of tensor and expert groups", draw=_noisy),
    LayoutCell(name="layout-hosts", title="all hosts take 1.3 to 1.5 times as long as devices", draw=_slow_hosts),
    LayoutCell(name="layout-nic", title="pipelines, a node's network 4 to 20 times slower", draw=_slow_link),
    LayoutCell(name="layout-fsdp", title="FSDP, a rank 10 to 50 % slower", draw=_straggler("fsdp")),
    LayoutCell(name="layout-ddp", title="DDP, a rank 10 to 50 % slower", draw=_straggler("ddp")),
    LayoutCell(name="layout-host", title="the host of one rank takes longer than its device", draw=_slow_host),
    LayoutCell(name="layout-stages", title="pipelines, half the stages 10 to 50 % slower", draw=_half_of_the_stages),
)
