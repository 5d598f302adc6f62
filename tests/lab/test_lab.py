"""A lab comes up as described, runs jobs beside other labs, leaves nothing behind, and survives its own crashes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from experiments.labs import JobQueue
from hpcpace.core.errors import HpcpaceError, UsageError
from hpcpace.core.text import NS_PER_S
from hpcpace.lab.lab import Lab, bring_down, read_anchor
from hpcpace.lab.plan import BASE, LabFiles
from hpcpace.lab.settings import LabConfig

MONOTONIC = "import time; print(time.monotonic_ns())"
SMALL = LabConfig(name="second", hosts=2, leaves=1)


def on(lab: Lab, host: str, *command: str) -> str:
    done = hpcpace(lab, "run", "--on", host, "--", *command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def hpcpace(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcpace", "lab", arguments[0], "--name", lab.files.name, *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def machine() -> dict[str, object]:
    """Return what a lab could leave behind on the machine."""
    return {
        "mounts": Path("/proc/mounts").read_text(),
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "control groups": sorted(str(path) for path in Path("/sys/fs/cgroup").glob("**/hpcpace-lab-second*")),
        "labs": sorted(path.name for path in BASE.glob("*")),
    }


def test_jobs_see_hosts_of_their_own(lab: Lab) -> None:
    done = lab.run("srun", "-N4", "--label", "sh", "-c", "hostname; echo $SLURM_TOPOLOGY_ADDR")
    assert sorted(done.stdout.splitlines()) == [
        *("0: n1", "0: spine.leaf1.n1", "1: n2", "1: spine.leaf1.n2"),
        *("2: n3", "2: spine.leaf2.n3", "3: n4", "3: spine.leaf2.n4"),
    ]


def test_clocks_differ_by_the_offsets_of_the_plan(lab: Lab) -> None:
    for host in lab.plan.hosts:
        before_ns = time.monotonic_ns()
        local_ns = int(on(lab, host.name, sys.executable, "-c", MONOTONIC))
        after_ns = time.monotonic_ns()
        assert before_ns <= local_ns - host.clock_offset_s * NS_PER_S <= after_ns


def test_tmp_and_shared_memory_are_a_hosts_own(lab: Lab) -> None:
    on(lab, "n1", "touch", "/tmp/of-n1", "/dev/shm/of-n1")
    assert on(lab, "n2", "sh", "-c", "ls /tmp /dev/shm | grep of-n1 || echo none") == "none\n"
    on(lab, "n1", "rm", "/tmp/of-n1", "/dev/shm/of-n1")


def test_shared_folders_are_the_same_on_all_hosts(lab: Lab, tmp_path: Path) -> None:
    on(lab, "n1", "touch", str(tmp_path / "from-n1"))
    assert on(lab, "n3", "ls", str(tmp_path)) == "from-n1\n"


def test_run_ends_with_the_status_of_its_command(lab: Lab) -> None:
    assert hpcpace(lab, "run", "--", "sh", "-c", "exit 7").returncode == 7


def test_run_refuses_a_command_that_is_not_there(lab: Lab) -> None:
    done = hpcpace(lab, "run", "--", "no-such-command")
    assert (done.returncode, done.stderr) == (2, "hpcpace: cannot run no-such-command: No such file or directory\n")


def test_status_shows_hosts_and_links(lab: Lab) -> None:
    done = hpcpace(lab, "status")
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 120
    for word in ("4 of 4 hosts alive", "10.77.0.3", "+3000 s", "500 Mb/s", "leaf2"):
        assert word in done.stdout


def test_links_count_what_crosses_them(lab: Lab) -> None:
    before = links(lab)
    listen = "import socket; s = socket.create_server(('', 7777)).accept()[0]; exec('while s.recv(1 << 20): pass')"
    send = "import socket; socket.create_connection(('n3', 7777)).sendall(bytes(30_000_000))"
    receiver = [*hpcpace_command(lab, "n3"), sys.executable, "-c", listen]
    with subprocess.Popen(receiver) as receiving:
        on(lab, "n1", "sh", "-c", f'until {sys.executable} -c "{send}" 2>/dev/null; do sleep 0.1; done')
        receiving.wait(30)
    after = links(lab)
    sent = {name: tuple(after[name][key] - before[name][key] for key in ("tx_bytes", "rx_bytes")) for name in after}
    expected = 30_000_000 * 1514 / 1448
    for name, direction in (("n1", 0), ("leaf1", 0), ("leaf2", 1), ("n3", 1)):
        assert sent[name][direction] == pytest.approx(expected, rel=0.02), name
    assert max(sent["n2"] + sent["n4"]) < 1_000_000


def hpcpace_command(lab: Lab, host: str) -> list[str]:
    return [sys.executable, "-m", "hpcpace", "lab", "run", "--name", lab.files.name, "--on", host, "--"]


def links(lab: Lab) -> dict[str, dict[str, int]]:
    return {link["name"]: link for link in json.loads(hpcpace(lab, "status", "--json").stdout)["links"]}


def test_all_hosts_of_a_large_lab_reach_each_other() -> None:
    # More pairs than the 1,024 learned neighbours that a kernel has room for, over all its namespaces.
    config = LabConfig(name="large", hosts=36, leaves=4, cpus_per_host=1, tmp_size="1MiB")
    send = 'for i in $(seq 36); do echo >/dev/udp/10.77.0.$i/9 || echo "no $i"; done; sleep 1'
    with Lab.up(config) as lab:
        done = lab.run("srun", "-N36", "--ntasks-per-node=1", "bash", "-c", f"{send}; {send}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_second_lab_runs_beside_the_first_and_leaves_nothing_behind(lab: Lab, tmp_path: Path) -> None:
    before = machine()
    with Lab.up(SMALL) as second:
        anchor = read_anchor(second.files)
        assert anchor is not None
        JobQueue(second).submit("--job-name=other", "--wrap", "sleep 3599", cwd=Path("/"))
        assert second.run("srun", "-N2", "hostname").stdout.split() in (["n1", "n2"], ["n2", "n1"])
        assert "other" not in lab.run("squeue", "-h", "-o", "%j").stdout
        assert hpcpace(second, "fault", "pause-host").returncode == 2
        # A frozen host must not keep the lab from going down.
        done = subprocess.run(
            [sys.executable, "-m", "hpcpace", "lab", "fault", "pause-host", "n2", "--name", "second"], check=True
        )
        assert done.returncode == 0
        started = {process.pid for process in psutil.Process(anchor.pid).children(recursive=True)}
    assert len(started) > 6
    assert [pid for pid in started if psutil.pid_exists(pid)] == []
    assert machine() == before


def test_up_refuses_a_lab_that_is_up(lab: Lab) -> None:
    with pytest.raises(UsageError, match="lab 'tests' is up already: `hpcpace lab down --name tests` ends it"):
        Lab.up(lab.plan.config)


def test_up_replaces_a_lab_that_has_died() -> None:
    Lab.up(SMALL)
    anchor = read_anchor(LabFiles.of("second"))
    assert anchor is not None
    os.kill(anchor.pid, signal.SIGKILL)
    with suppress(psutil.NoSuchProcess):  # it may end meanwhile
        psutil.wait_procs([psutil.Process(anchor.pid)], timeout=10)
    with pytest.raises(UsageError, match=r"lab 'second' has died .*: `hpcpace lab down --name second` removes"):
        Lab.attach("second")
    with Lab.up(SMALL) as again:
        assert again.run("sinfo", "-h", "-o", "%T %D").stdout == "idle 2\n"


def test_up_replaces_a_lab_that_was_half_made() -> None:
    files = LabFiles.of("second")
    files.folder.mkdir(parents=True)
    files.config_json.write_text("{")
    with pytest.raises(UsageError, match="lab 'second' is still coming up, or is incomplete"):
        Lab.attach("second")
    with Lab.up(SMALL) as lab:
        assert lab.run("true").returncode == 0


def test_failed_boot_says_which_daemon_ended_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "slurmctld"
    fake.write_text("#!/bin/sh\necho out of luck\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = machine()
    with pytest.raises(HpcpaceError, match=r"(?s)slurmctld ended with status 3; the end of its log:\nout of luck"):
        Lab.up(SMALL)
    assert machine() == before


def test_status_says_when_slurm_has_ended() -> None:
    with Lab.up(SMALL) as lab:
        lab.run("pkill", "-KILL", "slurmctld")
        done = hpcpace(lab, "status")
    assert done.returncode == 1
    assert "slurmctld has ended: its log is /run/hpcpace-lab/second/slurmctld.log" in done.stdout


def test_numbers_of_jobs_differ_from_lab_to_lab() -> None:
    submitted = []
    for _ in range(2):
        with Lab.up(SMALL) as lab:
            submitted.append(JobQueue(lab).submit("--wrap", "true", cwd=Path("/")))
    assert submitted[0] < submitted[1]


def test_tools_of_the_lab_need_not_be_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with Lab.up(SMALL) as lab:
        assert hpcpace(lab, "status").returncode == 0


def test_down_keeps_the_log_of_truth_where_asked(tmp_path: Path) -> None:
    Lab.up(SMALL)
    assert bring_down("second", truth=tmp_path / "truth.jsonl")
    (entry,) = map(json.loads, (tmp_path / "truth.jsonl").read_text().splitlines())
    assert [host["clock_offset_s"] for host in entry["hosts"]] == [1000, 2000]


def test_down_that_cannot_keep_the_log_of_truth_leaves_the_lab_up(tmp_path: Path) -> None:
    with Lab.up(SMALL) as lab:
        with pytest.raises(UsageError, match="cannot copy the log of truth"):
            bring_down("second", truth=tmp_path / "missing" / "truth.jsonl")
        assert lab.run("true").returncode == 0


def test_down_of_nothing_says_so() -> None:
    assert not bring_down("second")


@pytest.mark.parametrize("where", [(), ("--on", "n3")], ids=["controller", "host"])
@pytest.mark.parametrize("verb", ["up", "down"])
def test_labs_are_brought_up_and_down_from_outside_only(lab: Lab, where: tuple[str, ...], verb: str) -> None:
    done = hpcpace(lab, "run", *where, "--", sys.executable, "-m", "hpcpace", "lab", verb)
    assert (done.returncode, done.stderr) == (
        2,
        "hpcpace: this shell is in a lab: leave it first, because labs are brought up and down from outside\n",
    )


def test_status_on_a_host_says_where_it_works(lab: Lab) -> None:
    done = hpcpace(lab, "run", "--on", "n3", "--", sys.executable, "-m", "hpcpace", "lab", "status")
    assert done.returncode == 2
    assert "this is a host of a lab" in done.stderr


def test_commands_from_up_to_down_with_settings_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text('[lab]\nname = "second"\nhosts = 3\nleaves = 3\nuplink = "200mbit"\n')
    up = command("up", "--config", str(tmp_path / "lab.toml"), "--link", "2gbit")
    try:
        assert up.returncode == 0, up.stderr
        first, *_, hint = up.stdout.splitlines()
        assert first.startswith("lab second: 3 hosts of 4 CPUs on 3 leaves, links 2.00 Gb/s, uplinks 200 Mb/s; up in ")
        assert hint.startswith("hpcpace lab run --name second -- sbatch -N 3")
        shell = command("shell", "--name", "second", "--on", "n3", text="hostname; exit 5\n", SHELL="/bin/sh")
        assert (shell.returncode, shell.stdout.splitlines()[-1]) == (5, "n3")
        assert '"hosts": [{' in command("truth", "--name", "second").stdout
    finally:
        down = command("down", "--name", "second")
    assert (down.returncode, down.stdout) == (0, "lab second is down\n")
    assert command("status", "--name", "second").returncode == 2


def command(*arguments: str, text: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcpace", "lab", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environ},
    )
