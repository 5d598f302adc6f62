"""One run of a scaling series: its size, its speed, and where its step went; from a trace or a line of a CSV file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.special import ndtri

from hpcpace.core.errors import UsageError
from hpcpace.core.text import NS_PER_S, plural
from hpcpace.metrics.phases import EXPOSED_TRANSFER, EXPOSED_WAIT, OWN_WORK
from hpcpace.runs.csv_form import CsvRun
from hpcpace.runs.measured import MeasuredRun
from hpcpace.runs.scaling.lasting import jitter_growth, least_work

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
        cv: coefficient of variation of the step time; None where unknown.
        busy, wait, transfer: shares of the step; None where unknown.
        parts_ns: by name of `PARTS`, adding up to the step; None where they are not known.
        unknown: why they are not.
        growth: A(k) without lasting differences, by number of units.
        least_work: share of the work that the fastest rank has, too.
        predictions: number of nodes, loss to waiting and the ends of its interval, as shares of the step.
        calls: operation, bytes of one, and how many there are in a step of a rank.
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
    means = {
        name: float(np.mean([parts.get(name, 0.0) for parts in found if parts is not None]))
        for name in {name for parts in found if parts is not None for name in parts}
    }
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
    work = [rank.work_ns for rank in run.ranks if rank.work_ns is not None]
    if len(work) < 2 or len(work) < len(run.ranks):
        return 0.0
    errors = [rank.work_ns * (rank.work_error or 0.0) for rank in run.ranks if rank.work_ns is not None]
    noise_ns = float(ndtri(1 - 1 / (len(work) + 1))) * float(np.mean(errors))
    return max(max(work) - float(np.mean(work)) - noise_ns, 0.0)
