"""slurm.conf as text."""

from __future__ import annotations

from pathlib import Path

from hpcpace.lab.slurm_conf import ClusterFiles, Node, slurm_conf

FILES = ClusterFiles(folder=Path("/tmp/lab"))


def conf_of(*nodes: Node) -> list[str]:
    return slurm_conf(FILES, controller="head", controller_port=7000, nodes=nodes).splitlines()


def test_names_every_node_with_its_own_port() -> None:
    lines = conf_of(
        Node(name="n1", host_name="head", port=7001),
        Node(name="n2", host_name="n2", port=7002, address="10.77.0.2", num_cpus=4),
    )
    assert [line for line in lines if line.startswith("NodeName=")] == [
        "NodeName=n1 NodeHostname=head NodeAddr=127.0.0.1 Port=7001 CPUs=8 State=UNKNOWN",
        "NodeName=n2 NodeHostname=n2 NodeAddr=10.77.0.2 Port=7002 CPUs=4 State=UNKNOWN",
    ]


def test_reaches_the_controller_over_loopback() -> None:
    lines = conf_of()
    assert {"SlurmctldHost=head(127.0.0.1)", "SlurmctldPort=7000"} <= set(lines)


def test_keeps_every_path_in_its_folder() -> None:
    paths = [word for line in conf_of() for word in line.split("=")[1:] if word.startswith("/")]
    assert [path for path in paths if not path.startswith("/tmp/lab/")] == ["/bin/true"]
