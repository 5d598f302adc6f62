"""A topology file in the place of what Slurm told the job, and where the two contradict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.topology import topology_of
from hpcpace.topology.switch_tree import PlacedTraces, parse_host_table, place_traces
from hpcpace.trace.schema import TraceHeader, row_dtypes
from hpcpace.trace.tables import RankTrace, Table

FILE = "topology.conf"
TOLD = ("spine.leaf1.n1", "spine.leaf1.n2", "spine.leaf2.n3", "spine.leaf2.n4")
SAME = "n[1-2] leaf1 spine\nn[3-4] leaf2 spine\n"


def trace(rank: int, host: str, address: str) -> RankTrace:
    header = TraceHeader(
        run_id="run", attempt=0, rank=rank, world_size=4, local_rank=0, local_size=1, node=rank, host=host,
        topology_addr=address,
    )  # fmt: skip
    empty = {name: Table.from_rows(np.zeros(0, dtype)) for name, dtype in row_dtypes().items()}
    return RankTrace(Path("rank.h5"), header, empty, (), True, empty["collectives"])


def placed(
    content: str | None, addresses: tuple[str, ...] = ("",) * 4, hosts: tuple[str, ...] = ("n1", "n2", "n3", "n4")
) -> PlacedTraces:
    traces = [trace(rank, host, address) for rank, (host, address) in enumerate(zip(hosts, addresses, strict=True))]
    trees = [] if content is None else [parse_host_table(content)]
    return place_traces(traces, trees, file=FILE)


def leaves(found: PlacedTraces) -> list[str]:
    headers = [trace.header for trace in found.traces]
    topology = topology_of(
        ranks=range(len(headers)),
        nodes=[header.node for header in headers],
        hosts=[header.host for header in headers],
        addresses=[header.topology_addr for header in headers],
    )
    return [topology.leaf_names[leaf] if leaf >= 0 else "" for leaf in topology.leaf.tolist()]


def test_a_file_gives_the_leaves_that_slurm_did_not_tell() -> None:
    found = placed(SAME)
    assert (leaves(found), found.source, found.problems) == (["leaf1", "leaf1", "leaf2", "leaf2"], FILE, ())


def test_without_a_file_what_slurm_told_counts() -> None:
    assert (placed(None, TOLD).source, placed(None).source) == ("SLURM_TOPOLOGY_ADDR", "")


def test_a_file_that_agrees_with_slurm_contradicts_nothing() -> None:
    assert placed(SAME, TOLD).problems == ()


def test_other_names_of_the_same_switches_are_no_contradiction() -> None:
    found = placed("n[1-2] ib-a\nn[3-4] ib-b\n", TOLD)
    assert (leaves(found), found.problems) == (["ib-a", "ib-a", "ib-b", "ib-b"], ())


@each_case(
    ("hosts", "content"),
    [
        pytest.param(("n1.example.org", "n2.example.org", "n3", "n4"), SAME, id="hosts with a domain"),
        pytest.param(
            ("n1.example.org", "n2", "n3", "n4"), "n1.example.org,n2 leaf1\nn[3-4] leaf2\n", id="a file with a domain"
        ),
        pytest.param(("n1", "n2", "n3", "n4"), SAME.replace("spine", "core.spine"), id="a switch with a period"),
    ],
)
def test_names_with_periods_are_names(hosts: tuple[str, ...], content: str) -> None:
    assert leaves(placed(content, hosts=hosts)) == ["leaf1", "leaf1", "leaf2", "leaf2"]


def test_a_leaf_with_a_period_stays_one_leaf() -> None:
    assert leaves(placed("n[1-2] r1.leaf\nn[3-4] r2.leaf\n")) == ["r1_leaf", "r1_leaf", "r2_leaf", "r2_leaf"]


def test_hosts_are_found_by_their_name_in_slurm() -> None:
    found = placed(SAME, TOLD, hosts=("ip-1", "ip-2", "ip-3", "ip-4"))
    assert (leaves(found), found.problems) == (["leaf1", "leaf1", "leaf2", "leaf2"], ())


@each_case(
    ("content", "addresses", "words", "source"),
    [
        pytest.param(
            "n1 leaf1\nn2 leaf2\nn[3-4] leaf2\n", TOLD,
            "contradicts what Slurm told the job: n2 is at leaf2, by Slurm at leaf1; the file is used", FILE,
            id="file and Slurm differ",
        ),
        pytest.param(
            "n[1-3] leaf1\n", TOLD,
            "topology.conf does not know 1 host of the run (n4): the switches that Slurm told the job are used",
            "SLURM_TOPOLOGY_ADDR", id="a host that the file does not know",
        ),
        pytest.param(
            "n[1-3] leaf1\n", ("",) * 4,
            "topology.conf does not know 1 host of the run (n4): no switches are known", "",
            id="and Slurm told nothing",
        ),
        pytest.param(
            "gpu[1-9] leaf1\n", ("",) * 4,
            "topology.conf knows none of the hosts of the run", "", id="a file of another cluster",
        ),
        pytest.param(
            SAME + "n4 leaf1 spine\n", ("",) * 4,
            "topology.conf: 1 host at two switches (n4 at leaf1 and leaf2): left out", "", id="a host at two switches",
        ),
    ],
)  # fmt: skip
def test_says_where_a_file_is_stale_or_contradictory(
    content: str, addresses: tuple[str, ...], words: str, source: str
) -> None:
    found = placed(content, addresses)
    assert any(words in problem for problem in found.problems), found.problems
    assert found.source == source


def test_of_several_networks_the_one_that_knows_the_hosts_counts() -> None:
    trees = [parse_host_table("gpu[1-4] a\n"), parse_host_table(SAME)]
    traces = [trace(rank, f"n{rank + 1}", "") for rank in range(4)]
    found = place_traces(traces, trees, file=FILE)
    assert leaves(found) == ["leaf1", "leaf1", "leaf2", "leaf2"]
