"""The steps of first light in their order: what each answers, and how long it may take.

Its cells are the figures that the page shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.cases import cases_of, read_toml

TOTAL_S = 540
"""Limit of all together: less than the time for which a machine with a GPU may be lent."""
SETUP_S = 60
"""Limit of the installation, which first_light.sh keeps to."""
REHEARSAL_FACTOR = 8
"""How much longer a step may take in a rehearsal: four ranks may share two cores, and these with others."""


def limits(arguments: Sequence[str]) -> tuple[int, int]:
    """Return the seconds that all may take, and those that the installation may take of them."""
    factor = REHEARSAL_FACTOR if "--rehearse" in arguments else 1
    return factor * TOTAL_S, factor * SETUP_S


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step.

    Attributes:
        name: short name, for `--only`, and of its files.
        measure: what measures it, in `experiments.gpu.measures.MEASURES`.
        title: what it does.
        limit_s: seconds after which all its processes are killed.
        cells: questions by the name of the figure that answers them.
    """

    name: str
    measure: str
    title: str
    limit_s: int
    cells: Mapping[str, str]


STEPS = cases_of(Step, read_toml(__file__)["step"])
