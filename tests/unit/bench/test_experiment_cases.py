"""Cases of experiments in TOML become dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.pages import cases_of, read_toml


@dataclass(frozen=True, kw_only=True)
class _Case:
    name: str
    words: tuple[str, ...] = ()
    pairs: tuple[tuple[str, int], ...] = ()


def test_lists_become_tuples_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "module.toml").write_text('[[case]]\nname = "a"\nwords = ["b"]\npairs = [["c", 1]]\n')
    (tmp_path / "other.toml").write_text('title = "t"\n')
    module = str(tmp_path / "module.py")
    assert cases_of(_Case, read_toml(module)["case"]) == (_Case(name="a", words=("b",), pairs=(("c", 1),)),)
    assert read_toml(module, "other") == {"title": "t"}


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        cases_of(_Case, [{"name": "a", "nonsense": 1}])
