"""The lab that represents the published nano-cluster: two hosts on a slow link, and computation of a fixed time.

The machine has fewer cores than the lab has ranks, so computation is emulated: it takes as long as gives each model the
ratio of communication to computation of its published set-up. Tensors, gradients and messages are those of the model.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.library.published import (
    BATCH,
    IMAGE_BATCH,
    Balance,
    PublishedRow,
    image_balance,
    link_bytes_per_step,
    link_rate_bps,
    predicted_step_s,
    published_balance,
    tokens_per_s_of_one,
)
from experiments.labs import heavy_lab
from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig
from hpcpace.studies.setups import NanoCluster, Setup, StudyFolder, parse_layout, planned

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "sbatch" / "nano_cluster.sh"
HOSTS, RANKS_PER_HOST = 2, 2
SHRINK, IMAGE_SHRINK, IMAGE_BATCH_DIVISOR = 16, 8, 8
TEXT_DTYPE, IMAGE_DTYPE = "bfloat16", "float32"
"""Of the computation: the published GPT-2 sends activations in 2 bytes, and gradients in 4."""
_MIN_STEPS, _MAX_STEPS, _LONG_STEP_S = 5, 20, 3.5


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The published set-up of a model, and that of the lab which has its ratio."""

    name: str
    unit: str
    published: Balance
    lab: Balance

    def lines(self) -> list[str]:
        """Return the formula with its numbers."""
        theirs, ours = self.published, self.lab
        return [
            f"{self.name}, {self.unit}/s of one rank at the same ratio 8 v n R1 / L",
            f"  published: 8 x {theirs.link_bytes_per_sample:,.0f} B x {theirs.num_ranks} x "
            f"{theirs.samples_per_s_of_one:,.0f} / {theirs.link_bps / 1e6:,.0f} Mb/s = {theirs.ratio:.2f}",
            f"  lab:       8 x {ours.link_bytes_per_sample:,.0f} B x {ours.num_ranks} x "
            f"{ours.samples_per_s_of_one:,.0f} / {ours.link_bps / 1e6:.2f} Mb/s = {ours.ratio:.2f}",
        ]


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """What is decided before the study: the link, and how long the computation of each model takes.

    Attributes:
        link_bps: rate of the hosts' links, in one direction.
        compute_ms: forward and backward of a sequence or image, by model.
        calibrations: how they follow from the published set-ups, by model.
    """

    link_bps: float
    compute_ms: Mapping[str, float]
    calibrations: Mapping[str, Calibration]

    def facts(self) -> dict[str, object]:
        """Return what the plan of the study keeps, so that a study that goes on has the same link."""
        return {"link_bps": self.link_bps, "compute_ms": dict(self.compute_ms)}

    def lines(self) -> list[str]:
        """Return the formula of each model with its numbers."""
        return [line for calibration in self.calibrations.values() for line in calibration.lines()]

    def emulated(self, setup: Setup) -> Setup:
        """Return a set-up with the time that its computation takes, which goes with the parameters of its size."""
        dtype = TEXT_DTYPE if setup.model == "gpt2" else IMAGE_DTYPE
        size = planned(setup).shape.num_parameters
        small = planned(replace(setup, preset="small")).shape.num_parameters if setup.preset else size
        return replace(setup, dtype=dtype, compute_ms=round(self.compute_ms[setup.model] * size / small, 3))


def lab_sweep() -> NanoCluster:
    """Return the sweep of the lab: all of the published one, with models scaled down.

    DDP cuts its buckets anew after the first step, for which ranks meet again in the second one.
    """
    return NanoCluster(
        warmup_steps=2, shrink=SHRINK, image_shrink=IMAGE_SHRINK, image_batch_divisor=IMAGE_BATCH_DIVISOR
    )


def reference_text() -> Setup:
    """Return the lab's set-up of GPT-2 that has the published ratio: data parallelism over 2x1."""
    return Setup(
        model="gpt2",
        preset="small",
        layout=parse_layout("2x1"),
        parallelism="data",
        batch=BATCH,
        stands_for=BATCH,
        shrink=SHRINK,
        dtype=TEXT_DTYPE,
    )


def published_images() -> Setup:
    """Return the published set-up of ResNet-18 whose throughput is known: 2x2 with its largest batch."""
    return Setup(model="resnet18", layout=parse_layout("2x2"), parallelism="data", batch=IMAGE_BATCH)


