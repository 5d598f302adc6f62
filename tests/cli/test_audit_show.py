"""`hpcpace audit --show`: in the terminal, in files, without findings, and together with other output."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpcpace.cli.audit import command
from hpcpace.core.errors import UsageError
from tests.machines.machine import Machine, threaded


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    machine = Machine("n1").processors({0: threaded(0, 4)})
    machine.rank(0, "0-1", world=2, mems="0").rank(1, "2-3", world=2, mems="0")
    return machine.write(tmp_path / "tree")


def _audit(tree: Path, *options: str) -> Result:
    return CliRunner().invoke(command, ["--sysfs-root", str(tree), *options])


def test_the_picture_is_shown_without_findings_and_with_what_did_not_apply(tree: Path) -> None:
    done = _audit(tree, "--rules", "A02,A04,S02", "--show")
    assert done.exit_code == 0 and "Verdict    no findings" in done.output
    assert "[0011]" in done.output
    assert "Rules that did not apply\n- S02: no GPU\n" in done.output


@pytest.mark.parametrize("name", ["machine.svg", "machine.html"])
def test_a_file_gets_the_picture_and_the_terminal_the_verdict(name: str, tree: Path, tmp_path: Path) -> None:
    done = _audit(tree, "--rules", "A04", "--show", str(tmp_path / name))
    text = (tmp_path / name).read_text()
    assert done.exit_code == 0 and "[0011]" not in done.output and "rank 1: 2 cores, CPUs 2-3" in text
    if name.endswith(".svg"):
        assert ElementTree.fromstring(text).tag.endswith("svg")


def test_a_file_can_go_with_json(tree: Path, tmp_path: Path) -> None:
    done = _audit(tree, "--json", "--show", str(tmp_path / "machine.svg"))
    assert done.stdout.startswith("{") and (tmp_path / "machine.svg").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--show", "machine.png"), "must end in .svg or .html"),
        (("--show", "--json"), "--show draws in the terminal"),
        (("--show", "no-such-folder/machine.svg"), "No such file or directory"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: tuple[str, ...], message: str, tree: Path) -> None:
    done = _audit(tree, *options)
    assert isinstance(done.exception, UsageError) and message in str(done.exception)
