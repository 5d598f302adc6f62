"""The kinds of runs that are scored: each cell draws its scenarios from a seed, so that layouts and sizes vary in it.

Even seeds are there to develop with, odd ones only to report.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from experiments.score.scenario import EVERYWHERE, Scenario

SeedSet = Literal["develop", "report"]
POWER_SIZES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.10, 0.15, 0.20)
POWER_LEVELS = (0.01, 0.02, 0.05, 0.10)
_LEVELS = (0.01, 0.02, 0.05, 0.10)
_CLOCK_ERROR_NS = 3_000_000


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A kind of run.

    Attributes:
        title: what happens in it.
        draw: returns everything in a scenario except its seed.
        cost: how much a trace of it costs against most others: that many times fewer are made.
    """

    name: str
    title: str
    draw: Callable[[np.random.Generator], dict[str, Any]]
    cost: int = 1

    def scenario(self, seed: int) -> Scenario:
        """Return the scenario of a seed; its own seed is another one in each cell, and even where this one is."""
        of_cell = 1000 * (zlib.crc32(self.name.encode()) % 1_000_000)
        return Scenario(seed=of_cell + seed, **self.draw(np.random.default_rng([seed, *self.name.encode()])))


def seeds(number: int, of: SeedSet) -> Iterator[int]:
    """Yield that many seeds of a set."""
    yield from range(0 if of == "develop" else 1, 2 * number, 2)


def _pick(random: np.random.Generator, *values: Any) -> Any:
    return values[int(random.integers(len(values)))]


def _data_parallel(random: np.random.Generator) -> dict[str, Any]:
    """Draw a job of 8 to 256 ranks, on at least two leaves where it has more than 16."""
    num_ranks = _pick(random, 8, 16, 32, 64, 64, 128, 256)
    return {
        "num_ranks": num_ranks,
        "ranks_per_node": _pick(random, 1, 4) if num_ranks <= 32 else _pick(random, 4, 8),
        "nodes_per_leaf": 4,
        "num_steps": _pick(random, 50, 200, 200),
        "clock_interval_s": _pick(random, 0.0, 30.0),
    }


def _piped(random: np.random.Generator) -> dict[str, Any]:
    """Draw a job with several pipelines."""
    num_stages, num_replicas = _pick(random, 2, 4, 4, 8), _pick(random, 4, 8, 16)
    return {
        "num_ranks": num_stages * num_replicas,
        "num_stages": num_stages,
        "num_microbatches": _pick(random, 8, 16),
        "ranks_per_node": _pick(random, 1, 2, 4),
        "num_steps": _pick(random, 50, 200),
    }


def _any(random: np.random.Generator) -> dict[str, Any]:
    return _data_parallel(random) if random.random() < 0.6 else _piped(random)


def _linked(random: np.random.Generator) -> dict[str, Any]:
    """Draw a job with two ranks a node and two nodes a leaf, in which every link carries its own set of groups."""
    return {
        "num_stages": 8,
        "num_ranks": _pick(random, 32, 64, 128),
        "ranks_per_node": 2,
        "nodes_per_leaf": 2,
        "num_steps": _pick(random, 50, 200),
    }


def _noise(random: np.random.Generator, *levels: float) -> dict[str, Any]:
    kind = _pick(random, "normal", "lognormal", "heavy", "periodic", "common_mode", "per_node")
    return {"noise": kind, "level": _pick(random, *levels)}


def _cell(
    name: str,
    title: str,
    layout: Callable[[np.random.Generator], dict[str, Any]],
    fault: str = "none",
    sizes: tuple[float, ...] = (0.0,),
    *,
    levels: tuple[float, ...] = (0.01, 0.02, 0.05),
    cost: int = 1,
    **fixed: Any,
) -> Cell:
    def draw(random: np.random.Generator) -> dict[str, Any]:
        drawn = {**layout(random), **_noise(random, *levels), "size": _pick(random, *sizes), "fault": fault}
        return drawn | fixed

    return Cell(name=name, title=title, draw=draw, cost=cost)


def _in_fours(random: np.random.Generator) -> dict[str, Any]:
    return _data_parallel(random) | {"ranks_per_node": 4}


