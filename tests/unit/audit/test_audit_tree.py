"""Reading a tree that nobody can trust."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.audit import cpusets
from hpcpace.audit.tree import Tree, Unreadable
from hpcpace.core.text import printable, shell_word


@each_case(
    ("content", "reason"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"x" * 20_000, "longer than 16384 bytes"),
        (b"", "empty"),
        (b"many", "'many' is not an integer"),
        (b"9" * 30, "is not an integer"),
        (b"\x1b[2J", r"'\\x1b\[2J' is not an integer"),
    ],
)
def test_a_number_that_is_none_has_a_reason(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "fact").write_bytes(content)
    with pytest.raises(Unreadable, match=reason):
        Tree(tmp_path).number("fact")


def test_a_missing_file_is_noted_under_the_name_of_its_fact(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert tree.fact("net/eth0/mtu", tree.number, "sys/class/net/eth0/mtu") is None
    assert tree.unreadable == {"net/eth0/mtu": "no such file or directory"}


def test_links_round_in_a_circle_are_no_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(Unreadable, match="too many links"):
        Tree(tmp_path).text("a")


@pytest.mark.parametrize("target", ["../../../etc/hostname", "../outside"])
def test_a_link_out_of_the_tree_is_not_followed(target: str, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(target)
    with pytest.raises(Unreadable, match="a link leads out of the tree"):
        Tree(root).text("link")


def test_an_absolute_link_starts_at_the_root_of_the_tree(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys/value").write_text("7\n")
    (tmp_path / "link").symlink_to("/sys/value")
    assert Tree(tmp_path).number("link") == 7


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(Unreadable, match="not a regular file"):
        Tree(tmp_path).text("fifo")


def test_a_folder_in_place_of_a_file_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "fact").mkdir()
    with pytest.raises(Unreadable):
        Tree(tmp_path).text("fact")


def test_a_name_with_a_zero_byte_has_a_reason(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="zero byte"):
        Tree(tmp_path).text("a\0b")


@each_case(
    ("text", "cpus"),
    [("", 0), ("0", 1), ("0-3,8", 0x10F), ("0-7:2/4", 0x33), ("5,3", 0x28)],
)
def test_lists_of_cpus_are_read(text: str, cpus: int) -> None:
    assert cpusets.parse_list(text) == cpus


@each_case("text", ["a", "3-1", "-1", "1-", "0-99999999", "70000", "0-7:0/4", "0-7:5/4", "1;2"])
def test_what_is_no_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of CPUs"):
        cpusets.parse_list(text)


@each_case("cpus", [0, 1, 0x10F, 0xFF00FF00, 1 << 1023, (1 << 512) - 1])
def test_a_set_of_cpus_survives_being_written(cpus: int) -> None:
    assert cpusets.parse_list(cpusets.format_list(cpus)) == cpus


def test_text_of_others_cannot_steer_a_terminal_or_a_shell() -> None:
    assert printable("a\x1b[2J\u202e") == "a\\x1b[2J\\u202e"
    assert shell_word("eth0") == "eth0"
    assert shell_word("a;reboot") == "'a;reboot'"
    assert shell_word("a\n`reboot`") == "'a\\n`reboot`'"
