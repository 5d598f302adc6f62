"""The page of the studies in the lab, and the scaling study, which is a section of it.

That study runs in a lab of four hosts, each failure mode injected once. Ranks sleep for their computation: a machine
with fewer cores than ranks would otherwise disturb more than what is injected. What is to be found is only in the plan,
which the reports do not read.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from analysis.library.figures import SetupFigures, straight_line
from analysis.library.published import (
    BATCH,
    PublishedRow,
    compute_spread,
    expected_tensor_bytes,
    image_facts,
    orders,
    published_of,
    published_volume_gbyte,
    verdict,
)
from experiments.pages import listed, page
from experiments.studies.lab_set_up import REPOSITORY, SetUp
from hpcpace.core.errors import HpcpaceError
from hpcpace.core.text import format_bytes, format_count, format_rate
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig
from hpcpace.studies.jobs import FAULTS, HEALTHY, ScalingFolder, ScalingResult, ScalingRun, results
from hpcpace.studies.setups import StudyFolder, planned

PAGE, TITLE, SCALING = "studies-lab", "# The studies in the lab", "The scaling study"
"""Name and title of the page, and the heading of the section that --scaling writes."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """When the runs began and ended, in seconds since 1970, and what those of each study took, without stops."""

    begin_s: float
    end_s: float
    busy_s: Mapping[str, float]

    def dates(self) -> str:
        """Return the day, or the first and the last one, in UTC."""
        days = [time.strftime("%Y-%m-%d", time.gmtime(second)) for second in (self.begin_s, self.end_s)]
        return " to ".join(dict.fromkeys(days))


def draw_plots(studies: Mapping[str, StudyFolder], folder: Path) -> None:
    """Write the plots, and the CSV of all figures, of each study into a folder, by the scripts of analysis/."""
    with TemporaryDirectory() as out:
        for name, study in studies.items():
            script = REPOSITORY / "analysis" / f"{name.replace('-', '_')}.py"
            subprocess.run([sys.executable, script, study.path, "--out", out], check=True, stdout=subprocess.DEVNULL)
        folder.mkdir(exist_ok=True)
        for path in Path(out).iterdir():
            if path.suffix in (".csv", ".svg"):
                shutil.copyfile(path, folder / path.name)


def values_of(
    figures: Mapping[str, Sequence[SetupFigures]], found: SetUp, *, published: Sequence[PublishedRow], when: Measured
) -> dict[str, Any]:
    """Return what the document has, but for the section of the scaling study.

    Args:
        figures: of the nano-cluster and the model-size study.
        found: the lab's link and how it was computed.
        published: the published table.
        when: they were measured.
    """
    rows, sizes = figures["nano-cluster"], figures["model-size"]
    took = " and ".join(
        f"{sum(len(row.runs) for row in some)} runs of the {name} study in {when.busy_s[name] / 60:.0f} minutes"
        for name, some in figures.items()
    )
    by_setup = {(row.layout, row.parallelism): row for row in published}
    return {
        "dates": when.dates(),
        "took": took,
        "set_up": "\n".join(found.lines()),
        "batch": BATCH,
        "beside": [(row, theirs) for row in rows if (theirs := published_of(row, by_setup)) is not None],
        "orders": listed([*orders(rows, published), *compute_spread(rows)]),
        "verdict": verdict,
        "images": image_facts([row for row in rows if row.setup.model == "resnet18"]),
        "repetitions": max((len(row.runs) for row in rows), default=0),
        "models": [[row for row in rows if row.setup.model == model] for model in ("gpt2", "resnet18")],
        "sizes": [row for row in sizes if row.setup.parallelism == "pipeline"],
        "alone": {row.setup.preset: row for row in sizes if row.setup.parallelism == "none"},
        "expected_memory": lambda row: format_bytes(expected_tensor_bytes(row.setup)),
        "growth": listed(growth(sizes)),
        "shown": shown,
        "ratio": lambda one, other: f"{one / other:.2f}" if one and other else "",
        "rate": lambda value: format_rate(value) if value else "",
        "count": format_count,
        "shape": lambda row: planned(row.setup).shape,
        "published_volume": published_volume_gbyte,
    }


_FORMS: Mapping[str, Callable[[float], str]] = {
    "samples_per_s": format_count,
    "scaling_factor": lambda value: f"{value:.3f}",
    "network_bps": format_rate,
    "network_bytes_per_sample": format_bytes,
    "peak_memory_bytes": format_bytes,
    "tensor_memory_bytes": format_bytes,
    "forward_ms": lambda value: f"{value:.3g} ms",
}


def shown(row: SetupFigures, name: str) -> str:
    """Return a figure of a set-up: its median, and least to most over repetitions."""
    found, form = row.spreads[name], _FORMS[name]
    if found is None:
        return ""
    return form(found.median) if found.num == 1 else f"{form(found.median)} ({form(found.low)} to {form(found.high)})"


def growth(rows: Sequence[SetupFigures]) -> Iterator[str]:
    """Yield how straight time and volume grow over layers."""
    pipelines = [row for row in rows if row.setup.parallelism == "pipeline"]
    for what, name, of in (
        ("time a token", "samples_per_s", lambda value: 1 / value),
        ("volume a token", "network_bytes_per_sample", float),
    ):
        points = [
            (float(getattr(planned(row.setup).shape, "num_layers", 0)), of(value))
            for row in pipelines
            if (value := row.median(name)) is not None
        ]
        line = straight_line([x for x, _ in points], [y for _, y in points])
        if line is not None:
            yield f"{what} over layers: a straight line explains {100 * line.r_squared:.1f} % of the variance"


_SCRIPT = REPOSITORY / "sbatch" / "scaling_study.sh"
_NODES, _RANKS_PER_NODE, _LINK, _UPLINK = "1,4", "1", "1gbit", "2gbit"
_SWEEP = ("--nodes", _NODES, "--ranks-per-node", _RANKS_PER_NODE, "--oversubscriptions", "1,4")
# A short sequence: what ranks compute in addition to their sleep shares the machine's cores.
_TRAINING = ("--seq-len", "32")


def run_scaling(path: Path, *, lab_name: str, steps: int, timeout_s: float) -> list[ScalingResult]:
    """Do the open runs of the study, with a progress line, and return what all reports say.

    Args:
        path: folder of the study, not below /tmp.
        lab_name: of the lab that is booted where runs are open.
        steps: of each run.
        timeout_s: that all runs may take.

    Raises:
        HpcpaceError: runs are left.
    """
    study = ScalingFolder(path)
    if not study.plan_json.exists() or study.open_runs():
        options = [*_SWEEP, "--steps", str(steps), "--emulate", "--faults", "--", *_TRAINING]
        path.mkdir(parents=True, exist_ok=True)
        with Lab.up(LabConfig(name=lab_name, link=_LINK, uplink=_UPLINK)) as lab:
            subprocess.run(
                lab.command(["bash", _SCRIPT, path, *options], folder=path),
                # The audit that each job begins with is no part of the study.
                env={**lab.environ(), "HPCPACE_WORLD_START_TIMEOUT_S": "30", "HPCPACE_AUDIT": "off"},
                stdin=subprocess.DEVNULL,
                timeout=timeout_s,
                check=False,
            )
    left = study.open_runs()
    if left:
        raise HpcpaceError(f"{len(left)} runs of {path} are left, the first is {left[0].name}: see {path}/*.out")
    return results(study)


def section(path: Path, found: Sequence[ScalingResult]) -> str:
    """Return the section of the document, with the days on which the runs were made.

    Args:
        path: folder of the study.
        found: what the reports say.
    """
    study = ScalingFolder(path)
    times_s = [study.run_dir(one.run).summary_json.stat().st_mtime for one in found]
    injected = [one.run for one in found if one.run.fault != HEALTHY]
    return page(
        "studies-scaling",
        days=Measured(begin_s=min(times_s), end_s=max(times_s), busy_s={}).dates(),
        found=found,
        links=(_LINK, _UPLINK),
        num_injected=len(injected),
        num_right=sum(one.is_found is True for one in found if one.run.fault != HEALTHY),
        num_new=sum(bool(right_modes(study, run) - modes_without_fault(study, run)) for run in injected),
        healthy=HEALTHY,
        count=format_count,
        right=lambda run: _found(study, run),
    ).strip()


def modes_of(study: ScalingFolder, run: ScalingRun) -> set[str]:
    """Return all modes that the report of a run has found."""
    verdict = (study.summary(run) or {"verdict": {"mode": "", "findings": []}})["verdict"]
    return {verdict["mode"], *(finding["mode"] for finding in verdict["findings"])}


def right_modes(study: ScalingFolder, run: ScalingRun) -> set[str]:
    """Return those that are right for what was injected into a run."""
    return modes_of(study, run) & set(FAULTS.get(run.fault, ()))


def modes_without_fault(study: ScalingFolder, run: ScalingRun) -> set[str]:
    """Return the modes found in the run that is the same but for the fault."""
    return modes_of(study, dataclasses.replace(run, fault=HEALTHY))


def _found(study: ScalingFolder, run: ScalingRun) -> str:
    before = modes_without_fault(study, run)
    words = [mode + (" (also without the fault)" if mode in before else "") for mode in sorted(right_modes(study, run))]
    return ", ".join(words) or "none"
