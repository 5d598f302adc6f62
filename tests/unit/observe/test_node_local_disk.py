"""Which disk of a node takes the traces where `trace.trace_dir` is auto, and why another one does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcpace.observe import node_local
from hpcpace.observe.node_local import file_system, find_node_local_disk


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    """Return a file like /proc/self/mountinfo, in which every folder is on ext4."""
    path = tmp_path / "mountinfo"
    path.write_text("1 0 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n")
    return path


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have two folders with names that need care, in place of /tmp and /var/tmp."""
    for name in ("job's scratch", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(node_local, "_FOLDERS", (str(tmp_path / "tmp"),))
    return tmp_path


def _mount(mounts: Path, folder: Path, kind: str) -> None:
    point = str(folder).replace(" ", "\\040")
    with mounts.open("a") as file:
        file.write(f"2 1 0:44 / {point} rw - {kind} source rw,with=options\n")


def test_variables_come_before_tmp(folders, mounts):
    scratch = folders / "job's scratch"
    assert find_node_local_disk({"SLURM_TMPDIR": str(scratch), "TMPDIR": "/"}, 1, mounts=mounts) == scratch
    assert find_node_local_disk({"TMPDIR": str(scratch)}, 1, mounts=mounts) == scratch
    assert find_node_local_disk({"TMPDIR": ""}, 1, mounts=mounts) == folders / "tmp"


@pytest.mark.parametrize(
    ("kind", "objection"),
    [
        ("tmpfs", "is in memory (tmpfs)"),
        ("nfs4", "is on nfs4, not on a local disk"),
        ("lustre", "is on lustre, not on a local disk"),
        ("fuse.something", "is on fuse.something, not on a local disk"),
    ],
)
def test_what_is_no_local_disk_is_passed_over_and_named(folders, mounts, kind, objection):
    scratch = folders / "job's scratch"
    _mount(mounts, scratch, kind)
    assert find_node_local_disk({"TMPDIR": str(scratch)}, 1, mounts=mounts) == folders / "tmp"
    _mount(mounts, folders / "tmp", "tmpfs")
    with pytest.raises(OSError) as caught:
        find_node_local_disk({"TMPDIR": str(scratch)}, 1, mounts=mounts)
    assert str(caught.value) == f"TMPDIR={scratch} {objection}; {folders}/tmp is in memory (tmpfs)"


def test_a_link_is_judged_by_where_it_leads(folders, mounts):
    (folders / "link").symlink_to(folders / "job's scratch")
    _mount(mounts, folders / "job's scratch", "nfs4")
    assert find_node_local_disk({"TMPDIR": str(folders / "link")}, 1, mounts=mounts) == folders / "tmp"


def test_the_last_mount_on_a_folder_counts(folders, mounts):
    _mount(mounts, folders, "nfs4")
    _mount(mounts, folders / "tmp", "tmpfs")
    _mount(mounts, folders / "tmp", "xfs")
    assert file_system(folders / "tmp", mounts.read_text()) == "xfs"
    assert file_system(folders / "tmpother", mounts.read_text()) == "nfs4"


def test_a_disk_has_room_for_all_ranks_of_the_node(folders, mounts, monkeypatch):
    free = os.statvfs_result((4096, 4096, 10**6, 10**6, 600 << 8, 1000, 1000, 1000, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda folder: free)
    assert find_node_local_disk({}, 2, mounts=mounts) == folders / "tmp"
    with pytest.raises(OSError, match="has 600 MiB free, which is less than the 768 MiB for 3 ranks"):
        find_node_local_disk({}, 3, mounts=mounts)


def test_a_disk_without_room_for_another_file_is_full(folders, mounts, monkeypatch):
    full = os.statvfs_result((4096, 4096, 10**6, 10**6, 10**6, 1000, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda folder: full)
    with pytest.raises(OSError, match="less than"):
        find_node_local_disk({}, 1, mounts=mounts)


def test_a_read_only_disk_is_passed_over(folders, mounts, monkeypatch):
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    with pytest.raises(OSError, match="takes no files of ours"):
        find_node_local_disk({}, 1, mounts=mounts)


def test_what_does_not_exist_is_passed_over(folders, mounts):
    assert find_node_local_disk({"SLURM_TMPDIR": "/no/such/folder"}, 1, mounts=mounts) == folders / "tmp"


def test_mounts_that_cannot_be_read_leave_no_disk(folders, mounts):
    with pytest.raises(OSError, match=r"cannot be used \(No such file or directory\)"):
        find_node_local_disk({}, 1, mounts=folders / "none")
