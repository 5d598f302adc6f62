"""What each kind of fault refuses before anything happens, and which process is a rank."""

from __future__ import annotations

import math
import os
import shutil

import psutil
import pytest

from hpcpace.core.errors import UsageError
from hpcpace.lab.fault_kinds import (
    KINDS,
    ChangeMtu,
    ClockStep,
    FillDisk,
    FlapLink,
    KillHost,
    KillRank,
    Latency,
    LossyLink,
    Neighbour,
    PauseHost,
    Reordering,
    SlowHost,
    SlowLink,
    Traffic,
    rank_process,
)

_NO_HOST = "no host 'n9' in this lab: the hosts are n1 to n4"
_CORES = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
_NO_RATE = "--rate: '1tbit' is not a rate like 500mbit or 1gbit"


def traffic(source: str = "n1", destination: str = "n3", rate: str | None = None) -> Traffic:
    return Traffic(source=source, destination=destination, rate=rate, streams=1)


def flap(link: str = "n1", period_s: float = 4.0, down_s: float = 1.0) -> FlapLink:
    return FlapLink(link=link, period_s=period_s, down_s=down_s)


def clock_step(step_s: float, host: str = "n1") -> ClockStep:
    return ClockStep(host=host, step_s=step_s, clock="monotonic")


@pytest.fixture(autouse=True)
def _has_iperf3(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path: name)


@pytest.mark.parametrize(
    "fault",
    [
        SlowHost(host="n1", cores=0.25),
        SlowLink(link="n4", rate="100mbit"),
        SlowLink(link="leaf2", rate="100mbit"),
        flap("leaf1"),
        LossyLink(link="leaf1", share=0.01),
        Latency(link="n1", delay_s=10.0, way="up"),
        Reordering(link="leaf1", delay_s=0.001, share=0.05),
        traffic(rate="10mbit"),
        traffic(),
        Neighbour(host="n2", load="memory", processes=2, core=min(os.sched_getaffinity(0))),
        PauseHost(host="n2"),
        KillHost(host="n2"),
        KillRank(job=1, rank=0, signal="STOP"),
        FillDisk(host="n1", left_bytes=0),
        ChangeMtu(host="n1", mtu=9000),
        clock_step(-0.05),
    ],
    ids=lambda fault: fault.kind,
)
def test_accepts_what_fits_the_lab(lab, fault):
    lab.files.clock_library.touch()
    fault.check(lab)


def test_a_lab_without_the_library_has_clocks_that_cannot_be_stepped(lab):
    with pytest.raises(UsageError, match=r"cannot be stepped, because hpcpace/lab/host_clock.cpp was not compiled"):
        clock_step(0.05).check(lab)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (SlowHost(host="n9", cores=1.0), _NO_HOST),
        (SlowLink(link="n1", rate="1tbit"), _NO_RATE),
        (flap(period_s=1.0, down_s=1.0), "--down is 1 s and --period 1 s: --down must be above 0 and below --period"),
        (flap(period_s=1.0, down_s=2.0), "--down is 2 s and --period 1 s: --down must be above 0 and below --period"),
        (flap(down_s=0.0), "--down is 0 s and --period 4 s: --down must be above 0 and below --period"),
        (LossyLink(link="n1", share=0.0), "--share is 0: it must be above 0 and below 1, such as 0.01 for 1 %"),
        (LossyLink(link="n1", share=1.0), "--share is 1: it must be above 0 and below 1, such as 0.01 for 1 %"),
        (LossyLink(link="n1", share=math.nan), "--share is nan: it must be above 0 and below 1, such as 0.01 for 1 %"),
        (Latency(link="n1", delay_s=0.0), "--delay is 0 s: it must be above 0 and at most 10, such as 0.01 for 10 ms"),
        (
            Reordering(link="n1", delay_s=math.nan, share=0.1),
            "--delay is nan s: it must be above 0 and at most 10, such as 0.01 for 10 ms",
        ),
        (
            Reordering(link="n1", delay_s=0.1, share=1.0),
            "--share is 1: it must be above 0 and below 1, such as 0.01 for 1 %",
        ),
        (Neighbour(host="n9", load="cpu", processes=1, core=None), _NO_HOST),
        (
            Neighbour(host="n1", load="cpu", processes=1, core=4096),
            f"--core is 4096: the cores of this machine are {_CORES}",
        ),
        (traffic("n9", "n1"), _NO_HOST),
        (traffic("n1", "n9"), _NO_HOST),
        (traffic("n1", "n1"), "traffic from n1 to itself crosses no link: name two different hosts"),
        (traffic(rate="1tbit"), _NO_RATE),
        (PauseHost(host="n9"), _NO_HOST),
        (KillHost(host="n9"), _NO_HOST),
        (
            KillRank(job=1, rank=0, signal="NOTHING"),
            "--signal NOTHING: no such signal; name one like KILL, TERM or STOP",
        ),
        (FillDisk(host="n9", left_bytes=0), _NO_HOST),
        (clock_step(0.05, host="n9"), _NO_HOST),
        (clock_step(0.0), "--step is 0 s: it must not be 0, and at most 3600 either way"),
        (clock_step(-3601.0), "--step is -3601 s: it must not be 0, and at most 3600 either way"),
        (clock_step(math.nan), "--step is nan s: it must not be 0, and at most 3600 either way"),
        (ChangeMtu(host="n9", mtu=1500), _NO_HOST),
    ],
)
def test_refuses_what_does_not_fit_the_lab(lab, fault, message):
    with pytest.raises(UsageError) as caught:
        fault.check(lab)
    assert str(caught.value) == message


