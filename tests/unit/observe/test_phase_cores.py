"""What the thread that trains had of its core in each phase, read from a made-up kernel."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hpcpace.observe.host import phase_cores
from hpcpace.observe.host.phase_cores import UNKNOWN_PHASES, PhaseCores
from hpcpace.trace.schema import PHASES_ON_CORES, Phase


class Kernel:
    """Counters that a test sets; the clock stands still unless it does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = self.cpu_ns = 1_000_000_000
        self.file = folder / "thread-self" / "schedstat"
        self.file.parent.mkdir()
        self.file.write_text("5 0 9\n")
        monkeypatch.setattr(phase_cores.time, "monotonic_ns", lambda: self.now_ns)
        monkeypatch.setattr(phase_cores.time, "thread_time_ns", lambda: self.cpu_ns)
        self.waited_ns = 0

    def spend(self, *, running: int = 0, waiting: int = 0, idle: int = 0) -> None:
        self.now_ns += running + waiting + idle
        self.cpu_ns += running
        self.waited_ns += waiting
        self.file.write_text(f"5 {self.waited_ns} 9\n")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(tmp_path, monkeypatch)


@pytest.fixture
def cores(kernel: Kernel, tmp_path: Path) -> PhaseCores:
    return PhaseCores(proc=tmp_path)


def by_phase(cores: PhaseCores) -> dict[str, tuple[int, ...]]:
    values = cores.columns[2:]
    return {phase.name.lower(): values[3 * i : 3 * i + 3] for i, phase in enumerate(PHASES_ON_CORES)}


def test_each_phase_has_what_is_not_in_the_phases_inside_it(cores: PhaseCores, kernel: Kernel) -> None:
    cores.begin_step()
    kernel.spend(running=1)
    forward_ns = cores.now()
    kernel.spend(running=10, waiting=20, idle=30)
    cores.ended(Phase.FORWARD, forward_ns, cores.now())
    backward_ns = cores.now()
    kernel.spend(running=5)
    sync_ns = cores.now()
    kernel.spend(idle=100)
    end_ns = cores.now()
    cores.ended(Phase.BACKWARD, backward_ns, end_ns)
    cores.ended(Phase.GRAD_SYNC, sync_ns, end_ns)
    cores.ended(Phase.GC, sync_ns + 1, end_ns)  # a time that was not read
    kernel.spend(waiting=2)
    cores.end_step()
    assert cores.columns[:2] == (1, 168)
    found = by_phase(cores)
    assert found["forward"] == (60, 10, 20)
    assert found["backward"] == (5, 5, 0)
    assert found["other"] == (3, 1, 2)
    assert found["data"] == found["optimizer"] == (0, 0, 0)


def test_ten_steps_a_second_are_read(cores: PhaseCores, kernel: Kernel) -> None:
    for _ in range(10_000):
        cores.begin_step()
        kernel.spend(running=1_000_000)
        cores.end_step()
    assert 95 <= cores.columns[0] <= 105


def test_another_thread_that_trains_is_followed(cores: PhaseCores, kernel: Kernel) -> None:
    cores.begin_step()
    cores.end_step()
    kernel.spend(idle=1_000_000_000)

    def train() -> None:
        cores.begin_step()
        kernel.spend(running=7)
        cores.end_step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert by_phase(cores)["other"] == (7, 7, 0)


@pytest.mark.parametrize("content", ["0 0 0\n", "", "words\n", None], ids=["off", "empty", "foreign", "missing"])
def test_a_kernel_that_does_not_count_is_left_alone(cores: PhaseCores, kernel: Kernel, content: str | None) -> None:
    if content is None:
        kernel.file.unlink()
    else:
        kernel.file.write_text(content)
    cores.begin_step()
    assert cores.now() == kernel.now_ns
    cores.ended(Phase.FORWARD, kernel.now_ns, kernel.now_ns)
    cores.end_step()
    assert cores.columns == UNKNOWN_PHASES[1:]


def test_what_goes_wrong_later_ends_the_reading(cores: PhaseCores, kernel: Kernel) -> None:
    cores.begin_step()
    kernel.file.write_text("gone")
    cores.now()
    cores.end_step()
    cores.close()
    cores.begin_step()
    assert cores.now() == kernel.now_ns
    assert cores.columns == UNKNOWN_PHASES[1:]
