"""The placement for the next run of a job, from the traffic and the hosts of a recorded one, as launchers take it.

A job script tries it: it runs the job with both placements in turn, on the same hosts, and compares them. A file for a
launcher has one line for each rank:

- `slurm`: the host of each rank, for SLURM_HOSTFILE and `srun --distribution=arbitrary`.
- `openmpi`: the same as a hostfile for `mpirun --map-by seq`. A rankfile would have to name cores, and so undo the
  binding that the job asks for.
- `torchrun`: torchrun numbers ranks by host, so that its line i is the started rank that does the work of rank i.
  `init_device_mesh` has no order of ranks; DeviceMesh("cuda", torch.tensor(order).reshape(dp, pp)) takes one.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from hpcpace.core.codec import Text, convert, read_json
from hpcpace.core.errors import CannotTell, UsageError
from hpcpace.core.hostlist import compress, read_placement, short_list
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import printable, shell_word
from hpcpace.diagnosis.judged import JudgedAttempt
from hpcpace.frames.run import Run
from hpcpace.metrics import Ints
from hpcpace.metrics.topology import split_address
from hpcpace.placement.assign import (
    PlacementThresholds,
    Volumes,
    better_host,
    levels_between,
    switches_above,
    volumes,
)
from hpcpace.placement.gain import StepGain, predicted_gain, traffic_per_step
from hpcpace.runs.measured import without_folders


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the ranks of a run were, and where they would send less.

    Attributes:
        names: of the hosts, as Slurm knows them.
        before, after: host of each rank, index into `names`, int64, (num_ranks,); equal where the run's is good.
        volumes_before, volumes_after: bytes of a step.
        gain: of step time; None where the traces do not show it.
    """

    names: tuple[str, ...]
    before: Ints
    after: Ints
    volumes_before: Volumes
    volumes_after: Volumes
    gain: StepGain | None

    @property
    def num_moved(self) -> int:
        """Ranks that change their host."""
        return int((self.before != self.after).sum())


def place_run(run: Run, wanted: Path | None = None) -> Placement:
    """Return the better placement of a run, or that which it had.

    Args:
        run: the recorded run.
        wanted: file with the placement to judge instead of a search: the host of each rank, one on each line.

    Raises:
        CannotTell: the run hung, lacks ranks, ran on one host, or the switches of its hosts are not known.
        UsageError: the file cannot be read, or its hosts or ranks are not those of the run.
    """
    judged = run.judged
    _check(judged)
    places = judged.measured.places
    headers = [trace.header for trace in judged.credible.traces]
    path_of = {
        node: split_address(header.topology_addr, header.host)[0]
        for node, header in zip(places.node.tolist(), headers, strict=True)
    }
    paths = [path_of[node] for node in range(places.num_nodes)]
    levels = levels_between(paths)
    traffic = traffic_per_step(run.columns("collectives"), len(headers), run.num_steps)
    if wanted is None:
        after = better_host(traffic, places.node, levels, judged.limits(PlacementThresholds))
    else:
        after = _wanted_host(wanted, places.node, places.slurm_names)
    old, new = volumes(traffic, places.node, levels), volumes(traffic, after, levels)
    is_kept = bool((after == places.node).all())
    return Placement(
        names=places.slurm_names,
        before=places.node,
        after=after,
        volumes_before=old,
        volumes_after=new,
        gain=None if is_kept else predicted_gain(judged, after, switches_above(paths), old.shrunk_to(new)),
    )


def _wanted_host(file: Path, host: Ints, names: Sequence[str]) -> Ints:
    """Return the host of each rank in a file, index into `names`, int64, (num_ranks,).

    Raises:
        UsageError: see `place_run`.
    """
    named = f"--placement {printable(str(file))}"
    try:
        hosts = read_placement(file)
    except OSError as error:
        raise UsageError(f"{named} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{named} cannot be read: it is no text") from None
    if len(hosts) != len(host):
        raise UsageError(f"{named} has hosts for {len(hosts)} ranks, and the run has {len(host)}")
    if strangers := set(hosts) ^ set(names):
        raise UsageError(f"{named} and the run have different hosts: {short_list(strangers)}")
    number = {name: index for index, name in enumerate(names)}
    found = np.array([number[name] for name in hosts], np.int64)
    if other := np.flatnonzero(np.bincount(found) != np.bincount(host)).tolist():
        changed = short_list(names[index] for index in other)
        raise UsageError(f"{named} gives {changed} another number of ranks than the run: what they have is kept")
    return found


def _check(judged: JudgedAttempt) -> None:
    """Refuse a run from which no placement follows.

    Raises:
        CannotTell: see `place_run`.
    """
    judged.check_whole()
    places = judged.measured.places
    if places.num_nodes < 2:
        raise CannotTell(f"the run had one host ({places.node_names[0]}): there is nothing to place")
    if len(set(places.slurm_names)) < places.num_nodes:
        raise CannotTell("several hosts of the run have one name: a placement cannot tell them apart")
    if not places.num_leaves:
        why = "".join(f"; {problem}" for problem in judged.placed.problems)
        raise CannotTell(f"the leaf switches of its hosts are not known{why}: name a file with --topology")


def placement_text(kind: str, host: Ints, names: Sequence[str]) -> str:
    """Return the content of a file.

    Args:
        kind: `slurm`, `openmpi` or `torchrun`.
        host: of each rank, index into `names`, int64, (num_ranks,).
        names: of the hosts, in the order in which torchrun numbers them.
    """
    if kind == "torchrun":
        return "".join(f"{rank}\n" for rank in started_ranks(host).tolist())
    return "".join(f"{names[at]}\n" for at in host.tolist())


