"""Runs a case with a tool as its documents say, reads what the tool says in the end, and counts what it took.

Each job has a control group of its own (version 1, so it needs root), in which the kernel counts what all of its
processes take. It runs ahead of other work on the machine, in real time, unless load of others is what the case is
about, or the hosts of a lab have their own shares of the machine.

It is if it names the rank, or none, and the stage or cause.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.jobs import clean_environ, free_port, started
from experiments.labs import inject
from experiments.pages import ROOT, cases_of, read_toml
from experiments.peers.job import FAULT, HANGS, MARKS
from hpcpace.diagnosis.summary import Mode
from hpcpace.lab.lab import Lab

PLAIN, OURS, PEER = TOOLS = ("plain", "hpcpace", "TraceML")
RUN = "run"
_JOB = Path(__file__).with_name("job.py")
_GROUPS = Path("/sys/fs/cgroup/cpuacct")
_AHEAD = ("chrt", "--rr", "1")
_LIMIT_S, _HANGS_S, _END_S = 180.0, 15.0, 30.0
_NUM_BURNERS, _BURNER = 4, (sys.executable, "-c", "while True: pass")


@dataclass(frozen=True, kw_only=True)
class Took:
    """What a job took: of the steps between its marks, and of all the rest; of a report apart.

    Attributes:
        steps_per_s: rate.
        step_ms: processor time per step, of all processes together.
        rest_s, report_s: processor time of start and end, and of a report that is a command of its own.
        trace_bytes, report_bytes: files that the tool left.
    """

    steps_per_s: float = 0.0
    step_ms: float = 0.0
    rest_s: float = 0.0
    report_s: float = 0.0
    trace_bytes: int = 0
    report_bytes: int = 0


def run(case: Case, tool: str, folder: Path, site: Path, lab: Lab | None) -> tuple[Verdict | None, Took]:
    """Run a case with a tool.

    Args:
        folder: for all files; it is emptied.
        site: where pip installed the peer.
        lab: whose hosts run the ranks; those of a case on one machine run here.

    Returns:
        what the tool says; None without one, or if it says nothing; and what it took.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with _group() as (enter, usage):
        hosts = [host.address for host in lab.plan.hosts] if lab else ["127.0.0.1"]
        burners = [started(_BURNER) for _ in range(_NUM_BURNERS if case.name == "load" else 0)]
        enter += [] if lab or burners else _AHEAD
        environ = clean_environ(
            PEERS_USAGE=str(usage), PYTHONPATH=f"{ROOT}:{site}", GLOO_SOCKET_IFNAME="eth0" if lab else "lo"
        )
        options: dict[str, Any] = {
            "cwd": folder,
            "env": environ,
            "stdin": subprocess.DEVNULL,
            "start_new_session": True,
        }
        port = free_port()
        with (folder / "log").open("w") as log:
            commands = [
                [*_on(lab, node), *_command(case, tool, folder, site, hosts, node, port)] for node in range(len(hosts))
            ]
            jobs = [subprocess.Popen([*enter, *words], stdout=log, stderr=log, **options) for words in commands]
            _wait(jobs, folder, (lab, case.fault) if lab and case.fault else None)
        for burner in burners:
            burner.kill()
            burner.communicate()
        job_s = _read_s(usage)
        verdict = {PLAIN: lambda *_: None, OURS: _ours, PEER: _theirs}[tool](folder, enter)
        report_s = _read_s(usage) - job_s
    return verdict, _took(folder, job_s, report_s)


@contextmanager
def _group() -> Iterator[tuple[list[str], Path]]:
    """Yield the beginning of a command that runs in a group of its own, and the file of what the group has taken."""
    group = _GROUPS / f"hpcpace-peers-{os.getpid()}"
    group.mkdir()
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"], group / "cpuacct.usage"
    finally:
        _end_all(group / "cgroup.procs")
        group.rmdir()


def _end_all(members: Path) -> None:
    """End what a tool has left running, and wait until it is gone: a group is removed only when it is empty."""
    while pids := members.read_text().split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)


def _read_s(usage: Path) -> float:
    return int(usage.read_text()) / 1e9


def _on(lab: Lab | None, node: int) -> list[str]:
    if lab is None:
        return []
    words = [sys.executable, "-m", "hpcpace", "lab", "run", "--name", lab.files.name]
    return [*words, "--on", lab.plan.hosts[node].name, "--"]


