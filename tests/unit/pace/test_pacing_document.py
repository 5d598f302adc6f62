"""docs/pacing.md names each setting with its present default, each policy, and each field of trial.json."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from cases import each_case

from hpcpace.pace.pacer import PacingRecord
from hpcpace.pace.settings import POLICIES, PaceSettings

TEXT = (Path(__file__).parents[3] / "docs" / "pacing.md").read_text()


def _rows(first: str) -> dict[str, list[str]]:
    table = TEXT.partition(f"| {first} |")[2].partition("\n\n")[0].splitlines()[2:]
    lines = [row for row in table if row.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in lines]
    return {name: row for row in cells for name in re.findall(r"`([\w-]+)`", row[0])}


def test_each_setting_is_documented_and_no_other() -> None:
    assert set(_rows("setting")) == {field.name for field in dataclasses.fields(PaceSettings)}


@each_case("field", dataclasses.fields(PaceSettings), ids=lambda field: field.name)
def test_a_setting_is_documented_with_its_present_default(field: dataclasses.Field[object]) -> None:
    default = _rows("setting")[field.name][2]
    shown = (
        str(field.default).lower()
        if isinstance(field.default, bool)
        else f"{field.default:g}"
        if isinstance(field.default, float)
        else str(field.default)
    )
    assert shown in re.split(r"[,:] ?", default)


def test_each_policy_is_documented_and_no_other() -> None:
    assert set(_rows("policy")) == set(POLICIES)


def test_each_field_of_trial_json_is_documented_and_no_other() -> None:
    assert set(_rows("field")) | {"schema"} == set(PacingRecord(policy="slack").to_json())
