"""The settings of a run: a frozen dataclass for each section, whose fields declare their bounds and choices.

A section checks itself when it is made, and reports all mistakes together. `hpcpace.core.settings` merges sections from
their sources; the resolved settings are written into run.json.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hpcpace.core.detail import DETAILS, parse_steps
from hpcpace.core.errors import ConfigError, check_all
from hpcpace.core.text import NS_PER_MS, NS_PER_US, parse_rate, parse_size, shown
from hpcpace.core.thresholds import ThresholdValues

MAX = 1_000_000_000
"""The largest number that a setting or an option takes that has no other bound."""

Bounds = tuple[float, float]
"""The smallest and the largest value of a setting; options that set it have the same."""

_Value = TypeVar("_Value")


def number(default: _Value, least: float, most: float = MAX) -> _Value:
    """Declare a number with bounds as a field of a `Section`; None means that it is not set."""
    declared: _Value = field(default=default, metadata={"bounds": (least, most)})
    return declared


def choice(default: str, choices: tuple[str, ...]) -> str:
    """Declare one of some words as a field of a `Section`."""
    declared: str = field(default=default, metadata={"choices": choices})
    return declared


class Section:
    """Base of the frozen dataclasses of a configuration's sections.

        @dataclass(frozen=True, kw_only=True)
        class ClockConfig(Section, section="clock"):
            interval_s: float = number(30.0, 0.1)

    Raises:
        ConfigError: values are wrong; the message has all of them.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # every subclass is a dataclass
    section: ClassVar[str]

    def __init_subclass__(cls, *, section: str) -> None:
        """Name the table of the configuration that sets these fields."""
        cls.section = section

    def __post_init__(self) -> None:
        check_all(self.checks())

    def checks(self) -> Iterator[Callable[[], None]]:
        """Yield what refuses one wrong value each: first choices, then numbers."""
        fields = dataclasses.fields(self)
        yield from (partial(self._check_choice, item) for item in fields if "choices" in item.metadata)
        yield from (partial(self._check_number, item) for item in fields if "bounds" in item.metadata)

    def bounds_of(self, item: dataclasses.Field[Any]) -> Bounds:
        """Return the smallest and the largest value of a number."""
        bounds: Bounds = item.metadata["bounds"]
        return bounds

    def wrong(self, name: str, wanted: str) -> ConfigError:
        """Return the error for a value, with what it must be."""
        return ConfigError(f"{self.section}.{name} is {getattr(self, name)!r}: it must be {wanted}")

    def _check_choice(self, item: dataclasses.Field[Any]) -> None:
        value, choices = getattr(self, item.name), item.metadata["choices"]
        if value not in choices:
            raise ConfigError(f"{self.section}.{item.name} is {shown(value)}: choose one of {', '.join(choices)}")

    def _check_number(self, item: dataclasses.Field[Any]) -> None:
        value, (least, most) = getattr(self, item.name), self.bounds_of(item)
        if value is None or least <= value <= most:
            return
        if most < MAX:
            raise self.wrong(item.name, f"from {_bound(least)} to {_bound(most)}")
        if value > most and value != math.inf:
            raise self.wrong(item.name, f"at most {most}")
        raise self.wrong(item.name, f"a number of at least {least:g}")


