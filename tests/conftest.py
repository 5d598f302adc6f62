"""The tiers of tests, and what they share. Its place here puts tests/ on the import path, for its other modules."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cases
import pytest

COMMANDS = {
    "nightly": "make test-nightly",
    "root": "make test-lab",
    "slurm": "make test-lab",
    "gpu": "make gpu",
    "tool": "make test-full",
    "compute": "make test-compute",
}
NEEDS = {
    "make test-full": "slow tests and tests of tools: minutes, with hwloc, Chromium and Slurm's commands installed",
    "make test-compute": "tests that compute: minutes, on all cores",
    "make test-lab": "tests of a real cluster: root, and Slurm installed",
    "make gpu": "tests of NCCL: a GPU",
    "make test-nightly": "all cases of each table, and what a smaller test covers: an hour and a half",
}
NOBODY = 65534
NOT_RUN = pytest.StashKey[Counter[str]]()
TOLD = "not_run"


def _command(item: pytest.Item) -> str:
    marks = {mark.name for mark in item.iter_markers()}
    return next((command for mark, command in COMMANDS.items() if mark in marks), "make test-full")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --all-seeds, with which `make test-nightly` runs all cases of each table that a landing takes a part of."""
    parser.addoption("--all-seeds", action="store_true", help="run all cases, where a landing runs a choice of them")


def pytest_configure(config: pytest.Config) -> None:
    """Decide how many cases the tables of tests have, before any of them is collected.

    Jobs of tests end without a card, which takes each of them a second: what tests cards asks for them.
    """
    os.environ["HPCPACE_TRACE_SUMMARY"] = "false"
    cases.ALL_SEEDS.set(config.getoption("--all-seeds"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs every night alone."""
    dropped = [] if config.getoption("--all-seeds") else [item for item in items if item.get_closest_marker("nightly")]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


def pytest_collection_finish() -> None:
    """Exempt what exists by now from garbage collection: hundreds of thousands of objects that live to the end."""
    gc.freeze()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count the tests that the markers of this tier leave out, by the command that runs them."""
    if items:
        items[0].config.stash.setdefault(NOT_RUN, Counter()).update(map(_command, items))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that prints, where this one is a worker of pytest-xdist."""
    told = getattr(session.config, "workeroutput", None)
    if told is not None:
        told[TOLD] = dict(session.config.stash.get(NOT_RUN, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a worker tells; all of them collect the same tests."""
    node.config.stash[NOT_RUN] = Counter(getattr(node, "workeroutput", {}).get(TOLD, {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, and how to run it."""
    not_run = config.stash.get(NOT_RUN, Counter())
    if "slow" not in config.option.markexpr or not not_run:
        return
    terminalreporter.section("not run here")
    for command, need in NEEDS.items():
        if not_run[command]:
            terminalreporter.line(f"{not_run[command]:5d}  {command:<17}  {need}")


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Let a file or folder seem to be nobody's as soon as it is opened, which only root can really do."""

    def give(path: Path) -> None:
        fstat, number = os.fstat, path.stat().st_ino

        def of_nobody(descriptor: int) -> os.stat_result:
            facts = fstat(descriptor)
            owner = NOBODY if facts.st_ino == number else facts.st_uid
            return os.stat_result((*facts[:4], owner, *facts[5:]))

        monkeypatch.setattr(os, "fstat", of_nobody)

    return give
