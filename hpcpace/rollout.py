"""Which jobs a site's settings hold for: the rules `[[rollout]]` of its file.

    [[rollout]]
    partitions = ["gpu"]
    share = 0.1
    trace.enabled = true

All conditions of a rule must hold. They look at facts of the whole job, which are the same on all its ranks and after a
requeue: every rank comes to the same answer, or its settings would differ from those of the others.
"""

from __future__ import annotations

import hashlib
import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any

from hpcpace.config_values import Values, typed
from hpcpace.core.errors import ConfigError
from hpcpace.core.hostlist import MAX_HOSTS, HostLists, short_list
from hpcpace.core.text import printable, shown

SECTIONS = ("trace", "clock", "audit", "pace")
"""What a rule can set: that which runs inside jobs."""

_LISTS = {"partitions": "partition", "users": "user", "accounts": "account"}
_CONDITIONS = (*_LISTS, "nodes", "share")
# Each is compared with all before it, and its settings are tried out.
_MAX_RULES = 100
_MAX_NODES = 1 << 18
"""In all rules together."""
_MAX_NAMED, _MAX_ID = 4, 60
_HET_NODES = "SLURM_JOB_NODELIST_HET_GROUP_"


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What rules ask of a job; empty where it is unknown, as outside Slurm.

    Attributes:
        nodes: names of all nodes of the job, as Slurm has them.
        job_id: that of the whole job, also in a heterogeneous one; an element of an array has its own.
    """

    partition: str = ""
    user: str = ""
    account: str = ""
    nodes: frozenset[str] = frozenset()
    job_id: str = ""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> JobFacts:
        """Return the facts of the job that this process belongs to."""
        lists = [value for name, value in environ.items() if name.startswith(_HET_NODES)]
        lists = lists or [environ.get("SLURM_JOB_NODELIST", "")]
        try:
            expand = HostLists(MAX_HOSTS).expand
            nodes = frozenset(node for text in lists for node in expand(text))
        except ValueError:
            nodes = frozenset()
        run_id = environ.get("TORCHELASTIC_RUN_ID", "")
        return cls(
            partition=environ.get("SLURM_JOB_PARTITION", ""),
            user=environ.get("SLURM_JOB_USER", "") or _user(),
            account=environ.get("SLURM_JOB_ACCOUNT", ""),
            nodes=nodes,
            job_id=environ.get("SLURM_JOB_ID_HET_GROUP_0")
            or environ.get("SLURM_JOB_ID")
            or ("" if run_id == "none" else run_id),  # torchrun calls a run without an id "none"
        )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule: settings, and the conditions under which they hold.

    Attributes:
        source: names it in messages, like `rule 2 of /etc/hpcpace.toml`.
        conditions: the names that each of its lists holds, by the list's key.
        share: share of all jobs, above 0 and at most 1.
        values: what it sets.
    """

    source: str
    conditions: Mapping[str, frozenset[str]] = field(default_factory=dict)
    share: float = 1.0
    values: Values

    def objection(self, job: JobFacts) -> str:
        """Return why it does not hold for a job; empty if it does."""
        for key, fact in _LISTS.items():
            value = getattr(job, fact)
            if key in self.conditions and value not in self.conditions[key]:
                return f"the {fact} is {shown(value)}" if value else f"the {fact} is unknown"
        if "nodes" in self.conditions and not job.nodes:
            return "the nodes are unknown"
        if others := job.nodes - self.conditions.get("nodes", job.nodes):
            more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
            return f"the job also has {short_list(nsmallest(_MAX_NAMED, others))}{more}"
        if self.share < 1:
            if not job.job_id:
                return "the job has no id"
            if (place := place_of_job(job.job_id)) >= self.share:
                return f"the place of job {printable(job.job_id[:_MAX_ID])} among all jobs is {place:.4f}"
        return ""

    def holds_whenever(self, other: Rule) -> bool:
        """Return whether it holds for every job for which the other rule does."""
        return self.share >= other.share and all(
            key in other.conditions and other.conditions[key] <= names for key, names in self.conditions.items()
        )


def place_of_job(job_id: str) -> float:
    """Return a number from 0 to 1 that follows from a job's id alone: equal shares of it are equal shares of jobs.

    All rules use the same number, so that the jobs of a smaller share are among those of a larger one.
    """
    digest = hashlib.sha256(f"hpcpace roll-out {job_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def read_rules(content: Any, file: str) -> list[Rule]:
    """Return the rules of a site's file, in its order: later ones win.

    Args:
        content: the value of `rollout` in the file.
        file: names the file.

    Raises:
        ConfigError: a rule is wrong, or another one always takes away what it sets.
    """
    if not isinstance(content, Sequence) or not all(isinstance(rule, Mapping) for rule in content):
        raise ConfigError(f"{file}: rollout must be a list of tables, each headed by [[rollout]]")
    if len(content) > _MAX_RULES:
        raise ConfigError(f"{file}: rollout has {len(content)} rules, more than {_MAX_RULES}: join some")
    lists = HostLists(_MAX_NODES)
    rules = [_read_rule(table, lists, f"rule {number} of {file}") for number, table in enumerate(content, 1)]
    for number, later in enumerate(rules):
        for earlier in rules[:number]:
            _check_agreement(earlier, later)
    return rules


def _read_rule(table: Mapping[str, Any], lists: HostLists, source: str) -> Rule:
    unknown = [key for key in table if key not in (*_CONDITIONS, *SECTIONS)]
    if unknown:
        raise ConfigError(
            f"{source}: unknown key {shown(unknown[0])}: conditions are {', '.join(_CONDITIONS)}, and settings are "
            f"those of {', '.join(SECTIONS)}, like trace.enabled"
        )
    values = typed({section: table[section] for section in SECTIONS if section in table}, source)
    if not any(values.values()):
        raise ConfigError(f"{source} sets nothing: add a setting like trace.enabled = true")
    conditions = {key: _names(table[key], f"{source}: {key}") for key in _LISTS if key in table}
    if "nodes" in table:
        conditions["nodes"] = _nodes(table["nodes"], f"{source}: nodes", lists)
    return Rule(source=source, conditions=conditions, share=_share(table.get("share", 1.0), source), values=values)


def _names(value: Any, where: str) -> frozenset[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise ConfigError(f"{where} is {shown(value)}: expected a list of names, with at least one")
    return frozenset(name.strip() for name in names)


def _nodes(value: Any, where: str, lists: HostLists) -> frozenset[str]:
    try:
        return frozenset(node for text in _names(value, where) for node in lists.expand(text))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _share(value: Any, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError(f"{source}: share is {shown(value)}: expected a number above 0 and at most 1")
    return float(value)


def _check_agreement(earlier: Rule, later: Rule) -> None:
    if not later.holds_whenever(earlier):
        return
    for section, table in earlier.values.items():
        for key, value in table.items():
            other = later.values.get(section, {}).get(key, value)
            if other != value:
                raise ConfigError(
                    f"{later.source} holds whenever {earlier.source.partition(' of ')[0]} does, and sets "
                    f"{section}.{key} to {other}, not {value}: later rules win, so put general rules before special "
                    "ones, or remove one of the two"
                )


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""
