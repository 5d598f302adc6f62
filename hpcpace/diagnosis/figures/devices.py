"""GPUs: how they spent each phase, and how some differ from the others of their role.

The state of GPUs is from the `host` tables, once a second. A value of 0 is unknown, and so is one that no GPU can have.
A lower clock is no fault by itself: it is reported of ranks that are late anyway, and elsewhere only with a reason that
is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.devices import HOST_BEGIN_COLUMN, HOST_END_COLUMN, is_on_device
from hpcpace.diagnosis.measure import Measured
from hpcpace.diagnosis.summary import DevicePhase
from hpcpace.metrics.host_waits import LEAD_NS
from hpcpace.throttling import FAULTS, WORDS, Throttle
from hpcpace.trace.schema import Phase

_MIN_SAMPLES = 3
_MIN_SHARE = 0.1
"""Share of the samples in which a reason must hold, or hold more often than on the others."""
_MIN_LOWER, _MIN_HOTTER_C = 0.03, 10
_MIN_CORRECTED, _MIN_REPLAYS, _MIN_RETRIES = 10, 10, 3
_FAR_ABOVE = 4
_MAX_VALUES = {
    "gpu_clock_mhz": 10_000,
    "gpu_max_clock_mhz": 10_000,
    "gpu_temperature_c": 200,
    "gpu_power_mw": 10_000_000,
    "gpu_power_limit_mw": 10_000_000,
}
_COUNTERS = {
    "uncorrected": "gpu_ecc_uncorrected",
    "corrected": "gpu_ecc_corrected",
    "replays": "gpu_pcie_replays",
    "retries": "gpu_alloc_retries",
    "out_of_memory": "gpu_out_of_memory",
}
_MAX_GROWTH = 1_000_000_000
HostTable = Mapping[str, NDArray[Any]]


def device_figures(measured: Measured) -> tuple[DevicePhase, ...]:
    """Return the phases of ranks with device times, in the order of `Phase`; none without such ranks."""
    traces = [trace for trace in measured.timed.traces if is_on_device(trace)]
    if not traces:
        return ()
    names = ("step", "phase", "begin_ns", "end_ns", HOST_BEGIN_COLUMN, HOST_END_COLUMN)
    tables = [trace.tables["phases"] for trace in traces]
    step, phase, begin_ns, end_ns, host_begin_ns, host_end_ns = (
        np.concatenate([table[name] for table in tables]) for name in names
    )
    is_used = np.isin(step, measured.chosen.step) & (phase != Phase.IDLE) & (phase != Phase.GC)
    scale = len(traces) * len(measured.chosen)
    found = []
    for number in np.unique(phase[is_used]).tolist():
        rows = is_used & (phase == number)
        lead_ns = (begin_ns - host_begin_ns)[rows]
        found.append(
            DevicePhase(
                phase=Phase(number).name.lower() if number < len(Phase) else str(number),
                host_ns=float((host_end_ns - host_begin_ns)[rows].sum()) / scale,
                device_ns=float((end_ns - begin_ns)[rows].sum()) / scale,
                lead_ns=float(np.median(lead_ns)),
                dry_share=float((lead_ns < LEAD_NS).mean()),
            )
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """A rank's GPU over the judged steps; 0 is unknown.

    Attributes:
        clock_mhz: median SM clock of the samples in which the GPU was not idle.
        max_clock_mhz, temperature_c, power_mw, power_limit_mw: medians.
        reasons: share of the samples with each reason for a lower clock.
        counted: growth of each counter, by the names of `_COUNTERS`.
        num_samples: of the table within the steps.
    """

    clock_mhz: float = 0.0
    max_clock_mhz: float = 0.0
    temperature_c: float = 0.0
    power_mw: float = 0.0
    power_limit_mw: float = 0.0
    reasons: Mapping[Throttle, float]
    counted: Mapping[str, int]
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class GpuDifference:
    """What sets a rank's GPU apart from those of the others of its role; None and empty where nothing does.

    Attributes:
        rank: whose GPU.
        reasons: why its clock is lowered, the most specific first, with the share of the samples.
        clock_mhz, max_clock_mhz, temperature_c, power_limit_mw: its median and that of the others.
        counted: growth of its counters, and the most of the others, by name.
        has_fault: whether something of it is a fault by itself.
    """

    rank: int
    reasons: tuple[tuple[Throttle, float], ...] = ()
    clock_mhz: tuple[float, float] | None = None
    max_clock_mhz: tuple[float, float] | None = None
    temperature_c: tuple[float, float] | None = None
    power_limit_mw: tuple[float, float] | None = None
    counted: Mapping[str, tuple[int, int]]
    has_fault: bool = False

    @property
    def is_notable(self) -> bool:
        """Whether it is reported of a rank that is not late: a lower clock alone, or heat alone, is not."""
        return bool(self.reasons or self.counted or self.power_limit_mw)

    @property
    def is_empty(self) -> bool:
        """Whether nothing sets the GPU apart."""
        return not (self.is_notable or self.clock_mhz or self.max_clock_mhz or self.temperature_c)


def gpu_state(table: HostTable, begin_ns: int, end_ns: int) -> GpuState | None:
    """Return the state of a rank's GPU between two times of its own clock; None where nothing is known of one.

    Args:
        table: the rank's `host` table.
        begin_ns, end_ns: from when to when.
    """
    times = np.asarray(table["time_ns"])
    rows = np.flatnonzero((times >= begin_ns) & (times <= end_ns))
    if len(rows) < _MIN_SAMPLES:
        return None
    columns = {name: np.asarray(table[name])[rows].astype(np.int64) for name in table if name.startswith("gpu_")}
    reasons = columns["gpu_throttle_reasons"]
    reasons = np.where((reasons >= 0) & (reasons < 1 << 32), reasons, 0)
    is_busy = (reasons & Throttle.IDLE) == 0
    medians = {
        name.removeprefix("gpu_"): _median(columns[name][is_busy] if name == "gpu_clock_mhz" else columns[name], most)
        for name, most in _MAX_VALUES.items()
    }
    counted = {name: _growth(columns[column]) for name, column in _COUNTERS.items()}
    if not any(medians.values()) and not any(counted.values()) and not reasons.any():
        return None
    return GpuState(
        **medians,
        reasons={reason: float(((reasons & reason) != 0).mean()) for reason in WORDS},
        counted=counted,
        num_samples=len(rows),
    )


def _median(values: NDArray[np.int64], most: int) -> float:
    known = values[(values > 0) & (values <= most)]
    return float(np.median(known)) if len(known) else 0.0


def _growth(values: NDArray[np.int64]) -> int:
    """Return by how much a counter has grown, from one value to the next; one that starts again has not shrunk.

    A zero after another value is a question without an answer, or the start of a counter that starts again.
    """
    known = values[(values > 0) & (values < 1 << 62)]
    if len(known) < len(values) and values[0] == 0:
        known = np.concatenate([values[:1], known])
    steps = np.diff(known)
    return int(steps[(steps > 0) & (steps < _MAX_GROWTH)].sum())


def gpu_differences(
    states: Sequence[GpuState | None], roles: Sequence[int], ranks: Sequence[int]
) -> list[GpuDifference]:
    """Return what sets the GPUs of ranks apart, for ranks of which something does, in their order.

    Args:
        states: of each rank; None where nothing is known.
        roles: the role of each rank; GPUs are compared within one.
        ranks: their numbers.
    """
    found = []
    for index, state in enumerate(states):
        if state is None:
            continue
        others = [o for i, o in enumerate(states) if o is not None and i != index and roles[i] == roles[index]]
        difference = _difference(ranks[index], state, others)
        if not difference.is_empty:
            found.append(difference)
    return found


def _difference(rank: int, state: GpuState, others: Sequence[GpuState]) -> GpuDifference:
    reasons = tuple((reason, state.reasons[reason]) for reason in WORDS if _stands_out(reason, state, others))
    if len(reasons) > 1:  # the hardware's slowdown comes along with what causes it
        reasons = tuple((reason, share) for reason, share in reasons if reason is not Throttle.HARDWARE)
    return GpuDifference(
        rank=rank,
        reasons=reasons,
        clock_mhz=_lower([o.clock_mhz for o in others], state.clock_mhz),
        max_clock_mhz=_lower([o.max_clock_mhz for o in others], state.max_clock_mhz),
        temperature_c=_hotter([o.temperature_c for o in others], state.temperature_c),
        power_limit_mw=_lower([o.power_limit_mw for o in others], state.power_limit_mw),
        counted=_counted(state, others),
        has_fault=any(reason in FAULTS for reason, _ in reasons) or state.counted["uncorrected"] > 0,
    )


def _stands_out(reason: Throttle, state: GpuState, others: Sequence[GpuState]) -> bool:
    # With nobody to compare with, whatever a GPU does is usual.
    usual = float(np.median([other.reasons[reason] for other in others])) if others else 1.0
    return state.reasons[reason] - (0.0 if reason in FAULTS else usual) >= _MIN_SHARE


def _lower(others: Sequence[float], value: float) -> tuple[float, float] | None:
    known = [other for other in others if other]
    usual = float(np.median(known)) if known else 0.0
    return (value, usual) if value and value < (1 - _MIN_LOWER) * usual else None


def _hotter(others: Sequence[float], value: float) -> tuple[float, float] | None:
    known = [other for other in others if other]
    return (value, float(np.median(known))) if known and value - np.median(known) >= _MIN_HOTTER_C else None


def _counted(state: GpuState, others: Sequence[GpuState]) -> dict[str, tuple[int, int]]:
    """Return the counters that grew on this GPU far more than on the others; uncorrected errors count in any case."""
    least = {"corrected": _MIN_CORRECTED, "replays": _MIN_REPLAYS, "retries": _MIN_RETRIES}
    found = {}
    for name, value in state.counted.items():
        most = max((other.counted[name] for other in others), default=0)
        is_far_above = bool(others) and value >= least.get(name, 1) and value >= _FAR_ABOVE * most
        if value and (is_far_above or name == "uncorrected"):
            found[name] = (value, most)
    return found
