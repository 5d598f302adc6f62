"""A probe inside a job that cannot be: one warning, and the job goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpace.core.config import Config
from hpcpace.core.environment import RankInfo
from hpcpace.core.errors import ConfigError
from hpcpace.core.rundir import Attempt
from hpcpace.core.settings import load_config
from hpcpace.observe.session import END, START, probe_in_job
from hpcpace.observe.settings import ProbeConfig


def place(world_size: int) -> RankInfo:
    return RankInfo(
        rank=0, world_size=world_size, local_rank=0, local_size=world_size, node=0, num_nodes=1, launcher="pmi"
    )


def warnings_of(when: str, settings: ProbeConfig, tmp_path: Path, world_size: int = 2) -> list[str]:
    warnings: list[str] = []
    probe_in_job(
        when,
        settings,
        world=place(world_size),
        attempt=Attempt(tmp_path / "attempt-0"),
        environ={},
        warn=warnings.append,
    )
    return warnings


def test_a_job_that_torch_does_not_connect_goes_on_with_one_warning(tmp_path: Path) -> None:
    assert warnings_of(START, ProbeConfig(when=START), tmp_path) == [
        "the job is not probed (torch.distributed connects no ranks)"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("when", "settings"), [(START, ProbeConfig()), (END, ProbeConfig(when=START))])
def test_nothing_is_probed_at_another_time(when: str, settings: ProbeConfig, tmp_path: Path) -> None:
    assert warnings_of(when, settings, tmp_path) == []


def test_a_rank_alone_is_not_probed(tmp_path: Path) -> None:
    assert warnings_of(START, ProbeConfig(when=START), tmp_path, world_size=1) == []


def test_the_short_variable_sets_when_and_the_long_one_wins(tmp_path: Path) -> None:
    none = tmp_path / "none.toml"
    assert Config().of(ProbeConfig).when == "none"
    assert load_config(environ={"HPCPACE_PROBE": "end"}, site_file=none).of(ProbeConfig).when == "end"
    both = {"HPCPACE_PROBE": "end", "HPCPACE_PROBE_WHEN": "start"}
    assert load_config(environ=both, site_file=none).of(ProbeConfig).when == "start"


def test_another_value_of_the_variable_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"probe.when is 'yes': choose one of none, start, end .*HPCPACE_PROBE"):
        load_config(environ={"HPCPACE_PROBE": "yes"}, site_file=tmp_path / "none.toml")
