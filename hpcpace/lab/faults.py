"""The faults of a lab: their records, how they start and end, and the process of each.

A fault is a record (`FaultRecord`, a file in the lab's folder) and, while it is scheduled or active, a process that
holds it, a program that is this module: it waits for the start, injects the fault, and undoes it at its end or on
SIGTERM. It writes start, end, and what happens in between to the lab's log of truth. There is no server.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import psutil

from hpcpace.core.codec import convert, parse_json
from hpcpace.core.errors import HpcpaceError, UsageError
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import write_json
from hpcpace.lab.fabric import lab_environ
from hpcpace.lab.fault_kinds import KINDS, InsideLab, KillHost, LabFault, Wait
from hpcpace.lab.plan import LabFiles, LabPlan, TruthLog, read_config, writable_to_owner_only

UNFINISHED = ("scheduled", "active")
_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class FaultRecord:
    """A fault as it was requested, and its current state.

    Attributes:
        fault_id: f1, f2, ...
        kind: a key of KINDS.
        settings: settings of the fault.
        start_s: seconds from the request to the start.
        duration_s: seconds from the start until it is undone; None if it lasts until somebody undoes it.
        state: scheduled, active, over, failed, or lost if its process has died.
        pid: the process that holds it, by its PID in the lab; 0 before that process runs.
        message: why it failed, or how it ended.
    """

    fault_id: str
    kind: str
    settings: dict[str, Any]
    start_s: float
    duration_s: float | None
    state: str = "scheduled"
    pid: int = 0
    message: str = ""

    @property
    def fault(self) -> LabFault:
        """The fault itself."""
        return KINDS[self.kind](**self.settings)

    def write(self, files: LabFiles) -> None:
        """Write the record to the lab's folder."""
        write_json(files.fault_json(self.fault_id), dataclasses.asdict(self))


def fault_records(files: LabFiles) -> list[FaultRecord]:
    """Return all faults of a lab, the oldest first."""
    records = [convert(parse_json(path.read_text()), FaultRecord) for path in files.faults_dir.glob("f*.json")]
    found = [record if _is_held(record) else dataclasses.replace(record, state="lost") for record in records]
    return sorted(found, key=lambda record: int(record.fault_id[1:]))


def _is_held(record: FaultRecord) -> bool:
    if record.state not in UNFINISHED or not record.pid:
        return True
    try:
        return record.fault_id in psutil.Process(record.pid).cmdline()
    except psutil.Error:
        return False


def start_fault(
    lab: InsideLab, fault: LabFault, *, start_s: float = 0.0, duration_s: float | None = None
) -> FaultRecord:
    """Start a fault and return its record once the fault is active, or at once if it is scheduled for later.

    Raises:
        UsageError: the fault does not fit the lab, or its target has a fault of this kind already.
        HpcpaceError: the fault could not be injected.
    """
    fault.check(lab)
    for option, value in (("--start", start_s), ("--duration", duration_s)):
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{option} is {value:g}: it must be a number of seconds, at least 0")
    records = fault_records(lab.files)
    for other in records:
        if other.state in (*UNFINISHED, "lost") and (other.kind, other.fault.target) == (fault.kind, fault.target):
            raise UsageError(
                f"{fault.target} has a fault of this kind already, {other.fault_id}: undo it first with "
                f"`hpcpace lab fault undo {other.fault_id}`"
            )
    with writable_to_owner_only():
        record = FaultRecord(
            fault_id=_new_id(lab.files, len(records) + 1),
            kind=fault.kind,
            settings=fault.settings(),
            start_s=start_s,
            duration_s=duration_s,
        )
        record.write(lab.files)
        _spawn_holder(lab.files, record.fault_id)
    states = ("scheduled",) if start_s == 0 else ()
    return _wait_while(lab.files, record.fault_id, states=states)


def _new_id(files: LabFiles, first: int) -> str:
    """Return and reserve the first free id, counting from `first`; concurrent commands get different ids."""
    for number in itertools.count(first):
        with suppress(FileExistsError):
            (files.faults_dir / f"f{number}").touch(exist_ok=False)
            break
    return f"f{number}"


