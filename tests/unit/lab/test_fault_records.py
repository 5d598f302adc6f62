"""Faults as files: written, read back, started once a target, undone where their process has died."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpcpace.core.errors import HpcpaceError, UsageError
from hpcpace.lab import fault_kinds, faults
from hpcpace.lab.fault_kinds import PauseHost, SlowLink, Traffic
from hpcpace.lab.faults import FaultRecord, _new_id, fault_records, start_fault, undo_fault


def record_of(fault_id: str, **changes: object) -> FaultRecord:
    record = FaultRecord(
        fault_id=fault_id,
        kind="slow-link",
        settings={"link": "leaf1", "rate": "100mbit"},
        start_s=0.0,
        duration_s=None,
    )
    return dataclasses.replace(record, **changes)


@pytest.fixture
def holder(monkeypatch, files):
    """Let no process hold a fault: return the ids of those that were to be held, which turn into `becomes`."""

    def use(**becomes: object) -> list[str]:
        spawned = []

        def spawn(_: object, fault_id: str) -> None:
            spawned.append(fault_id)
            record = next(record for record in fault_records(files) if record.fault_id == fault_id)
            dataclasses.replace(record, **becomes).write(files)

        monkeypatch.setattr(faults, "_spawn_holder", spawn)
        return spawned

    return use


@pytest.mark.parametrize(
    "fault",
    [
        SlowLink(link="n1", rate="10mbit"),
        Traffic(source="n1", destination="n2", rate=None, streams=4),
        PauseHost(host="n4"),
    ],
    ids=lambda fault: fault.kind,
)
def test_a_record_is_read_back_as_it_was_written(files, fault):
    record = record_of("f1", kind=fault.kind, settings=fault.settings(), start_s=1.5, duration_s=2.0, state="over")
    record.write(files)
    assert fault_records(files) == [record]
    assert fault_records(files)[0].fault == fault


def test_records_come_in_the_order_of_their_numbers(files):
    for number in (10, 2, 1):
        record_of(f"f{number}").write(files)
    assert [record.fault_id for record in fault_records(files)] == ["f1", "f2", "f10"]


@pytest.mark.parametrize("state", ["scheduled", "active"])
def test_a_fault_is_lost_where_its_process_has_died(files, waiting_process, state):
    process = waiting_process("f1")
    record = record_of("f1", state=state, pid=process.pid)
    record.write(files)
    assert fault_records(files) == [record]
    process.kill()
    process.wait()
    assert fault_records(files) == [dataclasses.replace(record, state="lost")]


def test_another_process_of_the_same_number_does_not_hold_a_fault(files, waiting_process):
    record_of("f1", state="active", pid=waiting_process("f12").pid).write(files)
    assert [record.state for record in fault_records(files)] == ["lost"]


def test_a_fault_that_is_over_needs_no_process(files):
    record_of("f1", state="over", pid=(1 << 22) + 1).write(files)
    assert [record.state for record in fault_records(files)] == ["over"]


def test_starting_a_fault_writes_it_down_and_returns_it_once_it_is_active(lab, holder, waiting_process):
    pid = waiting_process("f1").pid
    spawned = holder(state="active", pid=pid)
    record = start_fault(lab, SlowLink(link="leaf1", rate="100mbit"), duration_s=3.0)
    assert record == record_of("f1", duration_s=3.0, state="active", pid=pid)
    assert spawned == ["f1"]
    assert fault_records(lab.files) == [record]


def test_a_fault_that_starts_later_is_returned_at_once(lab, holder, waiting_process):
    pid = waiting_process("f1").pid
    holder(pid=pid)
    record = start_fault(lab, SlowLink(link="leaf1", rate="100mbit"), start_s=60.0)
    assert record == record_of("f1", start_s=60.0, state="scheduled", pid=pid)


def test_a_fault_that_fails_says_why(lab, holder):
    holder(state="failed", pid=1, message="no such device")
    with pytest.raises(HpcpaceError, match="fault f1 failed: no such device"):
        start_fault(lab, SlowLink(link="leaf1", rate="100mbit"))


def test_a_fault_that_does_not_fit_leaves_nothing_behind(lab, holder):
    spawned = holder()
    with pytest.raises(UsageError):
        start_fault(lab, SlowLink(link="leaf9", rate="100mbit"))
    assert (fault_records(lab.files), spawned) == ([], [])


@pytest.mark.parametrize("state", ["scheduled", "active"])
def test_a_target_has_one_fault_of_a_kind_at_a_time(lab, holder, state):
    spawned = holder()
    record_of("f1", state=state).write(lab.files)
    with pytest.raises(UsageError) as caught:
        start_fault(lab, SlowLink(link="leaf1", rate="1mbit"))
    assert str(caught.value) == (
        "leaf1 has a fault of this kind already, f1: undo it first with `hpcpace lab fault undo f1`"
    )
    assert spawned == []


@pytest.mark.parametrize(
    ("earlier", "fault"),
    [
        (record_of("f1", state="over"), SlowLink(link="leaf1", rate="1mbit")),
        (record_of("f1", state="active"), SlowLink(link="leaf2", rate="1mbit")),
        (
            record_of("f1", state="active", kind="pause-host", settings={"host": "n1"}),
            SlowLink(link="n1", rate="1mbit"),
        ),
    ],
    ids=["over", "another target", "another kind"],
)
def test_a_target_may_have_a_fault_again_and_faults_of_other_kinds(lab, holder, earlier, fault):
    spawned = holder(state="over", pid=1)
    earlier.write(lab.files)
    assert start_fault(lab, fault).fault_id == "f2"
    assert spawned == ["f2"]


def test_refuses_to_undo_a_fault_that_is_not_there(lab):
    with pytest.raises(UsageError, match="no fault 'f1': `hpcpace lab fault list` lists all faults"):
        undo_fault(lab, "f1")


@pytest.mark.parametrize("state", ["over", "failed"])
def test_refuses_to_undo_a_fault_that_has_come_to_its_end(lab, state):
    record_of("f1", state=state).write(lab.files)
    with pytest.raises(UsageError, match=f"fault f1 is {state} already"):
        undo_fault(lab, "f1")


def test_undoes_a_fault_itself_where_the_process_of_it_has_died(monkeypatch, lab):
    shaped = []
    monkeypatch.setattr(fault_kinds, "set_rate", lambda link, rate_bps, **_: shaped.append((link.name, rate_bps)))
    record_of("f1", state="active", pid=(1 << 22) + 1).write(lab.files)
    record = undo_fault(lab, "f1")
    assert shaped == [("leaf1", 500_000_000)]
    assert (record.state, record.message) == ("over", "its process had died")
    assert fault_records(lab.files) == [record]


def test_no_two_faults_get_one_id(lab):
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: _new_id(lab.files, 1), range(40)))
    assert sorted(ids, key=lambda fault_id: int(fault_id[1:])) == [f"f{number}" for number in range(1, 41)]
