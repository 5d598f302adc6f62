"""Which folders below /tmp all hosts of a lab see."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcpace.core.errors import UsageError
from hpcpace.lab import lab
from hpcpace.lab.lab import _shared_folders


@pytest.fixture
def tmp(monkeypatch, tmp_path) -> Path:
    """Put a folder of the test's own in the place of /tmp, with nothing in it that the lab shares by itself."""
    tmp = tmp_path.resolve() / "tmp"
    for name in ("work/venv", "data", "data2"):
        (tmp / name).mkdir(parents=True)
    monkeypatch.setattr(lab, "_TMP", tmp)
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.chdir("/")
    return tmp


def test_shares_nothing_where_nothing_that_is_needed_lies_below_tmp(tmp):
    assert _shared_folders([]) == ()


def test_shares_what_was_asked_for_and_lies_below_tmp(tmp):
    assert _shared_folders([f"{tmp}/data", "/usr", str(tmp)]) == (f"{tmp}/data",)


def test_shares_the_folder_of_the_python_and_the_one_that_the_caller_is_in(tmp, monkeypatch):
    monkeypatch.setattr(sys, "prefix", f"{tmp}/work/venv")
    monkeypatch.chdir(tmp / "data")
    assert _shared_folders([]) == (f"{tmp}/data", f"{tmp}/work/venv")


def test_a_folder_within_another_one_is_not_shared_twice(tmp):
    assert _shared_folders([f"{tmp}/work/venv", f"{tmp}/work", f"{tmp}/data", f"{tmp}/data2"]) == (
        f"{tmp}/data",
        f"{tmp}/data2",
        f"{tmp}/work",
    )


def test_refuses_a_folder_that_is_not_there(tmp):
    with pytest.raises(UsageError) as caught:
        _shared_folders([f"{tmp}/none"])
    assert str(caught.value) == f"lab.share: no such folder: {tmp}/none"