def _lone_pipeline(random: np.random.Generator) -> dict[str, Any]:
    return {"num_ranks": 8, "num_stages": 8, "ranks_per_node": _pick(random, 1, 4), "num_steps": 200}


_SIZES, _LARGE, _TWO, _OF_LINKS = (0.05, 0.10, 0.20, 0.50), (0.10, 0.20, 0.50), (0.20, 0.50), (0.20, 0.50, 1.0)
_WRONG_CLOCK = {"clock_error_ns": _CLOCK_ERROR_NS}
_OF_1024 = {"num_ranks": 1024, "ranks_per_node": 8, "nodes_per_leaf": 16, "num_steps": 200}

CELLS: tuple[Cell, ...] = (
    _cell("healthy", "no fault, noise of 1 %", _any, levels=(0.01,)),
    _cell("jitter", "no fault, noise of 2 to 10 %", _any, levels=(0.02, 0.05, 0.10)),
    _cell("heavy-jitter", "no fault, heavy tails", _any, levels=_LEVELS, noise="heavy"),
    _cell("common-mode", "no fault, noise that all ranks share", _any, levels=_LEVELS, noise="common_mode"),
    _cell("node-jitter", "no fault, noise that ranks of a node share", _any, levels=_LEVELS, noise="per_node"),
    _cell("uneven", "no fault, ranks differ by 1 % for good", _any, spread=0.01),
    _cell("clock-error", "no fault, the clock of a node is 3 ms wrong", _any, **_WRONG_CLOCK),
    _cell("slow-rank", "one slow rank", _any, "slow_rank", _SIZES),
    _cell(
        "slow-rank-clock",
        "one slow rank, and the clock of another node is 3 ms wrong",
        *(_data_parallel, "slow_rank", _SIZES),
        **_WRONG_CLOCK,
    ),
    _cell("slow-node", "one slow node", _any, "slow_node", _SIZES),
    _cell("slow-stage", "one slow stage, several pipelines", _piped, "slow_stage", _SIZES),
    _cell("lone-pipeline", "one slow stage, one pipeline of a rank a stage", _lone_pipeline, "slow_stage", _LARGE),
    _cell("slow-link", "a node's link is slow, several groups", _linked, "slow_link", _OF_LINKS),
    _cell("slow-link-global", "a node's link is slow, one group of all ranks", _in_fours, "slow_link", _LARGE),
    _cell("slow-switch", "a leaf's uplink is slow, several groups", _linked, "slow_switch", _OF_LINKS),
    _cell(
        "slow-switch-global",
        "a leaf's uplink is slow, one group of all ranks",
        lambda random: _in_fours(random) | {"num_ranks": 64},
        *("slow_switch", _LARGE),
    ),
    _cell("rotating", "another slow rank each step", _data_parallel, "rotating", _LARGE),
    _cell("transient", "one slow rank for a quarter of the run", _any, "transient", _TWO),
    _cell("service", "a service on one node every 1.5 s", _data_parallel, "periodic_service", (1.0, 2.0)),
    _cell(
        "service-everywhere",
        "a service on every node every 1.5 s, at different times",
        *(_data_parallel, "periodic_service", _TWO),
        target=EVERYWHERE,
    ),
    _cell("contention", "bursts of other traffic", _any, "contention", _LARGE),
    _cell("input", "input takes long on every rank", _any, "input_bound", _TWO),
    _cell("communication", "large messages", _any, "communication_bound", _TWO),
    _cell("shared-cores", "twice as many ranks as cores", _in_fours, "shared_cores", (0.5, 1.0)),
    _cell("foreign-load", "other processes on the cores of a node", _data_parallel, "foreign_load", _TWO),
    _cell("hang", "a rank never enters an all_reduce", _any, "hang"),
    _cell("large", "one slow rank of 1,024", lambda _: _OF_1024, "slow_rank", _SIZES, cost=10),
)


def _on_devices(cell: Cell) -> Cell:
    """Return a cell of runs on devices whose hosts are ahead, or wait for them at the end of each step."""

    def draw(random: np.random.Generator) -> dict[str, Any]:
        return cell.draw(random) | {"device": _pick(random, "synchronised", "ahead")}

    return Cell(name=f"{cell.name}-device", title=f"{cell.title}, on devices", draw=draw, cost=4 * cell.cost)


