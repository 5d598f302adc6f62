"""What a CPU can show of how backends for devices behave; the rest is in tests/gpu."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hpcpace.observe.nccl_habits import device_work, follow_coalescing, runs_on_host


class _Group:
    """A process group as the asked part of torch sees it."""

    def __init__(self, backend):
        self._backend = backend

    def _get_backend(self, device):
        assert device.type == "cuda"
        if isinstance(self._backend, Exception):
            raise self._backend
        return SimpleNamespace(name=lambda: self._backend)


@pytest.mark.parametrize(
    ("backend", "is_host"),
    [("gloo", True), ("mpi", True), ("nccl", False), ("other", False), (RuntimeError("no backend for cuda"), False)],
    ids=str,
)
def test_gloo_runs_on_the_host_whatever_tensors_it_is_given(backend, is_host):
    assert runs_on_host(_Group(backend)) == is_host


@pytest.mark.usefixtures("process_group")
def test_a_real_group_is_asked_for_its_backend_on_devices():
    assert runs_on_host(dist.group.WORLD)


@pytest.mark.parametrize("result", [None, ([], None), (None,)])
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
