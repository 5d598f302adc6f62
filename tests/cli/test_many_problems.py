"""Commands that open runs or files of hundreds of ranks that are all damaged: what they say fits on a screen."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import pytest
from cases import only_nightly

from experiments.synthetic_run import SyntheticRun
from hpcpace.core.rundir import RunDirectory

NUM, NUM_SOUND = 300, 4
MAX_ROWS, COLUMNS = 20, 120
_PROGRESS = re.compile(r"^hpcpace: [a-z ]+: \d+ of \d+\n", re.MULTILINE)

Make = Callable[[Path, int], None]


def unlike(number: int) -> str:
    """Return a word of letters alone that no other number has."""
    return "".join("abcdefghij"[int(digit)] for digit in str(number))


def unknown_filter(path: Path, rank: int) -> None:
    with h5py.File(path, "r+") as file:
        column = file["steps/step"]
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((8,))
        properties.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (1, 2))
        kind, space = column.id.get_type(), h5py.h5s.create_simple(column.shape, (h5py.h5s.UNLIMITED,))
        del file["steps/step"]
        h5py.h5d.create(file["steps"].id, b"step", kind, space, properties)


def missing_table(path: Path, rank: int) -> None:
    with h5py.File(path, "r+") as file:
        del file["steps"]


def another_run(path: Path, rank: int) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["run_id"] = unlike(rank)


def later_version(path: Path, rank: int) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = "7.0"


def absurd_version(path: Path, rank: int) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = unlike(rank) * 50


def cut_off(path: Path, rank: int) -> None:
    os.truncate(path, 600 + rank)


def copy_of_rank_0(path: Path, rank: int) -> None:
    shutil.copyfile(path.parent / "rank-00000.h5", path)


def symbolic_link(path: Path, rank: int) -> None:
    path.unlink()
    path.symlink_to(path.parent / "rank-00000.h5")


def slow(value: object) -> object:
    return pytest.param(value, marks=pytest.mark.slow)


# What the header of a trace shows costs little time; of the others, all ranks are opened and measured.
FAULTS = (
    *only_nightly([later_version, cut_off], [absurd_version, symbolic_link]),
    *map(slow, only_nightly([missing_table], [another_run, copy_of_rank_0, unknown_filter])),
)


@pytest.fixture(scope="module")
def run_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Make], Path]:
    """Return a run of 300 ranks: 4 are sound, all others have one fault."""
    folder = tmp_path_factory.mktemp("runs")
    template = SyntheticRun(num_ranks=2, num_steps=8).write(folder / "template").attempt(0).trace_file(1).read_bytes()
    made: dict[Make, Path] = {}

    def call(fault: Make) -> Path:
        if fault not in made:
            run = RunDirectory(folder / fault.__name__)
            attempt = run.new_attempt()
            for rank in range(NUM):
                path = attempt.trace_file(rank)
                path.write_bytes(template)
                with h5py.File(path, "r+") as file:
                    for name, value in (("rank", rank), ("world_size", NUM)):
                        file.attrs.modify(name, value)
                if rank >= NUM_SOUND:
                    fault(path, rank)
            made[fault] = run.path
        return made[fault]

    return call


def rows(text: str) -> int:
    """Return how many rows of a terminal a text takes."""
    return sum(-(-max(len(line), 1) // COLUMNS) for line in text.splitlines())


def problems_in(out: str) -> str:
    """Return the parts of what a command printed that list problems."""
    sections = re.split(r"\n\n(?=\S)", out)
    listing = ("Missing or cut off", "Incomplete", "Not used", "Left out", "Audit", "problem:")
    parts = [section for section in sections if section.startswith(listing)]
    return "\n".join([*parts, *(line for line in out.splitlines() if line.startswith(("- /", "problem: ")))])


def check(outcome: tuple[int, str, str]) -> str:
    """Check that what a command said of problems fits on a screen, and return it."""
    _, out, err = outcome
    assert "Traceback" not in err
    err, said = _PROGRESS.sub("", err), problems_in(out)
    assert rows(err) <= MAX_ROWS, err[:3000]
    assert rows(said) <= MAX_ROWS, said[:3000]
    assert max(map(len, err.splitlines()), default=0) <= 500
    return said + err


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_report_of_many_damaged_ranks(hpcpace, run_with, fault):
    run = run_with(fault)
    outcome = hpcpace("report", run)
    assert outcome[0] == 1
    said = check(outcome)
    assert re.search(r"ranks 4-299|296 ranks \(4-299\)|296 times|and 29\d more", said), said
    stored = json.loads((run / "summary.json").read_text())["cut_off"]["problems"]
    assert len(stored) >= NUM - NUM_SOUND
    page = (run / "report.html").read_text()
    assert page.count("rank-0") < 100


COMMANDS = (
    slow("report RUN --json"),
    slow("report RUN --timeline"),
    "timeline RUN",
    "hang RUN",
    slow("pack RUN"),
    "watch RUN --once",
    "switch RUN on",
    "list RUNS",
    "history RUNS",
    slow("scale RUN"),
    "collect RUN",
)


@pytest.mark.parametrize("fault", only_nightly([later_version], [slow(absurd_version)]), ids=lambda one: one.__name__)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_on_many_damaged_ranks(hpcpace, run_with, tmp_path, command, fault):
    run = tmp_path / "runs" / "run"
    shutil.copytree(run_with(fault), run, copy_function=os.link)
    check(hpcpace(*[{"RUN": run, "RUNS": run.parent}.get(word, word) for word in command.split()]))


@pytest.fixture
def no_sound_rank(run_with, tmp_path) -> Callable[[Make], Path]:
    def call(fault: Make) -> Path:
        run = tmp_path / fault.__name__
        shutil.copytree(run_with(fault), run, copy_function=os.link)
        for rank in range(NUM_SOUND):
            (run / "attempt-0" / "trace" / f"rank-{rank:05d}.h5").unlink()
        return run

    return call


@pytest.mark.parametrize("fault", [absurd_version, later_version], ids=["different", "equal"])
@pytest.mark.parametrize("command", only_nightly(["compare"], ["report", "timeline", "scale", "hang"]))
def test_runs_without_a_sound_rank(hpcpace, no_sound_rank, command, fault):
    runs = [no_sound_rank(fault)]
    outcome = hpcpace(command, *runs, *([*runs] if command == "compare" else []))
    assert outcome[0] == 2
    said = check(outcome)
    assert "no trace can be read in" in said
    assert re.search(r"all 29[67]: --verbose" if fault is absurd_version else r"296 ranks \(4-299\): ", said), said


def test_verbose_shows_every_problem(hpcpace, no_sound_rank):
    run = no_sound_rank(later_version)
    code, _, err = hpcpace("report", "--verbose", run)
    assert code == 2
    assert all(f"rank-{rank:05d}.h5" in err for rank in range(NUM_SOUND, NUM))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", only_nightly(["topology_hotspots"], ["jitter_amplification", "bottleneck_timeline", "scaling_curve"])
)
def test_scripts_on_many_damaged_ranks(script, run_with, no_sound_rank, tmp_path, name):
    check(script(name, run_with(absurd_version), "--out", tmp_path / "a"))
    check(script(name, no_sound_rank(absurd_version), "--out", tmp_path / "b"))


def _broken_runs(folder: Path, *, are_equal: bool) -> Iterator[Path]:
    for number in range(NUM):
        run = RunDirectory(folder / f"run-{number:04d}")
        attempt = run.new_attempt()
        attempt.run_json.write_text("[" if are_equal else f'{{"{unlike(number)}')
        run.summary_json.write_text("[" if are_equal else f'"{unlike(number)}"')
        yield run.path


@pytest.mark.parametrize("are_equal", only_nightly([False], [True]), ids=lambda one: "equal" if one else "different")
def test_commands_on_many_broken_runs(hpcpace, tmp_path, are_equal):
    folder = tmp_path / "runs"
    runs = list(_broken_runs(folder, are_equal=are_equal))
    for command in (("list", folder), ("history", folder), ("scale", *runs), ("compare", *runs[1:], "--", runs[0])):
        check(hpcpace(*command))
    code, out, err = hpcpace("report", folder)
    assert code == 2 and "all 300" in err and rows(out) < 60


@pytest.mark.parametrize("are_equal", [True, False], ids=["equal", "different"])
@pytest.mark.parametrize("command", ["audit --from", "audit diff", "import kineto", "import flight-recorder", "hang"])
def test_commands_on_many_broken_files(hpcpace, tmp_path, command, are_equal):
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(NUM):
        text = "[" if are_equal else json.dumps({unlike(number): [unlike(number)], "version": unlike(number)})
        (folder / f"rank{number}.json").write_text(text)
    extra = {"audit diff": [folder], "import kineto": ["--run-dir", tmp_path / "run"]}
    outcome = hpcpace(*command.split(), folder, *extra.get(command, ()))
    assert outcome[0] == 2
    check(outcome)


@pytest.mark.parametrize(
    "command",
    [
        "report PATH",
        "dump PATH",
        "list PATH",
        "history PATH",
        "timeline PATH",
        "compare PATH b",
        "scale PATH",
        "pack PATH",
        "watch --once PATH",
        "hang PATH",
        "collect PATH",
        "audit --from PATH",
        "import kineto PATH",
        "import wia PATH",
        "import nsys PATH",
        "import flight-recorder PATH",
        "switch PATH on",
        "probe --against PATH",
    ],
)
def test_a_path_of_4000_letters_is_cut(hpcpace, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    path = "/".join(["x" * 200] * 20)
    outcome = hpcpace(*[path if word == "PATH" else word for word in command.split()])
    assert outcome[0] == 2
    assert "..." in check(outcome)
