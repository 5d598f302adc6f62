"""The settings of a run: frozen dataclasses, checked when made.

`hpcpace.config_sources` merges them from their sources. The resolved settings are written into run.json.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hpcpace.audit.settings import AuditConfig
from hpcpace.errors import ConfigError
from hpcpace.pace.settings import PaceSettings
from hpcpace.units import parse_rate, parse_size

MODELS = ("gpt2", "resnet18")
PRESETS = ("tiny", "small", "medium", "large", "xl")
DTYPES = ("float32", "bfloat16", "float64")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
COORDINATIONS = ("auto", "mpi", "torch")
ZERO_STAGES = (0, 1, 3)
SCHEDULES = ("1f1b", "gpipe", "interleaved")
COMPRESSIONS = ("none", "fp16", "bf16", "int8", "powersgd")


def _check_choice(section: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{section}.{name} is {value!r}: choose one of {', '.join(choices)}")


_MOST = 1_000_000_000
_MOST_SEED = (1 << 63) - 1  # what torch takes


def _check_least(section: str, name: str, value: float, least: float, *, most: int = _MOST) -> None:
    if not value >= least or value == math.inf:
        raise ConfigError(f"{section}.{name} is {value}: it must be a number of at least {least:g}")
    if value > most:
        raise ConfigError(f"{section}.{name} is {value}: it must be at most {most}")


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """What is recorded, and how often it reaches the disk."""

    enabled: bool = True
    """Whether anything is recorded."""
    trace_dir: Path | None = None
    """Folder for traces while the job runs, such as a node-local disk; auto: the first usable disk of the node; they
    move into the run at the end."""
    flush_interval_s: float = 1.0
    """Seconds between two flushes; a killed rank loses at most the rows since its last one."""
    max_rows: int = 1_000_000
    """Rows kept in memory while the disk takes none; further rows are dropped and counted."""
    counters: bool = True
    """Whether network and host counters are read once a second."""
    compiled: bool = True
    """Whether the compiled layer observes collectives, where it was built; if false, the layer in Python does."""
    snapshot: bool = True
    """Whether a session saves the audit's snapshot of each host and its ranks when it starts."""
    start_timeout_s: float = 20.0
    """Seconds that a rank waits for the others to enter a session, and again for them to agree on its settings; after
    that, nothing is recorded."""
    copy_timeout_s: float = 300.0
    """Seconds that copying a trace from trace_dir into the run may take at the end; then it stays where it is."""

    def __post_init__(self) -> None:
        _check_least("trace", "flush_interval_s", self.flush_interval_s, 0.01)
        _check_least("trace", "max_rows", self.max_rows, 100_000)
        _check_least("trace", "start_timeout_s", self.start_timeout_s, 0.1)
        _check_least("trace", "copy_timeout_s", self.copy_timeout_s, 1)


