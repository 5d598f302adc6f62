"""The configuration files of a lab's Slurm."""

from __future__ import annotations

import pytest

from hpcpace.lab.plan import LabPlan, slurm_conf, topology_conf
from hpcpace.lab.settings import LabConfig


def lines_of(files, **settings: object) -> list[str]:
    return slurm_conf(LabPlan(LabConfig(**settings)), files).splitlines()


def test_names_every_node_with_its_address_and_the_cpus_that_it_claims(files):
    nodes = [line for line in lines_of(files, hosts=2, cpus_per_host=16) if line.startswith("NodeName=")]
    assert nodes == [
        "NodeName=n1 NodeAddr=10.77.0.1 CPUs=16 State=UNKNOWN",
        "NodeName=n2 NodeAddr=10.77.0.2 CPUs=16 State=UNKNOWN",
    ]


def test_has_one_partition_of_all_nodes(files):
    partitions = [line for line in lines_of(files) if line.startswith("PartitionName=")]
    assert partitions == ["PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]


@pytest.mark.parametrize(
    "setting",
    [
        "SlurmctldHost=login(10.77.255.1)",
        "TaskPlugin=task/none",
        "SlurmdParameters=config_overrides",
        "TopologyPlugin=topology/tree",
        "EnforcePartLimits=ALL",
        "MpiDefault=pmi2",
    ],
)
def test_has_what_jobs_over_several_hosts_need(files, setting):
    assert lines_of(files).count(setting) == 1


def test_sets_nothing_twice(files):
    keys = [line.partition("=")[0] for line in lines_of(files) if not line.startswith(("NodeName", "PartitionName"))]
    assert sorted(set(keys)) == sorted(keys)


def test_keeps_every_path_in_the_folder_of_the_lab(files):
    paths = [word for line in lines_of(files) for word in line.split("=")[1:] if word.startswith("/")]
    assert [path for path in paths if not path.startswith(f"{files.folder}/")] == ["/bin/true"]
    assert f"AuthInfo=socket={files.munge_socket},cred_expire=5" in lines_of(files)


def test_spool_folders_are_those_that_hosts_make(files):
    assert f"SlurmdSpoolDir={files.spool_dir('%n')}" in lines_of(files)


def test_topology_hangs_every_node_on_its_leaf_and_every_leaf_on_the_spine(files):
    text = topology_conf(LabPlan(LabConfig(hosts=5, leaves=2)))
    assert text == (
        "SwitchName=leaf1 Nodes=n1,n2,n3\nSwitchName=leaf2 Nodes=n4,n5\nSwitchName=spine Switches=leaf1,leaf2\n"
    )
