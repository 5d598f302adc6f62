"""The process that holds a fault: what it does to the lab, and what it writes into the log of truth."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from hpcpace.core.errors import HpcpaceError
from hpcpace.lab import fault_kinds, faults
from hpcpace.lab import plan as files_module
from hpcpace.lab.fault_kinds import InsideLab, LabFault, Wait
from hpcpace.lab.faults import FaultRecord, fault_records, hold
from hpcpace.lab.plan import TruthLog, write_config


class FakeTime(threading.Event):
    """The time, which stands still but for those who wait for the event; it is set at `set_at_s`."""

    def __init__(self, *, set_at_s: float | None = None) -> None:
        super().__init__()
        self.now_s = 0.0
        self._set_at_s = set_at_s

    def wait(self, timeout: float | None = None) -> bool:
        end_s = float("inf") if timeout is None else self.now_s + timeout
        if self._set_at_s is not None and self._set_at_s <= end_s:
            self.now_s = max(self.now_s, self._set_at_s)
            return True
        assert end_s < float("inf"), "waits for ever"
        self.now_s = end_s
        return False


@dataclass(frozen=True, kw_only=True)
class FakeFault(LabFault):
    """Notes what is asked of it, and fails where it is told to."""

    kind = "fake"
    calls: ClassVar[list[str]] = []
    fails_in: str = ""

    @property
    def target(self) -> str:
        return "n1"

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_in:
            raise HpcpaceError(f"{call} failed")

    def check(self, lab: InsideLab) -> None:
        self._note("check")

    def switch(self, lab: InsideLab, is_on: bool) -> None:
        self._note("apply" if is_on else "undo")

    def hold(self, lab: InsideLab, wait: Wait, note: Callable[..., None]) -> None:
        self._note("hold")
        super().hold(lab, wait, note)


@dataclass(frozen=True, kw_only=True)
class InstantFault(FakeFault):
    kind = "instant"
    is_instant = True


@pytest.fixture(autouse=True)
def _kinds(monkeypatch):
    for kind in (FakeFault, InstantFault):
        monkeypatch.setitem(fault_kinds.KINDS, kind.kind, kind)
    monkeypatch.setattr(FakeFault, "calls", [])


@pytest.fixture
def use(monkeypatch):
    """Let the process that holds a fault live in a time of the test's own."""

    def set_time(time: FakeTime) -> FakeTime:
        clock = SimpleNamespace(monotonic=lambda: time.now_s, monotonic_ns=lambda: round(time.now_s * 1e9))
        monkeypatch.setattr(faults, "time", clock)
        return time

    return set_time


def record_of(
    kind: str = "fake", start_s: float = 0.0, duration_s: float | None = None, **settings: object
) -> FaultRecord:
    return FaultRecord(fault_id="f1", kind=kind, settings=settings, start_s=start_s, duration_s=duration_s)


def events(lab: InsideLab) -> list[str]:
    log = TruthLog(lab.files.truth)
    return [event["event"] for event in log.read()] if log.path.exists() else []


def test_begin_and_end_stand_in_the_log_of_truth(lab, use):
    record = hold(lab, record_of(duration_s=20.0, fails_in=""), use(FakeTime()))
    assert record.state == "over"
    begin, end = TruthLog(lab.files.truth).read()
    asked = {"fault_id": "f1", "kind": "fake", "target": "n1", "settings": {"fails_in": ""}}
    assert asked.items() <= begin.items() and asked.items() <= end.items()
    assert (begin["event"], begin["duration_s"], end["event"]) == ("fault-begin", 20.0, "fault-end")
    assert begin["monotonic_ns"] <= end["monotonic_ns"]
    assert min(begin["applied_in_ns"], end["applied_in_ns"]) >= 0


def test_begins_after_its_start_and_ends_after_its_duration(lab, use):
    time = use(FakeTime())
    hold(lab, record_of(start_s=5.0, duration_s=20.0), time)
    assert time.now_s == 25.0
    assert FakeFault.calls == ["apply", "hold", "undo"]
    assert events(lab) == ["fault-begin", "fault-end"]


def test_without_a_duration_it_ends_when_it_is_undone(lab, use):
    time = use(FakeTime(set_at_s=1234.5))
    record = hold(lab, record_of(), time)
    assert (time.now_s, record.state) == (1234.5, "over")
    assert FakeFault.calls == ["apply", "hold", "undo"]


def test_it_may_be_undone_before_its_duration_is_over(lab, use):
    time = use(FakeTime(set_at_s=7.0))
    hold(lab, record_of(duration_s=20.0), time)
    assert time.now_s == 7.0
    assert events(lab) == ["fault-begin", "fault-end"]


