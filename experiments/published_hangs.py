"""Published hangs of known truth: what is found in the Flight Recorder dumps of NVIDIA/nvidia-resiliency-ext.

    python -m experiments.published_hangs [FOLDER] [--write]

FOLDER is `tests/attribution/unit/fr_traces` of a checkout; by default the copy in tests/data is used. Each scenario is
judged with all of its 16 dumps, and 200 times with half of them left out at random. `--write` puts the table into
docs/results/hang-published.md.

Options:
  folder PATH?  of a checkout; default: the copy in tests/data
  --write       put the table into docs/results/hang-published.md
"""

from __future__ import annotations

import random
import re
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from experiments import pages
from experiments.options import command_line
from hpcpace.core.text import rank_list
from hpcpace.hang.rules import find_hang
from hpcpace.hang.views import Hang
from hpcpace.runs.imports.dump_view import job_view
from hpcpace.runs.imports.dumps import Dumps, read_dumps

ARCHIVE = pages.ROOT / "tests" / "data" / "flight-recorder" / "nvidia-resiliency-ext.tar.xz"
DOCUMENT = pages.RESULTS / "hang-published.md"
TIMES = 200


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A published hang: its name, the ranks in which a fault was injected, and the dumps."""

    name: str
    injected: frozenset[int]
    dumps: Dumps

    def verdict(self) -> Hang | None:
        """Return what is found in all dumps."""
        return find_hang(job_view(self.dumps))

    def half_verdicts(self, times: int, seed: int = 0) -> Counter[str]:
        """Return how often which kind of answer is given with half of the dumps, chosen at random."""
        chance = random.Random(f"{self.name} {seed}")
        ranks = sorted(self.dumps.by_rank)
        found: Counter[str] = Counter()
        for _ in range(times):
            kept = {rank: self.dumps.by_rank[rank] for rank in chance.sample(ranks, len(ranks) // 2)}
            found[self._answer(find_hang(job_view(replace(self.dumps, by_rank=kept))))] += 1
        return found

    def _answer(self, hang: Hang | None) -> str:
        if hang is None or not (hang.culprits or hang.could_be):
            return "cannot tell"
        if hang.culprits:
            return "injected ranks alone" if set(hang.culprits) <= self.injected else "a wrong rank"
        return "a set with an injected rank" if self.injected & set(hang.could_be) else "a set without one"


ANSWERS = ("injected ranks alone", "a set with an injected rank", "cannot tell", "a set without one", "a wrong rank")


@contextmanager
def published(folder: Path | None = None) -> Iterator[list[Scenario]]:
    """Give the scenarios of a folder, or of the copy in tests/data."""
    with tempfile.TemporaryDirectory() as temporary:
        if folder is None:
            with tarfile.open(ARCHIVE) as archive:
                archive.extractall(temporary, filter="data")
            folder = Path(temporary) / "fr_traces"
        yield [_scenario(place) for place in sorted(folder.iterdir()) if place.is_dir()]


def _scenario(place: Path) -> Scenario:
    injected = re.findall(r"^Rank (\d+), fault_type", (place / "fault_injection.log").read_text(), re.MULTILINE)
    return Scenario(name=place.name, injected=frozenset(map(int, injected)), dumps=read_dumps([place]))


def table(scenarios: list[Scenario], times: int = TIMES) -> str:
    """Return what is found as a table of Markdown."""
    rows = []
    for scenario in scenarios:
        hang = scenario.verdict()
        named = f"{rank_list(hang.culprits)}: {hang.kind.value}" if hang is not None else "nobody"
        halves = scenario.half_verdicts(times)
        injected = rank_list(sorted(scenario.injected))
        rows.append([scenario.name, injected, named, *(halves[answer] for answer in ANSWERS)])
    return pages.table(("scenario", "injected", "named, with all 16 dumps", *ANSWERS), rows)


def main() -> None:
    """Print the table, or put it into the document."""
    arguments = command_line(__doc__)
    with published(arguments.folder) as scenarios:
        found = table(scenarios)
    if not arguments.write:
        print(found)
        return
    dated = f"Measured on {pages.today()}:\n\n{found}"
    DOCUMENT.write_text(pages.with_marked(DOCUMENT.read_text(), "published hangs", dated))


if __name__ == "__main__":
    main()
