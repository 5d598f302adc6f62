"""What a rank writes, says and does about a step that lasts too long, on a clock that the test sets."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from hpcpace.core.environment import HostIdentity
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.core.text import NS_PER_S
from hpcpace.hang.notices import HangFolder, NoticedCall, read_notices, write
from hpcpace.hang.verdict import HangWords
from hpcpace.hang.views import Doing
from hpcpace.observe import watchdog as watchdog_module
from hpcpace.observe.alarm import Alarm
from hpcpace.observe.ends import EndEvent
from hpcpace.observe.hang_snapshot import Operations, excuse_of, operations, thread_stacks
from hpcpace.observe.settings import HangConfig
from hpcpace.observe.watchdog import STOPPED, Look, Watchdog
from hpcpace.trace.schema import Op, Phase

WORDS = HangWords(headline="hang: all_reduce 7 waits for rank 1", why=("rank 0 waits",), advice="look at rank 1")
HOST = HostIdentity(host="n1", boot_id="b", host_key="k")
CALL = NoticedCall(group="0", op="all_reduce", seq=7, size_bytes=4, peer=-1, entered_ns=5, step=30)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return RunDirectory(tmp_path / "run").new_attempt()


class Rank:
    """A rank with a watchdog and a clock of its own, which looks every other second."""

    def __init__(
        self, attempt: Attempt, rank: int = 0, *, num_ranks: int = 1, on_hang: str = "report", verdict: Any = WORDS
    ) -> None:
        self.now_s = 0
        self.step = self.num_moves = 0
        self.under_way: tuple[Phase, int] | None = None
        self.told: list[str] = []
        self.warned: list[str] = []
        self.verdict = verdict
        self.num_asked = 0
        self.rescued: list[EndEvent] = []
        self.watchdog = Watchdog(
            rank=rank,
            identity=HOST,
            attempt=attempt,
            settings=HangConfig(on_hang=on_hang),
            watched=self,
            alarm=Alarm(
                attempt, rank, num_ranks=num_ranks, stops=on_hang == "stop", tell=self.told.append, ask=self._ask
            ),
            warn=self.warned.append,
            clock=lambda: self.now_s * NS_PER_S,
        )

    def seen(self) -> Look:
        return Look(step=self.step, num_moves=self.num_moves, under_way=self.under_way)

    def operations(self, rank: int) -> Operations:
        return Operations(calls=(CALL,), is_complete=True)

    def rescue(self, end: EndEvent) -> None:
        self.rescued.append(end)

    def _ask(self, attempt: Attempt, timeout_s: float) -> HangWords | None:
        self.num_asked += 1
        if isinstance(self.verdict, Exception):
            raise self.verdict
        verdict: HangWords | None = self.verdict
        return verdict

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            self.stay(1)

    def stay(self, num_s: int) -> None:
        for _ in range(num_s):
            self.now_s += 1
            self.watchdog.look()


def trained_pair(attempt: Attempt) -> tuple[list[Rank], list[str]]:
    """Return two ranks that a hang ends, and what the second one says before it ends."""
    ranks = [Rank(attempt, number, num_ranks=2, on_hang="stop") for number in range(2)]
    stopping: list[str] = []
    ranks[1].watchdog.stopping = stopping.append
    for rank in ranks:
        rank.train(30)
    return ranks, stopping


def stay_all(ranks: list[Rank], num_s: int) -> None:
    for _ in range(num_s):
        for rank in ranks:
            rank.stay(1)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(watchdog_module, "_exit", leave)
    monkeypatch.setattr(watchdog_module, "_GRACE_S", 0.0)
    return codes


def test_a_rank_that_trains_writes_and_says_nothing(attempt: Attempt) -> None:
    rank = Rank(attempt)
    rank.train(300)
    rank.watchdog.stop()
    assert not attempt.hang_dir.exists()
    assert rank.told == rank.warned == []


def test_a_step_that_lasts_too_long_is_written_down(attempt: Attempt) -> None:
    rank = Rank(attempt, 3)
    rank.train(30)
    rank.stay(62)
    notice = read_notices(attempt)[3]
    assert (notice.rank, notice.host, notice.pid, notice.step) == (3, "n1", os.getpid(), 30)
    assert notice.limit_ns == 60 * NS_PER_S < notice.step_age_ns
    assert notice.usual_step_ns == NS_PER_S
    assert notice.calls == (CALL,)
    assert notice.is_complete
    assert notice.doing == Doing.COMPUTING
    assert notice.num_looks == 1
    assert notice.has_moved is None
    assert any("test_a_step_that_lasts_too_long_is_written_down" in frame for frame in notice.stack)
    assert notice.ended == ""


def test_a_second_look_after_twice_the_time_shows_whether_it_moves(attempt: Attempt) -> None:
    rank = Rank(attempt)
    rank.train(30)
    rank.stay(125)
    assert read_notices(attempt)[0].num_looks == 2
    assert read_notices(attempt)[0].has_moved is False


def test_a_step_that_ends_after_all_is_marked_as_resumed(attempt: Attempt) -> None:
    rank = Rank(attempt)
    rank.train(30)
    rank.stay(70)
    rank.train(1)
    notice = read_notices(attempt)[0]
    assert (notice.ended, notice.ended_ns) == ("resumed", 101 * NS_PER_S)


def test_a_session_that_ends_in_a_long_step_closes_its_notice(attempt: Attempt) -> None:
    rank = Rank(attempt)
    rank.train(30)
    rank.stay(70)
    rank.watchdog.stop()
    assert read_notices(attempt)[0].ended == "closed"


def test_a_session_that_ends_before_the_next_look_has_resumed_all_the_same(attempt: Attempt) -> None:
    rank = Rank(attempt)
    rank.train(30)
    rank.stay(62)
    rank.step += 3
    rank.watchdog.stop()
    assert read_notices(attempt)[0].ended == "resumed"


def test_the_phase_that_is_under_way_is_written_down(attempt: Attempt) -> None:
    rank = Rank(attempt)
    rank.train(30)
    rank.under_way = (Phase.DATA, 31 * NS_PER_S)
    rank.stay(62)
    notice = read_notices(attempt)[0]
    assert (notice.doing, notice.doing_since_ns) == (Doing.LOADING, 31 * NS_PER_S)


def test_one_rank_speaks_once_for_all(attempt: Attempt) -> None:
    ranks = [Rank(attempt, number, num_ranks=4) for number in range(4)]
    for rank in ranks:
        rank.train(30)
    stay_all(ranks, 200)
    assert [len(rank.told) for rank in ranks] == [1, 0, 0, 0]
    run = attempt.path.parent
    assert ranks[0].told[0].splitlines() == [
        f"{WORDS.headline}; step 30 has lasted 61.0 s (usual: 1.00 s): hpcpace hang {run}",
        "  rank 0 waits",
    ]
    assert sum(rank.num_asked for rank in ranks) == 1


def test_a_rank_that_notices_while_another_asks_for_the_verdict_is_silent(attempt: Attempt) -> None:
    ranks = [Rank(attempt, number, num_ranks=2) for number in range(2)]
    ask = ranks[1]._ask

    def ask_slowly(attempt: Attempt, timeout_s: float) -> HangWords | None:
        ranks[0].stay(70)
        return ask(attempt, timeout_s)

    ranks[1].watchdog._alarm._ask = ask_slowly
    for rank in ranks:
        rank.train(30)
    ranks[1].stay(70)
    assert [len(rank.told) for rank in ranks] == [0, 1]


def test_another_rank_speaks_where_the_lowest_one_has_been_stopped_since(attempt: Attempt) -> None:
    ranks = [Rank(attempt, number, num_ranks=2) for number in range(2)]
    for rank in ranks:
        rank.train(30)
    stay_all(ranks, 61)
    ranks[1].stay(60)
    assert ranks[0].told == []
    assert len(ranks[1].told) == 1


def test_nobody_speaks_while_a_rank_saves_a_checkpoint(attempt: Attempt) -> None:
    ranks, _ = trained_pair(attempt)
    ranks[1].under_way = (Phase.CHECKPOINT, ranks[1].now_s * NS_PER_S)
    stay_all(ranks, 900)
    assert read_notices(attempt)[1].excuse == "it saves a checkpoint"
    ranks[1].under_way = None
    stay_all(ranks, 5)
    for rank in ranks:
        rank.train(3)
    assert [rank.told for rank in ranks] == [[], []]


def test_a_job_ends_by_the_verdict_after_twice_the_time(attempt: Attempt, exits: list[int]) -> None:
    ranks, stopping = trained_pair(attempt)
    with pytest.raises(SystemExit):
        stay_all(ranks, 200)
    assert 120 <= ranks[0].now_s - 30 < 127
    with pytest.raises(SystemExit):
        ranks[1].stay(10)
    assert exits == [4, 4]
    assert [rank.rescued for rank in ranks] == [[STOPPED], [STOPPED]]
    last = ranks[0].told[-1].splitlines()[-1]
    assert last.startswith(f"{WORDS.headline}; step 30 has lasted 12")
    assert "the job ends here: hpcpace hang" in last
    assert stopping == [last]
    assert ranks[1].told == []


@pytest.mark.parametrize(("late_s", "end_s"), [(0, 120), (30, 150), (100, 220)])
def test_a_rank_that_is_late_with_its_notice_is_waited_for(
    attempt: Attempt, exits: list[int], late_s: int, end_s: int
) -> None:
    ranks = [Rank(attempt, number, num_ranks=2, on_hang="stop") for number in range(2)]
    for rank in ranks:
        rank.train(30)
    ranks[0].stay(late_s)
    with pytest.raises(SystemExit):
        stay_all(ranks, 200)
    assert end_s <= ranks[0].now_s - 30 < end_s + 7
    assert [notice.has_moved for notice in read_notices(attempt).values()] == [False, False]


def test_a_rank_that_never_writes_a_notice_delays_the_end_by_one_look(attempt: Attempt, exits: list[int]) -> None:
    rank = Rank(attempt, num_ranks=2, on_hang="stop")
    rank.train(30)
    with pytest.raises(SystemExit):
        rank.stay(200)
    assert 180 <= rank.now_s - 30 < 187


def test_a_rank_that_was_stopped_ends_with_the_others_once_it_wakes(attempt: Attempt, exits: list[int]) -> None:
    ranks, _ = trained_pair(attempt)
    with pytest.raises(SystemExit):
        ranks[0].stay(200)
    ranks[1].now_s += 130
    with pytest.raises(SystemExit):
        ranks[1].stay(1)
    assert exits == [4, 4]


@pytest.mark.parametrize("has_noticed", [True, False])
def test_a_rank_that_fails_since_the_others_have_ended_ends_by_the_verdict_as_well(
    attempt: Attempt, exits: list[int], has_noticed: bool
) -> None:
    ranks, stopping = trained_pair(attempt)
    with pytest.raises(SystemExit):
        stay_all(ranks if has_noticed else ranks[:1], 200)
    with pytest.raises(SystemExit):
        ranks[1].watchdog.stop(by_error=True)
    assert exits == [4, 4]
    assert ranks[1].rescued == [STOPPED]
    assert stopping == [ranks[0].told[-1]]


@pytest.mark.parametrize(("by_error", "num_steps"), [(False, 0), (True, 2)])
def test_a_rank_that_goes_on_after_a_verdict_ends_as_it_would(
    attempt: Attempt, exits: list[int], by_error: bool, num_steps: int
) -> None:
    ranks, _ = trained_pair(attempt)
    with pytest.raises(SystemExit):
        stay_all(ranks, 200)
    ranks[1].step += num_steps
    ranks[1].watchdog.stop(by_error=by_error)
    assert exits == [4]
    assert ranks[1].rescued == []
    assert read_notices(attempt)[1].ended == ("resumed" if num_steps else "closed")


def test_a_rank_that_fails_without_a_verdict_fails(attempt: Attempt, exits: list[int]) -> None:
    rank = Rank(attempt, on_hang="stop")
    rank.train(30)
    rank.stay(70)
    rank.watchdog.stop(by_error=True)
    assert exits == []
    assert read_notices(attempt)[0].ended == "closed"


def test_a_rank_whose_trace_cannot_be_rescued_says_the_verdict_all_the_same(
    attempt: Attempt, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(attempt, on_hang="stop")
    stopping: list[str] = []
    rank.watchdog.stopping = stopping.append

    def fail(end: EndEvent) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(rank, "rescue", fail)
    rank.train(30)
    with pytest.raises(SystemExit):
        rank.stay(200)
    assert exits == [4]
    assert stopping == [rank.told[-1]]
    assert rank.warned == ["while a hang ends this rank: the disk is gone"]


def test_a_rank_that_fails_while_the_watchdog_ends_it_waits_for_that(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(attempt, on_hang="stop")
    left, may_leave = threading.Event(), threading.Event()

    def leave(code: int) -> None:
        assert code == 4
        if may_leave.wait(10):
            left.set()

    monkeypatch.setattr(watchdog_module, "_exit", leave)
    monkeypatch.setattr(watchdog_module, "_GRACE_S", 0.0)
    monkeypatch.setattr(watchdog_module, "_STOP_TIMEOUT_S", 0.0)
    monkeypatch.setattr(rank.watchdog, "look", lambda: rank.watchdog._end_job("verdict"))
    rank.watchdog._tick_s = 0.01
    rank.watchdog.start()
    while not rank.rescued:
        threading.Event().wait(0.01)
    threading.Timer(0.2, may_leave.set).start()
    rank.watchdog.stop(by_error=True)
    assert left.is_set()


def test_a_rank_that_wakes_long_after_a_verdict_goes_on(attempt: Attempt, exits: list[int]) -> None:
    rank = Rank(attempt, on_hang="stop")
    with HangFolder(attempt).open(make=True) as folder:
        folder.write("verdict.json", '{"step": 30, "line": "old", "stops": true, "unix_ns": 1}')
    rank.train(30)
    rank.now_s += 130
    rank.train(10)
    assert exits == []


def test_a_job_that_nobody_is_known_to_hold_up_goes_on(attempt: Attempt, exits: list[int]) -> None:
    rank = Rank(attempt, on_hang="stop", verdict=None)
    rank.train(30)
    rank.stay(600)
    assert exits == []
    assert "no rank is known to wait for another" in rank.told[0]
    assert len(rank.told) == 1


def test_a_job_whose_records_cannot_be_read_goes_on(attempt: Attempt, exits: list[int]) -> None:
    rank = Rank(attempt, on_hang="stop", verdict=RuntimeError("the records cannot be read: X"))
    rank.train(30)
    rank.stay(600)
    assert exits == []
    assert "the records cannot be read: X" in rank.told[0]


def test_a_job_of_which_a_rank_still_moves_goes_on(attempt: Attempt, exits: list[int]) -> None:
    rank = Rank(attempt, num_ranks=2, on_hang="stop")
    rank.train(30)
    rank.stay(100)
    other = replace(read_notices(attempt)[0], rank=1, num_looks=2, earlier_stack=("elsewhere.py:3 in f",))
    for _ in range(40):
        write(attempt, other)
        rank.stay(10)
    assert exits == []


def test_a_job_that_goes_on_while_the_verdict_is_asked_for_is_not_ended(attempt: Attempt, exits: list[int]) -> None:
    rank = Rank(attempt, on_hang="stop")
    ask = rank._ask

    def go_on(attempt: Attempt, timeout_s: float) -> HangWords | None:
        rank.num_moves += rank.num_asked == 1
        return ask(attempt, timeout_s)

    rank.watchdog._alarm._ask = go_on
    rank.train(30)
    rank.stay(140)
    assert rank.num_asked == 2
    assert exits == []


def test_a_verdict_on_an_earlier_step_ends_nobody(attempt: Attempt, exits: list[int]) -> None:
    rank = Rank(attempt, on_hang="stop")
    with HangFolder(attempt).open(make=True) as folder:
        folder.write("verdict.json", '{"step": 12, "line": "old", "stops": true, "unix_ns": 1}')
    rank.train(30)
    rank.stay(100)
    assert exits == []


@pytest.mark.parametrize("content", ["", "[]", '{"step": "x", "line": "a", "stops": true}', '{"step": 30, "line": 7}'])
def test_a_verdict_that_is_none_ends_nobody(attempt: Attempt, exits: list[int], content: str) -> None:
    rank = Rank(attempt, on_hang="stop", verdict=None)
    with HangFolder(attempt).open(make=True) as folder:
        folder.write("verdict.json", content)
    rank.train(30)
    rank.stay(300)
    assert exits == []


def test_a_notice_that_cannot_be_written_is_one_warning(attempt: Attempt) -> None:
    rank = Rank(attempt)
    attempt.hang_dir.write_text("in the way")
    rank.train(30)
    rank.stay(300)
    assert len(rank.warned) == 1
    assert "what holds it up cannot be written" in rank.warned[0]
    assert len(rank.told) == 1


def test_a_fork_neither_waits_for_the_watchdog_nor_ends_its_notice(attempt: Attempt) -> None:
    rank = Rank(attempt)
    rank.train(30)
    rank.stay(62)
    child = os.fork()
    if child == 0:
        rank.watchdog.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert read_notices(attempt)[0].ended == ""


def test_the_thread_looks_until_it_is_stopped(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    rank = Rank(attempt)
    rank.watchdog._tick_s = 0.01
    monkeypatch.setattr(rank.watchdog, "look", looked.set)
    rank.watchdog.start()
    assert looked.wait(10)
    rank.watchdog.stop()
    assert not rank.watchdog._thread.is_alive()


def test_stacks_name_files_lines_and_functions_of_all_threads_but_ours() -> None:
    ready, done = threading.Event(), threading.Event()
    value_of_a_variable = "hunter2"

    def waits_for_ever() -> None:
        ready.set()
        done.wait()

    threads = [threading.Thread(target=waits_for_ever, name=name) for name in ("loader", "hpcpace-flush")]
    for thread in threads:
        thread.start()
    ready.wait()
    stacks = thread_stacks(threading.get_ident())
    done.set()
    for thread in threads:
        thread.join()
    assert stacks[0].is_training
    assert f"{__file__}:" in stacks[0].frames[-1] or "in thread_stacks" in stacks[0].frames[-1]
    names = [stack.name for stack in stacks]
    assert "loader" in names
    assert "hpcpace-flush" not in names
    assert any("in waits_for_ever" in frame for stack in stacks for frame in stack.frames)
    assert value_of_a_variable not in repr(stacks)


@each_case(
    ("frame", "excuse"),
    [
        ("/usr/lib/python3.11/bdb.py:90 in trace_dispatch", "it is in a debugger"),
        ("/x/torch/_inductor/codecache.py:9 in load", "it compiles"),
        ("/x/torch/_dynamo/convert_frame.py:9 in compile", "it compiles"),
        ("/x/train.py:9 in compile", ""),
    ],
)
def test_compilers_and_debuggers_are_reasons_to_take_long(frame: str, excuse: str) -> None:
    assert excuse_of(("/x/train.py:1 in <module>", frame)) == excuse


def test_operations_are_named_by_group_and_rank() -> None:
    found = operations(
        2,
        groups={0: ("world", (0, 1, 2)), 1: ("pp", (2, 0))},
        rows=[(5, 1, 3, int(Op.SEND), 8, 0, 90, 0, 0, 2), (5, 0, 9, int(Op.ALL_REDUCE), 4, -1, 80, 0, 0, 2)],
        entered=[(0, -1, -1, 10), (1, int(Op.SEND), 0, 4), (1, int(Op.RECV), 0, 2), (1, int(Op.RECV), -1, 7)],
        is_complete=True,
    )
    assert [(call.group, call.op, call.seq, call.peer) for call in found.calls] == [
        ("world", "all_reduce", 9, -1),
        ("pp", "send", 3, 0),
    ]
    assert [(one.group, one.source, one.destination, one.num_entered) for one in found.entered] == [
        ("world", -1, -1, 10),
        ("pp", 2, 0, 4),
        ("pp", 0, 2, 2),
    ]
    assert found.is_complete
