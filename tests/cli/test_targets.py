"""What commands write never replaces what they read."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.synthetic_run import SyntheticRun

SPEEDS = "run,step_time_s\na,1.0\nb,1.01\n"


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("compare", "a.csv", "b.csv", "--html", "a.csv"), "--html"),
        (("compare", "a.csv", "b.csv", "--html", "link.csv"), "--html"),
        (("history", "a.csv", "--html", "a.csv"), "--html"),
        (("scale", "run", "--csv", "run/attempt-0/trace/rank-00000.h5"), "--csv"),
        (("compare", "run", "run", "--html", "run/attempt-0/trace/rank-00000.h5"), "--html"),
        (("history", "run", "--html", "run/attempt-0/trace/rank-00000.h5"), "--html"),
        (("timeline", "run", "-o", "run/attempt-0/trace/rank-00000.h5"), "-o"),
        (("probe", "--against", "a.csv", "--json", "a.csv"), "--json"),
        (("probe", "--against", "a.csv", "--html", "a.csv"), "--html"),
    ],
)
def test_a_file_that_is_read_is_refused_as_a_target(
    hpcpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "b.csv"):
        Path(name).write_text(SPEEDS)
    Path("link.csv").symlink_to("a.csv")
    SyntheticRun(num_ranks=1, num_steps=10).write(Path("run"))
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    code, out, err = hpcpace(*words)
    assert (code, out) == (2, "") and f"would be lost: name another file with {option}" in " ".join(err.split())
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
