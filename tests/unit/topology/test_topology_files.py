"""Files that say which leaf switch each host is at: of Slurm, and of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.errors import TopologyError
from hpcpace.core.hostlist import expand
from hpcpace.topology.switch_tree import SwitchTree, read_topology

CONF = """
# two leaves below a spine
SwitchName=leaf1 Nodes=n[1-2]
SwitchName=leaf2 Nodes=n[3-4] LinkSpeed=900
switchname=spine switches=leaf[1-2]
"""
SCONTROL = """
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf[1-2]
"""
BLOCKS = """
BlockName=leaf1 Nodes=n[1-2]
BlockName=leaf2 Nodes=n[3-4]
BlockSizes=2,4
"""
SCONTROL_BLOCKS = """
BlockName=leaf1 BlockIndex=0 Nodes=n[1-2] BlockSize=2
BlockName=leaf2 BlockIndex=1 Nodes=n[3-4] BlockSize=2
"""
YAML = """---
- topology: topo-tree
  cluster_default: true
  tree:
    switches:
      - switch: spine
        children: leaf[1-2]
      - switch: leaf1
        nodes: n[1-2]
      - switch: leaf2
        nodes: n[3-4]
"""
YAML_BLOCKS = """
- topology: topo-block
  block:
    block_sizes: [2, 4]
    blocks:
      - block: leaf1
        nodes: n[1-2]
      - block: leaf2
        nodes: n[3-4]