@pytest.mark.parametrize("cores", [0.0, -1.0, math.nan, math.inf, 2.0, 3.0])
def test_refuses_a_limit_that_is_none(monkeypatch, lab, cores):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(UsageError) as caught:
        SlowHost(host="n1", cores=cores).check(lab)
    assert (
        str(caught.value) == f"--cores is {cores:g}: it must be more than 0 and less than the 2 that the host has now"
    )


@pytest.mark.parametrize(("link", "rate"), [("n1", "1gbit"), ("leaf1", "2gbit")])
def test_refuses_a_rate_that_slows_nothing(lab, link, rate):
    with pytest.raises(UsageError, match=f"--rate {rate} does not slow down {link}, which has "):
        SlowLink(link=link, rate=rate).check(lab)


@pytest.mark.parametrize(
    "fault",
    [SlowLink(link="leaf9", rate="1mbit"), flap("leaf9"), Latency(link="leaf9", delay_s=0.1)],
    ids=lambda fault: fault.kind,
)
def test_refuses_a_link_that_is_not_there(lab, fault):
    with pytest.raises(UsageError, match="no link 'leaf9' in this lab: a host's link is named after the host"):
        fault.check(lab)


@pytest.mark.parametrize(
    ("fault", "program", "package"),
    [(traffic(), "iperf3", "iperf3"), (LossyLink(link="n1", share=0.01), "nft", "nftables")],
)
def test_some_faults_need_a_program_that_the_lab_does_not(monkeypatch, lab, fault, program, package):
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(UsageError) as caught:
        fault.check(lab)
    assert str(caught.value) == f"the lab needs {program}: `apt-get install --no-install-recommends {package}`"


@pytest.mark.parametrize(
    ("fault", "target"),
    [
        (SlowHost(host="n1", cores=0.5), "n1"),
        (SlowLink(link="leaf1", rate="1mbit"), "leaf1"),
        (flap("n2"), "n2"),
        (traffic("n1", "n3"), "n1->n3"),
        (KillRank(job=12, rank=3, signal="KILL"), "12/3"),
    ],
)
def test_says_what_it_happens_to(fault, target):
    assert fault.target == target


def test_every_kind_is_known_by_its_own_name():
    assert all(kind.kind == name for name, kind in KINDS.items())
    assert len(KINDS) == 14


class _Process:
    """A process as psutil shows it; without variables it is another user's, or gone."""

    def __init__(self, name: str, started: float, step: str, rank: int, job: int = 7) -> None:
        self.name = name
        self._started = started
        self._environ = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": step, "SLURM_PROCID": str(rank)} if step else None

    def environ(self) -> dict[str, str]:
        if self._environ is None:
            raise psutil.AccessDenied
        return self._environ

    def create_time(self) -> float:
        return self._started


@pytest.fixture
def _processes(monkeypatch):
    found = [
        _Process("not ours", 0.0, "", 0),
        _Process("batch script", 1.0, str((1 << 32) - 5), 0),
        _Process("a step that is nearly over", 2.0, "0", 1),
        _Process("child of rank 1", 5.0, "1", 1),
        _Process("rank 1", 4.0, "1", 1),
        _Process("rank 0", 4.5, "1", 0),
        _Process("rank 1 of another job", 1.0, "1", 1, job=8),
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda: iter(found))


@pytest.mark.parametrize(("job", "rank", "name"), [(7, 1, "rank 1"), (7, 0, "rank 0"), (8, 1, "rank 1 of another job")])
@pytest.mark.usefixtures("_processes")
def test_a_rank_is_the_first_process_of_the_last_step(job, rank, name):
    assert rank_process(job, rank).name == name


@pytest.mark.parametrize(("job", "rank"), [(7, 2), (9, 0)])
@pytest.mark.usefixtures("_processes")
def test_refuses_a_rank_that_does_not_run(job, rank):
    with pytest.raises(
        UsageError, match=f"no rank {rank} of job {job} is running: `hpcpace lab status` lists the jobs"
    ):
        rank_process(job, rank)
