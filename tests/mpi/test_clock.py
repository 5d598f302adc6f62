from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cases import only_nightly

PROGRAM = Path(__file__).with_name("world_program.py")


def samples_by_rank(result):
    """Return columns ref_rank, local_ns, offset_ns, rtt_ns, halfwidth_ns, count, (num_samples, 6) per rank."""
    assert result.returncode == 0, result.stderr
    samples = {}
    for line in map(json.loads, result.stdout.splitlines()):
        samples.setdefault(line["rank"], []).append(line["sample"])
    return {rank: np.array(rows) for rank, rows in sorted(samples.items())}


def check_one_true_clock(samples, n, capsys):
    # The hosts are pretended: one clock serves all ranks, so the true offset is 0.
    assert list(samples) == list(range(n))
    for rank in range(1, n):
        offset_ns, rtt_ns, halfwidth_ns = samples[rank][:, 2], samples[rank][:, 3], samples[rank][:, 4]
        assert np.mean(np.abs(offset_ns) <= halfwidth_ns) >= 0.99
        # Sample by sample: where some round trips are short and some long, their medians are of different samples.
        assert np.median(halfwidth_ns / rtt_ns) <= 0.6
        with capsys.disabled():
            print(f"\nrank {rank} of {n}: median half-width {np.median(halfwidth_ns) / 1000:.2f} us")


@pytest.mark.nightly
@pytest.mark.parametrize("n", only_nightly([4], [1, 2]))
def test_the_true_offset_lies_within_the_halfwidth_over_mpi(mpiexec, capsys, n):
    check_one_true_clock(samples_by_rank(mpiexec(n, PROGRAM, "clock_samples")), n, capsys)


def test_the_true_offset_lies_within_the_halfwidth_over_gloo(mpiexec, capsys):
    check_one_true_clock(samples_by_rank(mpiexec(2, PROGRAM, "clock_over_gloo")), 2, capsys)


def test_the_true_offset_lies_within_the_halfwidth_under_torchrun(torchrun, capsys):
    check_one_true_clock(samples_by_rank(torchrun(2, PROGRAM, "clock_over_gloo")), 2, capsys)


def test_ranks_of_one_host_are_not_measured(mpiexec):
    for rows in samples_by_rank(mpiexec(4, PROGRAM, "clock_on_one_host")).values():
        assert not rows[:, 2:].any()


@pytest.mark.parametrize("case", ["stalled_rank", "stalled_rank_over_gloo"])
@pytest.mark.parametrize("n", only_nightly([2], [4]))
def test_a_stalled_rank_leaves_no_one_hanging(mpiexec, n, case):
    result = mpiexec(n, PROGRAM, case)
    assert result.returncode == 0, result.stderr
    lines = {line["rank"]: line for line in map(json.loads, result.stdout.splitlines())}
    assert sorted(lines) == list(range(n))
    for rank in range(n - 1):
        assert "no message" in lines[rank]["error"]
        assert lines[rank]["broken"]
