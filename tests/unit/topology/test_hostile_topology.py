"""Topology files that are made to take long: what is read of them takes time that is linear in their size."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.errors import TopologyError
from hpcpace.core.hostlist import expand
from hpcpace.topology.switch_tree import SwitchTree, read_topology

MAX_CPU_S = 4.0
"""Each of these takes less than one second; where a step is done for each pair of lines, most take minutes."""


def _read(folder: Path, content: str, name: str = "topology.conf") -> list[SwitchTree]:
    file = folder / name
    file.write_text(content)
    begin = time.process_time()
    try:
        return read_topology(file)
    finally:
        assert time.process_time() - begin < MAX_CPU_S


def _lines(number: int, line: Callable[[int], str]) -> str:
    return "\n".join(map(line, range(number)))


@each_case(
    ("content", "words"),
    [
        pytest.param("SwitchName=s1 Nodes=" + "[" * 100_000, "line 1, nodes: '[[[", id="brackets"),
        pytest.param("SwitchName=s1 Nodes=" + "n[" * 100_000, "line 1, nodes: 'n[n[", id="brackets of names"),
        pytest.param("SwitchName=s1 Nodes=n" + "[1]" * 100_000, "line 1, nodes: 'n[1]", id="pairs of brackets"),
        pytest.param("SwitchName=s1 Nodes=" + "a[1-65536]" + "[1]" * 200, "is no list of hosts", id="many pieces"),
        pytest.param("SwitchName=s1 Nodes=" + "n," * 500_000, "has more than 65536 hosts", id="commas"),
        pytest.param("SwitchName=s1 Nodes=n[" + "1," * 500_000, "is no list of hosts", id="commas in a bracket"),
        pytest.param("SwitchName=s1 Nodes=" + "x" * 1_000_000, "a name of more than 255 letters", id="a long name"),
        pytest.param(
            "SwitchName=s1 Nodes=" + "x" * 100_000 + "[1-65536]", "a name of more than 255 letters", id="long names"
        ),
        pytest.param(
            _lines(1000, lambda i: f"SwitchName=s{i} Nodes=n{i}x[1-65536]"),
            "more than 262144 names are listed",
            id="many hosts",
        ),
        pytest.param(
            _lines(1000, lambda i: f"n[1-65536] s{i}"), "line 5: up to 'n[1-65536]', more than 262144", id="a table"
        ),
        pytest.param("SwitchName=s1 " + "a" * 1_000_000, "has no host at a switch", id="a word without a value"),
        pytest.param("n1 " + "s" * 300, "is no name of a switch", id="a long switch in a table"),
        pytest.param("n1 " + "s " * 1_000_000, "line 1 is 'n1 s s", id="many switches in a table"),
        pytest.param("\n" * 1_000_000, "has no host at a switch", id="empty lines"),
        pytest.param(" " * 1_000_000, "has no host at a switch", id="blanks"),
        pytest.param("\\\n" * 1_000_000 + "SwitchName=s1\n", "1 switch without hosts", id="lines that go on"),
        pytest.param("#" * 5_000_000, "more than 4194304 bytes", id="a large file"),
        pytest.param("\x1b]0;a\x07" * 1000, "line 1 is ", id="escapes"),
    ],
)  # fmt: skip
def test_is_refused_in_linear_time(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(TopologyError) as found:
        _read(tmp_path, content)
    message = str(found.value)
    assert words in message and message.isprintable() and len(message) < len(str(tmp_path)) + 400


def test_switches_of_one_name_are_joined_in_linear_time(tmp_path: Path) -> None:
    (tree,) = _read(tmp_path, _lines(20_000, lambda i: f"SwitchName=s Nodes=n{i}"))
    assert len(tree.above) == 20_000
    assert tree.problems == ("1 switch defined more than once (s)",)


def test_many_names_that_come_twice_are_counted_in_linear_time(tmp_path: Path) -> None:
    (tree,) = _read(tmp_path, _lines(20_000, lambda i: f"SwitchName=s{i // 2} Nodes=n{i}"))
    assert tree.problems == ("10000 switches defined more than once (s[0-3])",)


def test_a_long_chain_of_switches_keeps_its_lower_levels(tmp_path: Path) -> None:
    (tree,) = _read(tmp_path, _lines(12_000, lambda i: f"n{i} s{i} s{i + 1}"))
    assert tree.above["n0"] == tuple(f"s{i}" for i in range(15, -1, -1))
    assert max(map(len, tree.above.values())) == 16 and tree.above["n11999"] == ("s12000", "s11999")
    assert "switches are more than 16 levels deep: what is above is left out" in tree.problems


def test_many_spines_above_many_leaves_are_named_once(tmp_path: Path) -> None:
    leaves = _lines(12_000, lambda i: f"SwitchName=l{i} Nodes=n{i}")
    spines = _lines(12_000, lambda i: f"SwitchName=s{i} Switches=agg")
    (tree,) = _read(tmp_path, f"{leaves}\n{spines}\nSwitchName=agg Switches=l[0-11999]\n")
    assert tree.above["n7"] == ("s[0-3] and 11996 more", "agg", "l7")


def test_a_network_with_too_many_ways_is_refused(tmp_path: Path) -> None:
    many = _lines(1_000, lambda i: f"a{i} l{i} m{i} b{i}\nb m{i} hub") + "\n" + _lines(2_000, lambda i: f"c hub t{i}")
    with pytest.raises(TopologyError, match="too many ways"):
        _read(tmp_path, many)


@each_case(
    "content",
    [
        _lines(12_000, lambda i: f"n{i} s{i} s{(i + 1) % 12_000}"),
        _lines(12_000, lambda i: f"n{i} s{i} s{i}"),
        "SwitchName=agg Switches=l[1-12000]\n"
        + _lines(12_001, lambda i: f"SwitchName=l{i} Switches=agg\nSwitchName=l{i} Nodes=n{i}"),
    ],
    ids=["a ring", "each above itself", "each above one that is above all"],
)
def test_loops_are_found_in_linear_time(tmp_path: Path, content: str) -> None:
    (tree,) = _read(tmp_path, content)
    assert any("loop: " in problem and "more are above themselves" in problem for problem in tree.problems)
    assert len(tree.above) >= 12_000 and max(map(len, tree.above.values())) == 1
    assert sum(map(len, tree.problems)) < 500


def test_yaml_with_very_many_networks_is_read_in_linear_time(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    content = _lines(20_000, lambda i: f"- tree: {{switches: [{{switch: s{i}}}]}}")
    with pytest.raises(TopologyError) as found:
        _read(tmp_path, content, "topology.yaml")
    assert "1 switch without hosts" in str(found.value) and len(str(found.value)) < len(str(tmp_path)) + 400


@each_case("text", ["[" * 100_000, "n[" * 100_000, "n[1" * 100_000, "]" * 100_000, "," * 100_000])
def test_a_list_that_is_none_is_refused_in_linear_time(text: str) -> None:
    begin = time.process_time()
    with pytest.raises(ValueError, match="is no list of hosts") as found:
        expand(text)
    assert time.process_time() - begin < 1 and len(str(found.value)) < 200