DEVICE_CELLS: tuple[Cell, ...] = (
    *(_on_devices(cell) for cell in CELLS),
    _cell("host-bound", "no fault, devices wait for their hosts", _any, device="host_bound"),
)
CELLS += DEVICE_CELLS

_FAULTS = ("none", "slow_rank", "slow_node", "transient", "input_bound", "communication_bound", "contention", "hang")
_CONTRADICTIONS = ("zero_times", "unknown_enums", "exits_before_enters", "overlapping_steps", "wrong_clock")


def _lost_cell(name: str, title: str, *, faults: tuple[str, ...] = _FAULTS, cost: int = 1, **values: Any) -> Cell:
    """Return a cell whose traces cannot carry a verdict on all of the job; of values in tuples one is drawn."""

    def draw(random: np.random.Generator) -> dict[str, Any]:
        drawn = {**_any(random), **_noise(random, 0.01, 0.02, 0.05)}
        drawn |= {"fault": _pick(random, *faults), "size": _pick(random, 0.10, 0.20, 0.40)}
        if drawn["fault"] == "none":
            drawn["size"] = 0.0
        return drawn | {key: _pick(random, *of) if isinstance(of, tuple) else of for key, of in values.items()}

    return Cell(name=name, title=title, draw=draw, cost=cost)


_SLOW = ("slow_rank", "slow_node")
_MISSING: dict[str, Any] = {"data": "missing", "lost_share": 0.0}
_CULPRIT: dict[str, Any] = {**_MISSING, "is_culprit_lost": True, "faults": _SLOW}
_SOME: dict[str, Any] = {"lost_share": (0.0, 0.25), "is_culprit_lost": (False, True)}
_HOST_TIMES: dict[str, Any] = {"data": "host_times", "device": ("synchronised", "ahead")}
_TITLES = {
    "lost-one": "one trace is missing",
    "lost-culprit": "the trace of the slow rank or node is missing",
    "lost-half": "half of the traces are missing",
    "lost-half-culprit": "half of the traces are missing, that of the slow rank or node among them",
    "lost-most": "all traces but one are missing",
    "lost-others": "all traces but that of the slow rank are missing",
    "mixed-runs": "some traces are of another run, or of another start under the same names",
    "contradictory-all": "all traces contradict themselves",
    "contradictory-some": "some traces contradict themselves, or the others by an hour, or lack their operations",
    "host-times": "ranks with a device have times of their hosts alone",
    "host-times-straggler": "ranks with a device have times of their hosts alone, and one rank is 30 % slower",
}
_VALUES: dict[str, dict[str, Any]] = {
    "lost-one": _MISSING,
    "lost-culprit": _CULPRIT,
    "lost-half": {**_MISSING, "lost_share": 0.5},
    "lost-half-culprit": {**_CULPRIT, "lost_share": 0.5},
    "lost-most": {**_MISSING, "lost_share": 0.999},
    "lost-others": {**_MISSING, "lost_share": 0.999, "faults": _SLOW},
    "mixed-runs": {"data": ("other_run", "other_start"), **_SOME},
    "contradictory-all": {"data": _CONTRADICTIONS[:-1], "lost_share": 1.0},
    "contradictory-some": {"data": (*_CONTRADICTIONS, "no_collectives"), **_SOME},
    "host-times": _HOST_TIMES,
    "host-times-straggler": {**_HOST_TIMES, "faults": ("slow_rank",), "size": 0.30},
}
LOST_CELLS: tuple[Cell, ...] = tuple(_lost_cell(name, title, **_VALUES[name]) for name, title in _TITLES.items())


_OF_POWER = {"fault": "slow_rank", "num_ranks": 64, "ranks_per_node": 8}


def power_cells() -> tuple[Cell, ...]:
    """Return a cell of each size of a slow rank and each level of normal noise: 64 ranks, 200 steps."""
    return tuple(
        Cell(
            name=f"power-{size:g}-{level:g}",
            title=f"a rank {size:.0%} slower, noise of {level:.0%}",
            draw=lambda _, size=size, level=level: {**_OF_POWER, "size": size, "level": level},
        )
        for level in POWER_LEVELS
        for size in POWER_SIZES
    )
