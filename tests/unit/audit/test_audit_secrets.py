"""What a snapshot takes from environments, files and the kernel's command line, without the secrets in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from hpcpace.audit.collect_host import chosen_variables, collect_kernel, nccl_conf
from hpcpace.audit.tree import Tree

TOKEN = "hf_" + "aB3dE6gH9jK2" * 3


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    (tmp_path / "proc").mkdir()
    (tmp_path / "etc").mkdir()
    return Tree(tmp_path)


def test_variables_that_rules_look_at_lose_their_secrets() -> None:
    environ = {"NCCL_X_TOKEN": "correct-horse-7", "NCCL_IB_PKEY": "0x7fff", "HF_TOKEN": TOKEN, "NCCL_DEBUG": "INFO"}
    assert chosen_variables(environ) == {"NCCL_X_TOKEN": "[redacted]", "NCCL_IB_PKEY": "0x7fff", "NCCL_DEBUG": "INFO"}


@each_case("length", range(270, 300, 5))
def test_a_token_that_is_cut_leaves_no_part_of_it(length: int) -> None:
    kept = chosen_variables({"NCCL_NET_PLUGIN": f"{'a ' * (length // 2)}{TOKEN}"})["NCCL_NET_PLUGIN"]
    assert "hf_" not in kept and len(kept) <= 300


def test_files_of_nccl_lose_their_secrets(tree: Tree) -> None:
    (tree.root / "etc" / "nccl.conf").write_text(
        f"NCCL_X_PASSWORD = correct-horse-7\nNCCL_DEBUG=INFO\nNCCL_NET={TOKEN}\n"
    )
    assert nccl_conf(tree, "etc/nccl.conf") == {
        "NCCL_X_PASSWORD": "[redacted]",
        "NCCL_DEBUG": "INFO",
        "NCCL_NET": "[redacted]",
    }


def test_the_kernels_command_line_loses_its_secrets(tree: Tree) -> None:
    line = "BOOT_IMAGE=/vmlinuz root=UUID=4f2c iommu=pt s=http://me:correct-horse-7@host/ boot.password=horse7 ro"
    (tree.root / "proc" / "cmdline").write_text(f"{line}\n")
    assert collect_kernel(tree).command_line == (
        "BOOT_IMAGE=/vmlinuz root=UUID=4f2c iommu=pt s=http://[redacted]@host/ boot.password=[redacted] ro"
    )
