"""One run as comparing, scaling and history use it: its figures and its conditions.

The figures are read from RUN/summary.json where that is of this version's schema and of the trace files as they are
now: their names and sizes are compared with those that the report had read. Otherwise the run is analysed. Where the
traces were removed, the summary counts. The conditions, such as work, settings and software, come from run.json.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from itertools import islice
from typing import Any

from hpcpace.core.codec import as_count, as_number, as_text, read_json
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.core.text import NS_PER_S, format_bytes, plural
from hpcpace.diagnosis.run_state import journals_of
from hpcpace.diagnosis.summary import SCHEMA, Overlap

DAY_NS = 86_400 * NS_PER_S


def is_to_come(unix_ns: int) -> bool:
    """Return whether a time is later than a day from now, which clocks of different places do not explain."""
    return unix_ns > time.time_ns() + DAY_NS


_MAX_TEXT = 200
_MAX_VALUES = 2000
# New in every run, or said elsewhere.
_VARIABLES_OF_A_RUN = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_JOB_NAME")
_OPTIONS_OF_A_RUN = ("--run-dir", "--trace-dir")
_NOT_OF_THE_WORK = ("dtype",)  # the same work, done in another precision


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a run was started with; empty where it is not recorded.

    Attributes:
        name: of the run.
        job_name: of its Slurm job, else that of the run.
        begun_unix_ns: when it began; 0 where unknown.
        work: what was trained on what, by name: other work cannot be compared.
        settings: hpcpace's own, by name.
        versions: of the software, the kernel included.
        environment: the variables that run.json keeps.
        command: that started a rank, without the options that say where the run is written.
        commit: of the working directory.
        dtype: in which the training computed.
        tool: that recorded the run, where it is not hpcpace.
    """

    name: str = ""
    job_name: str = ""
    begun_unix_ns: int = 0
    work: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    commit: str = ""
    dtype: str = ""
    tool: str = ""


def read_conditions(attempt: Attempt, problems: list[str]) -> Conditions:
    """Return what run.json says; a sentence is added to `problems` where it, or its date, cannot be used."""
    found = read_json(attempt, attempt.run_json.name, _conditions, problems) or Conditions()
    if not is_to_come(found.begun_unix_ns):
        return found
    problems.append(f"{attempt.run_json}: the date at which it began is to come, and is left out: its clock was wrong")
    return replace(found, begun_unix_ns=0)


def _conditions(content: Any) -> Conditions:
    model, data = content.get("model"), content.get("data")
    environment = dict(_flat(content.get("environment", {})))
    work = {name: value for name, value in _flat({"model": model, "data": data}) if value}
    name, kernel, imported = _text(content.get("name", "")), _text(content.get("kernel", "")), content.get("imported")
    return Conditions(
        name=name,
        job_name=environment.get("SLURM_JOB_NAME", "") or name,
        begun_unix_ns=_unix_ns(content.get("created_unix_ns", 0)),
        work={key: value for key, value in work.items() if key.rpartition(".")[2] not in _NOT_OF_THE_WORK},
        settings=dict(_flat(content.get("config", {}))),
        # Those of an imported run are of where it was imported.
        versions={} if imported else {**dict(_flat(content.get("versions", {}))), "kernel": kernel},
        environment={key: value for key, value in environment.items() if key not in _VARIABLES_OF_A_RUN},
        command=" ".join(without_folders([_text(word) for word in content.get("command", [])])),
        commit=_text(content.get("git_commit", "")),
        dtype=work.get("model.dtype", ""),
        tool=_text(imported.get("tool", "")) if isinstance(imported, dict) else "",
    )


