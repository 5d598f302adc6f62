"""The runs of a scaling series: size, speed and parts of the step, from traces or CSV."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import UsageError, with_reasons
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, plural
from hpcpace.diagnosis.summary import Overlap
from hpcpace.metrics.growth import maximum_weights
from hpcpace.metrics.phases import EXPOSED_TRANSFER, EXPOSED_WAIT, OWN_WORK
from hpcpace.metrics.special import ndtri
from hpcpace.runs.load import CsvRun, Per, load_runs, read_csv
from hpcpace.runs.measured import MeasuredRun

FloatArray = NDArray[np.float64]


def jitter_growth(run: MeasuredRun) -> tuple[tuple[int, float], ...]:
    """Return A(k) without lasting differences, by number of units; as the run has it where work of ranks is not known.

    E[max of k] of the work has that of its means in it: a slow rank is the slowest of more units more often, which says
    nothing of single steps. What is left is waiting for whoever is late in a step.
    """
    work = _means(run)
    hosts = np.unique([rank.host for rank in run.ranks], return_inverse=True)[1]
    num_units = run.amplification[-1][0] if run.amplification else 0
    if work is None or num_units not in (len(work), int(hosts.max()) + 1):
        return run.amplification
    of_unit = work if num_units == len(work) else np.array([work[hosts == host].max() for host in range(num_units)])
    k = np.array([count for count, _ in run.amplification], np.int64)
    lasting = maximum_weights(num_units, k) @ np.sort(of_unit) / work.mean()
    points = zip(run.amplification, lasting.tolist(), strict=True)
    return tuple((count, value - of_k + 1) for (count, value), of_k in points)


def least_work(run: MeasuredRun) -> float:
    """Return the mean work of the fastest rank as a share of the mean of all; 1 where ranks' work is not known."""
    work = _means(run)
    return 1.0 if work is None else float(work.min() / work.mean())


def _means(run: MeasuredRun) -> FloatArray | None:
    """Return the mean work of each rank; None where it is not known of several ranks.

    Differences are made smaller by the share of their variance that is noise of the means (James & Stein 1961).
    """
    own = _own_work(run)
    if own is None or own[0].min() <= 0:
        return None
    work, errors = own
    variance, noise = float(np.var(work, ddof=1)), float(np.mean(errors**2))
    kept = np.sqrt(max(1 - noise / variance, 0.0)) if variance else 0.0
    return np.asarray(work.mean() + kept * (work - work.mean()))


def _own_work(run: MeasuredRun) -> tuple[FloatArray, FloatArray] | None:
    """Return the mean work of each rank and its standard error; None where it is not known of several ranks."""
    work = np.array([rank.work_ns for rank in run.ranks if rank.work_ns is not None], np.float64)
    if len(work) < 2 or len(work) < len(run.ranks):
        return None
    return work, work * np.array([rank.work_error or 0.0 for rank in run.ranks])


PARTS = ("work", "imbalance", "jitter", "transfer", "other")
"""What a step consists of: own work, mean over ranks; waiting for ranks that are slower in all steps; waiting for those
that are slower in single ones; exposed transfers; and the rest, such as checkpoints."""

