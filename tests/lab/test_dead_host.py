"""A host dies, or its network is cut: the session holds no surviving rank up for longer than the documentation says.

One lab, in which all jobs run at once and are hit by the same stroke, while they are at different moments of their
sessions. Unlike a killed process, a dead host takes no leave: no connection of it ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from dead_host_job import CASES, CLOCK_TIMEOUT_S, CUT, FIRST, LAST, SETTINGS, START_TIMEOUT_S, Case

from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig

HERE = Path(__file__).parent
# A machine with other work, on which a thread may wait for its turn.
SLACK_S = 5.0
_CLOSE_TIMEOUT_S = 30.0
MAX_S = {
    "start": 2 * START_TIMEOUT_S + 2.0 + CLOCK_TIMEOUT_S + SLACK_S,
    "clock": CLOCK_TIMEOUT_S + SLACK_S,
    "end": CLOCK_TIMEOUT_S + _CLOSE_TIMEOUT_S + CLOCK_TIMEOUT_S + SLACK_S,
}
SCRIPT_HOSTS = ("n2", LAST)
SCRIPTS = {"plain": (), "traced": ("-P", "-m", "hpcpace", "trace")}
_READY_TIMEOUT_S = 240.0
_HIT_TIMEOUT_S = 30.0
_TOLD_TIMEOUT_S = 90.0
# Strikes in the instant in which it is told to: a command would first have to start.
_STRIKER = """
import sys
from hpcpace.lab.fabric import set_up
from hpcpace.lab.fault_kinds import InsideLab
from hpcpace.lab.fault_kinds import KillHost
from hpcpace.lab.plan import LabFiles
from hpcpace.lab.plan import LabPlan
from hpcpace.lab.plan import read_config
files = LabFiles.of(sys.argv[1])
lab = InsideLab(LabPlan(read_config(files)), files)
print("ready", flush=True)
sys.stdin.readline()
set_up(lab.plan.link(sys.argv[2]), False)
for host in sys.argv[3:]:
    KillHost(host=host).switch(lab, True)
print("struck", flush=True)
"""
# $1 folder, $2 name, then the command; the time is that of the host, as in the script.
_WRAPPER = """
place=$1 name=$2; shift 2
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=0
status=0; "$@" 2>"$place/stderr-$name-$RANK" || status=$?
read -r ended _ </proc/uptime
echo "$status $ended" >"$place/ended.$name-$RANK" && mv "$place/ended.$name-$RANK" "$place/ended-$name-$RANK"
"""


# On a busy machine, Slurm's daemon on a host may drop the connection over which it is to launch tasks: then none runs.
_LAUNCHED = """
for turn in 1 2 3; do
    "$@" && exit
    status=$?
    grep -q 'Application launch failed' "$0" || exit $status
