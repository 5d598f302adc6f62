"""Where the files of a lab are, and its settings, which are one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.hosts import host_pid, living_pid
from hpcpace.lab.plan import LabFiles, read_config, write_config
from hpcpace.lab.settings import LabConfig


def test_a_lab_lies_below_run_under_its_name():
    assert LabFiles.of("docs").folder == Path("/run/hpcpace-lab/docs")
    assert LabFiles.of("docs").name == "docs"


def test_every_file_is_in_the_folder_of_the_lab_but_the_lock():
    files = LabFiles(Path("/base/docs"))
    names = [name for name, value in vars(LabFiles).items() if isinstance(value, property)]
    paths = [path for name in names if isinstance(path := getattr(files, name), Path)]
    paths += [files.fault_json("f1"), files.pid("n1"), files.spool_dir("n1"), files.log("slurmd")]
    assert [path for path in paths if files.folder not in path.parents] == [Path("/base/docs.lock")]
    assert len(set(paths)) == len(paths)


def test_files_of_two_labs_are_different():
    names = [name for name, value in vars(LabFiles).items() if isinstance(value, property)]
    first, second = LabFiles.of("a"), LabFiles.of("b")
    assert [name for name in names if getattr(first, name) == getattr(second, name)] == []


@pytest.mark.parametrize(
    "config",
    [
        LabConfig(),
        LabConfig(name="big", hosts=9, leaves=3, cpu_quota=0.5, tmp_size="1GiB", share=("/tmp/a", "/tmp/b")),
    ],
)
def test_settings_are_read_back_as_they_were_written(files, config):
    write_config(files, config)
    assert read_config(files) == config


def test_the_first_process_of_a_host_is_known_by_its_number_and_its_command(lab, waiting_process):
    host = lab.plan.host("n3")
    process = waiting_process("n3")
    lab.files.pid("n3").write_text(str(process.pid))
    assert host_pid(lab.files, host) == process.pid
    assert living_pid(lab.files, host) == process.pid


def test_another_process_of_the_same_number_is_no_host(lab, waiting_process):
    lab.files.pid("n3").write_text(str(waiting_process("n30").pid))
    assert host_pid(lab.files, lab.plan.host("n3")) is None


@pytest.mark.parametrize("text", [None, "", "none"])
def test_a_host_without_a_process_is_dead(lab, text):
    if text is not None:
        lab.files.pid("n3").write_text(text)
    with pytest.raises(HpcpaceError, match="host n3 is dead: undo the fault that killed it"):
        living_pid(lab.files, lab.plan.host("n3"))
