"""Every writer of files in folders whose owner plants links: they are replaced, and what they lead to stays."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from report_sample import HEALTHY, sample_summary

from hpcpace.audit.facts import Snapshot
from hpcpace.audit.snapshot import gather_by_files, own_part, take_tree
from hpcpace.audit.snapshot_files import NUM_OURS_OF_RUN, save_snapshots
from hpcpace.core.environment import rank_info
from hpcpace.core.errors import HpcpaceError
from hpcpace.core.rundir import Attempt, RunDirectory, open_run
from hpcpace.diagnosis.plot_data import PlotData
from hpcpace.plots import new_figure
from hpcpace.report.run_report import write_html
from hpcpace.studies.jobs import ScalingFolder
from hpcpace.studies.setups import StudyFolder
from library.files import write_files
from tests.machines.cases import small_node

pytest.importorskip("matplotlib")

SECRET = b"a secret of root's"
STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}
NOBODY = 65534
Write = Callable[[Path], object]


def _snapshot(folder: Path) -> Snapshot:
    return take_tree(small_node("n1").write(folder / "tree"))


def _figure(folder: Path) -> object:
    return write_files(folder / "out", "table", columns=["host"], rows=[["n1"]], figure=new_figure(1, 1))


def _page(folder: Path) -> None:
    write_html(folder / "report.html", sample_summary(folder / "sample", num_ranks=1, num_steps=5), HEALTHY, PlotData())


def _part(folder: Path) -> object:
    info = rank_info(STEP, host="n1")
    return gather_by_files(info, STEP, folder / "shared", own_part(info, STEP), timeout_s=1)


def _in_attempt(name: str) -> Write:
    attempt = "attempt-0"
    return lambda folder: Attempt(folder / attempt).write_json(folder / attempt / name, {}, make=True)


WRITERS: dict[str, tuple[Write, str]] = {
    "page": (_page, "report.html"),
    "summary": (lambda folder: RunDirectory(folder).write("summary.json", "{}"), "summary.json"),
    "run": (_in_attempt("run.json"), "attempt-0/run.json"),
    "trial": (_in_attempt("trial.json"), "attempt-0/trial.json"),
    "result": (_in_attempt("result.json"), "attempt-0/result.json"),
    "snapshot": (lambda folder: save_snapshots(folder / "snapshot", [_snapshot(folder)]), "snapshot/n1.json"),
    "part": (_part, "shared/.ranks-17.0/rank-00001.json"),
    "table": (_figure, "out/table.csv"),
    "png": (_figure, "out/table.png"),
    "svg": (_figure, "out/table.svg"),
    "study": (lambda folder: StudyFolder(folder / "study").write_plan("sizes", []), "study/plan.json"),
}


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """Yield a file that nothing may change."""
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    yield path
    assert path.read_bytes() == SECRET
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    return path


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _planted(folder: Path, name: str, secret: Path) -> Path:
    place = folder / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(secret)
    return place


@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_with_the_name_of_the_file_is_replaced(writer: str, folder: Path, secret: Path) -> None:
    write, name = WRITERS[writer]
    # A plan that is there is kept, and one that cannot be read is said to be so: only where nothing is behind the link.
    target = folder / "nowhere" if writer == "study" else secret
    place = _planted(folder, name, target)
    write(folder)
    assert place.is_file() and not place.is_symlink()
    assert not (folder / "nowhere").exists()


@pytest.mark.parametrize("writer", WRITERS)
def test_links_with_guessable_temporary_names_are_not_followed(writer: str, folder: Path, secret: Path) -> None:
    write, name = WRITERS[writer]
    base = Path(name).name
    for guess in (
        f"{base}.tmp",
        f".{base}.tmp",
        f".{base}",
        f"{base}~",
        f"{base}.part",
        f"{base}.{os.getpid()}",
        "tmp",
    ):
        _planted(folder, str(Path(name).with_name(guess)), secret)
    write(folder)
    assert (folder / name).is_file()


@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_with_the_very_temporary_name_is_an_error(
    writer: str, folder: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, name = WRITERS[writer]
    monkeypatch.setattr(os, "urandom", lambda size: b"\x11" * size)
    _planted(folder, str(Path(name).with_name(f".{Path(name).name}.{'11' * 8}")), secret)
    with pytest.raises((OSError, HpcpaceError), match="File exists"):
        write(folder)
    assert not (folder / name).exists()


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_the_umask_decides_who_reads_a_file(writer: str, mask: int, mode: int, folder: Path) -> None:
    write, name = WRITERS[writer]
    with _umask(mask):
        write(folder)
    assert (folder / name).stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    ("link", "write"),
    [
        ("attempt-0", _in_attempt("run.json")),
        ("attempt-0", lambda folder: _save_in_run(folder)),
        ("attempt-0/snapshot", lambda folder: _save_in_run(folder)),
        ("shared/.ranks-17.0", _part),
        ("study/runs", lambda folder: StudyFolder(folder / "study").write_plan("sizes", [])),
        ("study/runs", lambda folder: _write_scaling_plan(folder)),
    ],
)
def test_a_folder_that_is_a_link_is_refused(link: str, write: Write, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    _planted(folder, link, other)
    with pytest.raises((OSError, HpcpaceError), match="symbolic link"):
        write(folder)
    assert list(other.iterdir()) == []


def _save_in_run(folder: Path) -> None:
    save_snapshots(folder / "attempt-0" / "snapshot", [_snapshot(folder)], num_ours=NUM_OURS_OF_RUN)


def _write_scaling_plan(folder: Path) -> None:
    from hpcpace.studies.jobs import scaling_runs

    runs = scaling_runs(nodes=[1], ranks_per_node=1, oversubscriptions=[1], placements=["block"], steps=20, step_ms=10)
    ScalingFolder(folder / "study").write_plan(runs)


def test_figures_go_to_a_folder_here_unless_one_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    _planted(folder, "figures", other)
    monkeypatch.chdir(folder)
    figure = {"columns": ["host"], "rows": [["n1"]], "figure": new_figure(1, 1)}
    with pytest.raises(HpcpaceError, match=r"symbolic link.*name another folder with --out"):
        write_files(Path("figures"), "table", **figure)
    assert list(other.iterdir()) == []
    write_files(folder / "figures", "table", **figure)
    assert len(list(other.iterdir())) == 3


def test_what_is_written_into_a_run_stays_in_the_run_that_was_opened(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "attempt-0").mkdir(parents=True)
    (folder / "attempt-0").mkdir()
    run = open_run(folder)
    folder.rename(tmp_path / "moved")
    folder.symlink_to(other)
    run.write("report.html", "x")
    run.attempts()[0].write_json(Path("run.json"), {})
    assert [path.name for path in other.rglob("*")] == ["attempt-0"]
    assert (tmp_path / "moved" / "report.html").is_file() and (tmp_path / "moved" / "attempt-0" / "run.json").is_file()


def test_a_swapper_gets_neither_content_nor_mode_of_a_file(folder: Path, secret: Path) -> None:
    """Let another user exchange whatever appears in a folder of theirs for links while its snapshots are written."""
    snapshot = _snapshot(secret.parent)
    with _swapper(folder, secret):
        for number in range(60):
            try:
                save_snapshots(folder, [dataclasses.replace(snapshot, host=f"n{number % 3}")])
            except HpcpaceError:
                continue


@contextmanager
def _swapper(folder: Path, secret: Path) -> Iterator[None]:
    """Run a process that exchanges files for links; it is another user's where the tests are root's."""
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    pid = os.fork()
    if not pid:
        try:
            os.chdir(folder)
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            end_s = time.monotonic() + 60
            while time.monotonic() < end_s:
                for name in os.listdir("."):
                    try:
                        os.unlink(name)
                        os.symlink(secret, name)
                    except OSError:
                        continue
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
