from __future__ import annotations

import os

import pytest
from cases import each_case

from hpcpace.core.environment import (
    expand_tasks_per_node,
    host_identity,
    is_started_by_rank,
    locate,
    mark_rank,
    process_environ,
    rank_info,
    rank_info_of_group,
)
from hpcpace.core.errors import WorldError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "run7",
}
SLURM_STEP = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "3",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_TOPOLOGY_ADDR": "spine.leaf1.n3",
}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "42",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
}


@each_case(
    ("environ", "launcher", "rank", "world_size", "local_rank", "local_size", "node", "num_nodes"),
    [
        ({}, "single", 0, 1, 0, 1, 0, 1),
        (TORCHRUN, "torchrun", 5, 8, 1, 4, 1, 2),
        (SLURM_STEP, "slurm", 4, 5, 0, 1, 2, 3),
        (HYDRA, "pmi", 1, 4, 1, 4, 0, 1),
        (OPEN_MPI, "pmi", 1, 4, 1, 2, -1, -1),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "pmi", 1, 4, -1, -1, -1, -1),
        (BATCH_SCRIPT, "single", 0, 1, 0, 1, 0, 1),
        (BATCH_SCRIPT | HYDRA, "pmi", 1, 4, 1, 4, 0, 1),
        (SLURM_STEP | TORCHRUN, "torchrun", 5, 8, 1, 4, 1, 2),
        (SLURM_STEP | {"PMI_RANK": "4", "PMI_SIZE": "5"}, "slurm", 4, 5, 0, 1, 2, 3),
        (SLURM_STEP | {"PMIX_RANK": "4"}, "slurm", 4, 5, 0, 1, 2, 3),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "slurm", 1, 2, -1, -1, -1, -1),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "2"}, "slurm", 1, 2, -1, -1, -1, -1),
        # mpiexec in an allocation starts one proxy per host by srun
        (HYDRA | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "pmi", 1, 4, 1, 4, 0, 1),
    ],
)
def test_reads_the_place_that_the_launcher_gives(
    environ, launcher, rank, world_size, local_rank, local_size, node, num_nodes
):
    info = rank_info(environ, host="here")
    assert (info.launcher, info.rank, info.world_size) == (launcher, rank, world_size)
    assert (info.local_rank, info.local_size) == (local_rank, local_size)
    assert (info.node, info.num_nodes) == (node, num_nodes)


def test_keeps_what_slurm_says_about_job_and_network():
    info = rank_info(SLURM_STEP, host="n3")
    assert (info.host, info.job_id, info.step_id, info.topology_addr) == ("n3", "42", "3", "spine.leaf1.n3")


@each_case(
    ("environ", "job_id"),
    [
        ({}, ""),
        (TORCHRUN, "run7"),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, ""),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "98e83466-5d9b-4b62-9d3f-0a1b2c3d4e5f"}, ""),
        (TORCHRUN | {"SLURM_JOB_ID": "42"}, "42"),
    ],
)
def test_names_the_job_by_slurm_or_torchrun(environ, job_id):
    assert rank_info(environ, host="here").job_id == job_id


@each_case(
    ("environ", "names"),
    [
        ({"RANK": "1"}, ["RANK is 1", "WORLD_SIZE"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "RANK"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["RANK=0", "WORLD_SIZE=0"]),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, ["RANK is '-1'"]),
        ({"RANK": "one", "WORLD_SIZE": "4"}, ["RANK is 'one'"]),
        ({"RANK": "1", "WORLD_SIZE": ""}, ["WORLD_SIZE is ''"]),
        (TORCHRUN | {"LOCAL_RANK": "4"}, ["RANK=5", "local rank 4"]),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, ["SLURM_PROCID is 3", "SLURM_STEP_NUM_TASKS"]),
        ({"SLURM_STEP_NUM_TASKS": "4"}, ["SLURM_STEP_NUM_TASKS is 4", "SLURM_PROCID"]),
        (SLURM_STEP | {"SLURM_PROCID": "5"}, ["SLURM_PROCID=5", "SLURM_STEP_NUM_TASKS=5"]),
        (SLURM_STEP | {"PMI_SIZE": "4"}, ["PMI_SIZE=4", "SLURM_STEP_NUM_TASKS=5"]),
        (SLURM_STEP | {"PMI_RANK": "0"}, ["PMI_RANK=0", "SLURM_PROCID=4"]),
        (SLURM_STEP | {"PMIX_RANK": "0"}, ["PMIX_RANK=0", "SLURM_PROCID=4"]),
        (SLURM_STEP | {"WORLD_SIZE": "16"}, ["WORLD_SIZE=16", "SLURM_STEP_NUM_TASKS=5"]),
        (SLURM_STEP | HYDRA, ["PMI_SIZE=4", "SLURM_STEP_NUM_TASKS=5"]),
        (SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, ["SLURM_STEP_TASKS_PER_NODE is '2(x'"]),
        ({"PMI_RANK": "1"}, ["PMI_RANK is 1", "PMI_SIZE"]),
        ({"PMI_SIZE": "4"}, ["PMI_SIZE is 4", "PMI_RANK"]),
        ({"MPI_LOCALNRANKS": "4"}, ["MPI_LOCALNRANKS", "PMI_RANK"]),
        ({"PMIX_RANK": "2"}, ["PMIX_RANK is 2", "OMPI_COMM_WORLD_SIZE"]),
    ],
)
def test_refuses_variables_that_contradict_each_other_and_names_them(environ, names):
    with pytest.raises(WorldError) as raised:
        rank_info(environ, host="here")
    for name in names:
        assert name in str(raised.value)