def started_ranks(host: Ints) -> Ints:
    """Return which rank of those numbered host by host does the work of each rank, int64, (num_ranks,)."""
    return np.argsort(np.argsort(host, kind="stable")).astype(np.int64)


def local_ranks(host: Ints) -> Ints:
    """Return the number of each rank on its host, int64, (num_ranks,), ascending by rank."""
    order = np.argsort(host, kind="stable")
    first = np.searchsorted(host[order], host[order])
    local = np.empty(len(host), np.int64)
    local[order] = np.arange(len(host)) - first
    return local


def usage_line(kind: str, file: str) -> str:
    """Return how a job takes a file, safe to paste."""
    name = shell_word(file)
    return {
        "slurm": f"SLURM_HOSTFILE={name} srun --distribution=arbitrary ...",
        "openmpi": f"mpirun --hostfile {name} --map-by seq ...",
        "torchrun": f"DeviceMesh with the ranks of {name}, reshaped to the mesh",
    }[kind]


NUM_REPEATS = 3
"""Runs of a side from which `hpcpace compare` takes how much runs differ."""
_STARTED_BY = {"torchrun": "torchrun", "pmi": "mpiexec"}
_BODY = """\
set -euo pipefail

hpcpace={program}
folder={folder}
# The ranks take their hosts from HPCPACE_PLACEMENT, and the run is to be HPCPACE_RUN_DIR.
job() {{
    {job}
}}

runs=$folder/${{SLURM_JOB_ID:?this is no Slurm job: submit it with sbatch}}
export HPCPACE_AUDIT=${{HPCPACE_AUDIT:-off}}
for repeat in {repeats}; do
    # Whichever comes first may have colder caches, or another neighbour on the network.
    order=(before after)
    ((repeat % 2)) || order=(after before)
    for which in "${{order[@]}}"; do
        echo "placement-trial: run $repeat with the placement $which"
        HPCPACE_PLACEMENT=$folder/$which.txt HPCPACE_RUN_DIR=$runs/$which-$repeat job
    done
done
exec "$hpcpace" compare "$runs"/before-* -- "$runs"/after-*
"""


@dataclass(frozen=True, kw_only=True)
class _Start:
    """How run.json says that a run was started."""

    launcher: Text = ""
    command: tuple[str, ...] = field(default=())


def trial_files(found: Placement, attempt: Attempt, folder: Path, program: str) -> dict[str, str]:
    """Return the content of each file of a trial, by its name.

    Args:
        found: the placements.
        attempt: that they come from.
        folder: where the files will be, absolute; the runs of the trial get a folder in it.
        program: path of hpcpace.

    Raises:
        CannotTell: ranks cannot be given their hosts, run.json does not say how they were started, or both placements
            are the same.
    """
    if not found.num_moved:
        raise CannotTell("there is nothing to try: the run's placement is as good as the best one found")
    job = _job_line(_start(attempt))
    per_host = np.bincount(found.before)
    name = printable(attempt.path.parent.name)
    lines = [
        "#!/usr/bin/env bash",
        f"# Runs the job of {name} with the placement that it had and with that of `hpcpace place`, in turn,",
        f"# {NUM_REPEATS} times each, and compares them. Check `job` below, and give sbatch its other options.",
        "#SBATCH --job-name=placement-trial",
        "#SBATCH --output=%x-%j.out",
        f"#SBATCH --nodes={len(per_host)}",
        f"#SBATCH --nodelist={compress(found.names)}",
        f"#SBATCH --ntasks={len(found.before)}",
        *([f"#SBATCH --ntasks-per-node={per_host[0]}"] if (per_host == per_host[0]).all() else []),
    ]
    repeats = " ".join(map(str, range(1, NUM_REPEATS + 1)))
    quoted = {"program": shlex.quote(program), "folder": shlex.quote(str(folder))}
    return {
        "before.txt": placement_text("slurm", found.before, found.names),
        "after.txt": placement_text("slurm", found.after, found.names),
        "trial.sh": "\n".join(lines) + "\n" + _BODY.format(**quoted, job=job, repeats=repeats),
    }


def _start(attempt: Attempt) -> _Start:
    problems: list[str] = []
    found = read_json(attempt, attempt.run_json.name, _recorded, problems)
    if found is None or not found.command:
        why = problems[0] if problems else "run.json has no command"
        raise CannotTell(f"how the run was started is not known ({why}): write a placement with --output instead")
    return found


def _recorded(content: Any) -> _Start:
    return convert({name: content.get(name) for name in ("launcher", "command") if name in content}, _Start)


def _job_line(start: _Start) -> str:
    """Return the line that starts the ranks of a run.

    Raises:
        CannotTell: they were not started by srun.
    """
    if start.launcher != "slurm":
        starter = _STARTED_BY.get(start.launcher, "an unknown launcher")
        raise CannotTell(
            f"the ranks of the run were started by {starter}, not by srun, which alone takes a host for each "
            "rank: start them with srun, or write a placement for them with --format and --output"
        )
    words = list(without_folders(start.command))
    if words[1:2] == ["train"] and Path(words[0]).name in ("hpcpace", "__main__.py"):
        return f'"$hpcpace" batch --name placement-trial -- {shlex.join(words[1:])}'
    traced = f'"$hpcpace" trace --run-dir "$HPCPACE_RUN_DIR" -- {shlex.join(words)}'
    return f'srun --distribution=arbitrary --nodelist="$HPCPACE_PLACEMENT" {traced}'
