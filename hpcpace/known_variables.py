"""The environment variables that begin with HPCPACE_: which are known, and what a mistyped one was meant to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcpace.config_values import sections, setting_variables
from hpcpace.core.text import listed

_PREFIX = "HPCPACE_"
_OF_SETTINGS = ("SITE_FILE", "OPT_OUT", "PROBE")
# hpcpace sets these for processes that it starts.
_OWN = ("LAUNCH", "RANK_PID", "LAB_EMULATION")
_OF_JOBS = (
    *("AUDIT", "BIND", "MPI", "PRELUDE", "PYTHON", "RANKS", "REQUEUE_AFTER_S", "RUN_DIR", "SRUN_ARGS"),
    *("SBATCH_ARGS", "STUDY", "STUDY_SUBMIT", "STUDY_WAIT"),
)
_OF_TESTS = ("ALL_REQUEUES", "REQUIRE_LAB")
# Environment modules say by such names where a piece of software is.
_OF_MODULES = ("BASE", "BIN", "DIR", "HOME", "LIB", "PREFIX", "ROOT", "VERSION")
_LEAST_LIKENESS = 0.7


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
    others = (*_OF_SETTINGS, *_OWN, *_OF_JOBS, *_OF_TESTS, *_OF_MODULES)
    known = setting_variables() | {f"{_PREFIX}{name}" for name in others}
    return [_unknown(name, known) for name in sorted(environ) if name.startswith(_PREFIX) and name not in known]


def unknown_sentence(unknown: list[UnknownVariable]) -> str:
    """Return one sentence on variables that are unknown."""
    noun = "variable" if len(unknown) == 1 else "variables"
    return f"unknown environment {noun}: {listed([one.sentence for one in unknown])}"


def _unknown(name: str, known: frozenset[str]) -> UnknownVariable:
    section = next((section for section in sections() if name.startswith(f"{_PREFIX}{section.upper()}_")), "")
    # A name that is cut off is like its beginning; otherwise the common prefix says nothing.
    begun = sorted((one for one in known if one.startswith(name)), key=len)
    tails = {one.removeprefix(_PREFIX): one for one in sorted(known)}
    import difflib

    like = difflib.get_close_matches(name.removeprefix(_PREFIX), tails, n=1, cutoff=_LEAST_LIKENESS)
    nearest = begun[0] if begun else tails[like[0]] if like else ""
    return UnknownVariable(name=name, nearest=nearest, is_mistaken=bool(nearest or section))
