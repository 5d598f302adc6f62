"""The tests that need a GPU, counted as they end, so that a time limit leaves those that were done."""

from __future__ import annotations

import re
import sys
from collections import Counter

from experiments.gpu.place import Place

_DONE = re.compile(r"tests/gpu/(\S+?::\S+) (PASSED|FAILED|ERROR|SKIPPED)")


def measure(place: Place) -> None:
    """Measure."""
    outcomes: dict[str, str] = {}

    def read(line: str) -> None:
        if found := _DONE.match(line):
            outcomes[found[1]] = found[2].lower()
            counts = Counter(outcomes.values())
            wrong = [name.rpartition("::")[2] for name, outcome in outcomes.items() if outcome in ("failed", "error")]
            place.note(
                tests=", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())),
                failed=", ".join(wrong) or "none",
            )

    options = ("-v", "-p", "no:cacheprovider", "-m", "gpu", "--color", "no")
    place.run(sys.executable, "-m", "pytest", *options, "tests/gpu", read=read, codes=(0, 1))
    if place.is_rehearsal:
        place.note(tests=f"{place.figures['tests']}; left out: all that the tests do, which needs CUDA")
