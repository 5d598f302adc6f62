from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each_case

from experiments.synthetic_run import SyntheticRun
from hpcpace.audit.throttle import Throttle
from hpcpace.diagnosis.analyze import analyze_traces, examine
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import Verdict
from hpcpace.diagnosis.topics.gpus import (
    GpuDifference,
    GpuState,
    GpuThresholds,
    gpu_advice,
    gpu_differences,
    gpu_sentence,
    gpu_state,
    with_gpus,
)
from hpcpace.trace.attempt_reader import AttemptTraces, read_attempt
from hpcpace.trace.schema import TABLES
from hpcpace.trace.tables import Table

SECONDS = 20
HOSTS = {rank: f"n{rank // 2 + 1}" for rank in range(4)}
USUAL = {
    "gpu_clock_mhz": 1980,
    "gpu_max_clock_mhz": 1980,
    "gpu_temperature_c": 62,
    "gpu_power_mw": 640_000,
    "gpu_power_limit_mw": 700_000,
}
HOT = {"gpu_clock_mhz": 1215, "gpu_temperature_c": 91, "gpu_throttle_reasons": 0x8 | 0x40}


def host(**columns: Any) -> Table:
    """Return a `host` table of a row a second with these columns, each one value or one a row."""
    rows = np.zeros(SECONDS, TABLES["host"].dtype)
    rows["time_ns"] = np.arange(SECONDS) * 1_000_000_000
    for name, values in {**USUAL, **columns}.items():
        rows[name] = values
    return Table.from_rows(rows)


def state(**columns: Any) -> GpuState | None:
    return gpu_state(host(**columns), 0, SECONDS * 1_000_000_000, GpuThresholds())


def differences(*of_ranks: dict[str, Any], roles: Sequence[int] | None = None) -> list[GpuDifference]:
    ranks = range(len(of_ranks))
    return gpu_differences(
        [state(**columns) for columns in of_ranks], roles or [0 for _ in ranks], list(ranks), GpuThresholds()
    )


def told(*of_ranks: dict[str, Any]) -> list[str]:
    return [gpu_sentence(each, HOSTS) for each in differences(*of_ranks)]


def verdict_with(found: list[GpuDifference], late: set[int]) -> Verdict:
    bare = Verdict(
        mode="", variety="", culprits=(), confidence=0.9, loss_share=0.1, headline="", why=("late",), next=("look",),
        also=(), findings=(),
    )  # fmt: skip
    return with_gpus(bare, found, late, HOSTS)


def test_gpus_that_are_alike_are_not_told() -> None:
    assert told({}, {}, {}, {}) == []


def test_a_throttled_gpu_is_told_with_its_clock_reason_and_heat() -> None:
    assert told({}, {}, HOT, {}) == [
        "rank 2 on n2: GPU clock 1,215 MHz, others 1,980; reason: HW thermal slowdown in 100.0 % of the samples; "
        "91 °C, others 62"
    ]


