from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from hpcpace.observe.collectives.observer import CollectiveObserver, CompiledObserver, observe_blocking_calls
from hpcpace.observe.collectives.operations import operators
from hpcpace.observe.device.clock import DeviceClock
from hpcpace.observe.device.times import DeviceTimes
from hpcpace.trace.schema import ExitKind, Op

pytestmark = pytest.mark.usefixtures("process_group")
Observer = CollectiveObserver | CompiledObserver


@pytest.fixture
def warnings_given() -> list[str]:
    return []


@pytest.fixture
def observer(new_observer: Callable[..., Observer], warnings_given: list[str]) -> Iterator[Observer]:
    observer = new_observer(warnings_given.append)
    observer.install()
    yield observer
    observer.uninstall()
    assert observer.num_failures == 0


def _collectives(observer: Observer, rows: Any) -> list[dict[str, int]]:
    """Return the rows so far; each flush passes on what the compiled layer has."""
    observer.open_collectives()
    collectives: list[dict[str, int]] = rows.collectives
    return collectives


def _tensor(num_elements: int = 4) -> torch.Tensor:
    return torch.ones(num_elements)


CALLS: list[tuple[Callable[[], Any], Op, int]] = [
    (lambda: dist.all_reduce(_tensor()), Op.ALL_REDUCE, 16),
    # Gradients of embeddings: two values and two indices.
    (
        lambda: dist.all_reduce(torch.sparse_coo_tensor([[0, 2]], _tensor(2), (4,), check_invariants=True)),
        Op.ALL_REDUCE,
        24,
    ),
    (lambda: dist.all_reduce_coalesced([_tensor(), _tensor(2)]), Op.ALL_REDUCE, 24),
    (lambda: dist.all_gather([_tensor()], _tensor()), Op.ALL_GATHER, 16),
    (lambda: dist.all_gather_into_tensor(_tensor(), _tensor()), Op.ALL_GATHER, 16),
    (lambda: dist.reduce_scatter(_tensor(), [_tensor()]), Op.REDUCE_SCATTER, 16),
    (lambda: dist.reduce_scatter_tensor(_tensor(), _tensor()), Op.REDUCE_SCATTER, 16),
    (lambda: dist.broadcast(_tensor(), 0), Op.BROADCAST, 16),
    (lambda: dist.reduce(_tensor(), 0), Op.REDUCE, 16),
    (lambda: dist.gather(_tensor(), [_tensor()], 0), Op.GATHER, 16),
    (lambda: dist.scatter(_tensor(), [_tensor()], 0), Op.SCATTER, 16),
    (lambda: dist.all_to_all_single(_tensor(), _tensor()), Op.ALL_TO_ALL, 16),
    (lambda: dist.barrier(), Op.BARRIER, 0),
    (lambda: dist.monitored_barrier(), Op.BARRIER, 0),
]


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*barrier.*:UserWarning")
@pytest.mark.parametrize(("call", "op", "size_bytes"), CALLS)
def test_records_kind_and_size_of_every_operation(
    observer: Observer, rows: Any, call: Callable[[], Any], op: Op, size_bytes: int
) -> None:
    call()
    assert [(row["op"], row["bytes"]) for row in _collectives(observer, rows)] == [(op, size_bytes)]


def test_describes_every_operator_that_torch_has_but_the_check_for_nan() -> None:
    known = {f"c10d::{operator.name}" for operator in operators()}
    all_names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")}
    assert all_names - known <= {"c10d::check_for_nan"}  # torch 2.11 has none


def test_a_blocking_call_is_blocked_for_its_whole_wait(observer: Observer, rows: Any) -> None:
    dist.all_reduce(_tensor())
    (row,) = _collectives(observer, rows)
    assert row["enter_ns"] < row["exit_ns"]
    assert 0 < row["blocked_ns"] <= row["exit_ns"] - row["enter_ns"]
    assert row["exit_kind"] == ExitKind.WAIT


def test_dynamo_finds_nothing_of_ours_around_a_broadcast_that_it_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(dist, "_broadcast_coalesced", lambda: None)

    def forward(x: torch.Tensor) -> torch.Tensor:
        dist._broadcast_coalesced()
        return x + 1

    with ExitStack() as cleanup:
        observe_blocking_calls(cleanup, lambda: calls.append(False), calls.append)
        torch.compile(forward, backend="eager", fullgraph=True)(_tensor())
        assert calls == []
        forward(_tensor())
    assert calls == [False, True]


