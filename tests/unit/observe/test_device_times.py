from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcpace.observe.device_times import DeviceTimes
from hpcpace.trace.schema import ExitKind, Op


class Device:
    """A GPU whose clock the test turns."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.finished_ms = 0.0


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_ms: float | None = None

    def record(self) -> None:
        self.at_ms = self.device.now_ms

    def query(self) -> bool:
        return self.at_ms is not None and self.at_ms <= self.device.finished_ms

    def synchronize(self) -> None:
        self.device.finished_ms = max(self.device.finished_ms, self.device.now_ms)

    def elapsed_time(self, end_event: Any) -> float:
        assert self.at_ms is not None
        return end_event.at_ms - self.at_ms


class FakeWork:
    """Its future calls back at once, when the device's stream stands where the operation will end."""

    def __init__(self, device: Device, duration_ms: float) -> None:
        self.device, self.duration_ms = device, duration_ms

    def get_future(self) -> FakeWork:
        return self

    def then(self, callback: Callable[[Any], None]) -> None:
        issued_ms, self.device.now_ms = self.device.now_ms, self.device.now_ms + self.duration_ms
        callback(self)
        self.device.now_ms = issued_ms


def _row(enter_ns: int) -> tuple[int, ...]:
    return (7, 0, 3, Op.ALL_REDUCE, 4096, -1, enter_ns, 0, 0, ExitKind.COMPLETION)


def _times(device: Device, host_ns: int) -> tuple[DeviceTimes, list[tuple[int, ...]]]:
    rows: list[tuple[int, ...]] = []
    times = DeviceTimes(lambda: FakeEvent(device), clock=lambda: host_ns)
    times.anchor(lambda *row: rows.append(row))
    return times, rows


def test_maps_device_times_to_the_host_clock() -> None:
    device = Device()
    times, rows = _times(device, host_ns=5_000_000_000)
    device.now_ms = 10.0
    times.follow(_row(enter_ns=5_009_000_000), times.mark(), FakeWork(device, duration_ms=2.5))
    device.finished_ms = 20.0
    times.resolve(lambda *row: rows.append(row))
    assert rows == [
        (7, 0, 3, Op.ALL_REDUCE, 4096, -1, 5_010_000_000, 5_012_500_000, 0, ExitKind.COMPLETION, 5_009_000_000)
    ]


def test_an_operation_that_the_device_has_not_passed_stays_open() -> None:
    device = Device()
    times, rows = _times(device, host_ns=0)
    device.now_ms = 10.0
    times.follow(_row(enter_ns=9_000_000), times.mark(), FakeWork(device, duration_ms=2.5))
    device.finished_ms = 11.0
    times.resolve(lambda *row: rows.append(row))
    assert rows == []
    assert [row[9] for row in times.open_rows()] == [ExitKind.NEVER]


def test_operations_before_a_new_anchor_keep_the_former_one() -> None:
    device = Device()
    times, rows = _times(device, host_ns=1_000)
    device.now_ms = 1.0
    times.follow(_row(enter_ns=0), times.mark(), FakeWork(device, duration_ms=0.5))
    device.now_ms = 3.0
    times.anchor(lambda *row: rows.append(row))
    assert [row[6:8] for row in rows] == [(1_001_000, 1_501_000)]


def test_order_of_issue_is_the_order_of_rows() -> None:
    device = Device()
    times, rows = _times(device, host_ns=0)
    for begin_ms in (1.0, 2.0, 3.0):
        device.now_ms = begin_ms
        times.follow(_row(enter_ns=0), times.mark(), FakeWork(device, duration_ms=0.1))
    device.finished_ms = 2.5
    times.resolve(lambda *row: rows.append(row))
    assert [row[6] for row in rows] == [1_000_000, 2_000_000]
