"""The log of truth, to which several processes append."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections import Counter

from hpcpace.lab.plan import LabPlan, TruthLog
from hpcpace.lab.settings import LabConfig

_WRITER = """
import sys
from pathlib import Path
from hpcpace.lab.plan import TruthLog
log = TruthLog(Path(sys.argv[1]))
sys.stdin.readline()
for number in range(300):
    log.write("event", writer=sys.argv[2], number=number, filling="x" * (number * 37 % 9000))
"""


def test_lines_of_two_processes_do_not_mix(tmp_path):
    log = TruthLog(tmp_path / "truth.jsonl")
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(log.path), name], stdin=subprocess.PIPE) for name in "ab"
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"go\n")
        writer.stdin.close()
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    events = log.read()
    assert Counter(event["writer"] for event in events) == {"a": 300, "b": 300}
    for name in "ab":
        assert [event["number"] for event in events if event["writer"] == name] == list(range(300))
    assert all(len(event["filling"]) == event["number"] * 37 % 9000 for event in events)


def test_every_event_has_the_time_of_both_clocks(tmp_path):
    log = TruthLog(tmp_path / "truth.jsonl")
    before = time.time_ns(), time.monotonic_ns()
    log.write("fault-begin", fault_id="f1")
    (event,) = log.read()
    assert before[0] <= event["unix_ns"] <= time.time_ns()
    assert before[1] <= event["monotonic_ns"] <= time.monotonic_ns()
    assert (event["event"], event["fault_id"]) == ("fault-begin", "f1")


def test_says_what_the_lab_itself_is(tmp_path):
    plan = LabPlan(LabConfig(hosts=3, leaves=2, share=("/tmp/data",)))
    log = TruthLog(tmp_path / "truth.jsonl")
    log.write_lab(plan)
    (event,) = log.read()
    assert event["event"] == "lab"
    assert event["config"] == {**dataclasses.asdict(plan.config), "share": ["/tmp/data"]}
    assert [(host["name"], host["clock_offset_s"]) for host in event["hosts"]] == [
        ("n1", 1000),
        ("n2", 2000),
        ("n3", 3000),
    ]
    assert [(link["name"], link["rate_bps"]) for link in event["links"]] == [
        ("n1", 10**9),
        ("n2", 10**9),
        ("n3", 10**9),
        ("leaf1", 5 * 10**8),
        ("leaf2", 5 * 10**8),
    ]
    assert event["emulation"] == plan.emulation


def test_a_message_that_quotes_a_secret_is_kept_without_it(tmp_path):
    log = TruthLog(tmp_path / "truth.jsonl")
    log.write("fault-failed", fault_id="f1", message="['srun', '--token', 'correct-horse-7'] failed")
    (event,) = log.read()
    assert event["message"] == "['srun', '--token', '[redacted]'] failed" and event["fault_id"] == "f1"