@each_case(("text", "counts"), [("", []), ("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])])
def test_expands_the_tasks_per_node_of_slurm(text, counts):
    assert expand_tasks_per_node(text) == counts


def test_counts_places_from_the_hosts_that_ranks_run_on():
    keys = ["b", "a", "b", "a", "b"]
    places = []
    for rank in range(5):
        info = rank_info({"PMI_RANK": str(rank), "PMI_SIZE": "5"}, host="here")
        place = locate(info, keys)
        places.append((place.node, place.local_rank, place.local_size, place.num_nodes))
    assert places == [(0, 0, 3, 2), (1, 0, 2, 2), (0, 1, 3, 2), (1, 1, 2, 2), (0, 2, 3, 2)]


def test_one_host_has_one_key():
    assert host_identity() == host_identity()


def test_hosts_of_one_boot_differ_by_name(tmp_path, monkeypatch):
    boot_id = tmp_path / "sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text("c0ffee\n")
    keys = set()
    for host in ("n1", "n2"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        identity = host_identity(tmp_path)
        assert (identity.host, identity.boot_id) == (host, "c0ffee")
        keys.add(identity.host_key)
    assert len(keys) == 2


def test_says_what_is_missing_without_a_boot_id(tmp_path):
    with pytest.raises(WorldError, match=r"boot_id.*mount /proc"):
        host_identity(tmp_path)


def test_what_a_rank_starts_is_no_rank(monkeypatch):
    monkeypatch.delenv("HPCPACE_RANK_PID", raising=False)
    monkeypatch.delenv("PMI_FD", raising=False)
    assert not is_started_by_rank(process_environ())
    # Set by this test, so that it is gone behind it.
    monkeypatch.setenv("HPCPACE_RANK_PID", "")
    mark_rank()
    assert not is_started_by_rank(process_environ())
    assert is_started_by_rank({**process_environ(), "HPCPACE_RANK_PID": str(os.getppid())})


def test_a_channel_to_the_launcher_that_is_closed_was_the_parents():
    reader, writer = os.pipe()
    assert not is_started_by_rank({"PMI_FD": str(reader)})
    os.close(reader)
    os.close(writer)
    assert is_started_by_rank({"PMI_FD": str(reader)})
    assert is_started_by_rank({"PMI_FD": "9" * 30})
    assert not is_started_by_rank({"PMI_FD": "none"})


def test_ranks_that_a_script_started_have_the_place_that_their_group_gives_them() -> None:
    info = rank_info_of_group(3, 4, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"})
    assert (info.rank, info.world_size, info.launcher, info.job_id) == (3, 4, "torch", "7")
    assert (info.local_rank, info.local_size, info.node, info.num_nodes) == (-1, -1, -1, -1)


def test_a_group_that_agrees_with_the_launcher_keeps_what_it_says() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert rank_info_of_group(1, 2, environ) == rank_info(environ)


def test_a_group_decides_where_the_environment_contradicts_itself() -> None:
    info = rank_info_of_group(0, 2, {"SLURM_PROCID": "3"})
    assert (info.rank, info.world_size, info.launcher) == (0, 2, "torch")
