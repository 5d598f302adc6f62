"""Models and machines from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpace.core.errors import ConfigError
from hpcpace.planning.files import read_machine, read_model

MODEL = "num_layers = 4\nhidden = 64\nnum_heads = 4\nsequence = 32\nvocabulary = 100\n"
MACHINE = """gpus_per_node = 4
memory_gb = 24
tflops = 50
memory_gbyte_s = 500
node_gbyte_s = 10
network_gbps = 25
"""


def _file(tmp_path: Path, content: str, name: str = "mine.toml") -> str:
    path = tmp_path / name
    path.write_text(content)
    return str(path)


def test_a_model_of_toml_and_of_yaml(tmp_path: Path) -> None:
    of_yaml = MODEL.replace(" = ", ": ")
    for found in (read_model(_file(tmp_path, MODEL)), read_model(_file(tmp_path, of_yaml, "mine.yaml"))):
        assert (found.name, found.num_layers, found.width_of_mlp, found.is_tied) == ("mine", 4, 256, True)


def test_units_of_data_sheets(tmp_path: Path) -> None:
    known = read_machine(_file(tmp_path, MACHINE))
    machine = known.machine
    assert (machine.name, machine.flops, machine.network_rate, known.error) == ("mine", 50e12, 25e9 / 8, None)


def test_what_is_missing_is_as_of_the_machine_it_is_like(tmp_path: Path) -> None:
    known, base = read_machine(_file(tmp_path, 'like = "a100"\nnetwork_gbps = 100\n')), read_machine("a100")
    assert known.machine.network_rate == 100e9 / 8 and known.machine.flops == base.machine.flops
    assert known.error == base.error and not known.remarks


def test_data_sheets_are_no_measurements() -> None:
    for name in ("h100", "a40"):
        known = read_machine(name)
        assert known.error is None and known.remarks == (f"{name}: scaled from data sheets, nobody has measured it",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("hidden = 64\n", "num_layers"),
        (MODEL + "color = 1\n", "unknown color: it may have num_layers, hidden"),
        (MODEL.replace("= 64", '= "wide"'), "hidden is 'wide'"),
        (MODEL.replace("= 64", "= 66"), "a hidden size of 66 cannot be split into 4 heads"),
        (MODEL.replace("= 64", "= 0"), "hidden is 0: it must be at least 1"),
        (MODEL.replace("= 64", "= -1"), "hidden"),
        ("[", "is not valid TOML or YAML"),
        ("a" * 100_000, "cannot read the model|too large|is larger|bytes"),
    ],
)
def test_models_that_are_none_are_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model(_file(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (MACHINE.replace("network_gbps = 25\n", ""), 'lacks network_gbps: add them, or `like = "a100"`'),
        (MACHINE.replace("= 25", "= 0"), "network_gbps is 0"),
        (MACHINE.replace("= 25", "= nan"), "network_gbps"),
        ('like = "b100"\n', "is like 'b100': choose one of"),
        (MACHINE + "gpus = 1\n", "unknown gpus"),
        ("- 1\n- 2\n", "is not valid TOML or YAML"),
    ],
)
def test_machines_that_are_none_are_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_machine(_file(tmp_path, content))


def test_names_that_are_not_known_are_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model 'gpt5': name a file, or one of gpt2-large"):
        read_model("gpt5")
    with pytest.raises(ConfigError, match="no machine 'abacus': name a file, or one of a100"):
        read_machine("abacus")
    with pytest.raises(ConfigError, match="cannot read the machine"):
        read_machine(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="it has YAML aliases"):
        read_machine(_file(tmp_path, "a: &a 1\nb: *a\n", "mine.yaml"))
    with pytest.raises(ConfigError, match="hidden is 'wide'"):
        read_model(_file(tmp_path, MODEL.replace(" = ", ": ").replace("64", "wide"), "mine.yaml"))
