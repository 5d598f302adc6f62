"""What the lab says to a machine that cannot run it."""

from __future__ import annotations

import os
import shutil

import pytest

from hpcpace.errors import UsageError
from hpcpace.lab.slurm import check_requirements


def test_refuses_another_user_than_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="the lab needs root, for mounts; this is user 1000"):
        check_requirements()


def test_names_the_packages_of_missing_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name, path: None if name in ("munged", "slurmd") else name)
    expected = (
        "the lab needs munged, slurmd: `apt-get install --no-install-recommends munge slurm-wlm-basic-plugins slurmd`"
    )
    with pytest.raises(UsageError) as caught:
        check_requirements()
    assert str(caught.value) == expected
