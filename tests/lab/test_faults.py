"""Each fault happens to the real thing, is undone, and stands with its times in the log of truth."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab_status import status_of

from hpcpace.lab.lab import Lab, LabStatus
from hpcpace.lab.plan import TruthLog

Inject = Callable[..., str]
WAIT_S = 90
present: set[str] = set()
"""The faults that are not undone yet."""


@pytest.fixture(autouse=True)
def no_fault_outlives_its_test(lab: Lab) -> Iterator[None]:
    yield
    for fault_id in sorted(present):
        fault(lab, "undo", fault_id)  # of a test that has failed, or it is over already
    present.clear()


def fault(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcpace", "lab", "fault", *arguments, "--name", lab.files.name]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def inject(lab: Lab, *arguments: str) -> str:
    """Inject a fault and return its id."""
    done = fault(lab, *arguments)
    assert done.returncode == 0, done.stderr
    fault_id = done.stdout.split()[0]
    if "--duration" not in arguments:
        present.add(fault_id)
    return fault_id


def undo(lab: Lab, fault_id: str) -> None:
    done = fault(lab, "undo", fault_id)
    assert done.returncode == 0, done.stderr
    present.discard(fault_id)


def on(lab: Lab, host: str, *command: str) -> str:
    done = lab.run(sys.executable, "-m", "hpcpace", "lab", "run", "--on", host, "--", *command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def events(lab: Lab, fault_id: str) -> list[str]:
    return [entry["event"] for entry in TruthLog(lab.files.truth).read() if entry.get("fault_id") == fault_id]


def until(lab: Lab, holds: Callable[[LabStatus], bool]) -> LabStatus:
    deadline_s = time.monotonic() + WAIT_S
    while not holds(status := status_of(lab)):
        if time.monotonic() > deadline_s:
            hosts = [host for host in status.hosts if not host.is_well]
            links = [link for link in status.links if not link.is_up]
            pytest.fail(f"not within {WAIT_S} s: {hosts} {links} {status.problems} {status.jobs}")
        time.sleep(0.1)
    return status


def state_of(status: LabStatus, fault_id: str) -> str:
    return next(record.state for record in status.faults if record.fault_id == fault_id)


def rate_bps(lab: Lab, link: str) -> int:
    return next(each.rate_bps for each in status_of(lab).links if each.name == link)


@pytest.mark.parametrize(("link", "rate"), [("n3", 1_000_000_000), ("leaf1", 500_000_000)])
def test_slow_link_shapes_both_ends(lab: Lab, link: str, rate: int) -> None:
    fault_id = inject(lab, "slow-link", link, "--rate", "100mbit")
    assert rate_bps(lab, link) == 100_000_000
    undo(lab, fault_id)
    assert rate_bps(lab, link) == rate
    assert events(lab, fault_id) == ["fault-begin", "fault-end"]


def test_slow_host_gets_its_processor_time_and_no_more(lab: Lab) -> None:
    # Processor time against real time on the host itself, whatever the machine does beside it.
    burn = "import time; c = time.process_time; t = time.monotonic; b = t(), c()\nwhile c() - b[1] < 0.3: pass\n"
    burn += "print((c() - b[1]) / (t() - b[0]))"
    fault_id = inject(lab, "slow-host", "n2", "--cores", "0.2")
    share = float(on(lab, "n2", sys.executable, "-c", burn))
    undo(lab, fault_id)
    assert share < 0.25


def test_neighbours_run_on_their_host_until_the_fault_is_undone(lab: Lab) -> None:
    names = "ps -ww -eo args | grep -c '[w]hile True'"
    for words, num_running in (((), 1), (("--load", "memory", "--processes", "2"), 2)):
        fault_id = inject(lab, "neighbour", "n2", *words)
        deadline_s = time.monotonic() + WAIT_S  # each neighbour starts a Python
        while on(lab, "n2", "sh", "-c", f"{names} || :").strip() != str(num_running):
            assert time.monotonic() < deadline_s
        assert on(lab, "n1", "sh", "-c", f"{names} || :").strip() == "0"
        undo(lab, fault_id)
        assert on(lab, "n2", "sh", "-c", f"{names} || :").strip() == "0"


def test_paused_host_stands_still_until_the_duration_is_over(lab: Lab) -> None:
    begin_s = time.monotonic()
    fault_id = inject(lab, "pause-host", "n2", "--duration", "2")
    on(lab, "n1", "true")
    on(lab, "n2", "true")
    assert time.monotonic() - begin_s > 1.9
    until(lab, lambda status: state_of(status, fault_id) == "over")
    assert events(lab, fault_id) == ["fault-begin", "fault-end"]


_CLOCKS = "import time; up_s = float(open('/proc/uptime').read().split()[0])"
_CLOCKS += "; print(time.monotonic_ns() - up_s * 1e9, time.time_ns())"


def _clocks_ns(lab: Lab, host: str) -> tuple[float, int]:
    """Return how far CLOCK_MONOTONIC of a host's processes is ahead of its kernel's, and their CLOCK_REALTIME."""
    ahead, realtime = on(lab, host, sys.executable, "-S", "-c", _CLOCKS).split()
    return float(ahead), int(realtime)


@pytest.mark.parametrize("step_s", [100, -100])
def test_clocks_of_one_host_are_stepped_and_stepped_back(lab: Lab, step_s: int) -> None:
    near_ns = 20e9  # starting Python on a busy machine
    fault_id = inject(lab, "clock", "n2", "--step", str(step_s), "--clock", "realtime")
    assert abs(_clocks_ns(lab, "n2")[1] - time.time_ns() - step_s * 1e9) < near_ns
    assert [abs(_clocks_ns(lab, "n1")[1] - time.time_ns()) < near_ns, abs(_clocks_ns(lab, "n2")[0]) < 1e9] == [True] * 2
    undo(lab, fault_id)
    assert abs(_clocks_ns(lab, "n2")[1] - time.time_ns()) < near_ns


_ANSWERS = "import sys, time\nfor _ in sys.stdin: print(time.monotonic_ns(), flush=True)"


def test_a_running_process_sees_its_monotonic_clock_step_and_never_go_back(lab: Lab) -> None:
    command = [sys.executable, "-m", "hpcpace", "lab", "run", "--name", lab.files.name, "--on", "n2", "--"]
    command += [sys.executable, "-c", _ANSWERS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None

        def now_s() -> float:
            process.stdin.write("now\n")
            process.stdin.flush()
            return int(process.stdout.readline()) / 1e9

        begin_s, before_s = time.monotonic(), now_s()
        fault_id = inject(lab, "clock", "n2", "--step", "60")
        stepped_s = now_s()
        assert abs(stepped_s - before_s - 60) <= time.monotonic() - begin_s
        undo(lab, fault_id)
        still_s = now_s()
        assert stepped_s <= still_s == now_s()
        process.stdin.close()
    assert on(lab, "n2", sys.executable, "-S", "-c", "import time; time.sleep(0.01); print('awake')") == "awake\n"


def test_killed_host_is_gone_and_boots_again(lab: Lab) -> None:
    on(lab, "n4", "touch", "/tmp/before")
    fault_id = inject(lab, "kill-host", "n4")
    status = status_of(lab)
    assert [host.name for host in status.hosts if not host.is_alive] == ["n4"]
    assert [link.name for link in status.links if not link.is_up] == ["n4"]
    assert fault(lab, "mtu", "n4", "--size", "1400").returncode == 4
    undo(lab, fault_id)
    until(lab, lambda status: status.is_well)
    assert on(lab, "n4", "sh", "-c", "hostname; ls /tmp/before 2>/dev/null || echo gone") == "n4\ngone\n"
    assert lab.run("srun", "-N4", "true").returncode == 0


def test_hosts_know_the_controller_by_its_own_address_alone(lab: Lab) -> None:
    """Else a switch would answer for it, by an address that changes when another host of the leaf dies."""
    on(lab, "n3", "ip", "neigh", "flush", "all")
    assert lab.run("srun", "-w", "n3", "true").returncode == 0
    (answer,) = json.loads(on(lab, "n3", "ip", "-j", "neigh", "show", "10.77.255.1"))
    assert answer["lladdr"] == "02:00:0a:4d:ff:01"


def test_full_disk_takes_nothing_until_it_is_freed(lab: Lab) -> None:
    write = "head -c 100000 /dev/zero >/tmp/probe 2>/dev/null && echo written || echo full; rm -f /tmp/probe"
    fault_id = inject(lab, "fill-disk", "n1")
    assert on(lab, "n1", "sh", "-c", write) == "full\n"
    assert on(lab, "n2", "sh", "-c", write) == "written\n"
    undo(lab, fault_id)
    assert on(lab, "n1", "sh", "-c", write) == "written\n"


def test_mtu_differs_until_undone(lab: Lab) -> None:
    fault_id = inject(lab, "mtu", "n1", "--size", "1400")
    assert on(lab, "n1", "cat", "/sys/class/net/eth0/mtu") == "1400\n"
    undo(lab, fault_id)
    assert on(lab, "n1", "cat", "/sys/class/net/eth0/mtu") == "1500\n"


def _num_lost(lab: Lab, source: str, destination: str) -> int:
    """Send 400 datagrams to a port that nobody listens at and return how many the destination's kernel has not seen."""
    seen = (
        "import re, pathlib; print(re.findall(r'Udp: (\\d+) (\\d+)', pathlib.Path('/proc/net/snmp').read_text())[0][1])"
    )
    send = "import socket, time, sys; s = socket.socket(type=socket.SOCK_DGRAM)\n"
    send += "for _ in range(400): s.sendto(b'x', (sys.argv[1], 9)); time.sleep(0.0005)"
    before = int(on(lab, destination, sys.executable, "-S", "-c", seen))
    on(lab, source, sys.executable, "-S", "-c", send, lab.plan.host(destination).address)
    return 400 - int(on(lab, destination, sys.executable, "-S", "-c", seen)) + before


