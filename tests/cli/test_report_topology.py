"""`hpcpace report --topology`: leaf switches from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from experiments.synthetic_run import SyntheticRun
from hpcpace.cli import cli
from hpcpace.core.errors import TopologyError

CONF = "SwitchName=leaf1 Nodes=n[0-1]\nSwitchName=leaf2 Nodes=n[2-3]\nSwitchName=spine Switches=leaf[1-2]\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = SyntheticRun(hosts=("n0", "n1", "n2", "n3"), noise=0.02).write(tmp_path_factory.mktemp("runs") / "run")
    return made.path


def switches(run: Path, *options: str) -> dict[str, object]:
    result = CliRunner().invoke(cli, ["report", str(run), "--json", *options])
    found: dict[str, object] = json.loads(result.stdout)["switches"]
    return found


def test_without_a_file_the_run_has_the_switches_that_slurm_told(run: Path) -> None:
    assert switches(run) == {"num_leaves": 0, "problems": [], "source": ""}


def test_a_file_gives_the_run_its_switches(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "topology.conf"
    file.write_text(CONF)
    assert switches(run, "--topology", str(file)) == {"num_leaves": 2, "problems": [], "source": str(file)}
    printed = CliRunner().invoke(cli, ["report", str(run), "--topology", str(file)]).stdout
    assert "2 leaf switches, by " in " ".join(printed.split())


def test_a_setting_names_the_file_as_well(run: Path, tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text(CONF)
    (tmp_path / "hpcpace.toml").write_text(f'[report]\ntopology = "{tmp_path}/topology.conf"\n')
    assert switches(run, "--config", str(tmp_path / "hpcpace.toml"))["num_leaves"] == 2


def test_a_stale_file_is_a_warning_on_the_terminal_and_on_the_page(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "topology.conf"
    file.write_text("n[0-2] leaf1\n")
    printed = CliRunner().invoke(cli, ["report", str(run), "--topology", str(file)]).stdout
    assert "does not know 1 host of the run (n3): no switches are known" in " ".join(printed.split())
    assert "does not know 1 host of the run (n3)" in (run / "report.html").read_text()


@pytest.mark.parametrize("content", ["", "n1\n", "SwitchName=a Nodes=n[1\n"])
def test_a_file_that_is_no_topology_is_an_error_of_usage(run: Path, tmp_path: Path, content: str) -> None:
    file = tmp_path / "topology.conf"
    file.write_text(content)
    result = CliRunner().invoke(cli, ["report", str(run), "--topology", str(file)])
    assert isinstance(result.exception, TopologyError)
    assert result.exception.exit_code == 2
