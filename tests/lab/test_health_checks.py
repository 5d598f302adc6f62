"""The programs of docs/health-checks/ in a real Slurm: a finding drains the node, and nothing else does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments.labs import JobQueue
from hpcpace.lab.lab import Lab

DOCS = Path(__file__).parents[2] / "docs" / "health-checks"
PROLOG, HEALTH_CHECK = DOCS / "hpcpace-prolog.sh", DOCS / "hpcpace-health-check.sh"
NODE = "n1"  # the first that Slurm takes
HPCPACE = f'#!/bin/bash\nexec {sys.executable} -m hpcpace "$@"\n'
HANG = "#!/bin/bash\nexec sleep 600\n"
FINDING = "hpcpace audit: H01 GPUs GPUs: 0, the site expects 8"

Write = Callable[..., None]


@contextmanager
def configured(lab: Lab, lines: str) -> Iterator[None]:
    """Add lines to slurm.conf for a while."""
    before = lab.files.slurm_conf.read_text()
    lab.files.slurm_conf.write_text(f"{before}{lines}")
    assert lab.run("scontrol", "reconfigure").returncode == 0
    try:
        yield
    finally:
        lab.files.slurm_conf.write_text(before)
        assert lab.run("scontrol", "reconfigure").returncode == 0


@pytest.fixture(scope="module")
def prolog(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Slurm whose Prolog is a file that each test writes."""
    path = tmp_path_factory.mktemp("prolog") / "prolog"
    path.write_text("#!/bin/bash\n")
    path.chmod(0o755)
    with configured(lab, f"Prolog={path}\nSchedulerParameters=nohold_on_prolog_fail\n"):
        yield path


@pytest.fixture
def write(queue: JobQueue, tmp_path: Path) -> Iterator[Write]:
    """Write a file that runs a program of docs/health-checks with another hpcpace, rules and expected GPUs."""

    def write(
        path: Path,
        script: Path,
        *,
        program: str = HPCPACE,
        rules: str = "H01",
        expected_gpus: int = 0,
        limit_s: int = 20,
        variables: str = "",
    ) -> None:
        other = tmp_path / "hpcpace"
        other.write_text(program)
        other.chmod(0o755)
        path.write_text(
            f"#!/bin/bash\nexport HEALTH_PROGRAM={other} HEALTH_RULES={rules} HEALTH_LIMIT_S={limit_s} {variables}\n"
            f"[[ $SLURMD_NODENAME != {NODE} ]] || export HPCPACE_AUDIT_EXPECT_GPUS={expected_gpus}\n"
            f"exec {script}\n"
        )
        path.chmod(0o755)

    yield write
    queue.run("scontrol", "update", f"nodename={NODE}", "state=resume")
    until = time.monotonic() + 60
    while queue.run("sinfo", "--noheader", f"--nodes={NODE}", "--format=%T").stdout.strip() != "idle":
        assert time.monotonic() < until, f"{NODE} takes no jobs"  # else the next test would begin on another node
        time.sleep(0.2)


def reason(queue: JobQueue) -> str:
    """Return why Slurm gives the node no jobs; empty where it does."""
    shown = queue.run("scontrol", "--oneliner", "show", "node", NODE).stdout
    return shown.partition("Reason=")[2].partition(" [")[0].strip() if "DRAIN" in shown else ""


def test_a_job_starts_where_the_prolog_finds_nothing(queue: JobQueue, prolog: Path, write: Write) -> None:
    write(prolog, PROLOG)
    done = queue.run("srun", "-w", NODE, "echo", "started")
    assert (done.stdout, reason(queue)) == ("started\n", ""), done.stderr


def test_a_finding_of_the_prolog_drains_the_node_with_that_reason(queue: JobQueue, prolog: Path, write: Write) -> None:
    write(prolog, PROLOG, expected_gpus=8)
    done = queue.run("srun", "-w", NODE, "echo", "started")
    assert (done.returncode != 0, done.stdout, reason(queue)) == (True, "", FINDING)


@pytest.mark.nightly
def test_a_batch_job_starts_on_another_node_when_the_prolog_has_drained_its_first(
    queue: JobQueue, prolog: Path, write: Write, tmp_path: Path
) -> None:
    write(prolog, PROLOG, expected_gpus=8)
    (tmp_path / "job.sh").write_text("#!/bin/bash\necho $SLURM_JOB_NODELIST $SLURM_RESTART_COUNT\n")
    job = queue.wait(queue.submit("job.sh", cwd=tmp_path), timeout_s=60)
    node, restarts = job.output.read_text().split()
    assert (job.state, node != NODE, restarts, reason(queue)) == ("COMPLETED", True, "1", FINDING)


@pytest.mark.parametrize(
    ("program", "rules"),
    [
        (HPCPACE, "N05"),
        (HPCPACE, "X99"),
        ("#!/bin/bash\necho Traceback >&2\nexit 1\n", "H01"),
        ("#!/bin/bash\nkill -SEGV $$\n", "H01"),
        ("#!/no/such/python\n", "H01"),
        (HANG, "H01"),
    ],
    ids=["a rule that finds nothing", "no such rule", "a crash", "a crash of a library", "no program", "a hang"],
)
def test_nothing_else_in_the_prolog_keeps_a_job_away(
    queue: JobQueue, prolog: Path, write: Write, program: str, rules: str
) -> None:
    write(prolog, PROLOG, program=program, rules=rules, expected_gpus=8, limit_s=1 if program == HANG else 20)
    done = queue.run("srun", "-w", NODE, "echo", "started")
    assert (done.stdout, reason(queue)) == ("started\n", ""), done.stderr


def test_the_health_check_drains_a_node_and_resumes_it(lab: Lab, queue: JobQueue, write: Write, tmp_path: Path) -> None:
    check = tmp_path / "check"

    def run() -> None:
        done = queue.run("env", f"SLURMD_NODENAME={NODE}", str(check))
        assert done.returncode == 0, done.stderr

    write(check, HEALTH_CHECK, expected_gpus=8)
    run()
    assert reason(queue) == FINDING
    write(check, HEALTH_CHECK, program="#!/bin/bash\nexit 1\n")
    run()
    assert reason(queue) == FINDING
    write(check, HEALTH_CHECK)
    run()
    assert reason(queue) == ""


def test_slurm_calls_the_health_check_of_an_idle_node(lab: Lab, queue: JobQueue, write: Write, tmp_path: Path) -> None:
    check = tmp_path / "check"

    def wait_for(wanted: str) -> None:
        until = time.monotonic() + 240
        while reason(queue) != wanted:
            assert time.monotonic() < until, f"the reason is {reason(queue)!r}, not {wanted!r}"
            time.sleep(0.5)

    variables = f"SLURM_CONF={lab.files.slurm_conf}"
    write(check, HEALTH_CHECK, expected_gpus=8, variables=variables)
    with configured(lab, f"HealthCheckProgram={check}\nHealthCheckInterval=5\nHealthCheckNodeState=IDLE\n"):
        wait_for(FINDING)
        write(check, HEALTH_CHECK, variables=variables)
        wait_for("")


def test_the_health_check_leaves_alone_what_somebody_else_has_drained(
    queue: JobQueue, write: Write, tmp_path: Path
) -> None:
    queue.run("scontrol", "update", f"nodename={NODE}", "state=drain", "reason=new memory")
    for expected_gpus in (8, 0):
        write(tmp_path / "check", HEALTH_CHECK, expected_gpus=expected_gpus)
        assert queue.run("env", f"SLURMD_NODENAME={NODE}", str(tmp_path / "check")).returncode == 0
        assert reason(queue) == "new memory"
