from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.errors import ConfigError, MeshError
from hpcpace.train.plan import (
    CONFLICTS,
    FEATURES,
    NEEDS,
    features,
    parallelism_facts,
    plan_training,
    refusal,
)
from hpcpace.train.settings import DIMENSIONS, Mesh, TrainConfig

CLI_DOC = Path(__file__).parents[3] / "docs" / "cli.md"


def support_matrix() -> str:
    """Return all pairs of features as a Markdown table, with the reason of each that is refused below it."""
    reasons = list(dict.fromkeys([*(n.reason for n in NEEDS), *(c.reason for c in CONFLICTS)]))
    cells = {frozenset((c.first, c.second)): str(reasons.index(c.reason) + 1) for c in CONFLICTS}
    needs = {n.feature: f"{n.dimension} ({reasons.index(n.reason) + 1})" for n in NEEDS}
    rows = [f for f in FEATURES if f not in DIMENSIONS]
    columns = [f for f in rows if f in {c.second for c in CONFLICTS} | {c.first for c in CONFLICTS}]
    lines = [f"| | needs | {' | '.join(f'`{c}`' for c in columns)} |", "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        pairs = [_cell(row, column, cells) for column in columns]
        lines.append(f"| `{row}` | {needs.get(row, '')} | {' | '.join(pairs)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))])


def _cell(row: str, column: str, cells: dict[frozenset[str], str]) -> str:
    same_option = row.split()[0] == column.split()[0]
    return "-" if same_option else cells.get(frozenset((row, column)), "yes")


def test_the_table_in_the_documents_is_made_of_the_rules() -> None:
    assert support_matrix() in CLI_DOC.read_text()


def test_rules_are_about_features_that_exist() -> None:
    named = {need.feature for need in NEEDS} | {end for c in CONFLICTS for end in (c.first, c.second)}
    assert named <= set(FEATURES)
    assert len({frozenset((c.first, c.second)) for c in CONFLICTS}) == len(CONFLICTS)


@each_case(
    ("settings", "expected"),
    [
        ({}, set()),
        ({"zero": 3, "compile": True}, {"--zero 3", "--compile"}),
        ({"schedule": "gpipe", "compress": "int8"}, {"--schedule gpipe", "--compress int8"}),
        ({"sync_every": 2, "bucket_mb": 1.0}, {"--sync-every", "--bucket-mb"}),
        ({"overlap": False, "dtype": "bfloat16"}, {"--no-overlap", "--dtype bfloat16"}),
    ],
)
def test_settings_that_are_no_default_are_features(settings: dict[str, object], expected: set[str]) -> None:
    assert features(TrainConfig(**settings), Mesh(dp=2)) == expected | {"dp"}


def test_every_option_but_compile_is_refused_on_a_single_rank() -> None:
    refused = [f for f in FEATURES if refusal(frozenset({f}))]
    assert refused == [f for f in FEATURES if f not in ("dp", "pp", "tp", "--compile", "--dtype bfloat16")]


def test_each_feature_is_supported_where_the_mesh_has_all_dimensions() -> None:
    assert [f for f in FEATURES if refusal(frozenset({"dp", "pp", "tp", f}))] == []


def test_a_refusal_names_both_ends_and_the_reason() -> None:
    for first, second in itertools.combinations(FEATURES, 2):
        reason = refusal(frozenset({"dp", "pp", "tp", first, second}))
        if reason is not None:
            assert first in reason
            assert second in reason
            assert "drop one" in reason


@each_case(
    ("settings", "num_ranks", "seen"),
    [
        (
            {"zero": 1},
            1,
            "--zero 1 splits state between replicas, but there is only one: use a mesh with dp=2",
        ),
        ({"mesh": "tp=2", "compress": "fp16"}, 2, "--compress fp16 concerns messages between replicas"),
        ({"schedule": "gpipe"}, 2, "--schedule gpipe orders the stages of a pipeline, but there is none"),
        ({"zero": 3, "compress": "int8"}, 2, "--zero 3 and --compress int8 cannot be combined: fully_shard averages"),
        ({"zero": 1, "sync_every": 4}, 2, "--zero 1 and --sync-every cannot be combined"),
        ({"compress": "powersgd", "bucket_mb": 5}, 2, "needs one bucket"),
        ({"overlap": False, "bucket_mb": 5}, 2, "a single message has no buckets"),
        ({"hierarchical": True, "compress": "fp16"}, 2, "each has a way of its own to average"),
    ],
)
def test_refuses_what_does_not_go_together(settings: dict[str, object], num_ranks: int, seen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_training(TrainConfig(**settings), num_ranks)
    assert seen in str(caught.value)


@each_case(
    ("settings", "num_ranks", "seen"),
    [
        ({"mesh": "pp=4"}, 4, "8 stages with --schedule interleaved, more than the model has layers (4)"),
        ({"mesh": "pp=2", "microbatches": 5, "batch_size": 10}, 2, "use --microbatches 6"),
        ({"mesh": "pp=2", "microbatches": 1}, 2, "--microbatches 2 or more"),
    ],
)
def test_refuses_stages_that_cannot_be_interleaved(settings: dict[str, object], num_ranks: int, seen: str) -> None:
    with pytest.raises(MeshError) as caught:
        plan_training(TrainConfig(**settings, schedule="interleaved"), num_ranks)
    assert seen in str(caught.value)


@each_case(
    ("settings", "seen"),
    [
        ({"zero": 2}, "train.zero is 2: choose one of 0, 1, 3"),
        ({"schedule": "zb"}, "train.schedule"),
        ({"compress": "zip"}, "none, fp16, bf16, int8, powersgd"),
        ({"sync_every": 0}, "train.sync_every"),
        ({"outer_learning_rate": 0.7}, "train.outer_learning_rate"),
        ({"bucket_mb": 0.0}, "train.bucket_mb"),
    ],
)
def test_refuses_a_setting_that_does_not_exist(settings: dict[str, object], seen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**settings)
    assert seen in str(caught.value)


def test_a_run_records_how_its_model_is_shared_out() -> None:
    settings = TrainConfig(mesh="dp=2,pp=2", schedule="interleaved", zero=1, compress="int8")
    facts = parallelism_facts(plan_training(settings, 4))
    assert facts["mesh"] == {"dp": 2, "pp": 2, "tp": 1}
    assert (facts["schedule"], facts["num_stages"], facts["microbatches"]) == ("interleaved", 4, 4)
    assert (facts["zero"], facts["compress"], facts["sync_every"]) == (1, "int8", 1)


def test_a_run_records_nothing_of_what_its_mesh_does_not_have() -> None:
    facts = parallelism_facts(plan_training(TrainConfig(mesh="tp=2"), 2))
    without_meaning = {name for name, value in facts.items() if value is None}
    assert without_meaning == {
        *(
            "schedule",
            "num_stages",
            "microbatches",
            "compress",
            "sync_every",
            "outer_learning_rate",
            "bucket_mb",
            "overlap",
        ),
        "hierarchical",
    }


def test_gpipe_takes_fewer_microbatches_than_stages() -> None:
    assert plan_training(TrainConfig(mesh="pp=4", schedule="gpipe", microbatches=2), 4).num_stages == 4


def test_interleaved_stages_are_dealt_out_in_turn() -> None:
    plan = plan_training(TrainConfig(mesh="pp=2", schedule="interleaved"), 2)
    assert [plan.stages_of(Mesh(dp=0, pp=pp, tp=0)) for pp in range(2)] == [(0, 2), (1, 3)]
