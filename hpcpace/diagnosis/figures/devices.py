"""What hosts and their devices did in each phase, side by side, and how far hosts were ahead."""

from __future__ import annotations

import numpy as np

from hpcpace.diagnosis.devices import HOST_BEGIN_COLUMN, HOST_END_COLUMN, is_on_device
from hpcpace.diagnosis.measure import Measured
from hpcpace.diagnosis.summary import DevicePhase
from hpcpace.metrics.host_pace import LEAD_NS
from hpcpace.trace.schema import Phase


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