def test_an_asynchronous_call_is_recorded_once_whoever_sees_its_end(observer: Observer, rows: Any) -> None:
    for _ in range(50):
        dist.all_reduce(_tensor(), async_op=True).wait()
    assert [row["seq"] for row in _collectives(observer, rows)] == list(range(50))


def test_a_call_that_nobody_waits_for_is_recorded_by_its_completion(observer: Observer, rows: Any) -> None:
    work = dist.all_reduce(_tensor(), async_op=True)
    while not work.is_completed() or observer.has_open:
        pass
    (row,) = _collectives(observer, rows)
    assert row["exit_kind"] == ExitKind.COMPLETION
    assert 0 < row["blocked_ns"] <= row["exit_ns"] - row["enter_ns"]


def test_a_wait_for_a_future_is_one_for_its_operation(observer: Observer, rows: Any) -> None:
    future = dist.all_reduce(_tensor(), async_op=True).get_future()
    assert future.wait()[0].sum().item() == 4
    assert not observer.has_open
    (row,) = _collectives(observer, rows)
    assert 0 < row["blocked_ns"] <= row["exit_ns"] - row["enter_ns"]
    with pytest.raises(RuntimeError, match="of nobody"):
        _failing_future().wait()


def _failing_future() -> torch.futures.Future[None]:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_exception(RuntimeError("of nobody"))
    return future


def test_a_functional_collective_is_blocked_by_its_wait(observer: Observer, rows: Any) -> None:
    result = functional.all_reduce(_tensor(), "sum", dist.group.WORLD)
    assert result.sum().item() == 4
    assert [row["op"] for row in _collectives(observer, rows)] == [Op.ALL_REDUCE]
    assert not observer.has_open


def test_names_the_members_of_a_group_made_before_or_after(observer: Observer, rows: Any) -> None:
    dist.all_reduce(_tensor())
    dist.all_reduce(_tensor(), group=dist.new_group([0]))
    assert [(row["id"], row["rank"], row["backend"]) for row in rows.groups] == [(0, 0, b"gloo"), (1, 0, b"gloo")]
    assert [(row["group"], row["seq"]) for row in _collectives(observer, rows)] == [(0, 0), (1, 0)]


def test_records_the_root_and_the_step(observer: Observer, rows: Any) -> None:
    observer.end_step(11)
    rows.step = 12
    dist.broadcast(_tensor(), 0)
    (row,) = _collectives(observer, rows)
    assert (row["peer"], row["step"]) == (0, 12)


def test_where_there_is_a_device_operations_of_the_host_have_the_time_of_their_issue(rows: Any) -> None:
    recorded: list[tuple[int, ...]] = []
    rows.add_collective = lambda *row: recorded.append(row)
    device_times = DeviceTimes(DeviceClock(lambda: pytest.fail("no event is needed on a CPU")), pytest.fail)
    observer = CollectiveObserver(rows, warn=pytest.fail, device_times=device_times)
    observer.install()
    dist.all_reduce(_tensor())
    observer.uninstall()
    ((*_, enter_ns, _, _, _, enqueue_ns),) = recorded
    assert enqueue_ns == enter_ns


def test_after_uninstalling_torch_is_as_before(new_observer: Callable[..., Observer], rows: Any) -> None:
    places = [(dist.Work, "wait"), (dist.Work, "get_future"), (torch._C.Future, "wait")]
    before = [vars(owner)[name] for owner, name in places]
    observer = new_observer(lambda message: None)
    observer.install()
    observer.uninstall()
    dist.all_reduce(_tensor())
    assert _collectives(observer, rows) == []
    assert [vars(owner)[name] for owner, name in places] == before


def test_a_recorder_that_fails_costs_one_warning_and_no_collective(
    new_observer: Callable[..., Observer], rows: Any, warnings_given: list[str]
) -> None:
    rows.add_group = None
    observer = new_observer(warnings_given.append)
    observer.install()
    values = [_tensor(), _tensor()]
    for value in values:
        dist.all_reduce(value)
    observer.uninstall()
    assert len(warnings_given) == 1
    assert "allreduce_" in warnings_given[0]
    assert [value.sum().item() for value in values] == [4, 4]


def test_counts_the_operations_of_a_group_and_the_messages_of_each_pair(observer: Observer, rows: Any) -> None:
    dist.all_reduce(_tensor())
    dist.barrier(async_op=True).wait()
    assert [(op, peer, number) for _, op, peer, number in observer.entered()] == [(-1, -1, 2)]