def without_folders(words: Iterable[str]) -> Iterator[str]:
    """Yield the words of a command but for `_OPTIONS_OF_A_RUN` and their values."""
    rest = iter(words)
    for word in rest:
        option, is_joined, _ = word.partition("=")
        if option not in _OPTIONS_OF_A_RUN:
            yield word
        elif not is_joined:
            next(rest, None)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the first single values as text, each with its path."""
    yield from islice(_values(value, path), _MAX_VALUES)


def _values(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _values(item, f"{path}.{key}" if path else str(key))
    else:
        yield path[:_MAX_TEXT], "" if value is None else _text(value)


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else str(value))[:_MAX_TEXT]


def _unix_ns(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


_MAX_BYTES = 1 << 28  # of the summary of 16,384 ranks
_MIN_TIME = 1.0  # ns, of a step
_MIN_POSITIVE = 5e-324  # the smallest number above 0
_MIN_SAMPLES = 1e-9  # one in all steps is more
_MAX_ERROR = 10.0  # relative; that of a mean of n values is at most the root of n, and real ones are below 1


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """One rank's mean step.

    Attributes:
        host: where it ran.
        role: pipeline stage and tensor slot, such as `pp0 tp0`.
        parts_ns: by name of `Part` in lower case, adding up to its step; None where they are not known. Waits that are
            not known are in the transfers.
        work_ns, work_error: its own work per step, and the relative standard error of that; None where not known.
        caused_wait_ns: exposed wait of all ranks that began at this one, mean over ranks.
    """

    rank: int
    host: str
    role: str
    parts_ns: Mapping[str, float] | None
    work_ns: float | None
    work_error: float | None
    caused_wait_ns: float


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """All transfers of one kind of operation over groups of one size, exposed or hidden, mean per rank and step.

    Attributes:
        num_calls: how many there are; 0 where unknown.
    """

    op: str
    group_size: int
    transfer_ns: float
    size_bytes: float
    num_calls: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One run as others are compared with it; times are nanoseconds, of the used steps.

    Attributes:
        path: its folder.
        attempt: the attempt that the figures are of.
        is_from_summary: whether summary.json was taken, and not its traces.
        is_final: whether all its traces were closed.
        p50_ns, mean_ns: median and mean step time.
        log_p50_error: standard error of ln(p50_ns) within the run; None for fewer than 8 steps.
        log_mean_error: the same of ln(mean_ns); None also where the summary that it comes from does not say.
        block_p50_ns: medians of up to 20 blocks of consecutive steps.
        cv: coefficient of variation of the step time; None for a single step.
        samples_per_s: throughput; None where no samples were credited, or ranks are missing: theirs are not known.
        samples_per_step, samples_unit: the global batch; 0 where unknown, and likewise.
        num_steps: steps used.
        world_size: ranks of the job; 0 where unknown.
        num_missing: ranks without a readable trace.
        hosts: in order of their ranks.
        mesh: such as `dp=4,pp=2,tp=1`; empty where unknown.
        ranks: ascending.
        transfers: by kind of operation.
        shares: busy, exposed wait, transfer and other of the step; None where not known.
        amplification: A(k) by number of units k; empty where not known.
        audit: warnings and failures of the audit, in short; None without snapshots.
        mode: of the verdict.
        emulation: in what way computation was not real; empty where it was.
        conditions: what the run was started with.
        predictions: number of nodes, and the loss to waiting there with the ends of its interval, as shares of the
            present step time; empty where not predicted.
        probed: what operations take by the probe of the hosts, by name; empty without one.
        num_nodes: of the job; 0 where unknown.
        overlap: which transfers are hidden, by phase and kind; None where that is not known.
        is_per_sample: whether its step is the time of one sample, because only its throughput is known, and no batch.
    """

    path: str
    attempt: int = 0
    is_from_summary: bool = True
    is_final: bool = True
    p50_ns: float
    mean_ns: float
    log_p50_error: float | None
    log_mean_error: float | None = None
    block_p50_ns: tuple[float, ...] = ()
    cv: float | None = None
    samples_per_s: float | None
    samples_per_step: float
    samples_unit: str
    num_steps: int = 0
    world_size: int
    num_missing: int = 0
    hosts: tuple[str, ...]
    mesh: str = ""
    ranks: tuple[RankTimes, ...] = ()
    transfers: tuple[Transfers, ...] = ()
    shares: tuple[float, float, float, float] | None = None
    amplification: tuple[tuple[int, float], ...] = ()
    audit: tuple[str, ...] | None = None
    mode: str = ""
    emulation: str = ""
    conditions: Conditions = field(default_factory=Conditions)
    predictions: tuple[tuple[int, float, float, float], ...] = ()
    probed: Mapping[str, float] = field(default_factory=dict)
    num_nodes: int = 0
    overlap: tuple[Overlap, ...] | None = None
    is_per_sample: bool = False

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.rstrip("/").rpartition("/")[2] or self.path

    @property
    def are_waits_known(self) -> bool:
        """Whether waits are separated from transfers on all ranks: where they are not, their parts lack them."""
        return not self.num_missing and all("wait" in (rank.parts_ns or {}) for rank in self.ranks)

    @property
    def identity(self) -> str:
        """What no other run has but copies of it, packed or not; empty where it does not say when it began."""
        if not self.conditions.begun_unix_ns:
            return ""
        values = (
            *(self.conditions.begun_unix_ns, self.conditions.name, self.attempt, self.world_size),
            *(self.num_steps, self.p50_ns, self.mean_ns, self.hosts),
        )
        return hashlib.sha256(repr(values).encode("utf-8", "backslashreplace")).hexdigest()[:16]

    def scaled(self, factor: float) -> MeasuredRun:
        """Return it with all its times multiplied, as for a step with another number of samples."""

        def times(values: Mapping[str, float] | None) -> Mapping[str, float] | None:
            return None if values is None else {name: value * factor for name, value in values.items()}

        ranks = [
            replace(
                rank,
                parts_ns=times(rank.parts_ns),
                work_ns=None if rank.work_ns is None else rank.work_ns * factor,
                caused_wait_ns=rank.caused_wait_ns * factor,
            )
            for rank in self.ranks
        ]
        return replace(
            self,
            p50_ns=self.p50_ns * factor,
            mean_ns=self.mean_ns * factor,
            block_p50_ns=tuple(value * factor for value in self.block_p50_ns),
            ranks=tuple(ranks),
            transfers=tuple(replace(kind, transfer_ns=kind.transfer_ns * factor) for kind in self.transfers),
        )