@each_case(
    ("columns", "sentence", "advice"),
    [
        (
            {"gpu_clock_mhz": 1410, "gpu_throttle_reasons": 0x4, "gpu_power_limit_mw": 400_000},
            "GPU clock 1,410 MHz, others 1,980; reason: SW power cap in 100.0 % of the samples; "
            "power limit 400 W, others 700",
            ["compare the power limit of the GPU of rank 2 on n2 with that of others (nvidia-smi -q -d POWER)"],
        ),
        (
            {"gpu_throttle_reasons": 0x80 | 0x8},
            "reason: HW power brake in 100.0 % of the samples",
            ["check the power supply of the node of rank 2 on n2: it brakes the GPU (nvidia-smi -q -d PERFORMANCE)"],
        ),
        (
            {"gpu_throttle_reasons": 0x8},
            "reason: HW slowdown in 100.0 % of the samples",
            ["drain the node of rank 2 on n2, then look at nvidia-smi -q -d PERFORMANCE"],
        ),
        (
            {"gpu_throttle_reasons": [0x20, 0] * 10},
            "reason: SW thermal slowdown in 50.0 % of the samples",
            ["check the cooling of the GPU of rank 2 on n2 (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"],
        ),
        (
            {"gpu_ecc_uncorrected": [0] * 19 + [1]},
            "1 uncorrected ECC error, others 0",
            ["drain the node of rank 2 on n2: its GPU needs a reset or a replacement (nvidia-smi -q -d ECC)"],
        ),
        ({"gpu_ecc_corrected": np.arange(20) * 5}, "95 corrected ECC errors, others 0", []),
        (
            {"gpu_pcie_replays": 1000 + np.arange(20)},
            "19 PCIe replays, others 0",
            ["check the PCIe link of the GPU of rank 2 on n2: seat, riser, cable (lspci -vv)"],
        ),
        (
            {"gpu_alloc_retries": np.arange(20), "gpu_out_of_memory": [0] * 10 + [1] * 10},
            "19 repeated allocations, others 0; 1 CUDA out-of-memory error, others 0",
            ["lower the memory of rank 2 on n2, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"],
        ),
        ({"gpu_max_clock_mhz": 1410}, "highest GPU clock 1,410 MHz, others 1,980", []),
    ],
)
def test_what_holds_a_gpu_back_is_told_in_words_with_what_to_do(
    columns: dict[str, Any], sentence: str, advice: list[str]
) -> None:
    (found,) = differences({}, {}, columns, {})
    assert gpu_sentence(found, HOSTS) == f"rank 2 on n2: {sentence}"
    assert gpu_advice(found, HOSTS) == advice


@each_case(
    "columns",
    [
        {"gpu_throttle_reasons": 0x4},  # at its power cap a GPU works as it is set up to
        {"gpu_throttle_reasons": 0x20, "gpu_clock_mhz": 1500},
        {"gpu_throttle_reasons": 0x1 | 0x2 | 0x100},
        {"gpu_clock_mhz": 1215},
        {"gpu_temperature_c": 91},
        {"gpu_pcie_replays": np.arange(20) * 100},
        {"gpu_alloc_retries": np.arange(20)},
    ],
)
def test_what_all_gpus_have_alike_sets_none_apart(columns: dict[str, Any]) -> None:
    assert told(columns, columns, columns, columns) == []


def test_hardware_that_throttles_all_gpus_alike_is_one_remark() -> None:
    verdict = verdict_with(differences(HOT, HOT, HOT, HOT), set())
    assert verdict.also == ("GPUs of ranks 0-1 on n1, ranks 2-3 on n2, which are not found late: HW thermal slowdown",)
    assert (verdict.why, verdict.next) == (("late",), ("look",))


@pytest.mark.parametrize("columns", [{"gpu_throttle_reasons": 0x1}, {"gpu_throttle_reasons": 0x2}])
def test_idle_and_set_clocks_are_no_reasons(columns: dict[str, Any]) -> None:
    assert told({}, columns, {}, {}) == []


def test_the_clock_of_an_idle_gpu_does_not_count() -> None:
    clocks, reasons = [345] * 15 + [1980] * 5, [0x1] * 15 + [0] * 5
    assert told({}, {"gpu_clock_mhz": clocks, "gpu_throttle_reasons": reasons}) == []


def test_a_lower_clock_alone_is_evidence_of_a_late_rank_and_of_nobody_else() -> None:
    found = differences({}, {"gpu_clock_mhz": 1700}, {"gpu_clock_mhz": 1500}, {})
    verdict = verdict_with(found, {2})
    assert verdict.why == ("late", "rank 2 on n2: GPU clock 1,500 MHz, others 1,980")
    assert verdict.also == ()


def test_evidence_and_advice_follow_those_of_the_verdict_and_others_are_remarks() -> None:
    verdict = verdict_with(differences({"gpu_throttle_reasons": 0x4}, {}, HOT, {}), {2})
    assert verdict.why[0] == "late"
    assert "GPU clock 1,215 MHz" in verdict.why[1]
    assert verdict.next == (
        "look",
        "check the cooling of the GPU of rank 2 on n2 (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)",
    )
    assert verdict.also == (
        "GPU of rank 0 on n1, which is not found late: reason: SW power cap in 100.0 % of the samples",
    )