def set_up(published: Sequence[PublishedRow], *, sequence_ms: float) -> SetUp:
    """Return the set-up of the lab.

    Args:
        published: the published table.
        sequence_ms: what forward and backward of a sequence of GPT-2 take in the lab; the link follows from it, and
            from the link the time of an image.
    """
    text = reference_text()
    (row,) = (row for row in published if (row.layout, row.parallelism) == (text.layout, text.parallelism))
    theirs = published_balance(row, tokens_per_s_of_one(published).median)
    tokens_per_s = planned(text).seq_len / sequence_ms * 1e3
    volume, num_ranks = _link_bytes_per_sample(text), text.layout.num_ranks
    link_bps = round(
        link_rate_bps(
            theirs.ratio, link_bytes_per_sample=volume, samples_per_s_of_one=tokens_per_s, num_ranks=num_ranks
        ),
        -3,
    )
    texts = Calibration(
        name="GPT-2, data parallelism over 2x1",
        unit="tokens",
        published=theirs,
        lab=Balance(
            link_bytes_per_sample=volume, samples_per_s_of_one=tokens_per_s, num_ranks=num_ranks, link_bps=link_bps
        ),
    )
    images = _images(link_bps)
    return SetUp(
        link_bps=link_bps,
        compute_ms={"gpt2": sequence_ms, "resnet18": 1e3 / images.lab.samples_per_s_of_one},
        calibrations={"gpt2": texts, "resnet18": images},
    )


def _images(link_bps: float) -> Calibration:
    """Return the set-up of ResNet-18 on the same link: R1 = ratio L / (8 v n)."""
    whole = published_images()
    theirs = image_balance(whole)
    scaled = replace(whole, batch=whole.batch // IMAGE_BATCH_DIVISOR, shrink=IMAGE_SHRINK)
    volume, num_ranks = _link_bytes_per_sample(scaled), scaled.layout.num_ranks
    ours = Balance(
        link_bytes_per_sample=volume,
        samples_per_s_of_one=theirs.ratio * link_bps / (8 * volume * num_ranks),
        num_ranks=num_ranks,
        link_bps=link_bps,
    )
    return Calibration(name=f"ResNet-18, 2x2 at batch {IMAGE_BATCH}", unit="images", published=theirs, lab=ours)


def _link_bytes_per_sample(setup: Setup) -> float:
    plan = planned(setup)
    return link_bytes_per_step(setup, plan) / plan.samples_per_step


def steps_for(setup: Setup, link_bps: float, duration_s: float) -> int:
    """Return the steps that take about a time, by the formula: 5 to 20, and fewer only of those of more than 3.5 s.

    Counters of the network are read once a second, which is too seldom for fewer steps.
    """
    step_s = expected_step_s(setup, link_bps)
    least = 1 if step_s > _LONG_STEP_S else _MIN_STEPS
    return max(least, min(_MAX_STEPS, round(duration_s / step_s)))


def expected_step_s(setup: Setup, link_bps: float) -> float:
    """Return what a step of an emulated set-up is to take, by the formula."""
    assert setup.compute_ms is not None
    plan = planned(setup)
    one = plan.seq_len / setup.compute_ms * 1e3
    return predicted_step_s(setup, plan, samples_per_s_of_one=one, link_bps=link_bps)


def study_lab(name: str, *, link_bps: float, share: tuple[str, ...] = ()) -> AbstractContextManager[Lab]:
    """Boot the lab, and bring it down.

    Args:
        name: of the lab.
        link_bps: rate of the hosts' links.
        share: folders below /tmp that hosts see.
    """
    link = f"{round(link_bps / 1000)}kbit"
    return heavy_lab(
        LabConfig(
            name=name, hosts=HOSTS, leaves=1, link=link, uplink="10gbit", cpus_per_host=RANKS_PER_HOST, share=share
        )
    )


def run_study(lab: Lab, study: StudyFolder, *, timeout_s: float) -> None:
    """Do all open runs of a study in a lab, and wait for them, with a progress line.

    Raises:
        HpcpaceError: a job failed, and the study is not done.
    """
    environ = {
        "HPCPACE_STUDY_WAIT": "1",
        "HPCPACE_WORLD_START_TIMEOUT_S": "60",
        "HPCPACE_CLOCK_INTERVAL_S": "5",
    }
    done = subprocess.run(
        lab.command(["bash", SCRIPT, study.path], folder=study.path),
        env={**lab.environ(), **environ},
        stdin=subprocess.DEVNULL,
        timeout=timeout_s,
    )
    left = study.open_runs()
    if done.returncode or left:
        logs = sorted(study.path.glob("*.out"), key=lambda path: path.stat().st_mtime)
        tail = logs[-1].read_text(errors="replace")[-2000:] if logs else "no job has begun"
        raise HpcpaceError(f"{len(left)} runs of {study.path} are left; the last log ends:\n{tail}")
