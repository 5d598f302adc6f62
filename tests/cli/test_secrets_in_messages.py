"""What hpcpace says of a mistake repeats no secret of the command line."""

from __future__ import annotations

import sys

import pytest
from cases import each_case
from click.testing import CliRunner

from hpcpace.cli import cli, main

TOKEN = "hf_" + "aB3dE6gH9jK2" * 3


@each_case(
    "arguments",
    [
        ["report", f"--wandb-key={TOKEN}"],
        ["report", "--memory", TOKEN, "run"],
        ["report", "run", TOKEN],
        ["train", "gpt2", "--steps", TOKEN, "--lr", TOKEN],
        ["train", "gpt2", "--db-pw", "hunter2x9Zq", "--steps", "hunter2x9Zq"],
        ["dump", "--rank", TOKEN, TOKEN],
        ["audit", "--prolog", "--only", TOKEN],
        [TOKEN],
        ["sbatch", TOKEN],
        ["batch", "--name", f"{TOKEN}/x", "--", "audit"],
        ["batch", "--", TOKEN],
    ],
)
def test_a_wrong_argument_that_is_a_secret_is_not_repeated(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hpcpace", *arguments])
    with pytest.raises(SystemExit):
        main()
    shown = "".join(capsys.readouterr())
    assert shown
    assert TOKEN not in shown and "hunter2x9Zq" not in shown


def test_a_name_that_is_no_secret_is_repeated() -> None:
    done = CliRunner().invoke(cli, ["report", "--pin-memory", "--tokens-per-sample=512", "run"])
    assert "--pin-memory" in done.output and "--tokens-per-sample" in done.output


@each_case("name", ["../../etc/passwd", "passwd", "token"])
def test_the_advice_on_a_wrong_name_stays_whole(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hpcpace", "sbatch", name])
    with pytest.raises(SystemExit):
        main()
    assert f"there is no job script '{name}': choose from audit, gpt2_dp" in capsys.readouterr().err
