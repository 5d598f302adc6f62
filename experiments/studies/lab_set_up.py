"""The lab that represents the published nano-cluster: two hosts on a slow link, with the same cores for every rank.

The link is as slow as gives the ratio of communication to computation of the published set-up, which is computed from
the throughput of one rank before the study begins.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hpcpace.core.errors import HpcpaceError, UsageError
from hpcpace.lab.hosts import HostCgroup
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig
from hpcpace.studies.published import (
    Balance,
    PublishedRow,
    link_bytes_per_step,
    link_rate_bps,
    predicted_step_s,
    published_balance,
    tokens_per_s_of_one,
)
from hpcpace.studies.setups import Setup, StudyFolder, StudyRun, parse_layout, planned

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "sbatch" / "nano_cluster.sh"
LIMIT_RANK = Path(__file__).with_name("limit_rank.sh")
HOSTS, RANKS_PER_HOST = ("n1", "n2"), 2
REFERENCE = ("2x1", "data")
"""The published set-up whose ratio the lab's link gives."""
_MIN_STEPS, _MAX_STEPS, _LONG_STEP_S = 2, 20, 3.5


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """What was computed before the study: how fast one rank is, and the link that follows.

    Attributes:
        quota: cores' worth of processor time of every rank.
        samples_per_s_of_one: of one rank alone, by model.
        published: the ratio that the lab is to have.
        lab: the same set-up in the lab.
    """

    quota: float
    samples_per_s_of_one: Mapping[str, float]
    published: Balance
    lab: Balance

    def facts(self) -> dict[str, object]:
        """Return what the plan of the study keeps, so that a study that goes on has the same link."""
        return {
            "quota_cores": self.quota,
            "samples_per_s_of_one": dict(self.samples_per_s_of_one),
            "link_bps": self.lab.link_bps,
            "link_bytes_per_sample": self.lab.link_bytes_per_sample,
            "ratio": self.lab.ratio,
        }

    def lines(self) -> list[str]:
        """Return the formula with its numbers."""
        theirs, ours = self.published, self.lab
        return [
            f"ratio of communication to computation at {REFERENCE[0]} {REFERENCE[1]}: 8 v n R1 / L",
            f"published: 8 x {theirs.link_bytes_per_sample:,.0f} B x {theirs.num_ranks} x "
            f"{theirs.samples_per_s_of_one:,.0f} tokens/s / {theirs.link_bps / 1e6:,.0f} Mb/s = {theirs.ratio:.2f}",
            f"lab, {self.quota:g} cores per rank: L = 8 x {ours.link_bytes_per_sample:,.0f} B x {ours.num_ranks} x "
            f"{ours.samples_per_s_of_one:,.0f} tokens/s / {theirs.ratio:.2f} = {ours.link_bps / 1e6:.2f} Mb/s",
        ]


def set_up(
    reference: Setup, published: Sequence[PublishedRow], *, quota: float, samples_per_s_of_one: Mapping[str, float]
) -> SetUp:
    """Return the link of the lab, from the throughput of one of its ranks.

    Args:
        reference: the lab's set-up that has the ratio of the published one.
        published: the published table.
        quota: cores' worth of processor time of every rank.
        samples_per_s_of_one: of one rank alone, by model.
    """
    (row,) = (row for row in published if (str(row.layout), row.parallelism) == REFERENCE)
    theirs = published_balance(row, tokens_per_s_of_one(published).median)
    plan = planned(reference)
    per_sample = link_bytes_per_step(reference, plan) / plan.samples_per_step
    one = samples_per_s_of_one[reference.model]
    num_ranks = reference.layout.num_ranks
    rate_bps = link_rate_bps(
        theirs.ratio, link_bytes_per_sample=per_sample, samples_per_s_of_one=one, num_ranks=num_ranks
    )
    ours = Balance(
        link_bytes_per_sample=per_sample, samples_per_s_of_one=one, num_ranks=num_ranks, link_bps=round(rate_bps, -3)
    )
    return SetUp(quota=quota, samples_per_s_of_one=dict(samples_per_s_of_one), published=theirs, lab=ours)


def steps_for(setup: Setup, facts: Mapping[str, object], duration_s: float) -> int:
    """Return the steps that take about a time, by the formula: 2 to 20, and a single one of more than 3.5 s."""
    step_s = expected_step_s(setup, facts)
    least = 1 if step_s > _LONG_STEP_S else _MIN_STEPS
    return max(least, min(_MAX_STEPS, round(duration_s / step_s)))


def expected_step_s(setup: Setup, facts: Mapping[str, object]) -> float:
    """Return what a step is to take, by the formula; computation goes with the parameters of the model's size."""
    single, link_bps = facts["samples_per_s_of_one"], facts["link_bps"]
    assert isinstance(single, dict) and isinstance(link_bps, float)
    plan = planned(setup)
    measured = planned(replace(setup, preset="small")) if setup.preset else plan
    one = single[setup.model] * measured.shape.num_parameters / plan.shape.num_parameters
    return predicted_step_s(setup, plan, samples_per_s_of_one=one, link_bps=link_bps)


@contextmanager
def study_lab(name: str, *, quota: float, link_bps: float | None = None, share: tuple[str, ...] = ()) -> Iterator[Lab]:
    """Boot the lab, with a control group for each rank, and bring it down.

    Args:
        name: of the lab.
        quota: cores' worth of processor time of every rank.
        link_bps: rate of the hosts' links; as fast as can be when not given.
        share: folders below /tmp that hosts see.

    Raises:
        UsageError: this machine has no control groups of version 1, into which hosts of the lab can put their ranks.
    """
    link = "10gbit" if link_bps is None else f"{round(link_bps / 1000)}kbit"
    config = LabConfig(
        name=name, hosts=len(HOSTS), leaves=1, link=link, uplink="10gbit", cpus_per_host=RANKS_PER_HOST, share=share
    )
    with Lab.up(config) as lab:
        for host in HOSTS:
            for rank in range(RANKS_PER_HOST):
                group = HostCgroup(name, f"{host}-rank{rank}")
                _, is_v2 = group.folders().get("cpu", (None, True))
                if is_v2:
                    raise UsageError("this needs control groups of version 1: mount their cpu controller")
                group.create()
                group.limit_cpu(quota)
        yield lab


def run_study(lab: Lab, study: StudyFolder, *, timeout_s: float) -> None:
    """Do all open runs of a study in a lab, and wait for them, with a progress line.

    Raises:
        HpcpaceError: a job failed, and the study is not done.
    """
    environ = {
        "HPCPACE_STUDY_WAIT": "1",
        "HPCPACE_SRUN_ARGS": f"--task-prolog={LIMIT_RANK}",
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


def calibrated(study: StudyFolder, setups: Sequence[Setup], *, lab_name: str, quota: float) -> None:
    """Run single ranks in a separate lab to learn their throughput, unless it is known already."""
    study.write_plan("calibration", [StudyRun(setup=setup, repetition=index) for index in range(3) for setup in setups])
    if study.open_runs():
        with study_lab(lab_name, quota=quota) as lab:
            run_study(lab, study, timeout_s=900)


def single(setup: Setup, *, steps: int) -> Setup:
    """Return the set-up of one rank alone that does what a replica of a set-up does."""
    return Setup(
        model=setup.model,
        preset=setup.preset,
        layout=parse_layout("1x1"),
        parallelism="none",
        batch=setup.batch,
        stands_for=setup.stands_for,
        shrink=setup.shrink,
        steps=steps + 1,
        warmup_steps=1,
    )
