"""Brackets and quotes of JSON texts."""

from __future__ import annotations

import json

from cases import each_case

from hpcpace.runs.imports.input_files import JsonStructure


@each_case(
    ("text", "ends", "stop"),
    [
        ("", [], -1),
        ("1, 2", [], -1),
        ("{}, []", [2, 6], -1),
        ('{"a": [1, {}]}, {"b', [14], -1),
        ('{"}, {": 1}]', [11], 11),
        ('{"\\"}": 1}]', [10], 10),
        ('{"\\\\"}, "]"', [6], -1),
        ("]", [], 0),
        ("{}] {} ]", [2], 2),
        ("{}, {", [2], -1),
        ('{}, "\\', [2], -1),
    ],
)
def test_values_end_with_their_last_bracket_outside_of_texts(text: str, ends: list[int], stop: int) -> None:
    found = JsonStructure(text.encode())
    assert (found.ends.tolist(), found.stop) == (ends, stop)


@each_case("text", ['{"a": 1}', '{"b": {"a": 1}}', '{"b": "\\"a\\": 1"}', '{"b": "x\\\\", "a": 1}', '["a"]'])
def test_a_member_is_of_the_outermost_object_alone(text: str) -> None:
    at = text.index('"a')
    is_member = "a" in content if isinstance(content := json.loads(text), dict) else True
    assert JsonStructure(text.encode()).first_member([at]) == (0 if is_member else -1)
