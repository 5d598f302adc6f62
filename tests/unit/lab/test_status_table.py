"""The state of a lab as text."""

from __future__ import annotations

import dataclasses
import io
import re
import sys

from cases import each_case
from rich.console import Console

from hpcpace.lab.fabric import LinkCounters
from hpcpace.lab.fault_kinds import KINDS
from hpcpace.lab.faults import FaultRecord
from hpcpace.lab.lab import HostStatus, LabStatus, fault_words, print_status, table_console
from hpcpace.lab.plan import LabPlan
from hpcpace.lab.settings import LabConfig

_LARGEST = (1 << 62) - 1
_SETTINGS = {
    "slow-host": {"host": "n250", "cores": 0.123},
    "slow-link": {"link": "leaf250", "rate": "999.5mbit"},
    "flap-link": {"link": "leaf250", "period_s": 1000.5, "down_s": 100.25},
    "loss": {"link": "leaf250", "share": 0.0123},
    "latency": {"link": "leaf250", "delay_s": 0.0123, "way": "down"},
    "reorder": {"link": "leaf250", "delay_s": 0.0123, "share": 0.0123, "way": "down"},
    "traffic": {"source": "n249", "destination": "n250", "rate": "999.5mbit", "streams": 64},
    "neighbour": {"host": "n250", "load": "memory", "processes": 64, "core": 1023},
    "pause-host": {"host": "n250"},
    "clock": {"host": "n250", "step_s": -3599.999, "clock": "monotonic"},
    "kill-host": {"host": "n250"},
    "kill-rank": {"job": 99999, "rank": 1023, "signal": "VTALRM"},
    "fill-disk": {"host": "n250", "left_bytes": 1 << 40},
    "mtu": {"host": "n250", "mtu": 65535},
}


def record_of(kind: str, number: int = 1, **changes: object) -> FaultRecord:
    record = FaultRecord(
        fault_id=f"f{number}", kind=kind, settings=_SETTINGS[kind], start_s=0.0, duration_s=None, state="active"
    )
    return dataclasses.replace(record, **changes)


def status_of(config: LabConfig, **changes: object) -> LabStatus:
    """All is well in the lab, and nothing went over its links."""
    plan = LabPlan(config)
    hosts = [
        HostStatus(**dataclasses.asdict(host), is_alive=True, has_slurmd=True, slurm_state="idle", num_cpus_used=0)
        for host in plan.hosts
    ]
    links = [
        LinkCounters(name=link.name, rate_bps=link.rate_bps, is_up=True, tx_bytes=0, rx_bytes=0, dropped=0)
        for link in plan.links.values()
    ]
    status = LabStatus(
        name=config.name,
        emulation="",
        num_cpus_per_host=config.cpus_per_host,
        hosts=tuple(hosts),
        links=tuple(links),
        problems=(),
        jobs=(),
        faults=(),
    )
    return dataclasses.replace(status, **changes)


def text_of(status: LabStatus) -> str:
    file = io.StringIO()
    print_status(Console(file=file, width=100, highlight=False, emoji=False), status)
    return file.getvalue()


def words_of(text: str, first: str) -> list[str]:
    """Return the words of the one line that begins with this one."""
    (line,) = [line.split() for line in text.splitlines() if line.split()[:1] == [first]]
    return line


def test_shows_every_host_and_link():
    status = status_of(LabConfig(hosts=2, leaves=1))
    busy = dataclasses.replace(status.hosts[1], slurm_state="mixed", num_cpus_used=3)
    loaded = dataclasses.replace(status.links[2], tx_bytes=1_234_567, rx_bytes=42, dropped=9)
    text = text_of(dataclasses.replace(status, hosts=(status.hosts[0], busy), links=(*status.links[:2], loaded)))
    hosts, links = text.split(" link ")
    assert hosts.splitlines()[0] == "lab lab: 2 of 2 hosts alive"
    assert words_of(hosts, "n1") == ["n1", "10.77.0.1", "leaf1", "idle", "0", "of", "4", "+1000", "s"]
    assert words_of(hosts, "n2") == ["n2", "10.77.0.2", "leaf1", "mixed", "3", "of", "4", "+2000", "s"]
    assert words_of(links, "n1") == ["n1", "1.00", "Gb/s", "0", "B", "0", "B", "0"]
    assert words_of(links, "leaf1") == ["leaf1", "500", "Mb/s", "1.23", "MB", "42", "B", "9"]


def test_says_which_host_is_dead_and_which_link_is_down():
    status = status_of(LabConfig(hosts=2, leaves=1))
    dead = dataclasses.replace(status.hosts[1], is_alive=False, slurm_state="down*")
    down = dataclasses.replace(status.links[1], is_up=False, rate_bps=0)
    text = text_of(
        dataclasses.replace(status, hosts=(status.hosts[0], dead), links=(status.links[0], down, status.links[2]))
    )
    hosts, links = text.split(" link ")
    assert hosts.splitlines()[0] == "lab lab: 1 of 2 hosts alive"
    assert "down* (host is dead)" in " ".join(words_of(hosts, "n2"))
    assert words_of(links, "n2") == ["n2", "-", "0", "B", "0", "B", "0", "no", "carrier"]
    assert "carrier" not in words_of(links, "n1")


