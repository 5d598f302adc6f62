from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import each_case
from numpy.typing import NDArray

from hpcpace.core.errors import ConfigError
from hpcpace.train.plan import TrainPlan, plan_training
from hpcpace.train.settings import Mesh, TrainConfig
from library.volume import (
    LinkVolume,
    Message,
    Operation,
    PacketOverhead,
    averaging_operations,
    link_volumes,
    loss_operations,
    messages,
    parameter_sizes,
    run_operations,
    startup_operations,
    step_operations,
    wire_matrix,
)

TINY_PARAMETERS = 842_496
HIDDEN_BYTES = 8 * 128 * 128 * 4
"""Hidden state of preset tiny: 8 sequences of 128 tokens, 128 wide, in float32."""


def planned(mesh: str, num_ranks: int, **settings: Any) -> TrainPlan:
    return plan_training(TrainConfig(mesh=mesh, **settings), num_ranks)


def payload_matrix(counts: Counter[Message], num_ranks: int) -> NDArray[np.int64]:
    """Return the bytes of tensors that each rank (row) sends to each other one: int64, (num_ranks, num_ranks)."""
    matrix = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for (source, destination, size), count in counts.items():
        matrix[source, destination] += size * count
    return matrix


def sent(operations: list[Operation], num_ranks: int) -> np.ndarray:
    return payload_matrix(messages(operations), num_ranks)


def all_reduce(size_bytes: int, num_ranks: int, itemsize: int = 4) -> Operation:
    ranks = tuple(range(num_ranks))
    return Operation(kind="all_reduce", cause="test", ranks=ranks, size_bytes=size_bytes, itemsize=itemsize)


@each_case("num_ranks", [2, 3, 4, 7])
@each_case("num_items", [1, 5, 10, 1000, 262_144, 3_000_001])
def test_an_all_reduce_moves_all_but_one_share_twice(num_ranks: int, num_items: int) -> None:
    size_bytes = 4 * num_items
    matrix = sent([all_reduce(size_bytes, num_ranks)], num_ranks)
    assert matrix.sum() == 2 * (num_ranks - 1) * size_bytes


def test_each_rank_sends_to_the_one_before_it_in_an_all_reduce() -> None:
    matrix = sent([all_reduce(4096, 4)], 4)
    neighbours = np.roll(np.eye(4, dtype=np.int64), -1, axis=1)
    assert (matrix == 2 * 3 * 1024 * neighbours).all()


def test_segments_of_an_all_reduce_are_at_least_two_a_rank_and_at_most_one_mebibyte() -> None:
    assert messages([all_reduce(1000, 2)]) == Counter({(0, 1, 252): 3, (0, 1, 244): 1, (1, 0, 252): 3, (1, 0, 244): 1})
    sizes = {size for _, _, size in messages([all_reduce(100_000_000, 2)])}
    assert 900_000 < max(sizes) <= 1024 * 1024


def test_a_broadcast_goes_out_as_a_tree() -> None:
    operation = Operation(kind="broadcast", cause="test", ranks=(4, 3, 2, 1, 0), size_bytes=10, itemsize=1)
    assert set(messages([operation])) == {(4, 3, 10), (4, 2, 10), (3, 1, 10), (4, 0, 10)}


def test_a_single_rank_sends_nothing() -> None:
    assert run_operations(planned("", 1)) == []


@each_case("mesh", [Mesh(), Mesh(pp=3), Mesh(tp=4), Mesh(pp=2, tp=2), Mesh(dp=2, pp=4)])
@each_case("preset", ["tiny", "small"])
def test_all_ranks_together_hold_the_model(mesh: Mesh, preset: str) -> None:
    plan = planned(str(mesh), mesh.size, preset=preset)
    shape = plan.shape
    slices = [sum(parameter_sizes(plan, Mesh(dp=0, pp=pp, tp=tp))) for pp in range(mesh.pp) for tp in range(mesh.tp)]
    tied_again = shape.vocabulary * shape.width if mesh.pp > 1 else 0
    replicated = shape.context + shape.num_layers * 6 + 2  # position embedding, norms and the biases behind a sum
    expected = shape.num_parameters + tied_again + (mesh.tp - 1) * replicated * shape.width
    assert sum(slices) == expected