_WORK, _WAIT, _TRANSFER = (
    frozenset(part.name.lower() for part in parts) for parts in (OWN_WORK, EXPOSED_WAIT, EXPOSED_TRANSFER)
)
# Of the work, these differ between sizes by nature: how much of it a step has.
_OF_SIZE = re.compile(r"(^|\.)(tokens|images|samples)_per_step$|(^|\.)(global_)?batch(_size)?$")
_PP_TP = re.compile(r"(pp|tp)=(\d+)")
# Settings that say where a run is kept, how long it runs or what is done to it, and not how it computes.
_NOT_OF_THE_WAY = re.compile(r"train\.(batch_size|inject|mesh|steps|resume|log_every|eval_every|checkpoint_every|seed)")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run.

    Attributes:
        name: as it is shown.
        path: where it was found.
        num_nodes, num_ranks: 0 where unknown.
        step_ns: mean step time; None where it is not known.
        error: relative standard error of its speed within the run; 0 where unknown.
        unusable: why it counts in no size; empty where it does.
        samples_per_s: throughput; None where it is not known.
        batch: samples of a step, over all ranks; 0 where unknown.
        unit: of the samples.
        is_rate_assumed: whether nothing says that the throughput is that of all ranks and not of one.
        cv: coefficient of variation of the step time; None where unknown.
        busy, wait, transfer: shares of the step; None where unknown.
        parts_ns: by name of `PARTS`, adding up to the step; None where they are not known.
        unknown: why they are not.
        growth: A(k) without lasting differences, by number of units.
        least_work: share of the work that the fastest rank has, too.
        predictions: number of nodes, loss to waiting and the ends of its interval, as shares of the step.
        calls: operation, bytes of one, and how many there are in a step of a rank.
        overlap: which transfers are hidden, by phase and kind; None where that is not known.
        same_work: what runs of all sizes have to agree in, by name.
        same_way: what repeats of one size have to agree in besides, but for the batch.
    """

    name: str
    path: str
    num_nodes: int
    num_ranks: int
    step_ns: float | None
    error: float = 0.0
    unusable: str = ""
    samples_per_s: float | None
    batch: float
    unit: str = "samples"
    is_rate_assumed: bool = False
    cv: float | None = None
    busy: float | None = None
    wait: float | None = None
    transfer: float | None = None
    parts_ns: Mapping[str, float] | None = None
    unknown: str = ""
    growth: tuple[tuple[int, float], ...] = ()
    least_work: float = 1.0
    predictions: tuple[tuple[int, float, float, float], ...] = ()
    calls: tuple[tuple[str, float, float], ...] = ()
    overlap: tuple[Overlap, ...] | None = None
    same_work: Mapping[str, str] = field(default_factory=dict)
    same_way: Mapping[str, str] = field(default_factory=dict)

    def with_batch(self, batch: float) -> Sample:
        """Return it with a batch, which makes its step time known by its throughput, or the other way round."""
        step_ns, rate = self.step_ns, self.samples_per_s
        if step_ns is None and rate is not None:
            step_ns = batch / rate * NS_PER_S
        elif rate is None and step_ns is not None:
            rate = batch / step_ns * NS_PER_S
        return replace(self, batch=batch, step_ns=step_ns, samples_per_s=rate)


def sample_of_run(run: MeasuredRun) -> Sample:
    """Return a run of hpcpace as a sample."""
    conditions = run.conditions
    work = {f"work.{name}": value for name, value in conditions.work.items() if not _OF_SIZE.search(name)}
    versions = {f"version of {name}": value for name, value in conditions.versions.items()}
    settings = {
        f"setting {name}": value
        for name, value in conditions.settings.items()
        if name.startswith("train.") and not _NOT_OF_THE_WAY.match(name)
    }
    shape = {name: size for name, size in _PP_TP.findall(run.mesh) if size != "1"}
    parts_ns, unknown = _parts(run)
    shares = run.shares or (None, None, None, None)
    return Sample(
        name=run.name,
        path=run.path,
        num_nodes=len(run.hosts),
        num_ranks=run.world_size,
        step_ns=run.mean_ns,
        error=_error(run),
        unusable=_why_unusable(run),
        samples_per_s=run.samples_per_s,
        batch=run.samples_per_step if run.samples_per_s is not None else 0.0,
        unit=run.samples_unit or "samples",
        cv=run.cv,
        busy=shares[0],
        wait=shares[1],
        transfer=shares[2],
        parts_ns=parts_ns,
        unknown=unknown,
        growth=jitter_growth(run),
        least_work=least_work(run),
        predictions=run.predictions,
        calls=tuple((one.op, one.size_bytes / one.num_calls, one.num_calls) for one in run.transfers if one.num_calls),
        overlap=run.overlap,
        same_work={
            "unit of samples": run.samples_unit,
            "type": conditions.dtype,
            "pipeline and tensor parallelism": ",".join(f"{name}={size}" for name, size in sorted(shape.items())),
            "emulation": run.emulation,
            **work,
            **versions,
        },
        same_way={"hosts": ",".join(sorted(run.hosts)), **settings},
    )


def sample_of_line(line: CsvRun, path: str) -> Sample:
    """Return a line of a CSV file as a sample.

    Raises:
        UsageError: it has no number of nodes.
    """
    num_nodes = len(line.nodes) or line.num_nodes
    if not num_nodes and not line.num_ranks:
        raise UsageError(
            f"{path}, line {line.line}: it has neither nodes nor ranks, so its size is not known: add them"
        )
    sample = Sample(
        name=line.run,
        path=f"{path}:{line.line}",
        num_nodes=num_nodes,
        num_ranks=line.num_ranks,
        step_ns=line.step_ns,
        samples_per_s=line.throughput,
        batch=0.0,
        is_rate_assumed=line.is_rate_assumed,
        unknown="a table has speeds alone",
        same_work={"job": line.job},
        same_way={"hosts": ",".join(sorted(line.nodes))},
    )
    return sample.with_batch(line.batch) if line.batch else sample


def _parts(run: MeasuredRun) -> tuple[Mapping[str, float] | None, str]:
    """Return the parts of a step, scaled to its mean time, or why they are not known."""
    found = [rank.parts_ns for rank in run.ranks]
    if not found or None in found:
        return None, f"{run.name} has no phases that show what takes time"
    if not run.are_waits_known:
        return None, f"{run.name} has operations without a counterpart, so that waits are not told from transfers"
    if any(name == "pp" and size != "1" for name, size in _PP_TP.findall(run.mesh)):
        return None, "waits in a pipeline are its bubble, which no law of jitter describes"
    known = [parts for parts in found if parts is not None]
    names = dict.fromkeys(name for parts in known for name in parts)
    means = {name: float(np.mean([parts.get(name, 0.0) for parts in known])) for name in names}
    total = sum(means.values())
    if total <= 0:
        return None, f"{run.name} has phases of no length"
    scale = run.mean_ns / total
    wait_ns, transfer_ns, work_ns = (
        scale * sum(value for name, value in means.items() if name in names) for names in (_WAIT, _TRANSFER, _WORK)
    )
    imbalance_ns = min(_imbalance(run) * scale, wait_ns)
    return {
        "work": work_ns,
        "imbalance": imbalance_ns,
        "jitter": wait_ns - imbalance_ns,
        "transfer": transfer_ns,
        "other": max(run.mean_ns - work_ns - wait_ns - transfer_ns, 0.0),
    }, ""


def _error(run: MeasuredRun) -> float:
    """Return the relative standard error of the mean step: older summaries say it as if steps were independent."""
    if run.log_mean_error is not None:
        return run.log_mean_error
    return (run.cv or 0.0) / math.sqrt(max(run.num_steps, 1))


def _why_unusable(run: MeasuredRun) -> str:
    if run.num_missing:
        return f"is of unknown size and speed: {run.num_missing} of {run.world_size} ranks have no trace"
    if run.log_p50_error is None:
        return f"has {plural(run.num_steps, 'step')} to use: 8 are needed to know how certain its speed is"
    return ""


def _imbalance(run: MeasuredRun) -> float:
    """Return by how much the slowest rank's mean work exceeds the mean of all, beyond what noise makes of it.

    Noise alone makes the largest of P means larger than their mean by about the normal quantile of 1 - 1 / (P + 1)
    standard errors.
    """
    own = _own_work(run)
    if own is None:
        return 0.0
    work, errors = own
    noise_ns = float(ndtri(1 - 1 / (len(work) + 1))) * float(np.mean(errors))
    return max(float(work.max()) - float(np.mean(work)) - noise_ns, 0.0)


def read_samples(
    paths: Sequence[Path],
    *,
    per: Per | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Sample], list[str]]:
    """Return the runs at some paths, and why others cannot be read, a sentence each.

    Args:
        paths: of runs, or of one CSV file.
        per: what the throughput of the CSV file is of, where the user says so.
        progress: called with the number of runs read and of all.

    Raises:
        UsageError: CSV files and runs are mixed, several CSV files are named, or no run can be read.
    """
    tables = [path for path in paths if path.suffix.lower() == ".csv"]
    if tables and len(paths) > 1:
        raise UsageError(f"{tables[0]} is a CSV file: name it alone, its speeds were measured in another way")
    if tables:
        return [sample_of_line(line, str(tables[0])) for line in read_csv(tables[0], per=per)], []
    if per is not None:
        raise UsageError("--throughput says what a column of a CSV file is of: runs know it")
    loaded = load_runs(paths, progress=progress)
    problems = [run.message for run in loaded if run.message]
    samples = [sample_of_run(run.measured) for run in loaded if run.measured is not None]
    if not samples:
        raise UsageError(with_reasons("no run can be read", problems))
    return samples, problems
