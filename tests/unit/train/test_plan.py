from __future__ import annotations

from typing import Any

import pytest
from cases import each_case

from hpcpace.core.errors import UsageError
from hpcpace.train.plan import plan_training
from hpcpace.train.settings import TrainConfig


@each_case("mesh", ["dp=4", "dp=2,pp=2", "pp=4", "pp=3,tp=4", "dp=2,pp=3,tp=2"])
def test_credited_samples_add_up_to_the_global_batch(mesh: str) -> None:
    num_ranks = {"dp=4": 4, "dp=2,pp=2": 4, "pp=4": 4}.get(mesh, 12)
    plan = plan_training(TrainConfig(mesh=mesh, seq_len=127), num_ranks)
    credited = [plan.credited_samples(plan.mesh.coordinates(rank)) for rank in range(num_ranks)]
    assert sum(credited) == plan.samples_per_step == 8 * 127


def test_replicas_share_the_batch_out() -> None:
    plan = plan_training(TrainConfig(mesh="dp=2,pp=2"), 4)
    assert [plan.rows(plan.mesh.coordinates(rank)) for rank in range(4)] == [slice(0, 4)] * 2 + [slice(4, 8)] * 2


def test_microbatches_count_only_in_a_pipeline() -> None:
    assert plan_training(TrainConfig(batch_size=3, microbatches=2), 3).sequences_per_replica == 1


def test_the_sequence_is_as_long_as_the_context_by_default() -> None:
    assert plan_training(TrainConfig(preset="small"), 1).seq_len == 1024


def test_images_are_credited_to_the_replica_that_trains_them() -> None:
    plan = plan_training(TrainConfig(model="resnet18", batch_size=64), 4)
    assert plan.samples_unit == "images"
    assert [plan.credited_samples(plan.mesh.coordinates(rank)) for rank in range(4)] == [16] * 4


@each_case(
    ("settings", "num_ranks", "seen"),
    [
        ({"mesh": "dp=3"}, 4, "needs 3 ranks, but the job has 4"),
        ({"mesh": "pp=5", "microbatches": 8}, 5, "layers"),
        ({"mesh": "tp=3"}, 3, "heads"),
        ({"batch_size": 7}, 2, "use --batch-size 8"),
        ({"mesh": "pp=4", "microbatches": 2}, 4, "--microbatches 4 or more"),
        ({"mesh": "dp=2,pp=2", "batch_size": 6}, 4, "use --batch-size 8"),
        ({"seq_len": 129}, 1, "at most 128"),
        ({"inject": ("rank=4,size=10%",)}, 4, "ranks are 0 to 3"),
        ({"inject": ("nonsense",)}, 1, "write rank=N"),
        ({"model": "resnet18", "mesh": "pp=2"}, 2, "data parallelism only"),
        ({"model": "resnet18", "batch_size": 9}, 2, "use --batch-size 10"),
    ],
)
def test_refuses_settings_that_do_not_fit(settings: dict[str, Any], num_ranks: int, seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_training(TrainConfig(**settings), num_ranks)
    assert seen in str(caught.value)
