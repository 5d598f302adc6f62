"""Where settings come from, which source wins, and which environment variables are meant for hpcpace.

Later sources win: the defaults, the site's file, its roll-out rules that hold for this job, what the user asks for by
the command itself, the user's file, the file of `--config`, environment variables
(`HPCPACE_TRACE_FLUSH_INTERVAL_S` sets `flush_interval_s` of `[trace]`), HPCPACE_OPT_OUT, command-line options. A
variable that begins with HPCPACE_ and is unknown was probably mistyped, so that the nearest known one is suggested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpcpace.core.config import DECLARED_BY, NO_POLICY, Config, section_class
from hpcpace.core.errors import ConfigError, check_all
from hpcpace.core.records import dataclass
from hpcpace.core.setting_values import (
    JobFacts,
    Rule,
    Values,
    read_rules,
    read_toml,
    setting_variables,
    switch,
    typed,
    variables,
)
from hpcpace.core.text import listed

SITE_FILE = Path("/etc/hpcpace.toml")
SITE_FILE_VARIABLE = "HPCPACE_SITE_FILE"
"""Names the site's file where that is not in /etc, as in a tree of software modules."""

OPT_OUT = "HPCPACE_OPT_OUT"
"""By this variable a user's jobs run entirely without hpcpace, whatever files say."""

PROBE = "HPCPACE_PROBE"
"""The short name of HPCPACE_PROBE_WHEN, which wins over it."""

REQUESTED: Mapping[str, Mapping[str, Any]] = {"trace": {"enabled": True}}
"""What a user asks for who starts a session or `hpcpace trace`, and a site's default does not take away."""

OPTED_OUT_LINE = f"{OPT_OUT} is set: this job runs without hpcpace"
"""What the user learns of that, once a job."""

DEFAULT, COMMAND, COMMAND_LINE = "default", "the command itself", "the command line"
_OPTED_OUT = {"trace": {"enabled": False, "snapshot": False}, "pace": {"policy": NO_POLICY}}


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The settings that hold, and where each comes from.

    Attributes:
        config: the settings.
        origins: the source of each setting that is not a default, by section and key.
        site_file: the site's file, whether it exists or not.
        rules: those of the site's roll-out, each with why it does not hold for this job; empty if it does.
    """

    config: Config
    origins: dict[str, dict[str, str]]
    site_file: Path
    rules: list[tuple[Rule, str]]

    def origin(self, section: str, key: str) -> str:
        """Return where a setting comes from."""
        return self.origins[section].get(key, DEFAULT)


def load_config(
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    requested: Mapping[str, Mapping[str, Any]] | None = None,
    site_file: Path | None = None,
) -> Config:
    """Merge all sources into one configuration; see `resolve`.

    Raises:
        ConfigError: a file cannot be read, or a key or a value is wrong.
    """
    return resolve(file=file, environ=environ, options=options, requested=requested, site_file=site_file).config


def resolve(
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    requested: Mapping[str, Mapping[str, Any]] | None = None,
    site_file: Path | None = None,
) -> Resolved:
    """Merge all sources, and keep track of them.

    Args:
        file: a TOML file that the user named; it must exist.
        environ: environment variables; those that name a setting, a file or a fact of the job are used.
        options: values of command-line options by section and key; None means that the option was not given.
        requested: what the user asks for by the command itself; only the site's file and its roll-out give way to it.
        site_file: the TOML file of the site, if it exists; by default that of `HPCPACE_SITE_FILE` or /etc/hpcpace.toml.

    Raises:
        ConfigError: a file cannot be read, or a key or a value is wrong.
    """
    environ = environ or {}
    site_file = site_file or Path(environ.get(SITE_FILE_VARIABLE) or SITE_FILE)
    merged = _Merged()
    rules = merged.take_site(site_file, JobFacts.of(environ))
    merged.take(requested or {}, COMMAND)
    user_file = _user_file(environ)
    if user_file is not None and _exists(user_file):
        merged.take(_without_rules(user_file), str(user_file))
    if file is not None:
        merged.take(_without_rules(file), str(file))
    if environ.get(PROBE):
        merged.take({"probe": {"when": environ[PROBE]}}, PROBE)
    check_all(
        partial(merged.take, {section: {key: environ[variable]}}, variable)
        for section, key, variable in (variables() if any(name.startswith(_PREFIX) for name in environ) else ())
        if environ.get(variable)
    )
    if switch(environ.get(OPT_OUT) or False, OPT_OUT):
        merged.take(_OPTED_OUT, OPT_OUT)
    merged.take(_given(options or {}), COMMAND_LINE)
    return Resolved(config=merged.config(), origins=merged.origins, site_file=site_file, rules=rules)


def is_opted_out(environ: Mapping[str, str]) -> bool:
    """Return whether the user wants nothing of hpcpace in this job; not where the variable makes no sense."""
    try:
        return switch(environ.get(OPT_OUT) or False, OPT_OUT)
    except ConfigError:  # who reads the settings says so
        return False


class _Merged:
    """Values from several sources, of which later ones win."""

    def __init__(self) -> None:
        self.values: Values = {section: {} for section in DECLARED_BY}
        self.origins: dict[str, dict[str, str]] = {section: {} for section in DECLARED_BY}

    def take(self, values: Mapping[str, Any], source: str) -> None:
        """Take the values of a source."""
        for section, table in typed(values, source).items():
            self.values[section].update(table)
            self.origins[section].update(dict.fromkeys(table, source))

    def take_site(self, path: Path, job: JobFacts) -> list[tuple[Rule, str]]:
        """Take the site's file and its rules that hold for a job; return all its rules, and why one does not hold."""
        content = read_toml(path) if _exists(path) else {}
        rules = read_rules(content.pop("rollout", []), str(path))
        self.take(content, str(path))
        found = [(rule, rule.objection(job)) for rule in rules]
        for rule, objection in found:
            self.copy().taking(rule).config()  # one that is wrong is wrong for every job
            if not objection:
                self.taking(rule)
        return found

    def taking(self, rule: Rule) -> _Merged:
        """Take the settings of a rule, and return itself."""
        self.take(rule.values, rule.source)
        return self

    def copy(self) -> _Merged:
        """Return a copy."""
        copy = _Merged()
        copy.values = {section: dict(table) for section, table in self.values.items()}
        copy.origins = {section: dict(table) for section, table in self.origins.items()}
        return copy

    def config(self) -> Config:
        """Return the settings, checked."""
        made: list[Any] = []
        check_all(partial(self._make, made, section) for section, values in self.values.items() if values)
        return Config(*made)

    def _make(self, made: list[Any], section: str) -> None:
        try:
            made.append(section_class(section)(**self.values[section]))
        except ConfigError as error:
            named = re.findall(rf"\b{section}\.(\w+(?:\.\w+)?)", str(error))
            sources = dict.fromkeys(self.origins[section].get(key, COMMAND_LINE) for key in named)
            sources.pop(COMMAND_LINE, None)
            raise ConfigError(f"{error} (set by {' and '.join(sources)})" if sources else str(error)) from error


