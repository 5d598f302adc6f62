"""A small part of `python -m experiments.damage --hostile`: always the same first input of a kind, by format.

A landing runs each twelfth kind of a format, and `make test-nightly` all.
"""

from __future__ import annotations

from cases import each_case, only_nightly

from experiments.damage.engine import Input, run_inputs
from experiments.damage.kinds import HOSTILE as KINDS

FORMATS = tuple(dict.fromkeys(kind.group for kind in KINDS))


def test_each_kind_has_a_name_of_its_own() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)


@each_case("format_", FORMATS)
def test_a_hostile_file_is_read_or_refused_within_bounds(format_: str) -> None:
    kinds = [kind for kind in KINDS if kind.group == format_]
    kinds = only_nightly(kinds[::12], [kind for kind in kinds if kind not in kinds[::12]])
    outcomes = run_inputs([Input(kind=kind, number=0) for kind in kinds])
    assert [outcome.line() for outcome in outcomes if outcome.problems] == []