def test_host_whose_slurmd_has_not_come_up_takes_no_jobs_whatever_slurm_says():
    status = status_of(LabConfig(hosts=2, leaves=1))
    booting = dataclasses.replace(status.hosts[1], has_slurmd=False)
    booted = dataclasses.replace(status, hosts=(status.hosts[0], booting))
    assert "idle (no slurmd yet)" in " ".join(words_of(text_of(booted).split(" link ")[0], "n2"))
    assert (status.is_well, booted.is_well) == (True, False)


def test_says_that_computation_is_emulated():
    assert "note: ranks share cores" in text_of(status_of(LabConfig(), emulation="ranks share cores"))
    assert "note:" not in text_of(status_of(LabConfig()))


def test_shows_jobs_and_faults_as_they_are():
    status = status_of(
        LabConfig(),
        jobs=("7 [red]job[/red] RUNNING 0:10 n[1-4]",),
        faults=(record_of("mtu", state="lost", message="no [bold]device[/bold]"),),
    )
    text = text_of(status)
    assert "  7 [red]job[/red] RUNNING 0:10 n[1-4]\n" in text
    assert "- f1: no [bold]device[/bold]\n" in text


def test_the_widest_lab_stands_whole_in_100_columns():
    status = status_of(LabConfig(hosts=250, leaves=250, cpus_per_host=1024, clock_step_s=1_000_000, link="400gbit"))
    hosts = [
        dataclasses.replace(host, is_alive=False, slurm_state="drained*", num_cpus_used=1024) for host in status.hosts
    ]
    links = [
        dataclasses.replace(link, is_up=False, tx_bytes=_LARGEST, rx_bytes=_LARGEST, dropped=_LARGEST)
        for link in status.links
    ]
    faults = [record_of(kind, 100 + number, state="scheduled") for number, kind in enumerate(KINDS)]
    text = text_of(dataclasses.replace(status, hosts=tuple(hosts), links=tuple(links), faults=tuple(faults)))
    assert max(map(len, text.splitlines())) <= 100
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for record in faults:
        assert words_of(text, record.fault_id) == " ".join(fault_words(record)).split()


@each_case(
    ("record", "words"),
    [
        (record_of("slow-link"), ("f1", "slow-link", "leaf250", "rate=999.5mbit", "active")),
        (
            record_of("slow-host", 12, start_s=5.0, duration_s=20.0, state="scheduled"),
            ("f12", "slow-host", "n250", "cores=0.123 after_s=5.0 for_s=20.0", "scheduled"),
        ),
        (record_of("pause-host", state="lost"), ("f1", "pause-host", "n250", "", "lost")),
        (
            record_of("traffic", settings={**_SETTINGS["traffic"], "rate": None}),
            ("f1", "traffic", "n249->n250", "streams=64", "active"),
        ),
        (
            record_of("kill-rank", settings={"job": 12, "rank": 3, "signal": "KILL"}, state="over"),
            ("f1", "kill-rank", "12/3", "signal=KILL", "over"),
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, FaultRecord) else "",
)
def test_a_fault_in_words(record, words):
    assert fault_words(record) == words


def test_a_log_is_100_columns_wide(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setenv("COLUMNS", "40")
    assert table_console().width == 100


@each_case(("columns", "width"), [(80, 80), (100, 100), (250, 100)])
def test_a_terminal_is_used_in_its_own_width_up_to_100_columns(monkeypatch, columns, width):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert table_console().width == width


@each_case("slurm_state", ["idle", "mixed", "allocated", "completing"])
def test_a_lab_is_well_where_every_host_takes_jobs(slurm_state):
    status = status_of(LabConfig())
    hosts = [dataclasses.replace(host, slurm_state=slurm_state) for host in status.hosts]
    assert dataclasses.replace(status, hosts=tuple(hosts)).is_well


@each_case(
    "change",
    [
        {"hosts": {"is_alive": False}},
        {"hosts": {"slurm_state": "down"}},
        {"hosts": {"slurm_state": "idle*"}},
        {"hosts": {"slurm_state": "unknown"}},
        {"links": {"is_up": False}},
    ],
)
def test_a_lab_is_not_well_where_a_host_or_a_link_is_not(change):
    status = status_of(LabConfig())
    ((part, values),) = change.items()
    first, *others = getattr(status, part)
    assert not dataclasses.replace(status, **{part: (dataclasses.replace(first, **values), *others)}).is_well


def test_counts_faults_that_are_over():
    faults = tuple(
        record_of("mtu", number, state=state) for number, state in ((1, "over"), (2, "failed"), (3, "active"))
    )
    text = text_of(status_of(LabConfig(), faults=faults))
    assert [bool(re.search(rf"^ *{fault_id} ", text, re.MULTILINE)) for fault_id in ("f1", "f2", "f3")] == [
        False,
        False,
        True,
    ]
    assert "2 more faults, over or failed: `hpcpace lab fault list`" in text
