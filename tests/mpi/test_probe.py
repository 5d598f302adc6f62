"""`hpcpace probe` on several ranks of this host, and a probe inside a training."""

from __future__ import annotations

import json

import pytest

from hpcpace.probe.record import probe_from, read_probe
from hpcpace.probe.sweep import OPERATIONS

PROBE = ("-m", "hpcpace", "probe", "--only", "sweep", "--time", 4)


def test_probes_saves_and_compares_on_two_ranks(mpiexec, tmp_path):
    saved, page = tmp_path / "probe.json", tmp_path / "probe.html"
    result = mpiexec(2, *PROBE, "--json", saved, "--html", page)
    assert result.returncode == 0, result.stderr
    record = read_probe(saved)
    assert [host.ranks for host in record.hosts] == [(0, 1)]
    assert {row.op for row in record.sweep} == {operation.name for operation in OPERATIONS}
    assert {(row.num_nodes, row.num_ranks) for row in record.sweep} == {(1, 2)}
    assert {skew.rank for skew in record.skews} == {0, 1}
    assert result.stdout.startswith("\nhpcpace probe of 1 host, 2 ranks: gloo on CPUs")
    assert "wrong data" not in result.stdout
    assert "default-src 'none'" in page.read_text()
    saved.write_text(json.dumps({**json.loads(saved.read_text()), "cluster": "elsewhere"}))
    refused = mpiexec(2, *PROBE, "--against", saved)
    assert refused.returncode == 2
    assert refused.stderr.count("the probes are of different worlds (cluster elsewhere then, unknown now)") == 1


@pytest.mark.nightly
def test_a_training_is_probed_apart_from_its_own_groups(mpiexec, tmp_path):
    train = ("-m", "hpcpace", "train", "gpt2", "--mesh", "dp=2", "--steps", 4, "--warmup-steps", 1, "--seed", 1)
    losses = []
    for name, variables in (("plain", {}), ("probed", {"HPCPACE_PROBE": "start", "HPCPACE_PROBE_TIME_S": "1"})):
        result = mpiexec(2, *train, "--run-dir", tmp_path / name, **variables)
        assert result.returncode == 0, result.stderr
        losses.append(json.loads((tmp_path / name / "attempt-0" / "result.json").read_text())["losses"])
    assert losses[0] == losses[1]
    assert not (tmp_path / "plain" / "attempt-0" / "probe.json").exists()
    record = probe_from((tmp_path / "probed" / "attempt-0" / "probe.json").read_text())
    assert record.num_ranks == 2 and record.sweep