def test_a_lossy_link_loses_its_share_both_ways_until_undone(lab: Lab) -> None:
    fault_id = inject(lab, "loss", "n1", "--share", "0.5")
    lost = [_num_lost(lab, *ways) for ways in (("n1", "n2"), ("n2", "n1"))]
    undo(lab, fault_id)
    assert all(160 <= number <= 240 for number in lost), lost  # of 400; chance stays within 40 in all but 1 of 10,000
    assert _num_lost(lab, "n2", "n1") == 0
    assert events(lab, fault_id) == ["fault-begin", "fault-end"]


def _round_trip_s(lab: Lab, source: str, destination: str) -> float:
    """Return the least time of forty refused connections, which take a round trip each."""
    connect = "import socket, sys, time\n\ndef once():\n    s = socket.socket(); t = time.monotonic()\n"
    connect += (
        "    s.connect_ex((sys.argv[1], 9)); return time.monotonic() - t\n\nprint(min(once() for _ in range(40)))"
    )
    return float(on(lab, source, sys.executable, "-S", "-c", connect, lab.plan.host(destination).address))


def test_latency_is_added_in_each_direction_or_in_one_until_undone(lab: Lab) -> None:
    for options, ways, added_s in (
        (("n3",), 2, 0.02),
        (("leaf2", "--way", "up"), 1, 0.01),
        (("n3", "--way", "down"), 1, 0.01),
    ):
        fault_id = inject(lab, "latency", *options, "--delay", "0.01")
        took_s = [_round_trip_s(lab, *ends) for ends in (("n1", "n3"), ("n3", "n1"))]
        again = fault(lab, "reorder", options[0])
        undo(lab, fault_id)
        assert all(added_s <= took < added_s + 0.01 for took in took_s), (ways, took_s)
        assert again.returncode == 4 and "is on a detour already" in again.stderr
        assert _round_trip_s(lab, "n1", "n3") < 0.01
        assert events(lab, fault_id) == ["fault-begin", "forwarded", "fault-end"]
    assert status_of(lab).is_well


