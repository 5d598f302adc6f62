"""The process that holds a fault: it waits for the start, injects the fault, and undoes it at its end or on SIGTERM.

It writes start, end, and what happens in between to the lab's log of truth, with times.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from typing import Any

from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.fault import InsideLab, Wait
from hpcpace.lab.fault_kinds import KillHost
from hpcpace.lab.faults import FaultRecord, end_faults_of, fault_records
from hpcpace.lab.files import LabFiles, writable_to_owner_only
from hpcpace.lab.plan import LabPlan, TruthLog, read_config


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
    fault.apply(lab)
    note("fault-begin", applied_in_ns=time.monotonic_ns() - begin_ns, duration_s=record.duration_s)
    if fault.is_instant:
        return dataclasses.replace(record, state="over")
    dataclasses.replace(record, state="active").write(lab.files)
    try:
        fault.hold(lab, _until(undone, record.duration_s), note)
    finally:
        begin_ns = time.monotonic_ns()
        fault.undo(lab)
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