def test_a_rank_of_which_nothing_is_known_is_neither_told_nor_compared_with() -> None:
    nothing = dict.fromkeys(USUAL, 0)
    assert state(**nothing) is None
    assert told(nothing, {}, {}, nothing) == []
    # The others have no clock to compare with, but a fault needs no others.
    assert told(nothing, nothing, HOT, nothing) == [
        "rank 2 on n2: reason: HW thermal slowdown in 100.0 % of the samples"
    ]


def test_ranks_of_other_roles_are_not_compared() -> None:
    slow = {"gpu_clock_mhz": 1410}
    assert differences({}, slow, {}, slow, roles=[0, 1, 0, 1]) == []


def test_too_few_samples_tell_nothing() -> None:
    assert gpu_state(host(**HOT), 0, 1_500_000_000, GpuThresholds()) is None


@each_case(
    ("values", "growth"),
    [
        ([0] * 20, 0),
        ([7] * 20, 0),
        ([7] * 10 + [0] + [7] * 9, 0),  # one question without an answer
        ([5] * 10 + [9] * 10, 4),
        ([(1 << 32) - 2] * 10 + [3] * 5 + [5] * 5, 2),  # a counter that wraps or starts again
        ([1] * 10 + [1 << 61] * 10, 0),
        ([-5] * 10 + [3] * 10, 0),
        ([0] * 10 + [2] * 10, 2),
    ],
)
def test_a_counter_grows_from_value_to_value(values: list[int], growth: int) -> None:
    found = state(gpu_pcie_replays=values)
    assert found is not None
    assert found.counted["replays"] == growth


@pytest.mark.parametrize("extreme", ["min", "max"])
def test_absurd_values_of_a_foreign_file_are_unknown(extreme: str) -> None:
    kinds = TABLES["host"].dtype
    absurd = {name: getattr(np.iinfo(kinds[name]), extreme) for name in kinds.names or () if name.startswith("gpu_")}
    assert told({}, absurd, {}, {}) == []


def test_a_reason_that_is_absurd_hides_no_other() -> None:
    reasons = np.array([0x40, -1] * 10)
    (found,) = differences({}, {"gpu_throttle_reasons": reasons})
    assert found.reasons == ((Throttle.HARDWARE_THERMAL, 0.5),)


def traces_with(folder: Path, of_ranks: dict[int, dict[str, Any]], **options: Any) -> tuple[Any, Any, AttemptTraces]:
    """Return a run of four ranks whose GPUs have these values, with its traces read."""
    run = SyntheticRun(hosts=("n1", "n2", "n3", "n4"), noise=0.02, **options).write(folder / "run")
    attempt = run.attempts()[-1]
    found, traces = read_attempt(attempt), []
    for trace in found.traces:
        steps, table = trace.tables["steps"], dict(host(**of_ranks.get(trace.header.rank, {})))
        table["time_ns"] = np.linspace(steps["begin_ns"][0], steps["end_ns"][-1], SECONDS).astype(np.int64)
        traces.append(replace(trace, tables={**trace.tables, "host": Table(table)}))
    return run, attempt, AttemptTraces(traces, found.problems)


def test_a_throttled_gpu_is_evidence_of_the_straggler_that_it_makes(tmp_path: Path) -> None:
    run, attempt, found = traces_with(tmp_path, {2: HOT}, slow={2: 1.3})
    verdict = analyze_traces(run, attempt, found, Selection()).summary.verdict
    assert verdict.mode == "persistent straggler"
    assert verdict.why[-1].startswith("rank 2 on n3: GPU clock 1,215 MHz, others 1,980; reason: HW thermal slowdown in")
    assert verdict.next[-1].startswith("check the cooling of the GPU of rank 2 on n3")


def test_a_gpu_that_is_throttled_without_effect_is_a_remark_and_no_culprit(tmp_path: Path) -> None:
    *_, found = traces_with(tmp_path, {1: HOT})
    verdict = examine(found.traces)
    assert (verdict.culprits, len(verdict.also)) == ((), 1)
    assert verdict.also[0].startswith("GPU of rank 1 on n2, which is not found late: GPU clock 1,215 MHz")


def test_a_different_clock_without_effect_is_not_told(tmp_path: Path) -> None:
    *_, found = traces_with(tmp_path, {1: {"gpu_clock_mhz": 1215}})
    verdict = examine(found.traces)
    assert (verdict.culprits, verdict.also) == ((), ())
