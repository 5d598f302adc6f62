"""The settings of a run: frozen dataclasses, checked when made, merged once.

Later sources win: the defaults below, /etc/hpcpace.toml, the file of `--config`, environment variables
(`HPCPACE_TRACE_FLUSH_INTERVAL_S` sets `flush_interval_s` of `[trace]`), command-line options. The resolved settings
are written into run.json.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcpace.errors import ConfigError

SITE_FILE = Path("/etc/hpcpace.toml")

PRESETS = ("tiny", "small")
DTYPES = ("float32", "bfloat16", "float64")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")


def _check_choice(section: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{section}.{name} is {value!r}: choose one of {', '.join(choices)}")


def _check_least(section: str, name: str, value: float, least: float) -> None:
    if not value >= least or math.isinf(value):
        raise ConfigError(f"{section}.{name} is {value}: it must be a number of at least {least:g}")


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """What is recorded, and how often it reaches the disk."""

    enabled: bool = True
    """Whether anything is recorded at all."""
    trace_dir: Path | None = None
    """Folder for traces while the job runs, such as a node-local disk; they are copied into the run at the end."""
    flush_interval_s: float = 1.0
    """Seconds between two flushes; what a killed rank can lose."""
    max_rows: int = 1_000_000
    """Rows kept in memory while the disk does not take them; beyond it rows are dropped and counted."""
    counters: bool = True
    """Whether network and host counters are read once a second."""

    def __post_init__(self) -> None:
        _check_least("trace", "flush_interval_s", self.flush_interval_s, 0.01)
        _check_least("trace", "max_rows", self.max_rows, 100_000)


@dataclass(frozen=True, kw_only=True)
class ClockConfig:
    """How the clocks of the hosts are compared."""

    enabled: bool = True
    """Whether clocks are synchronised; without it times of different hosts cannot be compared."""
    interval_s: float = 30.0
    """Seconds between two synchronisations."""
    num_pings: int = 20
    """Round trips of one measurement; the shortest one counts."""
    timeout_s: float = 10.0
    """Seconds after which a synchronisation is given up; the job goes on."""

    def __post_init__(self) -> None:
        _check_least("clock", "interval_s", self.interval_s, 0.1)
        _check_least("clock", "num_pings", self.num_pings, 1)
        _check_least("clock", "timeout_s", self.timeout_s, 0.1)


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """How ranks find and reach each other."""

    device: str = "auto"
    """auto takes the GPU of the local rank where torch sees one, and the CPU elsewhere."""
    backend: str = "auto"
    """auto takes nccl on GPUs and gloo on CPUs."""
    interface: str | None = None
    """Network interface of the collectives; chosen from the hosts' addresses when not given."""
    timeout_s: float = 600.0
    """Seconds after which a collective that does not complete ends the job."""

    def __post_init__(self) -> None:
        _check_choice("world", "device", self.device, DEVICES)
        _check_choice("world", "backend", self.backend, BACKENDS)
        _check_least("world", "timeout_s", self.timeout_s, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A reference workload."""

    preset: str = "tiny"
    """Size of the model: tiny (for laptops and tests) or small (GPT-2, 124M parameters)."""
    mesh: str = ""
    """How ranks are laid out, like dp=2,pp=2,tp=1; all in data parallelism when not given."""
    batch_size: int = 8
    """Sequences per step over all ranks."""
    microbatches: int = 4
    """Pieces that a replica's batch is cut into when there is a pipeline."""
    seq_len: int | None = None
    """Tokens of a sequence; the preset's context length when not given."""
    dtype: str = "float32"
    """Type of parameters and computation."""
    steps: int = 50
    """Steps to train."""
    warmup_steps: int = 3
    """First steps, trained and marked, and left out of the report."""
    seed: int = 0
    """Seed of parameters and data; the same seed gives the same losses on every mesh."""
    learning_rate: float = 3e-4
    """Step size of AdamW."""
    data: Path | None = None
    """Text file to train on; the sources of Python's own library when not given."""
    inject: tuple[str, ...] = ()
    """Faults to inject, see docs/cli.md."""
    log_every: int = 10
    """Steps between two progress lines where the output is no terminal."""

    def __post_init__(self) -> None:
        _check_choice("train", "preset", self.preset, PRESETS)
        _check_choice("train", "dtype", self.dtype, DTYPES)
        for name in ("batch_size", "microbatches", "steps", "log_every"):
            _check_least("train", name, getattr(self, name), 1)
        _check_least("train", "warmup_steps", self.warmup_steps, 0)
        _check_least("train", "seed", self.seed, 0)
        _check_least("train", "learning_rate", self.learning_rate, 0)
        if self.seq_len is not None:
            _check_least("train", "seq_len", self.seq_len, 2)
        if self.warmup_steps >= self.steps:
            raise ConfigError(
                f"train.warmup_steps is {self.warmup_steps} and train.steps {self.steps}: no step is left to report"
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run, one section a table of the TOML file."""

    trace: TraceConfig = field(default_factory=TraceConfig)
    clock: ClockConfig = field(default_factory=ClockConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the settings as plain values for run.json."""
        return {
            section: {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
            for section, values in dataclasses.asdict(self).items()
        }


def load_config(
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    site_file: Path = SITE_FILE,
) -> Config:
    """Merge all sources into one configuration.

    Args:
        file: a TOML file named by the user, which must exist.
        environ: environment variables; those that name a setting count.
        options: values of command-line options by section and key; None stands for an option that was not given.
        site_file: the centre's TOML file, which need not exist.

    Raises:
        ConfigError: a file cannot be read, or a key or a value is wrong.
    """
    merged: dict[str, dict[str, Any]] = {section: {} for section in _sections()}
    if site_file.exists():
        _merge(merged, _read_toml(site_file), str(site_file))
    if file is not None:
        _merge(merged, _read_toml(file), str(file))
    for section, key, variable in _variables():
        if environ and environ.get(variable):
            _merge(merged, {section: {key: environ[variable]}}, variable)
    given = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in (options or {}).items()
    }
    _merge(merged, given, "the command line")
    return Config(**{section: kind(**merged[section]) for section, kind in _sections().items()})


def _sections() -> dict[str, type]:
    return {f.name: typing.cast(type, f.default_factory) for f in dataclasses.fields(Config)}


def _variables() -> Iterator[tuple[str, str, str]]:
    for section, kind in _sections().items():
        for f in dataclasses.fields(kind):
            yield section, f.name, f"HPCPACE_{section}_{f.name}".upper()


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _merge(merged: dict[str, dict[str, Any]], values: Mapping[str, Any], source: str) -> None:
    for section, table in values.items():
        if section not in merged:
            raise ConfigError(f"{source}: unknown section [{section}]: the sections are {', '.join(merged)}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{source}: {section} must be a table like [{section}]")
        hints = typing.get_type_hints(_sections()[section])
        for key, value in table.items():
            if key not in hints:
                raise ConfigError(f"{source}: unknown key {key!r} in [{section}]: the keys are {', '.join(hints)}")
            merged[section][key] = _coerce(value, hints[key], f"{source}: {section}.{key}")


def _coerce(value: Any, kind: Any, where: str) -> Any:
    if isinstance(kind, types.UnionType):
        kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (str, list, tuple)):
            raise ConfigError(f"{where} is {value!r}: expected a list of texts")
        return tuple(value.split() if isinstance(value, str) else map(str, value))
    if kind is bool:
        return _coerce_bool(value, where)
    if isinstance(value, bool):
        raise ConfigError(f"{where} is {value}: expected a {kind.__name__}")
    try:
        converted = kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where} is {value!r}: expected a {kind.__name__}") from error
    if kind is int and isinstance(value, float) and converted != value:
        raise ConfigError(f"{where} is {value!r}: expected a whole number")
    return converted


def _coerce_bool(value: Any, where: str) -> bool:
    words = {"1": True, "on": True, "true": True, "yes": True, "0": False, "off": False, "false": False, "no": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() in words:
        return words[str(value).lower()]
    raise ConfigError(f"{where} is {value!r}: expected on or off")
