"""Steps of layouts: what follows by hand, and what others measured."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from experiments.planning import (
    SELENE,
    MegatronSteps,
    SeleneRow,
    fit_nano,
    in_order,
    nano_job,
    nano_layout,
    nano_predictions,
)
from hpcpace.core.errors import ConfigError
from hpcpace.planning.engine import Job
from hpcpace.planning.files import read_machine
from hpcpace.planning.layouts import Layouts, Recompute
from hpcpace.planning.machine import Machine
from hpcpace.planning.model import PRESETS, MeasuredModel, preset
from hpcpace.planning.steps import TransformerSteps, steps_of
from hpcpace.train.plan import plan_training
from hpcpace.train.settings import GPT2_PRESETS, TrainConfig
from library.volume import PacketOverhead, link_volumes, messages, step_operations, wire_matrix

GPT2 = preset("gpt2-small")
assert GPT2 is not None
MACHINE = Machine(
    name="m",
    gpus_per_node=2,
    memory_bytes=80e9,
    flops=1e14,
    memory_rate=1e12,
    node_rate=1e10,
    network_rate=1e9,
    is_of_rings=True,
)
PLAIN = Job(model=GPT2, machine=MACHINE)
MEASURED = MeasuredModel(name="mine", gradient_bytes=1e9, forward_s=0.1, backward_s=0.2, update_s=0.05)


def test_presets_have_the_parameters_of_the_workload() -> None:
    for name in PRESETS:
        model = preset(name)
        assert model is not None
        assert model.num_parameters == GPT2_PRESETS[name.removeprefix("gpt2-")].num_parameters


def test_work_is_six_operations_a_parameter_and_token() -> None:
    """Kaplan et al. 2020: C = 6 N, without attention and embeddings."""
    fast = replace(MACHINE, memory_rate=1e18)
    steps = steps_of(replace(PLAIN, machine=fast), Layouts.of())
    tokens, layers = GPT2.sequence, GPT2.num_layers
    of_layers = 6 * layers * 12 * GPT2.hidden**2 * tokens
    of_attention, of_head = 3 * layers * GPT2.attention_flops, 3 * GPT2.head_flops
    assert steps.compute_s[0] == pytest.approx((of_layers + of_attention + of_head) / fast.flops, rel=1e-5)


def test_full_recomputation_repeats_the_forward_pass_of_layers() -> None:
    none, full = (steps_of(PLAIN, Layouts.of(recompute=one)).compute_s[0] for one in (Recompute.NONE, Recompute.FULL))
    forward_s = steps_of(PLAIN, Layouts.of()).compute_s[0] / 3
    assert none < full < none + forward_s


def _data(servers: int, per_server: int) -> Layouts:
    return Layouts.of(dp=servers * per_server)


def test_a_ring_sends_more_over_a_link_than_sums_on_each_node() -> None:
    gradients = GPT2.num_parameters * 2
    unknown = replace(MACHINE, is_of_rings=False)
    for machine, first, factor in (
        (MACHINE, None, 1.5),
        (unknown, False, 1.5),
        (MACHINE, True, 1.0),
        (unknown, None, 1.5**0.5),
    ):
        sent = steps_of(replace(PLAIN, machine=machine, is_hierarchical=first), _data(2, 2)).network_bytes[0]
        assert sent == pytest.approx(factor * gradients, rel=1e-6), (machine, first)


def test_nothing_leaves_a_node_of_all_ranks() -> None:
    for layout in (_data(1, 2), Layouts.of(tp=2), Layouts.of(pp=2, num_micro=4)):
        assert steps_of(PLAIN, layout).network_bytes.tolist() == [0.0]


@pytest.mark.parametrize(
    ("mesh", "per_node"),
    [
        *(("dp=2", 1), ("dp=4", 2), ("tp=2", 1), ("tp=4", 2), ("pp=2", 1), ("pp=4", 2), ("pp=4", 1)),
        *(("dp=2,pp=2", 2), ("dp=2,tp=2", 2)),
    ],
)
def test_a_node_sends_what_the_reference_workload_does_without_headers(mesh: str, per_node: int) -> None:
    """Beside the count of every frame; the two all-reduces of a step's ends with tensor parallelism are left out."""
    num_ranks = prod(int(part.partition("=")[2]) for part in mesh.split(","))
    settings = TrainConfig(model="gpt2", preset="small", mesh=mesh, batch_size=16, microbatches=4)
    plan = plan_training(settings, num_ranks)
    matrix = wire_matrix(messages(step_operations(plan)), num_ranks, PacketOverhead())
    volumes = link_volumes(matrix, [str(rank // per_node) for rank in range(num_ranks)])
    counted = max(volume.tx_bytes for volume in volumes.values())
    sizes, num_micro = plan.mesh.as_dict(), 4 if plan.mesh.pp > 1 else 1
    layout = Layouts.of(**sizes, micro_batch=16 // plan.mesh.dp // num_micro, num_micro=num_micro, element_bytes=4)
    steps = steps_of(replace(PLAIN, machine=replace(MACHINE, gpus_per_node=per_node)), layout)
    assert 0.91 < steps.network_bytes[0] / counted < 0.97


def test_published_traffic_of_the_nano_cluster_follows() -> None:
    """Bytes a token in both directions, relative to data parallelism at 2x1: docs/results/plan.md."""
    machine, sent = fit_nano().machine, {}
    for place, kind, first in (
        *(("2x1", kind, False) for kind in ("data", "tensor", "pipeline")),
        ("2x2", "data", False),
        ("2x2", "tensor", True),
        ("2x2", "pipeline", False),
    ):
        layout = nano_layout(place, kind, 8)
        steps = steps_of(nano_job(place, machine, is_hierarchical=first), layout)
        sent[place, kind] = float(steps.network_bytes[0] / layout.sequences[0])
    base = sent["2x1", "data"]
    published = {"tensor": 1171.06, "pipeline": 174.26}
    for kind, volume in published.items():
        assert sent["2x1", kind] / base == pytest.approx(volume / 223.40, rel=0.12)
    assert sent["2x2", "data"] / base == pytest.approx(149.17 / 223.40, rel=0.15)
    assert sent["2x2", "tensor"] / base == pytest.approx(1171.79 / 223.40, rel=0.12)


def test_orders_of_the_nano_cluster_are_the_published_ones() -> None:
    rows = nano_predictions(fit_nano())
    for place in ("2x1", "2x2"):
        assert in_order(rows, place, "published") == in_order(rows, place, "predicted")
    off = {(row.place, row.parallelism): row.predicted / row.published - 1 for row in rows}
    assert all(abs(one) < 0.2 for one in off.values()), off


def test_steps_on_512_gpus_follow_from_smaller_ones() -> None:
    machine, steps = read_machine("a100"), MegatronSteps.read()
    rows = np.flatnonzero(steps.num_gpus == 512).tolist()
    measured = steps.measured(rows, machine.machine)
    predicted_s = np.concatenate([steps_of(one.job, one.layouts).step_s for one in measured])
    error = np.abs(predicted_s / steps.step_s[rows] - 1)
    assert len(error) == 68 and error.mean() < 0.1
    assert machine.error is not None and (np.abs(np.log(predicted_s / steps.step_s[rows])) <= machine.error).sum() >= 61


def test_steps_of_another_cluster_are_within_a_tenth() -> None:
    machine = read_machine("a100").machine
    for row in SELENE:
        for is_full, measured_s in ((True, row.full_s), (False, row.selective_s)):
            assert row.steps(machine, is_full=is_full).step_s[0] == pytest.approx(measured_s, rel=0.1), row.name


def test_memory_is_within_a_tenth() -> None:
    for row in SELENE:
        for steps, index in _of_memory(row):
            published = row.kept_gib[0] + row.kept_gib[index]
            assert steps.memory_bytes[0] / (1 << 30) == pytest.approx(published, rel=0.1), row.name


def _of_memory(row: SeleneRow) -> list[tuple[TransformerSteps, int]]:
    machine = read_machine("a100").machine
    plain = row.steps(machine, is_full=True, recompute=Recompute.NONE)
    return [(plain, 1), (row.steps(machine, is_full=False), 2)]


def test_zero_shares_out_state_by_stage() -> None:
    """Rajbhandari et al. 2020, section 3: 16 bytes a parameter, of which 12, 14 and all are shared out."""
    layouts = Layouts.of(dp=4, zero=[0, 1, 2, 3])
    steps = TransformerSteps(PLAIN, layouts, GPT2)
    bytes_each = (steps.state_bytes / steps.stage_parameters).tolist()
    assert bytes_each == [16.0, 4 + 12 / 4, 2 + 14 / 4, 16 / 4]


def test_parameters_are_gathered_after_the_optimizer() -> None:
    """ZeRO 1 hides its sums of gradients behind the backward pass, and not what it gathers after the update."""
    plain, zero = steps_of(PLAIN, Layouts.of(dp=2, zero=[0, 1], micro_batch=16)).exposed_replica_s
    gathers_s = GPT2.num_parameters * 2 / 2 / MACHINE.node_rate
    assert zero - plain == pytest.approx(gathers_s, rel=0.3)


def test_the_last_stage_keeps_its_logits() -> None:
    wide = replace(GPT2, vocabulary=1_000_000)
    steps = steps_of(replace(PLAIN, model=wide), Layouts.of(pp=4, micro_batch=8, num_micro=4, recompute=2))
    assert steps.memory_bytes[0] > 4 * 8 * wide.sequence * wide.vocabulary


def test_exchange_hides_behind_the_backward_pass_but_for_its_last_bucket() -> None:
    shown = [
        steps_of(replace(PLAIN, overlaps=overlaps), _data(1, 2)).exposed_replica_s[0] for overlaps in (True, False)
    ]
    whole = steps_of(PLAIN, _data(1, 2)).replica_s[0]
    assert shown[1] == whole and 0 < shown[0] < whole


def test_the_first_bucket_of_a_backward_pass_is_sent_early() -> None:
    """Of gradients of 3 MiB, the first of them hides behind a backward pass that is long enough, and 2 do not."""
    steps = steps_of(replace(PLAIN, model=replace(MEASURED, gradient_bytes=3.0 * 2**20)), Layouts.of(dp=2))
    assert steps.exposed_replica_s[0] / steps.replica_s[0] == pytest.approx(2 / 3, rel=0.02)


def test_stages_exchange_in_turn_where_backward_passes_end_with_it() -> None:
    """Two stages on hosts of their own, whose replicas share uplinks: one after the other has these for itself."""
    narrow = replace(MACHINE, gpus_per_node=1, oversubscription=8.0, leaf_nodes=2)
    layouts = Layouts.of(dp=2, pp=2, num_micro=4)
    at_once, in_turn = (
        steps_of(replace(PLAIN, machine=narrow, overlaps=False, is_synced_by_stage=is_so), layouts)
        for is_so in (False, True)
    )
    assert in_turn.exposed_replica_s[0] == pytest.approx(at_once.exposed_replica_s[0], rel=0.01)
    alone = [one.job.on(replace(narrow, oversubscription=1.0)) for one in (at_once, in_turn)]
    together_s, in_turn_s = (steps_of(job, layouts).exposed_replica_s[0] for job in alone)
    assert in_turn_s == pytest.approx(2 * together_s)


def test_parts_add_up_to_a_step() -> None:
    layouts = Layouts.of(dp=[1, 2, 4, 1], pp=[1, 2, 1, 4], tp=[2, 1, 1, 2], num_micro=[2, 8, 1, 8], zero=[0, 1, 3, 0])
    for job in (PLAIN, replace(PLAIN, is_dp_inner=True, overlaps=False)):
        steps = steps_of(job, layouts)
        assert np.allclose(sum(steps.parts_s.values()), steps.step_s)


def test_layouts_are_independent_of_each_other() -> None:
    layouts = Layouts.of(dp=[1, 2, 4], pp=[4, 2, 1], num_micro=[8, 4, 1])
    together = steps_of(PLAIN, layouts)
    for index in range(3):
        alone = steps_of(PLAIN, layouts.take(np.array([index])))
        for name in ("step_s", "memory_bytes", "network_bytes"):
            assert getattr(alone, name)[0] == getattr(together, name)[index]


def test_a_traced_model_is_replicated() -> None:
    steps = steps_of(replace(PLAIN, model=MEASURED, overlaps=False), Layouts.of(dp=[1, 4], micro_batch=8))
    ring_s = 2 * 3 / 4 * 1e9 / 1e9 * 1 + 2 * 20e-6
    assert steps.step_s.tolist() == pytest.approx([2.45, 2.45 + ring_s])


def test_a_traced_model_is_not_cut() -> None:
    with pytest.raises(ConfigError, match="mine can only be replicated: name a transformer with --model"):
        steps_of(replace(PLAIN, model=MEASURED), Layouts.of(tp=2))