@dataclass(frozen=True, kw_only=True)
class ClockConfig:
    """How the clocks of the hosts are compared."""

    enabled: bool = True
    """Whether clocks are compared; without it, times of different hosts cannot be compared either."""
    interval_s: float = 30.0
    """Seconds between two comparisons."""
    num_pings: int = 20
    """Round trips per measurement; the shortest counts."""
    timeout_s: float = 10.0
    """Seconds after which a comparison is given up; the job goes on."""

    def __post_init__(self) -> None:
        _check_least("clock", "interval_s", self.interval_s, 0.1)
        _check_least("clock", "num_pings", self.num_pings, 1)
        _check_least("clock", "timeout_s", self.timeout_s, 0.1)


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """How ranks find and reach each other."""

    device: str = "auto"
    """auto, cpu or cuda; auto takes the GPU of the local rank if torch sees one, else the CPU."""
    backend: str = "auto"
    """auto, gloo or nccl; auto takes nccl on GPUs and gloo on CPUs."""
    interface: str | None = None
    """Network interfaces of the collectives, separated by commas; by default those that all hosts share and that are
    fastest."""
    start_timeout_s: float = 120.0
    """Seconds that ranks have to find and reach each other; those that hang in the start of MPI end by SIGALRM."""
    coordination: str = "auto"
    """auto, mpi or torch: what connects the ranks at first and compares clocks; auto takes MPI where its library
    understands the launcher, and torch elsewhere."""
    rendezvous: str | None = None
    """HOST:PORT, HOST or :PORT where ranks without MPI meet; by default the first host of the Slurm step, and a port
    that follows from the ids of job and step."""
    timeout_s: float = 600.0
    """Seconds after which a collective that has not completed ends the job."""

    def __post_init__(self) -> None:
        _check_choice("world", "device", self.device, DEVICES)
        _check_choice("world", "backend", self.backend, BACKENDS)
        _check_choice("world", "coordination", self.coordination, COORDINATIONS)
        _check_least("world", "start_timeout_s", self.start_timeout_s, 1)
        _check_least("world", "timeout_s", self.timeout_s, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A reference workload."""

    model: str = "gpt2"
    """gpt2 or resnet18; set by the command."""
    preset: str = "tiny"
    """Size of gpt2: tiny for laptops and tests, or the sizes of GPT-2 from small (124M parameters) to xl (1558M)."""
    mesh: str = ""
    """Layout of the ranks, like dp=2,pp=2,tp=1; by default all ranks are data-parallel replicas."""
    batch_size: int = 8
    """Sequences or images per step, over all ranks."""
    microbatches: int = 4
    """Number of pieces that the batch of a replica is cut into if there is a pipeline."""
    seq_len: int | None = None
    """Tokens per sequence; by default the context length of the preset."""
    dtype: str = "float32"
    """Type of parameters and computation: float32, bfloat16 or float64; the loss uses float32 or finer."""
    steps: int = 50
    """Number of steps to train."""
    warmup_steps: int = 3
    """Number of first steps that are trained and recorded but left out of the report."""
    seed: int = 0
    """Seed of parameters and data; the same seed gives the same losses on every mesh."""
    learning_rate: float = 3e-4
    """Step size of AdamW."""
    data: Path | None = None
    """Training data. gpt2: a text file or the folder of Wikitext, by default the sources of Python's standard library.
    resnet18: the folder of CIFAR-10's binary version, by default synthetic images."""
    vocabulary: Path | None = None
    """Folder with GPT-2's vocab.json and merges.txt; by default every byte of a text is a token."""
    eval_every: int = 0
    """Steps between two evaluations on held-out data; 0: no evaluations."""
    eval_batches: int = 8
    """Global batches per evaluation, the same ones each time; at most as many as the held-out data fill."""
    checkpoint_every: int = 0
    """Steps between two checkpoints; 0: only when a signal stops the job."""
    resume: str = "auto"
    """auto resumes from the last checkpoint of the run directory, never starts anew, and a path (of a checkpoint or of
    another run) starts from there."""
    inject: tuple[str, ...] = ()
    """Faults to inject; see docs/cli.md."""
    log_every: int = 10
    """Steps between two progress lines if the output is not a terminal."""
    zero: int = 0
    """What is sharded across replicas (ZeRO): 0 nothing, 1 the optimizer state, 3 also gradients and parameters."""
    schedule: str = "1f1b"
    """Order of microbatches in a pipeline: 1f1b, gpipe or interleaved."""
    compress: str = "none"
    """Compression of gradients on their way between replicas: none, fp16, bf16, int8 or powersgd."""
    sync_every: int = 1
    """Steps between two averages of the replicas' parameters (local SGD); 1: average gradients in every step."""
    bucket_mb: float | None = None
    """Size of DDP's gradient buckets in MiB; by default 1 for the first and 25 for the others."""
    overlap: bool = True
    """Whether gradients are sent while backward still runs; otherwise all at once at its end."""
    compile: bool = False
    """Whether torch.compile compiles blocks and head."""

    def __post_init__(self) -> None:
        problems = []
        for check in self._checks():
            try:
                check()
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("; ".join(problems))

    def _checks(self) -> Iterator[Callable[[], None]]:
        """Yield what refuses one setting each, so that all mistakes are told together."""
        for name, choices in (
            ("model", MODELS),
            ("preset", PRESETS),
            ("dtype", DTYPES),
            ("schedule", SCHEDULES),
            ("compress", COMPRESSIONS),
        ):
            yield partial(_check_choice, "train", name, getattr(self, name), choices)
        yield self._check_zero
        if self.bucket_mb is not None:
            yield partial(_check_least, "train", "bucket_mb", self.bucket_mb, 0.001)
        for name in ("batch_size", "microbatches", "steps", "log_every", "sync_every", "eval_batches"):
            yield partial(_check_least, "train", name, getattr(self, name), 1)
        for name in ("warmup_steps", "eval_every", "checkpoint_every", "learning_rate"):
            yield partial(_check_least, "train", name, getattr(self, name), 0)
        yield partial(_check_least, "train", "seed", self.seed, 0, most=_MOST_SEED)
        if self.seq_len is not None:
            yield partial(_check_least, "train", "seq_len", self.seq_len, 2)
        yield self._check_warmup

    def _check_zero(self) -> None:
        if self.zero not in ZERO_STAGES:
            raise ConfigError(f"train.zero is {self.zero!r}: choose one of {', '.join(map(str, ZERO_STAGES))}")

    def _check_warmup(self) -> None:
        if self.warmup_steps >= self.steps > 0:
            raise ConfigError(
                f"train.warmup_steps is {self.warmup_steps} and train.steps {self.steps}: no steps are left to report"
                f"; train more steps, or leave out at most {self.steps - 1}"
            )

    @property
    def has_one_bucket(self) -> bool:
        """Whether all gradients of a module go in one bucket.

        The hooks of int8 and PowerSGD send a second message from a gloo thread once the first has arrived. With several
        buckets, ranks would issue these messages in different orders, and the two threads of gloo would deadlock.
        """
        return not self.overlap or self.compress in ("int8", "powersgd")


# Below this, Slurm's own messages time out; above it, the kernel's token bucket no longer limits anything.
_LEAST_RATE_BPS, _MOST_RATE_BPS = 64_000, 400_000_000_000


def check_lab_name(name: str) -> None:
    """Refuse a name that a lab cannot have; it becomes the name of a folder.

    Raises:
        ConfigError: the name is invalid.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,19}", name):
        raise ConfigError(f"lab.name is {name!r}: use up to 20 of a-z, 0-9 and '-', a letter first")


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """A cluster that `hpcpace lab up` boots on this machine."""

    name: str = "lab"
    """Name of the lab; several can be up side by side on one machine."""
    hosts: int = 4
    """Number of hosts: n1, n2, ..."""
    leaves: int = 2
    """Number of leaf switches; each gets a block of consecutive hosts."""
    link: str = "1gbit"
    """Rate of each host's link to its leaf, in each direction."""
    uplink: str = "500mbit"
    """Rate of each leaf's link to the spine, in each direction."""
    mtu: int = 1500
    """Largest packet of all links, in bytes."""
    cpus_per_host: int = 4
    """CPUs that each host claims in Slurm, whatever the machine has."""
    cpu_quota: float | None = None
    """Cores' worth of processor time that each host gets at most; by default unlimited."""
    tmp_size: str = "256MiB"
    """Size of each host's own /tmp, in memory."""
    clock_step_s: int = 1000
    """Seconds by which the clock of n1 is ahead of the machine's; that of n2 is ahead by twice this, and so on."""
    share: tuple[str, ...] = ()
    """Folders below /tmp that all hosts see, too."""

    def __post_init__(self) -> None:
        check_lab_name(self.name)
        for key, least, most in (
            ("hosts", 1, 250),
            ("leaves", 1, self.hosts),
            ("cpus_per_host", 1, 1024),
            ("mtu", 576, 65535),
            ("clock_step_s", 0, 1_000_000),
        ):
            value = getattr(self, key)
            if not least <= value <= most:
                raise ConfigError(f"lab.{key} is {value}: it must be from {least} to {most}")
        if self.cpu_quota is not None:
            _check_least("lab", "cpu_quota", self.cpu_quota, 0.05)
        for key, parse in (("link", parse_rate), ("uplink", parse_rate), ("tmp_size", parse_size)):
            try:
                parse(getattr(self, key))
            except ValueError as error:
                raise ConfigError(f"lab.{key}: {error}") from error
        for key in ("link", "uplink"):
            if not _LEAST_RATE_BPS <= parse_rate(getattr(self, key)) <= _MOST_RATE_BPS:
                raise ConfigError(f"lab.{key} is {getattr(self, key)}: it must be from 64kbit to 400gbit")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """How a report reads a run."""

    memory: str = "2GiB"
    """Memory for the tables of a run; beyond it, the largest files are left out and named."""

    def __post_init__(self) -> None:
        try:
            parse_size(self.memory)
        except ValueError as error:
            raise ConfigError(f"report.memory: {error}") from error

    @property
    def memory_bytes(self) -> int:
        """The same, in bytes."""
        return parse_size(self.memory)


@dataclass(frozen=True, kw_only=True)
class DiagnosisConfig:
    """The thresholds above which a report says that something is wrong; docs/diagnosis.md explains each."""

    least_steps: int = 20
    """Steps that a report needs; with fewer it cannot tell. Looking for stragglers always takes 20."""
    level: float = 0.005
    """Probability of blaming somebody by chance, over all ranks of a run together."""
    straggler_share: float = 0.03
    """Straggler: excess of the own work of a rank or node over the others of its role, relative to them."""
    imbalance_share: float = 0.025
    """Pipeline imbalance: excess of the own work of a stage over the other stages, relative to them."""
    jitter_share: float = 0.06
    """Synchronisation amplification: share of the step lost because each step waits for its slowest rank."""
    contention_share: float = 0.02
    """Fabric contention: share of the time spent in transfers that took much longer than usual."""
    link_share: float = 0.2
    """Slow link, locality: excess of transfers over a link or across switches, relative to other transfers."""
    communication_share: float = 0.15
    """Communication-bound: share of exposed transfer in the time without waits."""
    input_share: float = 0.1
    """Input-bound: share of the step spent waiting for data."""
    runtime_share: float = 0.02
    """Runtime and control plane: share of the time lost to recurring events or to garbage collection."""
    hang_s: float = 5.0
    """Hang: seconds that an operation must last, and at least twenty usual steps."""

    def __post_init__(self) -> None:
        _check_least("diagnosis", "least_steps", self.least_steps, 4)
        for item in dataclasses.fields(self):
            if item.name != "least_steps":
                _check_least("diagnosis", item.name, getattr(self, item.name), 1e-9)
            if item.name.endswith(("_share", "level")) and getattr(self, item.name) > 1:
                raise ConfigError(f"diagnosis.{item.name} is {getattr(self, item.name)}: it must be at most 1")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings; each section is a table of the TOML file."""

    trace: TraceConfig = field(default_factory=TraceConfig)
    clock: ClockConfig = field(default_factory=ClockConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    pace: PaceSettings = field(default_factory=PaceSettings)
    lab: LabConfig = field(default_factory=LabConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    diagnosis: DiagnosisConfig = field(default_factory=DiagnosisConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the settings for run.json as plain values; those of lab, reports and audits are left out."""
        return {
            section: {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
            for section, values in dataclasses.asdict(self).items()
            if section not in ("lab", "report", "diagnosis", "audit")
        }
