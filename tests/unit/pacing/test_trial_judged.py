"""The trial over few simulated runs of fixed seeds; `make pacing` has the thousands."""

from __future__ import annotations

from dataclasses import replace

from cases import each_case

from experiments.pacing.trial_judged import USUAL, Truth, outcomes_of, simulated
from hpcpace.pace.settings import PaceSettings
from hpcpace.pace.trial import TrialOutcome

QUIET = replace(USUAL, variation=0.02, drift=0.0)
NUM_RUNS = 20


@each_case(
    ("gain", "right"),
    [
        (0.0, {TrialOutcome.NO_EFFECT}),
        (0.03, {TrialOutcome.GAIN}),
        (-0.03, {TrialOutcome.HARM, TrialOutcome.HARM_AT_ONCE, TrialOutcome.NO_EFFECT}),
        (-0.10, {TrialOutcome.HARM_AT_ONCE}),
    ],
)
def test_a_trial_in_quiet_noise_finds_the_truth_in_most_runs(gain, right):
    found = simulated(Truth(name="", gain=gain, times=QUIET), PaceSettings(policy="slack"), num_runs=NUM_RUNS)
    counts = outcomes_of(found)
    assert sum(counts.get(outcome, 0) for outcome in right) >= 0.85 * NUM_RUNS, counts


def test_a_harm_of_ten_percent_ends_on_its_first_blocks():
    found = simulated(Truth(name="", gain=-0.1, times=QUIET), PaceSettings(policy="slack"), num_runs=NUM_RUNS)
    assert sorted(trial.num_blocks_on for trial in found)[NUM_RUNS // 2] <= 2


def test_a_harmful_policy_is_never_kept():
    found = simulated(Truth(name="", gain=-0.03), PaceSettings(policy="slack"), num_runs=NUM_RUNS)
    assert not any(trial.result.is_on for trial in found)


def test_runs_of_one_seed_are_the_same_and_others_differ():
    truth = Truth(name="", gain=0.0)
    settings = PaceSettings(policy="slack")
    first, again = (simulated(truth, settings, num_runs=2, first_seed=5) for _ in range(2))
    assert [trial.result for trial in first] == [trial.result for trial in again]
    assert first[0].result.step_off_ns != first[1].result.step_off_ns