def test_a_link_whose_process_died_is_whole_again_once_its_fault_is_undone(lab: Lab) -> None:
    fault_id = inject(lab, "latency", "n2", "--delay", "0.005")
    (record,) = (record for record in status_of(lab).faults if record.fault_id == fault_id)
    lab.run("kill", "-9", str(record.pid))
    until(lab, lambda status: state_of(status, fault_id) == "lost")
    undo(lab, fault_id)
    assert _round_trip_s(lab, "n1", "n2") < 0.01 and status_of(lab).is_well


def test_packets_overtake_each_other_and_none_is_lost(lab: Lab) -> None:
    fault_id = inject(lab, "reorder", "n1", "--share", "0.2", "--delay", "0.005")
    lost = _num_lost(lab, "n2", "n1")
    receive = "import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 7777)); s.settimeout(60)\n"
    receive += "print('bound', flush=True)\n"
    receive += "print(*(int(s.recv(9)) for _ in range(300)))"
    send = "import socket, time, sys; s = socket.socket(type=socket.SOCK_DGRAM)\n"
    # In bursts: a busy machine would send single packets so far apart that those held back are through.
    send += "for number in range(300):\n    s.sendto(b'%d' % number, (sys.argv[1], 7777))\n"
    send += "    number % 20 or time.sleep(0.01)\n"
    command = [sys.executable, "-m", "hpcpace", "lab", "run", "--on", "n1", "--name", lab.files.name, "--"]
    with subprocess.Popen(
        [*command, sys.executable, "-S", "-c", receive], stdout=subprocess.PIPE, text=True
    ) as receiver:
        assert receiver.stdout is not None and receiver.stdout.readline() == "bound\n"
        on(lab, "n2", sys.executable, "-S", "-c", send, lab.plan.host("n1").address)
        numbers = [int(number) for number in receiver.communicate(timeout=90)[0].split()]
    undo(lab, fault_id)
    assert lost == 0
    assert sorted(numbers) == list(range(300)) and numbers != sorted(numbers)


