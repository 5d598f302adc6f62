"""`hpcpace probe`: files that cannot be written are refused before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcpace.core.errors import EXIT_USAGE


@pytest.mark.parametrize("option", ["--json", "--html"])
@pytest.mark.parametrize(("name", "told"), [("", "it is a folder; name a file"), ("none/x", "no folder")])
def test_a_target_that_is_no_file_is_refused_before_anything_is_measured(
    hpcpace: Any, tmp_path: Path, option: str, name: str, told: str
) -> None:
    code, out, err = hpcpace("probe", option, tmp_path / name)
    assert (code, out) == (EXIT_USAGE, "") and told in err and err.count("\n") == 1
