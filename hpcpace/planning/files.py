"""Models and machines that users name: a preset, or a file of TOML or YAML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from hpcpace.core.codec import WrongValue, convert, parse_yaml
from hpcpace.core.errors import ConfigError, check_package
from hpcpace.core.files import read_file
from hpcpace.core.records import dataclass
from hpcpace.core.text import listed, printable
from hpcpace.planning.machine import KnownMachine, Machine
from hpcpace.planning.model import PRESETS, Transformer, preset

_MAX_BYTES, _MAX_VALUES = 1 << 16, 256
_WORDS = {"true": True, "false": False}
Size = Annotated[int, Meta(ge=0, le=1 << 24)]
"""Of layers, widths, heads, sequences and vocabularies: no model comes near its bound."""
_Positive = Annotated[float, Meta(ge=1e-6, le=1e9)]
_Delay = Annotated[float, Meta(ge=0, le=1e12)]


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A transformer as a file has it; names as of `Transformer`."""

    num_layers: Size
    hidden: Size
    num_heads: Size
    sequence: Size
    vocabulary: Size
    feedforward: Size = 0
    is_tied: bool = True
    is_attention_fused: bool = True


@dataclass(frozen=True, kw_only=True)
class MachineFile:
    """A machine as a file has it, in the units of data sheets; what is missing is as of the machine it is like.

    Attributes:
        like: a machine of `machines.toml`.
        gpus_per_node: processors of a node.
        memory_gb: of a processor, 1e9 bytes.
        tflops: that large matrix products reach, 1e12 operations of 16 bits a second.
        memory_gbyte_s: that elementwise operations move, 1e9 bytes a second.
        node_gbyte_s: that a processor sends to others of its node, 1e9 bytes a second.
        network_gbps: that a node sends to others, 1e9 bits a second.
        layer_us, node_latency_us, network_latency_us: as of `Machine`, microseconds.
        error: half-width of a prediction, logarithmic; unknown if missing.
        is_scaled: whether data sheets were used in place of measurements.
        has_gpus, is_of_rings: as of `Machine`.
    """

    like: str = ""
    gpus_per_node: Annotated[int, Meta(ge=1, le=4096)] | None = None
    memory_gb: _Positive | None = None
    tflops: _Positive | None = None
    memory_gbyte_s: _Positive | None = None
    node_gbyte_s: _Positive | None = None
    network_gbps: _Positive | None = None
    layer_us: _Delay | None = None
    node_latency_us: _Delay | None = None
    network_latency_us: _Delay | None = None
    error: Annotated[float, Meta(gt=0, le=3)] | None = None
    is_scaled: bool = False
    has_gpus: bool | None = None
    is_of_rings: bool = False


_UNITS = {
    "gpus_per_node": ("gpus_per_node", 1),
    "memory_gb": ("memory_bytes", 1e9),
    "tflops": ("flops", 1e12),
    "memory_gbyte_s": ("memory_rate", 1e9),
    "node_gbyte_s": ("node_rate", 1e9),
    "network_gbps": ("network_rate", 1e9 / 8),
    "layer_us": ("layer_s", 1e-6),
    "node_latency_us": ("node_latency_s", 1e-6),
    "network_latency_us": ("network_latency_s", 1e-6),
    "has_gpus": ("has_gpus", 1),
}
"""Field of a `Machine` of each field of a file, and its unit."""
MEASURED_RANKS = 256
"""Most ranks of the steps that constants of a100 come from."""
_NEEDED = ("gpus_per_node", "memory_gb", "tflops", "memory_gbyte_s", "node_gbyte_s", "network_gbps")


def read_model(name: str) -> Transformer:
    """Return the transformer of a preset or a file.

    Raises:
        ConfigError: there is no such preset or file, or it has something else.
    """
    if (found := preset(name)) is not None:
        return found
    content = _content(name, PRESETS, "model")
    made = _converted(content, ModelFile, name)
    return Transformer(name=Path(name).stem, **{field.name: getattr(made, field.name) for field in fields(made)})


def read_machine(name: str) -> KnownMachine:
    """Return the machine of a name in `machines.toml` or of a file.

    Raises:
        ConfigError: there is no such machine or file, or it has something else.
    """
    known = _table()
    if name in known:
        return _known(name, _converted(known[name], MachineFile, name), known)
    return _known(Path(name).stem, _converted(_content(name, known, "machine"), MachineFile, name), known)


def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("machines.toml").read_text(encoding="utf-8"))


def _known(name: str, found: MachineFile, table: Mapping[str, Any]) -> KnownMachine:
    """Return a machine whose missing fields are those of the one it is like.

    Raises:
        ConfigError: that one is not known, or fields are missing.
    """
    given = {field: getattr(found, field) for field in _UNITS if getattr(found, field) is not None}
    values = {
        _UNITS[field][0]: value if isinstance(value, bool) else value * _UNITS[field][1]
        for field, value in given.items()
    }
    if found.like:
        if found.like not in table:
            raise ConfigError(
                f"machine {name} is like {printable(found.like)!r}: choose one of {listed(sorted(table))}"
            )
        base = read_machine(found.like)
        is_of_rings = base.machine.is_of_rings if found.is_scaled or not found.network_gbps else found.is_of_rings
        machine = replace(base.machine, name=name, is_of_rings=is_of_rings, **values)
        # How far off predictions are was measured with the base's own computation.
        is_other = found.is_scaled or found.tflops or found.memory_gbyte_s or found.layer_us is not None
        error = found.error if is_other else found.error or base.error
        remarks = base.remarks
    else:
        missing = [field for field in _NEEDED if field not in given]
        if missing:
            raise ConfigError(f'machine {name} lacks {listed(missing)}: add them, or `like = "a100"`')
        machine, error, remarks = Machine(name=name, is_of_rings=found.is_of_rings, **values), found.error, ()
    if error is None and not found.is_scaled:
        remarks = (*remarks, f"{name}: give it an `error` to get intervals, such as 0.2 if predictions are within 20 %")
    if found.is_scaled:
        remarks = (*remarks, f"{name}: scaled from data sheets, nobody has measured it")
    return KnownMachine(machine=machine, error=error, remarks=remarks)


def _content(name: str, presets: Mapping[str, Any] | tuple[str, ...], what: str) -> Any:
    path = Path(name)
    if not path.suffix and not path.exists():
        raise ConfigError(f"no {what} {printable(name)!r}: name a file, or one of {listed(sorted(presets))}")
    try:
        text = read_file(path.absolute(), most_bytes=_MAX_BYTES).decode("utf-8")
        return _yaml(text) if path.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {printable(name)}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{printable(name)} is not valid TOML or YAML: {printable(str(error))[:160]}") from error


def _yaml(text: str) -> Any:
    check_package("yaml", extra="topology")
    found = parse_yaml(text, max_values=_MAX_VALUES)
    return {key: _scalar(value) for key, value in found.items()} if isinstance(found, dict) else found


def _scalar(value: Any) -> Any:
    """Return the number, or true or false, that a text of YAML is; else the value."""
    for made in (_WORDS.__getitem__, int, float):
        try:
            return made(value)
        except (KeyError, TypeError, ValueError):
            continue
    return value


def _converted(content: Any, kind: type[Any], name: str) -> Any:
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(content) - set(known)) if isinstance(content, dict) else []
    if unknown:
        raise ConfigError(f"{printable(name)}: unknown {printable(listed(unknown))}: it may have {listed(known)}")
    try:
        return convert(content, kind)
    except WrongValue as error:
        raise ConfigError(f"{printable(name)}: {error}") from error
