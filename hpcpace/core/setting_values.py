"""Settings as one source gives them, turned into the types of their sections, and a site's rules with conditions.

TOML files give numbers and lists, environment variables texts; errors name the source. The site's file may have rules:

    [[rollout]]
    partitions = ["gpu"]
    share = 0.1
    trace.enabled = true

All conditions of a rule must hold. They look at facts of the whole job, which are the same on all its ranks and after a
requeue: every rank comes to the same answer, or its settings would differ from those of the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pwd
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from heapq import nsmallest
from pathlib import Path
from typing import Any

from hpcpace.core.config import DECLARED_BY, section_class
from hpcpace.core.errors import ConfigError, check_all
from hpcpace.core.files import read_file
from hpcpace.core.hostlist import MAX_HOSTS, HostLists, short_list
from hpcpace.core.records import dataclass
from hpcpace.core.text import few, printable, shown
from hpcpace.core.thresholds import threshold_fields

Values = dict[str, dict[str, Any]]
"""Values by section and key."""

_MAX_BYTES = 1 << 20
# tomllib compares each part of a dotted key with all before it; `trace.enabled` has two.
_MAX_DOTS = 8192
# Of a text, as Linux has it for paths; and of a number, as computers have it.
_MAX_LETTERS, _MAX_BITS = 4096, 64
_MAX_REASON, _MAX_NAMED = 160, 4
_KINDS = {int: "a whole number", float: "a number", str: "a string", Path: "a path"}
_WORDS = {"1": True, "on": True, "true": True, "yes": True, "0": False, "off": False, "false": False, "no": False}


def variables() -> Iterator[tuple[str, str, str]]:
    """Yield section, key and environment variable of each setting."""
    for section in DECLARED_BY:
        for f in dataclasses.fields(section_class(section)):
            yield section, f.name, f"HPCPACE_{section}_{f.name}".upper()


def setting_variables() -> frozenset[str]:
    """Return the names of the environment variables that are settings."""
    return frozenset(variable for _, _, variable in variables())


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        # The file may be a link, as its folder may: the user or the site has chosen it.
        content = read_file(Path(os.path.realpath(path)), most_bytes=_MAX_BYTES).decode("utf-8")
        if content.count(".") > _MAX_DOTS:
            raise ConfigError(f"{path} has more than {_MAX_DOTS} dots, too many for settings")
        return tomllib.loads(content)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits, and what is nested deep
        raise ConfigError(f"{path} is not valid TOML: {str(error)[:_MAX_REASON]}") from error


def typed(values: Mapping[str, Any], source: str) -> Values:
    """Return the values of a source in the types of their settings.

    Raises:
        ConfigError: a section or key is unknown, or a value has the wrong type.
    """
    found: Values = {}
    check_all(
        [
            *(
                partial(_type_section, found, section, values[section], source)
                for section in values
                if section in DECLARED_BY
            ),
            partial(_check_known, values, DECLARED_BY, f"{source}: unknown section", "", "the sections"),
        ]
    )
    return found


def _check_known(given: Mapping[str, Any], known: Mapping[str, Any], what: str, where: str, all_of_them: str) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        names = few(unknown, _MAX_NAMED, shown)
        plural = "s" if len(unknown) > 1 else ""
        raise ConfigError(f"{what}{plural} {names}{where}: {all_of_them} are {', '.join(known)}")


def _type_section(found: Values, section: str, table: Any, source: str) -> None:
    found[section] = {}
    if section == "thresholds":
        _type_thresholds(found[section], table, source)
    else:
        kind = section_class(section)
        hints = typing.get_type_hints(kind)
        _type_table(found[section], section, table, {f.name: hints[f.name] for f in dataclasses.fields(kind)}, source)


def _type_table(found: dict[str, Any], name: str, table: Any, kinds: Mapping[str, Any], source: str) -> None:
    """Add the values of one table in the types of `kinds` to those that were found."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source}: {name} must be a table like [{name}]")

    def convert(key: str) -> None:
        found[key] = _coerce(table[key], kinds[key], f"{source}: {name}.{key}")

    check_all(
        [
            *(partial(convert, key) for key in table if key in kinds),
            partial(_check_known, table, kinds, f"{source}: unknown key", f" in [{name}]", "the keys"),
        ]
    )


def _type_thresholds(found: dict[str, Any], table: Any, source: str) -> None:
    """Add the values of all tables like [thresholds.links], by `topic.name`."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source}: thresholds must be tables like [thresholds.links]")
    known = threshold_fields()

    def convert(topic: str) -> None:
        values: dict[str, Any] = {}
        kinds = {name: type(field.default) for name, field in known[topic].items()}
        _type_table(values, f"thresholds.{topic}", table[topic], kinds, source)
        found.update({f"{topic}.{name}": value for name, value in values.items()})

    check_all(
        [
            *(partial(convert, topic) for topic in table if topic in known),
            partial(_check_known, table, known, f"{source}: unknown topic", " in [thresholds]", "the topics"),
        ]
    )


def switch(value: Any, where: str) -> bool:
    """Return a setting that is on or off.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, bool):
        return value
    word = str(value).lower() if isinstance(value, str) or value in (0, 1) else ""
    if word in _WORDS:
        return _WORDS[word]
    raise ConfigError(f"{where} is {shown(value)}: expected on or off")


def _coerce(value: Any, kind: Any, where: str) -> Any:
    if isinstance(kind, types.UnionType):
        kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        texts = value.split() if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{where} is {shown(value)}: expected a list of strings")
        return tuple(_text(text, where) for text in texts)
    if kind is bool:
        return switch(value, where)
    if isinstance(value, bool):
        raise ConfigError(f"{where} is {value}: expected {_KINDS.get(kind, kind.__name__)}")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ConfigError(
            f"{where} is {shown(value)}: expected {_KINDS.get(kind, kind.__name__)}, and no such large one"
        )
    if isinstance(value, str):
        _text(value, where)
    try:
        converted = kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where} is {shown(value)}: expected {_KINDS.get(kind, kind.__name__)}") from error
    if kind is int and isinstance(value, float) and converted != value:
        raise ConfigError(f"{where} is {shown(value)}: expected a whole number")
    return converted


def _text(value: str, where: str) -> str:
    if len(value) > _MAX_LETTERS or "\0" in value:
        raise ConfigError(f"{where} is {shown(value)}: expected at most {_MAX_LETTERS} letters, none of them a null")
    return value


SECTIONS = ("trace", "clock", "audit", "pace")
"""What a rule can set: that which runs inside jobs."""

_LISTS = {"partitions": "partition", "users": "user", "accounts": "account"}
_CONDITIONS = (*_LISTS, "nodes", "share")
# Each is compared with all before it, and its settings are tried out.
_MAX_RULES = 100
_MAX_NODES = 1 << 18
"""In all rules together."""
_MAX_ID = 60
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