@each_case(("stage", "num_stages"), [(0, 1), (0, 3), (1, 3), (2, 3)])
def test_parameters_are_those_of_the_model(stage: int, num_stages: int) -> None:
    torch = pytest.importorskip("torch")
    from hpcpace.train.models import GPT2

    plan = planned(f"pp={num_stages}", num_stages)
    with torch.device("meta"):
        model = GPT2(plan.shape, stage=stage, num_stages=num_stages)
    assert parameter_sizes(plan, Mesh(dp=0, pp=stage, tp=0)) == [p.numel() for p in model.parameters()]


@each_case(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 4), ("float64", 8)])
def test_data_parallelism_adds_up_all_gradients_in_two_buckets(dtype: str, itemsize: int) -> None:
    operations = step_operations(planned("dp=4", 4, dtype=dtype))
    assert {(o.kind, o.cause, o.ranks) for o in operations} == {("all_reduce", "gradients", (0, 1, 2, 3))}
    assert sum(o.size_bytes for o in operations) == TINY_PARAMETERS * itemsize
    # The first bucket is closed by the parameter with which it reaches 1 MiB.
    assert len(operations) == 2
    assert operations[0].size_bytes > 1024 * 1024


def test_replicas_of_a_pipeline_add_up_each_stage_for_itself() -> None:
    operations = [o for o in step_operations(planned("dp=2,pp=2", 4)) if o.cause == "gradients"]
    assert {o.ranks for o in operations} == {(0, 2), (1, 3)}


def test_a_pipeline_sends_microbatches_to_neighbours_only() -> None:
    operations = [o for o in step_operations(planned("pp=4", 4)) if o.cause != "tied weight"]
    matrix = sent(operations, 4)
    # What a step sends over a cut is the whole batch, however many microbatches it comes in.
    assert (matrix == HIDDEN_BYTES * (np.eye(4, k=1) + np.eye(4, k=-1))).all()
    assert {o.count for o in operations} == {4}


def test_more_microbatches_are_more_messages_of_the_same_volume() -> None:
    few, many = (messages(step_operations(planned("pp=2", 2, microbatches=m))) for m in (2, 8))
    assert (payload_matrix(few, 2) == payload_matrix(many, 2)).all()
    assert many.total() == few.total() + 2 * 6


def test_the_ends_of_a_pipeline_add_up_the_tied_weight() -> None:
    tied = [o for o in step_operations(planned("pp=4", 4)) if o.cause == "tied weight"]
    assert [(o.kind, o.ranks, o.size_bytes) for o in tied] == [("all_reduce", (0, 3), 256 * 128 * 4)]


def test_tensor_parallelism_adds_up_four_times_a_layer_and_at_both_ends() -> None:
    hidden, loss = step_operations(planned("tp=2", 2))
    assert (hidden.size_bytes, hidden.count) == (HIDDEN_BYTES, 4 * 4 + 2)
    assert (loss.size_bytes, loss.count) == (8 * 128 * 4, 3)