def _command(case: Case, tool: str, folder: Path, site: Path, hosts: Sequence[str], node: int, port: int) -> list[str]:
    """Return the command of a node: `hpcpace trace -- torchrun job.py`, or `traceml run job.py`."""
    words = [case.name, tool, str(case.num_steps), str(folder)]
    place = {"nproc-per-node": 2 // len(hosts), "nnodes": len(hosts), "node-rank": node}
    options = [f"--{name}={value}" for name, value in {**place, "master-addr": hosts[0], "master-port": port}.items()]
    if tool == PEER:
        options += ["--run-name=peers", *(["--aggregator-bind-host=0.0.0.0"] if len(hosts) > 1 else [])]
        return [sys.executable, str(site / "bin" / "traceml"), "run", str(_JOB), *options, "--args", *words]
    trace = ["hpcpace", "trace", "--run-dir", str(folder / RUN), "--", sys.executable, "-m"] if tool == OURS else []
    return [sys.executable, "-m", *trace, "torch.distributed.run", *options, str(_JOB), *words]


def _wait(jobs: Sequence[subprocess.Popen[bytes]], folder: Path, fault: tuple[Lab, Sequence[str]] | None) -> None:
    """Wait for the end of a job, and begin its fault meanwhile; interrupt one that hangs, as a user would."""
    end_s = time.monotonic() + _LIMIT_S
    injected = ""
    while any(job.poll() is None for job in jobs):
        if fault and not injected and (folder / MARKS).exists():
            injected = inject(fault[0], *fault[1])
            (folder / FAULT).touch()
        if (folder / HANGS).exists():
            time.sleep(_HANGS_S)
            (folder / HANGS).unlink()
            _signal(jobs, signal.SIGINT)
            end_s = time.monotonic() + _END_S
        if time.monotonic() > end_s:
            _signal(jobs, signal.SIGKILL)
        time.sleep(0.2)
    if fault and injected:
        inject(fault[0], "undo", injected)


def _signal(jobs: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, number)


def _ours(folder: Path, enter: Sequence[str]) -> Verdict | None:
    environ = clean_environ(PYTHONPATH=str(ROOT))
    command = [*enter, sys.executable, "-m", "hpcpace", "report", str(folder / RUN)]
    with (folder / "report.txt").open("w") as text:
        subprocess.run(command, env=environ, stdout=text, stderr=subprocess.STDOUT)
    path = folder / RUN / "summary.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())["verdict"]
    ranks = tuple(sorted(int(one["id"]) for one in found["culprits"] if one["kind"] == "rank"))
    is_fault = found["mode"] not in (Mode.HEALTHY, Mode.CANNOT_TELL)
    text = " ".join([found["headline"], *found["why"], *found["next"]])
    return Verdict(headline=found["headline"], text=text, ranks=ranks, is_fault=is_fault)


def _theirs(folder: Path, _: Sequence[str]) -> Verdict | None:
    paths = list(folder.glob("logs/*/final_summary.json"))
    if not paths:
        return None
    summary = json.loads(paths[0].read_text())
    found: dict[str, Any] = summary["primary_diagnosis"]
    worst = found.get("evidence", {}).get("worst") or {}
    is_fault = found["severity"] != "info"
    ranks = (worst["rank"],) if is_fault and "rank" in worst else ()
    headline = f"{found['status']}: {found['summary']}"
    return Verdict(
        headline=headline,
        text=f"{headline} {found['action']}",
        ranks=ranks,
        is_fault=is_fault,
    )


def _took(folder: Path, job_s: float, report_s: float) -> Took:
    marks = json.loads((folder / MARKS).read_text()) if (folder / MARKS).exists() else []
    ours, theirs = folder / RUN, folder / "logs"
    of_report = [*ours.glob("report.html"), *ours.glob("summary.json"), *theirs.rglob("*summary*")]
    every = [path for root in (ours, theirs) for path in root.rglob("*") if path.is_file()]
    report_bytes = sum(path.stat().st_size for path in of_report)
    sizes = {"report_bytes": report_bytes, "trace_bytes": sum(path.stat().st_size for path in every) - report_bytes}
    if len(marks) < 2:
        return Took(**sizes)
    first, last = marks
    num_steps, cpu_s = last["step"] - first["step"], last["cpu_s"] - first["cpu_s"]
    return Took(
        steps_per_s=num_steps / (last["wall_s"] - first["wall_s"]),
        step_ms=cpu_s / num_steps * 1e3,
        rest_s=job_s - cpu_s,
        report_s=report_s,
        **sizes,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault.

    Attributes:
        name: for the job.
        title: in the table.
        stage: pattern of words, one of which must be in the verdict; empty where nothing is to be found.
        rank: that has it; None where no rank is to be named.
        num_steps: about 10 s of them, or the most if a fault of the lab has to begin meanwhile.
        in_lab: whether the ranks are on two hosts of a lab, with a network between them.
        fault: words of `hpcpace lab fault`, which begins after the first mark.
    """

    name: str
    title: str
    stage: str
    rank: int | None = None
    num_steps: int = 500
    in_lab: bool = False
    fault: tuple[str, ...] = ()


CASES = cases_of(Case, read_toml(__file__, "cases")["case"])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a tool says in the end.

    Attributes:
        headline: what comes first.
        text: headline, reasons and advice.
        ranks: that it blames, as its file for programs has it.
        is_fault: whether it says that anything is wrong.
    """

    headline: str
    text: str
    ranks: tuple[int, ...] = ()
    is_fault: bool = True


def is_right(case: Case, verdict: Verdict) -> bool:
    """Return whether a verdict names exactly the rank and the stage of a case, or nothing where nothing is wrong."""
    ranks = () if case.rank is None else (case.rank,)
    if not case.stage:
        return not verdict.is_fault and not verdict.ranks
    is_named = verdict.is_fault and tuple(verdict.ranks) == ranks
    return is_named and bool(re.search(case.stage, verdict.text, re.IGNORECASE))
