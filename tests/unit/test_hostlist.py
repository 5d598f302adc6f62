"""Names of hosts with and without their domains."""

from __future__ import annotations

import pytest
from cases import each_case

from hpcpace.core.hostlist import node_names


@each_case(
    ("hosts", "names"),
    [
        pytest.param(["n3", "n3.cluster.local", "n4"], ["n3", "n3", "n4"], id="a host that got a domain"),
        pytest.param(["n1.a", "n1.b", "n1", "n2.a"], ["n1.a", "n1.b", "n1", "n2"], id="two domains"),
        pytest.param(["10.0.0.1"], ["10.0.0.1"], id="an address"),
    ],
)
def test_a_host_is_called_without_its_domain_where_that_is_its_name_alone(hosts: list[str], names: list[str]) -> None:
    found = node_names(hosts)
    assert [found[host] for host in hosts] == names
