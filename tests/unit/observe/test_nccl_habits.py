"""What a CPU can show of how backends for devices behave; the rest is in tests/gpu."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import each_case
from simulated_device import SimulatedRank

from hpcpace.observe.device.clock import DeviceClock
from hpcpace.observe.device.layer import device_work, follow_captures, follow_coalescing, follow_streams, runs_on_host


class _Group:
    """A process group as the asked part of torch sees it."""

    def __init__(self, backend):
        self._backend = backend

    def _get_backend(self, device):
        assert device.type == "cuda"
        if isinstance(self._backend, Exception):
            raise self._backend
        return SimpleNamespace(name=lambda: self._backend)


@each_case(
    ("backend", "is_host"),
    [("gloo", True), ("mpi", True), ("nccl", False), ("other", False), (RuntimeError("no backend for cuda"), False)],
    ids=str,
)
def test_gloo_runs_on_the_host_whatever_tensors_it_is_given(backend, is_host):
    assert runs_on_host(_Group(backend)) == is_host


@pytest.mark.usefixtures("process_group")
def test_a_real_group_is_asked_for_its_backend_on_devices():
    assert runs_on_host(dist.group.WORLD)


@each_case("result", [None, ([], None), (None,)])
def test_a_blocking_call_may_have_no_work(result):
    assert device_work(result) is None


class _Times:
    def __init__(self):
        self.calls = []

    def start_coalescing(self):
        self.calls.append("start")

    def end_coalescing(self, work):
        self.calls.append(work)


def test_batches_are_told_between_start_and_end_and_torch_is_left_as_it_was(monkeypatch):
    group = SimpleNamespace()
    monkeypatch.setattr(dist.ProcessGroup, "_start_coalescing", lambda group, device: None)
    monkeypatch.setattr(dist.ProcessGroup, "_end_coalescing", lambda group, device: "work of all")
    before = vars(dist.ProcessGroup)["_start_coalescing"], vars(dist.ProcessGroup)["_end_coalescing"]
    times = _Times()
    with ExitStack() as stack:
        follow_coalescing(stack, times)
        dist.ProcessGroup._start_coalescing(group, "cuda")
        assert dist.ProcessGroup._end_coalescing(group, "cuda") == "work of all"
    assert times.calls == ["start", "work of all"]
    assert (vars(dist.ProcessGroup)["_start_coalescing"], vars(dist.ProcessGroup)["_end_coalescing"]) == before


@pytest.fixture
def graph(monkeypatch):
    """A graph whose capture may fail to begin."""
    state = SimpleNamespace(error=None)

    def begin(graph):
        if state.error is not None:
            raise state.error

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", lambda graph: None)
    return state


def test_no_mark_is_made_while_a_graph_is_captured_on_any_stream(graph):
    rank = SimulatedRank()
    device = DeviceClock(rank.new_event, clock=rank.clock)
    with ExitStack() as stack:
        follow_captures(stack, device)
        assert device.mark() is not None
        torch.cuda.CUDAGraph.capture_begin(graph)
        assert device.mark() is None and not device.is_usable and not device.is_due
        torch.cuda.CUDAGraph.capture_end(graph)
        assert device.mark() is not None
        torch.cuda.CUDAGraph.capture_end(graph)
        graph.error = RuntimeError("not now")
        with pytest.raises(RuntimeError, match="not now"):
            torch.cuda.CUDAGraph.capture_begin(graph)
        assert device.is_usable


def test_events_and_waits_of_streams_are_told(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.Stream, "record_event", lambda stream, event=None: event or "made")
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda stream, event: calls.append((stream, event)))

    class Side:
        def recorded(self, stream, event):
            calls.append(("recorded", stream, event))

        def wait(self, stream, event, wait):
            calls.append("waits")
            return wait(stream, event)

    with ExitStack() as stack:
        follow_streams(stack, Side())
        assert torch.cuda.Stream.record_event("side") == "made"
        assert torch.cuda.Stream.record_event("side", "mine") == "mine"
        torch.cuda.Stream.wait_event("main", "mine")
    torch.cuda.Stream.wait_event("main", "later")
    told = [("recorded", "side", "made"), ("recorded", "side", "mine"), "waits", ("main", "mine"), ("main", "later")]
    assert calls == told


def test_a_release_of_torch_that_lacks_these_functions_is_left_as_it_is(monkeypatch):
    monkeypatch.delattr(dist.ProcessGroup, "_start_coalescing")
    # A build with CUDA has it in a class of C++ as well.
    for owner in [one for one in torch.cuda.CUDAGraph.__mro__ if "capture_end" in vars(one)]:
        monkeypatch.delattr(owner, "capture_end")
    with ExitStack() as stack:
        follow_coalescing(stack, _Times())
        follow_captures(stack, DeviceClock(lambda: pytest.fail("no event is needed")))
        assert not hasattr(dist.ProcessGroup, "_start_coalescing")
    assert not hasattr(torch.cuda.CUDAGraph, "capture_end")