def from_summary(
    content: Any, run: RunDirectory, conditions: Conditions, *, is_from_summary: bool = True
) -> MeasuredRun:
    """Return a run from the content of a summary, which may be foreign.

    Raises:
        ValueError, TypeError, KeyError: it is no summary, or one without what a comparison needs.
    """
    if content["schema"] != SCHEMA or content.get("comparable") is None:
        raise ValueError("it is of another version")
    speed, world, steps, extra = content["throughput"], content["world"], content["steps"], content["comparable"]
    shares = [as_number(content["shares"][name]) for name in ("busy", "exposed_wait", "transfer", "other")]
    jitter, audit = content["jitter"], content["audit"]
    num_ranks, num_missing, batch = len(content["ranks"]), len(world["missing"]), extra["samples_per_step"]
    return MeasuredRun(
        path=str(run.path),
        attempt=as_count(content["attempt"]),
        is_from_summary=is_from_summary,
        is_final=not content["cut_off"]["not_closed"],
        p50_ns=_known(speed["p50_ns"], _MIN_TIME),
        mean_ns=_known(speed["mean_ns"], _MIN_TIME),
        log_p50_error=as_number(extra["log_p50_error"], 0, _MAX_ERROR),
        log_mean_error=as_number(extra.get("log_mean_error"), 0, _MAX_ERROR),
        block_p50_ns=tuple(_known(value, _MIN_TIME) for value in extra["block_p50_ns"]),
        cv=as_number(speed["cv"]),
        samples_per_s=_known(speed["samples_per_s"]) if not num_missing and speed["samples_per_s"] else None,
        samples_per_step=_known(batch, _MIN_SAMPLES) if batch and not num_missing else 0.0,
        samples_unit=as_text(world["samples_unit"]),
        num_steps=as_count(steps["num_used"]),
        world_size=as_count(world["world_size"]),
        num_missing=num_missing,
        hosts=tuple(as_text(host) for host in world["hosts"]),
        mesh=as_text(world["mesh"]),
        ranks=_ranks(content["ranks"], extra["ranks"]),
        transfers=_transfers(content["kinds"], num_ranks * as_count(steps["num_used"])),
        shares=None if None in shares else (shares[0] or 0.0, shares[1] or 0.0, shares[2] or 0.0, shares[3] or 0.0),
        amplification=_amplification(jitter),
        audit=None if audit is None else tuple(as_text(finding) for finding in audit.get("found", ())),
        mode=as_text(content["verdict"]["mode"]),
        emulation=as_text(world["emulation"]),
        conditions=conditions,
        predictions=_predictions(jitter),
        probed=_probed(content.get("probe")),
        num_nodes=len(set(world["hosts"])),
        overlap=_overlap(extra.get("overlap")),
    )


