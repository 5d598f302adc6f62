"""The masks that the audit of a job proposes, as an option of srun for its training (HPCPACE_BIND=auto)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcpace.audit.job import AuditedJob
from hpcpace.audit.result import BINDING_RULES, audit
from hpcpace.audit.snapshot_files import load_snapshots
from hpcpace.batch.launch import Launch
from hpcpace.core.errors import HpcpaceError
from hpcpace.core.hostlist import compress
from hpcpace.core.settings import load_config


@dataclass(frozen=True, kw_only=True)
class ChosenBinding:
    """What HPCPACE_BIND=auto came to.

    Attributes:
        option: srun's option; empty if ranks stay as they are.
        line: what was applied, or why nothing was.
    """

    option: str
    line: str


def choose_binding(launch: Launch, snapshots: Path, environ: Mapping[str, str]) -> ChosenBinding:
    """Return the binding for the ranks of a launch from the snapshots that their audit has saved."""
    if launch.allocation is None:
        return _unbound("ranks are bound by srun, and this is no Slurm job")
    if any(option.startswith("--cpu-bind") for option in launch.options):
        return _unbound("HPCPACE_SRUN_ARGS has a --cpu-bind, which stays")
    if len(launch.allocation.components) > 1:
        return _unbound("srun takes one list of masks, and the components of a heterogeneous job need their own")
    try:
        found, _ = load_snapshots(snapshots)
        job = AuditedJob(found, load_config(environ=environ).audit)
        bindings = audit(job, ids=BINDING_RULES).bindings
    except HpcpaceError as error:
        return _unbound(str(error))
    if not bindings:
        return _unbound("a node has one rank, which may use all CPUs of the job there")
    if len(found) < launch.allocation.num_nodes:
        return _unbound(f"the audit has seen {len(found)} of {launch.allocation.num_nodes} nodes")
    binding = bindings[0]
    if not binding.option:
        return _unbound(binding.reason)
    if len(bindings) > 1 or len(binding.hosts) < len(found):
        return _unbound("srun takes one list of masks, and the audit proposes different ones for different nodes")
    ranks = f"the {binding.num_tasks} ranks on each of {compress(binding.hosts)}"
    return ChosenBinding(option=binding.option, line=f"HPCPACE_BIND=auto: {binding.option} for {ranks}")


def _unbound(reason: str) -> ChosenBinding:
    return ChosenBinding(option="", line=f"HPCPACE_BIND=auto: ranks are not bound: {reason}")
