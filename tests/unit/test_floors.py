"""The floors of CI: a lost kind of test fails it."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

SPEC = importlib.util.spec_from_file_location("floors", Path(__file__).parents[2] / ".ci" / "floors.py")
assert SPEC is not None and SPEC.loader is not None
floors = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(floors)

JUNIT = """<testsuites><testsuite tests="5">
<testcase classname="tests.mpi.test_a" name="test_one"/><testcase classname="tests.mpi.test_a" name="test_two"/>
<testcase classname="tests.mpi.test_b" name="test_one"><skipped message="no MPI"/></testcase>
<testcase classname="tests.mpi.test_b" name="test_two"><failure message="wrong"/></testcase>
<testcase classname="tests.mpi.test_b" name="test_three"/>
</testsuite></testsuites>"""


def test_tests_are_counted_by_module_and_those_that_did_not_run_are_named(tmp_path: Path) -> None:
    (tmp_path / "test.xml").write_text(JUNIT)
    ran, unfit = floors.tests_of(tmp_path / "test.xml")
    assert ran == {"tests.mpi.test_a": 2, "tests.mpi.test_b": 1}
    assert unfit == ["tests.mpi.test_b::test_one: skipped", "tests.mpi.test_b::test_two: failure"]


def test_a_module_that_lost_tests_is_named() -> None:
    (line,) = floors.below_floors("test-full", Counter(a=1, b=3), Counter(a=2, b=3))
    assert line.startswith("test-full: a ran 1 tests, not 2")


def test_a_module_that_is_gone_is_named() -> None:
    (line,) = floors.below_floors("test", Counter(a=2), Counter(a=2, b=3))
    assert line.startswith("test: b ran 0 tests, not 3")


def test_a_module_without_a_floor_is_named() -> None:
    (line,) = floors.below_floors("test", Counter(a=2, c=9), Counter(a=2))
    assert line.startswith("test: .ci/floors.txt does not know c")


def test_more_tests_than_the_floor_are_fine() -> None:
    assert floors.below_floors("test", Counter(a=9), Counter(a=2)) == []


def test_what_is_written_is_read_again() -> None:
    kept = {"test": Counter(a=1, b=2), "test-lab": Counter(c=3)}
    assert floors.read_floors(floors.written(kept)) == kept


def test_the_floors_know_each_module_that_runs_before_a_landing() -> None:
    known = {module for modules in floors.read_floors(floors.FLOORS.read_text()).values() for module in modules}
    paths = [path for path in (floors.ROOT / "tests").rglob("test_*.py") if path.parent.name != "gpu"]
    name_of = {path: ".".join(path.relative_to(floors.ROOT).with_suffix("").parts) for path in paths}
    wanted = {name for path, name in name_of.items() if "mark.nightly" not in path.read_text()}
    assert sorted(wanted - known) == [], (
        "add `TIER MODULE NUMBER` for each to .ci/floors.txt, NUMBER of tests that pass"
    )
    assert sorted(known - set(name_of.values())) == [], "remove the lines of these from .ci/floors.txt"