def test_one_that_is_called_off_before_its_start_does_nothing(lab, use):
    time = use(FakeTime(set_at_s=3.0))
    record = hold(lab, record_of(start_s=5.0, duration_s=20.0), time)
    assert (record.state, record.message) == ("over", "cancelled before its start")
    assert FakeFault.calls == []
    assert events(lab) == ["fault-called-off"]


def test_its_record_says_that_it_is_active_while_it_is_held(monkeypatch, lab, use):
    seen: list[FaultRecord] = []
    monkeypatch.setattr(FakeFault, "hold", lambda self, lab, wait, note: seen.extend(fault_records(lab.files)))
    hold(lab, record_of(duration_s=1.0), use(FakeTime()))
    assert [record.state for record in seen] == ["active"]


def test_an_instant_one_begins_and_is_over(lab, use):
    record = hold(lab, record_of("instant"), use(FakeTime()))
    assert record.state == "over"
    assert FakeFault.calls == ["apply"]
    assert events(lab) == ["fault-begin"]


def test_it_is_undone_when_holding_it_fails(lab, use):
    time = use(FakeTime())
    with pytest.raises(HpcpaceError, match="hold failed"):
        hold(lab, record_of(fails_in="hold"), time)
    assert FakeFault.calls == ["apply", "hold", "undo"]
    assert events(lab) == ["fault-begin", "fault-end"]


def test_the_log_has_no_begin_of_one_that_could_not_be_applied(lab, use):
    time = use(FakeTime())
    with pytest.raises(HpcpaceError, match="apply failed"):
        hold(lab, record_of(fails_in="apply"), time)
    assert events(lab) == []


def test_the_log_has_no_end_of_one_that_could_not_be_undone(lab, use):
    time = use(FakeTime())
    with pytest.raises(HpcpaceError, match="undo failed"):
        hold(lab, record_of(duration_s=1.0, fails_in="undo"), time)
    assert events(lab) == ["fault-begin"]


def test_a_link_flaps_at_the_times_that_were_asked_for(monkeypatch, lab, use):
    time = use(FakeTime())
    seen: list[tuple[float, str, bool]] = []
    monkeypatch.setattr(fault_kinds, "set_up", lambda link, is_up: seen.append((time.now_s, link.name, is_up)))
    hold(lab, record_of("flap-link", 2.0, 10.0, link="leaf1", period_s=4.0, down_s=1.0), time)
    assert seen == [
        (2.0, "leaf1", False),
        (3.0, "leaf1", True),
        (6.0, "leaf1", False),
        (7.0, "leaf1", True),
        (10.0, "leaf1", False),
        (11.0, "leaf1", True),
        (12.0, "leaf1", True),
    ]
    assert events(lab) == ["fault-begin", *["link-down", "link-up"] * 3, "fault-end"]


@pytest.fixture
def process(monkeypatch, lab, use) -> Any:
    """Run the process that holds a fault, in this one; return its exit status."""
    monkeypatch.setattr(files_module, "BASE", lab.files.folder.parent)
    write_config(lab.files, lab.plan.config)
    use(FakeTime())
    before = signal.getsignal(signal.SIGTERM)
    yield lambda: faults.main(lab.files.name, "f1")
    signal.signal(signal.SIGTERM, before)


def test_the_process_writes_down_what_has_become_of_the_fault(process, lab):
    record_of("instant").write(lab.files)
    assert process() == 0
    (record,) = fault_records(lab.files)
    assert record.state == "over"
    assert record.pid > 0


@pytest.mark.parametrize("call", ["apply", "undo"])
def test_the_process_writes_down_why_a_fault_failed(process, lab, monkeypatch, call):
    monkeypatch.setattr(FakeFault, "hold", lambda self, lab, wait, note: None)
    record_of(duration_s=1.0, fails_in=call).write(lab.files)
    assert process() == 4
    (record,) = fault_records(lab.files)
    assert (record.state, record.message) == ("failed", f"{call} failed")
    event = TruthLog(lab.files.truth).read()[-1]
    assert (event["event"], event["fault_id"], event["message"]) == ("fault-failed", "f1", f"{call} failed")


def test_sigterm_undoes_the_fault(process, lab, monkeypatch):
    monkeypatch.setattr(FakeFault, "switch", lambda self, lab, is_on: is_on and signal.raise_signal(signal.SIGTERM))
    record_of().write(lab.files)
    assert process() == 0
    assert events(lab) == ["fault-begin", "fault-end"]