def stored_run(run: RunDirectory, attempt: Attempt, problems: list[str]) -> MeasuredRun | None:
    """Return what RUN/summary.json says of an attempt; None where there is none of the traces as they are now.

    Args:
        run: the run.
        attempt: its attempt.
        problems: takes why a summary cannot be used, if it is damaged.
    """

    def made_of(content: Any) -> MeasuredRun | None:
        if not _is_fresh(content, attempt):
            return None
        return from_summary(content, run, read_conditions(attempt, problems))

    return read_json(run, run.summary_json.name, made_of, problems, most_bytes=_MAX_BYTES)


def _is_fresh(content: Mapping[str, Any], attempt: Attempt) -> bool:
    """Return whether a summary is of all steps of an attempt, by this schema, and of its files as they are now."""
    try:
        if content["schema"] != SCHEMA or content["attempt"] != attempt.number or not content["comparable"]["is_all"]:
            return False
        now = attempt.trace_digest()
        if now and not {"log_mean_error", "overlap"} <= content["comparable"].keys():
            return False
        return not now or (content["tracing"]["files"] == now and not journals_of(attempt))
    except (KeyError, TypeError):
        return False


def _ranks(rows: Any, extra: Any) -> tuple[RankTimes, ...]:
    compared = {as_count(row["rank"]): row for row in extra}
    return tuple(
        RankTimes(
            rank=(rank := as_count(row["rank"])),
            host=as_text(row["host"]),
            role=as_text(row["role"]),
            parts_ns=None
            if row["parts_ns"] is None
            else {
                as_text(name): as_number(value) or 0.0 for name, value in row["parts_ns"].items() if value is not None
            },
            work_ns=as_number(compared[rank]["work_ns"]),
            work_error=as_number(compared[rank]["work_error"], 0, _MAX_ERROR),
            caused_wait_ns=as_number(compared[rank]["caused_wait_ns"]) or 0.0,
        )
        for row in rows
    )


def _transfers(kinds: Any, num_rank_steps: int) -> tuple[Transfers, ...]:
    return tuple(
        Transfers(
            op=as_text(kind["op"]),
            group_size=as_count(kind["group_size"]),
            transfer_ns=(as_number(kind["mean_transfer_ns"]) or 0.0)
            * as_count(kind["num_rows"])
            / max(num_rank_steps, 1),
            size_bytes=as_count(kind["size_bytes"]) / max(num_rank_steps, 1),
            num_calls=as_count(kind["num_rows"]) / max(num_rank_steps, 1),
        )
        for kind in kinds
    )


def _overlap(rows: Any) -> tuple[Overlap, ...] | None:
    if rows is None:
        return None
    return tuple(
        Overlap(
            phase=as_text(row["phase"]),
            op=as_text(row["op"]),
            is_across=row["is_across"] is True,
            transfer_ns=as_number(row["transfer_ns"], 0) or 0.0,
            exposed_ns=as_number(row["exposed_ns"], 0) or 0.0,
            window_ns=as_number(row["window_ns"], 0) or 0.0,
        )
        for row in rows
    )


def _amplification(jitter: Any) -> tuple[tuple[int, float], ...]:
    growth = None if jitter is None else jitter["growth"]
    if growth is None:
        return ()
    return tuple((as_count(k), _known(value)) for k, value in zip(growth["k"], growth["amplification"], strict=True))


def _predictions(jitter: Any) -> tuple[tuple[int, float, float, float], ...]:
    points = () if jitter is None or jitter["predictions"] is None else jitter["predictions"]["points"]
    found = []
    for point in points:
        loss, low, high = (as_number(value) or 0.0 for value in (point["loss_share"], *point["interval"]))
        found.append((as_count(point["num_nodes"]), loss, low, high))
    return tuple(found)


def _probed(probe: Any) -> dict[str, float]:
    found = {}
    for row in () if probe is None else probe["rows"]:
        ranks, hosts = plural(as_count(row["num_ranks"]), "rank"), plural(as_count(row["num_nodes"]), "host")
        name = f"{as_text(row['op'])} of {format_bytes(as_count(row['size_bytes']))} over {ranks} on {hosts}"
        found[name] = _known(row["probed_ns"])
    return found


def _known(value: Any, lowest: float = _MIN_POSITIVE) -> float:
    number = as_number(value, lowest)
    if number is None:
        raise ValueError("a number is missing")
    return number
