"""Detail switched by a file or a signal, and collectives observed in stretches."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import each_case

import hpcpace
from hpcpace.core.config import Config
from hpcpace.core.detail import ALL_STEPS, Detail, DetailPlan, Order, parse_order
from hpcpace.core.files import Folder
from hpcpace.core.rundir import RunDirectory
from hpcpace.observe.collectives.observer import CollectiveObserver, CompiledObserver, SwitchedCollectives
from hpcpace.observe.collectives.operations import GroupNumbers
from hpcpace.observe.guest import Replacements
from hpcpace.observe.settings import TraceConfig
from hpcpace.observe.switching import NO_NOTICE, OrderFile, OrderSignal, Switching, find_switching
from hpcpace.pace.settings import PaceSettings
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import EventKind, ExitKind, StepFlag

OFF, ON = Order(Detail.STEPS), Order(Detail.FULL)
Observer = CollectiveObserver | CompiledObserver


def _switching(warnings: list[str] | None = None, *, plan: DetailPlan | None = None) -> Switching:
    plan = plan or DetailPlan.of([ALL_STEPS], Detail.FULL)
    return Switching(plan, "test", warn=(warnings if warnings is not None else []).append)


def test_ranks_follow_an_order_once_and_from_the_same_step() -> None:
    first, other = _switching(), _switching()
    for switching in (first, other):
        switching.hear(NO_NOTICE, 3)
    first.give(OFF)
    for step in (7, 9):  # the same order comes again with each comparison of the clocks
        notice = first.notice
        first.hear(notice, step)
        other.hear((*notice, 0), step)  # messages are padded
    assert first.plan == other.plan
    assert [first.plan.at(step) for step in (6, 7, 9)] == [Detail.FULL, Detail.STEPS, Detail.STEPS]
    first.give(parse_order("steps 12:14 collectives"))
    first.hear(first.notice, 10)
    assert [first.plan.at(step) for step in (6, 11, 12, 14)] == [
        Detail.FULL,
        Detail.STEPS,
        Detail.COLLECTIVES,
        Detail.STEPS,
    ]


def test_an_order_for_steps_that_are_over_is_a_warning() -> None:
    warnings: list[str] = []
    switching = _switching(warnings)
    switching.give(parse_order("steps 3:5"))
    switching.hear(switching.notice, 5)
    assert len(warnings) == 1 and "steps 3:5" in warnings[0] and "step 5" in warnings[0]


def test_rows_of_steps_without_their_detail_are_not_kept() -> None:
    switching = _switching(plan=DetailPlan.of([(2, 4)], Detail.COLLECTIVES).follow(parse_order("steps 6:7"), 5))
    steps = np.array([-1, 0, 2, 3, 4, 6, 7], np.int32)
    assert switching.keeps("collectives", steps).tolist() == [False, False, True, True, False, True, False]
    assert switching.keeps("phases", steps).tolist() == [False] * 5 + [True, False]


def test_a_paced_job_is_recorded_in_full_with_a_warning() -> None:
    warnings: list[str] = []
    config = Config(TraceConfig(detail_steps="5:8"), PaceSettings(policy="slack"))
    assert find_switching(config, warn=warnings.append).plan.is_always_full
    assert len(warnings) == 1 and "pacing" in warnings[0]


@pytest.fixture
def orders() -> list[Order]:
    return []


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def order_file(tmp_path: Path, orders: list[Order], warnings: list[str]) -> OrderFile:
    return OrderFile(RunDirectory(tmp_path), give=orders.append, warn=warnings.append)


def test_each_order_in_the_file_is_given_once(order_file: OrderFile, tmp_path: Path, orders: list[Order]) -> None:
    order_file.look()
    for text in ("", "off\n", "off\n", "on"):
        (tmp_path / "switch").write_text(text)
        order_file.look()
        order_file.look()
    (tmp_path / "switch").unlink()
    order_file.look()
    assert orders == [OFF, ON]


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b"\xff\0garbage"),
        lambda path: path.write_text("steps 9:3"),
        lambda path: path.write_text("on " * 4000),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: path.mkdir(),
        lambda path: path.write_text("\x1b]0;mine\x07" * 300),
        lambda path: path.write_text("on " + "x" * 4000),
        lambda path: path.write_text("steps " + "9:3," * 1000),
        lambda path: path.write_text("steps " + "9" * 4000 + ":"),
        lambda path: path.write_text("steps ٣:٤"),
        lambda path: path.write_text("steps 5:6,1:2" + "," * 4000),
    ],
    ids=[
        *("garbage", "wrong range", "too long", "pipe", "link", "folder"),
        *("escapes", "long level", "many ranges", "long number", "other digits", "empty ranges"),
    ],
)
def test_what_is_no_order_is_one_warning_and_changes_nothing(
    make: Callable[[Path], object], order_file: OrderFile, tmp_path: Path, orders: list[Order], warnings: list[str]
) -> None:
    make(tmp_path / "switch")
    order_file.look()
    order_file.look()
    assert orders == []
    assert len(warnings) == 1 and str(tmp_path / "switch") in warnings[0]
    assert warnings[0].isprintable() and len(warnings[0]) < len(str(tmp_path)) + 300


@pytest.mark.parametrize("was_there", [True, False], ids=["before the job", "while it runs"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [("give_away", "belongs to"), (0o664, "the group"), (0o646, "everybody"), (0o666, "everybody")],
    ids=["of somebody else", "of a group", "of others", "of everybody"],
)
def test_an_order_that_somebody_else_can_have_given_is_not_followed(
    order_file: OrderFile,
    tmp_path: Path,
    orders: list[Order],
    warnings: list[str],
    request: pytest.FixtureRequest,
    spoil: str | int,
    words: str,
    was_there: bool,
) -> None:
    if not was_there:
        order_file.look()
    path = tmp_path / "switch"
    path.write_text("off\n")
    if isinstance(spoil, int):
        path.chmod(spoil)
    else:
        request.getfixturevalue(spoil)(path)
    order_file.look()
    path.write_text("steps 1:2\n")
    order_file.look()
    assert orders == []
    assert len(warnings) == 1 and words in warnings[0] and "hpcpace switch" in warnings[0]


def test_an_order_of_root_is_followed(
    order_file: OrderFile, tmp_path: Path, orders: list[Order], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "switch").write_text("off")
    fstat = os.fstat
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(os, "fstat", lambda descriptor: os.stat_result((*fstat(descriptor)[:4], 0, *fstat(0)[5:])))
    order_file.look()
    assert orders == [OFF]


def test_the_folder_of_an_order_may_be_open_to_everybody(
    order_file: OrderFile, tmp_path: Path, orders: list[Order]
) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "switch").write_text("off")
    order_file.look()
    assert orders == [OFF]


def test_warnings_of_a_file_that_changes_for_ever_end(
    order_file: OrderFile, tmp_path: Path, orders: list[Order], warnings: list[str]
) -> None:
    for number in range(100):
        (tmp_path / "switch").write_text(f"junk {number}")
        order_file.look()
    assert len(warnings) == 4
    assert [("not shown" in warning) for warning in warnings] == [False, False, False, True]
    (tmp_path / "switch").write_text("off")
    order_file.look()
    assert orders == [OFF]


@pytest.fixture
def free_signal() -> Iterator[signal.Signals]:
    before = signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    yield signal.SIGUSR2
    signal.signal(signal.SIGUSR2, before)


def test_a_signal_switches_off_and_on_again(free_signal: signal.Signals) -> None:
    switching, warnings = _switching(), list[str]()
    ignored = OrderSignal("USR2", None, warn=warnings.append)
    ignored.start()
    signal.raise_signal(free_signal)  # a rank other than 0 survives it
    assert switching.notice == NO_NOTICE and warnings == []
    ignored.stop()
    assert signal.getsignal(free_signal) is signal.SIG_DFL
    taken = OrderSignal("USR2", switching.toggle, warn=warnings.append)
    taken.start()
    assert warnings == []
    signal.raise_signal(free_signal)
    assert switching.notice[1] == Detail.STEPS
    switching.live = Detail.STEPS
    signal.raise_signal(free_signal)
    assert switching.notice[:2] == (2, Detail.FULL)
    taken.stop()


def test_a_handler_of_the_program_is_left_alone(free_signal: signal.Signals) -> None:
    arrived: list[int] = []

    def handler(number: int, _: object) -> None:
        arrived.append(number)

    signal.signal(free_signal, handler)
    warnings: list[str] = []
    left = OrderSignal("USR2", None, warn=warnings.append)
    left.start()
    assert signal.getsignal(free_signal) is handler
    assert len(warnings) == 1 and "the program handles it" in warnings[0]
    left.stop()
    assert signal.getsignal(free_signal) is handler
    # One that the program sets later stays as well.
    signal.signal(free_signal, signal.SIG_DFL)
    taken = OrderSignal("USR2", None, warn=warnings.append)
    taken.start()
    signal.signal(free_signal, handler)
    taken.stop()
    assert signal.getsignal(free_signal) is handler


def test_a_file_that_cannot_be_read_is_one_warning(
    order_file: OrderFile, tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "switch").write_text("on")

    def read(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Folder, "open_file", read)
    order_file.look()
    order_file.look()
    assert len(warnings) == 1 and "Permission denied" in warnings[0]


class _Owner:
    def call(self) -> str:
        return "original"


def test_a_function_put_on_top_of_ours_stays_and_ours_is_not_put_there_twice() -> None:
    replacements = Replacements()
    replacements.replace(_Owner, "call", lambda original: lambda self: f"ours({original(self)})")
    ours = _Owner.call
    owner: Any = _Owner
    owner.call = lambda self: f"theirs({ours(self)})"
    replacements.close()
    assert _Owner().call() == "theirs(ours(original))"
    replacements.replace(_Owner, "call", lambda original: lambda self: f"ours({original(self)})")
    assert _Owner().call() == "theirs(ours(original))"
    replacements.close()


@pytest.mark.usefixtures("process_group")
def test_each_stretch_has_numbers_of_its_own_and_the_same_groups(new_observer, rows) -> None:
    groups = GroupNumbers(rows)

    def make(first_number: int) -> Observer:
        return new_observer(pytest.fail, groups=groups, first_number=first_number)

    collectives = SwitchedCollectives(make)
    torch_wait = dist.Work.wait
    for first_number in (0, 70, 90):
        dist.all_reduce(torch.ones(2))  # nobody sees this one
        collectives.switch_on(first_number)
        for _ in range(2):
            dist.all_reduce(torch.ones(2))
        collectives.switch_off()
        assert dist.Work.wait is torch_wait
        collectives.end_step(0)
    collectives.uninstall()
    assert [row["seq"] for row in rows.collectives] == [0, 1, 70, 71, 90, 91]
    assert {row["group"] for row in rows.collectives} == {0}
    assert len(rows.groups) == 1


@pytest.mark.usefixtures("process_group")
def test_an_operation_in_flight_when_detail_is_switched_off_is_followed_to_its_end(new_observer, rows) -> None:
    collectives = SwitchedCollectives(lambda number: new_observer(pytest.fail, first_number=number))
    collectives.switch_on(0)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    collectives.switch_off()
    work.wait()
    collectives.end_step(0)
    assert [row["exit_kind"] for row in rows.collectives] in ([ExitKind.COMPLETION], [ExitKind.WAIT])
    assert collectives.open_collectives() == [] and not collectives.has_open
    collectives.uninstall()
    assert len(rows.collectives) == 1


def _train(run: Path, num_steps: int, **settings: Any) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with hpcpace.session(run_dir=run, **settings) as session:
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if "step_from" not in settings:
                session.step(samples=2)
    return losses


@pytest.mark.parametrize("step_from", [{}, {"step_from": "auto"}], ids=["named", "found"])
def test_phases_are_recorded_in_the_steps_of_the_setting_alone(tmp_path: Path, step_from: dict[str, str]) -> None:
    losses = _train(tmp_path / "run", 40, steps="20:25,30:32", **step_from)
    assert losses == _train(tmp_path / "all", 40, **step_from)
    trace = read_trace(RunDirectory(tmp_path / "run").attempt(0).trace_file(0))
    inside = [20, 21, 22, 23, 24, 30, 31]
    assert sorted(set(trace.tables["phases"]["step"].tolist())) == inside
    steps = trace.tables["steps"]
    assert steps["step"].tolist() == list(range(40))
    is_plain = (steps["flags"] & StepFlag.PLAIN) != 0
    assert steps["step"][~is_plain].tolist() == inside
    assert ((steps["flags"][is_plain] & StepFlag.WARMUP) != 0).all()  # for readers that do not know the other mark
    events = trace.tables["events"]
    switches = events["kind"] == EventKind.SWITCH
    assert events["step"][switches].tolist() == [0, 20, 25, 30, 32]
    assert events["code"][switches].tolist() == [0, 2, 0, 2, 0]


def test_a_level_without_phases_marks_its_steps(tmp_path: Path) -> None:
    _train(tmp_path / "run", 6, detail="collectives")
    trace = read_trace(RunDirectory(tmp_path / "run").attempt(0).trace_file(0))
    assert len(trace.tables["phases"]) == 0
    marks = StepFlag.UNPHASED | StepFlag.WARMUP
    assert trace.tables["steps"]["flags"].tolist() == [StepFlag.PLAIN | StepFlag.WARMUP, *[marks] * 5]


def test_a_run_directory_of_somebody_else_is_one_warning_and_the_job_goes_on(
    tmp_path: Path, give_away: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    give_away(run)
    _train(run, 3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and str(run) in lines[0] and "belongs to" in lines[0] and "another run directory" in lines[0]
    assert len(read_trace(RunDirectory(run).attempt(0).trace_file(0)).tables["steps"]) == 3


@each_case("mode", [0o775, 0o757, 0o1777], ids=oct)
def test_a_run_directory_that_others_had_made_writable_is_one_warning(
    tmp_path: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(mode)
    _train(run, 3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "can be written to by" in lines[0] and "chmod go-w" in lines[0]


def test_nothing_is_said_of_a_run_directory_that_has_the_mode_of_the_umask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(0o002)
    try:
        _train(tmp_path / "run", 3)
    finally:
        os.umask(before)
    assert capsys.readouterr().err == ""


def test_a_run_directory_in_which_no_attempt_has_a_number_left_is_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "attempt-999999999").mkdir(parents=True)
    (tmp_path / "run" / f"attempt-{'9' * 200}").mkdir()
    _train(tmp_path / "run", 3)
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing is recorded" in line and "no number is left" in line
