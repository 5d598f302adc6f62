"""Hold each module of tests to the number of its tests that ran at the last landing: floors.py [--write] TIER...

pytest leaves build/TIER.xml; .ci/floors.txt has a line `TIER MODULE NUMBER` for each module that ran in a tier. A tier
fails if a test was skipped or failed, if a module has fewer tests than its floor or is missing, and if the file does
not know a module, so that no kind of test gets lost unseen. After tests were added, moved or joined, --write brings the
file up to date from the tiers that ran.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = Path(__file__).with_name("floors.txt")

Floors = dict[str, Counter[str]]
"""How many tests each module has, by tier."""


def main() -> int:
    """Check or write the floors of the tiers that were named; return the exit code."""
    tiers = [name for name in sys.argv[1:] if name != "--write"]
    floors = read_floors(FLOORS.read_text(encoding="utf-8") if FLOORS.exists() else "")
    problems = []
    for tier in tiers:
        ran, unfit = tests_of(ROOT / "build" / f"{tier}.xml")
        print(f"{tier}: {ran.total()} passed in {len(ran)} modules, {len(unfit)} skipped or failed")
        problems += unfit
        if "--write" in sys.argv:
            floors[tier] = ran
        else:
            problems += below_floors(tier, ran, floors.get(tier, Counter()))
    if "--write" in sys.argv:
        FLOORS.write_text(written(floors), encoding="utf-8")
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


def tests_of(path: Path) -> tuple[Counter[str], list[str]]:
    """Return how many tests passed in each module, and one line for each that was skipped or failed."""
    ran: Counter[str] = Counter()
    unfit = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("skipped", "failure", "error")), None)
        if outcome is None:
            ran[case.get("classname", "")] += 1
        else:
            unfit.append(f"{case.get('classname')}::{case.get('name')}: {outcome}")
    return ran, unfit


def below_floors(tier: str, ran: Counter[str], floors: Counter[str]) -> list[str]:
    """Return a line for each module that lost tests, and for each that the floors do not know."""
    lost = [
        f"{tier}: {module} ran {ran[module]} tests, not {least}: bring them back, or lower its line in .ci/floors.txt"
        for module, least in sorted(floors.items())
        if ran[module] < least
    ]
    new = [
        f"{tier}: .ci/floors.txt does not know {module}: run .ci/floors.py --write {tier} after the tier"
        for module in sorted(ran.keys() - floors.keys())
    ]
    return lost + new


def read_floors(text: str) -> Floors:
    """Return the floors in the text of the file."""
    floors: Floors = {}
    for line in filter(None, text.splitlines()):
        tier, module, number = line.split()
        floors.setdefault(tier, Counter())[module] = int(number)
    return floors


def written(floors: Floors) -> str:
    """Return the text of the file."""
    return "".join(
        f"{tier} {module} {number}\n" for tier, modules in floors.items() for module, number in sorted(modules.items())
    )


if __name__ == "__main__":
    sys.exit(main())
