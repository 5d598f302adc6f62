from __future__ import annotations

import socket
import time

import pytest
from cases import each_case

from hpcpace.core.environment import rank_info
from hpcpace.core.errors import WorldError
from hpcpace.world.connection import (
    Rendezvous,
    parse_place,
    rendezvous_of,
    rendezvous_of_torchrun,
    wait_until_listening,
)
from hpcpace.world.deadline import Deadline

STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08],n1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}


def place(setting: str | None = None, **variables: str) -> Rendezvous:
    environ = {**STEP, **variables}
    return rendezvous_of(rank_info(environ, host="here"), environ, setting, "mpi4py is not installed")


@each_case(
    ("text", "host", "port"),
    [
        ("n1:29500", "n1", 29500),
        ("n1.cluster", "n1.cluster", None),
        (":29500", "", 29500),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[fd00::1]:29500", "fd00::1", 29500),
        ("[fd00::1]", "fd00::1", None),
        ("fd00::1", "fd00::1", None),
        ("fe80::1%eth0", "fe80::1%eth0", None),
        ("[fe80::1%ib0.8001]:29500", "fe80::1%ib0.8001", 29500),
    ],
)
def test_reads_a_place(text: str, host: str, port: int | None) -> None:
    assert parse_place(text) == (host, port)


@each_case("text", ["n1:", "n1:x", "n1:0", "n1:65536", "n1:1:2", "[fd00::1", "a b", "[]:1", ":"])
def test_refuses_what_is_no_place(text: str) -> None:
    with pytest.raises(WorldError, match="expected HOST:PORT, HOST or :PORT"):
        parse_place(text)


def test_the_first_host_and_a_port_from_job_and_step_are_the_place() -> None:
    assert str(place()) == "gpu07:27745"
    assert str(place("[fd00::7]:29500")) == "[fd00::7]:29500"
    assert str(place("other")) == "other:27745"
    assert str(place(":29500")) == "gpu07:29500"


def test_steps_and_jobs_with_near_numbers_get_different_ports() -> None:
    steps = [(str(job), str(step)) for job in range(5000, 5700) for step in range(16)]
    ports = {place(SLURM_JOB_ID=job, SLURM_STEP_ID=step).port for job, step in steps}
    assert len(ports) == len(steps)
    assert min(ports) >= 20_000 and max(ports) < 32_000


@each_case(("node", "local_rank", "is_here"), [("0", "0", True), ("0", "1", False), ("1", "0", False)])
def test_the_first_rank_of_the_first_host_opens_the_store(node: str, local_rank: str, is_here: bool) -> None:
    variables = {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": node, "SLURM_LOCALID": local_rank}
    assert place(**variables).is_here is is_here


def test_the_first_host_does_not_depend_on_where_rank_0_is() -> None:
    # --distribution=arbitrary may put rank 0 on any host.
    assert place(SLURM_PROCID="0", SLURM_NODEID="2").is_here is False
    assert place(SLURM_PROCID="2", SLURM_NODEID="0").is_here is True


def test_ranks_of_mpiexec_need_a_place_from_the_user() -> None:
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    info = rank_info(environ, host="here")
    with pytest.raises(WorldError, match=r"2 ranks started by mpiexec cannot meet.*RENDEZVOUS"):
        rendezvous_of(info, environ, None, "none")
    assert str(rendezvous_of(info, environ, "n1:29500", "none")) == "n1:29500"


@pytest.mark.parametrize(("nodes", "message"), [("", "SLURM_STEP_NODELIST is not set"), ("n[1", "no list of hosts")])
def test_refuses_a_step_without_hosts(nodes: str, message: str) -> None:
    with pytest.raises(WorldError, match=message):
        place(SLURM_STEP_NODELIST=nodes)


@each_case(
    ("variables", "message"),
    [
        ({"MASTER_PORT": "29500"}, "MASTER_ADDR not"),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "x"}, "MASTER_PORT is 'x': expected a port"),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "70000"}, "MASTER_PORT is '70000': expected a port"),
    ],
)
def test_refuses_a_place_of_torchrun_that_is_none(variables: dict[str, str], message: str) -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", **variables}
    with pytest.raises(WorldError, match=message):
        rendezvous_of_torchrun(rank_info(environ, host="here"), environ)


def test_finds_a_place_at_an_ipv6_address() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6: {error}")
    with server:
        wait_until_listening(Rendezvous(host="::1", port=server.getsockname()[1], is_here=False), Deadline(20))


def test_a_name_that_was_resolved_is_not_what_fails_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    asked = []

    def resolved(*args: object, **options: object) -> list[object]:
        time.sleep(1.0 if asked else 0.0)  # a machine that is busy
        asked.append(args)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with pytest.raises(WorldError, match=r"nothing answers at n1:\d+ within 0.5 s \(Connection refused\)"):
        wait_until_listening(Rendezvous(host="n1", port=port, is_here=False), Deadline(0.5))