def _bound(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


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
SHARED_CORES_VARIABLE = "HPCPACE_TRAIN_SHARED_CORES"
"""By this variable, it hands on whether ranks share cores on purpose."""
SUMMARY_VARIABLE = "HPCPACE_TRACE_SUMMARY"
"""By this variable, a batch job leaves out the summary at the end of a run: its report follows."""
METRICS_RANKS = ("first", "node")
COMPRESSIONS = ("none", "fp16", "bf16", "int8", "powersgd")


@dataclass(frozen=True, kw_only=True)
class TraceConfig(Section, section="trace"):
    """What is recorded, and how often it reaches the disk."""

    enabled: bool = True
    """Whether anything is recorded."""
    trace_dir: Path | None = None
    """Folder for traces while the job runs, such as a node-local disk; auto: the first usable disk of the node; they
    move into the run at the end."""
    flush_interval_s: float = number(1.0, 0.01)
    """Seconds between two flushes; a killed rank loses at most the rows since its last one."""
    max_rows: int = number(1_000_000, 100_000)
    """Rows kept in memory while the disk takes none; further rows are dropped and counted."""
    detail_steps: str = ""
    """Steps to record in detail, like 100:200 or 100:200,5000:5100; of all others only their times, and the counters.
    By default all."""
    detail: str = choice("full", DETAILS)
    """What is recorded of these steps: full, collectives (no phases), or steps (no collectives either)."""
    keep_last: int = number(0, 0)
    """Last steps to keep at least; those before them are dropped from the trace while the job runs. 0: all are kept."""
    switch_signal: str = choice("none", SWITCH_SIGNALS)
    """none, USR1 or USR2: the signal that switches detail off and on again, if the program does not handle it."""
    counters: bool = True
    """Whether network and host counters, and those of connections, are read once a second."""
    flows: int = number(64, 0, 1024)
    """TCP connections to other hosts that are recorded one by one, those with the most bytes; the others are summed up.
    0: nothing is recorded of connections."""
    compiled: bool = True
    """Whether the compiled layer observes collectives, where it was built; if false, the layer in Python does."""
    error_text: bool = True
    """Whether the message of an exception that ends a rank is recorded, without secrets, the files, functions and lines
    that it came through, and what the rank wrote to stderr last, if that is a file; if false, only its type's name."""
    snapshot: bool = True
    """Whether a session saves the audit's snapshot of each host and its ranks when it starts."""
    start_timeout_s: float = number(20.0, 0.1)
    """Seconds that a rank waits for the others to enter a session, and again for them to agree on its settings; after
    that, nothing is recorded."""
    copy_timeout_s: float = number(300.0, 1)
    """Seconds that copying a trace from trace_dir into the run may take at the end; then it stays where it is."""
    summary: bool = True
    """Whether rank 0 prints the head of the report on stderr when the job ends in order."""
    summary_timeout_s: float = number(10.0, 1, 600)
    """Seconds that this may take from the end of the recording on; rank 0 ends that much later at most."""

    def checks(self) -> Iterator[Callable[[], None]]:
        """Yield the checks of choices and bounds, and that of the ranges of steps."""
        yield from super().checks()
        yield self._check_steps

    def _check_steps(self) -> None:
        try:
            parse_steps(self.detail_steps)
        except ValueError as error:
            raise ConfigError(f"trace.detail_steps: {error}") from error


@dataclass(frozen=True, kw_only=True)
class HangConfig(Section, section="hang"):
    """When a step lasts too long, and what a session does then."""

    on_hang: str = choice("report", ON_HANG)
    """report: write what each rank does and where its threads are, and say so; stop: also end the job with exit code 4
    if nothing has moved after twice the time; off: do not watch."""
    factor: float = number(30.0, 2)
    """How many times the usual step (the median of recent ones) a step may last."""
    least_s: float = number(60.0, 1)
    """Seconds that any step may last, however short steps usually are."""
    first_step_s: float = number(120.0, 1)
    """Seconds that torch's process group and each of the first steps may take; stop waits ten times as long there, and
    in the first checkpoint or evaluation."""


@dataclass(frozen=True, kw_only=True)
class ClockConfig(Section, section="clock"):
    """How the clocks of the hosts are compared."""

    enabled: bool = True
    """Whether clocks are compared; without it, times of different hosts cannot be compared either."""
    interval_s: float = number(30.0, 0.1)
    """Seconds between two comparisons."""
    num_pings: int = number(20, 1)
    """Round trips per measurement; the shortest counts."""
    timeout_s: float = number(10.0, 0.1)
    """Seconds after which a comparison is given up; the job goes on."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section, section="metrics"):
    """What a job tells the centre of itself."""

    prometheus: str | None = None
    """File into which a rank writes metrics while the job runs, like /var/lib/node_exporter/hpcpace-{jobid}.prom;
    {jobid}, {step}, {node} and {rank} are replaced. By default none."""
    ranks: str = choice("first", METRICS_RANKS)
    """first or node: whether rank 0 alone writes metrics, or the first rank of each node."""
    interval_s: float = number(15.0, 1)
    """Seconds between two writes of the metrics."""
    job_comment: bool = False
    """Whether rank 0 adds a line on the run to the comment of the Slurm job at its end."""


@dataclass(frozen=True, kw_only=True)
class WorldConfig(Section, section="world"):
    """How ranks find and reach each other."""

    device: str = choice("auto", DEVICES)
    """auto, cpu or cuda; auto takes the GPU of the local rank if torch sees one, else the CPU."""
    backend: str = choice("auto", BACKENDS)
    """auto, gloo or nccl; auto takes nccl on GPUs and gloo on CPUs."""
    interface: str | None = None
    """Network interfaces of the collectives, separated by commas; by default those that all hosts share and that are
    fastest."""
    start_timeout_s: float = number(120.0, 1)
    """Seconds that ranks have to find and reach each other; those that hang in the start of MPI end by SIGALRM."""
    coordination: str = choice("auto", COORDINATIONS)
    """auto, mpi or torch: what connects the ranks at first and compares clocks; auto takes MPI where its library
    understands the launcher, and torch elsewhere."""
    rendezvous: str | None = None
    """HOST:PORT, HOST or :PORT where ranks without MPI meet; by default the first host of the Slurm step, and a port
    that follows from the ids of job and step."""
    timeout_s: float = number(600.0, 1)
    """Seconds after which a collective that has not completed ends the job."""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(Section, section="probe"):
    """A probe inside a job; docs/probe.md explains it."""

    when: str = choice("none", PROBE_TIMES)
    """none, start or end: whether a session probes the job's hosts before its first step, or after its last one. The
    variable HPCPACE_PROBE sets it, too."""
    time_s: float = number(10.0, 1, 3600)
    """Seconds that the probe measures."""
    timeout_s: float = number(5.0, 1, 600)
    """Seconds after which it gives up on a host that does not answer."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section, section="train"):
    """A reference workload."""

    model: str = choice("gpt2", MODELS)
    """gpt2 or resnet18; set by the command."""
    preset: str = choice("tiny", PRESETS)
    """Size of gpt2: tiny for laptops and tests, or the sizes of GPT-2 from small (124M parameters) to xl (1558M)."""
    mesh: str = ""
    """Layout of the ranks, like dp=2,pp=2,tp=1; by default all ranks are data-parallel replicas."""
    batch_size: int = number(8, 1)
    """Sequences or images per step, over all ranks."""
    microbatches: int = number(4, 1)
    """Number of pieces that the batch of a replica is cut into if there is a pipeline."""
    seq_len: int | None = number(None, 2)
    """Tokens per sequence; by default the context length of the preset."""
    dtype: str = choice("float32", DTYPES)
    """Type of the computation: float32 (fp32), bfloat16 (bf16) or float64 (fp64). With bfloat16, parameters, their
    gradients, the optimizer and the loss stay in float32."""
    steps: int = number(50, 1)
    """Number of steps to train."""
    warmup_steps: int | None = number(None, 0)
    """Number of first steps that are trained and recorded but left out of the report; by default 3, or all but one of
    fewer steps."""
    seed: int = number(0, 0, (1 << 63) - 1)
    """Seed of parameters and data; the same seed gives the same losses on every mesh."""
    learning_rate: float = number(3e-4, 0)
    """Step size of AdamW."""
    data: Path | None = None
    """Training data. gpt2: a text file or the folder of Wikitext, by default the sources of Python's standard library.
    resnet18: the folder of CIFAR-10's binary version, by default synthetic images."""
    vocabulary: Path | None = None
    """Folder with GPT-2's vocab.json and merges.txt; by default every byte of a text is a token."""
    eval_every: int = number(0, 0)
    """Steps between two evaluations on held-out data; 0: no evaluations."""
    eval_batches: int = number(8, 1)
    """Global batches per evaluation, the same ones each time; at most as many as the held-out data fill."""
    checkpoint_every: int = number(0, 0)
    """Steps between two checkpoints; 0: only when a signal stops the job."""
    resume: str = "auto"
    """auto resumes from the last checkpoint of the run directory, never starts anew, and a path (of a checkpoint or of
    another run) starts from there."""
    inject: tuple[str, ...] = ()
    """Faults to inject; see docs/cli.md."""
    shared_cores: bool = False
    """Whether ranks share cores on purpose, with each other or other programs: reports then look for other causes."""
    log_every: int = number(10, 1)
    """Steps between two progress lines if the output is not a terminal."""
    zero: int = 0
    """What is sharded across replicas (ZeRO): 0 nothing, 1 the optimizer state, 3 also gradients and parameters."""
    schedule: str = choice("1f1b", SCHEDULES)
    """Order of microbatches in a pipeline: 1f1b, gpipe or interleaved."""
    compress: str = choice("none", COMPRESSIONS)
    """Compression of gradients on their way between replicas: none, fp16, bf16, int8 or powersgd."""
    sync_every: int = number(1, 1)
    """Steps between two averages of the replicas' parameters (local SGD); 1: average gradients in every step."""
    bucket_mb: float | None = number(None, 0.001)
    """Size of DDP's gradient buckets in MiB; by default 1 for the first and 25 for the others."""
    overlap: bool = True
    """Whether gradients are sent while backward still runs; otherwise all at once at its end."""
    compile: bool = False
    """Whether torch.compile compiles blocks and head."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", SHORT_DTYPES.get(self.dtype, self.dtype))
        super().__post_init__()

    def checks(self) -> Iterator[Callable[[], None]]:
        """Yield the checks of choices and bounds, and those of sharding and warm-up."""
        yield from super().checks()
        yield self._check_zero
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
        return min(3, self.steps - 1) if self.warmup_steps is None else self.warmup_steps

    @property
    def has_one_bucket(self) -> bool:
        """Whether all gradients of a module go in one bucket.

        The hooks of int8 and PowerSGD send a second message from a gloo thread once the first has arrived. With several
        buckets, ranks would issue these messages in different orders, and the two threads of gloo would deadlock.
        """
        return not self.overlap or self.compress in ("int8", "powersgd")


POLICIES = ("observe", "published-window", "published-spread", "slack", "coschedule", "stagger", "auto")
NO_POLICY = "none"

# Fewer pairs cannot reach p < 0.05 in a sign test: 2 * 2^-6 = 0.03.
MIN_PAIRS = 6


@dataclass(frozen=True, kw_only=True)
class PaceSettings(Section, section="pace"):
    """How early ranks are held back, and how it is tried out."""

    policy: str = NO_POLICY
    """Rule that decides on delays; none: the job is not paced."""
    trial: bool = True
    """Whether the policy must show a gain in blocks with and without it; otherwise it is on from the start."""
    find_steps: int = number(10, 2, 1000)
    """Steps after the warm-up in which hpcpace searches for the pacing point."""
    window_steps: int = number(10, 2, 100)
    """Steps between two exchanges of the ranks' waits; each carries the values of all these steps."""
    block_steps: int = number(20, 10, 1000)
    """Steps per block of the trial; a multiple of window_steps."""
    dropped_steps: int = number(4, 0, 500)
    """Number of first steps of a block that do not count."""
    aa_pairs: int = number(6, 0, 1000)
    """Pairs of unpaced blocks before the trial; they must show no effect."""
    max_pairs: int = number(40, MIN_PAIRS, 1000)
    """Pairs of a paced and an unpaced block after which a trial ends."""
    level: float = number(0.05, 0.001, 0.2)
    """Probability of seeing an effect by chance, over all looks at the trial together."""
    least_gain: float = number(0.005, 0.0, 1.0)
    """Smallest gain of interest; a trial that has ruled it out ends."""
    share_low: float = number(0.5, 0.05, 0.95)
    """Share of its slack by which a rank is delayed at first."""
    share_high: float = number(0.8, 0.05, 0.95)
    """Share of its slack by which a rank is delayed at most."""
    max_delay_share: float = number(0.05, 0.001, 0.5)
    """Largest delay, as a share of the median step."""
    polling_delay_share: float = number(0.3, 0.0, 0.5)
    """Largest delay of slack where ranks poll on shared cores, if it is larger: a short sleep gains nothing there."""
    guard_us: float = number(200.0, 0.0, 1e6)
    """Part of the slack that is never used."""
    guard_overshoots: float = number(2.0, 0.0, 100.0)
    """Further part of the slack that is never used, in units of the 99th percentile of how much too long sleeps last; 0
    where ranks poll on shared cores."""
    engage_share: float = number(0.005, 0.0001, 0.5)
    """Delay at which pacing starts, as a share of the median step; it ends below half of that."""
    polling_engage_share: float = number(0.1, 0.0, 0.5)
    """Delay at which slack starts where ranks poll on shared cores, if it is larger: a shorter sleep gains nothing."""
    engage_steps: int = number(16, 1, 1000)
    """Number of steps for which the delay must have been that large."""
    published_steps: int = number(16, 4, 1000)
    """Number of past steps that the published rule uses."""
    published_variation: float = number(0.1, 0.0, 100.0)
    """Coefficient of variation of a rank's own waits above which published-window delays it."""
    published_spread: float = number(0.05, 0.0, 100.0)
    """Spread of the arrivals, as a share of the median step, above which published-spread delays ranks."""
    published_delay: float = number(0.8, 0.0, 2.0)
    """Share of its wait by which the published rule delays a rank; the paper does not state it."""
    gc_steps: int = number(0, 0, 100_000)
    """Steps between two garbage collections under coschedule; 0: as often as Python collected on its own."""
    stagger_slots: int = number(0, 0, 64)
    """Jobs that take turns on a link under stagger; 0: the ranks of this job take turns."""
    stagger_slot: int = number(0, 0, 63)
    """Turn of this job, from 0."""
    stagger_period_ms: float = number(0.0, 0.0, 1e6)
    """Time in which every job has one turn: the same in all jobs, and at least their longest step."""
    timeout_s: float = number(30.0, 1.0, 3600.0)
    """Seconds after which an exchange is given up, and pacing with it; the job goes on."""

    def checks(self) -> Iterator[Callable[[], None]]:
        """Yield the checks of bounds, and those of settings that depend on each other."""
        yield from super().checks()
        yield self._check_policy
        yield self._check_blocks
        yield self._check_stagger

    def _check_policy(self) -> None:
        if self.policy not in (NO_POLICY, *POLICIES):
            raise self.wrong("policy", f"one of none, {', '.join(POLICIES)}")

    def _check_blocks(self) -> None:
        if self.window_steps and self.block_steps % self.window_steps:
            raise self.wrong("block_steps", f"a multiple of window_steps, {self.window_steps}")
        if self.dropped_steps > self.block_steps // 2:
            raise self.wrong("dropped_steps", f"at most half of a block, {self.block_steps // 2}")
        if self.share_low > self.share_high:
            raise self.wrong("share_low", f"at most share_high, {self.share_high}")

    def _check_stagger(self) -> None:
        if self.stagger_slots and self.stagger_slot >= self.stagger_slots:
            raise self.wrong("stagger_slot", f"from 0 to {self.stagger_slots - 1}")
        if self.stagger_slots and self.stagger_period_ms <= 0:
            raise self.wrong("stagger_period_ms", "above 0 with slots")

    @property
    def is_on(self) -> bool:
        """Whether the job is paced."""
        return self.policy != NO_POLICY

    def where_polled(self) -> PaceSettings:
        """Return the same for ranks that poll on shared cores.

        There a sleep lasts too long because others compute on that core meanwhile, which is what it is for.
        """
        return replace(
            self,
            max_delay_share=max(self.max_delay_share, self.polling_delay_share),
            engage_share=max(self.engage_share, self.polling_engage_share),
            guard_overshoots=0.0,
        )

    @property
    def guard_ns(self) -> float:
        """The fixed part of the guard in nanoseconds."""
        return self.guard_us * NS_PER_US

    @property
    def stagger_period_ns(self) -> int:
        """The period of the jobs' turns in nanoseconds."""
        return round(self.stagger_period_ms * NS_PER_MS)


# Below this, Slurm's own messages time out; above it, the kernel's token bucket no longer limits anything.
_MIN_RATE_BPS, _MAX_RATE_BPS = 64_000, 400_000_000_000


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
    if not _MIN_RATE_BPS <= rate_bps <= _MAX_RATE_BPS:
        raise ConfigError(f"lab.{name} is {text}: it must be from 64kbit to 400gbit")


def _check_size(section: str, name: str, text: str) -> None:
    try:
        parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{section}.{name}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class LabConfig(Section, section="lab"):
    """A cluster that `hpcpace lab up` boots on this machine."""

    name: str = "lab"
    """Name of the lab; several can be up side by side on one machine."""
    hosts: int = number(4, 1, 250)
    """Number of hosts: n1, n2, ..."""
    leaves: int = number(2, 1, 250)
    """Number of leaf switches; each gets a block of consecutive hosts."""
    link: str = "1gbit"
    """Rate of each host's link to its leaf, in each direction."""
    uplink: str = "500mbit"
    """Rate of each leaf's link to the spine, in each direction."""
    mtu: int = number(1500, 576, 65535)
    """Largest packet of all links, in bytes."""
    cpus_per_host: int = number(4, 1, 1024)
    """CPUs that each host claims in Slurm, whatever the machine has."""
    cpu_quota: float | None = number(None, 0.05)
    """Cores' worth of processor time that each host gets at most; by default unlimited."""
    tmp_size: str = "256MiB"
    """Size of each host's own /tmp, in memory."""
    clock_step_s: int = number(1000, 0, 1_000_000)
    """Seconds by which the clock of n1 is ahead of the machine's; that of n2 is ahead by twice this, and so on."""
    share: tuple[str, ...] = ()
    """Folders below /tmp that all hosts see, too."""

    def checks(self) -> Iterator[Callable[[], None]]:
        """Yield the checks of name, bounds, rates and sizes."""
        yield partial(check_lab_name, self.name)
        yield from super().checks()
        yield partial(_check_rate, "link", self.link)
        yield partial(_check_rate, "uplink", self.uplink)
        yield partial(_check_size, "lab", "tmp_size", self.tmp_size)

    def bounds_of(self, field: dataclasses.Field[Any]) -> Bounds:
        """Return the bounds of a setting; there are at most as many leaves as hosts."""
        least, most = super().bounds_of(field)
        return (least, self.hosts) if field.name == "leaves" and least <= self.hosts <= most else (least, most)


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """How a report reads a run."""

    memory: str = "2GiB"
    """Memory for the tables of a run; beyond it, the largest files are left out and named."""
    topology: str = ""
    """File with the leaf switch of each host: topology.conf, topology.yaml, the output of `scontrol show topology`, or
    `host leaf spine` on each line; empty: what Slurm told the job."""
    shared_cores: bool | None = None
    """Whether ranks share cores on purpose: reports then look for other causes; by default what the run says."""

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
class DiagnosisConfig(Section, section="diagnosis"):
    """The thresholds above which a report says that something is wrong; docs/diagnosis.md explains each."""

    least_steps: int = number(20, 4)
    """Steps that a report needs; with fewer it cannot tell. Looking for stragglers always takes 20."""
    level: float = number(0.005, 1e-9)
    """Probability of blaming somebody by chance, over all ranks of a run together."""
    straggler_share: float = number(0.03, 1e-9)
    """Straggler: excess of the own work of a rank or node over the others of its role, relative to them."""
    imbalance_share: float = number(0.025, 1e-9)
    """Pipeline imbalance: excess of the own work of a stage over the other stages, relative to them."""
    jitter_share: float = number(0.06, 1e-9)
    """Synchronisation amplification: share of the step lost because each step waits for its slowest rank."""
    data_share: float = number(0.5, 1e-9)
    """Work varies with the data: what stages have in common of how the work of microbatches varies within a step."""
    contention_share: float = number(0.02, 1e-9)
    """Fabric contention: share of the time spent in transfers that took much longer than usual."""
    link_share: float = number(0.2, 1e-9)
    """Slow link, locality: excess of transfers over a link or across switches, relative to other transfers."""
    flow_share: float = number(0.3, 1e-9)
    """Slow link, by connections: excess of the time that connections take for their bytes, relative to others."""
    uplink_factor: float = number(3.0, 1e-9)
    """Slow uplinks: how many times as long connections between leaves may take by design as those within one."""
    foreign_share: float = number(0.1, 1e-9)
    """Foreign traffic: its least rate on a link, relative to that of a connection that is not slow."""
    repeat_share: float = number(0.002, 1e-9)
    """Lossy link: least share of segments that are sent again, and four times that of other connections."""
    communication_share: float = number(0.15, 1e-9)
    """Communication-bound: share of exposed transfer in the time without waits."""
    probed_share: float = number(0.8, 1e-9)
    """Communication-bound: share of the probed rate from which on transfers run at the link's own rate."""
    input_share: float = number(0.1, 1e-9)
    """Input-bound: share of the step spent waiting for data."""
    host_share: float = number(0.05, 1e-9)
    """Host-bound: share of the step in which devices wait for their hosts to issue work."""
    runtime_share: float = number(0.02, 1e-9)
    """Runtime and control plane: share of the time lost to recurring events or to garbage collection."""
    core_share: float = number(0.1, 1e-9)
    """Ranks share cores: share of the time for which a rank is ready to run and waits for a core."""
    hang_s: float = number(5.0, 1e-9)
    """Hang: seconds that an operation must last, and at least twenty usual steps."""

    def checks(self) -> Iterator[Callable[[], None]]:
        """Yield the checks of bounds, and that no share is above 1."""
        yield from super().checks()
        names = [item.name for item in dataclasses.fields(self) if item.name.endswith(("_share", "level"))]
        yield from (partial(_check_share, name, getattr(self, name)) for name in names)


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Thresholds from which the audit reports a problem, and what every node must have; listed in docs/audit.md."""

    ignore: tuple[str, ...] = ()
    """Rules that do not run."""
    dataloader_workers: int = 0
    """Data-loading processes per rank, each of which needs a CPU (A05)."""
    roce_mtu: int = 4200
    """Smallest MTU of an Ethernet interface that carries RDMA (N06)."""
    link_errors: int = 10
    """Link errors since boot above which a port is reported (N08)."""
    congestion_errors: int = 1000
    """Packets lost or retransmitted since boot above which a port is reported (N08)."""
    drop_share: float = 0.001
    """Share of dropped packets above which an interface is reported (N08)."""
    pcie_errors: int = 100
    """Corrected errors above which a PCIe link is reported (P04)."""
    slow_share: float = 0.5
    """Share of the fastest interface's speed below which a selected interface is slow (N03)."""
    least_locked: int = 1 << 30
    """Bytes of memory that a rank must at least be allowed to lock for RDMA (N04)."""
    least_shm: int = 1 << 30
    """Smallest size of /dev/shm in bytes (S06)."""
    least_open_files: int = 1024
    """Number of files that a rank must at least be allowed to open (S06)."""
    foreign_share: float = 0.1
    """Share of a node's CPUs used by others from which its load is reported (S07)."""
    stray_cpus: float = 0.2
    """CPUs that processes of others use, or a hypervisor takes, from which they are reported (S07, S08)."""
    available_share: float = 0.05
    """Share of memory that must be available (S09)."""
    swap_bytes_per_s: int = 1 << 20
    """Bytes per second to and from swap from which a node is reported (S09)."""
    clock_error_s: float = 0.1
    """Estimated error of a synchronised clock in seconds above which it is reported (S10)."""
    nodes_per_leaf: int = 0
    """Nodes per leaf switch, to compute the smallest number of leaves; 0 for unknown (H02)."""
    expect_gpus: int | None = None
    """Number of GPUs of each node (H01)."""
    expect_nics: int | None = None
    """Number of active RDMA ports of each node (H01)."""
    expect_mtu: int | None = None
    """MTU of every Ethernet interface that carries RDMA (N06)."""
    expect_rate_gbps: float | None = None
    """Rate of each active RDMA port in Gb/s (N05)."""
    expect_driver: str | None = None
    """Version of the NVIDIA driver (H01)."""
    expect_kernel: str | None = None
    """Kernel release (H01)."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (int, float)) and (value < 0 or not math.isfinite(value)):
                raise ConfigError(f"audit.{item.name} is {value}: it must be a number of at least 0")
        for name in ("drop_share", "slow_share", "foreign_share", "available_share"):
            if getattr(self, name) > 1:
                raise ConfigError(f"audit.{name} is {getattr(self, name)}: it must be at most 1")


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
