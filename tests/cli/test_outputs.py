"""What commands are told to write goes through no link and takes the place of no device; errors are clear."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
import pytest

from experiments.synthetic_run import SyntheticRun
from hpcpace.audit.snapshot import take_host
from hpcpace.audit.snapshot_files import snapshot_text
from hpcpace.audit.tree import Tree
from hpcpace.cli import cli
from tests.placed_run import PlacedRun, layout_operations

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "runs"))
from known_dumps import hung_job, write

ROOT = Path(__file__).parents[2]
SPEEDS = "run,step_time_s\na,1.0\nb,1.01\n"
SCALING = "run,nodes,throughput\na,1,100\nb,2,190\nc,4,340\nd,8,560\n"

# Calls that write the file FILE, in a folder that has what they read.
WRITERS = {
    ("watch", "--prometheus"): ("watch", "run", "--once", "--prometheus", "FILE"),
    ("compare", "--html"): ("compare", "a.csv", "b.csv", "--html", "FILE"),
    ("scale", "--csv"): ("scale", "scaling.csv", "--csv", "FILE"),
    ("timeline", "--output"): ("timeline", "run", "-o", "FILE"),
    ("place", "--output"): ("place", "placed", "--output", "FILE"),
    ("plan", "--write"): ("plan", "--model", "gpt2-small", "--machine", "a100", "--nodes", "1", "--write", "FILE"),
    ("plan", "--html"): ("plan", "--model", "gpt2-small", "--machine", "a100", "--nodes", "1", "--html", "FILE"),
    ("history", "--html"): ("history", "a.csv", "--html", "FILE"),
    ("hang", "--timeline"): ("hang", "dumps", "--timeline", "FILE"),
    ("import flight-recorder", "--timeline"): ("import", "flight-recorder", "dumps", "--timeline", "FILE"),
    ("probe", "--json"): ("probe", "--json", "FILE"),
    ("probe", "--html"): ("probe", "--html", "FILE"),
    ("audit", "--show"): ("audit", "--from", "snapshot.json", "--show", "FILE"),
}
# Other parameters of the type path: what is read, and folders in which hpcpace chooses the names.
TESTED_ELSEWHERE = {
    ("export", "--output"): "cli/test_export_command.py::test_bad_input_is_one_clear_error",
    (
        "lab down",
        "--truth",
    ): "unit/lab/test_hostile_folders.py::test_the_log_of_truth_is_kept_in_a_file_and_nowhere_else",
}
FOLDERS = {"--run-dir", "--trace-dir", "--try", "--save", "study"}
READ = {
    "--against", "--config", "--data", "--from", "--nccl-log", "--placement", "--probe", "--ras", "--site-file",
    "--sysfs-root", "--topo", "--topology", "--vocabulary", "after", "before", "file", "folder", "path", "paths", "run",
    "runs",
}  # fmt: skip
# The others would measure first. What they write then, they write as these do.
PROBE = "probe"
NAMED_BY_TEXT = {("audit", "--show")}


def _commands(found: click.Command = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(path), found
    if isinstance(found, click.Group):
        for name in found.list_commands(click.Context(found)):
            command = found.get_command(click.Context(found), name)
            assert command is not None
            yield from _commands(command, (*path, name))


def test_each_file_that_a_command_may_write_is_tried_here() -> None:
    paths = {
        (path, max(param.opts, key=len))
        for path, command in _commands()
        for param in command.params
        if isinstance(param.type, (click.Path, click.File))
    }
    assert {one for one in paths if one[1] not in FOLDERS | READ} == set(WRITERS) - NAMED_BY_TEXT | set(
        TESTED_ELSEWHERE
    )
    for test in TESTED_ELSEWHERE.values():
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with something to read for every command."""
    folder = tmp_path_factory.mktemp("outputs")
    for name, text in (("a.csv", SPEEDS), ("b.csv", SPEEDS), ("scaling.csv", SCALING)):
        (folder / name).write_text(text)
    SyntheticRun(num_ranks=2, num_steps=20).write(folder / "run")
    ring = layout_operations(1, 2, "tp", large=1000, small=0)
    PlacedRun(operations=ring, host=np.arange(2), leaves=[1, 2]).write(folder / "placed")
    write(folder / "dumps", hung_job())
    (folder / "snapshot.json").write_text(snapshot_text(take_host(Tree(), host="n0")))
    return folder


def _device(path: Path) -> None:
    """Make what /dev/full is; without the right to, a link to it."""
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 7))
    except PermissionError:
        path.symlink_to("/dev/full")


NO_FILES: dict[str, Callable[[Path], object]] = {
    "device": _device,
    "link-to-device": lambda path: path.symlink_to("/dev/null"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
}
NO_PLACES = {"missing": "none/out.html", "file": "a.csv/out.html", "read-only": "/proc/out.html"}


@pytest.fixture
def write_to(hpcpace, place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Call a command with a file to write, and return its exit code and what it says on stderr."""
    monkeypatch.chdir(place)

    def call(words: tuple[str, ...], target: object) -> tuple[int, str]:
        code, _, err = hpcpace(*(target if word == "FILE" else word for word in words))
        return code, " ".join(err.split())

    return call


@pytest.mark.parametrize("made", NO_FILES)
@pytest.mark.parametrize("words", WRITERS.values(), ids=" ".join)
def test_what_is_no_file_is_left_as_it_was(write_to, tmp_path: Path, words: tuple[str, ...], made: str) -> None:
    target = tmp_path / "out.html"
    NO_FILES[made](target)
    before = target.lstat()
    code, err = write_to(words, target)
    after = target.lstat()
    assert (after.st_ino, after.st_mode, list(tmp_path.iterdir())) == (before.st_ino, before.st_mode, [target])
    assert code == 2 and f"cannot write {target}" in err and f"name a file with {words[-2]}" in err


@pytest.mark.parametrize("target", NO_PLACES.values(), ids=NO_PLACES)
@pytest.mark.parametrize("words", WRITERS.values(), ids=" ".join)
def test_a_place_that_takes_no_file_is_a_clear_error(write_to, words: tuple[str, ...], target: str) -> None:
    code, err = write_to(words, target)
    assert code == 2 and "out.html" in err and err.startswith(("hpcpace: ", "error: "))


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("words", [words for words in WRITERS.values() if words[0] != PROBE], ids=" ".join)
def test_a_link_is_replaced_and_never_written_through(write_to, tmp_path: Path, words: tuple[str, ...], link) -> None:
    other, target = tmp_path / "other", tmp_path / "out.html"
    other.write_text("root's")
    link(other, target)
    code, err = write_to(words, target)
    assert code in (0, 1, 3) and "cannot" not in err
    assert other.read_text() == "root's"
    # A watch that ends removes its file.
    assert not target.exists() if words[0] == "watch" else target.read_bytes() != b"root's" and not target.is_symlink()
