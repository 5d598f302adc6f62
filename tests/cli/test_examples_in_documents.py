"""Examples of the guide whose input is in the repository, or made by the same page, are what commands print."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Call = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let dates be those of the examples."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("page", "call"),
    [
        ("audit.md", "audit --nccl-log tests/data/nccl-logs/no-libibverbs.log"),
        ("compare.md", "compare before after"),
        ("history.md", "history tests/data/history/megatron-lm.csv --runs 8"),
    ],
)
def test_a_page_shows_what_the_command_prints(
    hpcpace: Call, in_utc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, call: str
) -> None:
    text = (ROOT / "docs" / page).read_text()
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    for program in re.findall(r"^\$ python - <<'END'\n(.*?)^END$", text, re.MULTILINE | re.DOTALL):
        exec(program, {})
    shown = re.search(rf"^\$ hpcpace {re.escape(call)}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert shown, f"docs/{page} has no example `$ hpcpace {call}`"
    _, out, _ = hpcpace(*call.split())
    assert [line.rstrip() for line in out.strip().splitlines()] == shown[1].splitlines()
