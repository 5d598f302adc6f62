"""A report knows the traces only: the file with the truth beside a run changes nothing in it."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from experiments.score.generator import write_run
from experiments.score.scenario import Scenario
from experiments.score.truth import truth_of
from hpcpace.cli import cli
from hpcpace.core.errors import EXIT_WARNING


def test_summary_is_the_same_with_without_and_with_a_damaged_truth(tmp_path: Path) -> None:
    scenario = Scenario(seed=3, num_ranks=4, num_steps=40, fault="slow_rank", size=0.3, target=3)
    run = write_run(scenario, tmp_path / "run", truth=truth_of(scenario).to_json())
    truth = tmp_path / "run.truth.json"
    assert '"rank 3"' in truth.read_text()

    def summary() -> bytes:
        run.summary_json.unlink(missing_ok=True)
        result = CliRunner().invoke(cli, ["report", str(run.path)], catch_exceptions=False)
        assert result.exit_code in (0, EXIT_WARNING), result.output
        return run.summary_json.read_bytes()

    with_truth = summary()
    truth.write_text('{"culprits": ["rank 0"]')
    damaged = summary()
    truth.unlink()
    assert with_truth == damaged == summary()


def test_the_truth_lies_outside_of_the_run(tmp_path: Path) -> None:
    scenario = Scenario(seed=3, num_ranks=4, num_steps=10, fault="slow_rank", size=0.3)
    run = write_run(scenario, tmp_path / "run", truth=truth_of(scenario).to_json())
    assert [path for path in run.path.rglob("*") if "truth" in path.name] == []