done
exit $status
"""


@dataclass(frozen=True)
class Ended:
    """What the ranks left behind."""

    place: Path

    def told(self, case: Case, rank: int) -> dict[str, float]:
        """What a survivor told."""
        path = self.place / f"told-{case.name}-{rank}.json"
        assert path.exists(), f"rank {rank} is held up, or has ended; {self.output(case.way, case.name)}"
        found: dict[str, float] = json.loads(path.read_text())
        return found

    def output(self, *names: str) -> str:
        """What jobs wrote."""
        paths = [path for name in names for path in sorted(self.place.glob(f"output-{name}"))]
        paths += [path for name in names for path in sorted(self.place.glob(f"stderr-{name}-*"))]
        return "\n".join(path.read_text(errors="replace") for path in paths)


def srun(
    lab: Lab, place: Path, name: str, hosts: tuple[str, ...], mpi: str, *command: object
) -> subprocess.Popen[bytes]:
    # --no-kill: else Slurm ends the job itself, once it has noticed.
    options = [f"--nodelist={','.join(hosts)}", f"-N{len(hosts)}", "--ntasks-per-node=1", f"--mpi={mpi}"]
    words = ["srun", "--no-kill", "--kill-on-bad-exit=0", "--overcommit", *options, *map(str, command)]
    path = place / f"output-{name}"
    with path.open("wb") as output:
        return subprocess.Popen(
            lab.command(["sh", "-c", _LAUNCHED, str(path), *words], folder=place),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**lab.environ(), **SETTINGS},
        )


def wait_until(what: list[Path], timeout_s: float, may_come: Callable[[], bool]) -> list[Path]:
    """Wait for files, and return those that are missing after the time, or once they can come no more."""
    end_s = time.monotonic() + timeout_s
    missing = what
    while missing and time.monotonic() < end_s and may_come():
        time.sleep(0.1)
        missing = [path for path in missing if not path.exists()]
    return missing


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """All jobs, from their start to where the survivors have told."""
    place = tmp_path_factory.mktemp("dead-host")
    config = LabConfig(name="dead", hosts=5, cpus_per_host=16, share=(str(tmp_path_factory.getbasetemp()),))
    program, script = HERE / "dead_host_job.py", HERE / "dead_host_script.py"
    hosts = tuple(f"n{number}" for number in range(1, 6))
    with Lab.up(config) as lab:
        striker = subprocess.Popen(
            lab.command([sys.executable, "-c", _STRIKER, "dead", CUT, FIRST, LAST], folder=place),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=lab.environ(),
        )
        jobs = [srun(lab, place, "gloo", hosts, "none", sys.executable, program, place, "gloo")]
        for case in CASES:
            if case.way == "mpi":
                jobs.append(srun(lab, place, case.name, case.hosts, "pmi2", sys.executable, program, place, case.name))
        for number, (name, trace) in enumerate(SCRIPTS.items()):
            torch_at = ("env", f"MASTER_ADDR={SCRIPT_HOSTS[0]}", f"MASTER_PORT={29_500 + number}")
            run_dir = ("--run-dir", place / f"run-{name}", "--") if trace else ()
            command = (*torch_at, sys.executable, *trace, *run_dir, script, place, name)
            jobs.append(srun(lab, place, name, SCRIPT_HOSTS, "none", "sh", "-c", _WRAPPER, "sh", place, name, *command))
        try:
            assert striker.stdin is not None and striker.stdout is not None
            assert striker.stdout.readline() == "ready\n"
            ready = [place / f"ready-{case.name}-{rank}" for case in CASES for rank in range(len(case.hosts))]
            ready += [place / f"ready-{name}-{rank}" for name in SCRIPTS for rank in range(len(SCRIPT_HOSTS))]
            missing = wait_until(ready, _READY_TIMEOUT_S, lambda: all(job.poll() is None for job in jobs))
            names = ["gloo", *SCRIPTS, *(case.name for case in CASES)]
            assert not missing, f"{[path.name for path in missing]}\n{Ended(place).output(*names)}"
            (place / "go").touch()
            hit = [place / f"hit-{case.name}" for case in CASES]
            assert not wait_until(hit, _HIT_TIMEOUT_S, lambda: True), Ended(place).output(*names)
            striker.stdin.write("now\n")
            striker.stdin.flush()
            assert striker.stdout.readline() == "struck\n"
            (place / "struck").touch()
            told = [place / f"told-{case.name}-{rank}.json" for case in CASES for rank in case.survivors]
            told += [place / f"ended-{name}-0" for name in SCRIPTS]
            wait_until(told, _TOLD_TIMEOUT_S, lambda: True)
        finally:
            for child in (striker, *jobs):
                child.kill()
                child.communicate()
    yield Ended(place)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_surviving_rank_is_held_up_for_longer_than_promised(ended: Ended, case: Case) -> None:
    for rank in case.survivors:
        told = ended.told(case, rank)
        for what, most_s in MAX_S.items():
            assert told[what] <= most_s, (rank, what, told)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_survivors_record_on_where_the_host_dies_after_the_start(ended: Ended, case: Case) -> None:
    was_recording = {bool(ended.told(case, rank)["was_recording"]) for rank in case.survivors}
    assert was_recording == {case.moment in ("clock", "end")}
    assert "Traceback" not in ended.output(case.way, case.name)


@pytest.mark.timeout(600)
def test_a_job_that_torch_ends_is_ended_as_without_hpcpace(ended: Ended) -> None:
    status, last_line = {}, {}
    for name in SCRIPTS:
        status[name], ended_s = (ended.place / f"ended-{name}-0").read_text().split()
        last_line[name] = (ended.place / f"stderr-{name}-0").read_text().rstrip().splitlines()[-1].partition(":")[0]
        held_up_s = float(ended_s) - float((ended.place / f"raised-{name}-0").read_text())
        assert held_up_s <= _CLOSE_TIMEOUT_S + SLACK_S, name
    assert status["traced"] == status["plain"] != "0"
    assert last_line["traced"] == last_line["plain"]
