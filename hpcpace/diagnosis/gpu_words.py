"""What holds GPUs back, in words: evidence on ranks that a verdict names, remarks on others, and what to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from hpcpace.core.text import listed, named_ranks, percent, plural
from hpcpace.diagnosis.figures.devices import GpuDifference
from hpcpace.diagnosis.summary import Verdict
from hpcpace.throttling import WORDS, Throttle

_MOST_TOLD = 4
_COUNTED = {
    "uncorrected": "uncorrected ECC error",
    "corrected": "corrected ECC error",
    "replays": "PCIe replay",
    "retries": "repeated allocation",
    "out_of_memory": "CUDA out-of-memory error",
}
_HEAT = (Throttle.HARDWARE_THERMAL, Throttle.SOFTWARE_THERMAL)


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
    why = [gpu_sentence(each, hosts) for each in named[:_MOST_TOLD]]
    advice = dict.fromkeys(sentence for each in named for sentence in gpu_advice(each, hosts))
    remarks = [_remark(alike, hosts) for alike in _alike(others)[:_MOST_TOLD]]
    return replace(
        verdict,
        why=(*verdict.why, *why),
        next=(*verdict.next, *list(advice)[:_MOST_TOLD]),
        also=(*verdict.also, *remarks),
    )


def gpu_sentence(difference: GpuDifference, hosts: Mapping[int, str]) -> str:
    """Return what sets a rank's GPU apart, as one sentence."""
    return f"{named_ranks([difference.rank], hosts)}: {_facts(difference)}"


def gpu_advice(difference: GpuDifference, hosts: Mapping[int, str]) -> list[str]:
    """Return what to do about a GPU, the most urgent first."""
    who, reasons = named_ranks([difference.rank], hosts), {reason for reason, _ in difference.reasons}
    advice = []
    if "uncorrected" in difference.counted:
        advice.append(f"drain the node of {who}: its GPU needs a reset or a replacement (nvidia-smi -q -d ECC)")
    if reasons.intersection(_HEAT):
        advice.append(f"check the cooling of the GPU of {who} (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)")
    if Throttle.POWER_BRAKE in reasons:
        advice.append(f"check the power supply of the node of {who}: it brakes the GPU (nvidia-smi -q -d PERFORMANCE)")
    if Throttle.HARDWARE in reasons:
        advice.append(f"drain the node of {who}, then look at nvidia-smi -q -d PERFORMANCE")
    if Throttle.POWER_CAP in reasons or difference.power_limit_mw:
        advice.append(f"compare the power limit of the GPU of {who} with that of others (nvidia-smi -q -d POWER)")
    if "replays" in difference.counted:
        advice.append(f"check the PCIe link of the GPU of {who}: seat, riser, cable (lspci -vv)")
    if "retries" in difference.counted or "out_of_memory" in difference.counted:
        advice.append(f"lower the memory of {who}, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    return advice


def _facts(difference: GpuDifference) -> str:
    facts = []
    if difference.clock_mhz:
        own, usual = difference.clock_mhz
        facts.append(f"GPU clock {own:,.0f} MHz, others {usual:,.0f}")
    if difference.reasons:
        facts.append(_reasons(difference))
    if difference.max_clock_mhz:
        own, usual = difference.max_clock_mhz
        facts.append(f"highest GPU clock {own:,.0f} MHz, others {usual:,.0f}")
    if difference.temperature_c:
        own, usual = difference.temperature_c
        facts.append(f"{own:.0f} °C, others {usual:.0f}")
    if difference.power_limit_mw:
        own, usual = difference.power_limit_mw
        facts.append(f"power limit {own / 1000:.0f} W, others {usual / 1000:.0f}")
    for name, (own, most) in difference.counted.items():
        facts.append(f"{plural(own, _COUNTED[name])}, others {most}")
    return "; ".join(facts)


def _reasons(difference: GpuDifference) -> str:
    told = [f"{WORDS[reason]} in {percent(share)} of the samples" for reason, share in difference.reasons]
    return f"reason{'s' if told[1:] else ''}: {listed(told)}"


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
