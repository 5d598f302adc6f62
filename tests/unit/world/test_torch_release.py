from __future__ import annotations

import pytest

from hpcpace.core.errors import WorldError
from hpcpace.world import connection
from hpcpace.world.connection import check_torch


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("2.11.0", None),
        ("2.13.0+cpu", None),
        ("3.0.0a0+git12ab", None),
        ("unknown", None),
        ("2.4.1+cu121", "this Python has 2.4.1"),
        ("2.9.1", "hpcpace trace records"),
        ("1.13.1", "needs torch 2.11 or newer"),
    ],
)
def test_an_older_torch_is_refused_in_words(found: str, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "version", lambda _: found)
    if words is None:
        check_torch("hpcpace train", (2, 11))
        return
    with pytest.raises(WorldError, match=words):
        check_torch("hpcpace train", (2, 11))


def test_no_torch_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "find_spec", lambda _: None)
    with pytest.raises(WorldError, match=r"has none: pip install 'hpcpace\[train\]'"):
        check_torch("hpcpace probe", (2, 4))


def test_another_package_that_is_missing_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "find_spec", lambda name: None if name == "safetensors" else object())
    with pytest.raises(WorldError, match=r"train needs safetensors, .* has none: pip install 'hpcpace\[train\]'"):
        check_torch("hpcpace train", (2, 11), "safetensors")