@pytest.mark.parametrize(("way", "devices"), [("up", "eth0"), ("down", "n3")])
def test_a_link_can_be_slow_in_one_direction(lab: Lab, way: str, devices: str) -> None:
    fault_id = inject(lab, "slow-link", "n3", "--rate", "100mbit", "--way", way)
    shown = {
        "eth0": on(lab, "n3", "tc", "qdisc", "show", "dev", "eth0"),
        "n3": lab.run("tc", "qdisc", "show", "dev", "n3").stdout,
    }
    undo(lab, fault_id)
    assert {device for device, text in shown.items() if "100Mbit" in text} == {devices}


def test_flapping_link_comes_and_goes(lab: Lab) -> None:
    fault_id = inject(lab, "flap-link", "leaf2", "--period", "0.6", "--down", "0.3", "--duration", "1.7")
    until(lab, lambda status: state_of(status, fault_id) == "over")
    found = events(lab, fault_id)
    num_times = (len(found) - 2) // 2
    assert 1 <= num_times <= 3  # a busy machine comes too late for some of them
    assert found == ["fault-begin", *["link-down", "link-up"] * num_times, "fault-end"]
    assert status_of(lab).is_well


def test_background_traffic_crosses_the_links_between_its_hosts(lab: Lab) -> None:
    before = {link.name: link.tx_bytes for link in status_of(lab).links}
    fault_id = inject(lab, "traffic", "n2", "n3", "--rate", "200mbit")
    until(lab, lambda status: {k.name: k.tx_bytes for k in status.links}["leaf1"] > before["leaf1"] + 5_000_000)
    undo(lab, fault_id)
    after = {link.name: link.tx_bytes for link in status_of(lab).links}
    assert after["n2"] - before["n2"] > 5_000_000
    assert "iperf3" not in lab.run("ps", "-eo", "comm").stdout