"""
TABLE = """
# host leaf spine
n1      leaf1 spine
n2      leaf1 spine
n[3-4]  leaf2 spine
"""
SHORT_TABLE = "n[1-2] leaf1\nn3 leaf2\nn4 leaf2  # no spine known\n"
CONTINUED = "SwitchName=leaf1 \\\n  Nodes=n[1-2]\nSwitchName=leaf2 Nodes=n[3-4]\n"


def read(path: Path, content: str | bytes, name: str = "topology.conf") -> list[SwitchTree]:
    file = path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_topology(file)


def leaves(tree: SwitchTree) -> dict[str, str]:
    return {host: above[-1] for host, above in tree.above.items()}


@each_case(
    ("content", "above"),
    [
        pytest.param(CONF, ("spine",), id="topology.conf"),
        pytest.param(SCONTROL, ("spine",), id="scontrol show topology"),
        pytest.param(BLOCKS, (), id="blocks"),
        pytest.param(SCONTROL_BLOCKS, (), id="scontrol show topology of blocks"),
        pytest.param(YAML, ("spine",), id="topology.yaml"),
        pytest.param(YAML_BLOCKS, (), id="topology.yaml with blocks"),
        pytest.param(TABLE, ("spine",), id="a table"),
        pytest.param(SHORT_TABLE, (), id="a table without spine"),
        pytest.param(CONTINUED, (), id="a line that goes on in the next"),
    ],
)
def test_every_form_gives_each_host_its_leaf(tmp_path: Path, content: str, above: tuple[str, ...]) -> None:
    if "topology:" in content:
        pytest.importorskip("yaml")
    (tree,) = read(tmp_path, content)
    assert leaves(tree) == {"n1": "leaf1", "n2": "leaf1", "n3": "leaf2", "n4": "leaf2"}
    assert {path[:-1] for path in tree.above.values()} == {above}
    assert tree.problems == ()


def test_the_default_of_several_networks_comes_first(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    trees = read(
        tmp_path, YAML_BLOCKS + YAML.removeprefix("---\n") + "- topology: flat\n  flat: true\n", "topology.yaml"
    )
    assert [tree.name for tree in trees] == ["topo-tree", "topo-block", "flat"]


def test_a_network_may_be_deeper_than_two_levels(tmp_path: Path) -> None:
    (tree,) = read(tmp_path, CONF + "SwitchName=core Switches=spine\n")
    assert tree.above["n1"] == ("core", "spine", "leaf1")


def test_several_spines_are_one_level(tmp_path: Path) -> None:
    (tree,) = read(tmp_path, CONF + "SwitchName=spine2 Switches=leaf[1-2]\n")
    assert tree.above["n4"] == ("spine,spine2", "leaf2") or tree.above["n4"][-1] == "leaf2"
    assert len(tree.above["n4"]) == 2
    assert tree.problems == ()


@each_case(
    ("content", "words", "known"),
    [
        pytest.param(
            CONF + "SwitchName=leaf3 Nodes=n4,n5\n", "at two switches (n4 at leaf2 and leaf3)", 4, id="host twice"
        ),
        pytest.param("n1 leaf1\nn1 leaf2\nn2 leaf2\n", "1 host at two switches (n1", 1, id="host twice in a table"),
        pytest.param(CONF + "SwitchName=leaf1 Switches=spine\n", "loop: ", 4, id="a loop"),
        pytest.param("SwitchName=a Nodes=n1\nSwitchName=b Switches=a,b\n", "loop: b is", 1, id="a switch above itself"),
        pytest.param("n1 a b a\nn2 a b\n", "loop: a are", 2, id="a loop in a table"),
        pytest.param(CONF + "SwitchName=leaf9\n", "1 switch without hosts or switches (leaf9)", 4, id="empty switch"),
        pytest.param(
            CONF + "SwitchName=core Switches=spine,spine7\n", "1 switch below another one and not defined (spine7)", 4,
            id="undefined switch",
        ),
        pytest.param(CONF + "SwitchName=leaf1 Nodes=n9\n", "1 switch defined more than once", 5, id="switch twice"),
        pytest.param(CONF + "Include /etc/more.conf\n", "line 6 includes another file", 4, id="include"),
    ],
)  # fmt: skip
def test_says_what_is_contradictory_and_keeps_the_rest(tmp_path: Path, content: str, words: str, known: int) -> None:
    (tree,) = read(tmp_path, content)
    assert any(words.replace("a are", "a") in problem for problem in tree.problems), tree.problems
    assert len(tree.above) == known


@each_case(
    ("content", "words"),
    [
        pytest.param("", "has no host at a switch", id="empty"),
        pytest.param("# nothing\n\n", "has no host at a switch", id="comments only"),
        pytest.param("SwitchName=s1\n", "has no host at a switch (1 switch without hosts", id="no hosts"),
        pytest.param("n1\n", "line 1 is 'n1': give a host", id="a host alone"),
        pytest.param("a b c d e f g h i\n", "line 1 is 'a b c", id="too many levels"),
        pytest.param("n[1-4 leaf1\n", "is no list of hosts", id="a bracket left open"),
        pytest.param("n[4-1] leaf1\n", "is no list of hosts", id="a range that falls"),
        pytest.param("n[1-9999999] leaf1\n", "has more than 65536 hosts", id="very many hosts"),
        pytest.param("n[1-99999999999999999999999] leaf1\n", "is no list of hosts", id="a number beyond all bounds"),
        pytest.param("SwitchName=a Nodes=n[1\n", "line 1, nodes: ", id="a bad list in topology.conf"),
        pytest.param("SwitchName=a Nodes=n1\nbogus\n", "line 2 is 'bogus'", id="another line in topology.conf"),
        pytest.param("SwitchName= Nodes=n1\n", "line 1 has a switch without a name", id="no name"),
        pytest.param("SwitchName=a[1-2] Nodes=n[1-4]\n", "line 1 has 2 switches with the same hosts", id="two at once"),
        pytest.param(b"\xff\xfe\x00n1", "it is no text", id="binary"),
        pytest.param(b"n1\0 leaf1", "it is no text", id="a zero byte"),
    ],
)
def test_refuses_what_is_no_topology(tmp_path: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(TopologyError) as found:
        read(tmp_path, content)
    assert words in str(found.value) and len(str(found.value)) < len(str(tmp_path)) + 300
    assert "topology.conf" in str(found.value)


@each_case(
    ("content", "words"),
    [
        pytest.param("- [1, 2\n", "it is no YAML", id="no YAML"),
        pytest.param("- 7\n", "topology 1 is '7': it must be a mapping", id="a number"),
        pytest.param("- topology: t\n  tree: 5\n", "topology 't': tree has no list switches:", id="no switches"),
        pytest.param("- tree:\n    switches:\n      - nodes: n1\n", "an entry is {'nodes': 'n1'}", id="no name"),
        pytest.param("- tree:\n    switches:\n      - switch: a\n        nodes: n[1\n", "nodes: ", id="a bad list"),
        pytest.param("- &a [1]\n- *a\n", "it has YAML aliases", id="aliases"),
        pytest.param("- topology: t\n  flat: true\n", "has no host at a switch", id="flat"),
        pytest.param("- " * 5000 + "a\n", "nested more than 16 deep", id="nested without end"),
        pytest.param("[" * 100_000, "nested more than 16 deep", id="nested in brackets"),
        pytest.param("? " * 5000 + "a\n", "is a key", id="nested in keys"),
        pytest.param("- ? [a]\n  : b\n", "[] is a key", id="a list as a key"),
        pytest.param("- topology: a\n  topology: b\n", "has the key 'topology' twice", id="a key twice"),
        pytest.param("- topology: [a]\n", "topology 1 is called ['a']", id="a name that is none"),
        pytest.param(f"- topology: {'a' * 300}\n", "its name must be a word", id="a long name"),
        pytest.param("- <<: {topology: a}\n  flat: true\n", "has no host at a switch", id="a merge key"),
        pytest.param("--- a\n--- b\n", "it has 2 documents", id="two documents"),
        pytest.param("- " + "9" * 1_000_000 + "\n", "topology 1 is '9999", id="a number of a million digits"),
        pytest.param("".join(f"%TAG !e{i}! t\n" for i in range(30_000)) + "--- a\n", "has YAML tags", id="tags named"),
        pytest.param("[" + "a," * 600_000 + "]", "has more than 524288 values", id="very many values"),
        pytest.param("- tree:\n    switches:\n      - switch: [a]\n", "an entry is", id="a switch that is none"),
        pytest.param(
            "- tree:\n    switches:\n      - {switch: a, nodes: {b: c}}\n",
            "nodes is {'b': 'c'}",
            id="nodes that are none",
        ),
        pytest.param(f"- tree: {{switches: [{{switch: {'a' * 300}}}]}}\n", "no name of a switch", id="a long switch"),
        pytest.param("!!python/object/apply:os.system ['true']\n", "it has YAML tags", id="code"),
    ],
)
def test_refuses_what_is_no_topology_yaml(tmp_path: Path, content: str, words: str) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(TopologyError) as found:
        read(tmp_path, content, "topology.yaml")
    assert words in str(found.value) and len(str(found.value)) < len(str(tmp_path)) + 300


def test_names_in_yaml_are_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    content = "- tree: {switches: [{switch: 010, nodes: 1:30}, {switch: on, nodes: ['0x1F', 2026-11-27]}]}\n"
    (tree,) = read(tmp_path, content, "topology.yaml")
    assert leaves(tree) == {"1:30": "010", "0x1F": "on", "2026-11-27": "on"}


def test_a_file_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"cannot read the topology .*absent: No such file"):
        read_topology(tmp_path / "absent")
    with pytest.raises(TopologyError, match="cannot read the topology"):
        read_topology(tmp_path)


def test_says_what_to_do_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(TopologyError, match=r"needs PyYAML: pip install"):
        read(tmp_path, YAML, "topology.yaml")


@each_case(
    ("text", "names"),
    [
        ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
        ("a[01-02]b,c", ["a01b", "a02b", "c"]),
        ("r[1]_b[08-10]x", ["r1_b08x", "r1_b09x", "r1_b10x"]),
    ],
)
def test_lists_of_hosts_may_have_several_brackets(text: str, names: list[str]) -> None:
    assert expand(text) == names


@each_case("text", ["n[1-4]]", "n[[1]]", "n]", "n[]", "n[1-]", "n[-1]", "n[1,]", "n[a]", "n[\u0661]"])
def test_refuses_other_lists_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="is no list of hosts"):
        expand(text)
