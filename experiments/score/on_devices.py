"""Rows of ranks with a device: the scenario's times are those of the device, and its host issues the work before that.

Where a host is a step ahead, where it waits for its device at the end of each step, and where it only just keeps up.
"""

from __future__ import annotations

import numpy as np
from numpy.lib import recfunctions
from numpy.typing import NDArray

from experiments.score.scenario import Scenario
from hpcpace.trace.encoding import round_times
from hpcpace.trace.schema import TABLES, Phase

Rows = dict[str, NDArray[np.void]]
Int64s = NDArray[np.int64]

_LATENCY_NS = 10_000
_ISSUING = 0.2
"""What issuing takes of what the device takes."""
_STEPS_AHEAD = 1.5


def device_tables(scenario: Scenario) -> tuple[str, ...]:
    """Return the tables that have the columns of ranks with a device."""
    if scenario.device == "none":
        return ()
    return ("collectives",) if scenario.data == "host_times" else ("collectives", "steps", "phases")


def on_device(scenario: Scenario, rows: Rows, open_rows: NDArray[np.void]) -> tuple[Rows, NDArray[np.void]]:
    """Return the rows of a rank with a device: host times in the columns of the host, and those of the device.

    Args:
        scenario: says what the host does.
        rows: of all tables, with the times of the device.
        open_rows: of operations that never completed.
    """
    if scenario.device == "none":
        return rows, open_rows
    host = _Host(scenario, rows)
    changed = dict(rows)
    for name in ("steps", "phases"):
        changed[name] = _marks(host, name, rows[name], has_device="steps" in device_tables(scenario))
    changed["collectives"] = _operations(host, rows["collectives"], scenario)
    return changed, _operations(host, open_rows, scenario)


class _Host:
    """When the host of a rank passed a mark that its device passed at some time.

    Args:
        scenario: says what it does.
        rows: of the rank.
    """

    def __init__(self, scenario: Scenario, rows: Rows) -> None:
        steps, phases = rows["steps"], rows["phases"]
        self._kind = scenario.device
        self._begin_ns, self._end_ns = steps["begin_ns"], steps["end_ns"]
        self._ahead_ns = int(_STEPS_AHEAD * float(np.median(self._end_ns - self._begin_ns)))
        # The host waits for its data itself, and its device for it.
        self._data_ns = self._begin_ns.copy()
        data = phases[phases["phase"] == Phase.DATA]
        at = np.searchsorted(steps["step"], data["step"])
        known = at < len(steps)
        self._data_ns[at[known]] = data["end_ns"][known]

    def passed_ns(self, device_ns: Int64s) -> Int64s:
        """Return when the host passed marks, int64, (num_marks,)."""
        if self._kind == "ahead":
            return device_ns - self._ahead_ns
        if self._kind == "host_bound":
            return device_ns - _LATENCY_NS
        row = np.maximum(np.searchsorted(self._begin_ns, device_ns, side="right") - 1, 0)
        issued_ns = self._data_ns[row] + (_ISSUING * (device_ns - self._data_ns[row])).astype(np.int64)
        is_waiting = (device_ns <= self._data_ns[row]) | (device_ns == self._end_ns[row])
        return np.where(is_waiting, device_ns, issued_ns) - _LATENCY_NS


def _marks(host: _Host, name: str, rows: NDArray[np.void], *, has_device: bool) -> NDArray[np.void]:
    """Return steps or phases with the times of the host, and with those of the device if asked for."""
    made = rows.copy()
    made["begin_ns"], made["end_ns"] = (host.passed_ns(rows[column]) for column in ("begin_ns", "end_ns"))
    if not has_device:
        return made
    made = _with_columns(made, name)
    made["device_begin_ns"], made["device_end_ns"] = rows["begin_ns"], rows["end_ns"]
    round_times(name, made)
    return made


def _operations(host: _Host, rows: NDArray[np.void], scenario: Scenario) -> NDArray[np.void]:
    made = _with_columns(rows, "collectives")
    made["enqueue_ns"] = host.passed_ns(rows["enter_ns"])
    if scenario.data == "host_times":
        made["blocked_ns"] = 0
    round_times("collectives", made)
    return made


def _with_columns(rows: NDArray[np.void], name: str) -> NDArray[np.void]:
    columns = TABLES[name].device.names or ()
    zeros = [np.zeros(len(rows), np.int64) for _ in columns]
    return recfunctions.append_fields(rows, columns, zeros, usemask=False)
