"""What holds GPUs back, in words: evidence on ranks that a verdict names, remarks on others, and what to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.audit.throttle import FAULTS, WORDS, Throttle
from hpcpace.core.records import dataclass
from hpcpace.core.text import listed, named_ranks, percent, plural
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.devices import HOST_BEGIN_COLUMN, HOST_END_COLUMN, is_on_device
from hpcpace.diagnosis.measure import Measured
from hpcpace.diagnosis.summary import DevicePhase, Verdict
from hpcpace.metrics import Ints
from hpcpace.metrics.host_waits import HostPaceThresholds
from hpcpace.trace.schema import Phase

_MAX_NAMED = 4  # display: sentences on GPUs of each kind
_MAX_COUNTER, _MAX_REASONS = 1 << 62, 1 << 32  # format: no counter and no mask of reasons has more
_MAX_VALUES = {  # format: no GPU has more
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
_MILLI = 1000  # format: units
_MAX_GROWTH = 1_000_000_000  # format: a counter that grows by more is damaged
HostTable = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class GpuThresholds(Thresholds, topic="gpus"):
    """When a GPU differs from those of its role."""

    least_samples: int = number(3, "samples")
    """Samples of a GPU, one a second, below which its medians are chance."""
    least_reason_share: float = number(0.1, "share")
    """Share of the samples in which a reason for a lower clock must hold, or hold more often than on the others."""
    least_lower: float = number(0.03, "share")
    """Part by which a clock or a power limit must be lower than the others': clocks of equal GPUs vary."""
    least_hotter_c: float = number(10.0, "°C")
    """Excess over the others' temperature: places in a rack differ by less."""
    least_corrected: int = number(10, "errors")
    """Corrected ECC errors that count: single ones are usual."""
    least_replays: int = number(10, "errors")
    """PCIe replays that count: single ones are usual."""
    least_retries: int = number(3, "errors")
    """Repeated allocations that count: the first ones follow from the start."""
    far_above: float = number(4.0, "times")
    """Growth of a counter over that of any other GPU from which it stands out."""


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
    scale, dry_ns = len(traces) * len(measured.chosen), measured.thresholds.of(HostPaceThresholds).lead_ns
    found = []
    for value in np.unique(phase[is_used]).tolist():
        rows = is_used & (phase == value)
        lead_ns = (begin_ns - host_begin_ns)[rows]
        found.append(
            DevicePhase(
                phase=Phase(value).name.lower() if value < len(Phase) else str(value),
                host_ns=float((host_end_ns - host_begin_ns)[rows].sum()) / scale,
                device_ns=float((end_ns - begin_ns)[rows].sum()) / scale,
                lead_ns=float(np.median(lead_ns)),
                dry_share=float((lead_ns < dry_ns).mean()),
            )
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """A rank's GPU over the judged steps.

    Attributes:
        medians: of the columns of `_MAX_VALUES`, 0 where unknown; that of the clock where the GPU was not idle.
        reasons: share of the samples with each reason for a lower clock.
        counted: growth of each counter, by the names of `_COUNTERS`.
    """

    medians: Mapping[str, float]
    reasons: Mapping[Throttle, float]
    counted: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class GpuDifference:
    """What sets a rank's GPU apart from those of the others of its role; empty where nothing does.

    Attributes:
        rank: whose GPU.
        reasons: why its clock is lowered, the most specific first, with the share of the samples.
        medians: its median and that of the others, by the columns of `_FACTS`.
        counted: growth of its counters, and the most of the others, by name.
        has_fault: whether something of it is a fault by itself.
    """

    rank: int
    reasons: tuple[tuple[Throttle, float], ...] = ()
    medians: Mapping[str, tuple[float, float]]
    counted: Mapping[str, tuple[int, int]]
    has_fault: bool = False

    @property
    def is_notable(self) -> bool:
        """Whether it is reported of a rank that is not late: a lower clock alone, or heat alone, is not."""
        return bool(self.reasons or self.counted or "gpu_power_limit_mw" in self.medians)


def gpu_state(table: HostTable, begin_ns: int, end_ns: int, limits: GpuThresholds) -> GpuState | None:
    """Return the state of a rank's GPU between two times of its own clock; None where nothing is known of one.

    Args:
        table: the rank's `host` table.
        begin_ns, end_ns: from when to when.
        limits: the thresholds.
    """
    times = np.asarray(table["time_ns"])
    rows = np.flatnonzero((times >= begin_ns) & (times <= end_ns))
    if len(rows) < limits.least_samples:
        return None
    columns = {name: np.asarray(table[name])[rows].astype(np.int64) for name in table if name.startswith("gpu_")}
    reasons = columns["gpu_throttle_reasons"]
    reasons = np.where((reasons >= 0) & (reasons < _MAX_REASONS), reasons, 0)
    is_busy = (reasons & Throttle.IDLE) == 0
    medians = {
        name: _median(columns[name][is_busy] if name == "gpu_clock_mhz" else columns[name], most)
        for name, most in _MAX_VALUES.items()
    }
    counted = {name: _growth(columns[column]) for name, column in _COUNTERS.items()}
    if not any(medians.values()) and not any(counted.values()) and not reasons.any():
        return None
    shares = {reason: float(((reasons & reason) != 0).mean()) for reason in WORDS}
    return GpuState(medians=medians, reasons=shares, counted=counted)


def _median(values: Ints, most: int) -> float:
    known = values[(values > 0) & (values <= most)]
    return float(np.median(known)) if len(known) else 0.0


def _growth(values: Ints) -> int:
    """Return by how much a counter has grown, from one value to the next; one that starts again has not shrunk.

    A zero after another value is a question without an answer, or the start of a counter that starts again.
    """
    known = values[(values > 0) & (values < _MAX_COUNTER)]
    if len(known) < len(values) and values[0] == 0:
        known = np.concatenate([values[:1], known])
    steps = np.diff(known)
    return int(steps[(steps > 0) & (steps < _MAX_GROWTH)].sum())


def gpu_differences(
    states: Sequence[GpuState | None], roles: Sequence[int], ranks: Sequence[int], limits: GpuThresholds
) -> list[GpuDifference]:
    """Return what sets the GPUs of ranks apart, for ranks of which something does, in their order.

    Args:
        states: of each rank; None where nothing is known.
        roles: the role of each rank; GPUs are compared within one.
        ranks: their numbers.
        limits: the thresholds.
    """
    found = []
    for index, state in enumerate(states):
        if state is None:
            continue
        others = [o for i, o in enumerate(states) if o is not None and i != index and roles[i] == roles[index]]
        difference = _difference(ranks[index], state, others, limits)
        if difference.is_notable or difference.medians:
            found.append(difference)
    return found


def _difference(rank: int, state: GpuState, others: Sequence[GpuState], limits: GpuThresholds) -> GpuDifference:
    reasons = tuple(
        (reason, state.reasons[reason])
        for reason in WORDS
        if _stands_out(reason, state, others, limits.least_reason_share)
    )
    if len(reasons) > 1:  # the hardware's slowdown comes along with what causes it
        reasons = tuple((reason, share) for reason, share in reasons if reason is not Throttle.HARDWARE)
    return GpuDifference(
        rank=rank,
        reasons=reasons,
        medians={name: pair for name in _FACTS if (pair := _apart(name, state, others, limits)) is not None},
        counted=_counted(state, others, limits),
        has_fault=any(reason in FAULTS for reason, _ in reasons) or state.counted["uncorrected"] > 0,
    )


def _stands_out(reason: Throttle, state: GpuState, others: Sequence[GpuState], least_share: float) -> bool:
    # With nobody to compare with, whatever a GPU does is usual.
    usual = float(np.median([other.reasons[reason] for other in others])) if others else 1.0
    return state.reasons[reason] - (0.0 if reason in FAULTS else usual) >= least_share


def _apart(name: str, state: GpuState, others: Sequence[GpuState], limits: GpuThresholds) -> tuple[float, float] | None:
    """Return a GPU's median and that of the others where it is hotter, or its clock or power limit is lower."""
    value, known = state.medians[name], [other.medians[name] for other in others if other.medians[name]]
    usual = float(np.median(known)) if known else 0.0
    if name == "gpu_temperature_c":
        is_apart = bool(known) and value - usual >= limits.least_hotter_c
    else:
        is_apart = 0 < value < (1 - limits.least_lower) * usual
    return (value, usual) if is_apart else None


def _counted(state: GpuState, others: Sequence[GpuState], limits: GpuThresholds) -> dict[str, tuple[int, int]]:
    """Return the counters that grew on this GPU far more than on the others; uncorrected errors count in any case."""
    least = {"corrected": limits.least_corrected, "replays": limits.least_replays, "retries": limits.least_retries}
    found = {}
    for name, value in state.counted.items():
        most = max((other.counted[name] for other in others), default=0)
        is_far_above = bool(others) and value >= least.get(name, 1) and value >= limits.far_above * most
        if value and (is_far_above or name == "uncorrected"):
            found[name] = (value, most)
    return found


_COUNTED = {
    "uncorrected": "uncorrected ECC error",
    "corrected": "corrected ECC error",
    "replays": "PCIe replay",
    "retries": "repeated allocation",
    "out_of_memory": "CUDA out-of-memory error",
}
_FACTS = {
    "gpu_clock_mhz": "GPU clock {:,.0f} MHz, others {:,.0f}",
    "gpu_max_clock_mhz": "highest GPU clock {:,.0f} MHz, others {:,.0f}",
    "gpu_temperature_c": "{:.0f} °C, others {:.0f}",
    "gpu_power_limit_mw": "power limit {:.0f} W, others {:.0f}",
}
"""How the medians of two GPUs are compared in words, in their order."""
_ADVICE: tuple[tuple[set[object], str], ...] = (
    ({"uncorrected"}, "drain the node of {}: its GPU needs a reset or a replacement (nvidia-smi -q -d ECC)"),
    (
        {Throttle.HARDWARE_THERMAL, Throttle.SOFTWARE_THERMAL},
        "check the cooling of the GPU of {} (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)",
    ),
    (
        {Throttle.POWER_BRAKE},
        "check the power supply of the node of {}: it brakes the GPU (nvidia-smi -q -d PERFORMANCE)",
    ),
    ({Throttle.HARDWARE}, "drain the node of {}, then look at nvidia-smi -q -d PERFORMANCE"),
    (
        {Throttle.POWER_CAP, "gpu_power_limit_mw"},
        "compare the power limit of the GPU of {} with that of others (nvidia-smi -q -d POWER)",
    ),
    ({"replays"}, "check the PCIe link of the GPU of {}: seat, riser, cable (lspci -vv)"),
    ({"retries", "out_of_memory"}, "lower the memory of {}, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
)
"""What to do about what sets a GPU apart, the most urgent first."""


def with_gpus(
    verdict: Verdict, differences: Sequence[GpuDifference], late: Collection[int], hosts: Mapping[int, str]
) -> Verdict:
    """Return a verdict with what sets GPUs apart: as evidence of late ranks, as remarks of others.

    Args:
        verdict: what was found.
        differences: ranks whose GPUs differ from those of their role.
        late: ranks that the verdict names as late.
        hosts: host names by rank.
    """
    named = [each for each in differences if each.rank in late]
    others = [each for each in differences if each.rank not in late and each.is_notable]
    why = [gpu_sentence(each, hosts) for each in named[:_MAX_NAMED]]
    advice = dict.fromkeys(sentence for each in named for sentence in gpu_advice(each, hosts))
    remarks = [_remark(alike, hosts) for alike in _alike(others)[:_MAX_NAMED]]
    return replace(
        verdict,
        why=(*verdict.why, *why),
        next=(*verdict.next, *list(advice)[:_MAX_NAMED]),
        also=(*verdict.also, *remarks),
    )


def gpu_sentence(difference: GpuDifference, hosts: Mapping[int, str]) -> str:
    """Return what sets a rank's GPU apart, as one sentence."""
    return f"{named_ranks([difference.rank], hosts)}: {_facts(difference)}"


def gpu_advice(difference: GpuDifference, hosts: Mapping[int, str]) -> list[str]:
    """Return what to do about a GPU, the most urgent first."""
    who = named_ranks([difference.rank], hosts)
    shown = {*(reason for reason, _ in difference.reasons), *difference.medians, *difference.counted}
    return [advice.format(who) for signs, advice in _ADVICE if shown & signs]


def _facts(difference: GpuDifference) -> str:
    facts = []
    for name, pair in difference.medians.items():
        facts.append(_FACTS[name].format(*(value / (_MILLI if name.endswith("_mw") else 1) for value in pair)))
    if difference.reasons:
        facts.insert("gpu_clock_mhz" in difference.medians, _reasons(difference))
    facts += [f"{plural(own, _COUNTED[name])}, others {most}" for name, (own, most) in difference.counted.items()]
    return "; ".join(facts)


def _reasons(difference: GpuDifference) -> str:
    reasons = [f"{WORDS[reason]} in {percent(share)} of the samples" for reason, share in difference.reasons]
    return f"reason{'s' if reasons[1:] else ''}: {listed(reasons)}"


def _alike(differences: Sequence[GpuDifference]) -> list[list[GpuDifference]]:
    """Return ranks whose GPUs are throttled for the same reasons together, those with a fault first."""
    found: dict[object, list[GpuDifference]] = {}
    for each in differences:
        key = tuple(reason for reason, _ in each.reasons) if each.reasons and not each.counted else each.rank
        found.setdefault((key, each.has_fault), []).append(each)
    return sorted(found.values(), key=lambda alike: not alike[0].has_fault)


def _remark(alike: Sequence[GpuDifference], hosts: Mapping[int, str]) -> str:
    ranks = named_ranks([each.rank for each in alike], hosts)
    facts = _facts(alike[0]) if len(alike) == 1 else listed([WORDS[reason] for reason, _ in alike[0].reasons])
    if len(alike) == 1:
        return f"GPU of {ranks}, which is not found late: {facts}"
    return f"GPUs of {ranks}, which are not found late: {facts}"
