"""The settings of a lab: their checks, and which source of them wins."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.config import Config
from hpcpace.core.errors import ConfigError
from hpcpace.core.settings import load_config
from hpcpace.lab.settings import LabConfig
from hpcpace.train.settings import TrainConfig

_NO_FILE = Path("/no/such/file")


def lab_of(**sources: object) -> LabConfig:
    return load_config(**{"site_file": _NO_FILE, **sources}).of(LabConfig)


@each_case(
    "settings",
    [
        {"name": "a"},
        {"name": "a-lab-of-20-letters-"},
        {"hosts": 1, "leaves": 1},
        {"hosts": 250, "leaves": 250, "cpus_per_host": 1024},
        {"link": "100Gbit", "uplink": "64kbit"},
        {"mtu": 9000, "clock_step_s": 0, "cpu_quota": 0.05, "tmp_size": "1GiB"},
    ],
)
def test_accepts_a_lab_that_can_be_built(settings):
    config = LabConfig(**settings)
    assert settings.items() <= dataclasses.asdict(config).items()


@each_case(
    ("settings", "message"),
    [
        ({"name": ""}, "lab.name is '': use up to 20 of a-z, 0-9 and '-', a letter first"),
        ({"name": "../etc"}, "lab.name is '../etc': use up to 20 of a-z, 0-9 and '-', a letter first"),
        ({"name": "Lab"}, "lab.name is 'Lab': use up to 20 of a-z, 0-9 and '-', a letter first"),
        ({"name": "1st"}, "lab.name is '1st': use up to 20 of a-z, 0-9 and '-', a letter first"),
        ({"name": "a b"}, "lab.name is 'a b': use up to 20 of a-z, 0-9 and '-', a letter first"),
        ({"name": "a\n"}, "lab.name is 'a\\n': use up to 20 of a-z, 0-9 and '-', a letter first"),
        ({"name": "a" * 21}, f"lab.name is '{'a' * 21}': use up to 20 of a-z, 0-9 and '-', a letter first"),
        ({"hosts": 0}, "lab.hosts is 0: it must be from 1 to 250"),
        ({"hosts": 251}, "lab.hosts is 251: it must be from 1 to 250"),
        ({"leaves": 0}, "lab.leaves is 0: it must be from 1 to 4"),
        ({"hosts": 2, "leaves": 3}, "lab.leaves is 3: it must be from 1 to 2"),
        ({"cpus_per_host": 0}, "lab.cpus_per_host is 0: it must be from 1 to 1024"),
        ({"mtu": 100}, "lab.mtu is 100: it must be from 576 to 65535"),
        ({"mtu": 100_000}, "lab.mtu is 100000: it must be from 576 to 65535"),
        ({"link": "1bit"}, "lab.link is 1bit: it must be from 64kbit to 400gbit"),
        ({"clock_step_s": -1}, "lab.clock_step_s is -1: it must be from 0 to 1000000"),
        ({"cpu_quota": 0.0}, "lab.cpu_quota is 0.0: it must be a number of at least 0.05"),
        ({"cpu_quota": float("nan")}, "lab.cpu_quota is nan: it must be a number of at least 0.05"),
        ({"cpu_quota": float("inf")}, "lab.cpu_quota is inf: it must be a number of at least 0.05"),
        ({"link": "fast"}, "lab.link: 'fast' is not a rate like 500mbit or 1gbit"),
        ({"uplink": "0mbit"}, "lab.uplink: '0mbit' is not a rate like 500mbit or 1gbit"),
        ({"tmp_size": "all"}, "lab.tmp_size: 'all' is not a size like 64kB or 256MiB"),
    ],
)
def test_refuses_a_lab_that_cannot_be_built(settings, message):
    with pytest.raises(ConfigError) as caught:
        LabConfig(**settings)
    assert str(caught.value) == message


def test_options_come_before_the_environment_and_that_before_files(tmp_path):
    site_file, file = tmp_path / "site.toml", tmp_path / "lab.toml"
    site_file.write_text("[lab]\nhosts = 5\nleaves = 5\nmtu = 5000\nlink = '5gbit'\n")
    file.write_text("[lab]\nhosts = 6\nleaves = 6\nmtu = 6000\n")
    environ = {"HPCPACE_LAB_HOSTS": "7", "HPCPACE_LAB_LEAVES": "7"}
    options = {"lab": {"hosts": 8, "leaves": None}}
    found = lab_of(site_file=site_file, file=file, environ=environ, options=options)
    assert (found.hosts, found.leaves, found.mtu, found.link, found.uplink) == (8, 7, 6000, "5gbit", "500mbit")


@pytest.mark.parametrize(
    "sources",
    [
        {"environ": {"HPCPACE_LAB_SHARE": "/tmp/a /tmp/b"}},
        {"options": {"lab": {"share": ("/tmp/a", "/tmp/b")}}},
    ],
    ids=["environment", "options"],
)
def test_several_folders_may_be_shared(sources):
    assert lab_of(**sources).share == ("/tmp/a", "/tmp/b")


def test_a_file_lists_the_folders_that_are_shared(tmp_path):
    (tmp_path / "lab.toml").write_text("[lab]\nshare = ['/tmp/a', '/tmp/b c']\n")
    assert lab_of(file=tmp_path / "lab.toml").share == ("/tmp/a", "/tmp/b c")


def test_an_unknown_key_is_refused_with_the_list_of_keys(tmp_path):
    (tmp_path / "lab.toml").write_text("[lab]\nswitches = 2\n")
    keys = ", ".join(field.name for field in dataclasses.fields(LabConfig))
    with pytest.raises(ConfigError) as caught:
        lab_of(file=tmp_path / "lab.toml")
    assert str(caught.value) == f"{tmp_path}/lab.toml: unknown key 'switches' in [lab]: the keys are {keys}"


@pytest.mark.parametrize("value", ["four", "4.5"])
def test_a_value_of_the_wrong_type_is_refused_with_its_source(value):
    with pytest.raises(ConfigError) as caught:
        lab_of(environ={"HPCPACE_LAB_HOSTS": value})
    assert str(caught.value) == f"HPCPACE_LAB_HOSTS: lab.hosts is {value!r}: expected a whole number"


def test_the_record_of_a_run_does_not_hold_the_settings_of_a_lab():
    assert "lab" not in Config().to_json()


@each_case(
    ("kind", "settings", "message"),
    [
        (TrainConfig, {"steps": 10**22}, f"train.steps is {10**22}: it must be at most 1000000000"),
        (TrainConfig, {"seed": 1 << 63}, f"train.seed is {1 << 63}: it must be at most {(1 << 63) - 1}"),
        (TrainConfig, {"batch_size": 10**400}, f"train.batch_size is {10**400}: it must be at most 1000000000"),
    ],
    ids=["steps", "seed", "batch_size"],
)
def test_a_number_beyond_all_use_is_refused_with_its_bound(kind, settings, message):
    with pytest.raises(ConfigError) as caught:
        kind(**settings)
    assert str(caught.value) == message


def test_all_mistakes_of_a_training_are_told_together():
    with pytest.raises(ConfigError) as caught:
        TrainConfig(steps=2, warmup_steps=2, batch_size=0, dtype="int4")
    told = str(caught.value)
    assert "train.dtype is 'int4'" in told and "train.batch_size is 0" in told
    assert told.endswith("train.steps 2: no steps are left to report; train more steps, or leave out at most 1")


@each_case(("steps", "num_warmup"), [(1, 0), (2, 1), (3, 2), (4, 3), (50, 3)])
def test_a_short_training_warms_up_for_fewer_steps(steps, num_warmup):
    assert TrainConfig(steps=steps).num_warmup_steps == num_warmup


def test_mistakes_of_several_sections_and_variables_are_told_together(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(environ={"HPCPACE_LAB_MTU": "x", "HPCPACE_TRACE_MAX_ROWS": "y"}, site_file=tmp_path / "none")
    assert "lab.mtu is 'x'" in str(caught.value) and "trace.max_rows is 'y'" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_config(environ={"HPCPACE_LAB_MTU": "1", "HPCPACE_TRACE_MAX_ROWS": "2"}, site_file=tmp_path / "none")
    assert "lab.mtu is 1: " in str(caught.value) and "trace.max_rows is 2: " in str(caught.value)


def test_all_unknown_keys_of_a_file_are_told_together(tmp_path):
    (tmp_path / "lab.toml").write_text("[lab]\nnodes = 2\nmut = 3\n[labs]\nhosts = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file=tmp_path / "lab.toml", site_file=tmp_path / "none")
    assert [word in str(caught.value) for word in ("'nodes'", "'mut'", "'labs'")] == [True] * 3
