"""The kinds of runs that are scored: each cell draws its scenarios from a seed, so that layouts and sizes vary in it.

Even seeds are there to develop with, odd ones only to report.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from experiments.pages import read_toml
from experiments.score.scenario import Scenario

SeedSet = Literal["develop", "report"]
POWER_SIZES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.10, 0.15, 0.20)
POWER_LEVELS = (0.01, 0.02, 0.05, 0.10)


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
        """Return the scenario of a seed."""
        drawn = self.draw(np.random.default_rng([seed, *self.name.encode()]))
        return Scenario(seed=run_seed(self.name, seed), **drawn)


def run_seed(cell: str, seed: int) -> int:
    """Return the own seed of a run: another one in each cell, and even where the seed in the cell is."""
    return 1000 * (zlib.crc32(cell.encode()) % 1_000_000) + seed


def seeds(number: int, of: SeedSet) -> Iterator[int]:
    """Yield that many seeds of a set."""
    yield from range(0 if of == "develop" else 1, 2 * number, 2)


def pick(random: np.random.Generator, *values: Any) -> Any:
    """Return one of some values."""
    return values[int(random.integers(len(values)))]


def _data_parallel(random: np.random.Generator) -> dict[str, Any]:
    """Draw a job of 8 to 256 ranks, on at least two leaves where it has more than 16."""
    num_ranks = pick(random, 8, 16, 32, 64, 64, 128, 256)
    return {
        "num_ranks": num_ranks,
        "ranks_per_node": pick(random, 1, 4) if num_ranks <= 32 else pick(random, 4, 8),
        "nodes_per_leaf": 4,
        "num_steps": pick(random, 50, 200, 200),
        "clock_interval_s": pick(random, 0.0, 30.0),
    }


def _piped(random: np.random.Generator) -> dict[str, Any]:
    """Draw a job with several pipelines."""
    num_stages, num_replicas = pick(random, 2, 4, 4, 8), pick(random, 4, 8, 16)
    return {
        "num_ranks": num_stages * num_replicas,
        "num_stages": num_stages,
        "num_microbatches": pick(random, 8, 16),
        "ranks_per_node": pick(random, 1, 2, 4),
        "num_steps": pick(random, 50, 200),
    }


def _any(random: np.random.Generator) -> dict[str, Any]:
    return _data_parallel(random) if random.random() < 0.6 else _piped(random)


def _linked(random: np.random.Generator) -> dict[str, Any]:
    """Draw a job with two ranks a node and two nodes a leaf, in which every link carries its own set of groups."""
    return {
        "num_stages": 8,
        "num_ranks": pick(random, 32, 64, 128),
        "ranks_per_node": 2,
        "nodes_per_leaf": 2,
        "num_steps": pick(random, 50, 200),
    }


def _noise(random: np.random.Generator, *levels: float) -> dict[str, Any]:
    kind = pick(random, "normal", "lognormal", "heavy", "periodic", "common_mode", "per_node")
    return {"noise": kind, "level": pick(random, *levels)}


def _in_fours(random: np.random.Generator) -> dict[str, Any]:
    return _data_parallel(random) | {"ranks_per_node": 4}


def _lone_pipeline(random: np.random.Generator) -> dict[str, Any]:
    return {"num_ranks": 8, "num_stages": 8, "ranks_per_node": pick(random, 1, 4), "num_steps": 200}


LAYOUTS: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    **{"any": _any, "data_parallel": _data_parallel, "piped": _piped, "linked": _linked, "in_fours": _in_fours},
    **{"lone_pipeline": _lone_pipeline, "given": lambda _: {}},
}
_USUAL_LEVELS = (0.01, 0.02, 0.05)


def _cell(row: dict[str, Any]) -> Cell:
    """Return the cell of a row of cells.toml."""
    fixed = dict(row)
    own = {name: fixed.pop(name) for name in ("name", "title", "cost") if name in fixed}
    layout, fault = LAYOUTS[fixed.pop("layout")], fixed.pop("fault", "none")
    sizes, levels = fixed.pop("sizes", [0.0]), fixed.pop("levels", _USUAL_LEVELS)

    def draw(random: np.random.Generator) -> dict[str, Any]:
        return {**layout(random), **_noise(random, *levels), "size": pick(random, *sizes), "fault": fault, **fixed}

    return Cell(draw=draw, **own)


def _on_devices(cell: Cell) -> Cell:
    """Return a cell of runs on devices whose hosts are ahead, or wait for them at the end of each step."""

    def draw(random: np.random.Generator) -> dict[str, Any]:
        return cell.draw(random) | {"device": pick(random, "synchronised", "ahead")}

    return Cell(name=f"{cell.name}-device", title=f"{cell.title}, on devices", draw=draw, cost=4 * cell.cost)


_ROWS = read_toml(__file__)
_ON_HOSTS = tuple(map(_cell, _ROWS["cell"]))
CELLS: tuple[Cell, ...] = (*_ON_HOSTS, *map(_on_devices, _ON_HOSTS), *map(_cell, _ROWS["device"]))

_FAULTS = ["none", "slow_rank", "slow_node", "transient", "input_bound", "communication_bound", "contention", "hang"]


def _lost_cell(row: dict[str, Any]) -> Cell:
    """Return a cell whose traces cannot carry a verdict on all of the job; of values in a list one is drawn."""
    values = dict(row)
    own = {name: values.pop(name) for name in ("name", "title")}
    faults = values.pop("faults", _FAULTS)

    def draw(random: np.random.Generator) -> dict[str, Any]:
        drawn = {**_any(random), **_noise(random, *_USUAL_LEVELS)}
        drawn |= {"fault": pick(random, *faults), "size": pick(random, 0.10, 0.20, 0.40)}
        if drawn["fault"] == "none":
            drawn["size"] = 0.0
        return drawn | {name: pick(random, *of) if isinstance(of, list) else of for name, of in values.items()}

    return Cell(draw=draw, **own)


LOST_CELLS: tuple[Cell, ...] = tuple(map(_lost_cell, _ROWS["lost"]))


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