def undo_fault(lab: InsideLab, fault_id: str) -> FaultRecord:
    """Undo a fault, or cancel one that has not started, and return its record.

    Raises:
        UsageError: there is no such fault, or it is over already.
        HpcpaceError: the fault could not be undone.
    """
    record = next((record for record in fault_records(lab.files) if record.fault_id == fault_id), None)
    if record is None:
        raise UsageError(f"no fault {fault_id!r}: `hpcpace lab fault list` lists all faults")
    if record.state == "lost":
        with writable_to_owner_only():
            record.fault.switch(lab, False)
            record = dataclasses.replace(record, state="over", message="its process had died")
            record.write(lab.files)
        return record
    if record.state not in UNFINISHED:
        raise UsageError(f"fault {fault_id} is {record.state} already")
    os.kill(record.pid, signal.SIGTERM)
    return _wait_while(lab.files, fault_id, states=UNFINISHED)


def end_faults_of(lab: InsideLab, host: str) -> None:
    """Undo the active faults of a host and its link, because they end with the host, and the log of truth must say so.

    Raises:
        HpcpaceError: a fault could not be undone.
    """
    for record in fault_records(lab.files):
        if record.state in ("active", "lost") and record.kind != KillHost.kind and record.fault.target == host:
            undo_fault(lab, record.fault_id)


def _spawn_holder(files: LabFiles, fault_id: str) -> None:
    """Start the process that holds a fault, in its own session."""
    with files.log(fault_id).open("wb") as log:
        subprocess.Popen(
            [sys.executable, "-P", "-m", "hpcpace.lab.faults", files.name, fault_id],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=lab_environ(files),
            start_new_session=True,
        )


def _wait_while(files: LabFiles, fault_id: str, *, states: tuple[str, ...]) -> FaultRecord:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        record = next(record for record in fault_records(files) if record.fault_id == fault_id)
        if record.state == "failed":
            raise HpcpaceError(f"fault {fault_id} failed: {record.message}")
        if record.pid and record.state not in states:
            return record
        if time.monotonic() > deadline_s:
            raise HpcpaceError(
                f"fault {fault_id} is still {record.state} after {_TIMEOUT_S:g} s; its log is {files.log(fault_id)}"
            )
        time.sleep(0.02)


def hold(lab: InsideLab, record: FaultRecord, undone: threading.Event) -> FaultRecord:
    """Hold a fault from its start to its end and return its final record.

    Args:
        lab: the lab that it happens in.
        record: the fault.
        undone: set to undo the fault at once.
    """
    fault, log = record.fault, TruthLog(lab.files.truth)
    request = {"fault_id": record.fault_id, "kind": record.kind, "target": fault.target, "settings": record.settings}

    def note(event: str, **facts: Any) -> None:
        log.write(event, **request, **facts)

    if undone.wait(record.start_s):
        note("fault-called-off")
        return dataclasses.replace(record, state="over", message="cancelled before its start")
    if isinstance(fault, KillHost):
        end_faults_of(lab, fault.host)
    begin_ns = time.monotonic_ns()
    fault.switch(lab, True)
    note("fault-begin", applied_in_ns=time.monotonic_ns() - begin_ns, duration_s=record.duration_s)
    if fault.is_instant:
        return dataclasses.replace(record, state="over")
    dataclasses.replace(record, state="active").write(lab.files)
    try:
        fault.hold(lab, _until(undone, record.duration_s), note)
    finally:
        begin_ns = time.monotonic_ns()
        fault.switch(lab, False)
        note("fault-end", applied_in_ns=time.monotonic_ns() - begin_ns)
    return dataclasses.replace(record, state="over")


def _until(undone: threading.Event, duration_s: float | None) -> Wait:
    end_s = None if duration_s is None else time.monotonic() + duration_s

    def wait(time_s: float | None) -> bool:
        left_s = None if end_s is None else max(end_s - time.monotonic(), 0.0)
        limits = [limit for limit in (time_s, left_s) if limit is not None]
        return undone.wait(min(limits, default=None)) or (end_s is not None and time.monotonic() >= end_s)

    return wait


def main(name: str, fault_id: str) -> int:
    """Hold a fault of a lab; return an exit status."""
    files = LabFiles.of(name)
    lab = InsideLab(LabPlan(read_config(files)), files)
    undone = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: undone.set())
    record = next(record for record in fault_records(files) if record.fault_id == fault_id)
    record = dataclasses.replace(record, pid=os.getpid())
    record.write(files)
    try:
        record = hold(lab, record, undone)
    except (HpcpaceError, OSError) as error:
        record = dataclasses.replace(record, state="failed", message=str(error))
        TruthLog(files.truth).write("fault-failed", fault_id=fault_id, kind=record.kind, message=str(error))
    record.write(files)
    return 0 if record.state == "over" else 4


if __name__ == "__main__":
    with writable_to_owner_only():
        sys.exit(main(sys.argv[1], sys.argv[2]))