def _given(options: Mapping[str, Mapping[str, Any]]) -> Values:
    return {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in options.items()
    }


def _user_file(environ: Mapping[str, str]) -> Path | None:
    folder = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else "")
    return Path(folder) / "hpcpace.toml" if folder else None


def _without_rules(path: Path) -> dict[str, Any]:
    content = read_toml(path)
    if "rollout" in content:
        raise ConfigError(f"{path}: [[rollout]] is for the site's file only; set its settings in sections like [trace]")
    return content


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    return True


_PREFIX = "HPCPACE_"
_OF_SETTINGS = ("SITE_FILE", "OPT_OUT", "PROBE")
# hpcpace sets these for processes that it starts.
_OWN = ("LAUNCH", "RANK_PID", "LAB_EMULATION")
_OF_JOBS = (
    *("AUDIT", "BIND", "MPI", "PLACEMENT", "PRELUDE", "PYTHON", "RANKS", "REQUEUE_AFTER_S", "RUN_DIR", "SRUN_ARGS"),
    *("SBATCH_ARGS", "STUDY", "STUDY_SUBMIT", "STUDY_WAIT"),
)
_OF_TESTS = ("ALL_REQUEUES", "REQUIRE_LAB")
# Environment modules say by such names where a piece of software is.
_OF_MODULES = ("BASE", "BIN", "DIR", "HOME", "LIB", "PREFIX", "ROOT", "VERSION")
_MIN_LIKENESS = 0.7


@dataclass(frozen=True, kw_only=True)
class UnknownVariable:
    """A variable that hpcpace does not know.

    Attributes:
        name: its name.
        nearest: the known one that is most like it; empty without one.
        is_mistaken: whether it can only be meant for hpcpace: it is like a known one, or names a section of settings.
    """

    name: str
    nearest: str
    is_mistaken: bool

    @property
    def sentence(self) -> str:
        """The variable, and what to write instead."""
        return f"{self.name} (did you mean {self.nearest}?)" if self.nearest else self.name


def unknown_variables(environ: Mapping[str, str]) -> list[UnknownVariable]:
    """Return the variables that begin with HPCPACE_ and that hpcpace does not know, sorted by name."""
    others = {f"{_PREFIX}{name}" for name in (*_OF_SETTINGS, *_OWN, *_OF_JOBS, *_OF_TESTS, *_OF_MODULES)}
    names = [name for name in sorted(environ) if name.startswith(_PREFIX) and name not in others]
    if not names:  # else the settings of all features would load
        return []
    known = setting_variables() | others
    return [_unknown(name, known) for name in names if name not in known]


def unknown_sentence(unknown: list[UnknownVariable]) -> str:
    """Return one sentence on variables that are unknown."""
    noun = "variable" if len(unknown) == 1 else "variables"
    return f"unknown environment {noun}: {listed([one.sentence for one in unknown])}"


def _unknown(name: str, known: frozenset[str]) -> UnknownVariable:
    section = next((section for section in DECLARED_BY if name.startswith(f"{_PREFIX}{section.upper()}_")), "")
    # A name that is cut off is like its beginning; otherwise the common prefix says nothing.
    begun = sorted((one for one in known if one.startswith(name)), key=len)
    tails = {one.removeprefix(_PREFIX): one for one in sorted(known)}
    import difflib

    like = difflib.get_close_matches(name.removeprefix(_PREFIX), tails, n=1, cutoff=_MIN_LIKENESS)
    nearest = begun[0] if begun else tails[like[0]] if like else ""
    return UnknownVariable(name=name, nearest=nearest, is_mistaken=bool(nearest or section))
