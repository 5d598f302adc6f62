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
from hpcpace.core.detail import DETAILS, parse_steps
from hpcpace.core.errors import ConfigError, check_all
from hpcpace.core.text import parse_rate, parse_size, shown
from hpcpace.core.thresholds import ThresholdValues
from hpcpace.pace.settings import PaceSettings

MODELS = ("gpt2", "resnet18")
PRESETS = ("tiny", "small", "medium", "large", "xl")
DTYPES = ("float32", "bfloat16", "float64")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
"""Other names of the same types, as users of mixed precision write them."""
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
COORDINATIONS = ("auto", "mpi", "torch")
ZERO_STAGES = (0, 1, 3)
SWITCH_SIGNALS = ("none", "USR1", "USR2")
SCHEDULES = ("1f1b", "gpipe", "interleaved")
PROBE_TIMES = ("none", "start", "end")
ON_HANG = ("report", "stop", "off")
ON_HANG_VARIABLE = "HPCPACE_HANG_ON_HANG"
"""By this variable, `hpcpace trace` hands on what to do about a hang."""
COMPRESSIONS = ("none", "fp16", "bf16", "int8", "powersgd")


def _check_choice(section: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{section}.{name} is {shown(value)}: choose one of {', '.join(choices)}")


MOST = 1_000_000_000
"""The largest number that a setting or an option takes that has no other bound."""

_WARMUP_STEPS = 3
_Bounds = tuple[float, float]
_COUNT: _Bounds = (1, MOST)
_COUNT_OR_NONE: _Bounds = (0, MOST)

BOUNDS: dict[str, dict[str, _Bounds]] = {
    "trace": {
        "flush_interval_s": (0.01, MOST),
        "max_rows": (100_000, MOST),
        "start_timeout_s": (0.1, MOST),
        "copy_timeout_s": (1, MOST),
        "keep_last": _COUNT_OR_NONE,
        "flows": (0, 1024),
    },
    "hang": {"factor": (2, MOST), "least_s": (1, MOST), "first_step_s": (1, MOST)},
    "clock": {"interval_s": (0.1, MOST), "num_pings": _COUNT, "timeout_s": (0.1, MOST)},
    "metrics": {"interval_s": (1, MOST)},
    "world": {"start_timeout_s": (1, MOST), "timeout_s": (1, MOST)},
    "probe": {"time_s": (1, 3600), "timeout_s": (1, 600)},
    "train": {
        "batch_size": _COUNT,
        "microbatches": _COUNT,
        "steps": _COUNT,
        "log_every": _COUNT,
        "sync_every": _COUNT,
        "eval_batches": _COUNT,
        "warmup_steps": _COUNT_OR_NONE,
        "eval_every": _COUNT_OR_NONE,
        "checkpoint_every": _COUNT_OR_NONE,
        "learning_rate": (0, MOST),
        "seed": (0, (1 << 63) - 1),  # what torch takes
        "seq_len": (2, MOST),
        "bucket_mb": (0.001, MOST),
    },
    "lab": {
        "hosts": (1, 250),
        "leaves": (1, 250),
        "cpus_per_host": (1, 1024),
        "mtu": (576, 65535),
        "clock_step_s": (0, 1_000_000),
        "cpu_quota": (0.05, MOST),
    },
}
"""The least and the largest value of settings, by section and key; options that set them have the same bounds."""


def _check_bounds(section: str, name: str, value: float | None, bounds: _Bounds) -> None:
    """Refuse a number out of its bounds; None is one that is not set."""
    least, most = bounds
    if value is None or least <= value <= most:
        return
    if most < MOST:
        raise ConfigError(f"{section}.{name} is {value}: it must be from {least} to {most}")
    if value > most and value != math.inf:
        raise ConfigError(f"{section}.{name} is {value}: it must be at most {most}")
    raise ConfigError(f"{section}.{name} is {value}: it must be a number of at least {least:g}")


def _bounds_checks(section: str, settings: object) -> Iterator[Callable[[], None]]:
    """Yield what refuses one number of a section each."""
    for name, bounds in BOUNDS[section].items():
        yield partial(_check_bounds, section, name, getattr(settings, name), bounds)


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
    detail_steps: str = ""
    """Steps to record in detail, like 100:200 or 100:200,5000:5100; of all others only their times, and the counters.
    By default all."""
    detail: str = "full"
    """What is recorded of these steps: full, collectives (no phases), or steps (no collectives either)."""
    keep_last: int = 0
    """Last steps to keep at least; those before them are dropped from the trace while the job runs. 0: all are kept."""
    switch_signal: str = "none"
    """none, USR1 or USR2: the signal that switches detail off and on again, if the program does not handle it."""
    counters: bool = True
    """Whether network and host counters, and those of connections, are read once a second."""
    flows: int = 64
    """TCP connections to other hosts that are recorded one by one, those with the most bytes; the others are summed up.
    0: nothing is recorded of connections."""
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
        check_all(self._checks())

    def _checks(self) -> Iterator[Callable[[], None]]:
        yield partial(_check_choice, "trace", "detail", self.detail, DETAILS)
        yield partial(_check_choice, "trace", "switch_signal", self.switch_signal, SWITCH_SIGNALS)
        yield self._check_steps
        yield from _bounds_checks("trace", self)

    def _check_steps(self) -> None:
        try:
            parse_steps(self.detail_steps)
        except ValueError as error:
            raise ConfigError(f"trace.detail_steps: {error}") from error


@dataclass(frozen=True, kw_only=True)
class HangConfig:
    """When a step lasts too long, and what a session does then."""

    on_hang: str = "report"
    """report: write what each rank does and where its threads are, and say so; stop: also end the job with exit code 4
    if nothing has moved after twice the time; off: do not watch."""
    factor: float = 30.0
    """How many times the usual step (the median of recent ones) a step may last."""
    least_s: float = 60.0
    """Seconds that any step may last, however short steps usually are."""
    first_step_s: float = 120.0
    """Seconds that torch's process group and each of the first steps may take; stop waits ten times as long there, and
    in the first checkpoint or evaluation."""

    def __post_init__(self) -> None:
        check_all(self._checks())

    def _checks(self) -> Iterator[Callable[[], None]]:
        yield partial(_check_choice, "hang", "on_hang", self.on_hang, ON_HANG)
        yield from _bounds_checks("hang", self)


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
        check_all(_bounds_checks("clock", self))


METRICS_RANKS = ("first", "node")


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What a job tells the centre of itself."""

    prometheus: str | None = None
    """File into which a rank writes metrics while the job runs, like /var/lib/node_exporter/hpcpace-{jobid}.prom;
    {jobid}, {step}, {node} and {rank} are replaced. By default none."""
    ranks: str = "first"
    """first or node: whether rank 0 alone writes metrics, or the first rank of each node."""
    interval_s: float = 15.0
    """Seconds between two writes of the metrics."""
    job_comment: bool = False
    """Whether rank 0 adds a line on the run to the comment of the Slurm job at its end."""

    def __post_init__(self) -> None:
        check_all(self._checks())

    def _checks(self) -> Iterator[Callable[[], None]]:
        yield partial(_check_choice, "metrics", "ranks", self.ranks, METRICS_RANKS)
        yield from _bounds_checks("metrics", self)


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
        check_all(self._checks())

    def _checks(self) -> Iterator[Callable[[], None]]:
        yield partial(_check_choice, "world", "device", self.device, DEVICES)
        yield partial(_check_choice, "world", "backend", self.backend, BACKENDS)
        yield partial(_check_choice, "world", "coordination", self.coordination, COORDINATIONS)
        yield from _bounds_checks("world", self)


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """A probe inside a job; docs/probe.md explains it."""

    when: str = "none"
    """none, start or end: whether a session probes the job's hosts before its first step, or after its last one. The
    variable HPCPACE_PROBE sets it, too."""
    time_s: float = 10.0
    """Seconds that the probe measures."""
    timeout_s: float = 5.0
    """Seconds after which it gives up on a host that does not answer."""

    def __post_init__(self) -> None:
        check_all(self._checks())

    def _checks(self) -> Iterator[Callable[[], None]]:
        yield partial(_check_choice, "probe", "when", self.when, PROBE_TIMES)
        yield from _bounds_checks("probe", self)


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
    """Type of the computation: float32 (fp32), bfloat16 (bf16) or float64 (fp64). With bfloat16, parameters, their
    gradients, the optimizer and the loss stay in float32."""
    steps: int = 50
    """Number of steps to train."""
    warmup_steps: int | None = None
    """Number of first steps that are trained and recorded but left out of the report; by default 3, or all but one of
    fewer steps."""
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
    shared_cores: bool = False
    """Whether ranks share cores on purpose, with each other or other programs: reports then look for other causes."""
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
        object.__setattr__(self, "dtype", SHORT_DTYPES.get(self.dtype, self.dtype))
        check_all(self._checks())

    def _checks(self) -> Iterator[Callable[[], None]]:
        for name, choices in (
            ("model", MODELS),
            ("preset", PRESETS),
            ("dtype", DTYPES),
            ("schedule", SCHEDULES),
            ("compress", COMPRESSIONS),
        ):
            yield partial(_check_choice, "train", name, getattr(self, name), choices)
        yield self._check_zero
        yield from _bounds_checks("train", self)
        yield self._check_warmup

    def _check_zero(self) -> None:
        if self.zero not in ZERO_STAGES:
            raise ConfigError(f"train.zero is {self.zero!r}: choose one of {', '.join(map(str, ZERO_STAGES))}")

    def _check_warmup(self) -> None:
        if self.num_warmup_steps >= self.steps > 0:
            raise ConfigError(
                f"train.warmup_steps is {self.warmup_steps} and train.steps {self.steps}: no steps are left to report"
                f"; train more steps, or leave out at most {self.steps - 1}"
            )

    @property
    def num_warmup_steps(self) -> int:
        """Number of first steps that the report leaves out."""
        return min(_WARMUP_STEPS, self.steps - 1) if self.warmup_steps is None else self.warmup_steps

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
        raise ConfigError(f"lab.name is {shown(name)}: use up to 20 of a-z, 0-9 and '-', a letter first")


def _check_rate(name: str, text: str) -> None:
    try:
        rate_bps = parse_rate(text)
    except ValueError as error:
        raise ConfigError(f"lab.{name}: {error}") from error
    if not _LEAST_RATE_BPS <= rate_bps <= _MOST_RATE_BPS:
        raise ConfigError(f"lab.{name} is {text}: it must be from 64kbit to 400gbit")


def _check_size(section: str, name: str, text: str) -> None:
    try:
        parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{section}.{name}: {error}") from error


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
        check_all(self._checks())

    def _checks(self) -> Iterator[Callable[[], None]]:
        yield partial(check_lab_name, self.name)
        yield from (
            partial(_check_bounds, "lab", name, getattr(self, name), self._bounds(name)) for name in BOUNDS["lab"]
        )
        yield partial(_check_rate, "link", self.link)
        yield partial(_check_rate, "uplink", self.uplink)
        yield partial(_check_size, "lab", "tmp_size", self.tmp_size)

    def _bounds(self, name: str) -> _Bounds:
        least, most = BOUNDS["lab"][name]
        return (least, self.hosts) if name == "leaves" and least <= self.hosts <= most else (least, most)


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """How a report reads a run."""

    memory: str = "2GiB"
    """Memory for the tables of a run; beyond it, the largest files are left out and named."""
    topology: str = ""
    """File with the leaf switch of each host: topology.conf, topology.yaml, the output of `scontrol show topology`, or
    `host leaf spine` on each line; empty: what Slurm told the job."""

    def __post_init__(self) -> None:
        _check_size("report", "memory", self.memory)

    @property
    def memory_bytes(self) -> int:
        """The same, in bytes."""
        return parse_size(self.memory)


def _check_share(name: str, value: float) -> None:
    if value > 1:
        raise ConfigError(f"diagnosis.{name} is {value}: it must be at most 1")


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
    data_share: float = 0.5
    """Work varies with the data: what stages have in common of how the work of microbatches varies within a step."""
    contention_share: float = 0.02
    """Fabric contention: share of the time spent in transfers that took much longer than usual."""
    link_share: float = 0.2
    """Slow link, locality: excess of transfers over a link or across switches, relative to other transfers."""
    flow_share: float = 0.3
    """Slow link, by connections: excess of the time that connections take for their bytes, relative to others."""
    uplink_factor: float = 3.0
    """Slow uplinks: how many times as long connections between leaves may take by design as those within one."""
    foreign_share: float = 0.1
    """Foreign traffic: its least rate on a link, relative to that of a connection that is not slow."""
    repeat_share: float = 0.002
    """Lossy link: least share of segments that are sent again, and four times that of other connections."""
    communication_share: float = 0.15
    """Communication-bound: share of exposed transfer in the time without waits."""
    probed_share: float = 0.8
    """Communication-bound: share of the probed rate from which on transfers run at the link's own rate."""
    input_share: float = 0.1
    """Input-bound: share of the step spent waiting for data."""
    host_share: float = 0.05
    """Host-bound: share of the step in which devices wait for their hosts to issue work."""
    runtime_share: float = 0.02
    """Runtime and control plane: share of the time lost to recurring events or to garbage collection."""
    core_share: float = 0.1
    """Ranks share cores: share of the time for which a rank is ready to run and waits for a core."""
    hang_s: float = 5.0
    """Hang: seconds that an operation must last, and at least twenty usual steps."""

    def __post_init__(self) -> None:
        check_all(self._checks())

    def _checks(self) -> Iterator[Callable[[], None]]:
        yield partial(_check_bounds, "diagnosis", "least_steps", self.least_steps, (4, MOST))
        for item in dataclasses.fields(self):
            if item.name != "least_steps":
                yield partial(_check_bounds, "diagnosis", item.name, getattr(self, item.name), (1e-9, MOST))
            if item.name.endswith(("_share", "level")):
                yield partial(_check_share, item.name, getattr(self, item.name))


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings; each section is a table of the TOML file."""

    trace: TraceConfig = field(default_factory=TraceConfig)
    hang: HangConfig = field(default_factory=HangConfig)
    clock: ClockConfig = field(default_factory=ClockConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    pace: PaceSettings = field(default_factory=PaceSettings)
    lab: LabConfig = field(default_factory=LabConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    diagnosis: DiagnosisConfig = field(default_factory=DiagnosisConfig)
    thresholds: ThresholdValues = field(default_factory=ThresholdValues)
    audit: AuditConfig = field(default_factory=AuditConfig)

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the settings for run.json as plain values; those of lab, reports and audits are left out."""
        return {
            section: {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
            for section, values in dataclasses.asdict(self).items()
            if section not in ("lab", "report", "diagnosis", "thresholds", "audit")
        }