def test_the_loss_over_a_cut_vocabulary_is_never_narrower_than_float32() -> None:
    hidden, _, loss = step_operations(planned("tp=2", 2, dtype="bfloat16"))
    assert (hidden.size_bytes, loss.size_bytes) == (HIDDEN_BYTES // 2, 8 * 128 * 4)


def test_bfloat16_halves_activations_but_what_is_looked_up() -> None:
    hidden, looked_up, _ = step_operations(planned("tp=2", 2, dtype="bfloat16"))
    assert (hidden.size_bytes, hidden.count) == (HIDDEN_BYTES // 2, 4 * 4 + 1)
    assert (looked_up.size_bytes, looked_up.count) == (HIDDEN_BYTES, 1)


def test_bfloat16_halves_what_stages_send_but_not_the_tied_weight() -> None:
    found = {o.cause: (o.size_bytes, o.itemsize) for o in step_operations(planned("pp=2", 2, dtype="bfloat16"))}
    sends = (HIDDEN_BYTES // 4 // 2, 2)
    assert found == {"activations": sends, "activation gradients": sends, "tied weight": (256 * 128 * 4, 4)}


def test_bfloat16_halves_the_gathered_parameters_of_a_shared_out_model_but_not_its_gradients() -> None:
    operations = step_operations(planned("dp=4", 4, zero=3, dtype="bfloat16"))
    gathered = [o.size_bytes for o in operations if o.kind == "all_gather"]
    reduced = [o.size_bytes for o in operations if o.kind == "reduce_scatter"]
    assert (sum(gathered), sum(reduced)) == (2 * TINY_PARAMETERS, 4 * TINY_PARAMETERS)
    lookup = [o for o in step_operations(planned("dp=2,tp=2", 4, zero=3, dtype="bf16")) if o.cause[:6] == "tensor"]
    assert {o.itemsize for o in lookup} == {2}


def test_stages_cut_by_tensor_parallelism_add_up_for_each_microbatch() -> None:
    operations = step_operations(planned("pp=2,tp=2", 4))
    hidden = {o.ranks: (o.size_bytes, o.count) for o in operations if o.cause == "tensor parallelism"}
    # Two layers a stage, and the embedding or the head.
    assert hidden == {(0, 1): (HIDDEN_BYTES // 4, 4 * 9), (2, 3): (HIDDEN_BYTES // 4, 4 * 9)}
    assert {o.ranks for o in operations if o.kind == "send"} == {(0, 2), (2, 0), (1, 3), (3, 1)}


def test_replicas_start_from_the_parameters_of_the_first() -> None:
    matrix = sent(startup_operations(planned("dp=4", 4)), 4)
    assert matrix.sum() == 3 * 4 * TINY_PARAMETERS
    assert matrix[0].sum() == 2 * 4 * TINY_PARAMETERS


@each_case(("steps", "log_every", "counts"), [(40, 10, {80: 4}), (25, 10, {80: 2, 40: 1}), (5, 10, {40: 1})])
def test_losses_travel_together(steps: int, log_every: int, counts: dict[int, int]) -> None:
    operations = loss_operations(planned("dp=2", 2, steps=steps, log_every=log_every))
    assert {o.size_bytes: o.count for o in operations} == counts


def test_a_run_is_its_start_its_steps_and_its_losses() -> None:
    plan = planned("dp=2,pp=2", 4, steps=30)
    whole = sent(run_operations(plan), 4)
    parts = sent(startup_operations(plan), 4) + 30 * sent(step_operations(plan), 4) + sent(loss_operations(plan), 4)
    assert (whole == parts).all()


@each_case("num_ranks", [2, 3, 7])
@each_case(("kind", "factor"), [("all_gather", 1), ("all_to_all", 1), ("reduce_scatter", 2)])
def test_collectives_move_all_but_one_share(kind: str, factor: int, num_ranks: int) -> None:
    size = num_ranks * 4004
    operation = Operation(kind=kind, cause="test", ranks=tuple(range(num_ranks)), size_bytes=size, itemsize=4)
    # gloo makes a reduce-scatter of an all-reduce, which moves everything twice.
    assert sent([operation], num_ranks).sum() == factor * (num_ranks - 1) * size


def test_an_all_gather_hands_shares_on_in_two_halves() -> None:
    operation = Operation(kind="all_gather", cause="test", ranks=(5, 3, 1), size_bytes=303, itemsize=1)
    assert messages([operation]) == Counter({(a, b, size): 2 for a, b in ((5, 3), (3, 1), (1, 5)) for size in (50, 51)})


def test_an_all_to_all_goes_straight_to_each_member() -> None:
    operation = Operation(kind="all_to_all", cause="test", ranks=(0, 2, 1), size_bytes=30, itemsize=1)
    assert set(messages([operation])) == {(a, b, 10) for a in range(3) for b in range(3) if a != b}


def test_interleaved_stages_send_round_the_ring_of_ranks() -> None:
    operations = [o for o in step_operations(planned("pp=2", 2, schedule="interleaved")) if o.kind == "send"]
    assert [o.ranks for o in operations if o.cause == "activations"] == [(0, 1), (1, 0), (0, 1)]
    assert sent(operations, 2).sum() == 2 * 3 * HIDDEN_BYTES


def test_the_order_of_microbatches_changes_no_byte() -> None:
    one, other = (sent(run_operations(planned("pp=4", 4, schedule=s)), 4) for s in ("1f1b", "gpipe"))
    assert (one == other).all()


def test_a_shared_out_optimizer_sends_each_parameter_from_one_replica() -> None:
    operations = [o for o in step_operations(planned("dp=4", 4, zero=1)) if o.kind == "broadcast"]
    assert [o.ranks[0] for o in operations] == [0, 1, 2, 3]
    assert sum(o.size_bytes for o in operations) == 4 * TINY_PARAMETERS
    assert max(o.size_bytes for o in operations) < 1.1 * min(o.size_bytes for o in operations)


def test_a_shared_out_model_is_gathered_twice_and_reduced_once() -> None:
    operations = step_operations(planned("dp=4", 4, zero=3))
    units = [o.size_bytes for o in operations if o.kind == "reduce_scatter"]
    assert (len(units), sum(units)) == (5, 4 * TINY_PARAMETERS)
    gathers = {o.size_bytes: o.count for o in operations if o.kind == "all_gather"}
    # What is in no block, the first unit, is kept from forward to backward.
    assert gathers == {units[0]: 1, units[1]: 2}
    assert startup_operations(planned("dp=4", 4, zero=3)) == []


def test_a_shared_out_pipeline_gathers_once_for_all_microbatches() -> None:
    operations = step_operations(planned("dp=2,pp=2", 4, zero=3))
    assert {o.count for o in operations if o.kind == "all_gather"} == {1}


def test_shares_of_parameters_that_do_not_divide_are_filled_up() -> None:
    operations = step_operations(planned("dp=3", 3, zero=3, batch_size=9))
    first = next(o for o in operations if o.kind == "all_gather")
    assert first.size_bytes == 4 * (258 * 128 + 129 * 128 + 2 * 129)


@each_case(("compress", "share"), [("fp16", 1 / 2), ("bf16", 1 / 2), ("int8", 1 / 4), ("powersgd", 1 / 10)])
def test_compression_makes_what_replicas_send_smaller(compress: str, share: float) -> None:
    plain, packed = (sent(step_operations(planned("dp=4", 4, compress=c)), 4).sum() for c in ("none", compress))
    assert share <= packed / plain + 0.06
    assert packed / plain < 1.04 * share


def test_powersgd_begins_after_two_plain_steps() -> None:
    plan = planned("dp=2", 2, compress="powersgd", steps=10)
    plain = step_operations(planned("dp=2", 2, overlap=False))
    whole = [*startup_operations(plan), *plain, *plain, *step_operations(plan) * 8, *loss_operations(plan)]
    assert (sent(run_operations(plan), 2) == sent(whole, 2)).all()


def test_local_sgd_sends_all_parameters_now_and_then() -> None:
    plan = planned("dp=2", 2, sync_every=4, steps=11)
    (averaging,) = averaging_operations(plan)
    assert averaging.size_bytes == 4 * TINY_PARAMETERS
    assert step_operations(plan) == []
    assert startup_operations(plan) == []
    assert sum(o.count for o in run_operations(plan) if o.cause == "averaged parameters") == 2


@pytest.mark.parametrize(("settings", "num_buckets"), [({"bucket_mb": 0.5}, 7), ({"overlap": False}, 1)])
def test_buckets_are_as_large_as_asked_for(settings: dict[str, Any], num_buckets: int) -> None:
    operations = step_operations(planned("dp=2", 2, **settings))
    assert sum(o.size_bytes for o in operations) == 4 * TINY_PARAMETERS
    assert len(operations) == num_buckets


def test_within_hosts_first_what_goes_between_them_is_that_of_one_replica_a_host() -> None:
    plan = replace(planned("dp=4", 4, hierarchical=True), ranks_per_host=2)
    hosts = ["n1", "n1", "n2", "n2"]
    found = link_volumes(sent(step_operations(plan), 4), hosts)["n1"]
    ring = link_volumes(sent(step_operations(planned("dp=4", 4)), 4), hosts)["n1"]
    assert found.tx_bytes == pytest.approx(4 * TINY_PARAMETERS, rel=0.001)
    assert ring.tx_bytes == pytest.approx(1.5 * 4 * TINY_PARAMETERS, rel=0.001)


@pytest.mark.parametrize("ranks_per_host", [1, 4])
def test_one_host_or_one_replica_a_host_is_the_plain_average(ranks_per_host: int) -> None:
    plan = replace(planned("dp=4", 4, hierarchical=True), ranks_per_host=ranks_per_host)
    assert step_operations(plan) == step_operations(planned("dp=4", 4))


def test_what_depends_on_unknown_hosts_is_refused() -> None:
    with pytest.raises(ConfigError, match="say how many each host has"):
        step_operations(planned("dp=4", 4, hierarchical=True))


def test_a_model_without_formula_is_refused() -> None:
    with pytest.raises(ConfigError, match="volume of resnet18 has no formula"):
        step_operations(planned("dp=2", 2, model="resnet18"))


def test_a_message_is_announced_granted_and_sent_behind_a_header() -> None:
    matrix = wire_matrix(Counter({(0, 1, 100): 3}), 2, PacketOverhead())
    # 66 bytes of Ethernet, IP and TCP and 48 of gloo, with the announcement, the grant and the message.
    assert matrix.tolist() == [[0, 3 * (66 + 48 + 66 + 48 + 100)], [3 * (66 + 48), 0]]


@pytest.mark.parametrize(("acknowledged_bytes", "num_acks"), [(65536, 2), (2 * 1448, 50)])
def test_segments_have_headers_and_are_acknowledged(acknowledged_bytes: int, num_acks: int) -> None:
    size = 100 * 1448 - 48
    matrix = wire_matrix(Counter({(0, 1, size): 1}), 2, PacketOverhead(acknowledged_bytes=acknowledged_bytes))
    assert matrix[0, 1] == 114 + 100 * 1514
    assert matrix[1, 0] == 114 + num_acks * 66


def test_a_larger_mtu_needs_fewer_headers() -> None:
    size = 100 * 8948 - 48
    assert wire_matrix(Counter({(0, 1, size): 1}), 2, PacketOverhead(mtu=9000))[0, 1] == 114 + 100 * 9014


WIRE = np.array([[0, 1, 2, 4], [8, 0, 16, 32], [64, 128, 0, 256], [512, 1024, 2048, 0]], dtype=np.int64)


def test_a_host_bears_what_its_ranks_exchange_with_others() -> None:
    volumes = link_volumes(WIRE, ["a", "a", "b", "b"])
    out, back = 2 + 4 + 16 + 32, 64 + 128 + 512 + 1024
    assert volumes == {"a": LinkVolume(tx_bytes=out, rx_bytes=back), "b": LinkVolume(tx_bytes=back, rx_bytes=out)}


def test_an_uplink_bears_what_leaves_its_leaf() -> None:
    leaves = {"a": "left", "b": "left", "c": "right", "d": "right"}
    volumes = link_volumes(WIRE, ["a", "c", "b", "d"], leaves)
    assert volumes["left"] == LinkVolume(tx_bytes=1 + 4 + 128 + 256, rx_bytes=8 + 512 + 16 + 2048)
    assert volumes["right"] == LinkVolume(tx_bytes=8 + 512 + 16 + 2048, rx_bytes=1 + 4 + 128 + 256)
    assert volumes["a"] == LinkVolume(tx_bytes=7, rx_bytes=8 + 64 + 512)


@each_case(
    ("hosts", "leaves", "seen"),
    [
        (["a", "b"], None, "2 hosts for 4 ranks"),
        (["a", "b", "c", "d"], {"a": "l", "c": "l", "d": "l"}, "no leaf is given for b"),
        (["a", "b", "c", "d"], dict.fromkeys("abcd", "b"), "b is both a host and a leaf"),
    ],
)
def test_refuses_a_placement_that_does_not_fit(hosts: list[str], leaves: dict[str, str] | None, seen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        link_volumes(WIRE, hosts, leaves)
    assert seen in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "seen"), [({"mtu": 52}, "mtu of 52"), ({"acknowledged_bytes": 1000}, "at least 1448")]
)
def test_refuses_framing_that_carries_nothing(settings: dict[str, int], seen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PacketOverhead(**settings)
    assert seen in str(caught.value)
