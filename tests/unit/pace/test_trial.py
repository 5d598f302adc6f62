"""The trial on durations of known truth, fed some windows late as in a job."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from hpcpace.pace.settings import PaceSettings
from hpcpace.pace.trial import Trial, TrialOutcome, TrialResult, interval, looks_constant
from hpcpace.trace.schema import PaceArm

SETTINGS = PaceSettings(policy="slack", aa_pairs=6, max_pairs=20)
STEP_NS = 100e6
LAG = 2


def _run(
    *, gain: float, noise: float = 0.02, seed: int = 0, settings: PaceSettings = SETTINGS, drift: float = 0.0
) -> tuple[TrialResult, list[PaceArm]]:
    random = np.random.default_rng(seed)
    trial, waiting, arms = Trial(settings, seed=seed), deque[np.ndarray](), []
    while not trial.is_over and len(arms) < 1000:
        arms.append(trial.next_window())
        steps_ns = STEP_NS * random.lognormal(0, noise, settings.window_steps) * (1 + drift * len(arms))
        waiting.append(steps_ns * (1 - gain) if arms[-1] == PaceArm.ON else steps_ns)
        if len(waiting) > LAG:
            trial.add_window(waiting.popleft())
    return trial.result(), arms


def test_keeps_a_gain_after_six_pairs() -> None:
    found, arms = _run(gain=0.05)
    assert found.outcome == TrialOutcome.GAIN and found.is_on
    assert found.effect is not None
    assert found.effect.num_values == 6
    assert found.effect.low <= -np.log(1 - 0.05) <= found.effect.high
    assert len(arms) <= 2 * 2 * (6 + 6) + LAG


def test_begins_with_pairs_that_are_both_unpaced() -> None:
    _, arms = _run(gain=0.05)
    assert arms[:24] == [PaceArm.AA] * 24
    assert {PaceArm.ON, PaceArm.OFF} == set(arms[24:])


def test_orders_the_blocks_of_pairs_by_the_seed() -> None:
    orders = [tuple(_run(gain=0.0, seed=seed)[1][24:]) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    blocks = [orders[0][index : index + 2] for index in range(0, 24, 2)]
    assert all(len(set(block)) == 1 for block in blocks)
    assert all(
        {first[0], second[0]} == {PaceArm.ON, PaceArm.OFF}
        for first, second in zip(blocks[::2], blocks[1::2], strict=True)
    )


def test_finds_nothing_where_there_is_nothing() -> None:
    outcomes = [_run(gain=0.0, seed=seed, noise=0.05)[0].outcome for seed in range(100)]
    assert outcomes.count(TrialOutcome.NO_EFFECT) >= 92


def test_says_what_it_could_have_seen() -> None:
    found, _ = _run(gain=0.0, noise=0.05)
    assert found.effect is not None
    assert 0 < found.effect.halfwidth < found.effect.detectable < 0.05


def test_drift_of_the_whole_job_is_no_gain() -> None:
    outcomes = {_run(gain=0.0, seed=seed, drift=1e-4)[0].outcome for seed in range(20)}
    assert TrialOutcome.GAIN not in outcomes


def test_a_small_harm_ends_it() -> None:
    outcomes = [_run(gain=-0.03, seed=seed)[0] for seed in range(20)]
    assert {found.outcome for found in outcomes} == {TrialOutcome.HARM}
    assert max(found.num_blocks_on for found in outcomes) <= 8


def test_a_great_harm_ends_it_at_the_first_block() -> None:
    for seed in range(20):
        found, _ = _run(gain=-0.1, seed=seed)
        assert found.outcome == TrialOutcome.HARM_AT_ONCE
        assert found.num_blocks_on == 1
        assert found.worst_block == pytest.approx(0.1, abs=0.03)


def test_a_few_long_steps_of_a_paced_block_do_not_end_it_at_once() -> None:
    trial, random = Trial(SETTINGS, seed=0), np.random.default_rng(0)
    while trial.result().num_blocks_on < 2:
        arm = trial.next_window()
        steps_ns = STEP_NS * random.lognormal(0, 0.01, SETTINGS.window_steps)
        if arm == PaceArm.ON:
            steps_ns[-1] *= 4
        trial.add_window(steps_ns)
    assert trial.result().worst_block > 0.2
    assert trial.result().outcome != TrialOutcome.HARM_AT_ONCE


def test_claims_nothing_where_unpaced_blocks_differ() -> None:
    """Second blocks are slower here: an effect wherever chance has put the blocks of most pairs into one order."""
    outcomes = []
    for seed in range(200):
        trial = Trial(SETTINGS, seed=seed)
        for window in range(24):
            assert trial.next_window() == PaceArm.AA
            trial.add_window([STEP_NS * (1 + 0.03 * (window // 2 % 2) + 1e-4 * (window % 5))] * 10)
        outcomes.append(trial.result().outcome)
        assert trial.is_over == (outcomes[-1] == TrialOutcome.NO_CLAIM)
        assert not trial.is_over or trial.next_window() == PaceArm.OFF
    assert 2 <= outcomes.count(TrialOutcome.NO_CLAIM) <= 12  # 2 / 2^6 of them


def test_steps_that_do_not_count_are_left_out() -> None:
    trial = Trial(SETTINGS, seed=0)
    for _ in range(24):
        trial.next_window()
        trial.add_window([STEP_NS] * 9 + [float("nan")])
    found = trial.result()
    assert found.step_off_ns == STEP_NS and found.variation_off == 0
    assert found.aa_effect is not None and found.aa_effect.num_values == 6


def test_a_pair_with_a_block_of_few_steps_is_given_up() -> None:
    trial = Trial(SETTINGS, seed=0)
    for window in range(8):
        trial.next_window()
        trial.add_window([float("nan") if window < 2 else STEP_NS] * 10)
    assert trial.result().aa_effect is None


def test_can_be_ended_from_outside() -> None:
    trial = Trial(SETTINGS, seed=0)
    trial.next_window()
    trial.stop(TrialOutcome.NO_EFFECT)
    trial.add_window([STEP_NS] * 10)
    assert trial.is_over and trial.next_window() == PaceArm.OFF
    assert trial.result().to_json()["step_on_ns"] is None


def test_longer_blocks_hold_from_the_first_paced_pair_on() -> None:
    trial = Trial(SETTINGS, seed=0)
    arms = []
    for _ in range(200):
        if trial.phase == PaceArm.ON:
            trial.windows_per_block = 5
        arms.append(trial.next_window())
        trial.add_window([STEP_NS * (1 + 0.01 * (len(arms) % 7))] * 10)
        if trial.is_over:
            break
    assert arms[:24] == [PaceArm.AA] * 24
    assert len(set(arms[24:29])) == len(set(arms[29:34])) == 1 and arms[24] != arms[29]


def test_all_looks_together_err_as_often_as_stated() -> None:
    values = np.random.default_rng(5).standard_normal((1000, 20))
    missed = []
    for row in values:
        looks = (interval(row[:n], first=6, last=20, level=0.05) for n in range(6, 21))
        missed.append(any(not look.low <= 0 <= look.high for look in looks))
    assert np.mean(missed) == pytest.approx(0.05, abs=0.02)


def test_a_single_look_is_an_ordinary_t_interval() -> None:
    assert looks_constant(8, 8, 0.05) == pytest.approx(1.96, abs=0.03)
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], first=8, last=8, level=0.05)
    assert found.mean == 4.5
    assert found.halfwidth == pytest.approx(2.365 * np.sqrt(6 / 8), rel=0.03)


def test_more_looks_make_wider_intervals() -> None:
    assert 1.96 < looks_constant(6, 10, 0.05) < looks_constant(6, 40, 0.05) < 3.5
