"""`hpcpace probe` on one host: pairs have nothing to measure, noise and copies have."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from hpcpace.cli.probe import command


def test_one_host_has_noise_and_copies_and_says_that_there_are_no_pairs(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    words = [word for part in ("pairs", "noise", "copies") for word in ("--only", part)]
    result = CliRunner().invoke(command, [*words, "--time", "4", "--cores-in-turn", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "pairs of hosts: not measured" in result.output
    assert "pairs take at least two hosts" in result.output
    assert "Noise of cores" in result.output
    content = json.loads(file.read_text())
    assert content["pairs"]["rows"] == []
    assert len(content["noise"]["cores"]) > 0