def test_background_traffic_needs_two_hosts(lab: Lab) -> None:
    done = fault(lab, "traffic", "n2", "n2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "traffic from n2 to itself crosses no link" in done.stderr


def test_rank_is_killed_at_a_known_time(lab: Lab, tmp_path: Path) -> None:
    job_id = lab.run("sbatch", "--parsable", "-N2", "--wrap", "srun -K0 sleep 600", cwd=tmp_path).stdout.strip()
    deadline_s = time.monotonic() + WAIT_S
    while fault(lab, "kill-rank", job_id, "1").returncode and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert "kill-rank" in json.dumps(TruthLog(lab.files.truth).read()[-1])
    assert TruthLog(lab.files.truth).read()[-1]["event"] == "fault-begin"
    lab.run("scancel", job_id)


def test_fault_can_start_later_and_be_called_off(lab: Lab) -> None:
    fault_id = inject(lab, "slow-link", "n1", "--rate", "10mbit", "--start", "600")
    assert rate_bps(lab, "n1") == 1_000_000_000
    undo(lab, fault_id)
    assert events(lab, fault_id) == ["fault-called-off"]


def test_a_target_has_one_fault_of_a_kind_at_a_time(lab: Lab) -> None:
    fault_id = inject(lab, "slow-link", "n1", "--rate", "10mbit")
    again = fault(lab, "slow-link", "n1", "--rate", "20mbit")
    undo(lab, fault_id)
    assert (again.returncode, again.stderr) == (
        2,
        f"hpcpace: n1 has a fault of this kind already, {fault_id}: undo it first with "
        f"`hpcpace lab fault undo {fault_id}`\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("slow-host", "n9"), "no host 'n9' in this lab: the hosts are n1 to n4"),
        (("slow-link", "leaf9", "--rate", "1gbit"), "an uplink after its leaf (leaf1, leaf2)"),
        (("slow-link", "n1", "--rate", "fast"), "--rate: 'fast' is not a rate like 500mbit or 1gbit"),
        (("slow-link", "leaf1", "--rate", "10gbit"), "--rate 10gbit does not slow down leaf1, which has 500 Mb/s"),
        (("flap-link", "n1", "--period", "1", "--down", "2"), "--down must be above 0 and below --period"),
        (("pause-host", "n1", "--duration", "inf"), "'--duration': inf is not in the range 0<x<=1000000"),
        (("pause-host", "n1", "--start", "nan"), "'--start': nan is not in the range 0<=x<=1000000"),
        (("undo", "f999"), "no fault 'f999': `hpcpace lab fault list` lists all faults"),
    ],
)
def test_refuses_what_does_not_fit_the_lab(lab: Lab, arguments: tuple[str, ...], message: str) -> None:
    done = fault(lab, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_killed_host_takes_no_leave_of_its_peers(lab: Lab) -> None:
    listen = "import socket, time; s = socket.create_server(('', 7778)); c = s.accept(); time.sleep(600)"
    connect = """
import socket, time
while True:
    try:
        peer = socket.create_connection(("n4", 7778))
        break
    except OSError:
        time.sleep(0.1)
print("connected", flush=True)
peer.settimeout(3)
try:
    print("end" if peer.recv(1) == b"" else "data")
except TimeoutError:
    print("silence")
except OSError as error:
    print(error)
"""
    hpcpace = [sys.executable, "-m", "hpcpace", "lab", "run", "--name", lab.files.name, "--on"]
    with (
        subprocess.Popen([*hpcpace, "n4", "--", sys.executable, "-c", listen]),
        subprocess.Popen(
            [*hpcpace, "n1", "--", sys.executable, "-c", connect], stdout=subprocess.PIPE, text=True
        ) as connected,
    ):
        assert connected.stdout is not None
        assert connected.stdout.readline() == "connected\n"
        fault_id = inject(lab, "kill-host", "n4")
        assert connected.stdout.readline() == "silence\n"
    undo(lab, fault_id)
    until(lab, lambda status: status.is_well)


def test_faults_of_a_host_end_with_it(lab: Lab) -> None:
    mtu, slow = inject(lab, "mtu", "n4", "--size", "1400"), inject(lab, "slow-host", "n4", "--cores", "0.5")
    killed = inject(lab, "kill-host", "n4")
    status = status_of(lab)
    assert [state_of(status, fault_id) for fault_id in (mtu, slow, killed)] == ["over", "over", "active"]
    assert events(lab, mtu) == ["fault-begin", "fault-end"]
    undo(lab, killed)
    until(lab, lambda status: status.is_well)


def test_host_that_died_by_itself_is_booted_again(lab: Lab) -> None:
    lab.run("pkill", "-KILL", "-f", "slurmd -D -N n4")
    until(lab, lambda status: [host.name for host in status.hosts if not host.is_alive] == ["n4"])
    assert "`hpcpace lab fault kill-host n4` and undo that to boot it again" in fault(lab, "pause-host", "n4").stderr
    undo(lab, inject(lab, "kill-host", "n4"))
    until(lab, lambda status: status.is_well)


def test_lost_fault_keeps_its_target_until_it_is_undone(lab: Lab) -> None:
    lost = inject(lab, "slow-link", "n1", "--rate", "10mbit")
    lab.run("pkill", "-KILL", "-f", f"hpcpace.lab.faults {lab.files.name} {lost}")
    until(lab, lambda status: state_of(status, lost) == "lost")
    assert fault(lab, "slow-link", "n1", "--rate", "20mbit").returncode == 2
    undo(lab, lost)
    assert rate_bps(lab, "n1") == 1_000_000_000
